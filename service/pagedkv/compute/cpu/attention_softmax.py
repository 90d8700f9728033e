"""The online softmax of the attention kernel: products of one chunk become weights, row states move along.

A row's state is five float32, each kind of all rows in one array: `peaks` (running maximum of the scores, in units of
log2), `totals` (sum of weights relative to it), `alphas` (what earlier sums are multiplied by after this chunk),
`bases` (what this chunk's scores are relative to) and `fresh` (this chunk's maxima, then its sums). Three passes, so
that no row waits for the horizontal sums of the row before it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.compute.cpu import attention_args as at
from pagedkv.compute.cpu.attention_steps import Step, compiled, make_count_seen
from pagedkv.compute.cpu.simd import (
    add,
    exp2,
    fma,
    hmax,
    hsum,
    keep_lanes,
    lane_numbers,
    load,
    load_f32,
    load_f64,
    load_i64,
    mul,
    select_less,
    splat,
    store,
    store_f32,
    sub,
    tanh,
    vmax,
)

STATE_ARRAYS: Final = 5

_NO_SCORE: Final = np.float32(-np.inf)
_ZERO: Final = np.float32(0.0)


def make_softmax_rows(width: int, is_quantized: bool) -> Step:
    """Return the step that turns a chunk's products into weights for all rows of an item."""
    mask_row, weigh_row = _make_mask_row(width, is_quantized), _make_weigh_row(width, is_quantized)
    count_seen = make_count_seen()

    @compiled
    def softmax_rows(
        args: int, item: int, kv_head: int, rows: int, tile: int, token: int, count: int,
        scores: int, stride: int, state: int, key_scales: int, value_scales: int,
    ) -> None:  # fmt: skip
        """Of each `tile` rows, what the last of them does not see is neither read nor written."""
        size = 4 * load_i64(args + at.MAX_ROWS)
        totals, alphas, bases, fresh = state + size, state + 2 * size, state + 3 * size, state + 4 * size
        group, window = load_i64(args + at.GROUP_SIZE), load_i64(args + at.WINDOW)
        slopes, soft_cap = load_i64(args + at.SLOPES), load_f64(args + at.SOFT_CAP)
        position, head = load_i64(item + at.ITEM_POSITION), 0
        for row in range(rows):
            slope = _ZERO if slopes == 0 else load_f32(slopes + 4 * (kv_head * group + head))
            first, stop = max(0, position - window + 1 - token), min(count, position + 1 - token)
            seen = count_seen(args, item, rows, row - row % tile + tile, token, count)
            largest = mask_row(scores + row * stride, seen, first, stop, token - position, soft_cap, slope, key_scales)
            store_f32(fresh + 4 * row, largest)
            head += 1
            if head == group:
                position, head = position + 1, 0
        for lane in range(0, 4 * rows, 4 * width):
            old = load(state + lane, width)
            peak = vmax(old, load(fresh + lane, width))
            base = select_less(splat(_NO_SCORE, width), peak, peak, splat(_ZERO, width))
            store(alphas + lane, exp2(sub(old, base)))
            store(state + lane, peak)
            store(bases + lane, base)
        for row in range(rows):
            seen = count_seen(args, item, rows, row - row % tile + tile, token, count)
            store_f32(fresh + 4 * row, weigh_row(scores + row * stride, seen, load_f32(bases + 4 * row), value_scales))
        for lane in range(0, 4 * rows, 4 * width):
            total = fma(load(totals + lane, width), load(alphas + lane, width), load(fresh + lane, width))
            store(totals + lane, total)

    return softmax_rows


def _make_mask_row(width: int, is_quantized: bool) -> Step:
    """Return the step that finishes one row's scores and returns the largest."""

    @compiled
    def mask_row(
        scores: int, count: int, first: int, stop: int, distance: int, soft_cap: float, slope: float, key_scales: int
    ) -> float:
        """Tokens outside [first, stop) are not seen; `distance` is the first token's position minus the query's."""
        largest = splat(_NO_SCORE, width)
        for token in range(0, count, width):
            s = load(scores + 4 * token, width)
            if is_quantized:
                s = mul(s, load(key_scales + 4 * token, width))
            if soft_cap != 0.0:
                s = mul(tanh(s), splat(np.float32(soft_cap), width))
            if slope != 0.0:
                offset = add(lane_numbers(width), splat(np.float32(distance + token), width))
                s = fma(splat(np.float32(slope), width), offset, s)
            is_cut = first > token or stop < token + width
            if is_cut:
                s = keep_lanes(s, first - token, stop - token, _NO_SCORE)
            if is_quantized or is_cut or soft_cap != 0.0 or slope != 0.0:
                store(scores + 4 * token, s)
            largest = vmax(largest, s)
        return hmax(largest)

    return mask_row


def _make_weigh_row(width: int, is_quantized: bool) -> Step:
    """Return the step that replaces one row's scores by their weights and returns the sum of these."""

    @compiled
    def weigh_row(scores: int, count: int, base: float, value_scales: int) -> float:
        offset, total = splat(np.float32(base), width), splat(_ZERO, width)
        for token in range(0, count, width):
            weight = exp2(sub(load(scores + 4 * token, width), offset))
            total = add(total, weight)
            if is_quantized:
                weight = mul(weight, load(value_scales + 4 * token, width))
            store(scores + 4 * token, weight)
        return hsum(total)

    return weigh_row
