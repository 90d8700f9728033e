"""Rows as the pool can hold them: what would come back as infinity or NaN is refused before anything changes.

It would poison every later reader of its block, sequences of other clients included. A row that is finite in its own
type but beyond the pool's float16 or bfloat16 would become infinite on the way. Rows of 8-bit pools are stored relative
to their largest magnitude: they hold all of float32 but its last few values, which the scale's rounding makes infinite.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

_BLOCK_BYTES: Final = 512 * 2**10  # what the second look at a block still finds in the processor's cache
_STORED: Final = {DType.FLOAT16: np.dtype(np.float16), DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
_SCALE_ROUNDING: Final = np.float32(1 + 2**-22)  # of a quotient and a product


def check_storable(array: npt.NDArray[Any], field: str, stored: DType) -> None:
    """Raise InvalidArgument with the index and value of the first element that a pool of this type cannot hold.

    The bits of magnitudes order like integers: the largest as signed and as unsigned integers are the largest positive
    and the largest negative element, and NaN is beyond infinity in both. That is one read of memory without
    temporaries, whatever the type.
    """
    first_bad = _first_bad(array.dtype, stored)
    flat = np.ravel(array)
    signed, unsigned = (flat.view(f"{kind}{array.itemsize}") for kind in "iu")
    sign = 1 << (8 * array.itemsize - 1)
    step = _BLOCK_BYTES // array.itemsize
    for start in range(0, len(flat), step):
        block = slice(start, start + step)
        if signed[block].max() >= first_bad or unsigned[block].max() >= sign | first_bad:
            magnitudes = unsigned[block] & np.array(sign - 1, unsigned.dtype)
            raise _refusal(array, field, start + int(np.argmax(magnitudes >= first_bad)), stored)


@cache
def _first_bad(given: np.dtype[Any], stored: DType) -> int:
    """Return the bits of the smallest positive value of a type that the pool cannot hold, found by bisection."""
    low, high = 0, int(np.array(np.inf, given).view(f"u{given.itemsize}"))
    while low < high:
        middle = (low + high) // 2
        is_bad = _becomes_infinite(_value_of(middle, given), stored)
        low, high = (low, middle) if is_bad else (middle + 1, high)
    return low


def _value_of(bits: int, dtype: np.dtype[Any]) -> np.float32:
    return np.float32(np.array(bits, f"u{dtype.itemsize}").view(dtype))


def _becomes_infinite(value: np.float32, stored: DType) -> bool:
    with np.errstate(over="ignore"):
        kept = value * _SCALE_ROUNDING if stored.is_quantized else value.astype(_STORED.get(stored, np.float32))
    return bool(np.isinf(np.float32(kept)))


def _refusal(array: npt.NDArray[Any], field: str, at: int, stored: DType) -> InvalidArgument:
    index = [int(axis) for axis in np.unravel_index(at, array.shape)]
    value, limit = float(array[tuple(index)]), float(_value_of(_first_bad(array.dtype, stored) - 1, array.dtype))
    message = f"must be finite and at most {limit:g} in magnitude for a pool of {stored}, is {value:g} at {index}"
    return InvalidArgument(message, field=field, index=index, value=value, limit=limit)
