"""The page pool in host memory: one allocation on 2 MB pages, refused with numbers where it cannot fit."""

from __future__ import annotations

import logging
import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedkv.compute.cpu.cgroup import memory_headrooms
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import InvalidArgument

_HUGE_PAGE_BYTES = 2 << 20
_HUGE_PAGE_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_log = logging.getLogger(__name__)


def allocate_pool(layout: KvLayout, num_host_blocks: int = 0) -> npt.NDArray[np.uint8]:
    """Return the pool's bytes [layout.pool_bytes], aligned to 2 MB and not touched yet.

    Raises:
        InvalidArgument: it is, with a host pool beside it, larger than the memory that this process may still take.
    """
    check_memory(layout.pool_bytes + num_host_blocks * layout.block_bytes)
    return _map_pool(layout)


def allocate_host_pool(layout: KvLayout, num_blocks: int) -> npt.NDArray[np.uint8]:
    """Return the blocks to swap to [num_blocks, layout.block_bytes], not touched yet; `allocate_pool` has checked."""
    if not num_blocks:
        return np.empty((0, layout.block_bytes), np.uint8)
    return _map_pool(replace(layout, num_blocks=num_blocks)).reshape(num_blocks, layout.block_bytes)


def _map_pool(layout: KvLayout) -> npt.NDArray[np.uint8]:
    size = -(-layout.pool_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    region = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
    _advise_huge_pages(region)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_BYTES
    return whole[start : start + layout.pool_bytes]


def check_memory(needed: int) -> None:
    """Refuse a pool of `needed` bytes that this process may not take."""
    available = available_memory()
    if available is not None and needed > available:
        raise InvalidArgument(
            f"the pool needs {needed / 2**20:.0f} MiB, {available / 2**20:.0f} MiB of memory are available",
            field="num_blocks",
            needed_bytes=needed,
            available_bytes=available,
        )


def available_memory() -> int | None:
    """Return the bytes this process may still take by the machine's and its control groups' limits."""
    return min((limit for limit in (_machine_available(), *memory_headrooms()) if limit is not None), default=None)


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _advise_huge_pages(region: mmap.mmap) -> None:
    problem = huge_page_problem()
    if problem is None:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            problem = str(error)
    if problem is not None:
        _log.warning("2 MB pages are not available for the page pool (%s); attention will be slower", problem)


def huge_page_problem() -> str | None:
    """Return why the pool cannot lie on 2 MB pages, or None."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return "this platform has no madvise(MADV_HUGEPAGE)"
    try:
        modes = _HUGE_PAGE_SWITCH.read_text()
    except OSError:
        return "the kernel has no transparent huge pages"
    return "transparent huge pages are switched off" if "[never]" in modes else None
