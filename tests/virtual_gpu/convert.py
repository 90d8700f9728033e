"""cvt between all integer and float types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from virtual_gpu import floats
from virtual_gpu.alu import DTYPES, ROUNDINGS, Alu, Array, alu, bits_of, is_float, rounding, unsupported
from virtual_gpu.ptx import Instruction, Vec

Function = Callable[..., Any]
_PACKED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")
_TYPES = frozenset((*DTYPES, "e4m3x2", "e5m2x2"))
_FLAGS = frozenset((*ROUNDINGS, "ftz", "sat", "satfinite", "relu"))


@alu("cvt")
def _cvt(instruction: Instruction) -> Alu:
    kinds = [m for m in instruction.mods if m in _TYPES]
    unknown = [m for m in instruction.mods if m not in _TYPES and m not in _FLAGS]
    if len(kinds) != 2 or unknown:
        raise unsupported(instruction, " ".join(unknown))
    target, source = kinds
    if "x2" in target or "x2" in source:
        return _packed(instruction, target, source)
    if target == "tf32":
        return _to_tf32(instruction)
    convert = _conversion(instruction, target, source)
    return Alu(convert, ((instruction.operands[1], source),), ((instruction.operands[0], target),))


def _conversion(instruction: Instruction, target: str, source: str) -> Function:
    if is_float(source) and is_float(target):
        return _float_to_float(instruction, target, source)
    if is_float(source):
        return _float_to_int(instruction, target, source)
    if is_float(target):
        return _int_to_float(instruction, target)
    return _int_to_int(instruction, target, source)


def _int_to_int(instruction: Instruction, target: str, source: str) -> Function:
    dtype = DTYPES[target]
    if "sat" not in instruction.mods:
        return lambda a: a.astype(dtype)
    limits = np.iinfo(dtype)
    own = np.iinfo(DTYPES[source])
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return lambda a: np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(dtype)


def _int_to_float(instruction: Instruction, target: str) -> Function:
    mode = rounding(instruction)
    if target == "bf16":
        return lambda a: floats.to_bf16(a.astype(np.float32), mode)
    dtype = DTYPES[target]
    if mode == "rn":
        return lambda a: a.astype(np.float64 if a.dtype.itemsize < 8 else dtype).astype(dtype)

    def directed(a: Array) -> Array:
        nearest = a.astype(dtype)
        value = a.astype(object)
        exact = np.array([int(v) if np.isfinite(v) else 0 for v in nearest.astype(np.float64)], object)
        excess = np.sign((value - exact).astype(np.float64))
        return floats.direct(nearest, excess, mode)

    return directed


_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _widen(source: str) -> Function:
    """A source's value in float64 (float32 sources exactly)."""
    if source == "bf16":
        return lambda a: floats.from_bf16(a).astype(np.float64)
    return lambda a: a.astype(np.float64)


def _float_to_int(instruction: Instruction, target: str, source: str) -> Function:
    integral = _INTEGRAL.get(rounding(instruction, "rzi"), np.trunc)
    widen, dtype = _widen(source), DTYPES[target]
    limits = np.iinfo(dtype)
    is_wide = bits_of(target) == 64 or source == "f64"
    nan = dtype(0) if not is_wide else dtype(limits.min if target[0] == "s" else 1 << (bits_of(target) - 1))
    flush = "ftz" in instruction.mods

    def function(a: Array) -> Array:
        value = integral(widen(floats.flush(a) if flush else a))
        low, high = value <= limits.min, value >= limits.max
        middle = np.where(low | high | np.isnan(value), 0, value).astype(dtype)
        result = np.where(low, dtype(limits.min), np.where(high, dtype(limits.max), middle))
        return np.where(np.isnan(value), nan, result)

    return function


def _float_to_float(instruction: Instruction, target: str, source: str) -> Function:
    mode = rounding(instruction)
    flush = "ftz" in instruction.mods
    if mode in _INTEGRAL:
        integral = _INTEGRAL[mode]
        function: Function = lambda a: integral(a)  # noqa: E731
        if source != target or source == "bf16":
            raise unsupported(instruction, "integral rounding with a change of type")
    elif source == target:
        function = lambda a: a  # noqa: E731
    elif target == "bf16":
        function = lambda a: floats.to_bf16(a, mode)  # noqa: E731
        if "relu" in instruction.mods:
            inner_bf16 = function
            return lambda a: inner_bf16(np.where(a > 0, a, np.where(np.isnan(a), a, np.float32(0))))
    elif source == "bf16":
        function = floats.from_bf16
        if target != "f32":
            dtype = DTYPES[target]
            function = lambda a: floats.from_bf16(a).astype(dtype)  # noqa: E731
    else:
        function = _between_ieee(target, source, mode)
    if flush and source == "f32":
        unflushed = function
        function = lambda a: unflushed(floats.flush(a))  # noqa: E731
    if flush and target == "f32":
        result = function
        function = lambda a: floats.flush(result(a))  # noqa: E731
    return _clamped(instruction, function)


