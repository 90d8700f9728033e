"""Tokenising and rendering away from the event loop, on threads of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pagedkv.errors import QuotaExceeded

T = TypeVar("T")


class TextWork:
    """Runs jobs off the loop, `num_threads` at a time and no more than `max_waiting` in line.

    The threads are its own: the engine's sampling, which uses those of the loop, never waits behind a long text.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"pagedkv-{name}")
        self._name = name
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, job: Callable[[], T]) -> T:
        """Return what the job returns; a cancelled one that has not begun never runs. Raises QuotaExceeded."""
        limit = self._max_waiting
        if self._num_waiting >= limit:
            raise QuotaExceeded(f"{limit} {self._name} wait already", field="max_waiting", limit=limit)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, job)
        finally:
            self._num_waiting -= 1
