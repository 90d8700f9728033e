"""Loads and stores: address spaces, checks, widths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from virtual_gpu import checks
from virtual_gpu.alu import DTYPES, Array, type_mods, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.logic import LOCAL_WINDOW, SHARED_WINDOW
from virtual_gpu.ptx import TYPE_BYTES, Imm, Instruction, Mem, Operand, Reg, Sym, Vec

STATE_MESSAGES = {
    checks.OUT_OF_BOUNDS: ("out of bounds", "access outside every live allocation"),
    checks.UNALLOCATED: ("out of bounds", "access outside every live allocation"),
    checks.FREED: ("use after free", "access to freed memory"),
    checks.UNINITIALISED: ("uninitialised read", "read of bytes that nobody wrote"),
    checks.IN_FLIGHT: ("cp.async", "access to bytes whose cp.async has not been waited for"),
    checks.MISALIGNED: ("misaligned", "address is not a multiple of the access size"),
    checks.RACE: ("race", ""),
}
_SPACES = ("global", "shared", "local", "const", "param")
_CACHE_MODS = frozenset((
    "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "volatile", "weak", "relaxed", "acquire", "release", "acq_rel",
    "gpu", "cta", "sys", "cluster", "L1_evict_last", "L1_evict_first", "L1_no_allocate", "L1_evict_normal",
    "L1_evict_unchanged", "L2_64B", "L2_128B", "L2_256B", "L2_evict_first", "L2_evict_last", "L2_evict_normal",
    "L2_cache_hint", "v2", "v4", "v8", "shared_cta", "param_entry",
))  # fmt: skip
_UNORDERED = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel"))


class SharedMemory:
    """Shared memory of a frame's CTAs side by side, with its shadows and clocks."""

    def __init__(self, num_ctas: int, padded: int, size: int) -> None:
        self.size, self.padded = size, padded
        self.stride = -(-max(size, 16) // 128) * 128
        total = num_ctas * self.stride
        self.data = np.zeros(total, np.uint8)
        self.words = {w: self.data.view(f"u{w}") for w in (1, 2, 4, 8)}
        self.shadow = np.zeros(total, np.uint8)
        self.shadow4 = self.shadow.view(np.uint32)
        self.writer = np.zeros(total >> 1, np.int64)
        self.reader = np.zeros(total >> 1, np.int64)
        self.cta_clock = np.ones(num_ctas, np.int64)
        self.warp_clock = np.ones(num_ctas * padded // 32, np.int64)

    def reset(self) -> None:
        """Poison everything for the next CTAs."""
        self.shadow[:] = checks.UNINITIALISED
        self.cta_clock += 1
        if self.cta_clock.max() > 1 << 17 or self.warp_clock.max() > 1 << 21:
            self.writer[:] = 0
            self.reader[:] = 0
            self.cta_clock[:] = 1
            self.warp_clock[:] = 1


def space_of(frame: Frame, instruction: Instruction, address: Mem) -> str:
    """The address space of an access; "generic" where only the address tells."""
    for mod in instruction.mods:
        name = mod.removesuffix("_cta").removesuffix("_entry")
        if name in _SPACES:
            if name == "param" and isinstance(address.base, Sym):
                return frame.kernel.space_of(address.base)
            return "global" if name == "const" else name
    return "generic"


def address_reader(frame: Frame, address: Mem, space: str) -> Callable[[Lanes], Array]:
    """A function from lanes to int64 addresses."""
    base, offset = address.base, address.offset
    if isinstance(base, Imm | Sym):
        value = base.value if isinstance(base, Imm) else frame.kernel.address_of(base)
        return lambda lanes: np.full(lanes.size, value + offset, np.int64)
    assert isinstance(base, Reg)
    register = frame.storage(base.name)
    view = register.view(f"i{register.itemsize}") if register.itemsize == 8 else register
    if len(view) == 1:
        return lambda lanes: np.full(lanes.size, int(view[0]) + offset, np.int64)
    if view.dtype == np.int64:
        return lambda lanes: (view if lanes.size == view.size else view[lanes]) + offset
    mask = 0xFFFFFFFF
    return lambda lanes: ((view if lanes.size == view.size else view[lanes]).astype(np.int64) + offset) & mask


def access_global(
    frame: Frame, instruction: Instruction, row: int, lanes: Lanes, address: Array, nbytes: int, kind: int
) -> Array:
    """Check an access to global memory; return arena offsets. Raises GpuFault."""
    launch = frame.launch
    memory = launch.memory
    if kind == checks.READ and launch.moves_poison:
        kind = checks.READ_POISON
    offsets = np.empty(lanes.size, np.int64)
    flags = (launch.check_races and not _UNORDERED.intersection(instruction.mods), launch.count)
    code, index, bad, other = checks.check_global(
        address, lanes, nbytes, kind, memory.limits, launch.tags, flags, memory.shadow, memory.shadow4,
        memory.writer, memory.reader, launch.ordered, memory.owner, memory.seen, memory.totals,
        launch.stats[row], offsets,
    )  # fmt: skip
    if code:
        name, message = STATE_MESSAGES[code]
        if code == checks.RACE:
            who = "several CTAs" if other >= launch.num_ctas else f"CTA number {other}"
            message = f"{who} touched these bytes in the same launch without ordering"
        else:
            message += f", {memory.describe(int(bad))}"
        raise frame.fault(name, f"{message} ({nbytes} bytes, global)", instruction, int(lanes[index]), int(bad))
    return offsets


def access_shared(
    frame: Frame, instruction: Instruction, row: int, lanes: Lanes, address: Array, nbytes: int, kind: int
) -> Array:
    """Check an access to shared memory; return offsets into the frame's array. Raises GpuFault."""
    launch, shared = frame.launch, frame.shared
    offsets = np.empty(lanes.size, np.int64)
    code, index, bad, other = checks.check_shared(
        address, lanes, nbytes, kind, frame.padded, shared.stride, shared.size, (launch.check_races, launch.count),
        shared.shadow, shared.shadow4, shared.writer, shared.reader, shared.cta_clock, shared.warp_clock,
        launch.stats[row], offsets,
    )  # fmt: skip
    if code:
        name, message = STATE_MESSAGES[code]
        if code == checks.RACE:
            message = f"{checks.describe_reader(int(other), frame.padded)} touched these bytes with no barrier between"
        elif code == checks.OUT_OF_BOUNDS:
            message = f"access beyond the CTA's {shared.size} bytes"
        raise frame.fault(name, f"{message} ({nbytes} bytes, shared)", instruction, int(lanes[index]), int(bad))
    return offsets


def access_local(
    frame: Frame, instruction: Instruction, row: int, lanes: Lanes, address: Array, nbytes: int, kind: int
) -> Array:
    """Check an access to thread-local memory; return offsets into the frame's array. Raises GpuFault."""
    size = max(16, frame.kernel.local_bytes)
    bad = (address < 0) | (address + nbytes > size)
    crooked = address % nbytes != 0
    name = "out of bounds" if bad.any() else "misaligned"
    if (failed := bad | crooked).any():
        i = int(np.argmax(failed))
        raise frame.fault(name, f"{nbytes} bytes, local memory", instruction, int(lanes[i]), int(address[i]))
    offsets = lanes * size + address
    span = offsets[:, None] + np.arange(nbytes)
    if kind == checks.WRITE:
        frame.local_written[span] = 1
    elif not frame.local_written[span].all():
        i = int(np.argmin(frame.local_written[span].all(axis=1)))
        raise frame.fault(
            "uninitialised read", "local memory nobody wrote", instruction, int(lanes[i]), int(address[i])
        )
    return offsets


def words_of(frame: Frame, space: str) -> dict[int, Array]:
    if space == "global":
        return frame.launch.memory.words
    if space == "shared":
        return frame.shared.words
    return {w: frame.local.view(f"u{w}") for w in (1, 2, 4, 8)}


ACCESS = {"global": access_global, "shared": access_shared, "local": access_local}


def split_generic(lanes: Lanes, address: Array) -> list[tuple[str, Array | None, Array]]:
    """(space, positions or None for all, addresses in that space) of generic addresses."""
    window = address >> 40
    if (window > 2).all():
        return [("global", None, address)]
    parts: list[tuple[str, Array | None, Array]] = []
    for space, base in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW)):
        chosen = np.flatnonzero(window == base >> 40)
        if chosen.size:
            parts.append((space, chosen, address[chosen] - base))
    chosen = np.flatnonzero((window > 2) | (window < 1))
    if chosen.size:
        parts.append(("global", chosen, address[chosen]))
    return parts


