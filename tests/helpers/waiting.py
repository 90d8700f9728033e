"""Waiting in tests: for a condition, never for a time; the limits only end a test that would hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 180.0  # seconds: far beyond what anything waited for takes, also on a machine that is busy elsewhere


async def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Return as soon as the condition holds, letting the loop run meanwhile."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"no {what} within {seconds:g} s"
        await asyncio.sleep(0.005)
