"""Device and pinned host memory: one arena, one state per byte, allocations that never move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from virtual_gpu import checks

DEVICE_BASE = 0x7E << 40
GRANULE = 512


@dataclass
class Allocation:
    index: int
    address: int  # as the kernel (and, for pinned memory, the host) sees it
    size: int
    offset: int  # into the arena
    is_host: bool
    is_live: bool = True


class OutOfMemory(Exception):
    """No range of the arena is large enough."""


class Region:
    """A range of the arena handed out in granules: untouched space first, so that freed memory stays poisoned."""

    def __init__(self, start: int, size: int) -> None:
        self.cursor, self.end = start, start + size
        self.holes: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        if self.cursor + size <= self.end:
            self.cursor += size
            return self.cursor - size
        for i, (offset, length) in enumerate(self.holes):
            if length >= size:
                self.holes[i : i + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        raise OutOfMemory

    def give(self, offset: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self.holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        if merged and sum(merged[-1]) == self.cursor and self.cursor + GRANULE > self.end:
            self.cursor = merged.pop()[0]
        self.holes = merged


class DeviceMemory:
    """The arena `data` and its shadows. Offsets below `device_size` are device memory, above it pinned memory."""

    def __init__(self, device_size: int, host_size: int) -> None:
        self.device_size = -(-device_size // GRANULE) * GRANULE
        self.host_size = -(-host_size // GRANULE) * GRANULE
        total = self.device_size + self.host_size
        backing = np.zeros(total + 4096, np.uint8)  # calloc: pages appear when touched
        skip = -backing.ctypes.data % 4096
        self.data = backing[skip : skip + total]
        self.words: dict[int, Any] = {w: self.data.view(f"u{w}") for w in (1, 2, 4, 8)}
        self.shadow = np.zeros(total, np.uint8)
        self.shadow4 = self.shadow.view(np.uint32)
        self.writer = np.zeros(total >> 1, np.int32)
        self.reader = np.zeros(total >> 1, np.int32)
        self.seen = np.zeros((2, total >> 5), np.int32)
        self.owner = np.zeros(total >> 9, np.int32)
        self.host_base = int(self.data.ctypes.data) + self.device_size
        self.limits = (np.int64(DEVICE_BASE), self.device_size, np.int64(self.host_base), self.host_size)
        self.regions = (Region(0, self.device_size), Region(self.device_size, self.host_size))
        self.allocations: list[Allocation] = [Allocation(0, 0, 0, 0, False, False)]
        self.live: dict[int, Allocation] = {}
        self.totals = np.zeros((64, 4), np.int64)
        self.used = 0

    def allocate(self, size: int, is_host: bool = False) -> Allocation:
        """Take `size` bytes, poisoned. Raises OutOfMemory."""
        span = -(-(size + 1) // GRANULE) * GRANULE  # at least one byte of no man's land behind
        if not is_host and self.used + size > self.device_size:
            raise OutOfMemory
        offset = self.regions[is_host].take(span)
        address = self.address_of(offset)
        allocation = Allocation(len(self.allocations), address, size, offset, is_host)
        self.allocations.append(allocation)
        if len(self.allocations) > len(self.totals):
            self.totals = np.concatenate([self.totals, np.zeros_like(self.totals)])
        self.live[address] = allocation
        self.shadow[offset : offset + span] = checks.UNALLOCATED
        self.shadow[offset : offset + size] = checks.UNINITIALISED
        self.owner[offset >> 9 : (offset + span) >> 9] = allocation.index
        self.used += 0 if is_host else size
        return allocation

    def free(self, address: int) -> Allocation | None:
        """Give an allocation back and poison it; None if no live one starts here."""
        allocation = self.live.pop(address, None)
        if allocation is None:
            return None
        allocation.is_live = False
        span = -(-(allocation.size + 1) // GRANULE) * GRANULE
        self.shadow[allocation.offset : allocation.offset + allocation.size] = checks.FREED
        self.regions[allocation.is_host].give(allocation.offset, span)
        self.used -= 0 if allocation.is_host else allocation.size
        return allocation

    def address_of(self, offset: int) -> int:
        if offset < self.device_size:
            return DEVICE_BASE + offset
        return self.host_base + offset - self.device_size

    def offset_of(self, address: int) -> int | None:
        """Arena offset of an address, None outside both parts."""
        if 0 <= address - DEVICE_BASE < self.device_size:
            return address - DEVICE_BASE
        if 0 <= address - self.host_base < self.host_size:
            return address - self.host_base + self.device_size
        return None

    def find(self, address: int) -> Allocation | None:
        """The latest allocation, live or freed, that an address lies in or just behind."""
        offset = self.offset_of(address)
        if offset is None:
            return None
        index = int(self.owner[offset >> 9])
        return self.allocations[index] if index else None

    def span(self, address: int, size: int) -> slice | None:
        """The arena slice of a range wholly inside one live allocation, else None."""
        found = self.find(address)
        if found is None or not found.is_live or address + size > found.address + found.size:
            return None
        start = found.offset + address - found.address
        return slice(start, start + size)

    def describe(self, address: int) -> str:
        """Say where an address lies relative to what is allocated."""
        found = self.find(address)
        if found is None:
            return "in no allocation"
        if not found.is_live:
            return f"in allocation {found.address:#x} of {found.size} bytes, which was freed"
        beyond = address - found.address - found.size
        where = f"{beyond} bytes behind" if beyond >= 0 else f"byte {address - found.address} of"
        return f"{where} allocation {found.address:#x} of {found.size} bytes"
