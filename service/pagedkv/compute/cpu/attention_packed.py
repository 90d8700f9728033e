"""The steps for many rows (prefill): a chunk's keys are transposed, its values converted, then tiles multiplied.

Tokens that only later rows see are left out, SEEN_ROWS rows at a time.
"""

from __future__ import annotations

from pagedkv.compute.cpu.attention_steps import (
    SEEN_ROWS,
    Step,
    compiled,
    make_accumulate,
    make_count_seen,
    make_outer_rows,
)
from pagedkv.compute.cpu.attention_tiles import CACHE_LINE, MODE_CLEAR, transpose_tile
from pagedkv.compute.cpu.simd import KIND_BYTES, KIND_F32, load_as, load_i64, prefetch, store


def make_score_many(width: int) -> Step:
    """Return the step that multiplies many query rows with transposed keys, as far as they see these."""
    wide, narrow = (make_outer_rows(width, vectors, KIND_F32, MODE_CLEAR, False) for vectors in (4, 2))
    count_seen = make_count_seen()

    @compiled
    def score_many(
        args: int, item: int, token: int, count: int, rows: int, head_dim: int,
        keys: int, key_stride: int, queries: int, scores: int, stride: int, alphas: int,
    ) -> None:  # fmt: skip
        for column in range(0, count, 4 * width):
            for row in range(0, rows, SEEN_ROWS):
                left, c = min(SEEN_ROWS, rows - row), scores + row * stride + 4 * column
                seen, q = count_seen(args, item, rows, row + SEEN_ROWS, token, count), queries + 4 * row * head_dim
                if seen > column + 2 * width:
                    wide(
                        keys, head_dim, head_dim, key_stride, column, q, 4 * head_dim, c, stride, alphas, keys, 0, left
                    )  # fmt: skip
                elif seen > column:
                    narrow(
                        keys, head_dim, head_dim, key_stride, column, q, 4 * head_dim, c, stride, alphas, keys, 0, left
                    )  # fmt: skip

    return score_many


def make_accumulate_many(width: int) -> Step:
    """Return the step C = alpha C + P V for many rows and float32 values, as far as the rows see these."""
    accumulate, count_seen = make_accumulate(width, KIND_F32, 0, False), make_count_seen()

    @compiled
    def accumulate_many(
        args: int, item: int, token: int, count: int, rows: int, head_dim: int,
        table: int, piece: int, p: int, p_stride: int, c: int, alpha: int,
    ) -> None:  # fmt: skip
        for row in range(0, rows, SEEN_ROWS):
            seen = count_seen(args, item, rows, row + SEEN_ROWS, token, count)
            if seen > 0:
                accumulate(
                    table, piece, seen, head_dim, p + row * p_stride, p_stride, c + 4 * row * head_dim,
                    alpha + 4 * row, table, 0, min(SEEN_ROWS, rows - row),
                )  # fmt: skip

    return accumulate_many


def make_pack_chunk(width: int, kind: int) -> Step:
    """Return the step that transposes a chunk's keys to float32 and, unless they are float32, converts its values."""
    item, is_float32 = KIND_BYTES[kind], kind == KIND_F32

    @compiled
    def pack_chunk(
        tables: int,
        ahead: int,
        table_bytes: int,
        shift: int,
        count: int,
        head_dim: int,
        keys: int,
        stride: int,
        values: int,
    ) -> None:
        step, row_bytes, mask = min(width, 1 << shift), head_dim * item, (1 << shift) - 1
        for token in range(0, count, step):  # in order: a tile of more tokens than a block overwrites what is ahead
            entry, offset = 8 * (token >> shift), (token & mask) * row_bytes
            k, v = load_i64(tables + entry) + offset, load_i64(tables + table_bytes + entry) + offset
            after_k, after_v = load_i64(ahead + entry) + offset, load_i64(ahead + table_bytes + entry) + offset
            for line in range(0, step * row_bytes, CACHE_LINE):
                prefetch(after_k + line, 2)
                prefetch(after_v + line, 2)
            last = min(count - token, step) - 1
            for dim in range(0, head_dim, width):
                transpose_tile(k + dim * item, last, row_bytes, keys + dim * stride + 4 * token, stride, width, kind)
            if not is_float32:
                for element in range(0, (last + 1) * head_dim, width):
                    converted = load_as(v + element * item, width, kind)
                    store(values + 4 * (token * head_dim + element), converted)

    return pack_chunk
