"""Streams, events, and jobs whose futures complete when the device has done their work.

A dispatch thread runs jobs in the order of submission; each enqueues work on the compute stream and returns. A waiter
thread turns the event behind a job's work into its future's completion. Neither is the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from pagedkv.compute.cuda.driver import Context
from pagedkv.compute.health import DeviceHealth, to_job_error
from pagedkv.errors import DeviceError, DeviceLost

T = TypeVar("T")


class Events:
    """Events, reused; without times they cost the device less."""

    def __init__(self, context: Context, *, with_times: bool = False) -> None:
        self._driver = context.driver
        kinds = self._driver.module.CUevent_flags
        self._flags = int(kinds.CU_EVENT_DEFAULT if with_times else kinds.CU_EVENT_DISABLE_TIMING)
        self._free: list[Any] = []
        self._lock = threading.Lock()

    def record(self, stream: Any) -> Any:
        """Return an event recorded on the stream."""
        with self._lock:
            event = self._free.pop() if self._free else None
        event = event or self._driver.call("cuEventCreate", self._flags)
        self._driver.call("cuEventRecord", event, stream)
        return event

    def wait(self, event: Any) -> None:
        """Block the calling thread until the event has happened."""
        self._driver.call("cuEventSynchronize", event)

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the time between two events that have happened, and take both back."""
        milliseconds = float(self._driver.call("cuEventElapsedTime", start, end))
        self.give_back(start)
        self.give_back(end)
        return milliseconds / 1e3

    def give_back(self, event: Any) -> None:
        """Keep an event for reuse; nobody may wait for it any more."""
        with self._lock:
            self._free.append(event)

    def destroy(self) -> None:
        """Destroy all events that were given back."""
        while self._free:
            self._driver.call("cuEventDestroy", self._free.pop())


class StreamPair:
    """A compute stream and a copy stream. Each `join` orders one behind what the other holds so far."""

    def __init__(self, context: Context, events: Events) -> None:
        self._driver, self._events = context.driver, events
        flags = int(self._driver.module.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.compute = self._driver.call("cuStreamCreate", flags)
        self.copy = self._driver.call("cuStreamCreate", flags)

    def join(self, waiting: Any, earlier: Any) -> None:
        """Let later work of `waiting` start only after the present work of `earlier`."""
        event = self._events.record(earlier)
        self._driver.call("cuStreamWaitEvent", waiting, event, 0)
        self._events.give_back(event)  # a wait refers to the record it saw, not to later ones

    def destroy(self) -> None:
        """Destroy both streams."""
        for stream in (self.compute, self.copy):
            self._driver.call("cuStreamDestroy", stream)


@dataclass(slots=True)
class _Pending:
    future: Future[Any]
    result: Any
    event: Any
    finish: list[Callable[[], None]]


class JobQueue:
    """Runs jobs in order; see the module. A DeviceLost poisons the queue: nothing is answered after it."""

    def __init__(self, context: Context, streams: StreamPair, events: Events) -> None:
        self._context, self._streams, self._events = context, streams, events
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pending: SimpleQueue[_Pending | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self.health = DeviceHealth()
        self._finish: list[Callable[[], None]] = []
        self._threads = [
            threading.Thread(target=self._dispatch, name="pagedkv-cuda-dispatch", daemon=True),
            threading.Thread(target=self._wait, name="pagedkv-cuda-waiter", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> DeviceLost | None:
        """The error that made the device untrustworthy, if any."""
        return self.health.failure

    def at_completion(self, action: Callable[[], None]) -> None:
        """Run `action` when all work of the running job is done, before its future completes."""
        self._finish.append(action)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job. Raises DeviceLost, DeviceError once closed."""
        self.health.check()
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise DeviceError("the device queue is closed")
            self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Finish all jobs and end both threads; idempotent. Does nothing in a forked child, which has no threads."""
        if self.health.is_foreign:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _dispatch(self) -> None:
        self._context.bind()
        while (entry := self._jobs.get()) is not None:
            self._dispatch_one(*entry)
            del entry
        self._pending.put(None)

    def _dispatch_one(self, future: Future[Any], job: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._finish = []
        if self.health.failure is not None:
            future.set_exception(self.health.failure)
            return
        error: Exception | None
        try:
            result, error = job(), None
        except BaseException as caught:  # the queue must survive any job
            result, error = None, to_job_error(caught)
        if error is not None:
            self._finish.append(_Raise(error))
        try:
            event = self._events.record(self._streams.compute)
        except DeviceError as caught:
            self.health.note_job(caught)
            future.set_exception(error or caught)
            return
        self._pending.put(_Pending(future, result, event, self._finish))

    def _wait(self) -> None:
        self._context.bind()
        while (pending := self._pending.get()) is not None:
            self._complete(pending)
            del pending

    def _complete(self, pending: _Pending) -> None:
        try:
            self._events.wait(pending.event)
            self._events.give_back(pending.event)
            for action in pending.finish:
                action()
        except BaseException as caught:
            error = to_job_error(caught)
            self.health.note_job(error)
            pending.future.set_exception(error)
        else:
            self.health.note_job(None)
            pending.future.set_result(pending.result)


class _Raise:
    """Raises a job's own error once the work it had issued is done."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self) -> None:
        raise self._error
