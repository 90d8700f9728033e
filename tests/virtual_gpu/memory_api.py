"""Memory functions of the virtual driver: allocation, copies, memsets."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from virtual_gpu import checks
from virtual_gpu.driver import CUresult, DriverError, DriverState, address_and_size, api, real
from virtual_gpu.faults import GpuFault
from virtual_gpu.memory import Allocation, OutOfMemory
from virtual_gpu.queues import Op, Stream


class MemoryApi(DriverState):
    """Allocation, copies, memsets."""

    def _allocate(self, size: int, is_host: bool) -> Allocation:
        if size <= 0:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"allocation of {size} bytes")
        self.require_safe("allocation")
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
        self.require_safe("free")
        self._free(dptr, False)

    @api()
    def cuMemFreeHost(self, p: Any) -> None:
        self.require_safe("free")
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
        is_late = self.config.pageable_late
        snapshot = None if pinned or is_late else np.frombuffer(ctypes.string_at(source, size), np.uint8)

        def run() -> None:
            data = np.frombuffer(ctypes.string_at(source, size), np.uint8) if is_late and not pinned else snapshot
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
        self.require_safe("cuMemcpyHtoD")
        """A pageable source is staged when the call returns, its way to the device may still be under way."""
        stream = self.stream(0)
        op = self._to_device(dstDevice, srcHost, ByteCount, stream)
        if self.memory.span(address_and_size(srcHost)[0], ByteCount) is not None:
            self._finish(op)

    @api()
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
        self.require_safe("cuMemcpyDtoH")
        self._finish(self._to_host(dstHost, srcDevice, ByteCount, self.stream(0))[0])

    @api()
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        self._on_device(dstDevice, srcDevice, ByteCount, self.stream(0))

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
        self._set(dstDevice, uc, N, 1, self.stream(0))

    @api()
    def cuMemsetD16(self, dstDevice: Any, us: int, N: int) -> None:
        self._set(dstDevice, us, N, 2, self.stream(0))

    @api()
    def cuMemsetD32(self, dstDevice: Any, ui: int, N: int) -> None:
        self._set(dstDevice, ui, N, 4, self.stream(0))

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

    def poison(self, pointer: int, stream: Any) -> None:
        """Make an allocation's bytes in stream order what they are when it is new: nobody wrote them."""
        found = self.memory.live[pointer]
        span = slice(found.offset, found.offset + found.size)

        def run() -> None:
            self.memory.data[span] = 0xFF
            self.memory.shadow[span] = checks.UNINITIALISED

        self.scheduler.enqueue(self.stream(stream), "poison", run, (pointer,))

    def view(self, pointer: Any, size: int) -> Any:
        """The bytes of device memory as they are now (a NumPy view); pending work is not run."""
        return self.memory.data[self._span(int(pointer), size, "view")]

    def is_initialised_range(self, pointer: Any, size: int) -> bool:
        return bool((self.memory.shadow[self._span(int(pointer), size, "view")] == checks.INITIALISED).all())
