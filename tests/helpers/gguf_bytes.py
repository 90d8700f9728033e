"""GGUF files taken apart and put together again byte by byte, with whatever a test wants wrong in them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
FORMATS = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}


@dataclass(frozen=True)
class Typed:
    """A value under a GGUF type; an array's `item` is the type of its items. `raw` bytes are written as they are."""

    kind: int
    value: Any
    item: int | None = None


def pack_string(text: str | bytes) -> bytes:
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def pack_value(typed: Typed) -> bytes:
    if typed.kind == STRING:
        return pack_string(typed.value)
    if typed.kind != ARRAY:
        return struct.pack(f"<{FORMATS[typed.kind]}", typed.value)
    assert typed.item is not None
    head = struct.pack("<IQ", typed.item, len(typed.value))
    if typed.item in FORMATS:
        return head + struct.pack(f"<{len(typed.value)}{FORMATS[typed.item]}", *typed.value)
    return head + b"".join(map(pack_string, typed.value))


@dataclass
class GgufBytes:
    """A file in parts: metadata by key, and everything after it (tensor entries, data)."""

    num_tensors: int
    metadata: dict[str, Typed]
    entries: bytes
    data: bytes

    @classmethod
    def parse(cls, content: bytes) -> GgufBytes:
        """Take a sound file apart."""
        reader = _Reader(content)
        num_tensors, num_keys = reader.unpack("<4xIQQ")[1:]
        metadata = {}
        for _ in range(num_keys):
            key = reader.string()
            metadata[key] = reader.value(reader.unpack("<I")[0])
        start = reader.at
        for _ in range(num_tensors):
            reader.string()
            reader.unpack(f"<{reader.unpack('<I')[0]}QIQ")
        return cls(num_tensors, metadata, content[start : reader.at], content[-(-reader.at // 32) * 32 :])

    def pack(self) -> bytes:
        """Put the file together."""
        head = b"GGUF" + struct.pack("<IQQ", 3, self.num_tensors, len(self.metadata))
        for key, typed in self.metadata.items():
            head += pack_string(key) + struct.pack("<I", typed.kind) + pack_value(typed)
        head += self.entries
        return head + b"\0" * (-len(head) % 32) + self.data


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def unpack(self, format_: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format_, self._content, self.at)
        self.at += struct.calcsize(format_)
        return values

    def string(self) -> str:
        (size,) = self.unpack("<Q")
        self.at += size
        return self._content[self.at - size : self.at].decode()

    def value(self, kind: int) -> Typed:
        if kind == STRING:
            return Typed(kind, self.string())
        if kind != ARRAY:
            return Typed(kind, self.unpack(f"<{FORMATS[kind]}")[0])
        item, count = self.unpack("<IQ")
        values = [self.string() for _ in range(count)] if item == STRING else self.unpack(f"<{count}{FORMATS[item]}")
        return Typed(kind, list(values), item)
