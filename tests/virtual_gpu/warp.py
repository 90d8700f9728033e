"""Instructions of a warp: shuffles, votes, reductions, ldmatrix, mma.sync."""

from __future__ import annotations

from typing import Any

import numpy as np

from virtual_gpu import checks, floats
from virtual_gpu.access import access_shared, address_reader, split_generic
from virtual_gpu.alu import DTYPES, Array, only_type, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.ptx import Instruction, Mem, Operand, Pair, Sink, Special, Vec

_LANE = np.arange(32, dtype=np.int64)


def read_lanes(array: Array, lanes: Lanes) -> Array:
    return array[lanes] if len(array) > 1 else np.broadcast_to(array, lanes.shape)


def require_members(frame: Frame, instruction: Instruction, members: Array, lanes: Lanes) -> None:
    """Fault unless every live lane named by a member mask executes this instruction together."""
    active = np.zeros(frame.num_lanes, bool)
    active[lanes] = True
    warps = np.unique(lanes >> 5)
    named = np.zeros((frame.num_warps, 32), bool)
    mask = np.broadcast_to(members, frame.num_lanes) if len(members) == 1 else members
    named[lanes >> 5] |= (mask[lanes][:, None] >> _LANE.astype(np.uint32)) & 1 == 1
    own = (mask[lanes] >> (lanes & 31).astype(np.uint32)) & 1 == 1
    if not own.all():
        lane = int(lanes[np.argmin(own)])
        raise frame.fault("warp", "executing thread is not in its own member mask", instruction, lane)
    missing = named[warps] & frame.launch.live.reshape(-1, 32)[warps] & ~active.reshape(-1, 32)[warps]
    if missing.any():
        warp, lane = (int(v[0]) for v in np.nonzero(missing))
        where = int(warps[warp]) * 32 + lane
        raise frame.fault("warp", "a thread named in the member mask is elsewhere", instruction, where)


def is_whole(frame: Frame, lanes: Lanes) -> bool:
    return bool(lanes.size == frame.launch.num_live)


