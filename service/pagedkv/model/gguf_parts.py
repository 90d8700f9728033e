"""A model split over several GGUF files, as llama.cpp's gguf-split and converters write it.

The parts are called `name-00001-of-00003.gguf`. Each holds the keys `split.no` (from 0), `split.count` and
`split.tensors.count` (tensors of all parts together); the other metadata stands in the first. Nothing in the format
says that two parts belong to one model: a foreign part is known by its counts, by metadata that contradicts the first
part's, and by tensors that another part has too, that are missing, or whose shape the model does not have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pagedkv.compute.backend import WeightData
from pagedkv.errors import InvalidModelFile
from pagedkv.model.config import Fields
from pagedkv.model.gguf_file import GgufFile, GgufSource
from pagedkv.model.mapped_file import TensorEntry
from pagedkv.model.shown import shown

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_PREFIX = "split."
_MAX_PARTS = 1000
_MAX_LISTED = 400  # characters


def open_gguf(path: Path) -> GgufSource:
    """Open the whole model that a file is, or is a part of. Raises InvalidModelFile naming the part that is wrong."""
    file = GgufFile(path)
    try:
        count = _split_fields(file).count("count", 1, _MAX_PARTS)
    except BaseException:
        file.close()
        raise
    if count == 1:
        return file
    file.close()
    return GgufParts(_part_paths(path, count))


class GgufParts:
    """Implements GgufSource over the parts of one model; `path` and `metadata` are the first part's."""

    def __init__(self, paths: list[Path]) -> None:
        self.path = paths[0]
        self._files: list[GgufFile] = []
        try:
            for path in paths:
                self._files.append(GgufFile(path))
                self._check_part(self._files[-1], len(paths))
            self._owners = self._find_owners()
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, Any] = self._files[0].metadata

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Entry of every tensor by name; a start counts from the beginning of the tensor's own part."""
        return {name: file.tensors[name] for name, file in self._owners.items()}

    def path_of(self, name: str) -> Path:
        """Return the part that holds a tensor, the first for one that no part holds."""
        return self._owners.get(name, self._files[0]).path

    def weight(self, name: str) -> WeightData:
        """Return a tensor as stored, without a copy. Raises KeyError for a name that is not there."""
        return self._owners[name].weight(name)

    def close(self) -> None:
        """Unmap all; only while no weight has been given out."""
        for file in self._files:
            file.close()

    def _check_part(self, file: GgufFile, count: int) -> None:
        first, number = self._files[0], len(self._files) - 1
        fields = _split_fields(file)
        if fields.count("count", 1, _MAX_PARTS) != count:
            raise fields.fail("count", f"must be {count}, as in {first.path.name}")
        total = _split_fields(first).get("tensors.count")
        if fields.get("tensors.count") != total:
            raise fields.fail("tensors.count", f"must be {shown(total)}, as in {first.path.name}")
        if fields.count("no", least=0) != number:
            raise fields.fail("no", f"must be {number}: the part is of another model, or has another's name")
        for key, value in file.metadata.items() if file is not first else ():
            if not key.startswith(_PREFIX) and first.metadata.get(key, value) != value:
                raise Fields(file.path, file.metadata).fail(
                    key,
                    f"contradicts {first.path.name}, which has {shown(first.metadata[key])}: a part of another model",
                )

    def _find_owners(self) -> dict[str, GgufFile]:
        owners: dict[str, GgufFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in owners:
                    raise InvalidModelFile(
                        f"{file.path}: tensor {shown(name)} is in {owners[name].path.name} too: one is foreign",
                        file=file.path,
                        tensor=name,
                    )
                owners[name] = file
        stated = _split_fields(self._files[0]).count("tensors.count", len(owners), least=0)
        if stated != len(owners):
            held = ", ".join(f"{file.path.name} {len(file.tensors)}" for file in self._files)
            raise InvalidModelFile(
                f"{self.path}: split.tensors.count is {stated}, but the parts hold {len(owners)} tensors, "
                f"so one is of another model: {held[:_MAX_LISTED]}",
                file=self.path,
            )
        return owners


def _split_fields(file: GgufFile) -> Fields:
    return Fields(file.path, file.metadata, _PREFIX)


def _part_paths(path: Path, count: int) -> list[Path]:
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        wanted = f"NAME-00001-of-{count:05d}.gguf"
        raise InvalidModelFile(
            f"{path}: is one part of {count} by its split.count, so must be called {wanted}", file=path
        )
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise InvalidModelFile(
            f"{path}: missing parts: {shown(', '.join(missing))}", file=path, missing=",".join(missing[:16])
        )
    return paths
