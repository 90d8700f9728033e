"""Integer and float arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from virtual_gpu import floats
from virtual_gpu.alu import (
    DTYPES,
    Alu,
    Array,
    allow,
    alu,
    bits_of,
    is_float,
    only_type,
    rounding,
    uniform_alu,
    unsupported,
)
from virtual_gpu.ptx import Instruction

Function = Callable[..., Any]
_FLOAT_MODS = ("rn", "rz", "rm", "rp", "ftz", "sat", "NaN", "approx", "full", "relu", "xorsign", "abs")


def in_float32(function: Function, kind: str) -> Function:
    """Compute a 16-bit type's operation in float32 (float64 for fma) and round once."""
    if kind in ("f16", "f16x2"):
        return lambda *a: function(*(x.astype(np.float64) for x in a)).astype(np.float16)
    if kind in ("bf16", "bf16x2"):
        return lambda *a: floats.to_bf16(function(*(floats.from_bf16(x) for x in a)))
    return function


def with_flags(function: Function, instruction: Instruction, kind: str) -> Function:
    """Apply .ftz to sources and result, then .sat and .relu."""
    if "ftz" in instruction.mods and kind == "f32":
        inner = function
        function = lambda *a: floats.flush(inner(*(floats.flush(x) for x in a)))  # noqa: E731
    if "sat" in instruction.mods:
        unclamped = function
        function = lambda *a: floats.saturate(unclamped(*a))  # noqa: E731
    if "relu" in instruction.mods:
        signed = function
        function = lambda *a: np.maximum(signed(*a), 0)  # noqa: E731
    return function


def float_operation(instruction: Instruction, nearest: Function, directed: Function | None = None) -> Alu:
    kind = only_type(instruction)
    allow(instruction, *_FLOAT_MODS)
    mode = rounding(instruction)
    function = nearest
    if mode != "rn":
        if directed is None or kind != "f32":
            raise unsupported(instruction, f"rounding .{mode}")
        function = directed(mode)
    if kind in ("f16", "f16x2", "bf16", "bf16x2"):
        return uniform_alu(instruction, in_float32(with_flags(function, instruction, kind), kind), kind)
    return uniform_alu(instruction, with_flags(function, instruction, kind), kind)


def _saturating(function: Function) -> Function:
    def wrapped(*arrays: Array) -> Array:
        return np.clip(function(*(a.astype(np.int64) for a in arrays)), -(2**31), 2**31 - 1)

    return wrapped


@alu("add", "sub")
def _add(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    function: Function = np.add if instruction.base == "add" else np.subtract
    if is_float(kind):
        if instruction.base == "add":
            return float_operation(instruction, np.add, floats.add_directed)
        return float_operation(instruction, np.subtract, lambda mode: _negate_second(floats.add_directed(mode)))
    allow(instruction, "sat")
    return uniform_alu(instruction, _saturating(function) if "sat" in instruction.mods else function, kind)


def _negate_second(function: Function) -> Function:
    return lambda a, b: function(a, -b)


def _wide(kind: str) -> Any:
    return {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}.get(kind)


def multiply_wide(kind: str) -> Function:
    wide = _wide(kind)
    return lambda a, b: np.multiply(a, b, dtype=wide)


def multiply_high(kind: str) -> Function:
    if kind in ("u64", "s64"):
        return _high_u64 if kind == "u64" else _high_s64
    wide, shift = _wide(kind), bits_of(kind)
    return lambda a, b: np.multiply(a, b, dtype=wide) >> wide(shift)


def _high_u64(a: Array, b: Array) -> Array:
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    a0, a1, b0, b1 = a & low, a >> shift, b & low, b >> shift
    cross = a1 * b0 + ((a0 * b0) >> shift)
    middle = (cross & low) + a0 * b1
    return a1 * b1 + (cross >> shift) + (middle >> shift)


def _high_s64(a: Array, b: Array) -> Array:
    high = _high_u64(a.view(np.uint64), b.view(np.uint64)).view(np.int64)
    return high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)


WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


