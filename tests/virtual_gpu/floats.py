"""Float arithmetic that NumPy lacks: fused multiply-add, directed rounding, flushing, bfloat16 and fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import types, vectorize
from numba.extending import intrinsic

Array = Any  # NumPy array of any dtype

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
F32_TINY = np.float32(2.0**-126)


@intrinsic
def _llvm_fma(typing, a, b, c):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = args[0].type
        function = builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, args)

    return a(a, b, c), generate


@vectorize([types.float32(*[types.float32] * 3), types.float64(*[types.float64] * 3)], cache=True)
def fma(a, b, c):  # type: ignore[no-untyped-def]
    """Fused multiply-add, rounded once to nearest even."""
    return _llvm_fma(a, b, c)


@vectorize([types.float32(types.float32)], cache=True)
def flush(x):  # type: ignore[no-untyped-def]
    """Subnormals to a zero of the same sign (`.ftz`)."""
    return np.float32(np.copysign(np.float32(0), x)) if abs(x) < np.float32(2.0**-126) else x


@vectorize([types.float32(types.float32, types.float32), types.float64(types.float64, types.float64)], cache=True)
def minimum(a, b):  # type: ignore[no-untyped-def]
    """`min` of PTX: the other operand where one is NaN; -0 is less than +0."""
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return a if np.signbit(a) else b
    return a if a < b else b


@vectorize([types.float32(types.float32, types.float32), types.float64(types.float64, types.float64)], cache=True)
def maximum(a, b):  # type: ignore[no-untyped-def]
    """`max` of PTX: the other operand where one is NaN; +0 is greater than -0."""
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return b if np.signbit(a) else a
    return a if a > b else b


def with_nan(function: Callable[..., Array]) -> Callable[..., Array]:
    """`min.NaN`, `max.NaN`: canonical NaN where either operand is one."""

    def wrapped(a: Array, b: Array) -> Array:
        result = function(a, b)
        nan = np.isnan(a) | np.isnan(b)
        return np.where(nan, np.array(0x7FFFFFFF, np.uint32).view(np.float32).astype(result.dtype), result)

    return wrapped


def direct(result: Array, excess: Array, mode: str) -> Array:
    """Move a result rounded to nearest to the directed neighbour, given the sign of (exact - result)."""
    dtype = result.dtype.type
    infinity = dtype(np.inf)
    if mode == "rz":
        toward = np.where(result > 0, -infinity, infinity).astype(dtype)
        wrong = np.where(result > 0, excess < 0, excess > 0) & (result != 0)
    else:
        toward = np.full_like(result, -infinity if mode == "rm" else infinity)
        wrong = excess < 0 if mode == "rm" else excess > 0
    overflowed = np.isinf(result)
    moved = np.nextafter(result, toward)
    return np.where(wrong & ~np.isnan(result) & ~(overflowed & np.isnan(excess)), moved, result)


def round_from(value: Array, rest: Array | float, dtype: Any, mode: str) -> Array:
    """Round value + rest (float64, |rest| below half an ulp of value) to `dtype` in direction `mode`."""
    nearest = value.astype(dtype)
    if mode in ("rn", "rna"):
        return nearest
    finite = np.isfinite(value)
    excess = np.where(finite, np.where(np.isinf(nearest), -np.sign(value), value - nearest.astype(np.float64)), 0)
    excess = np.where(excess == 0, rest, excess)
    return direct(nearest, excess, mode)


def _sum_with_rest(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth's two-sum in float64."""
    total = a + b
    part = total - a
    return total, np.where(np.isfinite(total), (a - (total - part)) + (b - part), 0.0)


def add_directed(mode: str) -> Callable[..., Array]:
    def function(a: Array, b: Array) -> Array:
        total, rest = _sum_with_rest(a.astype(np.float64), b.astype(np.float64))
        return round_from(total, rest, a.dtype, mode)

    return function


def mul_directed(mode: str) -> Callable[..., Array]:
    return lambda a, b: round_from(a.astype(np.float64) * b, 0.0, a.dtype, mode)


def fma_directed(mode: str) -> Callable[..., Array]:
    def function(a: Array, b: Array, c: Array) -> Array:
        total, rest = _sum_with_rest(a.astype(np.float64) * b, c.astype(np.float64))
        return round_from(total, rest, a.dtype, mode)

    return function


def div_directed(mode: str) -> Callable[..., Array]:
    def function(a: Array, b: Array) -> Array:
        quotient = a / b
        excess = a.astype(np.float64) - quotient.astype(np.float64) * b  # exact: 48 bits, and a is near
        return direct(quotient, np.where(np.isfinite(quotient), excess * np.sign(b), 0.0), mode)

    return function


def sqrt_directed(mode: str) -> Callable[..., Array]:
    def function(a: Array) -> Array:
        root = np.sqrt(a)
        return direct(root, np.where(np.isfinite(root), a.astype(np.float64) - root.astype(np.float64) ** 2, 0.0), mode)

    return function


def saturate(x: Array) -> Array:
    """`.sat`: clamp to [0, 1]; NaN becomes +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def from_bf16(bits: Array) -> Array:
    """bfloat16 bits (uint16) to float32, exactly."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """Float32 to bfloat16 bits (uint16)."""
    if mode == "rz":
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)
        return np.where(np.isnan(x), np.uint16(0x7FFF), bits.astype(np.uint16))
    bits = x.astype(BF16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def to_fp8(x: Array, dtype: np.dtype[Any]) -> Array:
    """Float32 to fp8 bits (uint8), to nearest even, saturating to the largest finite value; NaN stays NaN."""
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    bits = np.clip(x, -limit, limit).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), bits)
