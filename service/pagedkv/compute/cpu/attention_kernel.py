"""The attention kernel: online softmax over chunks of tokens, one KV head of one unit of queries at a time.

A work item is (sequence, a run of its queries, a part of its tokens, one KV head). Its rows are all (query, head of
the group) pairs, so K and V are read once for the whole group. Few rows (decode) take the keys as they lie in the
blocks (`dot_tile`); many rows (prefill) transpose a chunk of keys first and multiply tiles (`outer_tile`). While a
chunk is computed, the cache lines of the next two are asked for, of the next item's too. A sequence that is split
over items leaves partial results; whoever finishes its last part merges them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pagedkv.compute.cpu import attention_args as at
from pagedkv.compute.cpu.attention_bytes import make_accumulate_bytes, make_score_bytes, make_split_queries
from pagedkv.compute.cpu.attention_packed import make_accumulate_many, make_pack_chunk, make_score_many
from pagedkv.compute.cpu.attention_softmax import STATE_ARRAYS, make_softmax_rows
from pagedkv.compute.cpu.attention_steps import (
    PACK_ROWS,
    SEEN_ROWS,
    Step,
    compiled,
    make_accumulate,
    make_copy_scales,
    make_exp2_of,
    make_fill_tables,
    make_load_queries,
    make_score_decode,
)
from pagedkv.compute.cpu.attention_tiles import MODE_PREFETCH
from pagedkv.compute.cpu.simd import (
    KIND_E4M3,
    KIND_F32,
    KIND_I8,
    fma,
    load,
    load_f32,
    load_i64,
    mul,
    splat,
    store,
    store_f32,
    store_i64,
)
from pagedkv.compute.cpu.threads import claim, fetch_add, peek

MAX_CHUNK_BLOCKS: Final = 16
KEY_PADDING: Final = 16  # columns between the rows of the transposed keys, which the last tile may write into

_TABLE_BYTES: Final = 8 * MAX_CHUNK_BLOCKS
_TABLES_BYTES: Final = 3 * _TABLE_BYTES  # K, V, scales
_NUM_TABLES: Final = 3  # of this chunk, the next, and the one after
_ALL_TABLES_BYTES: Final = _NUM_TABLES * _TABLES_BYTES
_LN2: Final = math.log(2.0)
_NO_SCORE: Final = np.float32(-np.inf)
_ZERO: Final = np.float32(0.0)


def scratch_bytes(max_rows: int, head_dim: int, chunk_tokens: int) -> int:
    """Return the bytes of scratch a thread needs, in the order in which `attend_items` carves it."""
    rows = 2 * max_rows * head_dim + max_rows * (chunk_tokens + STATE_ARRAYS)
    chunk = head_dim * (chunk_tokens + KEY_PADDING) + chunk_tokens * head_dim + 2 * (chunk_tokens + KEY_PADDING)
    return -(-(_ALL_TABLES_BYTES + _TABLE_BYTES + 4 * (rows + chunk)) // 4096) * 4096


def make_attention_kernel(width: int, kind: int, has_byte_dots: bool) -> Callable[[int, int], None]:
    """Return the kernel for vectors of `width` float32 over a pool whose elements are of `kind`.

    With `has_byte_dots`, which needs KIND_I8, few rows are multiplied as bytes (see attention_bytes).
    """
    attend_chunk, split_queries = _make_attend_chunk(width, kind, has_byte_dots), make_split_queries()
    finish_rows = _make_finish_rows(width)
    fill_tables, load_queries = make_fill_tables(kind in (KIND_I8, KIND_E4M3)), make_load_queries(width)

    @compiled
    def fill_from(args: int, index: int, upcoming: int, token: int, tables: int) -> None:
        """Fill tables for the item's chunk at `token` or, behind its end, for the upcoming item's."""
        num_kv_heads, chunk = load_i64(args + at.NUM_KV_HEADS), load_i64(args + at.CHUNK_TOKENS)
        item = load_i64(args + at.ITEMS) + (index // num_kv_heads) * (8 * at.ITEM_WORDS)
        first, stop = load_i64(item + at.ITEM_FIRST_TOKEN), load_i64(item + at.ITEM_STOP_TOKEN)
        if token < stop:
            fill_tables(args, index, token, tables, _TABLE_BYTES)
            return
        chosen, place = index, stop - 1
        if upcoming >= 0:
            following = load_i64(args + at.ITEMS) + (upcoming // num_kv_heads) * (8 * at.ITEM_WORDS)
            behind = token - first - -(-(stop - first) // chunk) * chunk
            chosen, place = upcoming, load_i64(following + at.ITEM_FIRST_TOKEN) + behind
        fill_tables(args, chosen, place, tables, _TABLE_BYTES)

    @compiled
    def attend_item(args: int, index: int, upcoming: int, scratch: int) -> None:
        num_kv_heads, chunk = load_i64(args + at.NUM_KV_HEADS), load_i64(args + at.CHUNK_TOKENS)
        head_dim, max_rows = load_i64(args + at.HEAD_DIM), load_i64(args + at.MAX_ROWS)
        kv_head, item = index % num_kv_heads, load_i64(args + at.ITEMS) + (index // num_kv_heads) * (8 * at.ITEM_WORDS)
        rows = load_i64(item + at.ITEM_NUM_QUERIES) * load_i64(args + at.GROUP_SIZE)
        queries = scratch + _ALL_TABLES_BYTES + _TABLE_BYTES
        state = queries + 4 * max_rows * head_dim
        sums = state + 4 * STATE_ARRAYS * max_rows
        load_queries(args, item, kv_head, queries)
        if has_byte_dots and rows < PACK_ROWS:
            split_queries(queries, rows, head_dim)
        for row in range(rows):
            store_f32(state + 4 * row, _NO_SCORE)
            store_f32(state + 4 * (max_rows + row), _ZERO)
        for element in range(0, rows * head_dim, width):
            store(sums + 4 * element, splat(_ZERO, width))
        first, stop = load_i64(item + at.ITEM_FIRST_TOKEN), load_i64(item + at.ITEM_STOP_TOKEN)
        here, ahead, beyond = scratch, scratch + _TABLES_BYTES, scratch + 2 * _TABLES_BYTES
        fill_tables(args, index, first, here, _TABLE_BYTES)
        fill_from(args, index, upcoming, first + chunk, ahead)
        for token in range(first, stop, chunk):
            fill_from(args, index, upcoming, token + 2 * chunk, beyond)
            attend_chunk(args, item, kv_head, token, min(chunk, stop - token), rows, scratch, here, ahead, beyond)
            here, ahead, beyond = ahead, beyond, here
        finish_rows(args, item, kv_head, rows, state, state + 4 * max_rows, sums)

    def attend_items(args: int, thread: int) -> None:
        scratch = load_i64(args + at.SCRATCH) + thread * load_i64(args + at.SCRATCH_BYTES)
        index = claim(args)
        while index >= 0:
            # known early so that its first cache lines can be asked for; the last ones are left to who is free first
            is_early = index < load_i64(args + at.NUM_CLAIMED_EARLY)
            upcoming = claim(args) if is_early else peek(args)
            attend_item(args, index, upcoming, scratch)
            index = upcoming if is_early else claim(args)

    return attend_items


def _make_attend_chunk(width: int, kind: int, has_byte_dots: bool) -> Step:
    """Return the step that lets an item's rows see one chunk of tokens."""
    is_quantized, is_float32 = kind in (KIND_I8, KIND_E4M3), kind == KIND_F32
    score_few = make_score_bytes() if has_byte_dots else make_score_decode(width, kind)
    accumulate_few = make_accumulate_bytes() if has_byte_dots else make_accumulate(width, kind, MODE_PREFETCH, True)
    softmax_rows = make_softmax_rows(width, is_quantized)
    pack_chunk, copy_scales = make_pack_chunk(width, kind), make_copy_scales(width, kind)
    score_many, accumulate_many = make_score_many(width), make_accumulate_many(width)

    @compiled
    def attend_chunk(
        args: int, item: int, kv_head: int, token: int, count: int, rows: int, scratch: int,
        here: int, ahead: int, beyond: int,
    ) -> None:  # fmt: skip
        head_dim, max_rows = load_i64(args + at.HEAD_DIM), load_i64(args + at.MAX_ROWS)
        shift, chunk = load_i64(args + at.BLOCK_SHIFT), load_i64(args + at.CHUNK_TOKENS)
        single = scratch + _ALL_TABLES_BYTES
        queries = single + _TABLE_BYTES
        state = queries + 4 * max_rows * head_dim
        alphas, sums = state + 8 * max_rows, state + 4 * STATE_ARRAYS * max_rows
        scores, stride = sums + 4 * max_rows * head_dim, 4 * chunk
        keys, key_stride = scores + max_rows * stride, 4 * (chunk + KEY_PADDING)
        values = keys + head_dim * key_stride
        key_scales = values + 4 * chunk * head_dim
        value_scales = key_scales + key_stride
        is_packed = rows >= PACK_ROWS
        if is_packed:
            pack_chunk(here, ahead, _TABLE_BYTES, shift, count, head_dim, keys, key_stride, values)
            store_i64(single, keys)
            score_many(
                args, item, token, count, rows, head_dim, single, key_stride, queries, scores, stride, alphas
            )  # fmt: skip
        else:
            score_few(queries, rows, head_dim, scores, stride, shift, count, here, ahead, beyond - ahead)
        if is_quantized:
            value_offset = (4 << shift) * load_i64(args + at.NUM_KV_HEADS)
            table, after = here + 2 * _TABLE_BYTES, ahead + 2 * _TABLE_BYTES
            copy_scales(table, after, shift, value_offset, count, key_scales, value_scales)
        tile = SEEN_ROWS if is_packed else rows
        softmax_rows(args, item, kv_head, rows, tile, token, count, scores, stride, state, key_scales, value_scales)
        if not is_packed:
            after = ahead + _TABLE_BYTES
            far, table = beyond - ahead, here + _TABLE_BYTES
            accumulate_few(table, 1 << shift, count, head_dim, scores, stride, sums, alphas, after, far, rows)
        elif is_float32:
            table = here + _TABLE_BYTES
            accumulate_many(args, item, token, count, rows, head_dim, table, 1 << shift, scores, stride, sums, alphas)
        else:
            store_i64(single, values)
            accumulate_many(args, item, token, count, rows, head_dim, single, count, scores, stride, sums, alphas)

    return attend_chunk


