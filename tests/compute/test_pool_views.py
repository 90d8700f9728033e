"""The CPU's pool as other libraries see it."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from helpers.dlpack import Consumed
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.dlpack import CPU_DEVICE
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument


def open_with_row(dtype: DType, row: np.ndarray) -> CpuBackend:
    """Return a backend with the row [2, 64] in layer 1 at offset 5 of block 2, K and twice as large in V."""
    backend = CpuBackend(make_layout(4, 2, 64, 16, 4, 2, dtype), num_threads=1)
    backend.submit(lambda: backend.write_kv(1, row[None], 2 * row[None], np.array([2 * 16 + 5]))).result()
    return backend


@pytest.fixture
def row():
    return np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)


@pytest.mark.parametrize(("dtype", "kind"), [(DType.FLOAT32, np.float32), (DType.FLOAT16, np.float16)])
def test_numpy_takes_a_layers_view_without_a_copy(row, dtype, kind):
    backend = open_with_row(dtype, row)
    for is_value in (False, True):
        view = np.from_dlpack(backend.pool.layer_view(1, is_value))
        assert (view.shape, view.dtype) == ((4, 2, 16, 64), kind)
        np.testing.assert_array_equal(view[2, :, 5], (row * (1 + is_value)).astype(kind))
        fresh = np.full((1, 2, 64), 3, np.float32)
        backend.submit(lambda rows=fresh: backend.write_kv(1, rows, rows, np.array([0]))).result()
        assert (view[0, :, 0] == 3).all()
    backend.close()


def test_a_quantised_layer_is_its_elements_times_its_scales(row):
    backend = open_with_row(DType.INT8, row)
    elements = np.from_dlpack(backend.pool.layer_view(1, True))
    scales = np.from_dlpack(backend.pool.scale_view(1, True))
    assert (elements.dtype, scales.shape) == (np.int8, (4, 2, 16))
    peaks = np.abs(2 * row).max(1, keepdims=True)
    assert (np.abs(elements[2, :, 5] * scales[2, :, 5, None] - 2 * row) <= 0.5 / 127 * peaks * 1.0001).all()
    backend.close()


@pytest.mark.parametrize(("dtype", "code"), [(DType.BFLOAT16, (4, 16)), (DType.FLOAT8_E4M3, (10, 8))])
def test_types_that_numpy_has_no_name_for_keep_their_codes(row, dtype, code):
    backend = open_with_row(dtype, row)
    view = backend.pool.layer_view(0, False)
    assert view.__dlpack_device__() == (CPU_DEVICE, 0)
    taken = Consumed(view.__dlpack__(max_version=(1, 1)))
    assert (taken.type, taken.device, taken.shape) == (code, (CPU_DEVICE, 0), (4, 2, 16, 64))
    taken.close()
    backend.close()


def test_the_raw_pool_is_what_read_block_returns(row):
    backend = open_with_row(DType.FLOAT32, row)
    raw = np.from_dlpack(backend.pool.raw_view())
    for block in range(4):
        np.testing.assert_array_equal(raw[block], backend.submit(lambda b=block: backend.read_block(b)).result())
    backend.close()


def test_a_view_outlives_its_backend(row):
    backend = open_with_row(DType.FLOAT32, row)
    view = np.from_dlpack(backend.pool.layer_view(1, False))
    backend.close()
    del backend
    np.testing.assert_array_equal(view[2, :, 5], row)


def test_what_cannot_be_lent_is_refused(row):
    backend = open_with_row(DType.FLOAT32, row)
    with pytest.raises(BufferError, match="streams"):
        backend.pool.raw_view().__dlpack__(stream=1)
    with pytest.raises(InvalidArgument, match="layer"):
        backend.pool.layer_view(2, False)
    with pytest.raises(InvalidArgument, match="dtype"):
        backend.pool.scale_view(0, False)
    backend.close()
