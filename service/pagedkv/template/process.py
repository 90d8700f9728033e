"""Render chat templates in processes of their own, which may be ended at any time.

Why processes: a template is a program of whoever made the model file, and its loops are driven by what clients send.
In a thread it would hold the interpreter's lock against the event loop, and one call into C (a power, a join, a
format) cannot be ended at all; the kernel bounds a process's time and memory whatever it is at. The process is
executed anew, never forked, so it holds nothing of the backend. It starts with the first conversation (0.1 to 0.2 s)
and stays; the next conversations cost a fraction of a millisecond.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import pagedkv
from pagedkv.template.worker import read_frame, write_frame

MAX_PROCESSES: Final = 2
CPU_SECONDS = 2.0  # of one rendering, its compilation included
_WALL_SECONDS: Final = 60.0  # for a process that gets no time on a busy machine
_START = "from pagedkv.template.worker import main; main()"


class RenderingFailed(Exception):
    """The template refuses the conversation, or was ended for its time or memory."""


class TemplateProcesses:
    """One template and the processes that render it. Safe to call from any thread."""

    def __init__(self, source: str, special: Mapping[str, str | Sequence[str]]) -> None:
        self._setup = json.dumps({"source": source, "special": special, "cpu_seconds": CPU_SECONDS}).encode()
        self._places = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: deque[_Process] = deque()

    def render(self, request: dict[str, Any]) -> tuple[str, list[int]]:
        """Return the text and its runs (see `runs_of`). Blocks: not for the event loop. Raises RenderingFailed."""
        frame = json.dumps(request).encode()
        with self._places:
            process = self._take()
            answer = process.ask(frame)
            self._idle.append(process)
        head, _, text = answer.partition(b"\n")
        outcome = json.loads(head)
        if "error" in outcome:
            raise RenderingFailed(outcome["error"])
        return text.decode("utf-8"), outcome["runs"]

    def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
        try:
            return _Process(self._setup)
        except OSError as error:
            raise RenderingFailed(f"its process does not start: {error}") from error


class _Process:
    def __init__(self, setup: bytes) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # a terminal's interrupt is for the server, which drains
        )
        self._end = weakref.finalize(self, _end, self._child)
        self._setup: bytes | None = setup

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, frame: bytes) -> bytes:
        """Return the answer; a process that does not give one is ended."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            if self._setup is not None:
                write_frame(self._child.stdin, self._setup)
                self._setup = None
            write_frame(self._child.stdin, frame)
            answer = read_frame(self._child.stdout) if _is_readable(self._child.stdout) else None
        except OSError:  # the process is gone
            answer = None
        if answer is None:
            self._end()
            raise RenderingFailed(f"it takes more than {CPU_SECONDS:g} s of processor time, or ends its process")
        return answer


def _is_readable(pipe: IO[bytes]) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(_WALL_SECONDS * 1_000))


def _environment() -> dict[str, str]:
    """Nothing of ours but where modules are found."""
    found = [str(Path(pagedkv.__file__).parents[1]), *filter(None, sys.path)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(found)), "LC_ALL": "C.UTF-8"}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and give back what it holds."""
    child.kill()
    child.wait()
    for pipe in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(OSError):  # what it had not read yet
            pipe.close()
