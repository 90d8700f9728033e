"""What a pool can hold: the check of rows against NumPy's own conversion, value by value."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument
from pagedkv.rpc.rows import check_storable

GIVEN = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
STORED = {DType.FLOAT32: np.float32, DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16}
on_each_pair = pytest.mark.parametrize(("given_dtype", "pool"), [(g, p) for g in GIVEN for p in DType])


def is_storable(array, pool):
    try:
        check_storable(array, "keys.data", pool)
    except InvalidArgument:
        return False
    return True


def becomes_finite(array, pool):
    """Convert as the pool would; rows of 8-bit pools come back as a multiple of their largest magnitude's part."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = array.astype(np.float32).astype(STORED.get(pool, np.float32)).astype(np.float32)
        if pool.is_quantized:
            largest = np.float32(127 if pool is DType.INT8 else 448)
            stored = np.abs(stored).max() / largest * largest
    return bool(np.isfinite(stored).all())


@on_each_pair
def test_rl01_every_value_of_two_bytes_is_judged_as_its_conversion_turns_out(given_dtype, pool):
    bits = np.arange(2**16, dtype=np.uint16)
    wide = given_dtype.itemsize == 4
    values = (bits.astype(np.uint32) << 16 | 0x7FFF).view(np.float32) if wide else bits.view(given_dtype)
    for value in np.concatenate([values[:0x100], values[0x4700:0x4800], values[0x7A00:0x8100], values[0xFA00:]]):
        row = np.array([0, value, 0], given_dtype)
        expected = becomes_finite(row, pool)
        assert is_storable(row, pool) == expected or (pool.is_quantized and np.abs(value) > 3.4028e38), value


@pytest.mark.parametrize("pool", [DType.INT8, DType.FLOAT8_E4M3])
def test_rl01_what_an_8_bit_pool_takes_comes_back_finite_up_to_the_last_values_of_float32(pool):
    last = (np.uint32(0x7F800000) - np.arange(1, 200, dtype=np.uint32)).view(np.float32)
    taken = [value for value in last if is_storable(np.array([value]), pool)]
    assert len(taken) > 190
    assert all(becomes_finite(np.array([value]), pool) for value in taken)


@given(st.lists(st.floats(width=32), min_size=1, max_size=30), st.sampled_from(GIVEN), st.sampled_from(list(DType)))
def test_rl01_rows_are_refused_exactly_if_the_pool_would_hold_infinity_or_nan(values, dtype, pool):
    with np.errstate(over="ignore"):
        array = np.array(values, np.float32).astype(dtype)
    expected = becomes_finite(array, pool)
    assert is_storable(array, pool) == expected or (pool.is_quantized and np.abs(array).max() > 3.4028e38)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -np.nan])
@pytest.mark.parametrize("dtype", GIVEN)
@pytest.mark.parametrize("at", [0, 1, 262_143, 262_144, 299_999])
def test_rl01_first_bad_element_is_named_wherever_it_is(bad, dtype, at):
    array = np.zeros((100, 3, 1000), dtype)
    array.reshape(-1)[at] = bad
    array.reshape(-1)[at + 1 :] = np.nan
    with pytest.raises(InvalidArgument) as caught:
        check_storable(array, "keys.data", DType.FLOAT32)
    index = [at // 3000, at // 1000 % 3, at % 1000]
    assert caught.value.details["index"] == str(index)
    assert caught.value.field == "keys.data"
    assert str(index) in str(caught.value)


@pytest.mark.parametrize(
    ("value", "pool", "limit"), [(65_520.0, DType.FLOAT16, 65_519.99609375), (3.4e38, DType.BFLOAT16, 3.3961775e38)]
)
def test_rl01_finite_value_beyond_the_pools_type_is_refused_with_the_limit(value, pool, limit):
    check_storable(np.array([1, np.nextafter(np.float32(-limit), 0)], np.float32), "values.data", pool)
    with pytest.raises(InvalidArgument, match=str(pool)) as caught:
        check_storable(np.array([1, -value], np.float32), "values.data", pool)
    assert float(caught.value.details["limit"]) == pytest.approx(limit, rel=1e-7)
    for exact in (DType.FLOAT32, DType.INT8, DType.FLOAT8_E4M3):
        check_storable(np.array([1, -value], np.float32), "values.data", exact)


def test_no_rows_are_storable():
    check_storable(np.zeros((0, 2, 64), np.float32), "keys.data", DType.FLOAT16)
