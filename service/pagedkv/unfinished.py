"""What is half done, and is undone if a signal ends the process in the middle of it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

_undo: list[Callable[[], object]] = []  # of the process, as signals are; the last to begin is undone first


@contextmanager
def undone_if_ended(undo: Callable[[], object]) -> Iterator[None]:
    """Have `undo` called if the process is ended by `end_process` while the block runs."""
    _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


def end_process(code: int) -> NoReturn:
    """Undo what is half done and end the process at once, whatever its other threads are at."""
    for undo in reversed(_undo.copy()):
        with contextlib.suppress(Exception):
            undo()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, also to other processes. Its directory must exist."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    scratch = Path(name)
    with undone_if_ended(lambda: scratch.unlink(missing_ok=True)):
        try:
            with open(handle, "wb") as file:
                file.write(data)
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
