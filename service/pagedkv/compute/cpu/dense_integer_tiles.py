"""Tiles of integer dot products (AVX-512 VNNI): rounded activations, weights as the integers that blocks store.

A block is 32 neighbouring inputs. Its products are summed exactly in int32, then scaled to float32 and added to the
sum of the blocks before. So a row's result does not depend on the rows beside it, bit by bit.

An instruction multiplies the neighbours in each 32-bit lane: two int16, or four bytes. Two are inputs k and k + 2 of a
quad: that is how the bytes of a quad fall into halves of a lane by masks alone. Lanes are outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedkv.compute.cpu.dense_rounding import LANES, VECTOR_BYTES, Rounding
from pagedkv.compute.cpu.dense_tiles import constant, row_addresses
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I16,
    I32,
    I64,
    KIND_F16,
    emit_constant,
    emit_convert,
    emit_fma,
    emit_int_constant,
    emit_pointer,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
)

Tile = Callable[..., None]

GROUP_OUTPUTS: Final = LANES
_CHAINS: Final = 8  # sums in flight that hide the latency of an instruction


class IntegerKind(NamedTuple):
    """Where a block of a kind keeps its codes, and how they become what the dot products of a rounding take."""

    block_bytes: int
    codes: int  # offset of the first code byte
    steps: Callable[[Any, list[Any]], list[Any]]  # builder, quads [vector of 16 dwords] -> operands
    num_quads: int  # dwords of codes
    stores_minimum: bool
    bias: int = 0  # by how much operands are larger than the codes; instead of a stored minimum

    @property
    def has_minimum(self) -> bool:
        """Whether a multiple of the block's sum is added to the scaled products."""
        return self.stores_minimum or self.bias != 0


def panel_block_bytes(rounding: Rounding) -> int:
    """Bytes of a block of 16 outputs: operands, scales, minimums."""
    return (rounding.num_steps + 2) * VECTOR_BYTES


