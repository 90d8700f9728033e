"""Shared memory: what a launch asks for is what its kernel uses, and stays under what the device has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.attention_cases import assert_close, attend, blocks_needed, expected, fill, make_case, make_layout
from helpers.cuda import SMALL, make_virtual_backend
from pagedkv.compute.cuda.compiler import Compiler, Target
from pagedkv.compute.cuda.kernels import SHARED_LIMIT, all_variants, choose_attention
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError

LIMITS = (48 << 10, 64 << 10, SHARED_LIMIT)
DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.INT8)
TOLERANCES = {"attend": 2e-6, "attend_decode": 2e-6, "attend_mma": 2e-3}
shapes = pytest.mark.parametrize("head_dim", [64, 128, 256])


def make_profile(limit: int):
    return replace(SMALL, shared_per_block_optin=limit, shared_per_sm=limit + 1024)


def attention_variants(head_dim: int, dtype: DType, limit: int):
    shape = KvShape(1, 8, 1, head_dim, dtype)
    return [v for v in all_variants(shape, limit) if v.name.startswith("attend")]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_kn13_every_variant_stays_under_the_devices_limit(head_dim, dtype, limit):
    variants = attention_variants(head_dim, dtype, limit)
    assert variants
    assert max(variant.needed_bytes for variant in variants) <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@shapes
def test_kn13_static_shared_memory_is_as_the_compiler_counts_it_and_small_tiles_spill_nothing(head_dim, dtype):
    compiler = Compiler()
    for variant in {v for limit in LIMITS[::2] for v in attention_variants(head_dim, dtype, limit)}:
        found = compiler.compile(variant, Target(90)).resources
        assert (found.shared_bytes, found.spilled_bytes) == (variant.static_bytes, 0), variant.label


@pytest.mark.parametrize("limit", LIMITS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 12], ids=["decode", "prefill"])
@shapes
def test_kn13_attention_on_a_device_with_little_shared_memory_equals_the_oracle(head_dim, num_queries, dtype, limit):
    lens = [70 + num_queries, num_queries]
    layout = make_layout(4, 1, head_dim, 16, blocks_needed(lens, 16), 1, dtype)
    backend, driver = make_virtual_backend(layout, profile=make_profile(limit))
    case = make_case(layout, lens, [num_queries] * 2, np.random.default_rng(0))
    fill(backend, case, 0)
    variant = choose_attention(layout.shape, 4 * num_queries, None, limit)
    assert variant.needed_bytes <= limit
    tolerance = TOLERANCES[variant.name] if dtype is not DType.INT8 else 3e-2  # of what is stored
    assert_close(attend(backend, case, 0), expected(case), tolerance)
    assert variant.name in {launch.kernel for launch in driver.launches}
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("limit", LIMITS[:2])
@pytest.mark.parametrize("rows", [12, 16])
def test_kn13_decode_rows_beyond_what_fits_go_to_the_kernel_for_prompts(rows, limit):
    layout = make_layout(rows, 1, 256, 16, 12, 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout, profile=make_profile(limit), min_partition=64)
    case = make_case(layout, [150], [1], np.random.default_rng(0))
    fill(backend, case, 0)
    assert_close(attend(backend, case, 0), expected(case), 2e-3)
    backend.close()
    driver.assert_clean()


def test_kn13_a_device_without_enough_shared_memory_for_any_tile_is_refused_by_figures():
    with pytest.raises(DeviceError, match="head dim 256 in float32 needs 4"):
        choose_attention(KvShape(1, 8, 1, 256, DType.FLOAT32), 8, None, 32 << 10)
