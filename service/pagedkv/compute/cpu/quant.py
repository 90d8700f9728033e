"""Rows of stored weights to float32: plain types, and the block formats of GGML files.

Each block format packs 32 or 256 neighbouring weights with their scales; see ggml-quants.h of llama.cpp for the
layouts. Values equal `scale * q (+ minimum)` in float32 arithmetic, up to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit

from pagedkv.compute.backend import WeightData
from pagedkv.compute.cpu.attention_steps import Step, compiled
from pagedkv.compute.cpu.dense_tiles import load_bits, load_u8, splat_f16
from pagedkv.compute.cpu.simd import KIND_BF16, KIND_F16, KIND_F32, KIND_I8, fma, load_as, mul, splat, store, sub
from pagedkv.errors import InvalidModelFile, UnsupportedModel

inlined = njit(error_model="numpy", nogil=True, inline="always")


@dataclass(frozen=True, slots=True)
class StorageKind:
    """How a kind stores `block_weights` neighbouring weights in `block_bytes` bytes."""

    name: str
    block_weights: int
    block_bytes: int
    make_expand: Callable[[int], Step]  # for a vector width: expand(source, target), one block to float32

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row."""
        return num_inputs // self.block_weights * self.block_bytes


def check_weight(weight: WeightData) -> StorageKind:
    """Return the weight's kind. Raises UnsupportedModel for an unknown one, InvalidModelFile for a wrong size."""
    kind = KINDS.get(weight.kind)
    if kind is None:
        raise UnsupportedModel(
            f"tensor type {weight.kind} is not supported; supported: {', '.join(KINDS)}", tensor_type=weight.kind
        )
    num_rows = int(np.prod(weight.shape[:-1], dtype=np.int64))
    num_bytes = num_rows * kind.row_bytes(weight.shape[-1])
    if weight.shape[-1] % kind.block_weights or weight.data.nbytes != num_bytes:
        raise InvalidModelFile(
            f"a {weight.kind} tensor of shape {weight.shape} has {weight.data.nbytes} bytes, {num_bytes} are needed",
            num_bytes=weight.data.nbytes,
            needed=num_bytes,
        )
    return kind


def _make_expand_plain(stored: int, item_bytes: int) -> Callable[[int], Step]:
    def make(width: int) -> Step:
        @compiled
        def expand(source: int, target: int) -> None:
            for lane in range(0, _PLAIN_BLOCK, width):
                store(target + 4 * lane, load_as(source + item_bytes * lane, width, stored))

        return expand

    return make


def _make_expand_q8_0(width: int) -> Step:
    @compiled
    def expand(source: int, target: int) -> None:
        scale = splat_f16(source, width)
        for lane in range(0, 32, width):
            store(target + 4 * lane, mul(scale, load_as(source + 2 + lane, width, KIND_I8)))

    return expand


def _make_expand_q4_0(width: int) -> Step:
    @compiled
    def expand(source: int, target: int) -> None:
        scale = splat_f16(source, width)
        middle = splat(np.float32(8.0), width)
        for lane in range(0, 16, width):
            low, high = load_bits(source + 2 + lane, width, 0, 15), load_bits(source + 2 + lane, width, 4, 15)
            store(target + 4 * lane, mul(scale, sub(low, middle)))
            store(target + 64 + 4 * lane, mul(scale, sub(high, middle)))

    return expand


def _make_expand_q4_1(width: int) -> Step:
    @compiled
    def expand(source: int, target: int) -> None:
        scale, minimum = splat_f16(source, width), splat_f16(source + 2, width)
        for lane in range(0, 16, width):
            low, high = load_bits(source + 4 + lane, width, 0, 15), load_bits(source + 4 + lane, width, 4, 15)
            store(target + 4 * lane, fma(scale, low, minimum))
            store(target + 64 + 4 * lane, fma(scale, high, minimum))

    return expand


@inlined
def _k_scale(scales: int, group: int) -> int:
    """Return the 6-bit scale of a group of 32 from Q4_K's 12 packed bytes."""
    if group < 4:
        return load_u8(scales + group) & 63
    return (load_u8(scales + group + 4) & 15) | ((load_u8(scales + group - 4) >> 6) << 4)


