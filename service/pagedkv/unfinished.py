"""What is half done, and is undone if a signal ends the process in the middle of it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

_PATIENCE_SECONDS = 0.5  # for what must not be interrupted
_undo: list[Callable[[], object]] = []  # of the process, as signals are; the last to begin is undone first
_uninterrupted = threading.RLock()  # reentrant: a signal's handler runs on a thread that may hold it


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep `end_process` waiting for the block, which must be short."""
    with _uninterrupted:
        yield


@contextmanager
def undone_if_ended(undo: Callable[[], object]) -> Iterator[None]:
    """Have `undo` called if the process is ended by `end_process` while the block runs."""
    with _uninterrupted:
        _undo.append(undo)
    try:
        yield
    finally:
        _undo.remove(undo)


def end_process(code: int) -> NoReturn:
    """Undo what is half done and end the process at once, whatever its other threads are at."""
    _uninterrupted.acquire(timeout=_PATIENCE_SECONDS)  # nothing begins any more
    for undo in reversed(_undo.copy()):
        with contextlib.suppress(Exception):
            undo()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, also to other processes. Its directory must exist."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    remove = partial(scratch.unlink, missing_ok=True)
    with uninterrupted(), undone_if_ended(remove):
        try:
            scratch.write_bytes(data)
            scratch.replace(path)
        finally:
            remove()
