"""A checked reader of GGUF files (versions 2 and 3, little-endian).

The file is untrusted: every length, count and offset is compared with the file's size before it is used. Reading a
header takes at most 16 bytes of memory for each of its bytes, and none for the tensors' data.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model.mapped_file import MappedFile, TensorEntry, check_extents
from pagedkv.model.shown import shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMS = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 16
_MAX_STRINGS = 1 << 22  # in all arrays together; the largest vocabularies with their merges have a quarter of it

# GGUF value types: number -> struct format
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZE = struct.Struct("<Q")  # of a string

# GGML tensor types that are read: number -> (name, elements a block, bytes a block). Integers hold no weights, and
# Q8_1, Q8_K and Q1_0 the gguf package does not turn into numbers.
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_SIZES = {kind: (block, block_bytes) for kind, block, block_bytes in _TENSOR_TYPES.values()}


def kind_bytes(kind: str, num_weights: int) -> int:
    """Return the bytes that whole rows of weights take in a kind named above."""
    block, block_bytes = _SIZES[kind]
    return num_weights // block * block_bytes


class GgufSource(Protocol):
    """A model's metadata and tensors, in one GGUF file or in several."""

    path: Path
    metadata: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Entry of every tensor by name."""

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, or would."""

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy."""

    def close(self) -> None:
        """Unmap; only while no weight has been given out."""


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

    def path_of(self, name: str) -> Path:
        """Return this file."""
        return self.path

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
        self._place = ""  # what is being read, for errors
        self._num_strings = 0
        num_tensors, num_keys = self._read_counts()
        self._alignment = _DEFAULT_ALIGNMENT
        self.metadata = self._read_metadata(num_keys)
        self.tensors = self._read_tensors(num_tensors)

    def _fail(self, what: str, tensor: str | None = None) -> InvalidModelFile:
        return InvalidModelFile(f"{self._path}: {what}", file=self._path, tensor=tensor, offset=self._at)

    def _unpack(self, format_: str) -> Any:
        size = struct.calcsize(format_)
        if self._at + size > len(self._file):
            raise self._fail(f"the file ends inside its header, at byte {len(self._file)}{self._place}")
        (value,) = struct.unpack_from(format_, self._file.buffer, self._at)
        self._at += size
        return value

    def _read_string(self, limit: int | None = None) -> str:
        size = self._unpack("<Q")
        left = len(self._file) - self._at
        if size > (left if limit is None else min(limit, left)):
            raise self._fail(f"a string of {size} bytes does not fit the file{self._place}")
        data = self._file[self._at : self._at + size]
        self._at += size
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fail(f"a string is not UTF-8: {shown(data)}{self._place}") from error

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
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise self._fail(f"{num_tensors} tensors and {num_keys} keys; at most {_MAX_TENSORS} and {_MAX_KEYS}")
        return num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_string(_MAX_NAME_BYTES)
            self._place = f", in key {shown(key)}"
            if key in metadata:
                raise self._fail(f"key {shown(key)} occurs twice")
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
        raise self._fail(f"key {shown(key)} has unknown value type {value_type}")

    def _read_array(self, key: str) -> list[Any]:
        item_type, count = self._unpack("<I"), self._unpack("<Q")
        format_ = _SCALARS.get(item_type)
        if format_ is None and item_type != _STRING:
            raise self._fail(f"key {shown(key)} has an array of unsupported item type {item_type}")
        item_size = 8 if format_ is None else struct.calcsize(format_)
        if count * item_size > len(self._file) - self._at:
            raise self._fail(f"key {shown(key)}: an array of {count} items does not fit the file")
        return self._read_strings(key, count) if format_ is None else self._read_numbers(format_, count)

    def _read_strings(self, key: str, count: int) -> list[str]:
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise self._fail(f"key {shown(key)}: {self._num_strings} strings in arrays, at most {_MAX_STRINGS}")
        strings: list[str] = []
        buffer, end, read_size = self._file.buffer, len(self._file), _SIZE.unpack_from
        for _ in range(count):  # as `_read_string`, which says what is wrong where something is
            start = self._at + _SIZE.size
            size = read_size(buffer, self._at)[0] if start <= end else end
            if size > end - start:
                self._read_string()
            try:
                strings.append(buffer[start : start + size].decode("utf-8"))
            except UnicodeDecodeError:
                self._read_string()
            self._at = start + size
        return strings

    def _read_numbers(self, format_: str, count: int) -> list[Any]:
        """Return Python numbers; those of one or two bytes come out of a table, for each would take forty by itself."""
        start, size = self._at, struct.calcsize(format_)
        self._at += count * size
        data, dtype = self._file[start : self._at], np.dtype(format_)
        if size > 2:
            return list(np.frombuffer(data, dtype).tolist())
        table = np.arange(1 << (8 * size), dtype=f"<u{size}").view(dtype).tolist()
        return [table[code] for code in memoryview(data).cast("B" if size == 1 else "H")]

    def _read_tensors(self, num_tensors: int) -> dict[str, TensorEntry]:
        relative = [self._read_tensor() for _ in range(num_tensors)]
        data_start = -(-self._at // self._alignment) * self._alignment
        tensors: dict[str, TensorEntry] = {}
        for entry in relative:
            if entry.name in tensors:
                raise self._fail(f"tensor {shown(entry.name)} occurs twice", entry.name)
            start = data_start + entry.start
            tensors[entry.name] = TensorEntry(entry.name, entry.kind, entry.shape, start, entry.num_bytes)
        check_extents(self._path, len(self._file), tensors.values())
        return tensors

    def _read_tensor(self) -> TensorEntry:
        """Return the next entry, with its start relative to the data section."""
        name = self._read_string(_MAX_NAME_BYTES)
        self._place = f", in tensor {shown(name)}"
        num_dims = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fail(f"tensor {shown(name)} has {num_dims} dimensions, must be 1 to {_MAX_DIMS}", name)
        dims = [self._unpack("<Q") for _ in range(num_dims)]
        type_number, offset = self._unpack("<I"), self._unpack("<Q")
        if 0 in dims:
            raise self._fail(f"tensor {shown(name)} has a zero dimension: {dims}", name)
        if offset % self._alignment:
            raise self._fail(f"tensor {shown(name)}: offset {offset} is not a multiple of {self._alignment}", name)
        kind, block, block_bytes = self._find_type(name, type_number)
        if dims[0] % block:
            raise self._fail(
                f"tensor {shown(name)}: rows of {dims[0]} elements are no multiple of {kind}'s {block}", name
            )
        num_bytes = math.prod(dims) // block * block_bytes
        return TensorEntry(name, kind, tuple(reversed(dims)), offset, num_bytes)

    def _find_type(self, name: str, number: int) -> tuple[str, int, int]:
        if number in _TENSOR_TYPES:
            return _TENSOR_TYPES[number]
        import gguf  # for the name alone; slow to import

        try:
            type_name = gguf.GGMLQuantizationType(number).name
        except ValueError:
            raise self._fail(f"tensor {shown(name)} has unknown type {number}", name) from None
        supported = ", ".join(kind for kind, _, _ in _TENSOR_TYPES.values())
        raise UnsupportedModel(
            f"{self._path}: tensor {shown(name)} has type {type_name}; supported: {supported}",
            file=self._path,
            tensor=name,
            type=type_name,
        )
