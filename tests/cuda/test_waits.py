"""Waits between copies and kernels, buffers and events that are free again, and other threads while a step is captured.

Whatever order the streams allow, a lazy one included, a result is that of the order of calls.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import NUMPY_DTYPES, assert_close, attend, expected, fill, make_case, make_layout, poison
from helpers.captured_twins import open_backend
from helpers.cuda import make_virtual_backend
from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cuda import device as device_module
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.streams import Events
from pagedkv.dtypes import DType
from virtual_gpu import VirtualDriver

SCHEDULES = ["lazy", *range(8)]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def bytes_of(backend: CudaBackend, value: int) -> np.ndarray:
    return np.full(backend.layout.block_bytes, value, np.uint8)


@schedules
def test_a_block_is_written_behind_its_readers_and_read_behind_the_write(schedule):
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 5, 1), schedule=schedule)

    def job() -> list[np.ndarray]:
        for value, target in ((1, 1), (2, 2), (3, 3)):
            backend.write_block(0, bytes_of(backend, value))
            backend.copy_blocks([(0, target)])
        return [backend.read_block(block) for block in range(4)]

    assert [block[0] for block in backend.submit(job).result()] == [3, 1, 2, 3]
    backend.close()
    driver.assert_clean()


@schedules
def test_a_block_is_read_behind_the_kernel_that_wrote_it_and_before_the_next_one(schedule):
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 5, 1), schedule=schedule)

    def job() -> list[np.ndarray]:
        found = []
        for value in range(1, 4):
            backend.write_block(value, bytes_of(backend, value))
        for source in (1, 2, 3):
            backend.copy_blocks([(source, 0)])
            found.append(backend.read_block(0))
        return found

    assert [block[0] for block in backend.submit(job).result()] == [1, 2, 3]
    backend.close()
    driver.assert_clean()


@schedules
def test_a_written_block_is_what_attention_behind_it_reads(schedule):
    layout = make_layout(2, 1, 64, 16, 2, 1)
    backend, driver = make_virtual_backend(layout, schedule=schedule)
    case = make_case(layout, [16], [1], np.random.default_rng(0))
    block = int(case.batch.block_tables[0, 0])
    data = np.stack([case.keys[0][:, 0], case.values[0][:, 0]]).astype(NUMPY_DTYPES[DType.FLOAT32])

    def job() -> tuple[np.ndarray, np.ndarray]:
        backend.write_block(block, np.full(layout.block_bytes, 0xFF, np.uint8))
        backend.write_block(block, data.reshape(-1).view(np.uint8))
        result = backend.attend(0, backend.from_host(case.queries), case.batch, AttentionParams())
        found = backend.to_host(result.output), backend.to_host(result.lse)
        backend.write_block(block, np.full(layout.block_bytes, 0xFF, np.uint8))
        return found

    assert_close(backend.submit(job).result(), expected(case))
    backend.close()
    driver.assert_clean()


@schedules
def test_what_passes_the_staging_limit_arrives_and_may_be_changed_at_once(schedule, monkeypatch):
    """The first uploads of a job are staged, the later ones come from where they are."""
    monkeypatch.setattr(device_module, "STAGING_LIMIT", 3000)
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 5, 1), schedule=schedule)

    def job() -> list[np.ndarray]:
        host = np.empty((300, 2), np.float32)[:, 0]  # of which the copy takes every second number
        tensors = []
        for value in range(6):
            host[:] = value
            tensors.append(backend.add(backend.from_host(host), backend.from_host(host)))
        for block in range(3):
            data = bytes_of(backend, block)
            backend.write_block(block, data)
            data[:] = 0xEE
        return [backend.to_host(tensor) for tensor in tensors] + [backend.read_block(block) for block in range(3)]

    found = backend.submit(job).result()
    assert [array[-1] for array in found] == [0, 2, 4, 6, 8, 10, 0, 1, 2]
    assert all((array == array[0]).all() for array in found)
    backend.close()
    driver.assert_clean()


def test_a_device_that_reads_pageable_memory_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(device_module, "STAGING_LIMIT", 0)
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    driver.config.pageable_late = True
    host = np.ones(300, np.float32)

    def job() -> np.ndarray:
        tensor = backend.from_host(host)
        host[:] = 2
        return backend.to_host(tensor)

    try:
        assert (backend.submit(job).result() == 1).all()
    finally:
        backend.close()


@schedules
def test_staging_buffers_of_unawaited_jobs_keep_what_each_put_there(schedule):
    backend, driver = make_virtual_backend(make_layout(num_blocks=2), schedule=schedule)

    def job(value: int) -> np.ndarray:
        x = backend.from_host(np.full(200, value, np.float32))
        return backend.to_host(backend.add(x, backend.from_host(np.full(200, 100 * value, np.float32))))

    futures = [backend.submit(lambda v=value: job(v)) for value in range(12)]
    for value, future in enumerate(futures):
        assert (future.result() == 101 * value).all()
    backend.close()
    driver.assert_clean()


def test_scratch_memory_of_a_dropped_array_is_not_read_by_the_next_one():
    """The stand-in poisons it: an operation that reads what it did not write would be a fault."""
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))

    def job() -> None:
        pointer = backend.from_host(np.ones(64, np.float32)).pointer
        stale = backend.device.scratch.empty((64,), np.float32)
        assert stale.pointer == pointer
        backend.to_host(backend.add(stale, stale))

    with pytest.raises(Exception, match="nobody wrote"):
        backend.submit(job).result()
    assert driver.faults[0].kind == "uninitialised read"
    backend.close()


class WatchingDriver(VirtualDriver):
    """Notes which events somebody waits for, and which are recorded meanwhile."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backend: CudaBackend | None = None
        self.waited_for_free = 0

    def cuEventSynchronize(self, event: Any) -> Any:
        assert self.backend is not None
        self.waited_for_free += int(event) in [int(free) for free in self.backend.device.events._free]
        return super().cuEventSynchronize(event)


