"""The ordering law on streams that run as late, or in as odd an order, as their events allow."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from helpers.attention_cases import assert_close, attend, expected, fill, make_case, make_layout
from helpers.cuda import make_virtual_backend
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.errors import DeviceError
from virtual_gpu.profile import Profile

TINY = Profile(memory_bytes=4 << 20, host_bytes=4 << 20)


@pytest.mark.parametrize("schedule", ["lazy", *range(5)])
def test_sc01_a_step_uses_its_own_table_though_the_next_one_is_prepared(schedule):
    layout = make_layout(2, 1, 64, 8, 8, 1)
    backend, driver = make_virtual_backend(layout, schedule=schedule)
    case = make_case(layout, [8], [1], np.random.default_rng(0))
    other = make_case(layout, [8], [1], np.random.default_rng(1))
    fill(backend, case, 0)
    if case.batch.block_tables[0, 0] != other.batch.block_tables[0, 0]:
        fill(backend, other, 0)

    def job_for(one):
        def job():
            result = backend.attend(0, backend.from_host(one.queries), one.batch, AttentionParams())
            return backend.to_host(result.output), backend.to_host(result.lse)

        return job

    futures = [(one, backend.submit(job_for(one))) for one in (case, other) * 4]
    for one, future in futures:
        assert_close(future.result(), expected(one))
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("schedule", ["lazy", *range(8)])
def test_sc02_a_swap_out_reads_what_the_writer_before_it_wrote_and_nothing_later(schedule):
    layout = make_layout(2, 1, 64, 8, 2, 1)
    backend, driver = make_virtual_backend(layout, schedule=schedule)
    rows = np.random.default_rng(0).standard_normal((2, 8, 1, 64)).astype(np.float32)

    def step(keys):
        backend.write_kv(0, backend.from_host(keys), backend.from_host(keys), np.arange(8))
        return backend.read_block(0)

    futures = [backend.submit(lambda r=r: step(rows[r % 2])) for r in range(6)]
    for index, future in enumerate(futures):
        stored = future.result().view(np.float32).reshape(2, 8, 64)
        np.testing.assert_array_equal(stored[0], rows[index % 2][:, 0])
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("schedule", ["lazy", *range(5)])
def test_sc12_a_swap_in_from_a_dropped_host_array_writes_its_bytes(schedule):
    layout = make_layout(2, 1, 64, 8, 2, 1)
    backend, driver = make_virtual_backend(layout, schedule=schedule)
    futures = []
    for number in range(8):
        source = np.full(layout.block_bytes, number, np.uint8)

        def job(data=source):
            backend.write_block(0, data)
            data[:] = 0xEE  # the caller's array is free at once
            return backend.read_block(0)

        futures.append(backend.submit(job))
        del source, job
        gc.collect(0)
    for number, future in enumerate(futures):
        assert (future.result() == number).all()
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("schedule", ["lazy", *range(5)])
def test_sc14_nothing_zeroes_new_pool_memory_after_the_first_write(schedule):
    layout = make_layout(2, 1, 64, 8, 2, 1)
    backend, driver = make_virtual_backend(layout, schedule=schedule)
    data = np.full(layout.block_bytes, 7, np.uint8)
    backend.submit(lambda: backend.write_block(1, data)).result()
    assert (backend.submit(lambda: backend.read_block(1)).result() == 7).all()
    backend.close()
    driver.assert_clean()


def test_a_copy_on_write_then_a_write_then_attention_in_one_job_see_one_another():
    layout = make_layout(4, 2, 64, 8, 8, 1)
    for schedule in range(6):
        backend, driver = make_virtual_backend(layout, schedule=schedule)
        case = make_case(layout, [12], [1], np.random.default_rng(schedule))
        fill(backend, case, 0)
        fresh = next(b for b in range(8) if b not in case.batch.block_tables[0, :2])
        old = int(case.batch.block_tables[0, 1])
        case.batch.block_tables[0, 1] = fresh
        row = np.random.default_rng(9).standard_normal((1, 2, 64)).astype(np.float32)
        case.keys[0][11], case.values[0][11] = row[0], row[0]

        def job(case=case, backend=backend, old=old, fresh=fresh, row=row):
            backend.copy_blocks([(old, fresh)])
            rows = backend.from_host(row)
            backend.write_kv(0, rows, rows, np.array([fresh * 8 + 3]))
            result = backend.attend(0, backend.from_host(case.queries), case.batch, AttentionParams())
            return backend.to_host(result.output), backend.to_host(result.lse)

        assert_close(backend.submit(job).result(), expected(case))
        backend.close()
        driver.assert_clean()


def run_swap_fork_and_decode(backend: CudaBackend) -> bytes:
    """Fill, swap out, fork with a copied block, swap in elsewhere, decode from all; return every output byte."""
    case = make_case(backend.layout, [12], [1], np.random.default_rng(1))
    case.batch.block_tables[0, :2] = (0, 1)
    row = np.full((1, 1, 64), 0.5, np.float32)

    def attend_to(first: int, second: int):
        batch = AttentionBatch(np.array([[first, second]], np.int32), case.batch.context_lens, case.batch.query_starts)
        result = backend.attend(0, backend.from_host(case.queries), batch, AttentionParams())
        return backend.to_host(result.output)

    def write_all():
        for part in (0, 1):
            rows = slice(8 * part, min(12, 8 * part + 8))
            slots = np.arange(rows.start, rows.stop)
            backend.write_kv(0, backend.from_host(case.keys[0][rows]), backend.from_host(case.values[0][rows]), slots)

    def fork_and_write():
        backend.copy_blocks([(1, 3)])
        backend.write_kv(0, backend.from_host(row), backend.from_host(row), np.array([3 * 8 + 3]))
        return attend_to(0, 3), attend_to(0, 1)

    def swap_in():
        backend.swap_in([(5, 0)])
        backend.write_kv(0, backend.from_host(row), backend.from_host(row), np.array([1 * 8 + 2]))
        return attend_to(0, 5), attend_to(0, 1)

    backend.submit(write_all)
    backend.submit(lambda: backend.swap_out([(1, 0)]))
    forked = backend.submit(fork_and_write)
    back = backend.submit(swap_in)
    outputs = [*forked.result(), *back.result()]
    return b"".join(output.tobytes() for output in outputs)


def test_200_random_schedules_of_swap_fork_and_decode_give_the_same_outputs():
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 8, 1), profile=TINY, num_host_blocks=1)
    exact = run_swap_fork_and_decode(backend)
    assert np.isfinite(np.frombuffer(exact, np.float32)).all()
    for seed in range(200):
        driver.scheduler.random = random.Random(seed)
        assert run_swap_fork_and_decode(backend) == exact, f"schedule {seed}"
    backend.close()
    driver.assert_clean()


def test_a_fault_fails_its_job_and_every_later_one():
    layout = make_layout(num_blocks=2)
    backend, _ = make_virtual_backend(layout)
    backend.pool.pointer += 1 << 40
    rows = np.zeros((1, 2, 64), np.float32)
    future = backend.submit(
        lambda: backend.write_kv(0, backend.from_host(rows), backend.from_host(rows), np.array([0]))
    )
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        future.result()
    assert backend.health.failure is not None
    with pytest.raises(DeviceError):
        backend.submit(lambda: attend(backend, make_case(layout, [1], [1], np.random.default_rng(0)), 0)).result()
    backend.close()


def test_a_jobs_own_error_reaches_its_future_alone():
    backend, _ = make_virtual_backend(make_layout(num_blocks=2))
    with pytest.raises(ZeroDivisionError):
        backend.submit(lambda: 1 // 0).result()
    assert backend.submit(lambda: 5).result() == 5
    backend.close()
    with pytest.raises(DeviceError, match="closed"):
        backend.submit(lambda: 5)
