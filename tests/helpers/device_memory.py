"""Memory of a virtual device that somebody else has taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from virtual_gpu import VirtualDriver
from virtual_gpu.memory import DeviceMemory, OutOfMemory


@contextmanager
def no_memory(driver: VirtualDriver, *, pinned: bool = False) -> Iterator[None]:
    """Take all device memory that is free, or all pinned memory, for a while."""
    memory = driver.memory
    if not pinned:
        taken = list(_take_all(memory))
        yield
        for address in taken:
            memory.free(address)
        return
    region = memory.regions[True]
    held, (region.cursor, region.holes) = (region.cursor, region.holes), (region.end, [])
    yield
    region.cursor, region.holes = held


def _take_all(memory: DeviceMemory) -> Iterator[int]:
    size = memory.device_size
    while size >= 256:
        try:
            yield memory.allocate(size).address
        except OutOfMemory:
            size //= 2
