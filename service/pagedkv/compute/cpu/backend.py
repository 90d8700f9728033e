"""The CPU backend: the embedded default, complete on any machine that runs NumPy and numba."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy.typing as npt

from pagedkv.compute.backend import Float32Array, Int32Array, Int64Array, Rotation
from pagedkv.compute.cpu.dense import CpuDenseOps
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.compute.cpu.kv_ops import CpuKvOps
from pagedkv.compute.cpu.program import Programs
from pagedkv.compute.cpu.threads import WorkerPool
from pagedkv.compute.health import DeviceHealth
from pagedkv.compute.layout import KvLayout
from pagedkv.compute.queue import DeviceQueue
from pagedkv.config import require

T = TypeVar("T")


class CpuBackend(CpuKvOps, CpuDenseOps):
    """A page pool in host memory with its kernels and its ordered queue.

    `num_threads` None means the cores this process may use (affinity and control groups respected). `isa` forces
    "avx512", "avx2" or "portable". `activations` is what linear layers round their inputs to, see CpuDenseOps.
    `on_compile(done, total, name)` hears about every kernel that `warm_up` prepares.
    `num_host_blocks` are there to swap to.
    """

    name = "cpu"
    repeats_prompts = True

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_threads: int | None = None,
        on_compile: Callable[[int, int, str], None] | None = None,
        isa: str | None = None,
        num_host_blocks: int = 0,
        activations: str = "float32",
    ) -> None:
        require(num_threads is None or num_threads >= 1, "num_threads", "must be at least 1", num_threads, 1)
        chosen = choose_isa(isa)
        workers = WorkerPool(num_threads)
        CpuKvOps.__init__(self, layout, chosen, workers, num_host_blocks)
        CpuDenseOps.__init__(self, chosen, workers, activations=activations)
        self._programs = Programs(workers)
        self._on_compile = on_compile
        self.health = DeviceHealth()
        self._queue = DeviceQueue("pagedkv-cpu", self.health)

    @property
    def isa(self) -> str:
        """Name of the instruction set that the kernels are built for."""
        return self._isa.name

    @property
    def num_threads(self) -> int:
        """Threads that a kernel runs on."""
        return self._workers.num_threads

    def rope_write_kv(
        self,
        layer: int,
        queries: Float32Array,
        keys: Float32Array,
        values: Float32Array,
        positions: Int32Array,
        slot_mapping: Int64Array,
        rotation: Rotation,
    ) -> None:
        """See Backend.rope_write_kv."""
        self.rope(queries, positions, rotation)
        self.rope(keys, positions, rotation)
        self.write_kv(layer, keys, values, slot_mapping)

    def repeat(
        self,
        shape: Hashable,
        inputs: Sequence[npt.NDArray[Any]],
        body: Callable[[Sequence[npt.NDArray[Any]]], Any],
        finish: Callable[[Any], Any] = lambda result: result,
        padding: Sequence[int] = (),
    ) -> Any:
        """See Backend.repeat; nothing is padded, and `finish` is not recorded."""
        return finish(self._programs.run(shape, inputs, body))

    def warm_up(self) -> None:
        """Compile, or load from disk, every kernel that this layout and the weights loaded so far need."""
        wanted = [(name, self._kernels, make) for name, make in self.kernel_makers().items()]
        wanted += [(name, self._dense_kernels, make) for name, make in self.dense_kernel_makers().items()]
        tell = self._on_compile or (lambda done, total, name: None)
        for done, (name, kernels, make) in enumerate(wanted):
            tell(done, len(wanted), name)
            if name not in kernels:
                kernels[name] = make()
        tell(len(wanted), len(wanted), "")

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """See `Backend.submit`."""
        return self._queue.submit(job)

    def stopwatch(self, done: Callable[[float], None]) -> Callable[[], None]:
        """See `Backend.stopwatch`."""
        started = time.perf_counter()
        return lambda: done(time.perf_counter() - started)

    def memory_by_use(self) -> dict[str, int]:
        """See `Backend.memory_by_use`."""
        return {"working": self._buffers.kept_bytes, "steps": self._programs.kept_bytes, "staging": 0}

    def from_host(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array itself."""
        return array

    def to_host(self, tensor: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the tensor itself."""
        return tensor

    def synchronize(self) -> None:
        """See `Backend.synchronize`."""
        self._queue.synchronize()

    def close(self) -> None:
        """See `Backend.close`; idempotent."""
        self._queue.close()
        self._workers.close()
