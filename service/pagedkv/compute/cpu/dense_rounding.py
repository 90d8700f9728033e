"""Activations rounded to integers (AVX-512 VNNI), in blocks of 32 neighbours with a scale of their own.

A block is its integers in the order in which dot products take them, the scale, and the sum of the block, the last two
float32. An integer is a multiple of the scale, which is the largest magnitude of the block over the largest integer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedkv.compute.cpu.dense_tiles import constant
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    KIND_F32,
    emit_call,
    emit_constant,
    emit_load_as,
    emit_max,
    emit_pointer,
    emit_shuffle,
    emit_splat,
    emit_tree,
)

LANES: Final = 16  # of a vector of dwords
VECTOR_BYTES: Final = 64
BLOCK_INPUTS: Final = 32
_SMALLEST_PEAK: Final = 1e-30  # a block below it is all zeros
_ROUNDING: Final = 12582912.0  # 1.5 * 2**23: what is added to it is rounded to an integer in its low bits
_PAIR_ORDER: Final = tuple(4 * (pair // 2) + pair % 2 + 2 * half for pair in range(16) for half in (0, 1))


@dataclass(frozen=True, slots=True)
class Rounding:
    """Integers that activations become, and the dot product of a lane's integers with as many of the weights."""

    name: str
    element: Any
    largest: int
    order: tuple[int, ...]  # of the inputs in a block
    emit_dot: Callable[[Any, Any, Any, Any], Any]  # builder, total, weights, activations -> total

    @property
    def num_steps(self) -> int:
        """Dot products of a block, each over one dword of activations."""
        return int(BLOCK_INPUTS * self.element.width // 32)

    @property
    def scale_offset(self) -> int:
        """Where a block's scale lies; its sum is next."""
        return 4 * self.num_steps

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.scale_offset + 8

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row."""
        return num_inputs // BLOCK_INPUTS * self.block_bytes


def _emit_pair_dot(builder: Any, total: Any, weights: Any, x: Any) -> Any:
    return emit_call(builder, "llvm.x86.avx512.vpdpwssd.512", total.type, [total, weights, x])


def _emit_byte_dot(builder: Any, total: Any, weights: Any, x: Any) -> Any:
    """The weights are unsigned."""
    parts = [builder.bitcast(operand, ir.VectorType(I8, VECTOR_BYTES)) for operand in (weights, x)]
    return emit_call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, [total, *parts])


ROUNDINGS: Final = {
    rounding.name: rounding
    for rounding in (
        Rounding("int16", I16, 32767, _PAIR_ORDER, _emit_pair_dot),
        Rounding("int8", I8, 127, tuple(range(BLOCK_INPUTS)), _emit_byte_dot),
    )
}


def make_quantize_row(rounding: Rounding) -> Callable[..., None]:
    """Return quantize_row(source, target, num_blocks): float32 inputs as blocks.

    A block that holds no finite largest value gets the scale NaN, so that what is computed from it is NaN too.
    """

    @intrinsic
    def quantize_row(typingctx: Any, source: Any, target: Any, num_blocks: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target, num_blocks = args
            with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
                values = builder.add(source, builder.mul(blocks.index, constant(4 * BLOCK_INPUTS)))
                place = builder.add(target, builder.mul(blocks.index, constant(rounding.block_bytes)))
                _emit_quantize(builder, rounding, values, place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return quantize_row


def _emit_quantize(builder: Any, rounding: Rounding, source: Any, target: Any) -> None:
    low, high = (emit_load_as(builder, source, offset, LANES, KIND_F32) for offset in (0, VECTOR_BYTES))
    magnitudes = [emit_call(builder, "llvm.fabs.v16f32", value.type, [value]) for value in (low, high)]
    peak = emit_tree(builder, emit_max(builder, *magnitudes), emit_max)
    total = emit_tree(builder, builder.fadd(low, high), lambda inner, a, b: inner.fadd(a, b))
    poison = builder.fmul(total, ir.Constant(F32, 0.0))  # NaN where a value is not finite
    is_tiny = builder.fcmp_ordered("<", peak, ir.Constant(F32, _SMALLEST_PEAK))
    largest = ir.Constant(F32, float(rounding.largest))
    factor = builder.select(is_tiny, ir.Constant(F32, 0.0), builder.fdiv(largest, peak))
    scale = builder.fadd(builder.fdiv(peak, largest), poison)
    factors, shift = emit_splat(builder, factor, LANES), emit_constant(_ROUNDING, LANES)
    shifted = [builder.fadd(builder.fmul(value, factors), shift) for value in (low, high)]
    whole = [builder.fsub(value, shift) for value in shifted]
    number = emit_tree(builder, builder.fadd(*whole), lambda inner, a, b: inner.fadd(a, b))  # exact: below 2**24
    bits = [builder.bitcast(value, ir.VectorType(I32, LANES)) for value in shifted]
    parts = [builder.trunc(value, ir.VectorType(rounding.element, LANES)) for value in bits]
    ordered = emit_shuffle(builder, parts[0], parts[1], rounding.order)
    builder.store(ordered, emit_pointer(builder, target), align=4)
    builder.store(scale, emit_pointer(builder, target, rounding.scale_offset), align=4)
    builder.store(builder.fmul(number, scale), emit_pointer(builder, target, rounding.scale_offset + 4), align=4)
