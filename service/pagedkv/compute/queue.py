"""The ordered device queue: one thread runs the jobs of a backend one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pagedkv.errors import DeviceError

T = TypeVar("T")

_Entry = tuple[Future[Any], Callable[[], Any]]


class DeviceQueue:
    """Runs jobs in the order of submission on a thread of its own.

    A job's exception goes to its future; a job cancelled before it started is skipped. `close` runs what was
    submitted before it and then ends the thread; a later submit raises DeviceError.
    """

    def __init__(self, name: str) -> None:
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job and return its future at once."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise DeviceError("the device queue is closed")
            self._entries.put((future, job))
        return future

    def synchronize(self) -> None:
        """Block until every job submitted so far is complete. A job must not call it."""
        self.submit(lambda: None).result()

    def close(self) -> None:
        """Finish all jobs and end the thread; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._entries.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while (entry := self._entries.get()) is not None:
            _run_job(*entry)
            del entry  # or the last job's arrays would live until the next one comes


def _run_job(future: Future[Any], job: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = job()
    except BaseException as error:  # the queue must survive any job
        future.set_exception(error)
    else:
        future.set_result(result)
