"""The kernel that scatters new keys and values into the pool, converting or quantising them.

A work item is a run of tokens; a thread writes all KV heads of K and V of its tokens. A quantised row is stored
relative to its own largest magnitude, whose quotient becomes the row's scale. One that is not finite throughout gets a
scale that is not a number: it reads as that, all of it, as its own elements would from wider storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.simd import (
    KIND_BF16,
    KIND_BYTES,
    KIND_E4M3,
    KIND_F16,
    KIND_F32,
    KIND_I8,
    fma,
    hmax,
    hsum,
    load_as,
    load_i64,
    mul,
    splat,
    store_as,
    store_f32,
    vabs,
    vmax,
)
from pagedkv.compute.cpu.threads import claim

# Argument words; 0 and 1 are the next item and the number of items (see threads.claim).
POOL: Final = 16  # address of (block 0, this layer)
KEYS: Final = 24
VALUES: Final = 32
SOURCE_KIND: Final = 40
SLOTS: Final = 48  # int64 [num_tokens]
NUM_TOKENS: Final = 56
NUM_KV_HEADS: Final = 64
HEAD_DIM: Final = 72
BLOCK_SIZE: Final = 80
BLOCK_BYTES: Final = 88
VALUE_BYTES: Final = 96
HEAD_BYTES: Final = 104
SCALE_BYTES: Final = 112
NUM_WORDS: Final = 15

ITEM_TOKENS: Final = 8

_LARGEST: Final = {KIND_I8: 127.0, KIND_E4M3: 448.0}
_SMALLEST_PEAK: Final = np.float32(1e-30)  # a row below it is stored as zeros
_ZERO: Final = np.float32(0.0)
_NAN: Final = np.float32(np.nan)


def make_write_kernel(width: int, kind: int) -> Callable[[int, int], None]:
    """Return the kernel for vectors of `width` float32 into a pool whose elements are of `kind`."""
    write_token = _make_write_token(width, kind)

    def write_items(args: int, thread: int) -> None:
        num_tokens = load_i64(args + NUM_TOKENS)
        item = claim(args)
        while item >= 0:
            for token in range(item * ITEM_TOKENS, min(num_tokens, (item + 1) * ITEM_TOKENS)):
                slot = load_i64(load_i64(args + SLOTS) + 8 * token)
                if slot >= 0:
                    write_token(args, token, slot)
            item = claim(args)

    return write_items


def _make_write_token(width: int, kind: int) -> Step:
    write_row = _make_write_row(width, kind)
    item_bytes = KIND_BYTES[kind]

    @compiled
    def write_token(args: int, token: int, slot: int) -> None:
        num_heads, head_dim = load_i64(args + NUM_KV_HEADS), load_i64(args + HEAD_DIM)
        block_size, source_kind = load_i64(args + BLOCK_SIZE), load_i64(args + SOURCE_KIND)
        source_bytes = 4 if source_kind == KIND_F32 else 2
        place = load_i64(args + POOL) + (slot // block_size) * load_i64(args + BLOCK_BYTES)
        offset = slot % block_size
        scales = place + load_i64(args + SCALE_BYTES) + 4 * offset
        for head in range(num_heads):
            element = (token * num_heads + head) * head_dim
            target = place + head * load_i64(args + HEAD_BYTES) + offset * head_dim * item_bytes
            scale, far = scales + 4 * head * block_size, load_i64(args + VALUE_BYTES)
            far_scale = scale + 4 * num_heads * block_size
            write_row(load_i64(args + KEYS) + element * source_bytes, source_kind, target, scale, head_dim)
            write_row(load_i64(args + VALUES) + element * source_bytes, source_kind, target + far, far_scale, head_dim)

    return write_token


def _make_write_row(width: int, kind: int) -> Step:
    """Return the step that stores one row of head_dim elements; the source's kind is known at run time only."""
    by_kind = [_make_convert_row(width, source, kind) for source in (KIND_F32, KIND_F16, KIND_BF16)]
    from_f32, from_f16, from_bf16 = by_kind

    @compiled
    def write_row(source: int, source_kind: int, target: int, scale: int, head_dim: int) -> None:
        if source_kind == KIND_F32:
            from_f32(source, target, scale, head_dim)
        elif source_kind == KIND_F16:
            from_f16(source, target, scale, head_dim)
        else:
            from_bf16(source, target, scale, head_dim)

    return write_row


def _make_convert_row(width: int, source_kind: int, kind: int) -> Step:
    source_bytes, item_bytes = KIND_BYTES[source_kind], KIND_BYTES[kind]
    is_quantized = kind in _LARGEST
    largest = np.float32(_LARGEST.get(kind, 1.0))

    @compiled
    def convert_row(source: int, target: int, scale: int, head_dim: int) -> None:
        factor, is_stored = np.float32(1.0), True
        if is_quantized:
            peaks, nothing = splat(_ZERO, width), splat(_ZERO, width)
            for dim in range(0, head_dim, width):
                value = load_as(source + dim * source_bytes, width, source_kind)
                peaks, nothing = vmax(peaks, vabs(value)), fma(value, splat(_ZERO, width), nothing)
            peak, is_finite = hmax(peaks), hsum(nothing) == _ZERO  # else it is not a number
            is_stored = is_finite and peak >= _SMALLEST_PEAK
            factor = largest / peak if is_stored else _ZERO
            store_f32(scale, peak / largest if is_stored else _ZERO if is_finite else _NAN)
        for dim in range(0, head_dim, width):
            value = load_as(source + dim * source_bytes, width, source_kind)
            if is_quantized:
                value = mul(value, splat(factor, width)) if is_stored else splat(_ZERO, width)
            store_as(target + dim * item_bytes, value, kind)

    return convert_row
