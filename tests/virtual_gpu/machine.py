"""Runs a launch: groups of lanes at basic blocks, the lowest block first, and barriers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from virtual_gpu import access, atomics, warp
from virtual_gpu.access import CopyQueue, SharedMemory
from virtual_gpu.alu import Array, unsupported
from virtual_gpu.counters import LaunchStats
from virtual_gpu.faults import GpuFault
from virtual_gpu.frame import Bound, Frame, Lanes, bind_alu, bind_guard
from virtual_gpu.memory import DeviceMemory
from virtual_gpu.program import Kernel, is_warp_barrier
from virtual_gpu.ptx import Imm, Instruction, Reg

MAX_LANES = 16384  # lanes run together
MAX_BLOCKS = 20_000_000  # basic blocks executed before a launch counts as endless

Binder = Callable[[Frame, Instruction, int], Bound]
BINDERS: dict[str, Binder] = {
    "ld": access.bind_load,
    "ldu": access.bind_load,
    "st": access.bind_store,
    "atom": atomics.bind_atomic,
    "red": atomics.bind_atomic,
    "cp": access.bind_cp,
    "membar": access.bind_nothing,
    "fence": access.bind_nothing,
    "prefetch": access.bind_nothing,
    "prefetchu": access.bind_nothing,
    "nanosleep": access.bind_nothing,
    "griddepcontrol": access.bind_nothing,
    "shfl": warp.bind_shuffle,
    "vote": warp.bind_vote,
    "activemask": warp.bind_active_mask,
    "redux": warp.bind_redux,
    "ldmatrix": warp.bind_ldmatrix,
    "mma": warp.bind_mma,
    "bar": warp.bind_warp_barrier,
    "barrier": warp.bind_warp_barrier,
}


@dataclass
class Config:
    """What a launch checks and counts."""

    check_races: bool = True
    count: bool = True
    max_lanes: int = MAX_LANES


def bind(frame: Frame, instruction: Instruction, row: int) -> Bound:
    """Bind one instruction that is not control flow. Raises UnsupportedPtx."""
    alu = frame.kernel.alus.get(id(instruction))
    if alu is not None:
        bound = bind_alu(frame, alu)
    elif instruction.base in BINDERS:
        bound = BINDERS[instruction.base](frame, instruction, row)
    else:
        raise unsupported(instruction)
    return bind_guard(frame, instruction.guard, bound) if instruction.guard else bound


class BoundBlock:
    """A block's instructions for all lanes (`full`), all live lanes (`live`), many (`masked`) and few (`part`)."""

    def __init__(self, frame: Frame, start: int, end: int) -> None:
        body, skipped = frame.kernel.body, frame.kernel.skipped
        bounds = [bind(frame, body[k], k) for k in range(start, end) if id(body[k]) not in skipped]
        self.full = [b.full for b in bounds]
        self.part = [b.part for b in bounds]
        self.live = [b.full if b.pure else _on_lanes(frame, b.part) for b in bounds]
        self.masked = [(b.masked or b.part, b.masked is not None) for b in bounds]


def _on_lanes(frame: Frame, part: Callable[[Lanes], Any]) -> Callable[[], Any]:
    return lambda: part(frame.lanes)


