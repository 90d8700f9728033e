"""The steps of the attention kernel, each a factory of a compiled function for one vector width and storage kind.

Addresses and strides are int64 bytes. See attention_kernel for how the steps fit together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit

from pagedkv.compute.cpu import attention_args as at
from pagedkv.compute.cpu.attention_tiles import (
    CACHE_LINE,
    TILE_TOKENS,
    dot_tile,
    outer_tile,
)
from pagedkv.compute.cpu.simd import (
    KIND_BF16,
    KIND_BYTES,
    KIND_E4M3,
    KIND_F16,
    KIND_F32,
    exp2,
    hmax,
    load,
    load_as,
    load_f64,
    load_i32,
    load_i64,
    mul,
    prefetch,
    splat,
    store,
    store_i64,
)

PACK_ROWS: Final = 12  # from so many rows on, transposing the keys costs less than reducing every product
SEEN_ROWS: Final = 16  # of so many rows, what the last one does not see is not computed

_NO_SCORE: Final = np.float32(-np.inf)
_ZERO: Final = np.float32(0.0)

Step = Callable[..., Any]

compiled = njit(error_model="numpy", nogil=True)


def make_exp2_of(width: int) -> Step:
    """Return exp2 of one float32."""

    @compiled
    def exp2_of(value: float) -> float:
        return hmax(exp2(splat(np.float32(value), width)))

    return exp2_of


def make_fill_tables(is_quantized: bool) -> Step:
    """Return the step that writes the addresses of a chunk's K and V tiles and asks for its scales."""

    @compiled
    def fill_tables(args: int, index: int, first_token: int, tables: int, table_bytes: int) -> None:
        """Behind the item's last block that block is repeated, so that a table is always full."""
        num_kv_heads, shift = load_i64(args + at.NUM_KV_HEADS), load_i64(args + at.BLOCK_SHIFT)
        item = load_i64(args + at.ITEMS) + (index // num_kv_heads) * (8 * at.ITEM_WORDS)
        kv_head = index % num_kv_heads
        first = first_token >> shift
        last = (load_i64(item + at.ITEM_STOP_TOKEN) - 1) >> shift
        for entry in range(load_i64(args + at.CHUNK_TOKENS) >> shift):
            block_id = load_i32(load_i64(item + at.ITEM_TABLE) + 4 * min(first + entry, last))
            block = load_i64(args + at.POOL) + block_id * load_i64(args + at.BLOCK_BYTES)
            tile = block + kv_head * load_i64(args + at.HEAD_BYTES)
            scales = block + load_i64(args + at.SCALE_BYTES) + (4 * kv_head << shift)
            store_i64(tables + 8 * entry, tile)
            store_i64(tables + table_bytes + 8 * entry, tile + load_i64(args + at.VALUE_BYTES))
            store_i64(tables + 2 * table_bytes + 8 * entry, scales)
            if is_quantized:
                far = (4 << shift) * num_kv_heads
                for line in range(0, 4 << shift, CACHE_LINE):
                    prefetch(scales + line, 2)
                    prefetch(scales + far + line, 2)

    return fill_tables


def make_load_queries(width: int) -> Step:
    """Return the step that gathers an item's query rows."""

    @compiled
    def load_queries(args: int, item: int, kv_head: int, rows: int) -> None:
        """Copy the rows of this KV head's group as float32, multiplied by the score scale."""
        group, head_dim = load_i64(args + at.GROUP_SIZE), load_i64(args + at.HEAD_DIM)
        num_heads = group * load_i64(args + at.NUM_KV_HEADS)
        factor = splat(np.float32(load_f64(args + at.SCORE_SCALE)), width)
        query_kind, queries = load_i64(args + at.QUERY_KIND), load_i64(args + at.QUERIES)
        for row in range(load_i64(item + at.ITEM_NUM_QUERIES) * group):
            query = load_i64(item + at.ITEM_FIRST_QUERY) + row // group
            element = (query * num_heads + kv_head * group + row % group) * head_dim
            for dim in range(0, head_dim, width):
                if query_kind == KIND_F32:
                    value = load(queries + 4 * (element + dim), width)
                elif query_kind == KIND_F16:
                    value = load_as(queries + 2 * (element + dim), width, KIND_F16)
                else:
                    value = load_as(queries + 2 * (element + dim), width, KIND_BF16)
                store(rows + 4 * (row * head_dim + dim), mul(value, factor))

    return load_queries


def make_score_decode(width: int, kind: int) -> Step:
    """Return the step that multiplies few query rows with the keys as they lie in their blocks."""
    full, item = width // 4, KIND_BYTES[kind]
    three, two = min(3, full), min(2, full)

    @compiled
    def score_decode(
        queries: int, rows: int, head_dim: int, scores: int, stride: int, shift: int, count: int,
        table: int, ahead: int, far_table: int,
    ) -> None:  # fmt: skip
        row_bytes, mask = head_dim * item, (1 << shift) - 1
        for token in range(0, count, TILE_TOKENS):
            entry, offset = 8 * (token >> shift), (token & mask) * row_bytes
            k, last = load_i64(table + entry) + offset, min(count - token, TILE_TOKENS) - 1
            after = load_i64(ahead + entry)
            far, after = load_i64(ahead + far_table + entry) - after, after + offset
            for row in range(0, rows, full):
                q, s, left = queries + 4 * row * head_dim, scores + row * stride + 4 * token, rows - row
                if left >= full:
                    dot_tile(k, last, row_bytes, q, head_dim, s, stride, after, far, full, width, kind)
                elif left == 3:
                    dot_tile(k, last, row_bytes, q, head_dim, s, stride, after, far, three, width, kind)
                elif left == 2:
                    dot_tile(k, last, row_bytes, q, head_dim, s, stride, after, far, two, width, kind)
                else:
                    dot_tile(k, last, row_bytes, q, head_dim, s, stride, after, far, 1, width, kind)
                after, far = k, 0

    return score_decode


def make_outer_rows(width: int, vectors: int, kind: int, mode: int, remainders: bool) -> Step:
    """Return the step that runs one column of tiles over all rows; `remainders` adds tiles of 2 and 3 rows."""
    full = width // 4
    three, two = (min(3, full), min(2, full)) if remainders else (1, 1)

    @compiled
    def outer_rows(
        table: int, piece: int, count: int, row_bytes: int, column: int,
        a: int, a_stride: int, c: int, c_stride: int, alpha: int, ahead: int, far: int, rows: int,
    ) -> None:  # fmt: skip
        row = 0
        while row < rows:
            a_at, c_at, f_at, left = a + row * a_stride, c + row * c_stride, alpha + 4 * row, rows - row
            if left >= full:
                outer_tile(
                    table, piece, count, row_bytes, column, a_at, a_stride, c_at, c_stride, f_at, ahead, far,
                    full, vectors, width, kind, mode,
                )  # fmt: skip
                row += full
            elif left == 3:
                outer_tile(
                    table, piece, count, row_bytes, column, a_at, a_stride, c_at, c_stride, f_at, ahead, far,
                    three, vectors, width, kind, mode,
                )  # fmt: skip
                row += three
            elif left == 2:
                outer_tile(
                    table, piece, count, row_bytes, column, a_at, a_stride, c_at, c_stride, f_at, ahead, far,
                    two, vectors, width, kind, mode,
                )  # fmt: skip
                row += two
            else:
                outer_tile(
                    table, piece, count, row_bytes, column, a_at, a_stride, c_at, c_stride, f_at, ahead, far,
                    1, vectors, width, kind, mode,
                )  # fmt: skip
                row += 1
            ahead, far = table, 0

    return outer_rows


def make_accumulate(width: int, kind: int, mode: int, remainders: bool) -> Step:
    """Return the step C = alpha C + P V over all columns of head_dim."""
    wide = make_outer_rows(width, 4, kind, mode, remainders)
    narrow = make_outer_rows(width, 1, kind, mode, remainders)
    item = KIND_BYTES[kind]

    @compiled
    def accumulate(
        table: int, piece: int, count: int, head_dim: int, p: int, p_stride: int, c: int, alpha: int,
        ahead: int, far: int, rows: int,
    ) -> None:  # fmt: skip
        column, row_bytes, c_stride = 0, head_dim * item, 4 * head_dim
        while column + 4 * width <= head_dim:
            wide(
                table, piece, count, row_bytes, column, p, p_stride, c + 4 * column, c_stride, alpha, ahead, far, rows
            )  # fmt: skip
            column += 4 * width
        while column < head_dim:
            narrow(
                table, piece, count, row_bytes, column, p, p_stride, c + 4 * column, c_stride, alpha, ahead, far, rows
            )  # fmt: skip
            column += width

    return accumulate


def make_count_seen() -> Step:
    """Return the step that counts the tokens of a chunk that rows before `stop_row` see, window and sinks aside."""

    @compiled
    def count_seen(args: int, item: int, rows: int, stop_row: int, token: int, count: int) -> int:
        last_query = (min(rows, stop_row) - 1) // load_i64(args + at.GROUP_SIZE)
        return max(0, min(count, load_i64(item + at.ITEM_POSITION) + last_query + 1 - token))

    return count_seen


def make_copy_scales(width: int, kind: int) -> Step:
    """Return the step that gathers a chunk's scales of K and V; the factor of the conversion joins them."""
    factor = np.float32(256.0 if kind == KIND_E4M3 else 1.0)
    step = min(8, width)  # divides every block size; scales behind the context go to lanes that nobody looks at

    @compiled
    def copy_scales(
        table: int, ahead: int, shift: int, value_offset: int, count: int, key_scales: int, value_scales: int
    ) -> None:
        """`ahead` is the table of the next chunk's scales, which were asked for once (see emit_ask)."""
        factors, mask = splat(factor, step), (1 << shift) - 1
        for token in range(0, count, step):
            entry, offset = 8 * (token >> shift), 4 * (token & mask)
            scale, after = load_i64(table + entry) + offset, load_i64(ahead + entry) + offset
            prefetch(after, 2)
            prefetch(after + value_offset, 2)
            store(key_scales + 4 * token, mul(load(scale, step), factors))
            store(value_scales + 4 * token, mul(load(scale + value_offset, step), factors))

    return copy_scales
