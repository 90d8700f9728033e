"""The steps of the attention kernel for few rows over int8 keys and values, on integer products of bytes.

A float32 operand, a query row or a row's weights of one chunk, is cut into three digits of 8 bits below its largest
element: 24 bits, as many as float32 has for that element. Each digit is multiplied exactly, and the three sums are
joined as float32. Over 2,048 tokens the error is a quarter of that of float32 products. What is not finite makes the
row's factor NaN, and so all that depends on it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.compute.cpu.attention_bytes_tiles import (
    DIGIT_STRIDE,
    DIGITS,
    ROW_FACTOR,
    ROW_OFFSETS,
    ROW_STRIDE,
    TILE_COLUMNS,
    dot_bytes_tile,
    outer_bytes_tile,
    store_byte_sum,
    store_digits,
)
from pagedkv.compute.cpu.attention_steps import PACK_ROWS, Step, compiled
from pagedkv.compute.cpu.simd import (
    fma,
    hmax,
    hsum,
    keep_lanes,
    load,
    load_i64,
    mul,
    splat,
    store,
    store_f32,
    vabs,
    vmax,
)

# The largest digits' value: all fit into -128 .. 127 or 0 .. 255, with room for the rounding of a product.
_LARGEST_SIGNED: Final = np.float32(0x7F7F70)
_LARGEST: Final = np.float32(0xFFFFF0)
_ZERO: Final = np.float32(0.0)


def make_split_queries() -> Step:
    """Return the step that cuts fewer than PACK_ROWS query rows into digits, which lie behind PACK_ROWS rows."""

    @compiled
    def split_queries(queries: int, rows: int, head_dim: int) -> None:
        for row in range(rows):
            source = queries + 4 * row * head_dim
            target = queries + 4 * PACK_ROWS * head_dim + row * ROW_STRIDE
            peaks, nothing = splat(_ZERO, 16), splat(_ZERO, 16)
            for dim in range(0, head_dim, 16):
                value = load(source + 4 * dim, 16)
                peaks, nothing = vmax(peaks, vabs(value)), fma(value, splat(_ZERO, 16), nothing)
            peak = hmax(peaks)
            factor = _ZERO if peak == _ZERO else _LARGEST_SIGNED / peak
            for dim in range(0, head_dim, 16):
                store_digits(target + dim, DIGIT_STRIDE, mul(load(source + 4 * dim, 16), splat(factor, 16)), 1)
            for digit in range(DIGITS):
                store_byte_sum(target + ROW_OFFSETS + 4 * digit, target + digit * DIGIT_STRIDE, head_dim)
            # not a number where any element is not finite, as products of floats would be
            store_f32(target + ROW_FACTOR, peak / _LARGEST_SIGNED + hsum(nothing))

    return split_queries


def make_score_bytes() -> Step:
    """Return the step that multiplies few query rows with int8 keys as they lie in their blocks."""

    @compiled
    def score_bytes(
        queries: int, rows: int, head_dim: int, scores: int, stride: int, shift: int, count: int,
        table: int, ahead: int, far: int,
    ) -> None:  # fmt: skip
        digits, mask = queries + 4 * PACK_ROWS * head_dim, (1 << shift) - 1
        for token in range(0, count, 16):
            entry, offset = 8 * (token >> shift), (token & mask) * head_dim
            next_entry, next_offset = 8 * ((token + 8) >> shift), ((token + 8) & mask) * head_dim
            first, second = load_i64(table + entry) + offset, load_i64(table + next_entry) + next_offset
            after, last = load_i64(ahead + entry), load_i64(ahead + next_entry)
            beyond, beyond_last = load_i64(ahead + far + entry) - after, load_i64(ahead + far + next_entry) - last
            after, last = after + offset, last + next_offset
            for row in range(0, rows, 4):
                d, s, left = digits + row * ROW_STRIDE, scores + row * stride + 4 * token, rows - row
                if left >= 4:
                    dot_bytes_tile(first, second, head_dim, d, s, stride, after, last, beyond, beyond_last, 4)
                elif left == 3:
                    dot_bytes_tile(first, second, head_dim, d, s, stride, after, last, beyond, beyond_last, 3)
                elif left == 2:
                    dot_bytes_tile(first, second, head_dim, d, s, stride, after, last, beyond, beyond_last, 2)
                else:
                    dot_bytes_tile(first, second, head_dim, d, s, stride, after, last, beyond, beyond_last, 1)
                after, last, beyond, beyond_last = first, second, 0, 0

    return score_bytes


def make_accumulate_bytes() -> Step:
    """Return the step C = alpha C + P V for fewer than PACK_ROWS rows; what lies behind those of P is overwritten."""
    split_weights, accumulate_columns = _make_split_weights(), _make_accumulate_columns()

    @compiled
    def accumulate_bytes(
        table: int, piece: int, count: int, head_dim: int, p: int, p_stride: int, c: int, alpha: int,
        ahead: int, far: int, rows: int,
    ) -> None:  # fmt: skip
        digits, digit_stride = p + PACK_ROWS * p_stride, p_stride >> 2
        factors = digits + PACK_ROWS * DIGITS * digit_stride
        split_weights(p, p_stride, rows, count, digits, digit_stride, factors)
        for column in range(0, head_dim, TILE_COLUMNS):
            accumulate_columns(
                table, piece, count, head_dim, column, digits, digit_stride, c, alpha, factors, ahead, far, rows
            )

    return accumulate_bytes


def _make_split_weights() -> Step:
    """Return the step that cuts a chunk's weights into digits, [rows, 3, chunk] bytes, and stores their factors."""

    @compiled
    def split_weights(
        p: int, p_stride: int, rows: int, count: int, digits: int, digit_stride: int, factors: int
    ) -> None:
        for row in range(rows):
            source, target = p + row * p_stride, digits + DIGITS * row * digit_stride
            peaks, nothing = splat(_ZERO, 16), splat(_ZERO, 16)
            for token in range(0, count, 16):
                weight = load(source + 4 * token, 16)
                if token + 16 > count:
                    weight = keep_lanes(weight, 0, count - token, _ZERO)
                    store(source + 4 * token, weight)
                peaks, nothing = vmax(peaks, weight), fma(weight, splat(_ZERO, 16), nothing)
            peak = hmax(peaks)
            factor = _ZERO if peak == _ZERO else _LARGEST / peak
            for token in range(0, count, 16):
                store_digits(target + token, digit_stride, mul(load(source + 4 * token, 16), splat(factor, 16)), 0)
            store_f32(factors + 4 * row, peak / _LARGEST + hsum(nothing))

    return split_weights


