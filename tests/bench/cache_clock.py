"""How calls of a few microseconds are timed: each once, a fixed pure-Python loop beside each. Standard library only,
for it runs in the peers' environment too."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence


def yardstick() -> None:
    """Do a fixed amount of interpreter work: 1,000 additions."""
    total = 0
    for number in range(1_000):
        total += number


def microseconds(call: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1_000


def time_calls(calls: Sequence[Callable[[], object]]) -> tuple[list[float], list[float]]:
    """Return microseconds of each call and of the yardstick after it; the first tenth warms up and is left out."""
    samples, loops = [], []
    gc.collect()
    gc.disable()
    for call in calls:
        samples.append(microseconds(call))
        loops.append(microseconds(yardstick))
    gc.enable()
    warm = len(calls) // 10
    return samples[warm:], loops[warm:]
