"""Facts about a launch that do not depend on a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from virtual_gpu import checks
from virtual_gpu.alu import TYPE_NAMES
from virtual_gpu.ptx import TYPE_BYTES, Instruction

if TYPE_CHECKING:
    from virtual_gpu.machine import Launch


@dataclass
class LaunchStats:
    """Counters of one launch; sectors are of 32 bytes, `least` counts each touched sector once."""

    kernel: str
    num_ctas: int
    num_threads: int
    sectors_read: int = 0
    sectors_read_least: int = 0
    sectors_written: int = 0
    sectors_written_least: int = 0
    shared_wavefronts: int = 0
    shared_wavefronts_least: int = 0
    instructions: Counter[str] = field(default_factory=Counter)  # opcode base -> warp-level executions
    global_load_bytes: Counter[int] = field(default_factory=Counter)  # bytes a thread -> thread-level loads
    global_store_bytes: Counter[int] = field(default_factory=Counter)  # likewise, stores
    num_blocks_run: int = 0  # basic blocks executed over groups of lanes
    num_divergent_branches: int = 0

    @property
    def read_ratio(self) -> float:
        return self.sectors_read / max(1, self.sectors_read_least)

    @property
    def write_ratio(self) -> float:
        return self.sectors_written / max(1, self.sectors_written_least)

    @property
    def bank_conflict_ratio(self) -> float:
        return self.shared_wavefronts / max(1, self.shared_wavefronts_least)

    @classmethod
    def of(cls, launch: Launch) -> LaunchStats:
        kernel = launch.kernel
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        stats = cls(kernel.name, launch.num_ctas, threads)
        stats.num_divergent_branches = launch.num_divergent
        stats.num_blocks_run = launch.num_steps
        for block, (runs, lanes) in zip(kernel.blocks, launch.block_runs, strict=True):
            if runs:
                for instruction in kernel.body[block.start : block.end]:
                    stats.instructions[instruction.base] += -(-int(lanes) // 32)
        for instruction, row in zip(kernel.body, launch.stats, strict=False):
            if row[checks.LANES]:
                stats._add(instruction, row)
        return stats

    def _add(self, instruction: Instruction, row: list[int]) -> None:
        self.shared_wavefronts += int(row[checks.WAVEFRONTS])
        self.shared_wavefronts_least += int(row[checks.IDEAL_WAVEFRONTS])
        if instruction.base in ("st", "red"):
            self.sectors_written += int(row[checks.SECTORS])
            self.sectors_written_least += int(row[checks.NEW_SECTORS])
        else:
            self.sectors_read += int(row[checks.SECTORS])
            self.sectors_read_least += int(row[checks.NEW_SECTORS])
        if row[checks.SECTORS] and instruction.base in ("ld", "ldu", "cp"):
            self.global_load_bytes[access_bytes(instruction)] += int(row[checks.LANES])
        if row[checks.SECTORS] and instruction.base == "st":
            self.global_store_bytes[access_bytes(instruction)] += int(row[checks.LANES])


def access_bytes(instruction: Instruction) -> int:
    """Bytes a thread moves in a load, a store or cp.async."""
    if instruction.base == "cp":
        return int(instruction.operands[2].value)  # type: ignore[union-attr]
    kind = [m for m in instruction.mods if m in TYPE_NAMES][-1]
    count = next((int(m[1:]) for m in instruction.mods if m in ("v2", "v4", "v8")), 1)
    return TYPE_BYTES[kind] * count
