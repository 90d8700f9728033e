"""Giving memory back: the C library keeps what large messages leave behind, in an arena for each thread."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

_MOST_KEPT: Final = 128 * 2**20  # bytes of messages after which memory is given back, whatever goes on
_MOST_KEPT_IDLE: Final = 8 * 2**20  # and while nothing does


def find_trim() -> Callable[[int], int] | None:
    """Return glibc's function that gives freed memory back, None with another C library."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class FreedMemory:
    """Notes messages that are done with, and gives their memory back once it is much, on a thread. Used on the loop."""

    def __init__(self, trim: Callable[[int], int] | None) -> None:
        self._trim = trim
        self._num_bytes = 0
        self._is_trimming = False

    def note(self, num_bytes: int, *, is_idle: bool) -> None:
        """Note a message that is done with; `is_idle` if no other is under way."""
        self._num_bytes += num_bytes
        most = _MOST_KEPT_IDLE if is_idle else _MOST_KEPT
        if self._trim is None or self._is_trimming or self._num_bytes < most:
            return
        self._num_bytes, self._is_trimming = 0, True
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0).add_done_callback(self._end)

    def _end(self, done: asyncio.Future[int]) -> None:
        self._is_trimming = False