def make_expand_group(kind: IntegerKind, rounding: Rounding) -> Tile:
    """Return expand_group(source, row_bytes, target, num_blocks): 16 stored rows as a panel of operands and scales."""

    @intrinsic
    def expand_group(typingctx: Any, source: Any, row_bytes: Any, target: Any, num_blocks: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, row_bytes, target, num_blocks = args
            starts = [builder.add(source, builder.mul(row_bytes, constant(row))) for row in range(GROUP_OUTPUTS)]
            ahead = builder.mul(row_bytes, constant(2 * GROUP_OUTPUTS))
            with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
                offset = builder.mul(blocks.index, constant(kind.block_bytes))
                rows = [builder.add(start, offset) for start in starts]
                place = builder.add(target, builder.mul(blocks.index, constant(panel_block_bytes(rounding))))
                _emit_panel_block(builder, kind, rows, place)
                for row in rows:
                    emit_prefetch(builder, emit_pointer(builder, row, ahead), 2)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return expand_group


def make_integer_tile(num_rows: int, num_groups: int, kind: IntegerKind, rounding: Rounding) -> Tile:
    """Return tile(x, x_bytes, last_row, panel, group_bytes, num_blocks, out, out_bytes).

    Stores out[r, n] = sum_k x[r, k] * weights[n, k] for `num_rows` rounded rows and `num_groups` groups of outputs
    of a panel; rows beyond `last_row`, counted from the tile's first, repeat the last one.
    """

    @intrinsic
    def tile(
        typingctx: Any,
        x: Any,
        x_bytes: Any,
        last_row: Any,
        panel: Any,
        group_bytes: Any,
        num_blocks: Any,
        out: Any,
        out_bytes: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_bytes, last_row, panel, group_bytes, num_blocks, out, out_bytes = args
            rows = row_addresses(builder, x, x_bytes, last_row, num_rows)
            groups = [builder.add(panel, builder.mul(group_bytes, constant(at))) for at in range(num_groups)]
            zero = emit_constant(0.0, GROUP_OUTPUTS)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in groups] for _ in rows]
            with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
                row_offset = builder.mul(blocks.index, constant(rounding.block_bytes))
                group_offset = builder.mul(blocks.index, constant(panel_block_bytes(rounding)))
                here = [builder.add(row, row_offset) for row in rows]
                there = [builder.add(group, group_offset) for group in groups]
                _emit_block(builder, rounding, here, there, sums, kind.has_minimum)
            for target, row_sums in zip(row_addresses(builder, out, out_bytes, last_row, num_rows), sums, strict=True):
                for at, place in enumerate(row_sums):
                    builder.store(builder.load(place), emit_pointer(builder, target, VECTOR_BYTES * at), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return tile


def _emit_block(
    builder: Any, rounding: Rounding, rows: Sequence[Any], groups: Sequence[Any], sums: Any, has_minimum: bool
) -> None:
    """Add one block's products to the sums [rows][groups]."""
    num_sums = len(rows) * len(groups)
    chains = max(1, min(rounding.num_steps, _CHAINS // num_sums))
    zero = emit_int_constant(0, GROUP_OUTPUTS)
    totals = [[[zero] * chains for _ in groups] for _ in rows]
    for step in range(rounding.num_steps):
        weights = [_load_vector(builder, group, VECTOR_BYTES * step, I32) for group in groups]
        for row, row_totals in zip(rows, totals, strict=True):
            x = _load_splat(builder, row, 4 * step, I32)
            for weight, parts in zip(weights, row_totals, strict=True):
                parts[step % chains] = rounding.emit_dot(builder, parts[step % chains], weight, x)
    for group_at, group in enumerate(groups):
        scales = _load_vector(builder, group, VECTOR_BYTES * rounding.num_steps, F32)
        for row, row_totals, row_sums in zip(rows, totals, sums, strict=True):
            parts = row_totals[group_at]
            total = parts[0]
            for part in parts[1:]:
                total = builder.add(total, part)
            value = builder.sitofp(total, ir.VectorType(F32, GROUP_OUTPUTS))
            scale = builder.fmul(scales, _load_splat(builder, row, rounding.scale_offset, F32))
            result = emit_fma(builder, value, scale, builder.load(row_sums[group_at]))
            if has_minimum:
                minimums = _load_vector(builder, group, VECTOR_BYTES * (rounding.num_steps + 1), F32)
                block_sum = _load_splat(builder, row, rounding.scale_offset + 4, F32)
                result = emit_fma(builder, minimums, block_sum, result)
            builder.store(result, row_sums[group_at])


def _emit_panel_block(builder: Any, kind: IntegerKind, rows: Sequence[Any], target: Any) -> None:
    quads = []
    for first in range(0, kind.num_quads, 4):
        quads += _emit_transposed(builder, rows, kind.codes + 4 * first)
    vectors = kind.steps(builder, quads)
    scales = [emit_convert(builder, halves, KIND_F16) for halves in _emit_halves(builder, rows, kind.stores_minimum)]
    if kind.bias:
        scales.append(builder.fmul(scales[0], emit_constant(-float(kind.bias), GROUP_OUTPUTS)))
    for at, vector in enumerate([*vectors, *scales]):
        builder.store(vector, emit_pointer(builder, target, VECTOR_BYTES * at), align=VECTOR_BYTES)


def _emit_halves(builder: Any, rows: Sequence[Any], has_minimum: bool) -> list[Any]:
    """Return the scales and, where they lie beside them, the minimums of a block in 16 rows."""
    element, narrow = I32 if has_minimum else I16, ir.VectorType(I16, GROUP_OUTPUTS)
    vector = ir.Constant(ir.VectorType(element, GROUP_OUTPUTS), ir.Undefined)
    for lane, row in enumerate(rows):
        value = builder.load(emit_pointer(builder, row), typ=element, align=1)
        vector = builder.insert_element(vector, value, ir.Constant(I32, lane))
    if not has_minimum:
        return [vector]
    upper = builder.lshr(vector, emit_int_constant(16, GROUP_OUTPUTS))
    return [builder.trunc(vector, narrow), builder.trunc(upper, narrow)]


def _emit_transposed(builder: Any, rows: Sequence[Any], offset: int) -> list[Any]:
    """Return dwords 0-3 at the offset of 16 rows, each as a vector over the rows."""
    wholes = []
    for at in range(4):
        parts = [
            builder.load(emit_pointer(builder, rows[row], offset), typ=ir.VectorType(I32, 4), align=1)
            for row in range(at, GROUP_OUTPUTS, 4)
        ]
        halves = [emit_shuffle(builder, parts[i], parts[i + 1], range(8)) for i in (0, 2)]
        wholes.append(emit_shuffle(builder, halves[0], halves[1], range(16)))
    a, b, c, d = wholes  # 128-bit lane i of a holds row 4 i, of b row 4 i + 1, ...
    ab, cd = ([_emit_unpacked(builder, p, q, high, 1) for high in (0, 1)] for p, q in ((a, b), (c, d)))
    return [_emit_unpacked(builder, ab[i], cd[i], high, 2) for i in (0, 1) for high in (0, 1)]


def _emit_unpacked(builder: Any, a: Any, b: Any, high: int, size: int) -> Any:
    """Interleave runs of `size` dwords of the low or high half of each 128-bit lane of a and b."""
    lanes = []
    for lane in range(0, GROUP_OUTPUTS, 4):
        for start in range(lane + 2 * high, lane + 2 * high + 2, size):
            lanes += [*range(start, start + size), *range(16 + start, 16 + start + size)]
    return emit_shuffle(builder, a, b, lanes)


def _load_vector(builder: Any, address: Any, offset: int, element: Any) -> Any:
    kind = ir.VectorType(element, GROUP_OUTPUTS)
    return builder.load(emit_pointer(builder, address, offset), typ=kind, align=4)


def _load_splat(builder: Any, address: Any, offset: int, element: Any) -> Any:
    return emit_splat(
        builder, builder.load(emit_pointer(builder, address, offset), typ=element, align=4), GROUP_OUTPUTS
    )


def _nibble_pairs(builder: Any, quads: list[Any], bias: int) -> list[Any]:
    """Codes of four bits: the low halves of a quad's bytes are inputs 4 j, the high halves inputs 16 + 4 j."""
    pairs = []
    for shift in (0, 4):
        for quad in quads:
            for at in (0, 8):
                amount = emit_int_constant(shift + at, GROUP_OUTPUTS)
                shifted = builder.lshr(quad, amount) if shift + at else quad
                pair = builder.and_(shifted, emit_int_constant(0x000F000F, GROUP_OUTPUTS))
                pairs.append(_subtract(builder, pair, bias) if bias else pair)
    return pairs


def _subtract(builder: Any, pair: Any, bias: int) -> Any:
    shorts = builder.bitcast(pair, ir.VectorType(I16, 2 * GROUP_OUTPUTS))
    moved = builder.sub(shorts, emit_int_constant(bias, 2 * GROUP_OUTPUTS, I16))
    return builder.bitcast(moved, pair.type)


def _byte_pairs(builder: Any, quads: list[Any]) -> list[Any]:
    """Signed bytes: the even bytes of a quad, then the odd ones."""
    eight = emit_int_constant(8, 2 * GROUP_OUTPUTS, I16)
    pairs = []
    for quad in quads:
        shorts = builder.bitcast(quad, ir.VectorType(I16, 2 * GROUP_OUTPUTS))
        for value in (builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)):
            pairs.append(builder.bitcast(value, quad.type))
    return pairs


def _nibble_quads(builder: Any, quads: list[Any]) -> list[Any]:
    """Codes of four bits: the low halves of all bytes are inputs 0-15, the high halves 16-31."""
    mask, four = (emit_int_constant(value, GROUP_OUTPUTS) for value in (0x0F0F0F0F, 4))
    high = [builder.and_(builder.lshr(quad, four), mask) for quad in quads]
    return [builder.and_(quad, mask) for quad in quads] + high


def _unsigned_quads(builder: Any, quads: list[Any]) -> list[Any]:
    """Signed bytes, 128 larger."""
    flip = emit_int_constant(-0x7F7F7F80, GROUP_OUTPUTS)  # 0x80808080
    return [builder.xor(quad, flip) for quad in quads]


INTEGER_KINDS: Final = {
    "int16": {
        "Q4_0": IntegerKind(18, 2, lambda builder, quads: _nibble_pairs(builder, quads, 8), 4, False),
        "Q4_1": IntegerKind(20, 4, lambda builder, quads: _nibble_pairs(builder, quads, 0), 4, True),
        "Q8_0": IntegerKind(34, 2, _byte_pairs, 8, False),
    },
    "int8": {
        "Q4_0": IntegerKind(18, 2, _nibble_quads, 4, False, 8),
        "Q4_1": IntegerKind(20, 4, _nibble_quads, 4, True),
        "Q8_0": IntegerKind(34, 2, _unsigned_quads, 8, False, 128),
    },
}
