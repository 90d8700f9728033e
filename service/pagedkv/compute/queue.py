"""The ordered device queue: one thread runs the jobs of a backend one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pagedkv.compute.health import DeviceHealth, to_job_error
from pagedkv.errors import DeviceError, DeviceLost

T = TypeVar("T")

_Entry = tuple[Future[Any], Callable[[], Any]]


class DeviceQueue:
    """Runs jobs in the order of submission on a thread of its own, and tells `health` how they end.

    A job's exception goes to its future; a job cancelled before it started is skipped. `close` runs what was
    submitted before it and then ends the thread; a later submit raises DeviceError. Once the device is lost, or the
    thread has ended for any other reason than `close`, every job is answered by DeviceLost.
    """

    def __init__(self, name: str, health: DeviceHealth | None = None) -> None:
        self._health = health or DeviceHealth()
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job and return its future at once. Raises DeviceLost, DeviceError once closed."""
        self._health.check()
        future: Future[T] = Future()
        with self._lock:
            self._health.check()
            if self._closed:
                raise DeviceError("the device queue is closed")
            self._entries.put((future, job))
        return future

    def synchronize(self) -> None:
        """Block until every job submitted so far is complete. A job must not call it."""
        self.submit(lambda: None).result()

    def close(self) -> None:
        """Finish all jobs and end the thread; idempotent. Does nothing in a forked child, which has no such thread."""
        if self._health.is_foreign:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while (entry := self._entries.get()) is not None:
                self._run_job(*entry)
                del entry  # or the last job's arrays would live until the next one comes
        except BaseException as error:  # nothing here raises: somebody ended the thread
            cause = error
        if cause is not None or not self._closed:
            lost = DeviceLost("the device's thread has ended")
            lost.__cause__ = cause
            self._health.fail(lost)
            self._answer_rest()

    def _run_job(self, future: Future[Any], job: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._health.failure is not None:
            future.set_exception(self._health.failure)
            return
        try:
            result = job()
        except BaseException as raised:  # the queue must survive any job
            error = to_job_error(raised)
            self._health.note_job(error)
            future.set_exception(error)
        else:
            self._health.note_job(None)
            future.set_result(result)

    def _answer_rest(self) -> None:
        """Answer what nobody will run; submit puts nothing in behind it."""
        with self._lock:
            try:
                while True:
                    entry = self._entries.get_nowait()
                    if entry is not None and entry[0].set_running_or_notify_cancel():
                        entry[0].set_exception(self._health.failure)
            except Empty:
                return
