"""Emitters of LLVM vector IR: functions on an IR builder, for intrinsics and for whole tiles of code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

F32 = ir.FloatType()
F16 = ir.HalfType()
I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
# How one stored element becomes a float32: the literal `kind` of load_as and store_as.
KIND_F32: Final = 0
KIND_F16: Final = 1
KIND_BF16: Final = 2
KIND_I8: Final = 3
KIND_E4M3: Final = 4  # yields value / 256: the caller's scale carries the factor
KIND_U8: Final = 5

KIND_BYTES: Final = (4, 2, 2, 1, 1, 1)
_AVX512_WIDTH: Final = 16
_PORTABLE_WIDTH: Final = 4  # may not assume conversion instructions for halves


def emit_pointer(builder: Any, address: Any, offset: Any = None) -> Any:
    """Return address (+ offset bytes, an int or an i64 value) as a pointer."""
    if isinstance(offset, int):
        offset = ir.Constant(I64, offset) if offset else None
    if offset is not None:
        address = builder.add(address, offset)
    return builder.inttoptr(address, ir.PointerType())


def emit_call(builder: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic or an external C function by its full name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def emit_splat(builder: Any, scalar: Any, width: int) -> Any:
    """Return a vector with every lane equal to the scalar."""
    vector = ir.VectorType(scalar.type, width)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(I32, width), [0] * width))


def emit_constant(value: float, width: int) -> Any:
    """Return a constant float32 vector."""
    return ir.Constant(ir.VectorType(F32, width), [value] * width)


def emit_int_constant(value: int, width: int, element: Any = I32) -> Any:
    """Return a constant integer vector."""
    return ir.Constant(ir.VectorType(element, width), [value] * width)


def emit_shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    """Return the lanes of a (0 .. width-1) and b (width .. 2 width-1) in the order given."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def emit_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused where the machine can (float32 vectors)."""
    return emit_call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a, b, c])


def emit_prefetch(builder: Any, pointer: Any, locality: int = 3) -> None:
    """Ask for the cache line at the pointer; 3 is the innermost cache, 0 non-temporal."""
    args = [ir.Constant(I32, value) for value in (0, locality, 1)]
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *args])


def emit_load_as(builder: Any, address: Any, offset: Any, width: int, kind: int) -> Any:
    """Load `width` stored elements at address + offset bytes as float32."""
    pointer = emit_pointer(builder, address, offset)
    element = {KIND_F32: F32, KIND_F16: I16, KIND_BF16: I16}.get(kind, I8)
    raw = builder.load(pointer, typ=ir.VectorType(element, width), align=KIND_BYTES[kind])
    return raw if kind == KIND_F32 else emit_convert(builder, raw, kind)


def emit_convert(builder: Any, raw: Any, kind: int) -> Any:
    """Return raw stored bits (i16 or i8 lanes) as float32."""
    width = raw.type.count
    floats, ints = ir.VectorType(F32, width), ir.VectorType(I32, width)
    if kind == KIND_F16:
        return _emit_half_to_float(builder, raw)
    if kind == KIND_BF16:
        bits = builder.shl(builder.zext(raw, ints), emit_int_constant(16, width))
        return builder.bitcast(bits, floats)
    if kind == KIND_I8:
        return builder.sitofp(builder.sext(raw, ints), floats)
    if kind == KIND_U8:
        return builder.sitofp(builder.zext(raw, ints), floats)
    shorts = ir.VectorType(I16, width)
    wide = builder.sext(raw, shorts)  # s eeee mmm becomes the half s0eeee mmm0000000 = value / 256
    magnitude = builder.shl(builder.and_(wide, emit_int_constant(0x7F, width, I16)), emit_int_constant(7, width, I16))
    sign = builder.and_(wide, emit_int_constant(-0x8000, width, I16))
    return _emit_half_to_float(builder, builder.or_(magnitude, sign))


def _emit_half_to_float(builder: Any, raw: Any) -> Any:
    width = raw.type.count
    floats, ints = ir.VectorType(F32, width), ir.VectorType(I32, width)
    if width != _PORTABLE_WIDTH:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(F16, width)), floats)
    bits = builder.zext(raw, ints)
    shifted = builder.shl(builder.and_(bits, emit_int_constant(0x7FFF, width)), emit_int_constant(13, width))
    exponent = builder.and_(shifted, emit_int_constant(0x7C00 << 13, width))
    normal = builder.add(shifted, emit_int_constant((127 - 15) << 23, width))
    special = builder.add(shifted, emit_int_constant((255 - 31) << 23, width))
    smallest = emit_int_constant((127 - 14) << 23, width)  # 2^-14: subnormal halves are exact multiples below it
    tiny = builder.fsub(builder.bitcast(builder.add(shifted, smallest), floats), builder.bitcast(smallest, floats))
    is_special = builder.icmp_signed("==", exponent, emit_int_constant(0x7C00 << 13, width))
    is_tiny = builder.icmp_signed("==", exponent, emit_int_constant(0, width))
    result = builder.select(is_tiny, builder.bitcast(tiny, ints), builder.select(is_special, special, normal))
    sign = builder.shl(builder.and_(bits, emit_int_constant(0x8000, width)), emit_int_constant(16, width))
    return builder.bitcast(builder.or_(result, sign), floats)


