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
from pagedkv.compute.queue import take_futures
from pagedkv.errors import DeviceError, DeviceLost

T = TypeVar("T")


class Events:
    """Events, reused; without times they cost the device less. Who waits for one sleeps: it burns no core."""

    def __init__(self, context: Context, *, with_times: bool = False) -> None:
        self._driver = context.driver
        kinds = self._driver.module.CUevent_flags
        times = kinds.CU_EVENT_DEFAULT if with_times else kinds.CU_EVENT_DISABLE_TIMING
        self._flags = int(kinds.CU_EVENT_BLOCKING_SYNC) | int(times)
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
        try:
            self.copy = self._driver.call("cuStreamCreate", flags)
        except DeviceError:
            self._driver.call("cuStreamDestroy", self.compute)
            raise

    def join(self, waiting: Any, earlier: Any) -> None:
        """Let later work of `waiting` start only after the present work of `earlier`."""
        event = self._events.record(earlier)
        self._driver.call("cuStreamWaitEvent", waiting, event, 0)
        self._events.give_back(event)  # a wait refers to the record it saw, not to later ones

    def synchronize(self) -> None:
        """Block until all work enqueued so far is done; for the rare moment when memory in use must come back."""
        for stream in (self.compute, self.copy):
            self._driver.call("cuStreamSynchronize", stream)

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
        self._is_waiter_gone = False
        self.health = DeviceHealth()
        self._finish: list[Callable[[], None]] = []
        self._threads = [
            threading.Thread(target=self._dispatch, name="pagedkv-cuda-dispatch", daemon=True),
            threading.Thread(target=self._wait, name="pagedkv-cuda-waiter", daemon=True),
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:  # the machine has no more threads: the one that runs shall end
            self._jobs.put(None)
            raise DeviceError(f"no thread for the device: {error}") from error

    @property
    def failure(self) -> DeviceLost | None:
        """The final error, after which the device is not to be trusted, or None."""
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
        with self.health.watching_thread(lambda: self._closed, self._take_jobs):
            self._bind()
            while (entry := self._jobs.get()) is not None:
                self._dispatch_one(*entry)
                del entry
        self._pending.put(None)

    def _take_jobs(self) -> list[Future[Any]]:
        with self._lock:
            return take_futures(self._jobs, lambda entry: entry[0])

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
            if isinstance(error, DeviceLost):
                self.health.fail(error)  # now: the next job is about to begin
            self._finish.append(_Raise(error))
        try:
            event = self._mark()
        except DeviceError as caught:
            lost = _lost(caught)  # nobody can tell when the work is done
            self.health.fail(lost)
            future.set_exception(lost)
            return
        with self._lock:
            if not self._is_waiter_gone:
                self._pending.put(_Pending(future, result, event, self._finish))
                return
        future.set_exception(self.health.failure)

    def _mark(self) -> Any:
        """Return an event behind the job's work; None, with that work done, where there is no memory for an event."""
        try:
            return self._events.record(self._streams.compute)
        except DeviceLost:
            raise
        except DeviceError:
            self._streams.synchronize()
            return None

    def _bind(self) -> None:
        try:
            self._context.bind()
        except DeviceError as error:
            self.health.fail(_lost(error))

    def _wait(self) -> None:
        with self.health.watching_thread(lambda: self._closed or self.failure is not None, self._take_pending):
            self._bind()
            while (pending := self._pending.get()) is not None:
                self._complete(pending)
                del pending

    def _take_pending(self) -> list[Future[Any]]:
        with self._lock:
            self._is_waiter_gone = True
            return take_futures(self._pending, lambda pending: pending.future)

    def _complete(self, pending: _Pending) -> None:
        error = self._await(pending.event) or _first_error(pending.finish)
        self.health.note_job(error)
        if error is None:
            pending.future.set_result(pending.result)
        else:
            pending.future.set_exception(error)

    def _await(self, event: Any) -> DeviceLost | None:
        """Wait for an event, if there is one; if that fails the device is lost: work may go on behind our back."""
        if event is None:
            return None
        try:
            self._events.wait(event)
        except DeviceError as error:
            return _lost(error)
        self._events.give_back(event)
        return None


def _lost(error: DeviceError) -> DeviceLost:
    return error if isinstance(error, DeviceLost) else DeviceLost(error.message, **error.details)


def _first_error(actions: list[Callable[[], None]]) -> Exception | None:
    """Run every action, whatever the others do: one of them gives staging memory back."""
    first: Exception | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:
            first = first or to_job_error(error)
    return first


class _Raise:
    """Raises a job's own error once the work it had issued is done."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self) -> None:
        raise self._error
