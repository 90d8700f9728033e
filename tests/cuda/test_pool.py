"""The pool as other libraries see it."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from helpers.cuda import make_virtual_backend


@pytest.fixture
def opened():
    backend, driver = make_virtual_backend(make_layout(4, 2, 64, 16, 4, 2))
    yield backend, driver
    backend.close()
    driver.assert_clean()


def test_a_layers_view_addresses_the_bytes_that_write_kv_stored(opened):
    backend, driver = opened
    rows = np.random.default_rng(0).standard_normal((1, 2, 64)).astype(np.float32)

    def job():
        tensor = backend.from_host(rows)
        backend.write_kv(1, tensor, tensor, np.array([2 * 16 + 5]))

    backend.submit(job).result()
    view = backend.pool.layer_view(1, is_value=True).__cuda_array_interface__
    assert view["shape"] == (4, 2, 16, 64)
    for head in range(2):
        offset = 2 * view["strides"][0] + head * view["strides"][1] + 5 * view["strides"][2]
        stored = driver.view(view["data"][0] + offset, 256).view(np.float32)
        np.testing.assert_array_equal(stored, rows[0, head])
