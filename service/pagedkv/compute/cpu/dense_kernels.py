"""The kernels of a decoder's dense arithmetic. Addresses and strides are int64 bytes; all activations are float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from pagedkv.compute.cpu.attention_steps import compiled
from pagedkv.compute.cpu.dense_tiles import TILE_OUTPUTS, dense_tile
from pagedkv.compute.cpu.quant import StorageKind, make_expand_row
from pagedkv.compute.cpu.simd import (
    add,
    div,
    exp2,
    fma,
    hsum,
    load,
    load_f32,
    load_f64,
    load_i32,
    load_i64,
    mul,
    splat,
    store,
    store_f32,
)
from pagedkv.compute.cpu.threads import claim

KernelBody = Callable[[Any, Any], Any]

# Argument words of `linear` and `embed`; 0 and 1 are the next item and the number of items (see threads.claim).
X: Final = 16  # float32 [num_rows, num_inputs]; for embed: int32 [num_rows] token ids
WEIGHTS: Final = 24
OUT: Final = 32  # float32 [num_rows, num_outputs]
NUM_ROWS: Final = 40
NUM_INPUTS: Final = 48
NUM_OUTPUTS: Final = 56
ROW_BYTES: Final = 64  # of a stored weight row
SCRATCH: Final = 72
SCRATCH_BYTES: Final = 80  # a thread
ITEM_OUTPUTS: Final = 88
NUM_WORDS: Final = 12

PANEL_OUTPUTS: Final = 16  # weight rows expanded at once: they stay in the first-level cache's neighbour
_TILE_ROWS: Final = 4


def make_linear_kernel(width: int, kind: StorageKind) -> KernelBody:
    """Return the kernel out = x @ weights.T.

    An item is a run of outputs. A thread expands a panel of weight rows to float32 once and applies it to all rows of
    x, four at a time; with one row this reads each stored weight once and nothing twice.
    """
    expand_row = make_expand_row(kind, width)

    @compiled
    def apply_panel(args: int, panel: int, first: int) -> None:
        num_rows, inputs = load_i64(args + NUM_ROWS), load_i64(args + NUM_INPUTS)
        x, x_bytes = load_i64(args + X), 4 * load_i64(args + NUM_INPUTS)
        out_bytes = 4 * load_i64(args + NUM_OUTPUTS)
        out = load_i64(args + OUT) + 4 * first
        row = 0
        while row + _TILE_ROWS <= num_rows:
            for n in range(0, PANEL_OUTPUTS, TILE_OUTPUTS):
                place, target = panel + n * x_bytes, out + row * out_bytes + 4 * n
                dense_tile(x + row * x_bytes, x_bytes, place, x_bytes, inputs, target, out_bytes, _TILE_ROWS, width)
            row += _TILE_ROWS
        while row < num_rows:
            for n in range(0, PANEL_OUTPUTS, TILE_OUTPUTS):
                place, target = panel + n * x_bytes, out + row * out_bytes + 4 * n
                dense_tile(x + row * x_bytes, x_bytes, place, x_bytes, inputs, target, out_bytes, 1, width)
            row += 1

    def linear(args: int, thread: int) -> None:
        outputs, size = load_i64(args + NUM_OUTPUTS), load_i64(args + ITEM_OUTPUTS)
        inputs, row_bytes = load_i64(args + NUM_INPUTS), load_i64(args + ROW_BYTES)
        panel = load_i64(args + SCRATCH) + thread * load_i64(args + SCRATCH_BYTES)
        item = claim(args)
        while item >= 0:
            for first in range(item * size, min(outputs, (item + 1) * size), PANEL_OUTPUTS):
                source = load_i64(args + WEIGHTS) + first * row_bytes
                for n in range(PANEL_OUTPUTS):
                    expand_row(source + n * row_bytes, panel + 4 * n * inputs, inputs)
                apply_panel(args, panel, first)
            item = claim(args)

    return linear


def make_embed_kernel(width: int, kind: StorageKind) -> KernelBody:
    """Return the kernel out[row] = weights[token_ids[row]]; an item is a row."""
    expand_row = make_expand_row(kind, width)

    def embed(args: int, thread: int) -> None:
        inputs = load_i64(args + NUM_INPUTS)
        item = claim(args)
        while item >= 0:
            token_id = load_i32(load_i64(args + X) + 4 * item)
            source = load_i64(args + WEIGHTS) + token_id * load_i64(args + ROW_BYTES)
            expand_row(source, load_i64(args + OUT) + 4 * item * inputs, inputs)
            item = claim(args)

    return embed


# Argument words of the row kernels below; an item is a row.
SECOND: Final = 24  # the norm's weight, or `up`
WIDTH: Final = 40  # elements a row, a multiple of the vector width
EPSILON: Final = 48  # float64


def make_rms_norm_kernel(width: int) -> KernelBody:
    """Return the kernel out = x / sqrt(mean(x**2) + epsilon) * weight over rows."""

    def rms_norm(args: int, thread: int) -> None:
        size, weight = load_i64(args + WIDTH), load_i64(args + SECOND)
        item = claim(args)
        while item >= 0:
            x, out = load_i64(args + X) + 4 * size * item, load_i64(args + OUT) + 4 * size * item
            total = splat(np.float32(0.0), width)
            for lane in range(0, size, width):
                value = load(x + 4 * lane, width)
                total = fma(value, value, total)
            mean = np.float64(hsum(total)) / np.float64(size)
            scale = splat(np.float32(1.0 / np.sqrt(mean + load_f64(args + EPSILON))), width)
            for lane in range(0, size, width):
                normed = mul(load(x + 4 * lane, width), scale)
                store(out + 4 * lane, mul(normed, load(weight + 4 * lane, width)))
            item = claim(args)

    return rms_norm


def make_silu_mul_kernel(width: int) -> KernelBody:
    """Return the kernel out = x / (1 + exp(-x)) * up over rows."""

    def silu_mul(args: int, thread: int) -> None:
        size = load_i64(args + WIDTH)
        one, minus_log2_e = splat(np.float32(1.0), width), splat(np.float32(-1.4426950408889634), width)
        item = claim(args)
        while item >= 0:
            x, out = load_i64(args + X) + 4 * size * item, load_i64(args + OUT) + 4 * size * item
            up = load_i64(args + SECOND) + 4 * size * item
            for lane in range(0, size, width):
                value = load(x + 4 * lane, width)
                gated = div(value, add(one, exp2(mul(value, minus_log2_e))))
                store(out + 4 * lane, mul(gated, load(up + 4 * lane, width)))
            item = claim(args)

    return silu_mul


# Argument words of `rope`; an item is a token.
COSINES: Final = 24  # float32 [num_tokens, num_pairs]
SINES: Final = 32
NUM_HEADS: Final = 40
HEAD_DIM: Final = 48
NUM_PAIRS: Final = 56
NEXT_PAIR: Final = 64  # bytes from one pair's first element to the next one's
PARTNER: Final = 72  # bytes from a pair's first element to its second


def rope_kernel(args: int, thread: int) -> None:
    """Rotate each pair of x [num_tokens, num_heads, head_dim] in place by its angle."""
    num_heads, head_bytes, num_pairs = (
        load_i64(args + NUM_HEADS),
        4 * load_i64(args + HEAD_DIM),
        load_i64(args + NUM_PAIRS),
    )
    next_pair, partner = load_i64(args + NEXT_PAIR), load_i64(args + PARTNER)
    item = claim(args)
    while item >= 0:
        cosines = load_i64(args + COSINES) + 4 * num_pairs * item
        sines = load_i64(args + SINES) + 4 * num_pairs * item
        for head in range(num_heads):
            place = load_i64(args + X) + (item * num_heads + head) * head_bytes
            for pair in range(num_pairs):
                first = place + pair * next_pair
                a, b = load_f32(first), load_f32(first + partner)
                cosine, sine = load_f32(cosines + 4 * pair), load_f32(sines + 4 * pair)
                store_f32(first, a * cosine - b * sine)
                store_f32(first + partner, a * sine + b * cosine)
        item = claim(args)