@alu("mul")
def _mul(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    if is_float(kind):
        return float_operation(instruction, np.multiply, floats.mul_directed)
    allow(instruction, "lo", "hi", "wide")
    if "wide" in instruction.mods:
        return uniform_alu(instruction, multiply_wide(kind), kind, WIDER[kind])
    return uniform_alu(instruction, multiply_high(kind) if "hi" in instruction.mods else np.multiply, kind)


@alu("mad", "fma")
def _mad(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    if is_float(kind):
        return _fused(instruction, kind)
    allow(instruction, "lo", "hi", "wide")
    result, a, b, c = instruction.operands
    if "wide" in instruction.mods:
        product, wide = multiply_wide(kind), WIDER[kind]
        return Alu(lambda x, y, z: product(x, y) + z, ((a, kind), (b, kind), (c, wide)), ((result, wide),))
    if "hi" in instruction.mods:
        high = multiply_high(kind)
        return uniform_alu(instruction, lambda x, y, z: high(x, y).astype(DTYPES[kind]) + z, kind)
    return uniform_alu(instruction, lambda x, y, z: x * y + z, kind)


def _fused(instruction: Instruction, kind: str) -> Alu:
    if kind in ("bf16", "bf16x2"):  # float64 holds product and sum well enough to round once
        wide = lambda *a: (a[0] * a[1] + a[2]).astype(np.float32)  # noqa: E731
        inner = with_flags(wide, instruction, kind)
        function = lambda *a: floats.to_bf16(inner(*(floats.from_bf16(x).astype(np.float64) for x in a)))  # noqa: E731
        allow(instruction, *_FLOAT_MODS)
        return uniform_alu(instruction, function, kind)
    if kind in ("f16", "f16x2"):
        return float_operation(instruction, lambda a, b, c: a * b + c)
    return float_operation(instruction, floats.fma, floats.fma_directed)


def _truncated_quotient(a: Array, b: Array) -> Array:
    quotient = np.floor_divide(a, b)
    rest = a - quotient * b
    return quotient + ((rest != 0) & ((rest < 0) != (a < 0)) & (b != 0)).astype(quotient.dtype)


@alu("div")
def _div(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    if is_float(kind):
        return float_operation(instruction, np.divide, floats.div_directed)
    return uniform_alu(instruction, np.floor_divide if kind[0] == "u" else _truncated_quotient, kind)


@alu("rem")
def _rem(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    return uniform_alu(instruction, np.remainder if kind[0] == "u" else np.fmod, kind)


@alu("min", "max")
def _min_max(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    is_min = instruction.base == "min"
    if not is_float(kind):
        allow(instruction)
        return uniform_alu(instruction, np.minimum if is_min else np.maximum, kind)
    function = floats.minimum if is_min else floats.maximum
    if len(instruction.operands) == 4:
        pair = function
        function = lambda a, b, c: pair(pair(a, b), c)  # noqa: E731
    if "NaN" in instruction.mods:
        if len(instruction.operands) == 4:
            raise unsupported(instruction, "three-input .NaN")
        function = floats.with_nan(function)
    if "xorsign" in instruction.mods:
        raise unsupported(instruction, ".xorsign")
    return float_operation(instruction, function)


@alu("abs", "neg")
def _abs_neg(instruction: Instruction) -> Alu:
    kind = only_type(instruction)
    if not is_float(kind):
        return uniform_alu(instruction, np.abs if instruction.base == "abs" else np.negative, kind)
    allow(instruction, "ftz")
    if kind in ("f32", "f64"):
        function = np.abs if instruction.base == "abs" else np.negative
        return uniform_alu(instruction, with_flags(function, instruction, kind), kind)
    bits = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}[kind]
    mask = DTYPES[bits](0x8000 if bits == "b16" else 0x80008000)
    if instruction.base == "abs":
        return uniform_alu(instruction, lambda a: a & ~mask, bits)
    return uniform_alu(instruction, lambda a: a ^ mask, bits)


def _reciprocal_root(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(np.float64))).astype(x.dtype)


_UNARY: dict[str, Function] = {
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": _reciprocal_root,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}
_UNARY_DIRECTED: dict[str, Function] = {
    "rcp": lambda mode: lambda x: floats.div_directed(mode)(np.ones_like(x), x),
    "sqrt": floats.sqrt_directed,
}


@alu(*_UNARY)
def _unary(instruction: Instruction) -> Alu:
    """The approximate functions are computed as exactly as float32 allows; a real GPU errs by a few ulp."""
    return float_operation(instruction, _UNARY[instruction.base], _UNARY_DIRECTED.get(instruction.base))


@alu("copysign")
def _copysign(instruction: Instruction) -> Alu:
    return uniform_alu(instruction, lambda sign, value: np.copysign(value, sign), only_type(instruction))


@alu("testp")
def _testp(instruction: Instruction) -> Alu:
    tests: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    }
    return uniform_alu(instruction, tests[instruction.mods[0]], only_type(instruction), "pred")
