"""Register tiles of attention, emitted fully unrolled over tokens, query rows and vectors.

Two shapes do all the work. `dot_tile` reduces along head_dim: 4 keys as they lie in a block against a few query
rows, 16 accumulators, one shuffle tree at the end. `outer_tile` accumulates along rows of B: C += A B with A
broadcast one element at a time. It is the P V product, and Q K^T once the keys are transposed.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagedkv.compute.cpu.simd import literal
from pagedkv.compute.cpu.simd_emit import (
    F32,
    I64,
    KIND_BYTES,
    KIND_F32,
    emit_constant,
    emit_fma,
    emit_load_as,
    emit_pointer,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
)

TILE_TOKENS: Final = 4
TILE_VECTORS: Final = 4
MODE_PREFETCH: Final = 1  # ask for the next chunk's cache lines along the way
MODE_CLEAR: Final = 2  # start from zero instead of alpha * C

CACHE_LINE: Final = 64


def word(value: int) -> Any:
    return ir.Constant(I64, value)


def emit_loop(builder: Any, stop: Any, step: int, state: list[Any], body: Any) -> list[Any]:
    """Emit `for i in range(0, stop, step): state = body(i, state)` with the state in registers; stop may be 0."""
    entry = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.end"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(word(0), entry)
    held = [builder.phi(value.type) for value in state]
    for phi, value in zip(held, state, strict=True):
        phi.add_incoming(value, entry)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    changed = body(index, held)
    index.add_incoming(builder.add(index, word(step)), builder.block)
    for phi, value in zip(held, changed, strict=True):
        phi.add_incoming(value, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return held


def emit_ask(builder: Any, address: Any, far_bytes: Any) -> None:
    """Ask for the cache line at the address, and for the one `far_bytes` from it.

    A request that finds all miss buffers taken is dropped, so each line is asked for twice: two chunks ahead, where it
    has the most time, and one chunk ahead.
    """
    emit_prefetch(builder, emit_pointer(builder, address), 2)
    emit_prefetch(builder, emit_pointer(builder, address, far_bytes), 2)


def _emit_quad_sums(builder: Any, quad: list[Any]) -> Any:
    """Return, in every 128-bit lane, that lane's sums of 4 vectors in order."""
    width = quad[0].type.count
    lanes = range(0, width, 4)
    low = [index + lane for lane in lanes for index in (0, width, 1, width + 1)]
    high = [index + lane for lane in lanes for index in (2, width + 2, 3, width + 3)]
    pairs = []
    for a, b in (quad[:2], quad[2:]):
        pairs.append(builder.fadd(emit_shuffle(builder, a, b, low), emit_shuffle(builder, a, b, high)))
    front = [index + lane for lane in lanes for index in (0, 1, width, width + 1)]
    back = [index + lane for lane in lanes for index in (2, 3, width + 2, width + 3)]
    a, b = pairs
    return builder.fadd(emit_shuffle(builder, a, b, front), emit_shuffle(builder, a, b, back))


