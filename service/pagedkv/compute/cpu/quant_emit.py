"""Emitters of stored weights as float32 vectors: plain types, and the block formats of GGML files.

Each opens one part, 32 neighbouring weights (16 of the plain types), and returns a function that emits the vector
that starts at a given weight of the part. Values equal `scale * q (+ minimum)` in float32 arithmetic, up to the last
bit, and are the same bits wherever they are emitted. The layouts are described in ggml-quants.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from pagedkv.compute.cpu.simd_emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    KIND_BYTES,
    KIND_F16,
    KIND_I8,
    emit_call,
    emit_convert,
    emit_fma,
    emit_int_constant,
    emit_load_as,
    emit_pointer,
    emit_splat,
)

EmitVector = Callable[[int], Any]  # the number of a part's weight -> the vector that starts there
EmitPart = Callable[[Any, Any, Any, int], EmitVector]  # builder, block address, part of the block, vector width

PLAIN_PART: Final = 16  # weights of a part of a plain type
BLOCK_PART: Final = 32  # weights of a part of a block format
_TABLE_WIDTH: Final = 16  # vectors of this width hold one value for each of the 16 codes of four bits


def plain_part(stored: int) -> EmitPart:
    """Return the emitter of a plain type, a KIND_* of simd_emit."""

    def open_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
        return lambda lane: emit_load_as(builder, address, _constant(KIND_BYTES[stored] * lane), width, stored)

    return open_part


def q8_0_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * q: float16 scale, 32 signed bytes."""
    scale = _splat_half(builder, address, 0, width)

    def vector(lane: int) -> Any:
        return builder.fmul(scale, emit_load_as(builder, address, _constant(2 + lane), width, KIND_I8))

    return vector


def q4_0_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * (q - 8): float16 scale, 16 bytes with q of weights 0-15 low and of 16-31 high."""
    scale = _splat_half(builder, address, 0, width)

    def decode(codes: Any) -> Any:
        return builder.fmul(scale, builder.fsub(codes, _floats([8.0] * width)))

    return _nibbles(builder, address, 2, decode, width)


def q4_1_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * q + minimum: two float16, then 16 bytes as in Q4_0."""
    scale, minimum = _splat_half(builder, address, 0, width), _splat_half(builder, address, 2, width)
    return _nibbles(builder, address, 4, lambda codes: emit_fma(builder, scale, codes, minimum), width)


def q4_k_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * s * q - minimum * m for part 0-7 of 256 weights.

    Two float16, 12 bytes with eight pairs (s, m) of 6 bits, 128 bytes: 32 hold part 2i low and part 2i+1 high.
    """
    step, bottom = _q4_k_line(builder, address, part, width)
    packed, shift = _q4_k_codes(builder, address, part)
    decode = _table_or_formula(builder, lambda codes: emit_fma(builder, step, codes, bottom), width)

    def vector(lane: int) -> Any:
        codes = _shifted_bytes(builder, packed, 16 + lane, shift, width)
        return decode(builder.and_(codes, emit_int_constant(15, width)))

    return vector


def q5_k_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * s * q - minimum * m for part 0-7 of 256 weights.

    As Q4_K, but 32 bytes before the low four bits of q hold its fifth: bit i is part i's.
    """
    step, bottom = _q4_k_line(builder, address, part, width)
    packed, shift = _q4_k_codes(builder, address, part)

    def vector(lane: int) -> Any:
        low = builder.and_(_shifted_bytes(builder, packed, 48 + lane, shift, width), emit_int_constant(15, width))
        high = builder.and_(_shifted_bytes(builder, address, 16 + lane, part, width), emit_int_constant(1, width))
        code = builder.or_(low, builder.shl(high, emit_int_constant(4, width)))
        return emit_fma(builder, step, _to_float(builder, code), bottom)

    return vector


