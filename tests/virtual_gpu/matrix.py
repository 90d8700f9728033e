"""ldmatrix and mma.sync: fragments to matrices and back, by the formulas of the PTX manual."""

from __future__ import annotations

from typing import Any

import numpy as np

from virtual_gpu import checks, floats
from virtual_gpu.access import access_shared, address_reader, split_generic
from virtual_gpu.alu import DTYPES, Array, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.ptx import Instruction, Mem, Operand, Special, Vec


def whole_warps(frame: Frame, instruction: Instruction, lanes: Lanes) -> Array:
    """The warps of the active lanes; a warp that is only partly there is a fault."""
    if lanes.size == frame.num_lanes:
        return np.arange(frame.num_warps)
    warps, counts = np.unique(lanes >> 5, return_counts=True)
    if (counts != 32).any():
        lane = int(warps[np.argmax(counts != 32)]) * 32
        raise frame.fault("warp", f"{instruction.base} needs all 32 threads of the warp", instruction, lane)
    return warps


def bind_ldmatrix(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """ldmatrix.m8n8.b16: lane i's address names row i % 8 of matrix i / 8."""
    mods = instruction.mods
    if "m8n8" not in mods or "b16" not in mods:
        raise unsupported(instruction)
    count = next(int(m[1]) for m in mods if m in ("x1", "x2", "x4"))
    target, address = instruction.operands
    assert isinstance(address, Mem)
    items = target.items if isinstance(target, Vec) else (target,)
    targets = [frame.write_view(item, "b32") for item in items]
    space = "shared" if any(m.startswith("shared") for m in mods) else "generic"
    read_address = address_reader(frame, address, space)
    is_transposed = "trans" in mods

    def part(lanes: Lanes) -> None:
        warps = whole_warps(frame, instruction, lanes)
        rows = (warps[:, None] * 32 + np.arange(8 * count)).ravel()
        addresses = read_address(rows)
        if space == "generic":
            (where, chosen, inner), *_ = split_generic(rows, addresses)
            if where != "shared" or (chosen is not None and chosen.size != rows.size):
                raise frame.fault("out of bounds", "ldmatrix outside shared memory", instruction, int(rows[0]))
            addresses = inner
        offsets = access_shared(frame, instruction, row, rows, addresses, 16, checks.READ_WARP)
        words = np.empty((rows.size, 4), np.uint32)
        checks.gather(frame.shared.words[4], offsets, 2, words)
        tiles = words.reshape(warps.size, count, 8, 4)
        if is_transposed:
            halves = tiles.view(np.uint16).reshape(warps.size, count, 8, 8)
            tiles = np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)
        for i, to in enumerate(targets):
            if to is not None:
                to.reshape(-1, 32)[warps] = tiles[:, i].reshape(-1, 32)

    return Bound(lambda: part(frame.all_lanes), part, False)


def _elements(kind: str) -> Any:
    """(values in a 32-bit register, function from [.., registers] of uint32 to float32 elements)."""
    if kind == "f16":
        return 2, lambda bits: bits.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return 2, lambda bits: floats.from_bf16(bits.view(np.uint16))
    if kind == "tf32":
        return 1, lambda bits: (bits & np.uint32(0xFFFFE000)).view(np.float32)
    if kind in ("e4m3", "e5m2"):
        dtype = floats.E4M3 if kind == "e4m3" else floats.E5M2
        return 4, lambda bits: bits.view(np.uint8).view(dtype).astype(np.float32)
    if kind in ("s8", "u8"):
        return 4, lambda bits: bits.view(DTYPES[kind])
    return None


def unpack_a(registers: Array, per: int, decode: Any) -> Array:
    """Fragment registers [R, W, 32] of A to matrices [W, 16, K].

    Register r, element j of lane l: row l/4 + 8 (r & 1), column (l % 4) per + j + 4 per (r >> 1).
    """
    count, warps, _ = registers.shape
    values = decode(np.ascontiguousarray(registers)).reshape(count // 2, 2, warps, 8, 4, per)
    return values.transpose(2, 1, 3, 0, 4, 5).reshape(warps, 16, -1)


def unpack_b(registers: Array, per: int, decode: Any) -> Array:
    """Fragment registers [R, W, 32] of B to [W, K, 8]: row (l % 4) per + j + 4 per r, column l / 4."""
    count, warps, _ = registers.shape
    values = decode(np.ascontiguousarray(registers)).reshape(count, warps, 8, 4, per)
    return values.transpose(1, 0, 3, 4, 2).reshape(warps, -1, 8)


def unpack_c(registers: Array) -> Array:
    """Accumulator registers [4, W, 32] to [W, 16, 8]: row l/4 + 8 (i >> 1), column 2 (l % 4) + (i & 1)."""
    _, warps, _ = registers.shape
    return registers.reshape(2, 2, warps, 8, 4).transpose(2, 0, 3, 4, 1).reshape(warps, 16, 8)


def pack_c(matrix: Array) -> Array:
    warps = len(matrix)
    return matrix.reshape(warps, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, warps, 32)


_SHAPES = {"m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"}


def bind_mma(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """mma.sync.m16n8k*.row.col with 32-bit accumulators; products exact, sums in float32."""
    mods = instruction.mods
    kinds = [m for m in mods if m in DTYPES or m in ("e4m3", "e5m2")]
    shape = next((m for m in mods if m in _SHAPES), None)
    if shape is None or len(kinds) != 4 or "row" not in mods or "col" not in mods or kinds[0] not in ("f32", "s32"):
        raise unsupported(instruction)
    elements = [_elements(kind) for kind in kinds[1:3]]
    if None in elements:
        raise unsupported(instruction)
    (per, decode_a), (_, decode_b) = elements
    depth = int(shape.split("k")[1])
    d, a, b, c = (_items(o) for o in instruction.operands)
    if len(a) * per * 64 != 16 * depth * 2 or len(b) * per * 32 != 8 * depth or len(c) != 4:
        raise unsupported(instruction, "fragment sizes")
    total = kinds[0]
    views = [[frame.read(o, "b32") for o in group] for group in (a, b)]
    accumulators = [frame.read(o, total) for o in c]
    targets = [frame.write_view(o, total) for o in d]

    def fetch(arrays: list[Array], warps: Array) -> Array:
        everything = len(warps) == frame.num_warps
        wide = [np.broadcast_to(v, frame.num_lanes).reshape(-1, 32) for v in arrays]
        return np.stack([v if everything else v[warps] for v in wide])

    def part(lanes: Lanes) -> None:
        warps = whole_warps(frame, instruction, lanes)
        left = unpack_a(fetch(views[0], warps), per, decode_a)
        right = unpack_b(fetch(views[1], warps), per, decode_b)
        start = unpack_c(fetch(accumulators, warps))
        if total == "s32":
            result = (left.astype(np.int64) @ right.astype(np.int64) + start).astype(np.int32)
        else:
            result = np.matmul(left, right) + start
        for to, values in zip(targets, pack_c(result), strict=True):
            if to is not None:
                to.reshape(-1, 32)[warps] = values

    return Bound(lambda: part(frame.all_lanes), part, False)


def _items(operand: Operand) -> tuple[Operand, ...]:
    assert not isinstance(operand, Special)
    return operand.items if isinstance(operand, Vec) else (operand,)
