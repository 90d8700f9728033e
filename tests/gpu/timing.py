"""Times by events, the L2 cache flushed between repeats."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.device import Device
from tests.gpu.problem import Problem, batch_of

_FASTEST_MEMSET = 8e12  # bytes a second that no device exceeds
_MOST_FLUSHES = 400


class Timer:
    """Times work on a device's compute stream, in seconds. To be used inside a job."""

    def __init__(self, device: Device, flush_bytes: int, repeats: int) -> None:
        self.device, self.repeats, self.flush_bytes = device, repeats, flush_bytes
        self._flush = device.scratch.empty((flush_bytes,), np.uint8)
        self._events = [device.driver.call("cuEventCreate", 0) for _ in range(2)]

    def flush(self, times: int) -> None:
        """Push everything out of the L2 cache, as often as it takes for the host to run ahead of the device."""
        for value in range(times):
            args = (self._flush.pointer, value % 256, self.flush_bytes, self.device.streams.compute)
            self.device.driver.call("cuMemsetD8Async", *args)

    def median(self, work: Callable[[], Any]) -> float:
        """Return the median time of `work`, which enqueues on the compute stream; two runs go before."""
        call, stream = self.device.driver.call, self.device.streams.compute
        work()
        started = time.perf_counter()
        work()
        host_seconds = time.perf_counter() - started
        times = min(_MOST_FLUSHES, max(3, math.ceil(2 * host_seconds * _FASTEST_MEMSET / self.flush_bytes)))
        samples = []
        for _ in range(self.repeats):
            self.flush(times)
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


def write_seconds(problem: Problem, flush_bytes: int, repeats: int, **backend_options: Any) -> list[float]:
    """Return the times of write_kv over a whole pool, shuffled and in order, and the bytes it reads and writes."""
    backend = CudaBackend(problem.layout, **backend_options)
    layout = backend.layout
    num_slots = layout.num_blocks * layout.block_size

    def job() -> list[float]:
        _clear_pool(backend)
        shape = layout.shape
        rows = backend.from_host(np.zeros((num_slots, shape.num_kv_heads, shape.head_dim), np.float16))
        order = np.arange(num_slots)
        slots = np.random.default_rng(0).permutation(num_slots)
        timer = Timer(backend.device, flush_bytes, repeats)
        times = [timer.median(lambda at=at: backend.write_kv(0, rows, rows, at)) for at in (slots, order)]
        return [*times, 2 * layout.pool_bytes]

    return _run(backend, job)


def copy_seconds(problem: Problem, flush_bytes: int, repeats: int, **backend_options: Any) -> list[float]:
    """Return the times of copy_blocks over half a pool, shuffled and in order, and the bytes it reads and writes.

    In order, neighbours go to neighbours.
    """
    backend = CudaBackend(problem.layout, **backend_options)
    half = backend.layout.num_blocks // 2

    def job() -> list[float]:
        _clear_pool(backend)
        targets = [half + int(index) for index in np.random.default_rng(0).permutation(half)]
        timer = Timer(backend.device, flush_bytes, repeats)
        pairs = (list(enumerate(targets)), [(index, half + index) for index in range(half)])
        times = [timer.median(lambda at=at: backend.copy_blocks(at)) for at in pairs]
        return [*times, 2 * half * backend.layout.block_bytes]

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