def test_an_event_is_free_for_others_only_when_nobody_waits_for_it_any_more():
    driver = WatchingDriver()
    backend = driver.backend = CudaBackend(make_layout(num_blocks=2), driver_module=driver, emit_ptx=True)
    for _ in range(5):
        backend.synchronize()
    assert driver.waited_for_free == 0
    backend.close()


def test_an_event_that_is_out_is_not_handed_out_again():
    backend, _ = make_virtual_backend(make_layout(num_blocks=2))

    def job() -> tuple[list[int], list[int]]:
        events, stream = Events(backend.device.context), backend.device.streams.compute
        first = [events.record(stream) for _ in range(3)]
        for event in first[:2]:
            events.give_back(event)
        again = [events.record(stream) for _ in range(3)]
        return [int(event) for event in first], [int(event) for event in again]

    first, again = backend.submit(job).result()
    assert len(set(first)) == 3
    assert set(again[:2]) == set(first[:2])
    assert again[2] not in first
    backend.close()


def repeat_with(backend: CudaBackend, aside: Any) -> int:
    """Repeat a step during whose capture another thread calls `aside`; return how many steps were captured."""

    def body(arrays: Any) -> Any:
        recording = backend.device.recording
        if recording is not None and recording.is_capturing:
            with ThreadPoolExecutor(1, initializer=backend.device.context.bind) as pool:
                pool.submit(aside).result()
        return backend.take_rows(table, arrays[0])

    values = np.arange(32, dtype=np.float32).reshape(2, 16)
    table = backend.submit(lambda: backend.from_host(values)).result()
    rows = np.array([1], np.int32)
    for _ in range(2):
        result = backend.submit(lambda: backend.to_host(backend.repeat("rows", [rows], body))).result()
        np.testing.assert_array_equal(result, values[rows])
    return backend.graphs.num_captured


def test_another_thread_may_take_and_free_memory_while_a_step_is_captured():
    backend, driver = open_backend(make_layout(num_blocks=2))

    def aside() -> None:
        call = backend.device.driver.call
        call("cuMemFree", call("cuMemAlloc", 512))

    assert repeat_with(backend, aside) == 1
    backend.close()
    driver.assert_clean()


def test_another_library_may_use_the_legacy_stream_while_a_step_is_captured():
    backend, driver = open_backend(make_layout(num_blocks=2))
    taken = backend.submit(lambda: backend.from_host(np.zeros(64, np.float32))).result()

    def aside() -> None:
        backend.device.driver.call("cuMemsetD8Async", taken.pointer, 0, 64, 0)
        backend.device.driver.call("cuStreamSynchronize", 0)

    assert repeat_with(backend, aside) == 1
    backend.close()
    driver.assert_clean()


def test_jobs_do_not_wait_for_the_legacy_stream_nor_it_for_them():
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))

    def job() -> np.ndarray:
        taken = backend.from_host(np.zeros(64, np.float32))
        backend.device.driver.call("cuMemsetD8Async", backend.pool.pointer, 0, 64, 0)
        return backend.to_host(taken)

    backend.submit(job).result()
    assert [op.name for op in driver.scheduler.pending()] == ["cuMemset"]
    driver.scheduler.complete_all()
    backend.close()
    driver.assert_clean()


KERNELS = {"attend": (False, 1), "attend_decode": (True, 2), "attend_mma": (True, 17)}


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.INT8])
@pytest.mark.parametrize("kernel", KERNELS)
def test_results_do_not_depend_on_the_order_of_warps(kernel, dtype):
    tensor_cores, num_queries = KERNELS[kernel]
    layout = make_layout(4, 2, 64, 16, 8, 1, dtype)
    results = []
    for seed in (None, 0, 1):
        backend, driver = make_virtual_backend(layout, tensor_cores=tensor_cores, min_partition=64)
        driver.config.warp_seed = seed
        case = make_case(layout, [100], [num_queries], np.random.default_rng(0))
        poison(backend)
        fill(backend, case, 0)
        results.append(attend(backend, case, 0))
        backend.close()
        driver.assert_clean()
    for output, lse in results[1:]:
        np.testing.assert_array_equal(output, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
