"""What the parts of the virtual driver share: state, handles, faults, and the form of a driver function.

Functions return tuples whose first member is a real CUresult, as the bindings do. Names that are missing here raise
AttributeError; enums and handle classes are the bindings' own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from virtual_gpu.counters import LaunchStats
from virtual_gpu.faults import GpuFault, UnsupportedPtx
from virtual_gpu.machine import Config
from virtual_gpu.memory import DeviceMemory
from virtual_gpu.profile import SM_80, Profile
from virtual_gpu.queues import Capture, Event, Op, Scheduler, Stream

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
                if needs_context and not (self.num_retained and getattr(self.contexts, "stack", None)):
                    raise DriverError(CUresult.CUDA_ERROR_INVALID_CONTEXT, f"no live context for {method.__name__}")
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
        """Return the stream that work is to go to. Raises DriverError where a capture forbids that."""
        stream = self.any_stream(handle)
        if stream.capture is not None and stream.capture.is_invalid:
            raise DriverError(CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture was broken before")
        if stream is self.scheduler.null:
            self._break(
                [c for s in self.scheduler.streams.values() if s.is_blocking and (c := s.capture)],
                CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                "the legacy stream would wait for a blocking stream that is captured",
            )
        return stream

    def any_stream(self, handle: Any) -> Stream:
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

    def _captures(self) -> list[Capture]:
        found = {id(s.capture): s.capture for s in self.scheduler.streams.values() if s.capture is not None}
        return list(found.values())

    def _break(self, captures: list[Capture], code: Any, what: str) -> None:
        """Invalidate captures, if any, and raise for it."""
        for capture in captures:
            capture.is_invalid = True
        if captures:
            raise DriverError(code, what)

    def require_safe(self, what: str) -> None:
        """Refuse a "potentially unsafe" call, as the documentation of cuThreadExchangeStreamCaptureMode states it.

        The calling thread's own captures forbid it unless they are relaxed, other threads' only if they are global;
        what they forbid breaks them.
        """
        mine, thread = getattr(self.contexts, "capture_mode", "GLOBAL"), threading.get_ident()
        own = [c for c in self._captures() if c.thread == thread and c.mode != "RELAXED" and mine != "RELAXED"]
        others = [c for c in self._captures() if c.thread != thread and c.mode == "GLOBAL" and mine == "GLOBAL"]
        refused = CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self._break(own + others, refused, f"{what} while a stream is captured")

    def require_none_captured(self, what: str) -> None:
        """Refuse what waits for the whole context."""
        self._break(self._captures(), CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, f"{what} while one is captured")


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
