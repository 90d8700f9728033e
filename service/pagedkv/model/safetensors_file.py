"""A checked reader of safetensors files and of directories of them.

Format: 8 bytes little-endian header length, a JSON header, then the tensors' bytes
(https://huggingface.co/docs/safetensors). The files are untrusted, as everywhere here: parsing a header takes at most
32 bytes of memory for each of its bytes, and none for the tensors' data.
"""

from __future__ import annotations

import json
import math
import struct
import warnings
from pathlib import Path
from typing import Any

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model.config import Fields
from pagedkv.model.mapped_file import MappedFile, TensorEntry, check_extents, read_bytes
from pagedkv.model.shown import shown

_MAX_HEADER_BYTES = 1 << 25
_MAX_TENSORS = 1 << 16
_MAX_DIMS = 8
_MAX_SIZE = 1 << 62  # of a dimension or an offset
_LISTED = 8  # file names in an error
_KINDS = {"F32": 4, "F16": 2, "BF16": 2}
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


class SafetensorsFile:
    """Tensors of one file. A failed check raises InvalidModelFile naming file and tensor, and closes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        try:
            self.tensors = self._read_tensors()
        except BaseException:
            self._file.close()
            raise

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy. Raises KeyError for a name that is not there."""
        return self._file.weight(self.tensors[name])

    def close(self) -> None:
        """Unmap; only while no weight has been given out."""
        self._file.close()

    def _read_tensors(self) -> dict[str, TensorEntry]:
        header, data_start = self._read_header()
        if len(header) > _MAX_TENSORS:
            raise InvalidModelFile(f"{self.path}: {len(header)} tensors, at most {_MAX_TENSORS}", file=self.path)
        tensors = {
            name: self._read_entry(name, value, data_start) for name, value in header.items() if name != "__metadata__"
        }
        check_extents(self.path, len(self._file), tensors.values())
        return tensors

    def _read_header(self) -> tuple[dict[str, Any], int]:
        if len(self._file) < 8:
            raise InvalidModelFile(f"{self.path}: {len(self._file)} bytes are no safetensors file", file=self.path)
        (size,) = struct.unpack_from("<Q", self._file.buffer, 0)
        if size > min(_MAX_HEADER_BYTES, len(self._file) - 8):
            raise InvalidModelFile(
                f"{self.path}: a header of {size} bytes does not fit a file of {len(self._file)} bytes",
                file=self.path,
            )
        return parse_json(self.path, self._file[8 : 8 + size]), 8 + size

    def _read_entry(self, name: str, value: Any, data_start: int) -> TensorEntry:
        dtype, shape, begin, end = self._read_fields(name, value)
        if dtype not in _KINDS:
            raise UnsupportedModel(
                f"{self.path}: tensor {shown(name)} has type {shown(dtype)[1:-1]}; supported: {', '.join(_KINDS)}",
                file=self.path,
                tensor=name,
            )
        num_bytes = math.prod(shape) * _KINDS[dtype]
        if 0 in shape:
            raise self._fail(name, f"has a zero dimension: {list(shape)}")
        if end - begin != num_bytes:
            raise self._fail(name, f"has {end - begin} bytes, its shape {list(shape)} of {dtype} needs {num_bytes}")
        return TensorEntry(name, dtype, shape, data_start + begin, num_bytes)

    def _read_fields(self, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
        """Return dtype, shape, begin and end."""
        fields = Fields(
            self.path, value if isinstance(value, dict) else {}, block=f"tensor {shown(name)} (malformed): "
        )
        dtype, shape, offsets = fields.choice("dtype", "none"), fields.get("shape"), fields.get("data_offsets")
        if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
            raise fields.fail("shape", f"must list at most {_MAX_DIMS} whole numbers from 0 to {_MAX_SIZE}")
        if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise fields.fail("data_offsets", f"must be [begin, end], whole numbers from 0 to {_MAX_SIZE}")
        return dtype, tuple(shape), *offsets

    def _fail(self, name: str, what: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self.path}: tensor {shown(name)} {what}", file=self.path, tensor=name)


class SafetensorsDirectory:
    """Every weight of a Hugging Face directory: one `model.safetensors`, or the shards its index names.

    Only those are read; other safetensors files are ignored with a warning. All headers are checked before the
    constructor returns.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        weight_map = _read_index(directory)
        names = sorted(set(weight_map.values())) if weight_map else [_SINGLE_FILE]
        _check_present(directory, names)
        self._files: dict[str, SafetensorsFile] = {}
        try:
            for name in names:
                self._files[name] = SafetensorsFile(directory / name)
            self._owners = self._find_owners(weight_map)
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Entry of every tensor by name."""
        return {name: file.tensors[name] for name, file in self._owners.items()}

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, the directory for one that no file holds."""
        return self._owners[name].path if name in self._owners else self._directory

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy. Raises KeyError for a name that is not there."""
        return self._owners[name].weight(name)

    def close(self) -> None:
        """Unmap all; only while no weight has been given out."""
        for file in self._files.values():
            file.close()

    def _find_owners(self, weight_map: dict[str, str]) -> dict[str, SafetensorsFile]:
        if not weight_map:
            (file,) = self._files.values()
            return dict.fromkeys(file.tensors, file)
        for name, file_name in weight_map.items():
            if name not in self._files[file_name].tensors:
                path = self._files[file_name].path
                raise InvalidModelFile(
                    f"{path}: the index places tensor {shown(name)} here, but it is missing", file=path, tensor=name
                )
        return {name: self._files[file_name] for name, file_name in weight_map.items()}


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidModelFile naming the file."""
    try:
        value = json.loads(data, object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise InvalidModelFile(f"{path}: not valid JSON: {error}", file=path) from error
    if not isinstance(value, dict):
        raise InvalidModelFile(f"{path}: must hold a JSON object", file=path)
    return value


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that occurs twice: which of its values counts is anybody's guess."""
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(name)} occurs twice")
    return value


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _read_index(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name; empty without an index."""
    path = directory / _INDEX_FILE
    if not path.is_file():
        return {}
    fields = Fields(path, parse_json(path, read_bytes(path, _MAX_HEADER_BYTES)))
    weight_map: Any = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fields.fail("weight_map", "must map tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidModelFile(f"{path}: tensor {shown(tensor)} has no plain file name: {shown(name)}", file=path)
    return weight_map


def _check_present(directory: Path, names: list[str]) -> None:
    found = {path.name for path in directory.glob("*.safetensors")}
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidModelFile(
            f"{directory}: missing weight files: {_listed(missing)}; there are: {_listed(sorted(found))}",
            file=directory,
            missing=",".join(missing[:_LISTED]),
        )
    stray = sorted(found - set(names))
    if stray:
        warnings.warn(f"{directory}: ignored weight files that the model does not name: {stray}", stacklevel=4)


def _listed(names: list[str]) -> str:
    shown_names = ", ".join(names[:_LISTED]) or "none"
    return shown_names if len(names) <= _LISTED else f"{shown_names} and {len(names) - _LISTED} more"
