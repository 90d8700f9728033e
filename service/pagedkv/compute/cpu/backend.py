"""The CPU backend: the embedded default, complete on any machine that runs NumPy and numba."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy.typing as npt

from pagedkv.compute.cpu.kv_ops import CpuKvOps
from pagedkv.compute.layout import KvLayout
from pagedkv.compute.queue import DeviceQueue

T = TypeVar("T")


class CpuBackend(CpuKvOps):
    """A page pool in host memory with its kernels and its ordered queue.

    `num_threads` None means the cores this process may use (affinity and control groups respected). `isa` forces
    "avx512", "avx2" or "portable". `on_compile(done, total, name)` hears about every kernel that `warm_up` prepares.
    """

    name = "cpu"

    def __init__(
        self,
        layout: KvLayout,
        *,
        num_threads: int | None = None,
        on_compile: Callable[[int, int, str], None] | None = None,
        isa: str | None = None,
    ) -> None:
        super().__init__(layout)
        self._on_compile = on_compile
        self._queue = DeviceQueue("pagedkv-cpu")

    def warm_up(self) -> None:
        """Compile or load every kernel that this layout needs."""

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """See `Backend.submit`."""
        return self._queue.submit(job)

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
