"""Tiles of dense arithmetic emitted as LLVM vector IR, shared by all dense kernels.

Every dot product is summed in one order, whatever the tile: each of `width` lanes adds its products in steps of the
contraction, then the lanes are added in halves. So a row's result does not depend on the rows beside it, bit by bit.

A tile's last rows and outputs may lie beyond the matrix: it then computes the last one that exists again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedkv.compute.cpu.quant_emit import EmitPart
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I64,
    KIND_F32,
    emit_fma,
    emit_load_as,
    emit_pointer,
    emit_prefetch,
    emit_shuffle,
)

Tile = Callable[..., None]
_TILES_AHEAD: Final = 2  # memory answers within the time of a tile or two


class Parts(NamedTuple):
    """How a tile walks stored weights: blocks of `block_bytes` bytes with `parts` parts of `part_weights` weights."""

    emit: EmitPart
    block_bytes: int
    parts: int
    part_weights: int


def make_tile(stored: Parts, num_rows: int, num_outputs: int, width: int, *, prefetch: bool = False) -> Tile:
    """Return tile(x, x_bytes, last_row, weights, weight_bytes, last_output, num_blocks, out, out_bytes).

    Stores out[r, n] = sum_k x[r, k] * weights[n, k] for `num_rows` rows and `num_outputs` outputs (a power of two);
    `*_bytes` are the strides of rows, `last_*` the last row and output that exist, counted from the tile's first.
    Outputs beyond the last are stored too: rows of `out` are padded. `prefetch` asks for the rows two tiles ahead.
    """

    @intrinsic
    def tile(
        typingctx: Any,
        x: Any,
        x_bytes: Any,
        last_row: Any,
        weights: Any,
        weight_bytes: Any,
        last_output: Any,
        num_blocks: Any,
        out: Any,
        out_bytes: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x, x_bytes, last_row, weights, weight_bytes, last_output, num_blocks, out, out_bytes = args
            x_rows = row_addresses(builder, x, x_bytes, last_row, num_rows)
            weight_rows = row_addresses(builder, weights, weight_bytes, last_output, num_outputs)
            ahead = builder.mul(weight_bytes, constant(_TILES_AHEAD * num_outputs)) if prefetch else None
            sums = _emit_products(builder, stored, x_rows, weight_rows, num_blocks, width, ahead)
            for target, row in zip(row_addresses(builder, out, out_bytes, last_row, num_rows), sums, strict=True):
                total = _emit_sums(builder, [builder.load(place) for place in row])
                builder.store(total, emit_pointer(builder, target), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return tile


def make_expand_row(stored: Parts, width: int) -> Tile:
    """Return expand_row(source, target, num_blocks): one stored row to float32."""

    @intrinsic
    def expand_row(typingctx: Any, source: Any, target: Any, num_blocks: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target, num_blocks = args

            def step(block: Any, part: Any, first: Any) -> None:
                place = builder.add(source, builder.mul(block, constant(stored.block_bytes)))
                vector = stored.emit(builder, place, part, width)
                for lane in range(0, stored.part_weights, width):
                    offset = builder.add(first, constant(4 * lane))
                    builder.store(vector(lane), emit_pointer(builder, target, offset), align=4)

            _for_parts(builder, stored, num_blocks, step)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return expand_row


def constant(value: int) -> Any:
    return ir.Constant(I64, value)


def row_addresses(builder: Any, base: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """Return the addresses of rows 0 .. count-1, none beyond the last."""
    rows = []
    for row in range(count):
        exists = builder.icmp_signed("<", constant(row), last)
        rows.append(builder.add(base, builder.mul(stride, builder.select(exists, constant(row), last))))
    return rows


def _for_parts(builder: Any, stored: Parts, num_blocks: Any, step: Callable[[Any, Any, Any], None]) -> None:
    """Emit step(block, part, byte offset of the part's first float32) over all parts of a row."""
    with cgutils.for_range(builder, num_blocks, intp=I64) as blocks:
        first = builder.mul(blocks.index, constant(4 * stored.parts * stored.part_weights))
        if stored.parts == 1:
            step(blocks.index, constant(0), first)
            return
        with cgutils.for_range(builder, constant(stored.parts), intp=I64) as parts:
            offset = builder.mul(parts.index, constant(4 * stored.part_weights))
            step(blocks.index, parts.index, builder.add(first, offset))


def _emit_products(
    builder: Any,
    stored: Parts,
    x_rows: Sequence[Any],
    weight_rows: Sequence[Any],
    num_blocks: Any,
    width: int,
    ahead: Any,
) -> list[list[Any]]:
    """Return the places of the lane sums [rows][outputs] after the loop over the contraction."""
    zero = ir.Constant(ir.VectorType(F32, width), [0.0] * width)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in weight_rows] for _ in x_rows]

    def step(block: Any, part: Any, first: Any) -> None:
        start = builder.mul(block, constant(stored.block_bytes))
        places = [builder.add(row, start) for row in weight_rows]
        vectors = [stored.emit(builder, place, part, width) for place in places]
        if ahead is not None:
            part_start = builder.mul(part, constant(stored.block_bytes // stored.parts))
            for place in places:
                emit_prefetch(builder, emit_pointer(builder, builder.add(place, part_start), ahead))
        for lane in range(0, stored.part_weights, width):
            offset = builder.add(first, constant(4 * lane))
            columns = [vector(lane) for vector in vectors]
            for row, row_sums in zip(x_rows, sums, strict=True):
                values = emit_load_as(builder, row, offset, width, KIND_F32)
                for column, place in zip(columns, row_sums, strict=True):
                    builder.store(emit_fma(builder, values, column, builder.load(place)), place)

    _for_parts(builder, stored, num_blocks, step)
    return sums


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


PANEL_MULTIPLE: Final = 4  # outputs of every tile divide it
