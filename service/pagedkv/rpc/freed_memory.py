"""Giving memory back: the C library keeps what large messages leave behind, in an arena for each thread."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

_MOST_KEPT: Final = 256 * 2**20  # bytes of messages after which memory is given back at once
_WORTH_IT: Final = 8 * 2**20  # and after a while: what is given back costs time when the next message needs it
_SECONDS: Final = 1.0


def find_trim() -> Callable[[int], int] | None:
    """Return glibc's function that gives freed memory back, None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class FreedMemory:
    """Notes messages that are done with, and gives their memory back on a thread. Used on the loop."""

    def __init__(self, trim: Callable[[int], int] | None, seconds: float = _SECONDS) -> None:
        self._trim = trim
        self._seconds = seconds
        self._num_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_trimming = False

    def note(self, num_bytes: int) -> None:
        """Note a message that is done with."""
        self._num_bytes += num_bytes
        if self._trim is None or self._is_trimming or self._num_bytes < _WORTH_IT:
            return
        if self._num_bytes >= _MOST_KEPT:
            self._give_back()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._give_back)

    def _give_back(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._trim is not None
        self._num_bytes, self._timer, self._is_trimming = 0, None, True
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0).add_done_callback(self._end)

    def _end(self, done: asyncio.Future[int]) -> None:
        self._is_trimming = False
