"""Tasks in child processes: what crashes, hangs or poisons a device's context costs itself and nothing after it."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pagedkv.errors import UnsupportedModel

Perform = Callable[[str], Any]


class Clock:
    """Says when to begin nothing more, so that the table is printed in time."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def is_up(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._ends


def attempt(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or why not: `is_missing` tells a part that is not there from one that failed."""
    try:
        return work()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return not_measured(reason, is_missing=isinstance(error, ImportError | UnsupportedModel))


def not_measured(reason: str, *, is_missing: bool) -> dict[str, Any]:
    """Return the answer of a task that gave none."""
    return {"not_measured": reason, "is_missing": is_missing}


def has_failed(answer: Any) -> bool:
    """Whether an answer says that its task went wrong."""
    return isinstance(answer, dict) and "not_measured" in answer and not answer["is_missing"]


def run_tasks(
    tasks: Sequence[str], perform: Perform, clock: Clock, most_seconds: float = 60
) -> Iterator[tuple[str, Any]]:
    """Yield each task and its answer: what `perform(task)` returned in a child process, or why there is nothing.

    One child does task after task until one fails; then the next child begins with a new context. A task that takes
    longer than `most_seconds` is ended. The caller must not have opened a device.
    """
    child: _Child | None = None
    for task in tasks:
        if clock.is_up:
            yield task, not_measured("the time was up", is_missing=True)
            continue
        child = child or _Child(perform)
        answer = child.ask(task, most_seconds)
        if has_failed(answer):
            child = child.end()
        yield task, answer
    if child is not None:
        child.end()


class _Child:
    def __init__(self, perform: Perform) -> None:
        forking = multiprocessing.get_context("fork")
        self._pipe, other = forking.Pipe()
        self._process = forking.Process(target=_serve, args=(other, self._pipe, perform), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks where libraries have threads
            self._process.start()
        other.close()

    def ask(self, task: str, most_seconds: float) -> Any:
        try:
            self._pipe.send(task)
            if self._pipe.poll(most_seconds):
                return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return not_measured(f"the process ended with code {self._process.exitcode}", is_missing=False)
        return not_measured(f"not done in {most_seconds:.0f} s", is_missing=False)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, other: Connection, perform: Perform) -> None:
    other.close()
    while True:
        task = pipe.recv()
        pipe.send(attempt(lambda task=task: perform(task)))
