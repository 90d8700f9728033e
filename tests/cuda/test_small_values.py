"""Rows at the edge of what 8-bit storage can say: tiny, zero, not finite. The CPU and every CUDA path agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import attend, fill, make_case, make_layout
from helpers.cuda import make_virtual_backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType

quantized = pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT8_E4M3])
PATHS = pytest.mark.parametrize(
    ("tensor_cores", "num_queries", "kernel"),
    [(False, 1, "attend"), (True, 1, "attend_decode"), (True, 20, "attend_mma")],
    ids=["cores", "decode", "prefill"],
)
ROWS = {
    "tiny": lambda rows: rows * np.float32(1e-38),
    "denormal": lambda rows: rows * np.float32(1e-42),
    "just-stored": lambda rows: np.sign(rows) * np.float32(1.01e-30),
    "zero": lambda rows: rows * np.float32(0),
    "one-nan": lambda rows: with_one(rows, np.nan),
    "one-infinity": lambda rows: with_one(rows, -np.inf),
    "all-nan": lambda rows: rows * np.float32(np.nan),
}


def with_one(rows: np.ndarray, value: float) -> np.ndarray:
    rows = rows.copy()
    rows[:, :, 37] = value
    return rows


def make_small(dtype: DType) -> KvLayout:
    return make_layout(4, 1, 64, 16, 12, 1, dtype)


@PATHS
@quantized
def test_cu02_tiny_values_give_0_and_no_nan(tensor_cores, num_queries, kernel, dtype):
    backend, driver = make_virtual_backend(make_small(dtype), tensor_cores=tensor_cores, min_partition=64)
    case = make_case(backend.layout, [100], [num_queries], np.random.default_rng(0))
    case.values[0] *= np.float32(1e-38)
    fill(backend, case, 0)
    output, lse = attend(backend, case, 0)
    assert kernel in {launch.kernel for launch in driver.launches}
    np.testing.assert_array_equal(output, 0)
    assert np.isfinite(lse).all()
    backend.close()
    driver.assert_clean()


@PATHS
@quantized
@pytest.mark.parametrize("scale", [1e-38, 1e-42, 2e-45])
def test_cu02_scales_that_have_no_reciprocal_give_no_nan(tensor_cores, num_queries, kernel, dtype, scale):
    """Blocks from elsewhere: their scales are not ours to choose."""
    backend, driver = make_virtual_backend(make_small(dtype), tensor_cores=tensor_cores)
    case = make_case(backend.layout, [40], [num_queries], np.random.default_rng(0))
    fill(backend, case, 0)
    rescale(backend, np.float32(scale))
    output, _ = attend(backend, case, 0)
    assert (np.abs(output) <= 448 * scale).all()
    backend.close()
    driver.assert_clean()


def rescale(backend: Any, scale: np.float32) -> None:
    """Give every value in the pool another scale."""
    layout = backend.layout
    for block in range(layout.num_blocks):
        data = backend.submit(lambda block=block: backend.read_block(block)).result()
        scales = data[layout.scale_offset :].view(np.float32)
        scales[len(scales) // 2 :] = scale
        backend.submit(lambda block=block, data=data: backend.write_block(block, data)).result()


def stored(backend: Any, rows: np.ndarray, *, rotated: bool = False) -> np.ndarray:
    """Write rows as keys and as values; return their block."""
    slots = np.arange(len(rows))

    def job() -> np.ndarray:
        tensor = backend.from_host(rows)
        backend.write_kv(0, tensor, tensor, slots)
        return backend.read_block(0)

    return backend.submit(job).result()


@quantized
@pytest.mark.parametrize("name", ROWS)
def test_cu02_cpu_and_cuda_store_the_same_bytes_and_a_scale_of_0_below_the_smallest_peak(name, dtype):
    layout = make_layout(2, 2, 80, 8, 1, 1, dtype)
    rows = ROWS[name](np.random.default_rng(0).standard_normal((8, 2, 80)).astype(np.float32))
    virtual, driver = make_virtual_backend(layout)
    cpu = CpuBackend(layout, num_threads=1)
    blocks = [stored(backend, rows) for backend in (virtual, cpu)]
    virtual.close()
    cpu.close()
    driver.assert_clean()
    np.testing.assert_array_equal(*blocks)
    scales = blocks[0][layout.scale_offset :].view(np.float32)
    if name in ("tiny", "denormal", "zero"):
        assert not blocks[0].any()
    else:
        assert (np.isnan(scales) if name != "just-stored" else scales > 0).all()


@PATHS
@quantized
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_stored_row_that_is_not_finite_is_seen_in_the_output_by_every_path(
    tensor_cores, num_queries, kernel, dtype, side, value
):
    """Over several partitions: the part that met it is not taken for an empty one."""
    backend, driver = make_virtual_backend(make_small(dtype), tensor_cores=tensor_cores, min_partition=64)
    case = make_case(backend.layout, [150], [num_queries], np.random.default_rng(0))
    getattr(case, side)[0][3, 0, 5] = value
    fill(backend, case, 0)
    output, _ = attend(backend, case, 0)
    assert np.isnan(output).all()
    backend.close()
    driver.assert_clean()


@PATHS
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.INT8])
def test_queries_beyond_float16_pick_the_same_key_on_every_path(tensor_cores, num_queries, kernel, dtype):
    backend, driver = make_virtual_backend(make_small(dtype), tensor_cores=tensor_cores)
    case = make_case(backend.layout, [40], [num_queries], np.random.default_rng(0))
    case.queries[...] = 0
    case.queries[:, :, 7] = 1e6
    case.keys[0][:, :, 7] = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]  # the newest key wins by far
    fill(backend, case, 0)
    output, lse = attend(backend, case, 0)
    newest = case.values[0][40 - num_queries :, [0] * 4]
    assert np.abs(output - newest).max() < 0.05
    assert np.isfinite(lse).all()
    backend.close()
    driver.assert_clean()