def _between_ieee(target: str, source: str, mode: str) -> Function:
    dtype = DTYPES[target]
    if bits_of(target) > bits_of(source) or mode == "rn":
        return lambda a: a.astype(dtype)
    return lambda a: floats.round_from(a.astype(np.float64), 0.0, dtype, mode)


def _clamped(instruction: Instruction, function: Function) -> Function:
    if "sat" in instruction.mods:
        return lambda a: floats.saturate(function(a))
    if "relu" in instruction.mods:
        return lambda a: (v := function(a), np.where(np.isnan(v), v, np.maximum(v, 0)))[1]
    return function


def _to_tf32(instruction: Instruction) -> Alu:
    """Round float32 to 10 bits of mantissa: half away from zero (rna) or to even (rn)."""
    mode = rounding(instruction)

    def function(bits: Array) -> Array:
        half = np.uint32(0x1000) if mode == "rna" else np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
        special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
        return np.where(special, bits, (bits + half) & ~np.uint32(0x1FFF))

    return Alu(function, ((instruction.operands[1], "b32"),), ((instruction.operands[0], "b32"),))


def _packed(instruction: Instruction, target: str, source: str) -> Alu:
    """Two-element types: `cvt.f16x2.f32 d, hi, lo` puts the first source into the upper half."""
    result, *sources = instruction.operands
    if source == "f32" and target in _PACKED:
        high, low = sources
        pack = _pack_half(instruction, target)
        width = "b32" if target in ("f16x2", "bf16x2") else "b16"
        return Alu(pack, ((high, "f32"), (low, "f32")), ((result, width),))
    if source in ("e4m3x2", "e5m2x2") and target == "f16x2":
        dtype = floats.E4M3 if source == "e4m3x2" else floats.E5M2

        def unpack(pair: Array) -> Array:
            halves = np.ascontiguousarray(pair).view(np.uint8).view(dtype).astype(np.float32).astype(np.float16)
            return halves.view(np.uint32)

        return Alu(unpack, ((sources[0], "b16"),), ((result, "b32"),))
    if source in ("f16x2", "bf16x2") and target in ("e4m3x2", "e5m2x2") and not isinstance(sources[0], Vec):
        dtype = floats.E4M3 if target == "e4m3x2" else floats.E5M2

        def narrow(pair: Array) -> Array:
            wide = pair.astype(np.float32) if source == "f16x2" else floats.from_bf16(pair)
            return np.ascontiguousarray(floats.to_fp8(wide, dtype)).view(np.uint16)[:, 0]

        return Alu(narrow, ((sources[0], source),), ((result, "b16"),))
    raise unsupported(instruction)


def _pack_half(instruction: Instruction, target: str) -> Function:
    mode = rounding(instruction)
    if target == "bf16x2":
        to_bits: Function = lambda a: floats.to_bf16(a, mode)  # noqa: E731
    elif target == "f16x2":
        to_bits = lambda a: floats.round_from(a.astype(np.float64), 0.0, np.float16, mode).view(np.uint16)  # noqa: E731
        if mode == "rn":
            to_bits = lambda a: a.astype(np.float16).view(np.uint16)  # noqa: E731
    else:
        dtype = floats.E4M3 if target == "e4m3x2" else floats.E5M2
        to_bits = lambda a: floats.to_fp8(a, dtype)  # noqa: E731
    is_relu = "relu" in instruction.mods
    wide, shift = (np.uint32, np.uint32(16)) if target in ("f16x2", "bf16x2") else (np.uint16, np.uint16(8))

    def function(high: Array, low: Array) -> Array:
        if is_relu:
            high, low = (np.where(a < 0, np.float32(0), a) for a in (high, low))
        return (to_bits(high).astype(wide) << shift) | to_bits(low)

    return function
