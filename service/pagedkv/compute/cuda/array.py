"""Device arrays and the memory they lie in: the page pool, scratch memory, pinned staging buffers."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.driver import Context
from pagedkv.errors import DeviceError


class DeviceArray:
    """A C-contiguous array in device memory; `owner` keeps the memory alive."""

    __slots__ = ("__weakref__", "dtype", "owner", "pointer", "shape")

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: npt.DTypeLike, owner: object) -> None:
        self.pointer, self.shape, self.dtype, self.owner = pointer, shape, np.dtype(dtype), owner

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return the same memory with another shape of as many elements; one axis may be -1."""
        known = math.prod(axis for axis in shape if axis != -1)
        full = tuple(self.size // max(1, known) if axis == -1 else axis for axis in shape)
        assert math.prod(full) == self.size, f"{self.shape} cannot become {shape}"
        return DeviceArray(self.pointer, full, self.dtype, self.owner)

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Return neighbouring entries [start, stop) of the first axis: the same memory."""
        start, stop, step = rows.indices(len(self))
        assert step == 1, "only neighbouring entries"
        offset = start * (self.nbytes // max(1, len(self)))
        return DeviceArray(self.pointer + offset, (max(0, stop - start), *self.shape[1:]), self.dtype, self.owner)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str if self.dtype.kind != "V" else f"<u{self.dtype.itemsize}",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }


class Allocation:
    """Device memory that returns to its `ScratchMemory` when nothing refers to it any more."""

    __slots__ = ("__weakref__", "pointer")

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


def _size_class(nbytes: int) -> int:
    """Round up to a quarter of a power of two, at least 512: at most a quarter is wasted."""
    step = max(512, 1 << max(0, nbytes.bit_length() - 3))
    return -(-max(1, nbytes) // step) * step


class ScratchMemory:
    """A stream-ordered allocator: memory dropped on the host is reused at once, for all its users run on one stream.

    Whatever used a buffer before was enqueued earlier on the same stream, so it is over when the next user starts.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._driver = context, context.driver
        self._free: dict[int, list[int]] = {}
        self._all: list[int] = []
        self._lock = threading.RLock()  # a finaliser may run inside `allocate` on the same thread
        self.allocated_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Return an array with undefined content. Raises DeviceError when the device has no memory left."""
        owner = self.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
        return DeviceArray(owner.pointer, shape, dtype, owner)

    def allocate(self, nbytes: int) -> Allocation:
        """Return at least `nbytes` bytes, aligned to 256."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.setdefault(size, [])
            pointer = free.pop() if free else self._take(size)
        owner = Allocation(pointer)
        weakref.finalize(owner, self._give_back, size, pointer).atexit = False
        return owner

    def _take(self, size: int) -> int:
        try:
            pointer = int(self._driver.call("cuMemAlloc", size))
        except DeviceError as error:
            if "OUT_OF_MEMORY" not in str(error):
                raise
            raise out_of_memory(self._context, size, "scratch memory", "--memory or --max-batch-tokens") from error
        self._all.append(pointer)
        self.allocated_bytes += size
        return pointer

    def _give_back(self, size: int, pointer: int) -> None:
        with self._lock:
            if size in self._free:  # else all memory was released
                self._free[size].append(pointer)

    def release(self) -> None:
        """Free everything; the device must be idle."""
        for pointer in self._all:
            self._driver.call("cuMemFree", pointer)
        self._all, self._free = [], {}


class PinnedBuffer:
    """Page-locked host memory as bytes; `array` views it."""

    __slots__ = ("array", "pointer", "size")

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer, self.size = pointer, size
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))


class PinnedMemory:
    """Staging buffers by size class. A buffer is the taker's until it is given back, after its copy's event."""

    def __init__(self, context: Context) -> None:
        self._driver = context.driver
        self._free: dict[int, list[PinnedBuffer]] = {}
        self._all: list[int] = []
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> PinnedBuffer:
        """Return a buffer of at least `nbytes` bytes."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.setdefault(size, [])
            if free:
                return free.pop()
        pointer = int(self._driver.call("cuMemHostAlloc", size, 0))
        with self._lock:
            self._all.append(pointer)
            self.allocated_bytes += size
        return PinnedBuffer(pointer, size)

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Let the next taker write to the buffer: no copy may read or write it any more."""
        with self._lock:
            self._free[buffer.size].append(buffer)

    def release(self) -> None:
        """Free everything; the device must be idle."""
        for pointer in self._all:
            self._driver.call("cuMemFreeHost", pointer)
        self._all, self._free = [], {}


def out_of_memory(context: Context, asked: int, what: str, flag: str) -> DeviceError:
    """Return the error for memory that the device does not have: asked, free, and what to lower."""
    free, total = context.driver.call("cuMemGetInfo")
    message = (
        f"{what} of {asked} bytes does not fit: {free} of {total} bytes are free on {context.info.name}; lower {flag}"
    )
    return DeviceError(message, asked=asked, free=free)