def _make_finish_rows(width: int) -> Step:
    """Return the step that writes an item's rows out, or leaves them as a part and merges after the last part."""
    write_row, merge_row = _make_write_row(width), _make_merge_row(width)

    @compiled
    def finish_rows(args: int, item: int, kv_head: int, rows: int, peaks: int, totals: int, sums: int) -> None:
        num_kv_heads, head_dim = load_i64(args + at.NUM_KV_HEADS), load_i64(args + at.HEAD_DIM)
        part = load_i64(item + at.ITEM_PART)
        if part < 0:
            for row in range(rows):
                peak, total = load_f32(peaks + 4 * row), load_f32(totals + 4 * row)
                write_row(args, item, kv_head, row, peak, total, sums + 4 * row * head_dim)
            return
        row_bytes = 4 * (head_dim + 2)
        part_bytes = num_kv_heads * rows * row_bytes
        before = load_i64(item + at.ITEM_FIRST_PARTIAL) * load_i64(args + at.GROUP_SIZE) * num_kv_heads
        first_place = load_i64(args + at.PARTIALS) + (before + kv_head * rows) * row_bytes
        place = first_place + part * part_bytes
        for row in range(rows):
            for dim in range(0, head_dim, width):
                store(place + row * row_bytes + 4 * dim, load(sums + 4 * (row * head_dim + dim), width))
            store_f32(place + row * row_bytes + 4 * head_dim, load_f32(peaks + 4 * row))
            store_f32(place + row * row_bytes + 4 * head_dim + 4, load_f32(totals + 4 * row))
        counter = load_i64(args + at.COUNTERS) + 8 * (load_i64(item + at.ITEM_COUNTER) * num_kv_heads + kv_head)
        if fetch_add(counter, -1) != 1:
            return
        num_parts = load_i64(item + at.ITEM_NUM_PARTS)
        for row in range(rows):
            peak, total = merge_row(first_place + row * row_bytes, part_bytes, num_parts, head_dim, sums)
            write_row(args, item, kv_head, row, peak, total, sums)

    return finish_rows