def _emit_lane_sums(builder: Any, vectors: list[Any]) -> Any:
    """Add up the 128-bit lanes of width/4 vectors; result lane 4 r + t is the sum over vector r's lanes."""
    width = vectors[0].type.count
    while len(vectors) > 1:
        # Halve pairwise: of each vector's remaining 128-bit parts the even ones are added to the odd ones.
        even, odd = _part_indices(width, 0), _part_indices(width, 1)
        vectors = [
            builder.fadd(emit_shuffle(builder, a, b, even), emit_shuffle(builder, a, b, odd))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _part_indices(width: int, parity: int) -> list[int]:
    parts = [part for part in range(2 * width // 4) if part % 2 == parity]
    return [4 * part + lane for part in parts for lane in range(4)]


@intrinsic(prefer_literal=True)
def dot_tile(
    typingctx: Any,
    keys: Any,
    last: Any,
    row_bytes: Any,
    queries: Any,
    head_dim: Any,
    scores: Any,
    scores_stride: Any,
    ahead: Any,
    far: Any,
    rows: Any,
    width: Any,
    kind: Any,
) -> Any:
    """Store the products of `rows` queries (float32 [rows, head_dim]) with 4 neighbouring keys.

    Rows beyond key `last` (0 .. 3) are not read: that key stands in for them. `ahead` is where the same tile of the
    next chunk lies; its cache lines are asked for, and those `far` bytes behind them (see emit_ask).
    """
    num_rows, lanes, stored = literal(rows), literal(width), literal(kind)
    item = KIND_BYTES[stored]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        key_address, last_key, key_stride, query_address, dims, out, out_stride, next_tile, far_bytes = args[:9]
        key_rows = [key_address]
        for token in range(1, TILE_TOKENS):
            index = builder.select(builder.icmp_signed("<", last_key, word(token)), last_key, word(token))
            key_rows.append(builder.add(key_address, builder.mul(index, key_stride)))
        query_rows = [
            builder.add(query_address, builder.mul(dims, word(4 * row))) if row else query_address
            for row in range(num_rows)
        ]
        step_bytes = TILE_TOKENS * lanes * item

        def body(dim: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(dim, word(item))
            wide_offset = builder.mul(dim, word(4))
            ahead_offset = builder.mul(dim, word(TILE_TOKENS * item))
            for line in range(0, max(step_bytes, CACHE_LINE), CACHE_LINE):
                emit_ask(builder, builder.add(builder.add(next_tile, ahead_offset), word(line)), far_bytes)
            k = [emit_load_as(builder, row, offset, lanes, stored) for row in key_rows]
            result = []
            for row in range(num_rows):
                q = emit_load_as(builder, query_rows[row], wide_offset, lanes, KIND_F32)
                result += [
                    emit_fma(builder, q, k[token], sums[row * TILE_TOKENS + token]) for token in range(TILE_TOKENS)
                ]
            return result

        zeros = [emit_constant(0.0, lanes)] * (num_rows * TILE_TOKENS)
        sums = emit_loop(builder, dims, lanes, zeros, body)
        quads = [_emit_quad_sums(builder, sums[row * 4 : row * 4 + 4]) for row in range(num_rows)]
        quads += [emit_constant(0.0, lanes)] * (lanes // 4 - num_rows)
        total = _emit_lane_sums(builder, quads)
        for row in range(num_rows):
            part = emit_shuffle(builder, total, total, range(4 * row, 4 * row + 4))
            address = builder.add(out, builder.mul(out_stride, word(row)))
            builder.store(part, emit_pointer(builder, address), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, rows, width, kind), codegen


@intrinsic(prefer_literal=True)
def outer_tile(
    typingctx: Any,
    table: Any,
    block_rows: Any,
    count: Any,
    row_bytes: Any,
    column: Any,
    a: Any,
    a_stride: Any,
    c: Any,
    c_stride: Any,
    alpha: Any,
    ahead_table: Any,
    far: Any,
    rows: Any,
    vectors: Any,
    width: Any,
    kind: Any,
    mode: Any,
) -> Any:
    """Compute C = alpha * C + A B for `rows` rows of C and `vectors` vectors of columns.

    B's `count` rows lie in pieces of `block_rows`, whose addresses are the int64 words at `table`; `column` is the
    first column. A is float32 [rows, count], C and alpha [rows] float32, all addresses and strides in bytes. With
    MODE_PREFETCH `ahead_table` is that of the next chunk, and the one of the chunk after lies `far` bytes behind it.
    """
    num_rows, num_vectors, lanes = literal(rows), literal(vectors), literal(width)
    stored, flags = literal(kind), literal(mode)
    item = KIND_BYTES[stored]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        table_at, piece_rows, total, b_stride, first_column = args[:5]
        a_at, a_step, c_at, c_step, alpha_at, ahead_at, far_table = args[5:12]
        c_rows = [builder.add(c_at, builder.mul(c_step, word(row))) for row in range(num_rows)]
        a_rows = [builder.add(a_at, builder.mul(a_step, word(row))) for row in range(num_rows)]
        column_bytes = builder.mul(first_column, word(item))

        def start(row: int, vector: int) -> Any:
            if flags & MODE_CLEAR:
                return emit_constant(0.0, lanes)
            old = emit_load_as(builder, c_rows[row], vector * lanes * 4, lanes, KIND_F32)
            factor = builder.load(emit_pointer(builder, alpha_at, 4 * row), typ=F32, align=4)
            return builder.fmul(old, emit_splat(builder, factor, lanes))

        def piece(index: Any, sums: list[Any]) -> list[Any]:
            done = builder.mul(index, piece_rows)
            left = builder.sub(total, done)
            here = builder.select(builder.icmp_signed("<", left, piece_rows), left, piece_rows)
            slot = builder.mul(index, word(8))
            base = builder.load(emit_pointer(builder, table_at, slot), typ=I64, align=8)
            base = builder.add(base, column_bytes)
            ahead = far_bytes = None
            if flags & MODE_PREFETCH:
                ahead = builder.load(emit_pointer(builder, ahead_at, slot), typ=I64, align=8)
                beyond = builder.load(emit_pointer(builder, ahead_at, builder.add(slot, far_table)), typ=I64, align=8)
                far_bytes = builder.sub(beyond, ahead)
                ahead = builder.add(ahead, column_bytes)

            def body(row_index: Any, inner: list[Any]) -> list[Any]:
                offset = builder.mul(row_index, b_stride)
                if ahead is not None:
                    for line in range(0, num_vectors * lanes * item, CACHE_LINE):
                        emit_ask(builder, builder.add(builder.add(ahead, offset), word(line)), far_bytes)
                at = builder.add(base, offset)
                b = [emit_load_as(builder, at, vector * lanes * item, lanes, stored) for vector in range(num_vectors)]
                a_offset = builder.mul(builder.add(done, row_index), word(4))
                result = []
                for row in range(num_rows):
                    factor = builder.load(emit_pointer(builder, a_rows[row], a_offset), typ=F32, align=4)
                    wide = emit_splat(builder, factor, lanes)
                    result += [
                        emit_fma(builder, wide, b[vector], inner[row * num_vectors + vector])
                        for vector in range(num_vectors)
                    ]
                return result

            return emit_loop(builder, here, 1, sums, body)

        sums = [start(row, vector) for row in range(num_rows) for vector in range(num_vectors)]
        pieces = builder.sdiv(builder.sub(builder.add(total, piece_rows), word(1)), piece_rows)
        sums = emit_loop(builder, pieces, 1, sums, piece)
        for row in range(num_rows):
            for vector in range(num_vectors):
                pointer = emit_pointer(builder, c_rows[row], vector * lanes * 4)
                builder.store(sums[row * num_vectors + vector], pointer, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 12, rows, vectors, width, kind, mode), codegen


@intrinsic(prefer_literal=True)
def transpose_tile(
    typingctx: Any, source: Any, last: Any, row_bytes: Any, target: Any, target_stride: Any, width: Any, kind: Any
) -> Any:
    """Store `width` rows x `width` elements of a kind, transposed, as float32; rows beyond `last` are not read."""
    lanes, stored = literal(width), literal(kind)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source_at, last_row, stride, target_at, out_stride = args[:5]
        rows = []
        for row in range(lanes):
            index = builder.select(builder.icmp_signed("<", last_row, word(row)), last_row, word(row))
            rows.append(emit_load_as(builder, source_at, builder.mul(index, stride), lanes, stored))
        half = lanes // 2
        low = [index for lane in range(half) for index in (lane, lanes + lane)]
        high = [index for lane in range(half, lanes) for index in (lane, lanes + lane)]
        stages = half.bit_length()
        for _ in range(stages):  # a perfect shuffle of rows and lanes; log2(lanes) of them transpose
            rows = [
                emit_shuffle(builder, rows[row], rows[row + half], lanes_of)
                for row in range(half)
                for lanes_of in (low, high)
            ]
        for row in range(lanes):
            address = builder.add(target_at, builder.mul(out_stride, word(row)))
            builder.store(rows[row], emit_pointer(builder, address), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, width, kind), codegen
