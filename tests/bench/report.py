"""What every benchmark shares: the machine's description, medians, tables, and results kept as JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

WIDTH = 110  # of tables that go to a file or a pipe
RESULTS = Path(__file__).parent / "results"
_WAKING_SECONDS = 0.03
_PACKAGES = ("numpy", "numba", "grpcio", "protobuf")


class Timing(NamedTuple):
    """Median and 10th percentile of samples, in the samples' unit."""

    median: float
    p10: float


def median_p10(samples: Sequence[float]) -> Timing:
    """Return the median and the 10th percentile; the latter is what the machine does when left alone."""
    ordered = sorted(samples)
    return Timing(statistics.median(ordered), ordered[len(ordered) // 10])


def machine_description() -> dict[str, Any]:
    """Return what a reader needs to judge a figure: processor, cores, memory, versions, date."""
    cpuinfo = _read("/proc/cpuinfo")
    flags = set(_first(cpuinfo, "flags").split())
    return {
        "cpu": _first(cpuinfo, "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_first(_read("/proc/meminfo"), "MemTotal") or "0").split()[0]) / 2**20, 1),
        "isa": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "f16c"}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "date": datetime.date.today().isoformat(),
    }


def write_result(name: str, result: Mapping[str, Any]) -> Path:
    """Write `result` with the machine's description to results/NAME.json and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine_description(), **result}, indent=2) + "\n")
    return path


def take_turns(
    turns: Mapping[str, Callable[[], float]],
    rounds: int,
    pause_seconds: float,
    *,
    calls: int = 1,
    calls_untimed: int = 0,
) -> dict[str, list[float]]:
    """Return each one's times in milliseconds, of `calls` calls in each of `rounds` turns; a call returns its seconds.

    Before each turn idle threads of the one before spin out (Intel's OpenMP lets them for 0.2 s); then it runs
    untimed until its own threads are awake and the clocks are up again, which takes an idle machine some milliseconds,
    and at least `calls_untimed` times. A problem that rotates over its memory passes through all of it so: a virtual
    machine's host takes pages away that nobody read for seconds, and the first to read them again waits.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            time.sleep(pause_seconds)
            until, num_untimed = time.perf_counter() + _WAKING_SECONDS, 0
            while time.perf_counter() < until or num_untimed < calls_untimed:
                turn()
                num_untimed += 1
            samples[name] += [1e3 * turn() for _ in range(calls)]
    return samples


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def print_peers(names: Mapping[str, str], missing: Mapping[str, str]) -> None:
    """Say under a table which peers were there, by label, and why the others were not."""
    if names:
        print("; ".join(f"{label}: {name}" for label, name in names.items()))
    for label, reason in missing.items():
        print(f"{label}: not installed, {reason}")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _first(text: str, key: str) -> str:
    lines = (line for line in text.splitlines() if line.startswith(key))
    return next(lines, "").partition(":")[2].strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
