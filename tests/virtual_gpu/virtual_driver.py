"""VirtualDriver: devices, contexts, streams, events, capture and graphs, on top of memory and launches."""

from __future__ import annotations

import threading
from typing import Any

from virtual_gpu.driver import CUresult, DriverError, api, real
from virtual_gpu.faults import GpuFault
from virtual_gpu.launch_api import LaunchApi
from virtual_gpu.queues import Capture, Event, Graph, Stream

_DEVICE = real.CUdevice_attribute
_CAPTURE = real.CUstreamCaptureStatus


class ContextApi(LaunchApi):
    @api(needs_context=False)
    def cuInit(self, Flags: int) -> None:
        self.is_initialised = True

    @api(1, needs_context=False)
    def cuDriverGetVersion(self) -> Any:
        return self.profile.driver_version

    def _require_init(self) -> None:
        if not self.is_initialised:
            raise DriverError(CUresult.CUDA_ERROR_NOT_INITIALIZED)

    @api(1, needs_context=False)
    def cuDeviceGetCount(self) -> Any:
        self._require_init()
        return 1

    @api(1, needs_context=False)
    def cuDeviceGet(self, ordinal: int) -> Any:
        self._require_init()
        if ordinal != 0:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return real.CUdevice(0)

    @api(1, needs_context=False)
    def cuDeviceGetName(self, length: int, dev: Any) -> Any:
        return self.profile.name.encode()[: length - 1].ljust(length, b"\0")

    @api(1, needs_context=False)
    def cuDeviceTotalMem(self, dev: Any) -> Any:
        return self.memory.device_size

    @api(1, needs_context=False)
    def cuDeviceGetUuid(self, dev: Any) -> Any:
        return real.CUuuid()

    @api(1, needs_context=False)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Any:
        profile = self.profile
        table = {
            _DEVICE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: profile.capability[0],
            _DEVICE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: profile.capability[1],
            _DEVICE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: profile.num_sms,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: profile.shared_per_block,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: profile.shared_per_block_optin,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: profile.shared_per_sm,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: 1024,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: profile.threads_per_sm,
            _DEVICE.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
            _DEVICE.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: profile.l2_bytes,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: 65536,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: 65536,
            _DEVICE.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
            _DEVICE.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: 2,
            _DEVICE.CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: 1,
            _DEVICE.CU_DEVICE_ATTRIBUTE_INTEGRATED: 0,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: 0,
            _DEVICE.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: 1_410_000,
            _DEVICE.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 1_215_000,
            _DEVICE.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 5120,
        }
        if attrib not in table:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_VALUE, f"device attribute {attrib} is not modelled")
        return table[attrib]

    @api(1, needs_context=False)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        self._require_init()
        self.num_retained += 1
        return real.CUcontext(0xC0)

    @api(needs_context=False)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        if not self.num_retained:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self.num_retained -= 1

    def _stack(self) -> list[int]:
        if not hasattr(self.contexts, "stack"):
            self.contexts.stack = []
        stack: list[int] = self.contexts.stack
        return stack

    @api(needs_context=False)
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        stack = self._stack()
        stack[-1:] = [int(ctx)] if ctx is not None and int(ctx) else []

    @api(needs_context=False)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self._stack().append(int(ctx))

    @api(1, needs_context=False)
    def cuCtxPopCurrent(self) -> Any:
        if not self._stack():
            raise DriverError(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return real.CUcontext(self._stack().pop())

    @api(1, needs_context=False)
    def cuCtxGetCurrent(self) -> Any:
        stack = self._stack()
        return real.CUcontext(stack[-1] if stack else 0)

    @api(1, needs_context=False)
    def cuCtxGetDevice(self) -> Any:
        return real.CUdevice(0)

    @api()
    def cuCtxSynchronize(self) -> None:
        self.require_none_captured("cuCtxSynchronize")
        self.scheduler.complete_all()

    @api(1, needs_context=False)
    def cuGetErrorName(self, error: Any) -> Any:
        return CUresult(error).name.encode()

    @api(1, needs_context=False)
    def cuGetErrorString(self, error: Any) -> Any:
        """The error's name, and what the virtual GPU knows about its latest cause."""
        code = CUresult(error)
        text = code.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower()
        detail = self.details.get(code)
        return (f"{text}: {detail}" if detail else text).encode()


class StreamApi(ContextApi):
    @api(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        is_blocking = not int(Flags) & int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = Stream(0, is_blocking)
        stream.handle = self.new_handle(stream)
        self.scheduler.streams[stream.handle] = stream
        return real.CUstream(stream.handle)

    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return self.cuStreamCreate(flags)

    @api(2)
    def cuCtxGetStreamPriorityRange(self) -> Any:
        return 0, -5

    @api()
    def cuStreamDestroy(self, hStream: Any) -> None:
        """Work already queued is completed first (a real driver lets it run on)."""
        stream = self.any_stream(hStream)
        self.scheduler.complete_stream(stream)
        del self.scheduler.streams[stream.handle]

    @api()
    def cuStreamSynchronize(self, hStream: Any) -> None:
        stream = self.stream(hStream)
        if stream.capture is not None:
            stream.capture.is_invalid = True
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "synchronising a captured stream")
        self.scheduler.complete_stream(stream)

    @api()
    def cuStreamQuery(self, hStream: Any) -> None:
        stream = self.stream(hStream)
        if stream.last is not None and not stream.last.is_done:
            self.scheduler.step_towards(stream.last)
            if not stream.last.is_done:
                raise DriverError(CUresult.CUDA_ERROR_NOT_READY)

    @api()
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        event = self.lookup(hEvent, Event)
        if event.last is not None:
            self.scheduler.wait_for(self.stream(hStream), event.last)

    @api(1)
    def cuEventCreate(self, Flags: int) -> Any:
        has_timing = not int(Flags) & int(real.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = Event(0, has_timing)
        event.handle = self.new_handle(event)
        return real.CUevent(event.handle)

    @api()
    def cuEventDestroy(self, hEvent: Any) -> None:
        self.lookup(hEvent, Event)
        del self.handles[int(hEvent)]

    @api()
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        event = self.lookup(hEvent, Event)

        def run() -> None:
            self.clock += 1.0
            event.time = self.clock

        event.last = self.scheduler.enqueue(self.stream(hStream), "cuEventRecord", run)

    @api()
    def cuEventSynchronize(self, hEvent: Any) -> None:
        event = self.lookup(hEvent, Event)
        if event.last is not None:
            if event.last.capture is not None:
                raise DriverError(CUresult.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture")
            self.scheduler.complete(event.last)

    @api()
    def cuEventQuery(self, hEvent: Any) -> None:
        self.require_safe("cuEventQuery")
        event = self.lookup(hEvent, Event)
        if event.last is not None and not event.last.is_done:
            if event.last.capture is not None:
                raise DriverError(CUresult.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture")
            self.scheduler.step_towards(event.last)
            if not event.last.is_done:
                raise DriverError(CUresult.CUDA_ERROR_NOT_READY)

    @api(1)
    def cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> Any:
        """Differences of a counter of records: the virtual GPU has no time."""
        start, end = self.lookup(hStart, Event), self.lookup(hEnd, Event)
        if not (start.has_timing and end.has_timing) or start.last is None or end.last is None:
            raise DriverError(CUresult.CUDA_ERROR_INVALID_HANDLE, "events without timing or record")
        if start.last.capture is not None or end.last.capture is not None:
            raise DriverError(CUresult.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture")
        if not (start.last.is_done and end.last.is_done):
            raise DriverError(CUresult.CUDA_ERROR_NOT_READY)
        return end.time - start.time


class VirtualDriver(StreamApi):
    """Stands in for the module `cuda.bindings.driver`. See README.md for what it models."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(real, name)
        raise AttributeError(f"the virtual GPU has no {name}")

    @api()
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        stream = self.stream(hStream)
        if stream is self.scheduler.null or stream.capture is not None:
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "null stream or already capturing")
        name = real.CUstreamCaptureMode(mode).name.removeprefix("CU_STREAM_CAPTURE_MODE_")
        capture = Capture(stream, name, threading.get_ident())
        stream.capture, stream.captured_last, stream.waits = capture, None, []

    @api(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        """Set which captures forbid this thread unsafe calls; return what did before."""
        before = getattr(self.contexts, "capture_mode", "GLOBAL")
        self.contexts.capture_mode = real.CUstreamCaptureMode(mode).name.removeprefix("CU_STREAM_CAPTURE_MODE_")
        return getattr(real.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{before}")

    @api(1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        stream = self.any_stream(hStream)
        capture = stream.capture
        if capture is None or capture.origin is not stream:
            raise DriverError(CUresult.CUDA_ERROR_ILLEGAL_STATE, "the stream did not begin a capture")
        if capture.mode != "RELAXED" and capture.thread != threading.get_ident():
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "another thread began the capture")
        joined = self._ancestors(stream)
        others = [s for s in self.scheduler.streams.values() if s.capture is capture and s is not stream]
        for member in (stream, *others):
            member.capture, member.captured_last = None, None
            member.waits = [w for w in member.waits if w.capture is None]
        if capture.is_invalid:
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "a forbidden call broke the capture")
        if any(id(node) not in joined for node in capture.nodes):
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "work on another stream was not joined")
        return real.CUgraph(self.new_handle(Graph(capture.nodes)))

    def _ancestors(self, stream: Stream) -> set[int]:
        """Captured work that the capturing stream's end depends on."""
        todo = [*stream.waits, *([stream.captured_last] if stream.captured_last else [])]
        seen: set[int] = set()
        while todo:
            op = todo.pop()
            if id(op) not in seen:
                seen.add(id(op))
                todo += op.waits
        return seen

    @api(1)
    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        is_active = self.any_stream(hStream).capture is not None
        return _CAPTURE.CU_STREAM_CAPTURE_STATUS_ACTIVE if is_active else _CAPTURE.CU_STREAM_CAPTURE_STATUS_NONE

    @api(1)
    def cuGraphInstantiate(self, hGraph: Any, flags: int) -> Any:
        return real.CUgraphExec(self.new_handle(Graph(list(self.lookup(hGraph, Graph).nodes))))

    def cuGraphInstantiateWithFlags(self, hGraph: Any, flags: int) -> Any:
        return self.cuGraphInstantiate(hGraph, flags)

    @api()
    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        self.lookup(hGraphExec, Graph)

    @api()
    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        graph = self.lookup(hGraphExec, Graph)
        nodes = graph.nodes
        touches = [address for node in nodes for address in node.touches]
        run = self.scheduler.run_graph
        self.scheduler.enqueue(self.stream(hStream), "cuGraphLaunch", lambda: run(nodes), touches, graph)

    @api()
    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        graph = self.lookup(hGraphExec, Graph)
        if any(op.graph is graph for op in self.scheduler.pending()):
            self.report(GpuFault("freed too early", "a launch of the graph is pending", "cuGraphExecDestroy"))
            return
        del self.handles[int(hGraphExec)]

    @api()
    def cuGraphDestroy(self, hGraph: Any) -> None:
        self.lookup(hGraph, Graph)
        del self.handles[int(hGraph)]
