"""The names of `cuda.bindings.driver` that this project uses, over the virtual GPU.

Functions return tuples whose first member is a real CUresult, as the bindings do. Names that are missing here raise
AttributeError; enums and handle classes are the bindings' own.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from virtual_gpu import checks
from virtual_gpu.counters import LaunchStats
from virtual_gpu.faults import GpuFault, UnsupportedPtx
from virtual_gpu.machine import Config
from virtual_gpu.memory import Allocation, DeviceMemory
from virtual_gpu.profile import SM_80, Profile
from virtual_gpu.queues import Event, Op, Scheduler, Stream

CUresult = real.CUresult
_FAULT_CODES = {
    "misaligned": CUresult.CUDA_ERROR_MISALIGNED_ADDRESS,
    "assertion": CUresult.CUDA_ERROR_ASSERT,
    "trap": CUresult.CUDA_ERROR_LAUNCH_FAILED,
    "endless": CUresult.CUDA_ERROR_LAUNCH_TIMEOUT,
}


class DriverError(Exception):
    """A driver call's error code, with an explanation."""

    def __init__(self, code: Any, detail: str = "") -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def api(outputs: int = 0, needs_context: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a method into a driver function: result code first, `outputs` values after it."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            try:
                if self.sticky is not None and needs_context:
                    raise DriverError(self.sticky)
                value = method(self, *args, **kwargs)
                if self.sticky is not None and needs_context:
                    raise DriverError(self.sticky)
            except DriverError as error:
                if error.detail:
                    self.details[error.code] = error.detail
                return (error.code, *[None] * outputs)
            if outputs == 0:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, value) if outputs == 1 else (CUresult.CUDA_SUCCESS, *value)

        return call

    return decorate


