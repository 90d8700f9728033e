"""A file mapped read-only into memory, and the checks on tensors that every format shares."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile
from pagedkv.model.shown import shown


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: bytes [start, start + num_bytes) of its file; `shape` is C-order, rows first."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class MappedFile:
    """Read-only bytes of a file. The descriptor is closed at once; the map lives as long as a tensor of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _require_regular(path)
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise InvalidModelFile(f"{path}: the file is empty", file=path) from error
        except OSError as error:
            raise InvalidModelFile(f"{path}: cannot be read: {error.strerror}", file=path) from error

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, key: slice) -> bytes:
        return self._map[key]

    @property
    def buffer(self) -> mmap.mmap:
        """The map itself, for struct.unpack_from."""
        return self._map

    def close(self) -> None:
        """Unmap; only while no weight of it has been given out."""
        self._map.close()

    def weight(self, entry: TensorEntry) -> WeightData:
        """Return a tensor's bytes without a copy."""
        data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, entry.num_bytes, entry.start)
        return WeightData(entry.kind, entry.shape, data)


def check_extents(path: Path, file_size: int, entries: Iterable[TensorEntry]) -> None:
    """Raise InvalidModelFile naming the first tensor that leaves the file or overlaps another."""
    previous: TensorEntry | None = None
    for entry in sorted(entries, key=lambda entry: entry.start):
        end = entry.start + entry.num_bytes
        if end > file_size:
            raise InvalidModelFile(
                f"{path}: tensor {shown(entry.name)} needs bytes [{entry.start}, {end}) of a file of {file_size} bytes",
                file=path,
                tensor=entry.name,
            )
        if previous is not None and previous.start + previous.num_bytes > entry.start:
            raise InvalidModelFile(
                f"{path}: tensors {shown(previous.name)} and {shown(entry.name)} overlap", file=path, tensor=entry.name
            )
        previous = entry


def read_bytes(path: Path, limit: int) -> bytes:
    """Return a small file's bytes. Raises InvalidModelFile if it cannot be read or is longer than `limit` bytes."""
    _require_regular(path)
    try:
        size = path.stat().st_size
        if size > limit:
            raise InvalidModelFile(f"{path}: has {size} bytes, at most {limit} are read", file=path)
        return path.read_bytes()
    except OSError as error:
        raise InvalidModelFile(f"{path}: cannot be read: {error.strerror}", file=path) from error


def _require_regular(path: Path) -> None:
    """Refuse what a plain read could wait for without end: pipes, devices."""
    if path.exists() and not path.is_file():
        raise InvalidModelFile(f"{path}: is not a regular file", file=path)
