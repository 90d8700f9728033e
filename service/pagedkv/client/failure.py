"""From gRPC status back to the exception that the server raised."""

from __future__ import annotations

import re
from collections.abc import Iterator

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagedkv import errors
from pagedkv.errors import PagedKvError, TransportError

_DOMAIN = "pagedkv"
_INTEGER = re.compile(r"-?[0-9]{1,30}", re.ASCII)


def _all_kinds(kind: type[PagedKvError]) -> Iterator[type[PagedKvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_kinds(child)


_KINDS = {kind.reason: kind for kind in _all_kinds(errors.PagedKvError)}


def to_exception(error: grpc.aio.AioRpcError) -> PagedKvError:
    """Return the server's own exception with its figures as attributes, or a TransportError."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        is_ours = detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == _DOMAIN
        if is_ours and info.reason in _KINDS:
            return _rebuild(info, str(error.details()))
    return TransportError(str(error.details()), code=error.code().name)


def _rebuild(info: error_details_pb2.ErrorInfo, message: str) -> PagedKvError:
    kind = _KINDS[info.reason]
    error = kind.__new__(kind)
    PagedKvError.__init__(error, message, **info.metadata)
    for name, value in info.metadata.items():
        setattr(error, name, int(value) if _INTEGER.fullmatch(value) else value)
    return error
