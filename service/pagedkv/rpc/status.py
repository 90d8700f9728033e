"""From exception to gRPC status: one table."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagedkv import errors
from pagedkv.errors import InvalidArgument, OutOfBlocks, OutOfHostBlocks, PagedKvError, QuotaExceeded

DOMAIN = "pagedkv"
_RETRY_SECONDS = 1
_MAX_MESSAGE, _MAX_FIGURE = 300, 100  # characters: peers drop a call whose trailers pass 8 KiB

_CODES: dict[type[PagedKvError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SequenceNotFound: grpc.StatusCode.NOT_FOUND,
    errors.SequenceExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.SequenceTooLong: grpc.StatusCode.OUT_OF_RANGE,
    errors.PositionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SequenceSwapped: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfBlocks: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.OutOfHostBlocks: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SwapUnavailable: grpc.StatusCode.FAILED_PRECONDITION,
    errors.QuotaExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Starting: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.DeviceError: grpc.StatusCode.INTERNAL,
    errors.NumericalError: grpc.StatusCode.ABORTED,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
}


def code_of(error: PagedKvError) -> grpc.StatusCode:
    """Return the status code of an exception: that of its nearest base in the table."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def to_status(error: PagedKvError) -> grpc.Status:
    """Return the status with exactly one ErrorInfo; a BadRequest names the field, a RetryInfo says when to retry."""
    message = _shorten(error.message, _MAX_MESSAGE)
    figures = {name: _shorten(value, _MAX_FIGURE) for name, value in error.details.items()}
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=figures)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, (OutOfBlocks, OutOfHostBlocks, QuotaExceeded)):
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=_RETRY_SECONDS)))
    return _pack(code_of(error), message, details)


def refusal(code: grpc.StatusCode, reason: str, message: str) -> grpc.Status:
    """Return the status of a refusal that is no exception of ours, with its ErrorInfo."""
    return _pack(code, message, [error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)])


def _pack(code: grpc.StatusCode, message: str, details: Sequence[Message]) -> grpc.Status:
    packed = [AnyMessage() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
