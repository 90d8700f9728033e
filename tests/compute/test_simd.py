"""Vector functions against float64, at every width this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pagedkv.compute.cpu.compile_cache import compile_kernel
from pagedkv.compute.cpu.features import usable_isas
from pagedkv.compute.cpu.simd import exp2, load, load_i64, store, tanh

Floats = npt.NDArray[np.float32]
WIDTHS = [isa.width for isa in usable_isas()]


def applied(function: Callable[..., Any], name: str, width: int, values: npt.ArrayLike) -> Floats:
    """Return the vector function of the values (a multiple of the width)."""

    def apply_all(args: int, thread: int) -> None:
        source, target = load_i64(args + 8), load_i64(args + 16)
        for place in range(0, 4 * load_i64(args), 4 * width):
            store(target + place, function(load(source + place, width)))

    kernel = compile_kernel(apply_all, f"test-{name}", (name, width), (__file__,))
    source = np.asarray(values, np.float32)
    result = np.empty_like(source)
    args = np.array([source.size, source.ctypes.data, result.ctypes.data], np.int64)
    kernel.call(args.ctypes.data, 0)
    return result


@pytest.mark.parametrize("width", WIDTHS)
def test_exp2_has_a_relative_error_below_2e_7(width) -> None:
    x = np.linspace(-126, 126.9, 1 << 18).astype(np.float32)
    assert np.abs(applied(exp2, "exp2", width, x) / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7


@pytest.mark.parametrize("width", WIDTHS)
def test_exp2_is_exactly_zero_below_the_normal_numbers_and_keeps_nan(width) -> None:
    x = [-np.inf, -3e38, -1e4, -150.0, -127.0, -126.1, np.nan, -np.nan] * 2
    y = applied(exp2, "exp2", width, x)
    assert np.array_equal(y, [0, 0, 0, 0, 0, 0, np.nan, np.nan] * 2, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_tanh_has_a_relative_error_below_2e_7(width) -> None:
    x = np.concatenate([np.linspace(-12, 12, 1 << 18), 2.0 ** np.linspace(-60, 60, 1 << 10)]).astype(np.float32)
    assert np.abs(applied(tanh, "tanh", width, x) / np.tanh(x.astype(np.float64)) - 1).max() < 2e-7