def _make_merge_row(width: int) -> Step:
    """Return the step that adds up one row's parts; a part is (sums [head_dim], peak, total)."""
    exp2_of = make_exp2_of(width)

    @compiled
    def merge_row(start: int, stride: int, num_parts: int, head_dim: int, sums: int) -> Any:
        peak = _NO_SCORE
        for part in range(num_parts):
            peak = max(peak, load_f32(start + part * stride + 4 * head_dim))
        for dim in range(0, head_dim, width):
            store(sums + 4 * dim, splat(_ZERO, width))
        total = _ZERO
        if peak == _NO_SCORE:
            return peak, total
        for part in range(num_parts):
            place = start + part * stride
            weight = exp2_of(load_f32(place + 4 * head_dim) - peak)
            total += weight * load_f32(place + 4 * head_dim + 4)
            for dim in range(0, head_dim, width):
                merged = fma(splat(weight, width), load(place + 4 * dim, width), load(sums + 4 * dim, width))
                store(sums + 4 * dim, merged)
        return peak, total

    return merge_row


def _make_write_row(width: int) -> Step:
    """Return the step that normalises one row, the sink included, and writes its output and lse."""

    @compiled
    def write_row(args: int, item: int, kv_head: int, row: int, peak: float, total: float, sums: int) -> None:
        group, head_dim = load_i64(args + at.GROUP_SIZE), load_i64(args + at.HEAD_DIM)
        head = kv_head * group + row % group
        query = load_i64(item + at.ITEM_FIRST_QUERY) + row // group
        index = query * group * load_i64(args + at.NUM_KV_HEADS) + head
        sinks = load_i64(args + at.SINKS)
        top, denominator, weight = float(peak), float(total), 1.0
        if sinks != 0 and peak > _NO_SCORE:
            sink = float(load_f32(sinks + 4 * head))
            top = max(top, sink)
            weight = 2.0 ** (float(peak) - top)
            denominator = denominator * weight + 2.0 ** (sink - top)
        is_empty = peak == _NO_SCORE
        factor = splat(np.float32(0.0 if is_empty else weight / denominator), width)
        output = load_i64(args + at.OUTPUT) + 4 * index * head_dim
        for dim in range(0, head_dim, width):
            store(output + 4 * dim, mul(load(sums + 4 * dim, width), factor))
        lse = _NO_SCORE if is_empty else np.float32((top + math.log2(denominator)) * _LN2)
        store_f32(load_i64(args + at.LSE) + 4 * index, lse)

    return write_row
