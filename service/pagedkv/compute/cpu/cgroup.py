"""The limits that control groups (versions 1 and 2) set for this process."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_UNLIMITED_BYTES = 1 << 60  # version 1 writes a number near 2^63 where version 2 says "max"


def usable_cores() -> int:
    """Return how many threads can run at once: the affinity mask, cut to the control groups' CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = min((limit for folder in _folders("cpu") if (limit := _cpu_quota(folder)) is not None), default=affinity)
    return max(1, min(affinity, int(quota)))


def memory_headrooms() -> list[int]:
    """Return limit minus use, in bytes, of each control group above this process that limits memory."""
    found = []
    for folder in _folders("memory"):
        for limit_name, use_name in _MEMORY_FILES:
            limit, use = _number(folder / limit_name), _number(folder / use_name)
            if limit is not None and use is not None and limit < _UNLIMITED_BYTES:
                found.append(max(0, limit - use))
    return found


def _cpu_quota(folder: Path) -> float | None:
    words = _words(folder / "cpu.max")
    if len(words) != 2:
        words = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not words[0].isdigit() or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


def _folders(controller: str) -> list[Path]:
    """Return the folders of this process's groups for a controller, innermost first."""
    folders: list[Path] = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controllers if controllers else _ROOT
        inner = root / path.lstrip("/")
        folders += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _number(path: Path) -> int | None:
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None
