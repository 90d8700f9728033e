"""Paged attention of the CUDA kernels, executed on the virtual GPU, equals the float64 oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import (
    Case,
    assert_close,
    attend,
    blocks_needed,
    expected,
    fill,
    make_case,
    make_layout,
    poison,
)
from helpers.cuda import SMALL, make_virtual_backend
from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cuda.attention import choose_partitions, make_tiles
from pagedkv.compute.cuda.kernels import choose_attention
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from virtual_gpu.profile import TWO_SMS, Profile

FLOATS = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
SIXTEEN_BIT = (DType.FLOAT16, DType.BFLOAT16)
CORES_TOLERANCE, TENSOR_TOLERANCE = 2e-6, 2e-3
LONG = 333  # keys: six tiles in one partition, more than a ring of stages holds; six partitions of 64
PARTITIONS = (64, 1024)  # fewest keys of one
DECODE_TOLERANCE = {DType.FLOAT16: 2e-6, DType.BFLOAT16: 2e-5}  # queries and weights in two parts


def check(
    layout: KvLayout,
    context_lens: list[int],
    query_lens: list[int],
    params: AttentionParams | None = None,
    *,
    tensor_cores: bool = False,
    tolerance: float | None = None,
    partitions: Sequence[int] = PARTITIONS,
    profile: Profile = SMALL,
) -> None:
    """Attend on a pool poisoned with NaN, with shuffled tables, and compare with the oracle.

    A sequence of LONG keys, with as many queries as any has, joins those given; all are attended to in partitions of
    each size.
    """
    context_lens, query_lens = [*context_lens, LONG], [*query_lens, max(query_lens)]
    case = make_case(layout, context_lens, query_lens, np.random.default_rng(len(context_lens)))
    exact = expected(case, params)
    release_blocks_behind_the_window(layout, case, params)
    rows = max(query_lens) * layout.shape.group_size
    kernel = choose_attention(layout.shape, rows, tensor_cores).name
    for size in partitions:
        backend, driver = make_virtual_backend(layout, min_partition=size, tensor_cores=tensor_cores, profile=profile)
        poison(backend)
        fill(backend, case, 1)
        result = attend(backend, case, 1, params)
        backend.close()
        driver.assert_clean()
        assert kernel in {stats.kernel for stats in driver.launches}
        assert_close(result, exact, tolerance or (TENSOR_TOLERANCE if tensor_cores else CORES_TOLERANCE))


def release_blocks_behind_the_window(layout: KvLayout, case: Case, params: AttentionParams | None) -> None:
    """Make table entries that no query sees an impossible id."""
    if params is None or params.window is None:
        return
    for table, length, queries in zip(case.batch.block_tables, case.batch.context_lens, case.query_lens, strict=True):
        oldest = max(0, int(length) - max(queries, 1) - params.window + 1)
        table[: oldest // layout.block_size] = 2**31 - 1


def layout_for(
    context_lens: list[int], *, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: DType
) -> KvLayout:
    num_blocks = blocks_needed([*context_lens, LONG], block_size) + 3
    return make_layout(heads, kv_heads, head_dim, block_size, num_blocks, 2, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_attend_any_head_dim_equals_the_oracle(head_dim, dtype):
    lens = [1, 15, 16, 17, 70]
    layout = layout_for(lens, heads=4, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    check(layout, lens, [1, 1, 1, 2, 1])


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8, 12])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_attend_any_group_size_equals_the_oracle(group_size, dtype):
    lens = [1, 40, 19]
    layout = layout_for(lens, heads=2 * group_size, kv_heads=2, head_dim=64, block_size=8, dtype=dtype)
    check(layout, lens, [1, 1, 3])


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_attend_any_block_size_and_boundary_length_equals_the_oracle(block_size):
    lens = [1, block_size - 1, block_size, block_size + 1, 3 * block_size]
    layout = layout_for(lens, heads=4, kv_heads=1, head_dim=64, block_size=block_size, dtype=DType.FLOAT16)
    check(layout, lens, [1, 1, 1, 1, 1])


@pytest.mark.parametrize("dtype", FLOATS)
def test_attend_several_hundred_keys_split_over_partitions_equals_the_oracle(dtype):
    lens = [500, 3, 129]
    layout = layout_for(lens, heads=4, kv_heads=1, head_dim=64, block_size=16, dtype=dtype)
    check(layout, lens, [1, 1, 2], partitions=(64, 192))


KERNELS = {"attend": (False, 2), "attend_decode": (True, 2), "attend_mma": (True, 9)}  # tensor cores, queries
kernels = pytest.mark.parametrize("kernel", KERNELS)


def check_kernel(kernel: str, lens: list[int], params: AttentionParams | None = None, **options: Any) -> None:
    """Check one kernel on groups of 2 heads, each sequence with as many queries as the kernel is for."""
    tensor_cores, num_queries = KERNELS[kernel]
    dtype, block_size = options.pop("dtype", DType.FLOAT16), options.pop("block_size", 16)
    query_lens = [num_queries] * len(lens)
    kv_heads = options.pop("kv_heads", 1)
    layout = layout_for(lens, heads=2 * kv_heads, kv_heads=kv_heads, head_dim=64, block_size=block_size, dtype=dtype)
    tolerance = DECODE_TOLERANCE[dtype] if kernel == "attend_decode" else None
    check(layout, lens, query_lens, params, tensor_cores=tensor_cores, tolerance=tolerance, **options)


@kernels
@pytest.mark.parametrize("window", [None, 70])
def test_attend_to_every_residue_of_length_and_of_a_windows_begin_equals_the_oracle(kernel, window):
    """64 lengths in a row: the last tile ends, and the window begins, at every key of a tile."""
    check_kernel(kernel, list(range(70, 134)), AttentionParams(window=window), partitions=(64, 96))


@kernels
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_attend_any_block_size_and_kernel_equals_the_oracle(block_size, kernel):
    check_kernel(kernel, [block_size + 9, 2 * block_size + 1], block_size=block_size, kv_heads=3)


@kernels
def test_attend_on_a_small_device_gives_a_partition_more_keys_than_the_fewest(kernel):
    """Two SMs are soon full: few partitions, whose even length is rounded up to whole tiles."""
    check_kernel(kernel, [700, 641, 257, 193, 9], partitions=(16,), profile=TWO_SMS, kv_heads=4)


@kernels
def test_attend_in_more_partitions_than_a_warp_has_lanes_equals_the_oracle(kernel):
    """Forty: their states are merged in two turns, most of them empty for the short context."""
    check_kernel(kernel, [2600, 40], partitions=(16,), profile=replace(SMALL, num_sms=1000))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_attend_on_tensor_cores_any_head_dim_is_near_the_oracle(head_dim, dtype):
    lens = [33, 70, 1, 0]
    layout = layout_for(lens, heads=4, kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype)
    check(layout, lens, [20, 1, 1, 0], tensor_cores=True)


@pytest.mark.parametrize("group_size", [1, 3, 7, 8])
def test_attend_on_tensor_cores_any_group_size_is_near_the_oracle(group_size):
    lens = [90, 17]
    layout = layout_for(lens, heads=2 * group_size, kv_heads=2, head_dim=64, block_size=8, dtype=DType.BFLOAT16)
    check(layout, lens, [13, 1], tensor_cores=True)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("rows", [4, 12])
def test_decode_on_tensor_cores_any_head_dim_equals_the_oracle(head_dim, dtype, rows):
    lens = [1, 15, 16, 17, 150, 0]
    layout = layout_for(lens, heads=2 * rows, kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    check(layout, lens, [1, 1, 1, 1, 1, 0], tensor_cores=True, tolerance=DECODE_TOLERANCE[dtype])


@pytest.mark.parametrize("block_size", [8, 32, 128])
@pytest.mark.parametrize(("group_size", "drafts"), [(1, 1), (3, 1), (7, 1), (8, 1), (4, 4), (1, 9), (16, 1), (5, 3)])
def test_decode_of_drafts_on_tensor_cores_any_group_size_equals_the_oracle(group_size, drafts, block_size):
    lens = [drafts, 90 + drafts, 64]
    layout = layout_for(lens, heads=2 * group_size, kv_heads=2, head_dim=64, block_size=block_size, dtype=DType.FLOAT16)
    check(layout, lens, [drafts, drafts, 1], tensor_cores=True, tolerance=DECODE_TOLERANCE[DType.FLOAT16])


def test_decode_by_default_is_on_tensor_cores_where_the_group_is_2_or_more_and_16_bits_are_stored():
    shapes = [KvShape(1, 4 * group, 4, 64, dtype) for group in (1, 2, 16, 17) for dtype in FLOATS[:2]]
    names = [choose_attention(shape, shape.group_size).name for shape in shapes]
    assert names == ["attend"] * 3 + ["attend_decode", "attend", "attend_decode", "attend", "attend_mma"]


def test_parts_fill_the_device_and_no_more_and_none_is_too_small():
    parts = [choose_partitions(items, 396, keys, 256) for items, keys in ((512, 2048), (128, 2048), (8, 4096))]
    assert parts == [3, 3, 16]  # 1,536 of 4 x 396 places, 384 of 396; 16 parts of 256 keys
    assert choose_partitions(1, 396, 131_072, 256) == 128
    assert choose_partitions(4096, 264, 8192, 256) == 1
    assert choose_partitions(1, 396, 1, 256) == 1


def test_tiles_of_a_sequence_begin_with_the_one_that_sees_most():
    tiles = make_tiles(np.array([5, 0, 1, 9]), group_size=2, rows=4)
    assert tiles.tolist() == [[0, 2], [0, 1], [0, 0], [2, 0], [3, 4], [3, 3], [3, 2], [3, 1], [3, 0]]


OPTIONS = {
    "scale": AttentionParams(scale=0.3),
    "window": AttentionParams(window=9),
    "window-of-one": AttentionParams(window=1),
    "soft-cap": AttentionParams(soft_cap=1.5),
    "alibi": AttentionParams(alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0625], np.float32)),
    "sinks": AttentionParams(sinks=np.array([0.5, -3.0, 8.0, -np.inf], np.float32)),
    "all": AttentionParams(
        scale=0.2,
        window=40,
        soft_cap=3.0,
        alibi_slopes=np.array([0.1, -0.1, 0.0, 1.0], np.float32),
        sinks=np.array([1.0, 0.0, -1.0, 2.0], np.float32),
    ),
}


@pytest.mark.parametrize("kernel", ["attend", "attend_decode", "attend_mma"])
@pytest.mark.parametrize("name", OPTIONS)
def test_attend_with_an_option_equals_the_oracle(name, kernel):
    lens = [100, 17, 1]
    layout = layout_for(lens, heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=DType.FLOAT16)
    tolerance = DECODE_TOLERANCE[DType.FLOAT16] if kernel == "attend_decode" else None
    num_drafts = 4 if kernel == "attend_decode" else 9
    check(layout, lens, [num_drafts, 1, 1], OPTIONS[name], tensor_cores=kernel != "attend", tolerance=tolerance)


def test_attend_behind_a_window_never_reads_released_table_entries():
    layout = make_layout(4, 2, 64, 8, 32, 2)
    backend, driver = make_virtual_backend(layout)
    case = make_case(layout, [100], [1], np.random.default_rng(0))
    fill(backend, case, 1)
    params = AttentionParams(window=10)
    exact = expected(case, params)
    case.batch.block_tables[0, : (100 - 10) // 8] = 2**31 - 1
    assert_close(attend(backend, case, 1, params), exact)
    backend.close()
    driver.assert_clean()


def test_attend_without_queries_gives_nothing():
    layout = make_layout()
    backend, _ = make_virtual_backend(layout)
    output, lse = attend(backend, make_case(layout, [0, 20], [0, 0], np.random.default_rng(0)), 0)
    assert output.shape == (0, 8, 64)
    assert lse.shape == (0, 8)
    backend.close()


@pytest.mark.parametrize("heads", [4, 8])
def test_kn07_all_256_dims_of_all_heads_are_right(heads):
    layout = make_layout(heads, 1, 256, 16, 8, 2, DType.FLOAT16)
    backend, _ = make_virtual_backend(layout)
    case = make_case(layout, [37], [1], np.random.default_rng(0))
    case.values[0][...] = np.arange(256, dtype=np.float16) / 256
    fill(backend, case, 1)
    output, _ = attend(backend, case, 1)
    np.testing.assert_allclose(output, np.broadcast_to(np.arange(256) / 256, output.shape), rtol=1e-6)
    backend.close()


def test_kn12_long_contexts_need_no_more_shared_memory():
    lens = [4100]
    layout = layout_for(lens, heads=1, kv_heads=1, head_dim=64, block_size=128, dtype=DType.FLOAT16)
    check(layout, lens, [1])


@pytest.mark.parametrize("order", [(64, 700), (700, 64)])
def test_kn28_scratch_is_sized_by_the_live_shape(order):
    layout = make_layout(4, 2, 64, 16, 96, 1)
    backend, driver = make_virtual_backend(layout, min_partition=64)
    for length in order:
        for batch_size in (1, 2):
            case = make_case(layout, [length] * batch_size, [1] * batch_size, np.random.default_rng(length))
            fill(backend, case, 0)
            assert_close(attend(backend, case, 0), expected(case))
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("tensor_cores", [False, True], ids=["cores", "decode"])
def test_kn01_offsets_beyond_32_bits_are_exact(tensor_cores):
    """A far block: the pool's address is moved back, so that only 64-bit arithmetic lands in the allocation."""
    layout = make_layout(2, 1, 64, 16, 4, 1, DType.BFLOAT16)
    far = KvLayout(layout.shape, 2**20, 16)
    backend, driver = make_virtual_backend(layout, tensor_cores=tensor_cores)
    case = make_case(layout, [40], [1], np.random.default_rng(0))
    shift = 2**20 - 4
    backend.layout = far
    backend.pool.pointer -= shift * layout.block_bytes
    assert shift * layout.block_bytes > 2**31
    case.batch.block_tables[0, :3] += shift
    case.slots[0][:] += shift * 16
    fill(backend, case, 0)
    assert_close(attend(backend, case, 0), expected(case), DECODE_TOLERANCE[DType.BFLOAT16] if tensor_cores else 2e-6)
    backend.pool.pointer += shift * layout.block_bytes
    backend.close()
    driver.assert_clean()