def emit_exp2(builder: Any, x: Any) -> Any:
    """Return 2**x per lane, relative error below 2e-7; exactly 0 below 2**-126; NaN stays NaN."""
    width = x.type.count
    if width == _AVX512_WIDTH:
        return _emit_exp2_scaled(builder, x)
    ints = ir.VectorType(I32, width)
    low, high = emit_constant(-126.0, width), emit_constant(127.0, width)
    clamped = emit_min(builder, emit_max(builder, x, low), high)
    shift = emit_constant(12582912.0, width)  # 1.5 * 2^23: adding it rounds to an integer
    shifted = builder.fadd(clamped, shift)
    whole = builder.fsub(shifted, shift)
    fraction = builder.fsub(clamped, whole)
    result = _emit_exp2_series(builder, fraction)
    exponent = builder.shl(builder.bitcast(shifted, ints), emit_int_constant(23, width))
    scaled = builder.bitcast(builder.add(builder.bitcast(result, ints), exponent), x.type)
    scaled = builder.select(builder.fcmp_ordered("<", x, low), emit_constant(0.0, width), scaled)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, scaled)


def _emit_exp2_scaled(builder: Any, x: Any) -> Any:
    """emit_exp2 with AVX-512's rounding and scaling: a third fewer instructions."""
    limit = emit_constant(128.0, _AVX512_WIDTH)
    clamped = emit_min(builder, limit, x)  # of a NaN and the limit this is the NaN
    whole = emit_call(builder, "llvm.nearbyint.v16f32", x.type, [clamped])
    series = _emit_exp2_series(builder, builder.fsub(clamped, whole))
    is_kept = builder.fcmp_unordered(">=", x, emit_constant(-126.0, _AVX512_WIDTH))
    mask, rounding = builder.bitcast(is_kept, I16), ir.Constant(I32, 4)
    args = [series, whole, emit_constant(0.0, _AVX512_WIDTH), mask, rounding]
    return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", x.type, args)


def _emit_exp2_series(builder: Any, fraction: Any) -> Any:
    width = fraction.type.count
    result = emit_constant(_EXP2_COEFFICIENTS[-1], width)
    for coefficient in reversed(_EXP2_COEFFICIENTS[:-1]):
        result = emit_fma(builder, result, fraction, emit_constant(coefficient, width))
    return result


# 2^x as a polynomial, a minimax fit of the relative error on [-1/2, 1/2]: 2e-9 before rounding
_EXP2_COEFFICIENTS: Final = (
    1.0000000005541732,
    0.6931472057374539,
    0.24022646890606308,
    0.05550328776556799,
    0.009618488958653528,
    0.0013399931385021956,
    0.00015345811976505744,
)


def emit_max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def emit_min(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def emit_tanh(builder: Any, x: Any) -> Any:
    """Return tanh(x) per lane, relative error below 2e-7."""
    width = x.type.count
    one, two = emit_constant(1.0, width), emit_constant(2.0, width)
    size = emit_call(builder, f"llvm.fabs.v{width}f32", x.type, [x])
    square = builder.fmul(x, x)
    series = emit_constant(_TANH_COEFFICIENTS[-1], width)
    for coefficient in reversed(_TANH_COEFFICIENTS[:-1]):
        series = emit_fma(builder, series, square, emit_constant(coefficient, width))
    small = emit_fma(builder, builder.fmul(x, square), series, x)
    power = emit_exp2(builder, builder.fmul(emit_min(builder, emit_constant(20.0, width), size), _two_log2_e(width)))
    large = builder.fsub(one, builder.fdiv(two, builder.fadd(power, one)))
    large = emit_call(builder, f"llvm.copysign.v{width}f32", x.type, [large, x])
    return builder.select(builder.fcmp_ordered("<", size, emit_constant(0.625, width)), small, large)


def _two_log2_e(width: int) -> Any:
    return emit_constant(2.8853900817779268, width)


# (tanh(x) / x - 1) / x^2 as a polynomial in x^2, a Chebyshev fit on [0, 0.4]
_TANH_COEFFICIENTS: Final = (-0.33333333, 0.13333301, -0.05395863, 0.02176364, -0.00832642, 0.00227272)


def emit_tree(builder: Any, vector: Any, combine: Callable[..., Any]) -> Any:
    """Return lane 0 of a pairwise reduction over all lanes."""
    half = vector.type.count // 2
    while half:
        low = emit_shuffle(builder, vector, vector, range(half))
        high = emit_shuffle(builder, vector, vector, range(half, 2 * half))
        vector, half = combine(builder, low, high), half // 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def emit_float_to_bfloat(builder: Any, value: Any) -> Any:
    width = value.type.count
    bits = builder.bitcast(value, ir.VectorType(I32, width))
    odd = builder.and_(builder.lshr(bits, emit_int_constant(16, width)), emit_int_constant(1, width))
    rounded = builder.add(builder.add(bits, emit_int_constant(0x7FFF, width)), odd)
    quiet = builder.or_(bits, emit_int_constant(0x400000, width))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, emit_int_constant(16, width)), ir.VectorType(I16, width))


