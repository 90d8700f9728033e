"""Runs one batch of CTAs: groups of lanes at basic blocks, the lowest block first, and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from virtual_gpu.alu import Array
from virtual_gpu.binding import BoundBlock
from virtual_gpu.faults import GpuFault
from virtual_gpu.frame import Frame, Lanes
from virtual_gpu.ptx import Imm, Instruction, Reg

if TYPE_CHECKING:
    from virtual_gpu.machine import Launch

MAX_BLOCKS = 20_000_000  # basic blocks executed before a launch counts as endless


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
        if launch.config.warp_seed is not None:
            self._run_by_chance(np.random.default_rng([launch.config.warp_seed, launch.number]))
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

    def _run_by_chance(self, rng: np.random.Generator) -> None:
        """Some warps, drawn at random, run one block at a time; within a warp it is the lowest block as ever."""
        last, num_warps = len(self.kernel.blocks), self.frame.num_lanes // 32
        while self.waiting:
            lowest = np.full(num_warps, last)
            for block in sorted(self.waiting, reverse=True):
                lowest[self.waiting[block] >> 5] = block
            current = int(rng.choice(np.unique(lowest[lowest < last]))) if (lowest < last).any() else last
            lanes = self.waiting.pop(current)
            goes = (lowest[lanes >> 5] == current) & (rng.random(num_warps) < 0.5)[lanes >> 5]
            self.add(current, lanes[~goes])
            if not goes.any():
                continue
            if current < last:
                self._execute(current, lanes[goes], self.blocks)
                self.add(*self._advance(current, lanes[goes]))
            else:
                self._exit(lanes[goes])

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
        if self._is_plain_barrier(terminator, lanes):
            self.frame.shared.cta_clock += 1
            return current + 1, lanes
        if lanes.size:
            self._stop(current, terminator, lanes)
        return current + 1, stay

    def _is_plain_barrier(self, terminator: Instruction, lanes: Lanes) -> bool:
        """The usual case: all live lanes arrive together at a barrier of their whole CTA."""
        return (
            terminator.base in ("bar", "barrier")
            and lanes.size == self.launch.num_live
            and not self.num_at_barrier
            and "sync" in terminator.mods
            and len(terminator.operands) < 2
            and not self.arrived.any()
        )

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
