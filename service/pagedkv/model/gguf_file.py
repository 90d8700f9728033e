"""A checked reader of GGUF files (versions 2 and 3, little-endian).

The file is untrusted: every length, count and offset is compared with the file's size before it is used.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model.mapped_file import MappedFile, TensorEntry, check_extents

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1 << 16

# GGUF value types: number -> struct format
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9

# GGML tensor types that a backend takes: number -> (name, elements a block, bytes a block)
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


class GgufFile:
    """Metadata and tensors of one GGUF file.

    `metadata` maps keys to Python values, `tensors` maps names to entries. A file that fails a check raises
    InvalidModelFile and is closed; an unknown tensor type raises UnsupportedModel.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            header = _Header(path, self._file)
            self.metadata: dict[str, Any] = header.metadata
            self.tensors: dict[str, TensorEntry] = header.tensors
        except BaseException:
            self._file.close()
            raise

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy. Raises KeyError for a name that is not there."""
        return self._file.weight(self.tensors[name])

    def close(self) -> None:
        """Unmap; only while no weight has been given out."""
        self._file.close()


class _Header:
    """One pass over the header: counts, metadata, tensor entries."""

    def __init__(self, path: Path, file: MappedFile) -> None:
        self._path = path
        self._file = file
        self._at = 0
        num_tensors, num_keys = self._read_counts()
        self._alignment = _DEFAULT_ALIGNMENT
        self.metadata = self._read_metadata(num_keys)
        self.tensors = self._read_tensors(num_tensors)

    def _fail(self, what: str, tensor: str | None = None) -> InvalidModelFile:
        return InvalidModelFile(f"{self._path}: {what}", file=self._path, tensor=tensor, offset=self._at)

    def _unpack(self, format_: str) -> Any:
        size = struct.calcsize(format_)
        if self._at + size > len(self._file):
            raise self._fail(f"the file ends inside its header, at byte {len(self._file)}")
        (value,) = struct.unpack_from(format_, self._file.buffer, self._at)
        self._at += size
        return value

    def _read_string(self, limit: int | None = None) -> str:
        size = self._unpack("<Q")
        left = len(self._file) - self._at
        if size > (left if limit is None else min(limit, left)):
            raise self._fail(f"a string of {size} bytes does not fit the file")
        data = self._file[self._at : self._at + size]
        self._at += size
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fail("a string is not UTF-8") from error

    def _read_counts(self) -> tuple[int, int]:
        magic = self._file[0:4]
        if magic != _MAGIC:
            raise self._fail(f"not a GGUF file: it begins with {magic!r}")
        self._at = len(_MAGIC)
        version = self._unpack("<I")
        if version not in _VERSIONS:
            kind = "big-endian or unknown" if version >= 1 << 16 else "unsupported"
            raise self._fail(f"GGUF version {version} is {kind}; supported: {_VERSIONS}")
        num_tensors, num_keys = self._unpack("<Q"), self._unpack("<Q")
        if max(num_tensors, num_keys) > len(self._file):  # each entry takes more than a byte
            raise self._fail(f"{num_tensors} tensors and {num_keys} keys do not fit the file")
        return num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string(_MAX_NAME_BYTES)
            if key in metadata:
                raise self._fail(f"key {key!r} occurs twice")
            value_type = self._unpack("<I")
            metadata[key] = self._read_value(key, value_type)
            if key == "general.alignment":
                self._alignment = self._check_alignment(value_type, metadata[key])
        return metadata

    def _check_alignment(self, value_type: int, value: Any) -> int:
        if value_type != _UINT32:
            raise self._fail(f"general.alignment has value type {value_type}, must be uint32")
        if not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self._fail(f"general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, got {value}")
        return int(value)

    def _read_value(self, key: str, value_type: int) -> Any:
        if value_type in _SCALARS:
            return self._unpack(_SCALARS[value_type])
        if value_type == _STRING:
            return self._read_string()
        if value_type == _ARRAY:
            return self._read_array(key)
        raise self._fail(f"key {key!r} has unknown value type {value_type}")

    def _read_array(self, key: str) -> list[Any]:
        item_type, count = self._unpack("<I"), self._unpack("<Q")
        format_ = _SCALARS.get(item_type)
        item_size = 8 if format_ is None else struct.calcsize(format_)
        if count * item_size > len(self._file) - self._at:
            raise self._fail(f"key {key!r}: an array of {count} items does not fit the file")
        if item_type == _STRING:
            return [self._read_string() for _ in range(count)]
        if format_ is None:
            raise self._fail(f"key {key!r} has an array of unsupported item type {item_type}")
        values = struct.unpack_from(f"<{count}{format_[1]}", self._file.buffer, self._at)
        self._at += count * item_size
        return list(values)

    def _read_tensors(self, num_tensors: int) -> dict[str, TensorEntry]:
        relative = [self._read_tensor() for _ in range(num_tensors)]
        data_start = -(-self._at // self._alignment) * self._alignment
        tensors: dict[str, TensorEntry] = {}
        for entry in relative:
            if entry.name in tensors:
                raise self._fail(f"tensor {entry.name!r} occurs twice", entry.name)
            start = data_start + entry.start
            tensors[entry.name] = TensorEntry(entry.name, entry.kind, entry.shape, start, entry.num_bytes)
        check_extents(self._path, len(self._file), tensors.values())
        return tensors

    def _read_tensor(self) -> TensorEntry:
        """Return the next entry, with its start relative to the data section."""
        name = self._read_string(_MAX_NAME_BYTES)
        num_dims = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fail(f"tensor {name!r} has {num_dims} dimensions, must be 1 to {_MAX_DIMS}", name)
        dims = [self._unpack("<Q") for _ in range(num_dims)]
        type_number, offset = self._unpack("<I"), self._unpack("<Q")
        if 0 in dims:
            raise self._fail(f"tensor {name!r} has a zero dimension: {dims}", name)
        if offset % self._alignment:
            raise self._fail(f"tensor {name!r}: offset {offset} is not a multiple of {self._alignment}", name)
        kind, block, block_bytes = self._find_type(name, type_number)
        if dims[0] % block:
            raise self._fail(f"tensor {name!r}: rows of {dims[0]} elements are no multiple of {kind}'s {block}", name)
        num_bytes = math.prod(dims) // block * block_bytes
        return TensorEntry(name, kind, tuple(reversed(dims)), offset, num_bytes)

    def _find_type(self, name: str, number: int) -> tuple[str, int, int]:
        if number in _TENSOR_TYPES:
            return _TENSOR_TYPES[number]
        import gguf  # for the name alone; slow to import

        try:
            type_name = gguf.GGMLQuantizationType(number).name
        except ValueError:
            raise self._fail(f"tensor {name!r} has unknown type {number}", name) from None
        supported = ", ".join(kind for kind, _, _ in _TENSOR_TYPES.values())
        raise UnsupportedModel(
            f"{self._path}: tensor {name!r} has type {type_name}; supported: {supported}",
            file=self._path,
            tensor=name,
            type=type_name,
        )
