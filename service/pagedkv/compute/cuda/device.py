"""What all operations share: context, streams, memory, compiled functions, transfers inside a job."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.array import Allocation, DeviceArray, PinnedMemory, ScratchMemory
from pagedkv.compute.cuda.compiler import Binary, Compiler, Target, choose_target
from pagedkv.compute.cuda.driver import Context, Driver, Function, is_out_of_memory, require_driver
from pagedkv.compute.cuda.kernels import Variant
from pagedkv.compute.cuda.recording import Recording
from pagedkv.compute.cuda.streams import Events, JobQueue, StreamPair
from pagedkv.config import require
from pagedkv.errors import DeviceError, DeviceLost

T = TypeVar("T")

ARRAY_CODES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
STAGING_LIMIT = 32 << 20  # bytes a job stages in pinned memory; beyond it copies go from pageable memory, in order
PINNED_LIMIT = 256 << 20  # bytes of staging buffers of all jobs


def require_array(array: Any, field: str) -> int:
    """Return the storage code of a float device array. Raises InvalidArgument for anything else."""
    require(isinstance(array, DeviceArray), field, "must be a device array", type(array).__name__)
    require(array.dtype in ARRAY_CODES, field, "must be float32, float16 or bfloat16", str(array.dtype))
    return ARRAY_CODES[array.dtype]


class Device:
    """One opened device. Its methods are called from jobs, on the dispatch thread, unless they say otherwise.

    `driver_module` stands in for `cuda.bindings.driver`; `emit_ptx` compiles to PTX instead of CUBIN.
    """

    def __init__(
        self,
        driver_module: Any = None,
        *,
        ordinal: int = 0,
        compiler: Compiler | None = None,
        emit_ptx: bool = False,
        cache_dir: Path | None = None,
    ) -> None:
        self.driver = Driver(driver_module)
        self.driver.call("cuInit", 0)
        self.compiler = compiler or Compiler(cache_dir=cache_dir)
        chosen = choose_target(self.driver.describe(ordinal).capability, self.compiler.supported_archs())
        self.target = Target(chosen.arch, is_ptx=emit_ptx or chosen.is_ptx)
        version = int(self.driver.call("cuDriverGetVersion"))
        require_driver(version, self.compiler.version, self.target.is_ptx)
        self._functions: dict[Variant, Function] = {}
        self._modules: list[Any] = []
        self._inputs: dict[Hashable, tuple[Any, Any]] = {}
        self._staged_bytes = 0
        self.recording: Recording | None = None  # of the step that is running
        self.is_closed = False
        self.context = Context(self.driver, ordinal)
        with ExitStack() as held:
            held.callback(self.context.release)
            with self.context.pushed():
                self._open()
            held.pop_all()

    def _open(self) -> None:
        self.events, self.timing_events = Events(self.context), Events(self.context, with_times=True)
        self._lasting = self.new_scratch()  # for uploads: no replay of a recorded step writes to it
        self.scratch, self.pinned = self._lasting, PinnedMemory(self.context, PINNED_LIMIT)
        with ExitStack() as held:
            self.streams = StreamPair(self.context, self.events)
            held.callback(self.streams.destroy)
            self.queue = JobQueue(self.context, self.streams, self.events)
            held.pop_all()

    def new_scratch(self) -> ScratchMemory:
        """Return an allocator that, where memory ends, has what jobs before dropped given back."""
        return ScratchMemory(self.context, self._make_room)

    def _make_room(self) -> None:
        """Wait for the device, for dropped arrays may still be read, and give their memory back."""
        if self.recording is None or not self.recording.is_capturing:  # a stream under capture cannot be waited for
            self.streams.synchronize()
            self._lasting.trim()

    @property
    def allocated_bytes(self) -> int:
        """Device memory of jobs' arrays and of weights, used or kept for the next use."""
        return self._lasting.allocated_bytes

    def begin_job(self) -> None:
        """Forget the host arrays of the job before."""
        self._inputs, self._staged_bytes = {}, 0

    def function(self, variant: Variant) -> Function:
        """Return a loaded kernel, compiling it first if need be."""
        if variant not in self._functions:
            handle = self._load(variant)
            self._functions[variant] = Function(self.driver, handle, variant.signature, variant.shared_bytes)
        return self._functions[variant]

    def _load(self, variant: Variant) -> Any:
        """Return a kernel's handle; what does not load is compiled afresh, once."""
        try:
            return self._handle(variant, self.compiler.compile(variant, self.target))
        except DeviceLost:
            raise
        except DeviceError as error:
            if is_out_of_memory(error) or error.details.get("call") not in ("cuModuleLoadData", "cuModuleGetFunction"):
                raise
        return self._handle(variant, self.compiler.recompile(variant, self.target))

    def _handle(self, variant: Variant, binary: Binary) -> Any:
        module = self.driver.call("cuModuleLoadData", binary.image)
        self._modules.append(module)
        return self.driver.call("cuModuleGetFunction", module, variant.name.encode())

    def launch(self, variant: Variant, grid: tuple[int, int, int], *args: float) -> None:
        """Enqueue a kernel on the compute stream."""
        self.function(variant).launch(grid, variant.num_threads, self.streams.compute, *args)

    def launch_items(self, variant: Variant, num_items: int, *args: float) -> None:
        """Enqueue a kernel with a thread for each of `num_items`; none at all for 0."""
        if num_items:
            self.launch(variant, (-(-num_items // variant.num_threads), 1, 1), *args)

    def upload(self, array: npt.NDArray[Any]) -> DeviceArray:
        """Copy a host array to the device; the host array may be changed at once."""
        source = np.ascontiguousarray(array)
        return self._upload(source) if self.recording is None else self.recording.constant(source, self._upload)

    def _upload(self, source: npt.NDArray[Any]) -> DeviceArray:
        target = self._lasting.empty(source.shape, source.dtype)
        if source.nbytes:
            self.copy_in(target.pointer, source, self.streams.compute)
        return target

    def lasting(self, nbytes: int) -> Allocation:
        """Return memory that no replay of a recorded step writes to, also while one is recorded."""
        return self._lasting.allocate(nbytes)

    def copy_in(self, pointer: int, source: npt.NDArray[Any], stream: Any) -> None:
        """Enqueue a copy of a contiguous host array to the device; its content is read before this returns."""
        if self.recording is not None and self.recording.is_capturing:
            raise DeviceError("a repeated step takes nothing from the host but its inputs")
        self._staged_bytes += source.nbytes
        buffer = self.pinned.take(source.nbytes) if self._staged_bytes <= STAGING_LIMIT else None
        if buffer is None:  # some devices read such memory only when the stream gets there: wait for it
            self.driver.call("cuMemcpyHtoDAsync", pointer, source.ctypes.data, source.nbytes, stream)
            self.driver.call("cuStreamSynchronize", stream)
            return
        self.queue.at_completion(lambda: self.pinned.give_back(buffer))
        buffer.array[: source.nbytes] = source.reshape(-1).view(np.uint8)
        self.driver.call("cuMemcpyHtoDAsync", pointer, buffer.pointer, source.nbytes, stream)

    def input(self, array: npt.NDArray[Any], dtype: npt.DTypeLike) -> DeviceArray:
        """Upload a host array once a job: layers pass the same positions, slots and tables again and again."""
        found = self.once(id(array), array, lambda: self.upload(np.asarray(array, dtype=dtype)))
        if found.dtype != dtype:  # an input of a repeated step lies there as it was given
            raise DeviceError(f"a repeated step needs an input as {np.dtype(dtype)}, it is {found.dtype}")
        return found

    def once(self, key: Hashable, held: object, make: Callable[[], T]) -> T:
        """Return what `make` returned when it was first called with this key in this job.

        `held` is what the key's ids stand for: while it lives they are nobody else's.
        """
        if key not in self._inputs:
            self._inputs[key] = (held, make())
        found: T = self._inputs[key][1]
        return found

    def check(self, key: Hashable, held: object, check: Callable[[], None]) -> None:
        """Run a check of host arrays once a job; in a recorded step, before each repetition. `held` as for `once`."""
        if self.recording is None:
            self.once(("checked", key), held, check)
        else:
            self.recording.check(key, check)

    @contextmanager
    def recorded(
        self, recording: Recording, inputs: dict[Hashable, tuple[Any, Any]], scratch: ScratchMemory
    ) -> Iterator[None]:
        """Let operations note what they do in `recording`, find `inputs` on the device, and work in `scratch`."""
        before = self.recording, self._inputs, self.scratch
        self.recording, self._inputs, self.scratch = recording, inputs, scratch
        try:
            yield
        finally:
            self.recording, self._inputs, self.scratch = before

    def copy_out(self, pointer: int, target: npt.NDArray[Any], stream: Any) -> None:
        """Enqueue a copy to a host array, which is valid when the job is complete."""
        if self.recording is not None:
            raise DeviceError("a repeated step returns nothing to the host")
        nbytes = target.nbytes
        if not nbytes:
            return
        buffer = self.pinned.take(nbytes)

        def finish() -> None:  # keeps the target alive in any case
            if buffer is not None:
                target.reshape(-1).view(np.uint8)[:] = buffer.array[:nbytes]
                self.pinned.give_back(buffer)

        self.queue.at_completion(finish)
        into = target.ctypes.data if buffer is None else buffer.pointer
        self.driver.call("cuMemcpyDtoHAsync", into, pointer, nbytes, stream)

    def failing_quietly(self) -> AbstractContextManager[None]:
        """Return what bears the errors of a device that failed before, whose context may refuse every call."""
        return nullcontext() if self.queue.failure is None else suppress(Exception)

    def stopwatch(self, done: Callable[[float], None]) -> Callable[[], None]:
        """See `Backend.stopwatch`. Not to be called while a step is recorded: a graph's events have no times."""
        events, stream = self.timing_events, self.streams.compute
        start = events.record(stream)

        def stop() -> None:
            end = events.record(stream)
            self.queue.at_completion(lambda: done(events.seconds_between(start, end)))

        return stop

    def close(self) -> None:
        """Finish all jobs, then free everything. Not to be called from a job; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self.queue.close()
        self._inputs, self._functions = {}, {}
        try:
            with self.failing_quietly(), self.context.pushed():
                self._free_all()
        finally:
            with self.failing_quietly():
                self.context.release()

    def _free_all(self) -> None:
        for module in self._modules:
            self.driver.call("cuModuleUnload", module)
        self.scratch.release()
        self.pinned.release()
        self.events.destroy()
        self.timing_events.destroy()
        self.streams.destroy()