def _refuse_mods(instruction: Instruction) -> None:
    for mod in instruction.mods:
        if mod not in DTYPES and mod not in _CACHE_MODS and mod not in _SPACES:
            raise unsupported(instruction, f".{mod}")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def bind_load(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """ld, ldu: check, gather, spread over the result registers."""
    _refuse_mods(instruction)
    kind = type_mods(instruction)[-1]
    address = instruction.operands[1]
    assert isinstance(address, Mem)
    items = _items(instruction.operands[0])
    space = space_of(frame, instruction, address)
    if space == "param":
        return _bind_param_load(frame, instruction, items, kind, address)
    targets = [frame.write_view(item, kind) for item in items]
    width, dtype = TYPE_BYTES[kind], DTYPES[kind]
    nbytes, shift = width * len(items), {1: 0, 2: 1, 4: 2, 8: 3}[width]
    read_address = address_reader(frame, address, space)
    raw = np.dtype(f"u{width}")

    def fetch(where: str, lanes: Lanes, addresses: Array) -> Array:
        offsets = ACCESS[where](frame, instruction, row, lanes, addresses, nbytes, checks.READ)
        values = np.empty((lanes.size, len(items)), raw)
        checks.gather(words_of(frame, where)[width], offsets, shift, values)
        return values

    def part(lanes: Lanes) -> None:
        addresses = read_address(lanes)
        if space != "generic":
            values = fetch(space, lanes, addresses)
        else:
            values = np.empty((lanes.size, len(items)), raw)
            for where, chosen, inner in split_generic(lanes, addresses):
                if chosen is None:
                    values = fetch(where, lanes, inner)
                else:
                    values[chosen] = fetch(where, lanes[chosen], inner)
        typed = values.view(dtype)
        for i, target in enumerate(targets):
            if target is not None:
                if lanes.size == frame.num_lanes:
                    target[...] = typed[:, i]
                else:
                    target[lanes] = typed[:, i]

    return Bound(lambda: part(frame.all_lanes), part, False)


def _bind_param_load(
    frame: Frame, instruction: Instruction, items: tuple[Operand, ...], kind: str, address: Mem
) -> Bound:
    width = TYPE_BYTES[kind]
    targets = [frame.write_view(item, kind) for item in items]
    if isinstance(address.base, Sym):
        start = frame.kernel.address_of(address.base) + address.offset
        views = [
            frame.params[start + i * width : start + (i + 1) * width].view(DTYPES[kind]) for i in range(len(items))
        ]

        def full() -> None:
            for target, view in zip(targets, views, strict=True):
                if target is not None:
                    target[...] = view

        def part(lanes: Lanes) -> None:
            for target, view in zip(targets, views, strict=True):
                if target is not None:
                    target[lanes if len(target) > 1 else slice(None)] = view

        return Bound(full, part, True)
    read_address = address_reader(frame, address, "param")

    def indexed(lanes: Lanes) -> None:
        starts = read_address(lanes)
        for i, target in enumerate(targets):
            span = frame.params[(starts + i * width)[:, None] + np.arange(width)]
            if target is not None:
                target[lanes] = np.ascontiguousarray(span).view(DTYPES[kind])[:, 0]

    return Bound(lambda: indexed(frame.all_lanes), indexed, False)


def value_reader(frame: Frame, items: tuple[Operand, ...], width: int) -> Callable[[Lanes], Array]:
    """A function from lanes to the raw values of some operands [lanes, items]."""
    views = [frame.read(item, f"b{8 * width}") for item in items]

    def read(lanes: Lanes) -> Array:
        values = np.empty((lanes.size, len(views)), f"u{width}")
        for i, view in enumerate(views):
            values[:, i] = view[lanes] if len(view) > 1 and lanes.size != len(view) else view
        return values

    return read


def bind_store(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """st: check, scatter."""
    _refuse_mods(instruction)
    kind = type_mods(instruction)[-1]
    address, source = instruction.operands
    assert isinstance(address, Mem)
    items = _items(source)
    space = space_of(frame, instruction, address)
    width = TYPE_BYTES[kind]
    nbytes, shift = width * len(items), {1: 0, 2: 1, 4: 2, 8: 3}[width]
    read_address, read_values = address_reader(frame, address, space), value_reader(frame, items, width)

    def put(where: str, lanes: Lanes, addresses: Array, values: Array) -> None:
        offsets = ACCESS[where](frame, instruction, row, lanes, addresses, nbytes, checks.WRITE)
        checks.scatter(words_of(frame, where)[width], offsets, shift, values)

    def part(lanes: Lanes) -> None:
        addresses, values = read_address(lanes), read_values(lanes)
        if space != "generic":
            put(space, lanes, addresses, values)
            return
        for where, chosen, inner in split_generic(lanes, addresses):
            if chosen is None:
                put(where, lanes, inner, values)
            else:
                put(where, lanes[chosen], inner, values[chosen])

    return Bound(lambda: part(frame.all_lanes), part, False)


def bind_nothing(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """Hints and fences: the model's memory is always coherent. Races are judged by barriers alone."""
    return Bound(lambda: None, lambda lanes: None, True)
