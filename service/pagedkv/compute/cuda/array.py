"""Device arrays and the memory they lie in: the page pool, scratch memory, pinned staging buffers."""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.driver import Context, is_out_of_memory
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
    Where the device has none left, `make_room` is called once and the driver asked again: buffers kept for one size
    class go back to it for another.
    """

    def __init__(self, context: Context, make_room: Callable[[], None]) -> None:
        self._context, self._driver, self._make_room = context, context.driver, make_room
        self._free: dict[int, list[int]] = {}
        self._all: dict[int, int] = {}  # size by pointer
        self._lock = threading.RLock()  # a finaliser may run inside `allocate` on the same thread
        self.allocated_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Return an array with undefined content. Raises DeviceError when the device has no memory left."""
        owner = self.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
        return DeviceArray(owner.pointer, shape, dtype, owner)

    def allocate(self, nbytes: int) -> Allocation:
        """Return at least `nbytes` bytes, aligned to 256. Raises DeviceError when the device has no memory left."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            pointer = free.pop() if free else self._take(size)
        owner = Allocation(pointer)
        weakref.finalize(owner, self._give_back, size, pointer).atexit = False
        return owner

    def _take(self, size: int) -> int:
        pointer = int(retried(self._ask, size, self._make_room, self._refusal))
        self._all[pointer] = size
        self.allocated_bytes += size
        return pointer

    def _ask(self, size: int) -> Any:
        return self._driver.call("cuMemAlloc", size)

    def _refusal(self, size: int) -> DeviceError:
        return out_of_memory(self._context, size, "scratch memory", "--memory or --max-batch-tokens")

    def _give_back(self, size: int, pointer: int) -> None:
        with self._lock:
            if pointer in self._all:  # else all memory was released
                self._free.setdefault(size, []).append(pointer)

    def trim(self) -> None:
        """Give what nobody uses back to the driver; no work may be under way that used it."""
        with self._lock:
            unused, self._free = [pointer for free in self._free.values() for pointer in free], {}
            for pointer in unused:
                self._driver.call("cuMemFree", pointer)
                self.allocated_bytes -= self._all.pop(pointer)

    def release(self) -> None:
        """Free everything; the device must be idle."""
        with self._lock:
            pointers, self._all, self._free = list(self._all), {}, {}
            self.allocated_bytes = 0
        for pointer in pointers:
            self._driver.call("cuMemFree", pointer)


class PinnedBuffer:
    """Page-locked host memory as bytes; `array` views it."""

    __slots__ = ("array", "pointer", "size")

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer, self.size = pointer, size
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))


class PinnedMemory:
    """Staging buffers by size class, at most `limit` bytes of them, used and kept.

    A buffer is the taker's until it is given back, after its copy's event.
    """

    def __init__(self, context: Context, limit: int) -> None:
        self._driver, self._limit = context.driver, limit
        self._free: dict[int, list[int]] = {}
        self._all: dict[int, int] = {}  # size by pointer
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> PinnedBuffer | None:
        """Return a buffer of at least `nbytes` bytes; None where it would pass the limit: then stage nothing.

        Raises DeviceError where the machine has no memory to pin.
        """
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                return PinnedBuffer(free.pop(), size)
            if self.allocated_bytes + size > self._limit:
                self._trim()
            return None if self.allocated_bytes + size > self._limit else PinnedBuffer(self._take(size), size)

    def _take(self, size: int) -> int:
        pointer = int(retried(self._ask, size, self._trim, self._refusal))
        self._all[pointer] = size
        self.allocated_bytes += size
        return pointer

    def _ask(self, size: int) -> Any:
        return self._driver.call("cuMemHostAlloc", size, 0)

    def _refusal(self, size: int) -> DeviceError:
        message = f"a staging buffer of {size} bytes does not fit in pinned memory, {self.allocated_bytes} are taken"
        return DeviceError(f"{message}; lower --swap-memory", asked=size, taken=self.allocated_bytes)

    def give_back(self, buffer: PinnedBuffer) -> None:
        """Let the next taker write to the buffer: no copy may read or write it any more."""
        with self._lock:
            self._free.setdefault(buffer.size, []).append(buffer.pointer)

    def _trim(self) -> None:
        """Give the buffers that nobody has back to the driver: their copies are over."""
        unused, self._free = [pointer for free in self._free.values() for pointer in free], {}
        for pointer in unused:
            self._driver.call("cuMemFreeHost", pointer)
            self.allocated_bytes -= self._all.pop(pointer)

    def release(self) -> None:
        """Free everything; the device must be idle."""
        pointers, self._all, self._free = list(self._all), {}, {}
        self.allocated_bytes = 0
        for pointer in pointers:
            self._driver.call("cuMemFreeHost", pointer)


def retried(
    ask: Callable[[int], Any], size: int, make_room: Callable[[], None], refusal: Callable[[int], DeviceError]
) -> Any:
    """Return `ask(size)`, asked once more after `make_room` where there is no memory; then raise `refusal(size)`."""
    try:
        return ask(size)
    except DeviceError as error:
        if not is_out_of_memory(error):
            raise
    make_room()
    try:
        return ask(size)
    except DeviceError as error:
        raise (refusal(size) if is_out_of_memory(error) else error) from error


def out_of_memory(context: Context, asked: int, what: str, flag: str) -> DeviceError:
    """Return the error for memory that the device does not have: asked, free, and what to lower."""
    free, total = context.driver.call("cuMemGetInfo")
    message = (
        f"{what} of {asked} bytes does not fit: {free} of {total} bytes are free on {context.info.name}; lower {flag}"
    )
    return DeviceError(message, asked=asked, free=free)
