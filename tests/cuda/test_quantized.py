"""8-bit storage on the virtual GPU: the quantiser equals the CPU's, attention the oracle on the values stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.attention_cases import Case, assert_close, attend, blocks_needed, expected, fill, make_case, make_layout
from helpers.attention_cases import poison as poison_pool
from helpers.cuda import SMALL, make_virtual_backend
from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cuda.kernels import choose_attention
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType
from virtual_gpu import Profile

LONG = 333  # keys: six tiles in one partition, more than a ring of stages holds; six partitions of 64
PARTITIONS = (64, 1024)  # fewest keys of one
KINDS: dict[DType, Any] = {DType.INT8: np.int8, DType.FLOAT8_E4M3: ml_dtypes.float8_e4m3fn}
quantized = pytest.mark.parametrize("dtype", KINDS)


def read_blocks(backend: Any) -> np.ndarray:
    def job() -> list[np.ndarray]:
        return [backend.read_block(block) for block in range(backend.layout.num_blocks)]

    return np.stack(backend.submit(job).result())


def stored_rows(layout: KvLayout, blocks: np.ndarray, layer: int) -> np.ndarray:
    """Return the values that the pool's bytes mean, float64 [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
    shape, layer_bytes = layout.shape, layout.layer_stride
    part = np.ascontiguousarray(blocks[:, layer * layer_bytes : (layer + 1) * layer_bytes])
    lead = (layout.num_blocks, 2, shape.num_kv_heads, layout.block_size)
    elements = np.ascontiguousarray(part[:, : layout.scale_offset]).view(KINDS[shape.dtype]).astype(np.float64)
    scales = np.ascontiguousarray(part[:, layout.scale_offset :]).view(np.float32).astype(np.float64)
    return elements.reshape(*lead, shape.head_dim) * scales.reshape(*lead, 1)