def _make_accumulate_columns() -> Step:
    """Return the step that takes all rows over TILE_COLUMNS columns, or over the last 16."""

    @compiled
    def accumulate_columns(
        table: int, piece: int, count: int, head_dim: int, column: int, digits: int, digit_stride: int,
        c: int, alpha: int, factors: int, ahead: int, far: int, rows: int,
    ) -> None:  # fmt: skip
        row, step = 0, 4 * head_dim
        while row < rows:
            d, c_at, left = digits + DIGITS * row * digit_stride, c + 4 * (row * head_dim + column), rows - row
            a, f = alpha + 4 * row, factors + 4 * row
            if column + TILE_COLUMNS > head_dim:
                outer_bytes_tile(
                    table, piece, count, head_dim, column, d, digit_stride, c_at, step, a, f, ahead, far, 1, 1,
                )  # fmt: skip
                row += 1
            elif left >= 4:
                outer_bytes_tile(
                    table, piece, count, head_dim, column, d, digit_stride, c_at, step, a, f, ahead, far, 4, 2,
                )  # fmt: skip
                row += 4
            elif left == 3:
                outer_bytes_tile(
                    table, piece, count, head_dim, column, d, digit_stride, c_at, step, a, f, ahead, far, 3, 2,
                )  # fmt: skip
                row += 3
            elif left == 2:
                outer_bytes_tile(
                    table, piece, count, head_dim, column, d, digit_stride, c_at, step, a, f, ahead, far, 2, 2,
                )  # fmt: skip
                row += 2
            else:
                outer_bytes_tile(
                    table, piece, count, head_dim, column, d, digit_stride, c_at, step, a, f, ahead, far, 1, 2,
                )  # fmt: skip
                row += 1
            ahead, far = table, 0

    return accumulate_columns
