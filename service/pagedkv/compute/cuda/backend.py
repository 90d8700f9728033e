"""The CUDA backend: a page pool on a GPU with its operations and its ordered queue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.compiler import Compiler
from pagedkv.compute.cuda.dense_ops import CudaDenseOps
from pagedkv.compute.cuda.device import Device
from pagedkv.compute.cuda.graphs import StepGraphs
from pagedkv.compute.cuda.host_pool import HostPool
from pagedkv.compute.cuda.kernels import all_variants
from pagedkv.compute.health import DeviceHealth
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType

T = TypeVar("T")


class CudaBackend(CudaDenseOps):
    """Implements `Backend`. Opens the device on the caller's thread; jobs run on the backend's own threads.

    `driver_module` and `cublas` stand in for `cuda.bindings.driver` and `nvmath.bindings.cublas`; `emit_ptx` is for
    drivers that take no CUBIN. `weight_dtype` is what quantised weights become; `on_compile(done, total, name)` hears
    of every kernel that `warm_up` compiles. `num_host_blocks` are there to swap to. Repeated steps of up to
    `max_graph_rows` rows become CUDA graphs. Raises DeviceError where there is no device, no compiler or not enough
    memory, UnsupportedModel for a storage type without kernels.
    """

    name = "cuda"
    repeats_prompts = False

    def __init__(
        self,
        layout: KvLayout,
        *,
        driver_module: Any = None,
        cublas: Any = None,
        compiler: Compiler | None = None,
        emit_ptx: bool = False,
        ordinal: int = 0,
        min_partition: int = 256,
        tensor_cores: bool | None = None,
        weight_dtype: DType = DType.FLOAT16,
        on_compile: Callable[[int, int, str], None] = lambda done, total, name: None,
        num_host_blocks: int = 0,
        max_graph_rows: int = 64,
    ) -> None:
        device = Device(driver_module, ordinal=ordinal, compiler=compiler, emit_ptx=emit_ptx)
        with ExitStack() as held:
            held.callback(device.close)
            super().__init__(device, layout, min_partition=min_partition, tensor_cores=tensor_cores)
            held.callback(self.pool.release)
            self.host_pool = HostPool(device, self.pool, num_host_blocks)
            held.callback(self.host_pool.release)
            self.open_cublas(cublas, weight_dtype)
            held.callback(self.close_cublas)
            self.graphs = StepGraphs(device, max_graph_rows)
            held.callback(self.graphs.release)
            self._held = held.pop_all()
        self._on_compile = on_compile

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """See `Backend.submit`."""

        def run() -> T:
            self.device.begin_job()
            return job()

        return self.device.queue.submit(run)

    def repeat(
        self,
        shape: Hashable,
        inputs: Sequence[npt.NDArray[Any]],
        body: Callable[[Sequence[npt.NDArray[Any]]], DeviceArray],
        finish: Callable[[DeviceArray], DeviceArray] = lambda result: result,
        padding: Sequence[int] = (),
    ) -> DeviceArray:
        """See `Backend.repeat`; captured as a CUDA graph, `finish` with it."""
        return self.graphs.run(shape, inputs, padding, lambda arrays: finish(body(arrays)))

    @property
    def num_host_blocks(self) -> int:
        """See `KvOps.num_host_blocks`."""
        return self.host_pool.num_blocks

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_out`."""
        self.host_pool.copy_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `KvOps.swap_in`."""
        self.host_pool.copy_in(pairs)

    def stopwatch(self, done: Callable[[float], None]) -> Callable[[], None]:
        """See `Backend.stopwatch`; by events on the compute stream."""
        return self.device.stopwatch(done)

    def memory_by_use(self) -> dict[str, int]:
        """See `Backend.memory_by_use`."""
        staging = self.device.pinned.allocated_bytes
        return {"working": self.device.allocated_bytes, "steps": self.graphs.allocated_bytes, "staging": staging}

    def from_host(self, array: npt.NDArray[Any]) -> DeviceArray:
        """See `Backend.from_host`."""
        return self.device.upload(array)

    def to_host(self, tensor: DeviceArray) -> npt.NDArray[Any]:
        """See `Backend.to_host`."""
        array = np.empty(tensor.shape, tensor.dtype)
        self.device.copy_out(tensor.pointer, array, self.device.streams.compute)
        return array

    def warm_up(self) -> None:
        """Compile and load every kernel that this layout can need."""
        variants = all_variants(self.layout.shape)
        for error in self.device.compiler.compile_all(variants, self.device.target, self._on_compile).values():
            raise error

        def load() -> None:
            for variant in variants:
                self.device.function(variant)

        self.submit(load).result()

    @property
    def health(self) -> DeviceHealth:
        """See `Backend.health`."""
        return self.device.queue.health

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        self.submit(lambda: None).result()

    def close(self) -> None:
        """See `Backend.close`; idempotent."""
        if self.health.is_foreign:  # a forked child has neither the threads nor the context
            return
        self.device.queue.close()
        if self.device.is_closed:
            return
        with self.device.failing_quietly():
            self.device.context.bind()
        with self.device.failing_quietly():
            self._held.close()