@inlined
def _k_minimum(scales: int, group: int) -> int:
    """Return the 6-bit minimum of a group of 32."""
    if group < 4:
        return load_u8(scales + group + 4) & 63
    return (load_u8(scales + group + 4) >> 4) | ((load_u8(scales + group) >> 6) << 4)


def _make_expand_q4_k(width: int) -> Step:
    @compiled
    def expand(source: int, target: int) -> None:
        scale, minimum = splat_f16(source, width), splat_f16(source + 2, width)
        for pair in range(4):
            low = mul(scale, splat(np.float32(_k_scale(source + 4, 2 * pair)), width))
            high = mul(scale, splat(np.float32(_k_scale(source + 4, 2 * pair + 1)), width))
            low_base = mul(minimum, splat(np.float32(-_k_minimum(source + 4, 2 * pair)), width))
            high_base = mul(minimum, splat(np.float32(-_k_minimum(source + 4, 2 * pair + 1)), width))
            packed, out = source + 16 + 32 * pair, target + 256 * pair
            for lane in range(0, 32, width):
                store(out + 4 * lane, fma(low, load_bits(packed + lane, width, 0, 15), low_base))
                store(out + 128 + 4 * lane, fma(high, load_bits(packed + lane, width, 4, 15), high_base))

    return expand


@compiled
def _signed(byte: int) -> Any:
    return np.float32(byte - 256 if byte > 127 else byte)


def _make_expand_q6_k(width: int) -> Step:
    @compiled
    def expand(source: int, target: int) -> None:
        scale = splat_f16(source + 208, width)
        middle, step = splat(np.float32(32.0), width), splat(np.float32(16.0), width)
        for half in range(2):
            low, high, scales = source + 64 * half, source + 128 + 32 * half, source + 192 + 8 * half
            out = target + 512 * half
            for lane in range(0, 32, width):
                group = scales + lane // 16
                a = fma(step, load_bits(high + lane, width, 0, 3), load_bits(low + lane, width, 0, 15))
                b = fma(step, load_bits(high + lane, width, 2, 3), load_bits(low + 32 + lane, width, 0, 15))
                c = fma(step, load_bits(high + lane, width, 4, 3), load_bits(low + lane, width, 4, 15))
                d = fma(step, load_bits(high + lane, width, 6, 3), load_bits(low + 32 + lane, width, 4, 15))
                sa, sb = splat(_signed(load_u8(group)), width), splat(_signed(load_u8(group + 2)), width)
                sc, sd = splat(_signed(load_u8(group + 4)), width), splat(_signed(load_u8(group + 6)), width)
                store(out + 4 * lane, mul(mul(scale, sa), sub(a, middle)))
                store(out + 128 + 4 * lane, mul(mul(scale, sb), sub(b, middle)))
                store(out + 256 + 4 * lane, mul(mul(scale, sc), sub(c, middle)))
                store(out + 384 + 4 * lane, mul(mul(scale, sd), sub(d, middle)))

    return expand


_PLAIN_BLOCK: Final = 16  # rows of plain types are padded to it

KINDS: Final = {
    kind.name: kind
    for kind in (
        StorageKind("F32", 1, 4, _make_expand_plain(KIND_F32, 4)),
        StorageKind("F16", 1, 2, _make_expand_plain(KIND_F16, 2)),
        StorageKind("BF16", 1, 2, _make_expand_plain(KIND_BF16, 2)),
        StorageKind("Q4_0", 32, 18, _make_expand_q4_0),
        StorageKind("Q4_1", 32, 20, _make_expand_q4_1),
        StorageKind("Q8_0", 32, 34, _make_expand_q8_0),
        StorageKind("Q4_K", 256, 144, _make_expand_q4_k),
        StorageKind("Q6_K", 256, 210, _make_expand_q6_k),
    )
}


def make_expand_row(kind: StorageKind, width: int) -> Step:
    """Return expand_row(source, target, num_inputs): one stored row to float32."""
    expand = kind.make_expand(width)
    plain = kind.block_weights == 1
    step_weights = _PLAIN_BLOCK if plain else kind.block_weights
    step_bytes = _PLAIN_BLOCK * kind.block_bytes if plain else kind.block_bytes

    @compiled
    def expand_row(source: int, target: int, num_inputs: int) -> None:
        for block in range(num_inputs // step_weights):
            expand(source + block * step_bytes, target + 4 * block * step_weights)

    return expand_row


PLAIN_ALIGNMENT: Final = _PLAIN_BLOCK
