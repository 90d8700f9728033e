"""Rows as the pool can hold them: what would be stored as infinity or NaN is refused before anything changes.

It would poison every later reader of its block, sequences of other clients included. A row that is finite in its own
type but beyond the pool's float16 or bfloat16 would become infinite on the way. Rows of 8-bit pools are stored relative
to their largest magnitude and hold every finite value.
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


def check_storable(array: npt.NDArray[Any], field: str, stored: DType) -> None:
    """Raise InvalidArgument with the index and value of the first element that a pool of this type cannot hold.

    The bits of magnitudes order like integers: the largest as signed and as unsigned integers are the largest positive
    and the largest negative element, and NaN is beyond infinity in both. That is one read of memory without
    temporaries, whatever the type.
    """
    target = _STORED.get(stored, np.dtype(np.float32))
    first_bad = _first_bad(array.dtype, target)
    flat = np.ravel(array)
    signed, unsigned = (flat.view(f"{kind}{array.itemsize}") for kind in "iu")
    sign = 1 << (8 * array.itemsize - 1)
    step = _BLOCK_BYTES // array.itemsize
    for start in range(0, len(flat), step):
        block = slice(start, start + step)
        if signed[block].max() >= first_bad or unsigned[block].max() >= sign | first_bad:
            magnitudes = unsigned[block] & np.array(sign - 1, unsigned.dtype)
            raise _refusal(array, field, start + int(np.argmax(magnitudes >= first_bad)), target)


@cache
def _first_bad(given: np.dtype[Any], stored: np.dtype[Any]) -> int:
    """Return the bits of the smallest positive value of one type that is infinite in the other, found by bisection."""
    low, high = 0, int(np.array(np.inf, given).view(f"u{given.itemsize}"))
    with np.errstate(over="ignore"):
        while low < high:
            middle = (low + high) // 2
            value = np.array(middle, f"u{given.itemsize}").view(given)
            is_bad = bool(np.isinf(value.astype(np.float32).astype(stored).astype(np.float32)))
            low, high = (low, middle) if is_bad else (middle + 1, high)
    return low


def _refusal(array: npt.NDArray[Any], field: str, at: int, stored: np.dtype[Any]) -> InvalidArgument:
    index = [int(axis) for axis in np.unravel_index(at, array.shape)]
    value = float(array[tuple(index)])
    limit = float(ml_dtypes.finfo(stored).max)
    message = f"must be finite in the pool's {stored.name}, is {value:g} at {index}"
    return InvalidArgument(message, field=field, index=index, value=value, limit=limit)
