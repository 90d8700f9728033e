"""Register tiles of attention over int8 keys and values: AVX-512's products of bytes, 64 an instruction.

Float32 operands come as digits (see attention_bytes). `dot_bytes_tile` is Q K^T with one token a lane, so that nothing
is summed over lanes; `outer_bytes_tile` is P V with one column a lane.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagedkv.compute.cpu.attention_tiles import emit_ask, emit_loop, word
from pagedkv.compute.cpu.simd import literal
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I8,
    I32,
    I64,
    KIND_F32,
    emit_call,
    emit_fma,
    emit_int_constant,
    emit_load_as,
    emit_pointer,
    emit_shuffle,
    emit_splat,
)

WIDTH: Final = 16
DIGITS: Final = 3
TILE_TOKENS: Final = 16  # of a product with keys
TILE_COLUMNS: Final = 32  # of a product with values
QUAD: Final = 4  # bytes that one 32-bit lane of a product adds up
DIGIT_STRIDE: Final = 256  # bytes between the digits of a query row; the largest head dim
ROW_STRIDE: Final = DIGITS * DIGIT_STRIDE + 64  # behind the digits: 3 offsets (int32) and the factor (float32)
ROW_OFFSETS: Final = DIGITS * DIGIT_STRIDE
ROW_FACTOR: Final = ROW_OFFSETS + 4 * DIGITS

_CACHE_LINE: Final = 64
_BYTES = ir.VectorType(I8, 64)
_WORDS = ir.VectorType(I32, WIDTH)
_FLOATS = ir.VectorType(F32, WIDTH)


def _emit_byte_dot(builder: Any, sums: Any, unsigned: Any, signed: Any) -> Any:
    """Return sums + the products of 4 neighbouring bytes each (all <16 x i32>)."""
    args = [sums, builder.bitcast(unsigned, _BYTES), builder.bitcast(signed, _BYTES)]
    return emit_call(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, args)


def _emit_joined(builder: Any, digits: list[Any]) -> Any:
    """Return digits[0] + 256 digits[1] + 65536 digits[2] as float32."""
    low = builder.add(builder.shl(digits[1], emit_int_constant(8, WIDTH)), digits[0])
    high = builder.sitofp(digits[2], _FLOATS)
    return emit_fma(builder, high, ir.Constant(_FLOATS, [65536.0] * WIDTH), builder.sitofp(low, _FLOATS))


def _load_word(builder: Any, address: Any, offset: int, kind: Any = I32) -> Any:
    return emit_splat(builder, builder.load(emit_pointer(builder, address, offset), typ=kind, align=4), WIDTH)


@intrinsic(prefer_literal=True)
def store_digits(typingctx: Any, address: Any, stride: Any, vector: Any, is_signed: Any) -> Any:
    """Store the three digits of a rounded float32 vector, `stride` bytes apart: signed digits, or plain bytes."""
    signed = literal(is_signed)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = emit_call(builder, "llvm.rint.v16f32", _FLOATS, [args[2]])
        value = builder.fptosi(rounded, _WORDS)
        if signed:
            middle = emit_int_constant(0x808080, WIDTH)
            value = builder.xor(builder.add(value, middle), middle)
        for digit in range(DIGITS):
            part = builder.lshr(value, emit_int_constant(8 * digit, WIDTH)) if digit else value
            place = builder.add(args[0], builder.mul(args[1], word(digit)))
            builder.store(builder.trunc(part, ir.VectorType(I8, WIDTH)), emit_pointer(builder, place), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vector, is_signed), codegen


@intrinsic
def store_byte_sum(typingctx: Any, target: Any, source: Any, count: Any) -> Any:
    """Store -128 times the sum of `count` signed bytes (a multiple of 16) as int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def body(index: Any, state: list[Any]) -> list[Any]:
            pointer = emit_pointer(builder, args[1], index)
            raw = builder.load(pointer, typ=ir.VectorType(I8, WIDTH), align=1)
            return [builder.add(state[0], builder.sext(raw, _WORDS))]

        sums = emit_loop(builder, args[2], WIDTH, [emit_int_constant(0, WIDTH)], body)[0]
        total = emit_call(builder, "llvm.vector.reduce.add.v16i32", I32, [sums])
        builder.store(builder.mul(total, ir.Constant(I32, -128)), emit_pointer(builder, args[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Return 4 vectors of 16 tokens x 4 bytes from 16 tokens x 16 bytes."""
    wide = []
    for row in range(QUAD):
        front, back = (emit_shuffle(builder, rows[row + part], rows[row + part + 4], range(32)) for part in (0, 8))
        wide.append(builder.bitcast(emit_shuffle(builder, front, back, range(64)), _WORDS))
    lanes = range(0, WIDTH, 4)
    low = [index + lane for lane in lanes for index in (0, WIDTH, 1, WIDTH + 1)]
    high = [index + lane for lane in lanes for index in (2, WIDTH + 2, 3, WIDTH + 3)]
    front = [index + lane for lane in lanes for index in (0, 1, WIDTH, WIDTH + 1)]
    back = [index + lane for lane in lanes for index in (2, 3, WIDTH + 2, WIDTH + 3)]
    result = []
    for half in (low, high):
        a, b = (emit_shuffle(builder, wide[row], wide[row + 1], half) for row in (0, 2))
        result += [emit_shuffle(builder, a, b, front), emit_shuffle(builder, a, b, back)]
    return result


@intrinsic(prefer_literal=True)
def dot_bytes_tile(
    typingctx: Any,
    first: Any,
    second: Any,
    head_dim: Any,
    digits: Any,
    scores: Any,
    scores_stride: Any,
    first_ahead: Any,
    second_ahead: Any,
    first_far: Any,
    second_far: Any,
    rows: Any,
) -> Any:
    """Store the products of `rows` digit rows with 16 keys: 8 rows of head_dim bytes at `first`, 8 at `second`."""
    num_rows = literal(rows)
    half = TILE_TOKENS // 2

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        starts, ahead = args[:2], list(zip(args[6:8], args[8:10], strict=True))
        dims, digits_at, out, out_stride = args[2:6]
        keys = [
            builder.add(start, builder.mul(dims, word(token))) if token else start
            for start in starts
            for token in range(half)
        ]
        flip = emit_int_constant(-128, 64, I8)

        def body(dim: Any, sums: list[Any]) -> list[Any]:
            for start, far in ahead:
                for line in range(0, half * WIDTH, _CACHE_LINE):
                    place = builder.add(start, builder.mul(dim, word(half)))
                    emit_ask(builder, builder.add(place, word(line)), far)
            raw = [builder.load(emit_pointer(builder, key, dim), typ=ir.VectorType(I8, WIDTH), align=1) for key in keys]
            quads = [builder.xor(builder.bitcast(quad, _BYTES), flip) for quad in _emit_transposed(builder, raw)]
            place = builder.add(digits_at, dim)
            result = list(sums)
            for index in range(num_rows * DIGITS):
                row, digit = divmod(index, DIGITS)
                offset = row * ROW_STRIDE + digit * DIGIT_STRIDE
                for number, quad in enumerate(quads):
                    query = _load_word(builder, place, offset + QUAD * number)
                    result[index] = _emit_byte_dot(builder, result[index], quad, query)
            return result

        offsets = [
            _load_word(builder, digits_at, row * ROW_STRIDE + ROW_OFFSETS + 4 * digit)
            for row in range(num_rows)
            for digit in range(DIGITS)
        ]
        sums = emit_loop(builder, dims, WIDTH, offsets, body)
        for row in range(num_rows):
            joined = _emit_joined(builder, sums[row * DIGITS : (row + 1) * DIGITS])
            factor = _load_word(builder, digits_at, row * ROW_STRIDE + ROW_FACTOR, F32)
            place = builder.add(out, builder.mul(out_stride, word(row)))
            builder.store(builder.fmul(joined, factor), emit_pointer(builder, place), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10, rows), codegen


def _emit_value_quads(builder: Any, address: Any, row_bytes: Any, columns: int) -> list[Any]:
    """Return vectors of 16 columns x 4 rows from 4 rows of `columns` bytes."""
    rows = [
        builder.load(
            emit_pointer(builder, builder.add(address, builder.mul(row_bytes, word(row)))),
            typ=ir.VectorType(I8, columns),
            align=1,
        )
        for row in range(QUAD)
    ]
    front, back = (emit_shuffle(builder, rows[row], rows[row + 1], range(2 * columns)) for row in (0, 2))
    lanes = [row * columns + column for column in range(columns) for row in range(QUAD)]
    return [emit_shuffle(builder, front, back, lanes[start : start + 64]) for start in range(0, len(lanes), 64)]


@intrinsic(prefer_literal=True)
def outer_bytes_tile(
    typingctx: Any,
    table: Any,
    block_rows: Any,
    count: Any,
    row_bytes: Any,
    column: Any,
    digits: Any,
    digit_stride: Any,
    c: Any,
    c_stride: Any,
    alpha: Any,
    factors: Any,
    ahead_table: Any,
    far: Any,
    rows: Any,
    vectors: Any,
) -> Any:
    """Compute C = alpha * C + factor * W V for `rows` rows of weights as digits and `vectors` (1 or 2) x 16 columns.

    V's rows of bytes lie in pieces of `block_rows`, whose addresses are the words at `table`; rows are taken by fours
    up to `count` rounded up, and weights behind `count` must be 0. Digits are `digit_stride` bytes apart.
    """
    num_rows, num_vectors = literal(rows), literal(vectors)
    columns = WIDTH * num_vectors

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (table_at, piece_rows, total, b_stride, column_at, digits_at, digit_step) = args[:7]
        c_at, c_step, alpha_at, factor_at, ahead_at, far_table = args[7:13]
        planes = [builder.add(digits_at, builder.mul(digit_step, word(index))) for index in range(num_rows * DIGITS)]

        def piece(index: Any, sums: list[Any]) -> list[Any]:
            done = builder.mul(index, piece_rows)
            left = builder.sub(total, done)
            here = builder.select(builder.icmp_signed("<", left, piece_rows), left, piece_rows)
            slot = builder.mul(index, word(8))
            base = builder.load(emit_pointer(builder, table_at, slot), typ=I64, align=8)
            base = builder.add(base, column_at)
            ahead = builder.load(emit_pointer(builder, ahead_at, slot), typ=I64, align=8)
            beyond = builder.load(emit_pointer(builder, ahead_at, builder.add(slot, far_table)), typ=I64, align=8)
            far_bytes = builder.sub(beyond, ahead)
            # 4 rows of `columns` bytes are asked for a step: together the columns' steps cover the tile
            ahead = builder.add(ahead, builder.mul(column_at, piece_rows))

            def body(row_index: Any, inner: list[Any]) -> list[Any]:
                place = builder.add(ahead, builder.mul(row_index, word(columns)))
                for line in range(0, QUAD * columns, _CACHE_LINE):
                    emit_ask(builder, builder.add(place, word(line)), far_bytes)
                quads = _emit_value_quads(
                    builder, builder.add(base, builder.mul(row_index, b_stride)), b_stride, columns
                )
                offset = builder.add(done, row_index)
                result = []
                for index, plane in enumerate(planes):
                    weights = _load_word(builder, builder.add(plane, offset), 0)
                    for vector in range(num_vectors):
                        result.append(
                            _emit_byte_dot(builder, inner[index * num_vectors + vector], weights, quads[vector])
                        )
                return result

            return emit_loop(builder, here, QUAD, sums, body)

        zeros = [emit_int_constant(0, WIDTH)] * (num_rows * DIGITS * num_vectors)
        pieces = builder.sdiv(builder.sub(builder.add(total, piece_rows), word(1)), piece_rows)
        sums = emit_loop(builder, pieces, 1, zeros, piece)
        for row in range(num_rows):
            c_row = builder.add(c_at, builder.mul(c_step, word(row)))
            scale, factor = (_load_word(builder, at, 4 * row, F32) for at in (alpha_at, factor_at))
            for vector in range(num_vectors):
                digits_of = [sums[(row * DIGITS + digit) * num_vectors + vector] for digit in range(DIGITS)]
                old = builder.fmul(emit_load_as(builder, c_row, 64 * vector, WIDTH, KIND_F32), scale)
                new = emit_fma(builder, _emit_joined(builder, digits_of), factor, old)
                builder.store(new, emit_pointer(builder, c_row, 64 * vector), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13, rows, vectors), codegen
