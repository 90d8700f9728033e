"""Memory of activations, used again once nobody holds the array that was there.

A step of a decoder makes hundreds of arrays of the same few sizes. Fresh pages for each cost more than the arithmetic
done on them, so the pages of arrays that are gone serve the next ones.
"""

from __future__ import annotations

import math
import sys
from typing import Final

import numpy as np
import numpy.typing as npt

CACHE_LINE: Final = 64
_SMALLEST: Final = 1 << 12  # bytes; sizes are rounded up to powers of two and halves between
_KEPT_BYTES: Final = 1 << 28  # larger arrays, and those beyond the sum, are not kept
_UNUSED: Final = (
    3  # references to a buffer that no array views: the pool's list, a loop's variable, the call's argument
)


class BufferPool:
    """Hands out uninitialised float32 arrays on whole cache lines. Not thread-safe: used in jobs of one queue.

    Up to `kept_bytes` stay with the pool as long as it lives.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._limit = kept_bytes
        self._buffers: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self.kept_bytes = 0

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return an array of this shape; its memory is used again when the last view of it is gone."""
        num_bytes = 4 * math.prod(shape)
        size = _size_class(num_bytes)
        buffer = self._unused(size)
        start = -buffer.__array_interface__["data"][0] % CACHE_LINE
        return np.ndarray(shape, np.float32, buffer, start)

    def _unused(self, size: int) -> npt.NDArray[np.uint8]:
        known = self._buffers.setdefault(size, [])
        for buffer in known:
            if sys.getrefcount(buffer) <= _UNUSED:
                return buffer
        fresh = np.empty(size + CACHE_LINE, np.uint8)
        if self.kept_bytes + size <= self._limit:
            self.kept_bytes += size
            known.append(fresh)
        return fresh


def _size_class(num_bytes: int) -> int:
    size = max(_SMALLEST, 1 << max(0, num_bytes - 1).bit_length())
    return size * 3 // 4 if num_bytes <= size * 3 // 4 else size
