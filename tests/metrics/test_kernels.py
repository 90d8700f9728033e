"""Kernel times, on the real CPU backend."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from tests.metrics.support import make_metrics, of, scrape, value


def test_watched_backend_counts_and_times_its_kernels():
    _, metrics = make_metrics()
    backend = CpuBackend(KvLayout(KvShape(2, 4, 2, 64), 4, 16), num_threads=1)
    try:
        metrics.watch_backend(backend)
        keys = np.ones((3, 2, 64), np.float32)
        for layer in (0, 1):
            backend.submit(lambda layer=layer: backend.write_kv(layer, keys, keys, np.arange(3))).result()
        backend.submit(lambda: backend.copy_blocks([(0, 1)])).result()
    finally:
        backend.close()
    samples = scrape(metrics)
    assert value(samples, "pagedkv_kernel_launches_total", "write_kv") == 2
    assert value(samples, "pagedkv_kernel_launches_total", "copy_blocks") == 1
    assert value(samples, "pagedkv_kernel_seconds_total", "write_kv") > 0
    assert value(samples, "pagedkv_kernel_launches_total", "attend") == 0
    assert sum(of(samples, "pagedkv_kernel_launches_total").values()) == 3


def test_kernel_that_fails_is_timed_and_its_error_passes_through():
    class Failing:
        def attend(self):
            raise ValueError("no")

    _, metrics = make_metrics()
    backend = Failing()
    metrics.watch_backend(backend)
    with pytest.raises(ValueError, match="no"):
        backend.attend()
    assert value(scrape(metrics), "pagedkv_kernel_launches_total", "attend") == 1
