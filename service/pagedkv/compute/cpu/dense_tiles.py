"""Tiles of dense arithmetic emitted as LLVM vector IR, shared by all dense kernels.

Every dot product is summed in one order, whatever the tile: each of `width` lanes adds its products in steps of the
contraction, then the lanes are added in halves. So a row's result does not depend on the rows beside it, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedkv.compute.cpu.simd import f32_vector, literal
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    KIND_F16,
    KIND_F32,
    emit_convert,
    emit_fma,
    emit_int_constant,
    emit_load_as,
    emit_pointer,
    emit_shuffle,
    emit_splat,
)

TILE_OUTPUTS: Final = 4


@intrinsic(prefer_literal=True)
def dense_tile(
    typingctx: Any,
    x: Any,
    x_bytes: Any,
    weights: Any,
    weight_bytes: Any,
    num_inputs: Any,
    out: Any,
    out_bytes: Any,
    num_rows: Any,
    width: Any,
) -> Any:
    """Store out[r, n] = sum_k x[r, k] * weights[n, k] for `num_rows` (literal) rows and four outputs.

    float32 throughout; `*_bytes` are the strides of rows; `num_inputs` is a multiple of `width` (literal).
    """
    rows, lanes = literal(num_rows), literal(width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_bytes, weights, weight_bytes, num_inputs, out, out_bytes = args[:7]
        zero = ir.Constant(ir.VectorType(F32, lanes), [0.0] * lanes)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(TILE_OUTPUTS)] for _ in range(rows)]
        x_rows = [builder.add(x, builder.mul(x_bytes, ir.Constant(I64, row))) for row in range(rows)]
        weight_rows = [
            builder.add(weights, builder.mul(weight_bytes, ir.Constant(I64, n))) for n in range(TILE_OUTPUTS)
        ]
        num_steps = builder.udiv(num_inputs, ir.Constant(I64, lanes))
        with cgutils.for_range(builder, num_steps, intp=I64) as loop:
            offset = builder.mul(loop.index, ir.Constant(I64, 4 * lanes))
            columns = [emit_load_as(builder, row, offset, lanes, KIND_F32) for row in weight_rows]
            for row in range(rows):
                values = emit_load_as(builder, x_rows[row], offset, lanes, KIND_F32)
                for n, column in enumerate(columns):
                    builder.store(emit_fma(builder, values, column, builder.load(sums[row][n])), sums[row][n])
        for row in range(rows):
            total = _emit_sums(builder, [builder.load(place) for place in sums[row]])
            target = emit_pointer(builder, builder.add(out, builder.mul(out_bytes, ir.Constant(I64, row))))
            builder.store(total, target, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7, num_rows, width), codegen


def _emit_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return a vector with the lane sums of each vector, added in halves as emit_tree adds them."""
    size = vectors[0].type.count
    pending = list(vectors)
    while size > 1:
        if len(pending) > 1:
            pending = [_emit_halves(builder, a, b, size) for a, b in zip(pending[::2], pending[1::2], strict=True)]
        else:
            pending = [_emit_halves(builder, pending[0], None, size)]
        size //= 2
    return pending[0]


def _emit_halves(builder: Any, a: Any, b: Any, size: int) -> Any:
    """Add the upper half to the lower half of every group of `size` lanes, the groups of a before those of b."""
    num_lanes = a.type.count * (1 if b is None else 2)
    starts = range(0, num_lanes, size)
    low = [start + lane for start in starts for lane in range(size // 2)]
    high = [lane + size // 2 for lane in low]
    second = a if b is None else b
    return builder.fadd(emit_shuffle(builder, a, second, low), emit_shuffle(builder, a, second, high))


@intrinsic(prefer_literal=True)
def splat_f16(typingctx: Any, address: Any, width: Any) -> Any:
    """Return the float16 at the address in every lane, as float32."""
    lanes = literal(width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.load(emit_pointer(builder, args[0]), typ=I16, align=1)
        return emit_convert(builder, emit_splat(builder, bits, lanes), KIND_F16)

    return f32_vector(lanes)(types.int64, width), codegen


@intrinsic(prefer_literal=True)
def load_bits(typingctx: Any, address: Any, width: Any, shift: Any, mask: Any) -> Any:
    """Return (byte >> shift) & mask of `width` bytes as float32; shift and mask are literals."""
    lanes, distance, kept = literal(width), literal(shift), literal(mask)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = builder.load(emit_pointer(builder, args[0]), typ=ir.VectorType(I8, lanes), align=1)
        wide = builder.zext(raw, ir.VectorType(I32, lanes))
        picked = builder.and_(builder.lshr(wide, emit_int_constant(distance, lanes)), emit_int_constant(kept, lanes))
        return builder.sitofp(picked, ir.VectorType(F32, lanes))

    return f32_vector(lanes)(types.int64, width, shift, mask), codegen


@intrinsic
def load_u8(typingctx: Any, address: Any) -> Any:
    """Return the byte at the address as int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(emit_pointer(builder, args[0]), typ=I8, align=1), I64)

    return types.int64(types.int64), codegen
