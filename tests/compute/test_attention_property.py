"""Attention equals the float64 oracle over random shapes, options, tables and storage types, on every path."""

from __future__ import annotations

from contextlib import closing

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from pagedkv.compute.backend import AttentionParams
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import BLOCK_SIZES, HEAD_DIMS
from pagedkv.dtypes import DType

LAYER = 1


def many(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def layouts(draw: st.DrawFn, dtype: DType) -> KvLayout:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    group = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13]))
    return make_layout(
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from(HEAD_DIMS)),
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=dtype,
    )


def lengths(block_size: int) -> st.SearchStrategy[int]:
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size - 1, 4 * block_size]
    return st.one_of(st.sampled_from(edges), st.integers(0, 150))


@st.composite
def params(draw: st.DrawFn, num_heads: int) -> AttentionParams:
    seed = draw(st.integers(0, 99))
    per_head = np.random.default_rng(seed).standard_normal(num_heads).astype(np.float32)
    return AttentionParams(
        scale=draw(st.sampled_from([None, None, 0.02, 0.1])),
        window=draw(st.sampled_from([None, None, 1, 7, 16, 40])),
        soft_cap=draw(st.sampled_from([None, None, 2.0, 30.0])),
        alibi_slopes=draw(st.sampled_from([None, None, np.abs(per_head) / 4])),
        sinks=draw(st.sampled_from([None, None, per_head])),
    )


@st.composite
def problems(draw: st.DrawFn, dtype: DType) -> tuple[KvLayout, list[int], list[int], AttentionParams, int]:
    layout = draw(layouts(dtype))
    contexts = draw(st.lists(lengths(layout.block_size), min_size=1, max_size=4))
    query_lens = [
        draw(st.sampled_from(sorted({min(1, length), min(2, length), length // 2, length}))) for length in contexts
    ]
    return layout, contexts, query_lens, draw(params(layout.shape.num_heads)), draw(st.integers(0, 2**31))


def check(problem: tuple[KvLayout, list[int], list[int], AttentionParams, int], isa: str | None = None) -> None:
    layout, contexts, query_lens, options, seed = problem
    num_blocks = blocks_needed(contexts, layout.block_size) + 3
    layout = KvLayout(layout.shape, num_blocks, layout.block_size)
    case = make_case(layout, contexts, query_lens, np.random.default_rng(seed))
    with closing(CpuBackend(layout, isa=isa)) as backend:
        poison(backend)
        fill(backend, case, LAYER)
        actual = attend(backend, case, LAYER, options)
        stored = stored_case(backend, case) if layout.shape.dtype.is_quantized else case
    assert_close(actual, expected(stored, options))


def stored_case(backend: CpuBackend, case: Case) -> Case:
    """Return the case with the keys and values that a quantised pool really holds, read from its bytes."""
    layout, shape = backend.layout, backend.layout.shape
    dtype = np.int8 if shape.dtype is DType.INT8 else ml_dtypes.float8_e4m3fn
    keys, values = [], []
    for length_keys, slots in zip(case.keys, case.slots, strict=True):
        rows = np.zeros((2, *length_keys.shape))
        for token, slot in enumerate(slots):
            block, offset = divmod(int(slot), layout.block_size)
            layer = backend.read_block(block)[LAYER * layout.layer_stride :][: layout.layer_stride]
            tiles = layer[: layout.scale_offset].view(dtype).astype(np.float64)
            tiles = tiles.reshape(2, shape.num_kv_heads, layout.block_size, shape.head_dim)[:, :, offset]
            scales = layer[layout.scale_offset :].copy().view(np.float32)
            scales = scales.reshape(2, shape.num_kv_heads, layout.block_size)[:, :, offset]
            rows[:, token] = tiles * scales[..., None].astype(np.float64)
        keys.append(rows[0])
        values.append(rows[1])
    return Case(keys, values, case.queries, case.query_lens, case.batch, case.slots)


@many(300)
@given(problems(DType.FLOAT32))
def test_attend_random_float32_problem_equals_oracle(problem) -> None:
    check(problem)


@many(80)
@given(st.sampled_from([DType.FLOAT16, DType.BFLOAT16]).flatmap(problems))
def test_attend_random_16_bit_problem_equals_float32_arithmetic_on_stored_values(problem) -> None:
    check(problem)


@many(40)
@given(st.sampled_from([DType.INT8, DType.FLOAT8_E4M3]).flatmap(problems))
def test_attend_random_8_bit_problem_equals_float32_arithmetic_on_stored_values(problem) -> None:
    check(problem)


@pytest.mark.parametrize("isa", ["avx2", "portable"])
@many(60)
@given(st.sampled_from([DType.FLOAT32, DType.FLOAT16]).flatmap(problems))
def test_attend_on_forced_instruction_set_equals_oracle(isa, problem) -> None:
    check(problem, isa)