def q6_k_part(builder: Any, address: Any, part: Any, width: int) -> EmitVector:
    """Emit scale * s * (q - 32) for part 0-7 of 256 weights.

    128 bytes with the low four bits of q, 64 with the high two, 16 signed s (one for 16 weights), a float16 scale.
    """
    half, quarter = builder.lshr(part, _constant(2)), builder.and_(part, _constant(3))
    scale = _splat_half(builder, address, 208, width)
    row = builder.add(builder.shl(half, _constant(1)), builder.and_(quarter, _constant(1)))
    low = builder.add(address, builder.shl(row, _constant(5)))
    low_shift = builder.shl(builder.lshr(quarter, _constant(1)), _constant(2))
    high = builder.add(address, builder.shl(half, _constant(5)))
    high_shift = builder.shl(quarter, _constant(1))
    smalls = builder.add(address, builder.shl(part, _constant(1)))

    def vector(lane: int) -> Any:
        small = builder.sext(_load_byte(builder, smalls, 192 + lane // 16), I64)
        step = builder.fmul(scale, _splat_int(builder, small, width))
        bottom_bits = builder.and_(_shifted_bytes(builder, low, lane, low_shift, width), emit_int_constant(15, width))
        top_bits = builder.and_(
            _shifted_bytes(builder, high, 128 + lane, high_shift, width), emit_int_constant(3, width)
        )
        code = builder.or_(bottom_bits, builder.shl(top_bits, emit_int_constant(4, width)))
        return builder.fmul(step, _to_float(builder, builder.sub(code, emit_int_constant(32, width))))

    return vector


def _q4_k_line(builder: Any, address: Any, part: Any, width: int) -> tuple[Any, Any]:
    """Return what a part's codes are multiplied by, and what is added then."""
    scale, minimum = _splat_half(builder, address, 0, width), _splat_half(builder, address, 2, width)
    small, base = _q4_k_pair(builder, builder.add(address, _constant(4)), part)
    step = builder.fmul(scale, _splat_int(builder, small, width))
    return step, builder.fmul(minimum, _splat_int(builder, builder.neg(base), width))


def _q4_k_codes(builder: Any, address: Any, part: Any) -> tuple[Any, Any]:
    """Return where a part's bytes lie, counted from the first part's, and which of their halves is its own."""
    packed = builder.add(address, builder.shl(builder.lshr(part, _constant(1)), _constant(5)))
    return packed, builder.shl(builder.and_(part, _constant(1)), _constant(2))


def _q4_k_pair(builder: Any, packed: Any, part: Any) -> tuple[Any, Any]:
    """Return s and m of a part as int64: six bits whole for parts 0-3, four low and two high bits apart for 4-7."""

    def byte(index: Any, offset: int) -> Any:
        return builder.zext(_load_byte(builder, builder.add(packed, index), offset), I64)

    def low(value: Any, mask: int) -> Any:
        return builder.and_(value, _constant(mask))

    def top(value: Any) -> Any:
        return builder.shl(builder.lshr(value, _constant(6)), _constant(4))

    is_first = builder.icmp_signed("<", part, _constant(4))
    own, later = byte(part, 0), byte(part, 4)
    earlier = byte(low(part, 3), 0)  # part - 4 of parts 4-7
    small = builder.select(is_first, low(own, 63), builder.or_(low(later, 15), top(earlier)))
    base = builder.select(is_first, low(later, 63), builder.or_(builder.lshr(later, _constant(4)), top(own)))
    return small, base


def _nibbles(builder: Any, address: Any, offset: int, formula: Callable[[Any], Any], width: int) -> EmitVector:
    """Return the emitter over 16 bytes whose low halves are weights 0-15 and whose high halves are 16-31."""
    decode = _table_or_formula(builder, formula, width)

    def vector(lane: int) -> Any:
        codes = _bytes(builder, address, offset + lane % 16, width)
        if lane >= 16:
            return decode(builder.lshr(codes, emit_int_constant(4, width)))
        return decode(builder.and_(codes, emit_int_constant(15, width)))

    return vector


def _table_or_formula(builder: Any, formula: Callable[[Any], Any], width: int) -> Callable[[Any], Any]:
    """Return what turns codes 0-15 into weights: a look-up among all 16 where a vector holds them, else `formula`."""
    if width != _TABLE_WIDTH:
        return lambda codes: formula(_to_float(builder, codes))
    table = formula(_floats([float(code) for code in range(_TABLE_WIDTH)]))
    return lambda codes: emit_call(builder, "llvm.x86.avx512.permvar.sf.512", table.type, [table, codes])


def _splat_half(builder: Any, address: Any, offset: int, width: int) -> Any:
    """Return a stored half in every lane: broadcast as it is loaded, for conversions of one lane need shuffles."""
    bits = builder.load(emit_pointer(builder, address, offset), typ=I16, align=1)
    return emit_convert(builder, emit_splat(builder, bits, width), KIND_F16)


def _splat_int(builder: Any, value: Any, width: int) -> Any:
    return emit_splat(builder, builder.sitofp(value, F32), width)


def _bytes(builder: Any, address: Any, offset: int, width: int) -> Any:
    raw = builder.load(emit_pointer(builder, address, offset), typ=ir.VectorType(I8, width), align=1)
    return builder.zext(raw, ir.VectorType(I32, width))


def _shifted_bytes(builder: Any, address: Any, offset: int, shift: Any, width: int) -> Any:
    amount = emit_splat(builder, builder.trunc(shift, I32), width)
    return builder.lshr(_bytes(builder, address, offset, width), amount)


def _load_byte(builder: Any, address: Any, offset: int) -> Any:
    return builder.load(emit_pointer(builder, address, offset), typ=I8, align=1)


def _to_float(builder: Any, codes: Any) -> Any:
    return builder.sitofp(codes, ir.VectorType(F32, codes.type.count))


def _floats(values: list[float]) -> Any:
    return ir.Constant(ir.VectorType(F32, len(values)), values)


def _constant(value: int) -> Any:
    return ir.Constant(I64, value)