class Launch:
    """One kernel launch: its state shared by all batches of CTAs."""

    def __init__(
        self,
        kernel: Kernel,
        memory: DeviceMemory,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        params: bytes,
        number: int,
        first_tag: int,
        config: Config,
    ) -> None:
        self.kernel, self.memory, self.grid, self.block = kernel, memory, grid, block
        self.num_ctas = grid[0] * grid[1] * grid[2]
        self.dynamic_shared = shared_bytes
        self.shared_size = kernel.dynamic_offset + shared_bytes
        self.params, self.number, self.base_tag = params, number, first_tag
        self.check_races, self.count = config.check_races, config.count
        self.config = config
        self.stats = np.zeros((len(kernel.body) + 1, 6), np.int64)
        self.block_runs = np.zeros((len(kernel.blocks), 2), np.int64)  # times run, lanes
        self.ordered = np.zeros((1, 1), np.uint8)
        self.released: dict[int, Array] = {}
        self.moves_poison = False  # may read what nobody wrote (it only moves bytes)
        self.num_steps = 0
        self.num_divergent = 0
        self.live: Array = np.zeros(0, bool)
        self.num_live = 0
        self.copies: Any = None
        self.tags = (0, 0, 0, 0, 0)
        self.first_cta = 0

    def order(self, ctas: Array, addresses: Array) -> None:
        """An atomic orders its CTA behind every CTA that did one on the same address before."""
        if self.num_ctas > 4096 or not self.check_races:
            return
        if self.ordered.shape[0] == 1 and self.num_ctas > 1:
            self.ordered = np.zeros((self.num_ctas, self.num_ctas), np.uint8)
        if self.num_ctas == 1:
            return
        seen = set()
        for cta, address in zip((ctas + self.first_cta).tolist(), addresses.tolist(), strict=True):
            if (cta, address) in seen:
                continue
            seen.add((cta, address))
            release = self.released.setdefault(address, np.zeros(self.num_ctas, np.uint8))
            self.ordered[:, cta] |= release
            release |= self.ordered[:, cta]
            release[cta] = 1

    def run(self) -> LaunchStats:
        """Execute all CTAs. Raises GpuFault."""
        threads = self.block[0] * self.block[1] * self.block[2]
        padded = -(-threads // 32) * 32
        batch = max(1, min(self.num_ctas, self.config.max_lanes // padded))
        with np.errstate(all="ignore"):
            for first in range(0, self.num_ctas, batch):
                self._run_batch(first, min(batch, self.num_ctas - first))
        return LaunchStats.of(self)

    def _frame(self, num_ctas: int) -> tuple[Frame, list[BoundBlock | None]]:
        frames = self.kernel.frames
        key = (num_ctas, self.block)
        if key not in frames:
            if len(frames) >= 6:
                del frames[next(iter(frames))]
            frame = Frame(self.kernel, num_ctas, self.block)
            frames[key] = (frame, [None] * len(self.kernel.blocks))
        return frames[key]

    def _run_batch(self, first: int, num_ctas: int) -> None:
        frame, blocks = self._frame(num_ctas)
        frame.place(first, self.grid)
        frame.specials["%dynamic_smem_size"][:] = self.dynamic_shared
        frame.specials["%total_smem_size"][:] = self.shared_size
        frame.params[: len(self.params)] = np.frombuffer(self.params, np.uint8)
        frame.launch, self.first_cta = self, first
        if frame.shared is None or frame.shared.size != self.shared_size:
            frame.shared = SharedMemory(num_ctas, frame.padded, self.shared_size)
        frame.shared.reset()
        if self.kernel.local_bytes:
            frame.local_written[:] = 0
        self.copies = CopyQueue(frame)
        self.live = frame.all_lanes % frame.padded < frame.threads
        self.num_live = int(self.live.sum())
        self.tags = (self.base_tag, self.base_tag + first, self.base_tag + self.num_ctas, frame.padded, self.number)
        BatchRun(self, frame, blocks).run()


class BatchRun:
    """The scheduler of one batch: waiting groups by block, and lanes that wait at barriers."""

    def __init__(self, launch: Launch, frame: Frame, blocks: list[BoundBlock | None]) -> None:
        self.launch, self.frame, self.blocks = launch, frame, blocks
        self.kernel = launch.kernel
        self.waiting: dict[int, Lanes] = {}
        self.barrier = np.full(frame.num_lanes, -1, np.int64)  # barrier id a lane waits at
        self.resume = np.zeros(frame.num_lanes, np.int64)
        self.expected = np.zeros(frame.num_lanes, np.int64)  # arrivals that release it; 0 = all live
        self.vote = np.zeros(frame.num_lanes, bool)
        self.arrived = np.zeros((frame.num_ctas, 16), np.int64)
        self.reductions: dict[int, tuple[str, Any]] = {}  # resume block -> operation and target
        self.num_at_barrier = 0

    def run(self) -> None:
        launch, blocks, kernel = self.launch, self.blocks, self.kernel
        last = len(kernel.blocks)
        self.add(0, np.flatnonzero(launch.live))
        while self.waiting:
            current = min(self.waiting)
            lanes = self.waiting.pop(current)
            while lanes.size and current < last:
                self._execute(current, lanes, blocks)
                current, lanes = self._advance(current, lanes)
                if self.waiting and lanes.size:
                    lowest = min(self.waiting)
                    if lowest <= current:
                        self.add(current, lanes)
                        current, lanes = lowest, self.waiting.pop(lowest)
            if lanes.size:
                self._exit(lanes)
        if self.num_at_barrier:
            self._report_deadlock()

    def _execute(self, current: int, lanes: Lanes, blocks: list[BoundBlock | None]) -> None:
        block, launch, frame = blocks[current], self.launch, self.frame
        if block is None:
            plan = self.kernel.blocks[current]
            block = blocks[current] = BoundBlock(frame, plan.start, plan.end)
        runs = launch.block_runs[current]
        runs[0] += 1
        runs[1] += lanes.size
        launch.num_steps += 1
        if launch.num_steps > MAX_BLOCKS:
            raise GpuFault("endless", f"still running after {MAX_BLOCKS} basic blocks", self.kernel.name)
        if lanes.size == frame.num_lanes:
            for step in block.full:
                step()
        elif lanes.size == launch.num_live:
            frame.lanes = lanes
            for step in block.live:
                step()
        elif lanes.size * 4 >= frame.num_lanes:
            mask = np.zeros(frame.num_lanes, bool)
            mask[lanes] = True
            for masked_step, takes_mask in block.masked:
                masked_step(mask if takes_mask else lanes)
        else:
            for partial_step in block.part:
                partial_step(lanes)

    def add(self, block: int, lanes: Lanes) -> None:
        """Let lanes wait to run a block, joined with those already there."""
        if not lanes.size:
            return
        others = self.waiting.get(block)
        if others is not None:
            member = np.zeros(self.frame.num_lanes, bool)
            member[others] = True
            member[lanes] = True
            lanes = np.flatnonzero(member)
        self.waiting[block] = lanes

    def _advance(self, current: int, lanes: Lanes) -> tuple[int, Lanes]:
        """Apply the block's terminator; return the next block and lanes, the rest having been put to wait."""
        plan = self.kernel.blocks[current]
        terminator = plan.terminator
        if terminator is None:
            return current + 1, lanes
        stay = lanes[:0]
        if terminator.guard is not None:
            holds = self._predicate(terminator.guard, lanes)
            if terminator.base == "bra":
                return self._branch(current, plan.targets[0], lanes, holds)
            stay, lanes = lanes[~holds], lanes[holds]
        if terminator.base == "bra":
            return plan.targets[0], lanes
        if lanes.size:
            self._stop(current, terminator, lanes)
        return current + 1, stay

    def _predicate(self, guard: Reg, lanes: Lanes) -> Array:
        values = self.frame.storage(guard.name)
        holds = values[lanes] if len(values) > 1 else np.broadcast_to(values, lanes.shape)
        return ~holds if guard.negated else holds

    def _branch(self, current: int, target: int, lanes: Lanes, taken: Array) -> tuple[int, Lanes]:
        count = int(np.count_nonzero(taken))
        if count == lanes.size:
            return target, lanes
        if count == 0:
            return current + 1, lanes
        self.launch.num_divergent += 1
        self.add(target, lanes[taken])
        return current + 1, lanes[~taken]

    def _stop(self, current: int, terminator: Instruction, lanes: Lanes) -> None:
        """Terminators after which these lanes do not simply go on."""
        if terminator.base in ("ret", "exit"):
            self._exit(lanes)
        elif terminator.base == "trap":
            kind = "assertion" if "assert" in terminator.mods else "trap"
            raise self.frame.fault(kind, "the kernel stopped itself", terminator, int(lanes[0]))
        elif terminator.base == "brx":
            index = self.frame.read(terminator.operands[0], "u32")
            chosen = np.broadcast_to(index, self.frame.num_lanes)[lanes]
            for value in np.unique(chosen):
                self.add(self.kernel.blocks[current].targets[int(value)], lanes[chosen == value])
        else:
            self._arrive(current, terminator, lanes)

    def _exit(self, lanes: Lanes) -> None:
        launch = self.launch
        launch.live = launch.live.copy()
        launch.live[lanes] = False
        launch.num_live -= lanes.size
        if self.num_at_barrier:
            self._release()

    # barriers

    def _arrive(self, current: int, instruction: Instruction, lanes: Lanes) -> None:
        """bar.sync, bar.arrive, bar.red and their barrier.cta spellings."""
        mods = instruction.mods
        operands = list(instruction.operands)
        if "red" in mods:
            operation = next(m for m in mods if m in ("popc", "and", "or"))
            target = operands.pop(0)
            source = operands.pop()
            assert isinstance(source, Reg)
            view = self.frame.write_view(target, "u32" if operation == "popc" else "pred")
            self.reductions[current + 1] = (operation, view)
            self.vote[lanes] = self._predicate(source, lanes)
        number = self._barrier_number(operands[0] if operands else Imm(0), lanes)
        count = np.broadcast_to(self.frame.read(operands[1], "u32"), self.frame.num_lanes)[lanes] if operands[1:] else 0
        self.arrived += np.bincount(self.frame.cta_of_lane[lanes] * 16 + number, minlength=self.arrived.size).reshape(
            self.arrived.shape
        )
        if "arrive" in mods:
            self.add(current + 1, lanes)
        else:
            self.barrier[lanes], self.resume[lanes], self.expected[lanes] = number, current + 1, count
            self.num_at_barrier += lanes.size
        self._release()

    def _barrier_number(self, operand: Any, lanes: Lanes) -> Array:
        numbers = np.broadcast_to(self.frame.read(operand, "u32"), self.frame.num_lanes)[lanes]
        return numbers.astype(np.int64)

    def _release(self) -> None:
        """Let the lanes go on whose barrier is complete in their CTA."""
        frame, launch = self.frame, self.launch
        at = np.flatnonzero(self.barrier >= 0)
        if not at.size:
            return
        cta = frame.cta_of_lane[at]
        live = launch.live.reshape(frame.num_ctas, frame.padded).sum(axis=1)
        needed = np.where(self.expected[at] > 0, self.expected[at], live[cta])
        done = self.arrived[cta, self.barrier[at]] >= needed
        lanes = at[done]
        if not lanes.size:
            return
        self._reduce(lanes)
        ctas = np.unique(cta[done])
        frame.shared.cta_clock[ctas] += 1
        self.arrived[cta[done], self.barrier[lanes]] = 0
        self.barrier[lanes] = -1
        self.num_at_barrier -= lanes.size
        resume = self.resume[lanes]
        for block in np.unique(resume):
            self.add(int(block), lanes[resume == block])

    def _reduce(self, lanes: Lanes) -> None:
        """Give the results of bar.red to the lanes that are released."""
        cta, resume = self.frame.cta_of_lane[lanes], self.resume[lanes]
        for block, (operation, view) in self.reductions.items():
            chosen = lanes[resume == block]
            for number in np.unique(cta[resume == block]):
                members = chosen[self.frame.cta_of_lane[chosen] == number]
                votes = self.vote[members]
                view[members] = {"popc": votes.sum(), "and": votes.all(), "or": votes.any()}[operation]

    def _report_deadlock(self) -> None:
        lane = int(np.argmax(self.barrier >= 0))
        instruction = self.kernel.blocks[int(self.resume[lane]) - 1].terminator
        assert instruction is not None
        raise self.frame.fault(
            "barrier", "threads wait at a barrier that the others of their CTA never reach", instruction, lane
        )


def check_supported(kernel: Kernel) -> None:
    """Bind every instruction once, so that what is not modelled is refused when the module is loaded."""
    frame = Frame(kernel, 1, (32, 1, 1))
    for row, instruction in enumerate(kernel.body):
        if instruction.base in ("bra", "brx", "ret", "exit", "trap"):
            continue
        if instruction.base in ("bar", "barrier") and not is_warp_barrier(instruction):
            continue
        bind(frame, instruction, row)
