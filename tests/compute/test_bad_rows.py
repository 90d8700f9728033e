"""What is not finite in one sequence reaches no other row of the batch: every other result is the same, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute.test_attention_property import USABLE_ISAS
from helpers.attention_cases import attend, fill, make_case, make_layout
from helpers.cuda import make_virtual_backend
from pagedkv.dtypes import DType

CONTEXTS, QUERIES = [70, 45, 130, 17], [1, 37, 5, 1]
BAD_ROWS = slice(1, 38)  # of the second sequence
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38}


def make_small_case(dtype):
    layout = make_layout(num_heads=4, num_kv_heads=2, head_dim=64, num_blocks=20, dtype=dtype)
    return layout, make_case(layout, CONTEXTS, QUERIES, np.random.default_rng(0))


def spoil(rows, value, places):
    spoilt = rows.astype(np.float32)
    spoilt[places] = value
    return spoilt


def assert_only_these_rows_differ(backend, good, bad, rows):
    fill(backend, good, 1)
    expected = attend(backend, good, 1)
    fill(backend, bad, 1)
    for got, wanted in zip(attend(backend, bad, 1), expected, strict=True):
        others = np.delete(np.arange(len(wanted)), rows)
        np.testing.assert_array_equal(got[others], wanted[others])


@pytest.fixture(params=[*USABLE_ISAS, "cuda"])
def open_backend(request, make_backend):
    if request.param != "cuda":
        return lambda layout: make_backend(layout, isa=request.param)
    return lambda layout: make_virtual_backend(layout, min_partition=64)[0]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", list(DType))
def test_kn31_a_bad_query_spoils_its_own_row_alone(open_backend, dtype, value):
    layout, case = make_small_case(dtype)
    backend = open_backend(layout)
    bad = replace(case, queries=spoil(case.queries, BAD[value], (20, slice(1, 3), 5)))
    assert_only_these_rows_differ(backend, case, bad, [20])
    if value == "nan" and dtype is not DType.INT8:
        assert np.isnan(attend(backend, bad, 1)[0][20, 1:3]).all()
    backend.close()


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", list(DType))
def test_rl01_bad_keys_and_values_spoil_their_own_sequence_alone(open_backend, dtype, value):
    layout, case = make_small_case(dtype)
    backend = open_backend(layout)
    keys, values = list(case.keys), list(case.values)
    with np.errstate(over="ignore"):
        keys[1], values[1] = (spoil(rows[1], BAD[value], (3, 0, 7)).astype(rows[1].dtype) for rows in (keys, values))
    assert_only_these_rows_differ(backend, case, replace(case, keys=keys, values=values), BAD_ROWS)
    backend.close()


@pytest.mark.parametrize("num_tokens", [40, 400])
@pytest.mark.parametrize("value", ["nan", "inf", "huge"])
def test_rl01_a_sequence_with_bad_keys_gives_no_finite_number(open_backend, value, num_tokens):
    """Were a part of it taken for empty, its row would be finite and wrong."""
    layout = make_layout(num_heads=4, num_kv_heads=2, head_dim=64, num_blocks=26)
    case = make_case(layout, [num_tokens], [1], np.random.default_rng(0))
    signs = np.random.default_rng(1).choice([-1.0, 1.0], case.keys[0][:8].shape)
    keys = spoil(case.keys[0], BAD[value] * signs, slice(0, 8))
    backend = open_backend(layout)
    fill(backend, replace(case, keys=[keys], values=[spoil(case.values[0], BAD[value] * signs, slice(0, 8))]), 1)
    output, lse = attend(backend, case, 1)
    assert not np.isfinite(output).any()
    assert not np.isfinite(lse).any()
    backend.close()
