"""Instructions of a warp: shuffles, votes, reductions, the warp barrier."""

from __future__ import annotations

from typing import Any

import numpy as np

from virtual_gpu.alu import Array, only_type, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.ptx import Instruction, Pair, Sink

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
