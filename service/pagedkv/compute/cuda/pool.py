"""The page pool on the device: one allocation, lent to other libraries as views."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from pagedkv.compute.cuda.array import out_of_memory
from pagedkv.compute.cuda.driver import Context, is_out_of_memory
from pagedkv.compute.cuda.streams import Events
from pagedkv.compute.dlpack import CUDA_DEVICE, PoolView, PoolViews, Strided
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import DeviceError


class Loan:
    """Keeps a pool's memory allocated while it lives."""

    __slots__ = ("__weakref__",)


def no_room(context: Context, layout: KvLayout) -> DeviceError:
    """Return the error for a pool that does not fit the device."""
    return out_of_memory(context, layout.pool_bytes, "the page pool", "--memory or --blocks")


class DevicePool(PoolViews):
    """Owns the device memory of a layout's blocks, and lends it (see dlpack.Exporter)."""

    def __init__(self, context: Context, layout: KvLayout, stream: Any, events: Events) -> None:
        self.layout, self._context, self._driver = layout, context, context.driver
        self._stream, self._events = stream, events
        self._lock = threading.RLock()  # a loan may end inside `lend` on the same thread
        self._num_loans, self._is_closed = 0, False
        self.dlpack_device = (CUDA_DEVICE, context.info.ordinal)
        try:
            self.pointer = int(self._driver.call("cuMemAlloc", layout.pool_bytes))
        except DeviceError as error:
            if not is_out_of_memory(error):
                raise
            raise no_room(context, layout) from error
        try:
            self.free_bytes_left = int(self._driver.call("cuMemGetInfo")[0])
        except DeviceError:
            self._free()
            raise

    def layer_pointer(self, layer: int) -> int:
        """Return the address of a layer in block 0."""
        return self.pointer + layer * self.layout.layer_stride * self.layout.shape.dtype.itemsize

    def block_pointer(self, block_id: int) -> int:
        """Return the address of a block."""
        return self.pointer + block_id * self.layout.block_bytes

    def view(self, strided: Strided) -> DeviceView:
        """See `PoolViews.view`."""
        return DeviceView(self, strided)

    def lend(self, stream: int | None) -> Loan:
        """See `Exporter.lend`: the consumer's stream waits for all jobs that were dispatched before.

        Called from a job, or when none is running. `stream` is a handle; None and 1 mean the legacy default stream,
        2 the per-thread one, -1 no waiting.
        """
        if stream == 0:
            raise BufferError("stream 0 is ambiguous: pass 1 (legacy default), 2 (per thread) or a handle")
        with self._lock:
            if self._is_closed:
                raise BufferError("the page pool is closed")
            if stream != -1:
                with self._context.pushed():
                    event = self._events.record(self._stream)
                    self._driver.call("cuStreamWaitEvent", stream or 1, event, 0)
                    self._events.give_back(event)
            loan = Loan()
            self._num_loans += 1
        weakref.finalize(loan, self._end_loan).atexit = False
        return loan

    def _end_loan(self) -> None:
        with self._lock:
            self._num_loans -= 1
            is_last = self._is_closed and self._num_loans == 0
        if is_last:
            with self._context.pushed():
                self._free()
            self._context.release()

    def release(self) -> None:
        """Free the memory, when the last loan has ended; the device must be idle."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._num_loans:
                self._context.retain()  # for as long as the memory
                return
        self._free()

    def _free(self) -> None:
        self._driver.call("cuMemFree", self.pointer)
        self.pointer = 0


class DeviceView(PoolView):
    """A view with `__cuda_array_interface__` too, in which bfloat16 appears as uint16 and float8 as uint8."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        strided: Strided = self.strided
        return {
            "shape": strided.shape,
            "typestr": strided.element.typestr,
            "data": (strided.pointer, False),
            "strides": strided.strides,
            "version": 3,
        }
