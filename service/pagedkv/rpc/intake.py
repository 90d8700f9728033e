"""From the bytes of a request to its message.

gRPC is given no parsers: what fails in one becomes a traceback in the log and a status without details, and large
messages would be parsed whatever they hold. Here the size is checked first. The elements of large tensors are cut out
and never copied by the parser; what is left is small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from pagedkv.config import require
from pagedkv.errors import InvalidArgument
from pagedkv.rpc.limits import MAX_FIELDS, MAX_GENERATION_BYTES, MAX_PLAIN_BYTES, MAX_SMALL_BYTES
from pagedkv.v1 import kv_cache_pb2, tensor_pb2

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Parser = Callable[[bytes], Any]

LARGE_BYTES: Final = 64 * 2**10  # messages, and tensors in them, up to this the parser may copy
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5  # wire types
_WIDTHS: Final = {_FIXED64: 8, _FIXED32: 4}
_DATA: Final = tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["data"].number


@dataclass(frozen=True, slots=True)
class TensorRequest(Generic[M]):
    """A request, and by field name the elements of the tensors that were cut out of it; small ones stay in place."""

    message: M
    elements: Mapping[str, memoryview] = field(default_factory=dict)

    async def read(self, reader: Callable[..., T], *args: Any) -> T:
        """Return what a function reads from this request, off the loop if that is much."""
        return await asyncio.to_thread(reader, self, *args) if self.elements else reader(self, *args)


class _Field(NamedTuple):
    """A field of a message: [start, end) with its tag, from `body` on without tag and length."""

    number: int
    is_delimited: bool
    start: int
    body: int
    end: int


def parser_of(method: str, parse: Parser) -> Parser:
    """Return what reads the requests of a method such as "/pagedkv.v1.KvCache/Free"; it raises InvalidArgument."""
    service, _, name = method.removeprefix("/").partition("/")
    if service == "pagedkv.v1.KvCache":
        kind = _TENSOR_REQUESTS.get(name)
        return (lambda data: parse_tensors(data, kind)) if kind else (lambda data: _parse(data, parse, MAX_PLAIN_BYTES))
    limit = MAX_GENERATION_BYTES if service == "pagedkv.v1.Generation" else MAX_SMALL_BYTES
    return lambda data: _parse(data, parse, limit)


_TENSOR_REQUESTS: Final[Mapping[str, type[Message]]] = {
    "Append": kv_cache_pb2.AppendRequest,
    "Attend": kv_cache_pb2.AttendRequest,
    "Step": kv_cache_pb2.AttendRequest,
}


def parse_tensors(data: bytes, kind: type[M]) -> TensorRequest[M]:
    """Return the request, its large tensors' elements cut out. Raises InvalidArgument."""
    if len(data) <= LARGE_BYTES:
        return TensorRequest(_parse(data, kind.FromString, MAX_PLAIN_BYTES))
    names = {
        described.number: described.name
        for described in kind.DESCRIPTOR.fields
        if described.message_type is tensor_pb2.Tensor.DESCRIPTOR
    }
    try:
        rest, elements = _cut(memoryview(data), names)
    except (IndexError, DecodeError):
        raise _not_a_message() from None
    return TensorRequest(_parse(rest, kind.FromString, MAX_PLAIN_BYTES), elements)


def _parse(data: bytes, parse: Parser, limit: int) -> Any:
    num_bytes = len(data)
    require(num_bytes <= limit, "request", f"must be at most {limit} bytes, tensors' elements aside", num_bytes, limit)
    try:
        return parse(data)
    except DecodeError:
        raise _not_a_message() from None


def _not_a_message() -> InvalidArgument:
    return InvalidArgument("is not a message of the method's type", field="request")


def _cut(data: memoryview, names: Mapping[int, str]) -> tuple[bytes, dict[str, memoryview]]:
    """Return the message without the elements of its large tensors, and these by the tensor's name."""
    kept: list[bytes | memoryview] = []
    elements: dict[str, memoryview] = {}
    since = 0
    for found in _fields(data):
        name = names.get(found.number) if found.is_delimited else None
        if name is None or found.end - found.body <= LARGE_BYTES:
            continue
        shell, last = _cut_data(data[found.body : found.end])
        kept += (data[since : found.start], delimited(found.number, len(shell)), shell)
        since = found.end
        if last is not None:
            elements[name] = last
    return b"".join((*kept, data[since:])), elements


def _cut_data(tensor: memoryview) -> tuple[bytes, memoryview | None]:
    """Return a tensor without its elements, and these; where they come several times, the last counts."""
    kept, since, last = [], 0, None
    for found in _fields(tensor):
        if found.number == _DATA and found.is_delimited:
            kept.append(tensor[since : found.start])
            since, last = found.end, tensor[found.body : found.end]
    return b"".join((*kept, tensor[since:])), last


def _fields(data: memoryview) -> Iterator[_Field]:
    """Yield the fields of a message. Raises IndexError and DecodeError for what is none."""
    at = count = 0
    while at < len(data):
        count += 1
        require(count <= MAX_FIELDS, "request", f"must hold at most {MAX_FIELDS} fields", count, MAX_FIELDS)
        start = at
        tag, at = _varint(data, at)
        kind = tag & 7
        body = at
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _DELIMITED:
            length, body = _varint(data, at)
            at = body + length
        elif kind in _WIDTHS:
            at += _WIDTHS[kind]
        else:
            raise DecodeError("groups are not used")
        if at > len(data):
            raise DecodeError("a field ends behind the message")
        yield _Field(tag >> 3, kind == _DELIMITED, start, body, at)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number of more than ten bytes")


def delimited(number: int, length: int) -> bytes:
    """Return what stands before the `length` bytes of a field."""
    return _to_varint(number << 3 | _DELIMITED) + _to_varint(length)


def _to_varint(value: int) -> bytes:
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