class DriverState:
    """What all parts of the driver share."""

    def __init__(
        self,
        profile: Profile = SM_80,
        *,
        schedule: str | int = "lazy",
        check_races: bool = True,
        count: bool = True,
        moves_poison: tuple[str, ...] = ("copy_blocks",),
    ) -> None:
        self.profile = profile
        self.memory = DeviceMemory(profile.memory_bytes, profile.host_bytes)
        self.scheduler = Scheduler(schedule)
        self.scheduler.failed = self._on_failure
        self.config = Config(check_races, count)
        self.moves_poison = moves_poison
        self.sticky: Any = None
        self.faults: list[GpuFault | UnsupportedPtx] = []
        self.details: dict[Any, str] = {}
        self.launches: list[LaunchStats] = []
        self.events: dict[int, Event] = {}
        self.handles: dict[int, Any] = {}
        self.next_handle = 0x1000
        self.launch_number = 0
        self.next_tag = 1
        self.contexts = threading.local()
        self.is_initialised = False
        self.num_retained = 0
        self.clock = 0.0

    def new_handle(self, thing: Any) -> int:
        self.next_handle += 0x10
        self.handles[self.next_handle] = thing
        return self.next_handle

    def lookup(self, handle: Any, kind: type) -> Any:
        found = self.handles.get(int(handle))
        if not isinstance(found, kind):
            raise DriverError(CUresult.CUDA_ERROR_INVALID_HANDLE, f"{int(handle):#x} is not a live {kind.__name__}")
        return found

    def stream(self, handle: Any) -> Stream:
        number = int(handle) if handle is not None else 0
        stream = self.scheduler.streams.get(0 if number in (0, 1, 2) else number)
        if stream is None:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_HANDLE, f"no stream {number:#x}")
        return stream

    def _on_failure(self, op: Op, error: BaseException) -> None:
        if not isinstance(error, GpuFault):
            error = GpuFault("internal", repr(error), op.name)
        self.report(error)

    def report(self, fault: GpuFault) -> None:
        """Record a fault and poison the context."""
        self.faults.append(fault)
        self.sticky = _FAULT_CODES.get(fault.kind, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        self.scheduler.has_failed = True
        self.details[self.sticky] = str(fault)

    def assert_clean(self) -> None:
        """Raise the first fault that any call or kernel met."""
        if self.faults:
            raise self.faults[0]

    def require_not_capturing(self, what: str) -> None:
        if any(s.capture is not None for s in self.scheduler.streams.values()):
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while a stream is captured")


def address_and_size(host: Any) -> tuple[int, int | None]:
    """Host address of a pointer-like or buffer argument, and its size where it is known."""
    if host is None:
        return 0, None
    if hasattr(host, "__array_interface__"):
        array = np.asarray(host)
        return int(array.ctypes.data), array.nbytes
    if hasattr(host, "__int__") or hasattr(host, "__index__"):
        return int(host), None
    view = np.frombuffer(host, np.uint8)
    return int(view.ctypes.data), view.nbytes


class MemoryApi(DriverState):
    """Allocation, copies, memsets."""

    def _allocate(self, size: int, is_host: bool) -> Allocation:
        from virtual_gpu.memory import OutOfMemory

        if size <= 0:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"allocation of {size} bytes")
        self.require_not_capturing("allocation")
        try:
            allocation = self.memory.allocate(int(size), is_host)
        except OutOfMemory:
            free = self.memory.device_size - self.memory.used
            raise DriverError(CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"{size} bytes asked, {free} free") from None
        span = slice(allocation.offset, allocation.offset + allocation.size)
        self.memory.data[span] = 0xFF  # not a number in every float type
        if is_host:
            self.memory.shadow[span] = checks.INITIALISED  # the host may have written it: that is not seen
        return allocation

    @api(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        return real.CUdeviceptr(self._allocate(bytesize, False).address)

    @api(1)
    def cuMemHostAlloc(self, bytesize: int, flags: int) -> Any:
        return self._allocate(bytesize, True).address

    cuMemAllocHost = lambda self, bytesize: self.cuMemHostAlloc(bytesize, 0)  # noqa: E731

    @api(1)
    def cuMemHostGetDevicePointer(self, p: Any, flags: int) -> Any:
        address = address_and_size(p)[0]
        if self.memory.span(address, 1) is None:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, "not pinned memory")
        return real.CUdeviceptr(address)

    def _free(self, pointer: Any, is_host: bool) -> None:
        address = address_and_size(pointer)[0]
        if not address and not is_host:
            return
        allocation = self.memory.live.get(address)
        if allocation is None or allocation.is_host != is_host:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"{address:#x} is no live allocation")
        end = allocation.address + allocation.size
        users = [op.name for op in self.scheduler.pending() if any(address <= a < end for a in op.touches)]
        if users:
            self.report(GpuFault("freed too early", f"pending work uses it: {', '.join(users[:3])}", address=address))
            return
        self.memory.free(address)

    @api()
    def cuMemFree(self, dptr: Any) -> None:
        self.require_not_capturing("free")
        self._free(dptr, False)

    @api()
    def cuMemFreeHost(self, p: Any) -> None:
        self._free(p, True)

    @api(2)
    def cuMemGetInfo(self) -> Any:
        return self.memory.device_size - self.memory.used, self.memory.device_size

    @api(2)
    def cuMemGetAddressRange(self, dptr: Any) -> Any:
        found = self.memory.find(int(dptr))
        if found is None or not found.is_live:
            raise DriverError(CUresult.CUDA_ERROR_NOT_FOUND)
        return real.CUdeviceptr(found.address), found.size

    def _span(self, address: int, size: int, what: str) -> slice:
        span = self.memory.span(address, size)
        if span is None:
            where = self.memory.describe(address)
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"{what}: {size} bytes at {address:#x}, {where}")
        return span

    def _span_now(self, address: int, size: int, what: str) -> slice:
        """The range at execution; freed in the meantime is a fault."""
        try:
            return self._span(address, size, what)
        except DriverError as error:
            raise GpuFault("use after free", error.detail, address=address) from None

    def _to_device(self, dst: Any, src: Any, size: int, stream: Stream) -> Op:
        target, (source, known) = int(dst), address_and_size(src)
        self._span(target, size, "copy to device")
        if known is not None and known < size:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"host buffer of {known} bytes, {size} to copy")
        pinned = self.memory.span(source, size) is not None
        snapshot = None if pinned else np.frombuffer(ctypes.string_at(source, size), np.uint8)

        def run() -> None:
            data = snapshot
            if data is None:
                data = self.memory.data[self._span_now(source, size, "pinned source")]
            span = self._span_now(target, size, "copy to device")
            self.memory.data[span] = data
            self.memory.shadow[span] = checks.INITIALISED

        return self.scheduler.enqueue(stream, "cuMemcpyHtoD", run, (target, source))

    def _to_host(self, dst: Any, src: Any, size: int, stream: Stream) -> tuple[Op, bool]:
        (target, known), source = address_and_size(dst), int(src)
        self._span(source, size, "copy to host")
        if known is not None and known < size:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"host buffer of {known} bytes, {size} to copy")
        pinned = self.memory.span(target, size) is not None

        def run() -> None:
            data = self.memory.data[self._span_now(source, size, "copy to host")]
            if pinned:
                self.memory.data[self._span_now(target, size, "pinned target")] = data
            else:
                ctypes.memmove(target, data.ctypes.data, size)

        return self.scheduler.enqueue(stream, "cuMemcpyDtoH", run, (target, source)), pinned

    def _on_device(self, dst: Any, src: Any, size: int, stream: Stream) -> Op:
        target, source = int(dst), int(src)
        self._span(target, size, "copy target")
        self._span(source, size, "copy source")

        def run() -> None:
            into = self._span_now(target, size, "copy target")
            out_of = self._span_now(source, size, "copy source")
            self.memory.data[into] = self.memory.data[out_of].copy()
            self.memory.shadow[into] = self.memory.shadow[out_of].copy()

        return self.scheduler.enqueue(stream, "cuMemcpyDtoD", run, (target, source))

    def _finish(self, op: Op) -> None:
        if op.capture is None:
            self.scheduler.complete(op)

    @api()
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
        self.require_not_capturing("cuMemcpyHtoD")
        self._finish(self._to_device(dstDevice, srcHost, ByteCount, self.scheduler.null))

    @api()
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
        self.require_not_capturing("cuMemcpyDtoH")
        self._finish(self._to_host(dstHost, srcDevice, ByteCount, self.scheduler.null)[0])

    @api()
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        self._on_device(dstDevice, srcDevice, ByteCount, self.scheduler.null)

    @api()
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
        self._to_device(dstDevice, srcHost, ByteCount, self.stream(hStream))

    @api()
    def cuMemcpyDtoHAsync(self, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        op, pinned = self._to_host(dstHost, srcDevice, ByteCount, self.stream(hStream))
        if not pinned:  # pageable memory: the call returns when the copy is done
            self._finish(op)

    @api()
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self._on_device(dstDevice, srcDevice, ByteCount, self.stream(hStream))

    def _set(self, dst: Any, value: int, count: int, width: int, stream: Stream) -> None:
        address = int(dst)
        self._span(address, count * width, "memset")
        if address % width:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, "memset address is not aligned")

        def run() -> None:
            span = self._span_now(address, count * width, "memset")
            self.memory.data[span].view(f"u{width}")[:] = value
            self.memory.shadow[span] = checks.INITIALISED

        self.scheduler.enqueue(stream, "cuMemset", run, (address,))

    @api()
    def cuMemsetD8(self, dstDevice: Any, uc: int, N: int) -> None:
        self._set(dstDevice, uc, N, 1, self.scheduler.null)

    @api()
    def cuMemsetD16(self, dstDevice: Any, us: int, N: int) -> None:
        self._set(dstDevice, us, N, 2, self.scheduler.null)

    @api()
    def cuMemsetD32(self, dstDevice: Any, ui: int, N: int) -> None:
        self._set(dstDevice, ui, N, 4, self.scheduler.null)

    @api()
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, uc, N, 1, self.stream(hStream))

    @api()
    def cuMemsetD16Async(self, dstDevice: Any, us: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, us, N, 2, self.stream(hStream))

    @api()
    def cuMemsetD32Async(self, dstDevice: Any, ui: int, N: int, hStream: Any) -> None:
        self._set(dstDevice, ui, N, 4, self.stream(hStream))

    # for tests

    def view(self, pointer: Any, size: int) -> Any:
        """The bytes of device memory as they are now (a NumPy view); pending work is not run."""
        return self.memory.data[self._span(int(pointer), size, "view")]

    def is_initialised_range(self, pointer: Any, size: int) -> bool:
        return bool((self.memory.shadow[self._span(int(pointer), size, "view")] == checks.INITIALISED).all())
