"""Runs a launch in batches of CTAs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from virtual_gpu.access import SharedMemory
from virtual_gpu.alu import Array
from virtual_gpu.async_copy import CopyQueue
from virtual_gpu.binding import BoundBlock, check_supported
from virtual_gpu.counters import LaunchStats
from virtual_gpu.frame import Frame
from virtual_gpu.groups import BatchRun
from virtual_gpu.memory import DeviceMemory
from virtual_gpu.program import Kernel

MAX_LANES = 16384  # lanes run together


@dataclass
class Config:
    """What a launch checks and counts, and what is left to chance."""

    check_races: bool = True
    count: bool = True
    max_lanes: int = MAX_LANES
    pageable_late: bool = False  # read pageable memory when a copy runs, as devices that share the host's tables do
    warp_seed: int | None = None  # let warps take turns at random, not all at the lowest block first
    last_ctas: int | None = None  # run only so many at a grid's end: for grids too large to run


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
        start = max(0, self.num_ctas - (self.config.last_ctas or self.num_ctas))
        batch = max(1, min(self.num_ctas - start, self.config.max_lanes // padded))
        with np.errstate(all="ignore"):
            for first in range(start, self.num_ctas, batch):
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


__all__ = ["Config", "Launch", "check_supported"]
