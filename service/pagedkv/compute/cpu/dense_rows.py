"""The kernels of a decoder's row operations: norms, activations, rotations. An item is a row, or a token.

Addresses and strides are int64 bytes; all activations are float32, but for the results of `make_rounded_kernel`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.dense_kernels import OUT, X_BYTES, KernelBody, X
from pagedkv.compute.cpu.dense_rounding import BLOCK_INPUTS, Rounding, make_quantize_row
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

# Argument words of the row kernels; 0 and 1 are the next item and the number of items (see threads.claim).
SECOND: Final = 24  # the norm's weight, or `up`
WIDTH: Final = 40  # elements a row, a multiple of the vector width
EPSILON: Final = 48  # float64
ADDED: Final = 56  # of a sum and its norm: what x is increased by
ROW_SCRATCH: Final = 64  # of rounded results: a row of float32 a thread


def make_row_kernel(row: Step) -> KernelBody:
    """Return the kernel that writes row(args, item, out) to each row of OUT."""

    def write_rows(args: int, thread: int) -> None:
        row_bytes = 4 * load_i64(args + WIDTH)
        item = claim(args)
        while item >= 0:
            row(args, item, load_i64(args + OUT) + row_bytes * item)
            item = claim(args)

    return write_rows


def make_rounded_kernel(row: Step, rounding: Rounding) -> KernelBody:
    """Return the kernel that writes row(args, item, out) to each row of OUT, rounded."""
    quantize_row, block_bytes = make_quantize_row(rounding), rounding.block_bytes

    def write_rounded_rows(args: int, thread: int) -> None:
        size = load_i64(args + WIDTH)
        num_blocks = size // BLOCK_INPUTS
        values = load_i64(args + ROW_SCRATCH) + 4 * size * thread
        item = claim(args)
        while item >= 0:
            row(args, item, values)
            quantize_row(values, load_i64(args + OUT) + block_bytes * num_blocks * item, num_blocks)
            item = claim(args)

    return write_rounded_rows


def make_rms_norm_row(width: int, *, is_sum: bool = False) -> Step:
    """Return the step out = x / sqrt(mean(x**2) + epsilon) * weight; with `is_sum` after x += added."""

    @compiled
    def rms_norm(args: int, item: int, out: int) -> None:
        size, weight = load_i64(args + WIDTH), load_i64(args + SECOND)
        x, added = load_i64(args + X) + 4 * size * item, load_i64(args + ADDED) + 4 * size * item
        total = splat(np.float32(0.0), width)
        for lane in range(0, size, width):
            value = load(x + 4 * lane, width)
            if is_sum:
                value = add(value, load(added + 4 * lane, width))
                store(x + 4 * lane, value)
            total = fma(value, value, total)
        mean = np.float64(hsum(total)) / np.float64(size)
        scale = splat(np.float32(1.0 / np.sqrt(mean + load_f64(args + EPSILON))), width)
        for lane in range(0, size, width):
            normed = mul(load(x + 4 * lane, width), scale)
            store(out + 4 * lane, mul(normed, load(weight + 4 * lane, width)))

    return rms_norm


def make_silu_mul_row(width: int) -> Step:
    """Return the step out = x / (1 + exp(-x)) * up."""

    @compiled
    def silu_mul(args: int, item: int, out: int) -> None:
        size = load_i64(args + WIDTH)
        x, up = load_i64(args + X) + 4 * size * item, load_i64(args + SECOND) + 4 * size * item
        one, minus_log2_e = splat(np.float32(1.0), width), splat(np.float32(-1.4426950408889634), width)
        for lane in range(0, size, width):
            value = load(x + 4 * lane, width)
            gated = div(value, add(one, exp2(mul(value, minus_log2_e))))
            store(out + 4 * lane, mul(gated, load(up + 4 * lane, width)))

    return silu_mul


def make_take_rows_row(width: int) -> Step:
    """Return the step out = x[second[item]]; `second` is int32."""

    @compiled
    def take_row(args: int, item: int, out: int) -> None:
        size, row = load_i64(args + WIDTH), load_i32(load_i64(args + SECOND) + 4 * item)
        x = load_i64(args + X) + 4 * size * row
        for lane in range(0, size, width):
            store(out + 4 * lane, load(x + 4 * lane, width))

    return take_row


def make_add_bias_kernel(width: int) -> KernelBody:
    """Return the kernel x[row] += bias over rows that lie X_BYTES apart."""

    def add_bias(args: int, thread: int) -> None:
        size, bias = load_i64(args + WIDTH), load_i64(args + SECOND)
        item = claim(args)
        while item >= 0:
            x = load_i64(args + X) + load_i64(args + X_BYTES) * item
            for lane in range(0, size, width):
                store(x + 4 * lane, add(load(x + 4 * lane, width), load(bias + 4 * lane, width)))
            item = claim(args)

    return add_bias


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
