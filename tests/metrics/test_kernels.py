"""Kernel times, on both backends."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.cuda import make_virtual_backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError
from tests.metrics.support import make_metrics, of, scrape, value


@pytest.fixture(params=["cpu", "cuda"])
def backend(request):
    layout = KvLayout(KvShape(2, 4, 2, 64), 4, 16)
    if request.param == "cpu":
        backend = CpuBackend(layout, num_threads=1)
        yield backend
        backend.close()
        return
    backend, driver = make_virtual_backend(layout)
    yield backend
    backend.close()
    driver.assert_clean()


def test_watched_backend_counts_and_times_its_kernels(backend):
    _, metrics = make_metrics()
    metrics.watch_backend(backend)
    keys = np.ones((3, 2, 64), np.float32)

    def write(layer):
        rows = backend.from_host(keys)
        backend.write_kv(layer, rows, rows, np.arange(3))

    for layer in (0, 1):
        backend.submit(lambda layer=layer: write(layer)).result()
    backend.submit(lambda: backend.copy_blocks([(0, 1)])).result()
    samples = scrape(metrics)
    assert value(samples, "pagedkv_kernel_launches_total", "write_kv") == 2
    assert value(samples, "pagedkv_kernel_launches_total", "copy_blocks") == 1
    assert value(samples, "pagedkv_kernel_seconds_total", "write_kv") > 0
    assert value(samples, "pagedkv_kernel_launches_total", "attend") == 0
    assert sum(of(samples, "pagedkv_kernel_launches_total").values()) == 3


def test_memory_of_a_watched_backend_is_told_by_use_and_grows_with_the_work(backend):
    _, metrics = make_metrics()
    metrics.watch_backend(backend)
    before = of(scrape(metrics), "pagedkv_backend_memory_bytes")
    assert set(before) == {("working",), ("steps",), ("staging",)}
    rows = np.ones((300, 64), np.float32)

    def job():
        gate = backend.from_host(rows)
        return backend.to_host(backend.silu_mul(gate, gate))

    result = backend.submit(job).result()
    after = of(scrape(metrics), "pagedkv_backend_memory_bytes")
    assert after["working",] - before["working",] >= result.nbytes == 300 * 64 * 4
    if backend.name == "cuda":
        assert after["staging",] >= rows.nbytes
    assert all(after[use] >= size for use, size in before.items())


def test_memory_of_a_repeated_step_is_that_of_steps(backend):
    _, metrics = make_metrics()
    metrics.watch_backend(backend)
    rows = np.ones((300, 64), np.float32)

    def job():
        result = backend.repeat("step", [rows], lambda arrays: backend.silu_mul(*map(backend.from_host, arrays * 2)))
        return backend.to_host(result).copy()

    if backend.name == "cuda":
        rows = rows[:30]
    for _ in range(2):
        backend.submit(job).result()
    assert of(scrape(metrics), "pagedkv_backend_memory_bytes")["steps",] >= rows.nbytes


def test_without_a_backend_its_memory_is_none():
    _, metrics = make_metrics()
    assert set(of(scrape(metrics), "pagedkv_backend_memory_bytes").values()) == {0}


def test_times_on_cuda_are_the_devices_and_not_those_of_the_launch():
    """The virtual device's clock goes on by a millisecond from one event to the next, however long the host takes."""
    backend, driver = make_virtual_backend(KvLayout(KvShape(2, 4, 2, 64), 4, 16))
    told = []

    def job():
        stop = backend.stopwatch(told.append)
        for _ in range(5):
            backend.copy_blocks([(0, 1)])
        stop()
        assert told == []  # the job is not complete
        return 7

    zeros = np.zeros(backend.layout.block_bytes, np.uint8)
    backend.submit(lambda: backend.write_block(0, zeros)).result()
    assert backend.submit(job).result() == 7
    assert told == [1e-3]
    backend.close()
    driver.assert_clean()


def test_kernel_that_fails_is_timed_and_its_error_passes_through():
    class Failing:
        memory_by_use = dict

        def attend(self):
            raise ValueError("no")

        def stopwatch(self, done):
            return lambda: done(0.5)

    _, metrics = make_metrics()
    backend = Failing()
    metrics.watch_backend(backend)
    with pytest.raises(ValueError, match="no"):
        backend.attend()
    assert value(scrape(metrics), "pagedkv_kernel_launches_total", "attend") == 1
    assert value(scrape(metrics), "pagedkv_kernel_seconds_total", "attend") == 0.5


def test_error_of_a_kernel_passes_though_the_failed_device_cannot_be_timed_any_more():
    class Dead:
        memory_by_use = dict

        def attend(self):
            raise ValueError("the reason")

        def stopwatch(self, done):
            def stop():
                raise DeviceError("cuEventRecord")

            return stop

    _, metrics = make_metrics()
    backend = Dead()
    metrics.watch_backend(backend)
    with pytest.raises(ValueError, match="the reason"):
        backend.attend()
