"""Times by events, the L2 cache flushed between repeats."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.device import Device
from tests.gpu.problem import Problem, batch_of


class Timer:
    """Times work on a device's compute stream, in seconds. To be used inside a job."""

    def __init__(self, device: Device, flush_bytes: int, repeats: int) -> None:
        self.device, self.repeats, self.flush_bytes = device, repeats, flush_bytes
        self._flush = device.scratch.empty((flush_bytes,), np.uint8)
        self._events = [device.driver.call("cuEventCreate", 0) for _ in range(2)]

    def flush(self) -> None:
        """Push everything out of the L2 cache, for long enough that the host runs ahead of the device."""
        for value in (0, 1, 2):
            args = (self._flush.pointer, value, self.flush_bytes, self.device.streams.compute)
            self.device.driver.call("cuMemsetD8Async", *args)

    def median(self, work: Callable[[], Any]) -> float:
        """Return the median time of `work`, which enqueues on the compute stream; one run goes before."""
        call, stream = self.device.driver.call, self.device.streams.compute
        work()
        samples = []
        for _ in range(self.repeats):
            self.flush()
            call("cuEventRecord", self._events[0], stream)
            work()
            call("cuEventRecord", self._events[1], stream)
            call("cuEventSynchronize", self._events[1])
            samples.append(float(call("cuEventElapsedTime", *self._events)) / 1e3)
        return statistics.median(samples)


def copy_bandwidth(timer: Timer, num_bytes: int) -> float:
    """Return bytes read and written a second by a copy within the device."""
    device = timer.device
    source, target = (device.scratch.empty((num_bytes,), np.uint8) for _ in range(2))
    device.driver.call("cuMemsetD8Async", source.pointer, 1, num_bytes, device.streams.compute)
    args = (target.pointer, source.pointer, num_bytes, device.streams.compute)
    return 2 * num_bytes / timer.median(lambda: device.driver.call("cuMemcpyDtoDAsync", *args))


def attend_seconds(problem: Problem, flush_bytes: int, repeats: int, **backend_options: Any) -> float:
    """Return the time of one attention call on a pool of zeros (the time does not depend on the values)."""
    backend = CudaBackend(problem.layout, tensor_cores=problem.tensor_cores, **backend_options)
    batch = batch_of(problem, np.random.default_rng(0))
    shape = (sum(problem.query_lens), problem.num_heads, problem.head_dim)

    def job() -> float:
        _clear_pool(backend)
        queries = backend.from_host(np.ones(shape, np.float32))
        timer = Timer(backend.device, flush_bytes, repeats)
        return timer.median(lambda: backend.attend(0, queries, batch, AttentionParams()))

    return _run(backend, job)


def pool_seconds(
    problem: Problem, flush_bytes: int, repeats: int, **backend_options: Any
) -> dict[str, tuple[float, int]]:
    """Return time and bytes moved (read and written) of write_kv and copy_blocks over a whole pool."""
    backend = CudaBackend(problem.layout, **backend_options)
    layout = backend.layout
    num_slots, half = layout.num_blocks * layout.block_size, layout.num_blocks // 2

    def job() -> dict[str, tuple[float, int]]:
        _clear_pool(backend)
        rows = backend.from_host(np.zeros((num_slots, layout.shape.num_kv_heads, layout.shape.head_dim), np.float16))
        slots = np.random.default_rng(0).permutation(num_slots)
        copies = [(index, half + index) for index in range(half)]
        timer = Timer(backend.device, flush_bytes, repeats)
        return {
            "write_kv": (timer.median(lambda: backend.write_kv(0, rows, rows, slots)), 2 * layout.pool_bytes),
            "copy_blocks": (timer.median(lambda: backend.copy_blocks(copies)), 2 * half * layout.block_bytes),
        }

    return _run(backend, job)


def bandwidth(problem: Problem, flush_bytes: int, repeats: int, copy_bytes: int, **backend_options: Any) -> float:
    """Return the copy bandwidth of the device."""
    backend = CudaBackend(problem.layout, **backend_options)
    return _run(backend, lambda: copy_bandwidth(Timer(backend.device, flush_bytes, repeats), copy_bytes))


def _clear_pool(backend: CudaBackend) -> None:
    args = (backend.pool.pointer, 0, backend.layout.pool_bytes, backend.device.streams.compute)
    backend.device.driver.call("cuMemsetD8Async", *args)


def _run(backend: CudaBackend, job: Callable[[], Any]) -> Any:
    try:
        return backend.submit(job).result()
    finally:
        backend.close()
