"""From gRPC status back to the exception that the server raised, or to what went wrong on the way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagedkv import errors
from pagedkv.errors import PagedKvError, TransportError

_DOMAIN = "pagedkv"
_INTEGER = re.compile(r"-?[0-9]{1,30}", re.ASCII)
_MAX_TEXT = 200  # characters of what gRPC says, where nothing better is known

# what gRPC says, searched in this order, and what it means
_MEANINGS: Final[dict[str, str]] = {
    r"CLIENT: (\w+) message larger than max \((\d+) vs. (\d+)\)": (
        "{1} message larger than the client's limit: {2} bytes, max_message_bytes is {3}"
    ),
    r"SERVER: \w+ message larger than max \((\d+) vs. (\d+)\)": (
        "message larger than the server's limit: {1} bytes, limit {2}"
    ),
    r"http1\.x|Expected SETTINGS frame": (
        "{target} answers HTTP/1, not gRPC: that is the metrics port, or no service of ours"
    ),
    r"Connection refused|No such file or directory": "no service at {target}; start one with `pagedkv serve`",
    r"errors resolving|DNS resolution failed": "the host of {target} is not known",
    r"ping timeout|keepalive watchdog": "{target} went silent",
    r"Failed to connect|failed to connect": "{target} cannot be reached",
    r"Cancelling all calls": "the service at {target} was stopped",
    r"Socket closed|Connection reset|GOAWAY|Broken pipe|Stream removed|End of TCP": "the connection to {target} broke",
    r"Deadline Exceeded": "{target} gave no answer in time",
    r"Method not found": "{target} does not know this call; another service, or another version?",
}


def _all_kinds(kind: type[PagedKvError]) -> Iterator[type[PagedKvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_kinds(child)


_KINDS = {kind.reason: kind for kind in _all_kinds(errors.PagedKvError)}


def to_exception(error: grpc.aio.AioRpcError, target: str = "the target") -> PagedKvError:
    """Return the server's own exception with its figures as attributes, or a TransportError that names the target."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status is not None else ():
        is_ours = detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == _DOMAIN
        if is_ours and info.reason in _KINDS:
            return _rebuild(info, str(error.details()))
    return TransportError(_explain(str(error.details()), target), code=error.code().name)


def cut_off(*, is_closed: bool) -> TransportError:
    """Return the error of a call that was cancelled, because its client is closed or otherwise."""
    message = "the client is closed" if is_closed else "the call was cancelled"
    return TransportError(message, code=grpc.StatusCode.CANCELLED.name)


def _explain(said: str, target: str) -> str:
    for pattern, meaning in _MEANINGS.items():
        if found := re.search(pattern, said):
            return meaning.format(said, *found.groups(), target=target)
    return said if len(said) <= _MAX_TEXT else said[: _MAX_TEXT - 3] + "..."


def _rebuild(info: error_details_pb2.ErrorInfo, message: str) -> PagedKvError:
    kind = _KINDS[info.reason]
    error = kind.__new__(kind)
    PagedKvError.__init__(error, message, **info.metadata)
    for name, value in info.metadata.items():
        setattr(error, name, int(value) if _INTEGER.fullmatch(value) else value)
    return error
