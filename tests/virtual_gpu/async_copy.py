"""cp.async: global bytes that reach shared memory when they are waited for."""

from __future__ import annotations

from functools import partial

import numpy as np

from virtual_gpu import checks
from virtual_gpu.access import access_global, access_shared, address_reader
from virtual_gpu.alu import Array, unsupported
from virtual_gpu.frame import Bound, Frame, Lanes
from virtual_gpu.ptx import Imm, Instruction, Mem, Reg


class CopyQueue:
    """cp.async of a frame: bytes fetched at issue, written to shared memory only when waited for."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.group = np.zeros(frame.num_lanes, np.int64)  # number of the group each lane is filling
        self.pending: list[tuple[Lanes, Array, Array, Array]] = []  # lanes, shared offsets, data, group numbers

    def commit(self, lanes: Lanes) -> None:
        self.group[lanes] += 1

    def wait(self, lanes: Lanes, allowed: int, uncommitted: bool = False) -> None:
        """Complete all but the newest `allowed` groups of these lanes."""
        waiting = np.zeros(self.frame.num_lanes, bool)
        waiting[lanes] = True
        kept = []
        for owners, offsets, data, groups in self.pending:
            due = waiting[owners] & (uncommitted | (groups < self.group[owners] - allowed))
            if due.any():
                self._complete(owners[due], offsets[due], data[due])
            if not due.all():
                rest = ~due
                kept.append((owners[rest], offsets[rest], data[rest], groups[rest]))
        self.pending = kept

    def _complete(self, owners: Lanes, offsets: Array, data: Array) -> None:
        shared = self.frame.shared
        words = np.ascontiguousarray(data).view(np.uint32)
        checks.scatter(shared.words[4], offsets, 2, words)
        checks.scatter(shared.shadow4, offsets, 2, np.full_like(words, 0x01010101 * checks.INITIALISED))
        cta, warp = owners // self.frame.padded, owners >> 5
        mark = (shared.cta_clock[cta] << 44) | (shared.warp_clock[warp] << 22) | owners
        checks.scatter(shared.writer, offsets, 1, np.repeat(mark[:, None], data.shape[1] // 2, axis=1))


def bind_cp(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """cp.async and its commit and wait."""
    if instruction.mods[0] != "async" or "bulk" in instruction.mods:
        raise unsupported(instruction)
    if "commit_group" in instruction.mods:
        commit = partial(_commit, frame)
        return Bound(lambda: commit(frame.all_lanes), commit, False)
    if "wait_all" in instruction.mods or "wait_group" in instruction.mods:
        is_all = "wait_all" in instruction.mods
        allowed = 0 if is_all else instruction.operands[0].value  # type: ignore[union-attr]

        def wait(lanes: Lanes) -> None:
            frame.launch.copies.wait(lanes, allowed, is_all)

        return Bound(lambda: wait(frame.all_lanes), wait, False)
    return _bind_copy(frame, instruction, row)


def _commit(frame: Frame, lanes: Lanes) -> None:
    frame.launch.copies.commit(lanes)


def _bind_copy(frame: Frame, instruction: Instruction, row: int) -> Bound:
    target, source, size, *rest = instruction.operands
    assert isinstance(target, Mem)
    assert isinstance(source, Mem)
    assert isinstance(size, Imm)
    nbytes = size.value
    read_target, read_source = address_reader(frame, target, "shared"), address_reader(frame, source, "global")
    has_hint = "L2_cache_hint" in instruction.mods
    count = frame.read(rest[0], "u32") if rest and not (has_hint and len(rest) == 1) else None
    if count is not None and isinstance(rest[0], Reg) and frame.kernel.registers[rest[0].name] == "pred":
        raise unsupported(instruction, "ignore-src predicate")

    def part(lanes: Lanes) -> None:
        into = read_target(lanes)
        offsets = access_shared(frame, instruction, row, lanes, into, nbytes, checks.WRITE_LATER)
        data = np.zeros((lanes.size, nbytes), np.uint8)
        sizes = np.full(lanes.size, nbytes) if count is None else np.broadcast_to(count, frame.num_lanes)[lanes]
        addresses = read_source(lanes)
        for amount in np.unique(sizes) if count is not None else (nbytes,):
            chosen = np.flatnonzero(sizes == amount)
            if amount == 0:
                continue
            unit = nbytes if amount == nbytes else 1
            for start in range(0, int(amount), unit):
                found = access_global(
                    frame, instruction, row, lanes[chosen], addresses[chosen] + start, unit, checks.READ
                )
                if unit == nbytes:
                    taken = np.empty((chosen.size, nbytes // 4), np.uint32)
                    checks.gather(frame.launch.memory.words[4], found, 2, taken)
                    data[chosen] = taken.view(np.uint8)
                else:
                    data[chosen, start] = frame.launch.memory.data[found]
        copies = frame.launch.copies
        copies.pending.append((lanes, offsets, data, copies.group[lanes]))

    return Bound(lambda: part(frame.all_lanes), part, False)