def as_stored(layout: KvLayout, blocks: np.ndarray, case: Case, layer: int) -> Case:
    """Return the case with the keys and values that attention reads."""
    rows, size = stored_rows(layout, blocks, layer), layout.block_size
    picked = [rows[slots // size, :, :, slots % size] for slots in case.slots]
    return replace(case, keys=[part[:, 0] for part in picked], values=[part[:, 1] for part in picked])


def check_attend(
    layout: KvLayout,
    lens: list[int],
    query_lens: list[int],
    params: AttentionParams | None = None,
    *,
    tensor_cores: bool = False,
    profile: Profile = SMALL,
) -> None:
    """Attend on a pool poisoned with NaN, in partitions of each size; a sequence of LONG keys joins those given.

    CUDA cores give float32 arithmetic on what is stored, so do tensor cores for few rows; for many they give 2e-3.
    """
    lens, query_lens = [*lens, LONG], [*query_lens, max(query_lens)]
    layout = replace(layout, num_blocks=blocks_needed(lens, layout.block_size) + 2)
    case = make_case(layout, lens, query_lens, np.random.default_rng(len(lens)))
    kernel = choose_attention(layout.shape, max(query_lens) * layout.shape.group_size, tensor_cores).name
    for size in PARTITIONS:
        backend, driver = make_virtual_backend(layout, min_partition=size, tensor_cores=tensor_cores, profile=profile)
        poison_pool(backend)
        fill(backend, case, 1)
        result = attend(backend, case, 1, params)
        exact = expected(as_stored(layout, read_blocks(backend), case, 1), params)
        backend.close()
        driver.assert_clean()
        assert_close(result, exact, 2e-3 if kernel == "attend_mma" else 2e-6)
        assert kernel in {stats.kernel for stats in driver.launches}


@quantized
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_attend_any_head_dim_equals_the_oracle_on_the_stored_values(head_dim, dtype):
    lens = [1, 33, 90]
    check_attend(make_layout(4, 2, head_dim, 16, blocks_needed(lens, 16) + 2, 2, dtype), lens, [1, 2, 1])


@quantized
@pytest.mark.parametrize("group_size", [1, 3, 7, 8, 12])
def test_attend_any_group_size_equals_the_oracle_on_the_stored_values(group_size, dtype):
    lens = [1, 40, 19]
    check_attend(make_layout(2 * group_size, 2, 64, 8, blocks_needed(lens, 8) + 2, 2, dtype), lens, [1, 1, 3])


@quantized
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_attend_any_block_size_and_boundary_length_equals_the_oracle_on_the_stored_values(block_size, dtype):
    lens = [1, block_size - 1, block_size, block_size + 1, 3 * block_size]
    layout = make_layout(4, 1, 64, block_size, blocks_needed(lens, block_size) + 2, 2, dtype)
    check_attend(layout, lens, [1, 1, 1, 1, 1])


@quantized
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_attend_on_tensor_cores_any_head_dim_is_near_the_oracle_on_the_stored_values(head_dim, dtype):
    lens = [33, 140, 1, 0]
    layout = make_layout(4, 1, head_dim, 16, blocks_needed(lens, 16) + 2, 2, dtype)
    check_attend(layout, lens, [20, 3, 1, 0], tensor_cores=True)


@quantized
@pytest.mark.parametrize("head_dim", [64, 80, 112, 128, 192, 256])
@pytest.mark.parametrize("rows", [4, 12])
def test_decode_on_tensor_cores_any_head_dim_equals_the_oracle_on_the_stored_values(head_dim, dtype, rows):
    lens = [1, 15, 16, 17, 150, 0]
    layout = make_layout(2 * rows, 2, head_dim, 16, blocks_needed(lens, 16) + 2, 2, dtype)
    check_attend(layout, lens, [1, 1, 1, 1, 1, 0], tensor_cores=True)


@pytest.mark.parametrize("num_queries", [1, 20])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_attend_on_a_device_that_converts_float8_itself_equals_the_oracle(head_dim, num_queries):
    profile = replace(SMALL, capability=(9, 0))
    lens = [num_queries, 100]
    layout = make_layout(4, 1, head_dim, 16, blocks_needed(lens, 16) + 2, 2, DType.FLOAT8_E4M3)
    check_attend(layout, lens, [num_queries, 1], tensor_cores=True, profile=profile)


@quantized
@pytest.mark.parametrize("num_queries", [4, 20])
def test_attend_on_tensor_cores_bears_scales_of_any_size(dtype, num_queries):
    """Values of tokens differ by 2^60 in size, and some are zeros: weights times scales stay within float16."""
    layout = make_layout(4, 1, 64, 16, 12, 2, dtype)
    backend, driver = make_virtual_backend(layout, tensor_cores=True)
    case = make_case(layout, [150], [num_queries], np.random.default_rng(0))
    sizes = np.float32(2) ** np.random.default_rng(1).integers(-40, 20, (150, 1, 1)).astype(np.float32)
    sizes[[0, 5, 70, 149]] = 0
    case.values[0] *= sizes
    case.values[0][:10] = 0
    poison_pool(backend)
    fill(backend, case, 1)
    output, _ = attend(backend, case, 1)
    exact = expected(as_stored(layout, read_blocks(backend), case, 1)).output
    assert np.abs(output - exact).max() <= 2e-3 * np.abs(exact).max()
    backend.close()
    driver.assert_clean()


@quantized
@pytest.mark.parametrize(("kernel", "num_queries"), [("attend_decode", 1), ("attend_mma", 16)])
def test_widened_elements_have_no_bank_conflicts(dtype, kernel, num_queries):
    layout = make_layout(8, 1, 128, 16, 34, 1, dtype)
    backend, driver = make_virtual_backend(layout)
    case = make_case(layout, [512], [num_queries], np.random.default_rng(0))
    fill(backend, case, 0)
    attend(backend, case, 0)
    stats = next(launch for launch in reversed(driver.launches) if launch.kernel == kernel)
    assert stats.instructions["mma"] > 0
    assert stats.bank_conflict_ratio <= 1.1
    backend.close()


@quantized
@pytest.mark.parametrize(
    ("tensor_cores", "num_queries"), [(False, 2), (True, 2), (True, 9)], ids=["cores", "decode", "tensor-cores"]
)
def test_attend_with_all_options_over_partitions_equals_the_oracle_on_the_stored_values(
    tensor_cores, num_queries, dtype
):
    lens = [300, 3]
    slopes, sinks = np.array([0.1, -0.1, 0.0, 1.0], np.float32), np.array([1.0, 0.0, -1.0, 2.0], np.float32)
    params = AttentionParams(scale=0.2, window=200, soft_cap=3.0, alibi_slopes=slopes, sinks=sinks)
    check_attend(
        make_layout(4, 2, 64, 16, blocks_needed(lens, 16) + 2, 2, dtype),
        lens,
        [num_queries, 1],
        params,
        tensor_cores=tensor_cores,
    )


def awkward_rows(head_dim: int) -> np.ndarray:
    """Rows that try the quantiser: zeros, tiny and huge peaks, ties, one outlier; float32 [num_tokens, 2, head_dim]."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((24, 2, head_dim)).astype(np.float32)
    rows[0] = 0
    rows[1] *= np.float32(1e-33)
    rows[2] *= np.float32(1e25)
    rows[3, :, :] = np.arange(head_dim) % 17 - 8 + np.float32(0.5)
    rows[3, :, 0] = 127.0  # int8: a scale of 1, all others half way between two integers
    rows[4, :, 0] = 448.0  # e4m3: likewise a scale of 1; the rest small
    rows[5, :, 1:] *= np.float32(1e-4)
    rows[6] = -rows[7]
    rows[8, :, :] = np.float32(0.1)
    return rows


@quantized
@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_write_kv_stores_the_very_bytes_that_the_cpu_stores(head_dim, source, dtype):
    layout = make_layout(2, 2, head_dim, 8, 4, 2, dtype)
    rows = awkward_rows(head_dim)
    if source is np.float16:
        rows[2] = 0
    keys, values = rows.astype(source), rows[::-1].astype(source)
    slots = np.random.default_rng(1).permutation(32)[:24]
    slots[5] = -1
    stored = []
    virtual, driver = make_virtual_backend(layout)
    for backend in (virtual, CpuBackend(layout, num_threads=1)):
        poison_pool(backend)

        def job(backend: Any = backend) -> None:
            backend.write_kv(1, backend.from_host(keys), backend.from_host(values), slots)

        backend.submit(job).result()
        stored.append(read_blocks(backend))
        backend.close()
    np.testing.assert_array_equal(*stored)
    driver.assert_clean()


@quantized
def test_the_quantiser_keeps_half_a_step_of_each_rows_peak(dtype):
    layout = make_layout(2, 2, 64, 8, 3, 1, dtype)
    backend, driver = make_virtual_backend(layout)
    rows = np.delete(awkward_rows(64), 1, axis=0)
    slots = np.arange(len(rows))

    def job() -> None:
        tensor = backend.from_host(rows)
        backend.write_kv(0, tensor, tensor, slots)

    backend.submit(job).result()
    poisoned = read_blocks(backend)
    stored = stored_rows(layout, poisoned, 0)[slots // 8, 0, :, slots % 8]
    peaks = np.abs(rows).max(-1, keepdims=True).astype(np.float64)
    exact = rows.astype(np.float64)
    step = 0.5 / 127 * peaks if dtype is DType.INT8 else np.maximum(np.abs(exact), peaks / 448 / 64) * 2.0**-4
    assert (np.abs(stored - exact) <= step * 1.0001).all()
    backend.close()
    driver.assert_clean()


@quantized
def test_copied_blocks_carry_their_scales(dtype):
    layout = make_layout(4, 2, 64, 16, 8, 2, dtype)
    backend, driver = make_virtual_backend(layout)
    case = make_case(layout, [30], [1], np.random.default_rng(0))
    fill(backend, case, 0)
    fill(backend, case, 1)
    before = attend(backend, case, 1)
    used = [int(block) for block in case.batch.block_tables[0, :2]]
    free = [block for block in range(8) if block not in used][:2]
    backend.submit(lambda: backend.copy_blocks(list(zip(used, free, strict=True)))).result()
    case.batch.block_tables[0, :2] = free
    for old, new in zip(before, attend(backend, case, 1), strict=True):
        np.testing.assert_array_equal(old, new)
    backend.close()
    driver.assert_clean()