def shuffle_sources(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Source lane and validity for each lane of [warps, 32], as the PTX manual's pseudocode."""
    b, c = b.astype(np.int64), c.astype(np.int64)
    value, clamp, segment = b & 31, c & 31, (c >> 8) & 31
    highest = (_LANE & segment) | (clamp & ~segment)
    lowest = _LANE & segment
    if mode == "up":
        j = _LANE - value
        valid = j >= highest
    elif mode == "down":
        j = _LANE + value
        valid = j <= highest
    elif mode == "bfly":
        j = _LANE ^ value
        valid = j <= highest
    else:
        j = lowest | (value & ~segment)
        valid = j <= highest
    return np.where(valid, j, _LANE), valid


def bind_shuffle(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """shfl.sync; a source lane that does not take part is a fault."""
    target, a, b, c, members = instruction.operands
    result, predicate = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    mode = next(m for m in instruction.mods if m in ("up", "down", "bfly", "idx"))
    value, to = frame.read(a, "b32"), frame.write_view(result, "b32")
    flag = frame.write_view(predicate, "pred")
    b_view, c_view, mask = (frame.read(o, "u32") for o in (b, c, members))
    cache: dict[tuple[int, int], tuple[Array, Array]] = {}
    base = np.arange(frame.num_warps, dtype=np.int64)[:, None] * 32

    def sources() -> tuple[Array, Array]:
        if len(b_view) == 1 and len(c_view) == 1:
            key = (int(b_view[0]), int(c_view[0]))
            if key not in cache:
                j, valid = shuffle_sources(mode, b_view, c_view)
                cache[key] = (
                    (base + j).ravel(),
                    np.broadcast_to(valid, (frame.num_warps, 32)).ravel(),
                )
            return cache[key]
        wide = [np.broadcast_to(v, frame.num_lanes).reshape(-1, 32) for v in (b_view, c_view)]
        j, valid = shuffle_sources(mode, *wide)
        return (base + j).ravel(), valid.ravel()

    def part(lanes: Lanes) -> None:
        whole = is_whole(frame, lanes)
        if not whole or len(mask) > 1 or int(mask[0]) != 0xFFFFFFFF:
            require_members(frame, instruction, mask, lanes)
        source, valid = sources()
        if lanes.size != frame.num_lanes:
            active = np.zeros(frame.num_lanes, bool)
            active[lanes] = True
            source, valid = source[lanes], valid[lanes]
            if not active[source].all():
                lane = int(lanes[np.argmin(active[source])])
                raise frame.fault("warp", "shuffle from a thread that does not take part", instruction, lane)
        moved = value[source] if len(value) > 1 else np.broadcast_to(value, source.shape)
        if lanes.size == frame.num_lanes:
            if to is not None:
                to[:] = moved
            if flag is not None:
                flag[:] = valid
            return
        if to is not None:
            to[lanes] = moved
        if flag is not None:
            flag[lanes] = valid

    return Bound(lambda: part(frame.all_lanes), part, False)


def _ballot(frame: Frame, lanes: Lanes, condition: Array) -> Array:
    """Per warp: the mask of lanes whose condition holds."""
    bits = np.zeros(frame.num_lanes, np.uint32)
    bits[lanes] = np.where(condition, np.uint32(1) << (lanes & 31).astype(np.uint32), np.uint32(0))
    return np.bitwise_or.reduce(bits.reshape(-1, 32), axis=1)


def bind_vote(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """vote.sync all, any, uni, ballot."""
    target, source, members = instruction.operands
    mode = next((m for m in instruction.mods if m in ("all", "any", "uni", "ballot")), None)
    if mode is None or "sync" not in instruction.mods:
        raise unsupported(instruction)
    predicate, mask = frame.read(source, "pred"), frame.read(members, "u32")
    negated = getattr(source, "negated", False)
    if negated:
        predicate = frame.storage(source.name)  # type: ignore[union-attr]
    to = frame.write_view(target, "b32" if mode == "ballot" else "pred")

    def part(lanes: Lanes) -> None:
        require_members(frame, instruction, mask, lanes)
        condition = read_lanes(predicate, lanes) ^ negated
        voters = _ballot(frame, lanes, np.ones(lanes.size, bool))[lanes >> 5] & read_lanes(mask, lanes)
        votes = _ballot(frame, lanes, condition)[lanes >> 5] & read_lanes(mask, lanes)
        outcome = {
            "ballot": votes,
            "any": votes != 0,
            "all": votes == voters,
            "uni": (votes == voters) | (votes == 0),
        }[mode]
        if to is not None:
            to[lanes] = outcome

    return Bound(lambda: part(frame.all_lanes), part, False)


def bind_active_mask(frame: Frame, instruction: Instruction, row: int) -> Bound:
    to = frame.write_view(instruction.operands[0], "b32")

    def part(lanes: Lanes) -> None:
        if to is not None:
            to[lanes] = _ballot(frame, lanes, np.ones(lanes.size, bool))[lanes >> 5]

    return Bound(lambda: part(frame.all_lanes), part, False)


_REDUCE: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def bind_redux(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """redux.sync on 32-bit integers."""
    target, source, members = instruction.operands
    kind = only_type(instruction)
    operation = next((_REDUCE[m] for m in instruction.mods if m in _REDUCE), None)
    if operation is None or kind == "f32":
        raise unsupported(instruction)
    value, mask = frame.read(source, kind), frame.read(members, "u32")
    to = frame.write_view(target, kind)

    def part(lanes: Lanes) -> None:
        require_members(frame, instruction, mask, lanes)
        values, masks = read_lanes(value, lanes), read_lanes(mask, lanes)
        groups = (lanes >> 5) << 32 | masks.astype(np.int64)
        for group in np.unique(groups):
            chosen = groups == group
            if to is not None:
                to[lanes[chosen]] = operation.reduce(values[chosen], dtype=value.dtype)

    return Bound(lambda: part(frame.all_lanes), part, False)


def bind_match(frame: Frame, instruction: Instruction, row: int) -> Bound:
    raise unsupported(instruction)


def bind_warp_barrier(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """bar.warp.sync: orders the memory accesses of its lanes."""
    mask = frame.read(instruction.operands[0], "u32")

    def part(lanes: Lanes) -> None:
        if not is_whole(frame, lanes) or len(mask) > 1 or int(mask[0]) != 0xFFFFFFFF:
            require_members(frame, instruction, mask, lanes)
        warps = np.unique(lanes >> 5)
        frame.shared.warp_clock[warps] += 1

    return Bound(lambda: part(frame.all_lanes), part, False)


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
