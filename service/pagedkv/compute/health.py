"""Whether a backend may be trusted: the one place that a failure is told to, and asked of.

A job's own error (`DeviceError`, a refused argument, a mistake in a kernel's glue) belongs to the job. `DeviceLost` is
final: it is told once to whoever watches, and is the answer to everything that comes later.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import weakref
from collections.abc import Callable

from pagedkv.errors import DeviceError, DeviceLost, PagedKvError

_log = logging.getLogger(__name__)
_MOST_UNEXPLAINED = 8  # jobs in a row that failed for no reason we know: the next would fail too

_alive: weakref.WeakSet[DeviceHealth] = weakref.WeakSet()


class DeviceHealth:
    """The health of one backend. Every method may be called on any thread."""

    def __init__(self) -> None:
        self._failure: DeviceLost | None = None
        self._watchers: list[Callable[[DeviceLost], None]] = []
        self._lock = threading.Lock()
        self._num_unexplained = 0
        self._process = os.getpid()
        _alive.add(self)

    @property
    def failure(self) -> DeviceLost | None:
        """The first final failure, or None while all is well."""
        return self._failure

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked from the one that made the backend: its threads are not here."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise the failure if there is one."""
        if self._failure is not None:
            raise self._failure

    def fail(self, failure: DeviceLost) -> None:
        """Note a final failure; only the first counts, and is told to the watchers on this thread."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            watchers, self._watchers = self._watchers, []
        _log.error("the device is lost: %s", failure, exc_info=failure.__cause__)
        for told in watchers:
            told(failure)

    def watch(self, told: Callable[[DeviceLost], None]) -> None:
        """Have `told` hear of the failure, once, on the thread that meets it; at once if it is there already."""
        with self._lock:
            if self._failure is None:
                self._watchers.append(told)
                return
        told(self._failure)

    def watch_on(self, loop: asyncio.AbstractEventLoop, told: Callable[[DeviceLost], None]) -> None:
        """The same, on the event loop; a loop that is closed by then hears nothing."""

        def hand_over(failure: DeviceLost) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(told, failure)

        self.watch(hand_over)

    def note_job(self, error: Exception | None) -> None:
        """Take in how a job ended: what is final is noted, and so are many in a row that nothing explains."""
        if isinstance(error, DeviceLost):
            self.fail(error)
        elif error is None:
            self._num_unexplained = 0
        elif not isinstance(error, PagedKvError):
            self._num_unexplained += 1
            if self._num_unexplained >= _MOST_UNEXPLAINED:
                lost = DeviceLost(f"{self._num_unexplained} jobs in a row failed for unknown reasons; see the log")
                lost.__cause__ = error
                self.fail(lost)


def to_job_error(error: BaseException) -> Exception:
    """Return what a job's future may carry: cancellations, exits and stops of iterators would say something else."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, concurrent.futures.CancelledError)):
        return error
    wrapped = DeviceError(f"a job ended by {type(error).__name__}; see the log")
    wrapped.__cause__ = error
    _log.error("a job ended by %s", type(error).__name__, exc_info=error)
    return wrapped


def _refuse_in_child() -> None:
    """Answer everything in a forked child, which has none of a backend's threads and maybe locks that nobody frees."""
    for health in list(_alive):
        health._lock = threading.Lock()
        health._watchers = []
        health._failure = DeviceLost("this process was forked from one with a live backend; start it by `spawn`")


os.register_at_fork(after_in_child=_refuse_in_child)