def emit_float_to_half(builder: Any, value: Any) -> Any:
    width = value.type.count
    if width != _PORTABLE_WIDTH:
        return builder.fptrunc(value, ir.VectorType(F16, width))
    ints = ir.VectorType(I32, width)
    bits = builder.bitcast(value, ints)
    magnitude = builder.and_(bits, emit_int_constant(0x7FFFFFFF, width))
    odd = builder.and_(builder.lshr(magnitude, emit_int_constant(13, width)), emit_int_constant(1, width))
    rebased = builder.add(magnitude, emit_int_constant(((15 - 127) << 23) + 0xFFF, width))
    normal = builder.lshr(builder.add(rebased, odd), emit_int_constant(13, width))
    magic = emit_int_constant((127 - 15 + 10 + 4) << 23, width)  # 0.5: its ulp is the smallest subnormal half
    summed = builder.fadd(builder.bitcast(magnitude, value.type), builder.bitcast(magic, value.type))
    tiny = builder.sub(builder.bitcast(summed, ints), magic)
    is_tiny = builder.icmp_signed("<", magnitude, emit_int_constant((127 - 14) << 23, width))
    is_large = builder.icmp_signed(">=", magnitude, emit_int_constant(0x477FF000, width))  # 65520 rounds to inf
    is_nan = builder.icmp_signed(">", magnitude, emit_int_constant(0x7F800000, width))
    special = builder.select(is_nan, emit_int_constant(0x7E00, width), emit_int_constant(0x7C00, width))
    result = builder.select(is_tiny, tiny, builder.select(is_large, special, normal))
    sign = builder.and_(builder.lshr(bits, emit_int_constant(16, width)), emit_int_constant(0x8000, width))
    return builder.trunc(builder.or_(result, sign), ir.VectorType(I16, width))


def emit_float_to_int8(builder: Any, value: Any) -> Any:
    """Return |float32| <= 127 as int8, rounded to nearest even."""
    width = value.type.count
    shifted = builder.fadd(value, emit_constant(12582912.0, width))  # 1.5 * 2^23: the low bits are the integer
    return builder.trunc(builder.bitcast(shifted, ir.VectorType(I32, width)), ir.VectorType(I8, width))


def emit_float_to_e4m3(builder: Any, value: Any) -> Any:
    """Return |float32| <= 448 as e4m3 bits, rounded to nearest even."""
    width = value.type.count
    ints = ir.VectorType(I32, width)
    bits = builder.bitcast(value, ints)
    magnitude = builder.and_(bits, emit_int_constant(0x7FFFFFFF, width))
    odd = builder.and_(builder.lshr(magnitude, emit_int_constant(20, width)), emit_int_constant(1, width))
    rebased = builder.add(magnitude, emit_int_constant(((7 - 127) << 23) + 0x7FFFF, width))
    normal = builder.lshr(builder.add(rebased, odd), emit_int_constant(20, width))
    magic = emit_int_constant((127 + 14) << 23, width)  # 2^14: its ulp is the smallest subnormal, 2^-9
    summed = builder.fadd(builder.bitcast(magnitude, value.type), builder.bitcast(magic, value.type))
    tiny = builder.sub(builder.bitcast(summed, ints), magic)
    is_tiny = builder.icmp_signed("<", magnitude, emit_int_constant((127 - 6) << 23, width))
    sign = builder.and_(builder.lshr(bits, emit_int_constant(24, width)), emit_int_constant(0x80, width))
    return builder.trunc(builder.or_(builder.select(is_tiny, tiny, normal), sign), ir.VectorType(I8, width))
