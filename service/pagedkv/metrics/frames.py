"""What the page map and `pagedkv top` are told: whole snapshots, and deltas from one moment to the next.

Arrays travel as base64: the states one byte a block, block tables as little-endian int32. Copying them costs the loop
microseconds where decimal text would cost milliseconds.
"""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.cache import BlockState, CacheManager
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import SequenceSwapped
from pagedkv.metrics.collectors import EngineView, host_blocks, memory_by_use
from pagedkv.metrics.registry import STATE

Frame = dict[str, Any]
_WHOLE_STATES_SHARE = 8  # when more than a block in 8 changed, all states are shorter than runs of them
_MIN_CHANGES = 512


class FrameSource:
    """Compares the cache with what it was at the last frame. Used on the loop only."""

    def __init__(
        self,
        cache: CacheManager,
        layout: KvLayout,
        backend_name: str,
        model_name: str | None = None,
        engine: Callable[[], EngineView | None] = lambda: None,
        num_generated: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._layout = layout
        self._backend_name = backend_name
        self._model_name = model_name
        self._engine = engine
        self._num_generated = num_generated
        self._clock = clock
        self._states = b""
        self._sequences: dict[str, tuple[int, bytes]] = {}

    def advance(self) -> Frame:
        """Return what changed since the last call; the first call tells all as changes."""
        states, sequences = bytes(self._cache.pool.states), self._read_sequences()
        frame = {
            "type": "delta",
            **self._figures(),
            **_state_changes(self._states, states),
            "sequences": [
                _sequence_change(name, now, self._sequences.get(name))
                for name, now in sequences.items()
                if self._sequences.get(name) != now
            ],
            "gone": [name for name in self._sequences if name not in sequences],
        }
        self._states, self._sequences = states, sequences
        return frame

    def snapshot(self) -> Frame:
        """Return everything as it is now; moves no delta's base."""
        return {
            "type": "snapshot",
            "pool": self.pool(),
            **self._figures(),
            "states": _base64(bytes(self._cache.pool.states)),
            "sequences": [_sequence_change(name, now, None) for name, now in self._read_sequences().items()],
        }

    def pool(self) -> Frame:
        """Return what never changes."""
        return {
            "num_blocks": self._layout.num_blocks,
            "block_size": self._layout.block_size,
            "block_bytes": self._layout.block_bytes,
            "num_host_blocks": self._cache.config.num_host_blocks,
            "dtype": str(self._layout.shape.dtype),
            "backend": self._backend_name,
            "model": self._model_name,
            "states": list(STATE.values),
            "has_engine": self._engine() is not None,
        }

    def sequence(self, sequence_id: str) -> Frame:
        """Return a sequence's block table, logical to physical. Raises SequenceNotFound."""
        view, pool = self._cache.sequence(sequence_id), self._cache.pool
        now = time.monotonic()
        return {
            "sequence_id": sequence_id,
            "num_tokens": view.num_tokens,
            "num_cached_tokens": view.num_cached_tokens,
            "is_swapped": view.is_swapped,
            "age_seconds": now - view.created_at,
            "idle_seconds": now - view.touched_at,
            "block_table": [
                {"physical": block, "state": _state_name(pool.states[block]), "ref_count": pool.ref_count(block)}
                for block in view.block_table
            ],
        }

    def block(self, block_id: int) -> Frame | None:
        """Return who holds a block, and since when; None for an id outside the pool."""
        pool, now = self._cache.pool, time.monotonic()
        if not 0 <= block_id < pool.num_blocks:
            return None
        entry, released_at = pool.published.get(block_id), pool.cached.get(block_id)
        holders = [name for name, (_, table) in self._read_sequences().items() if block_id in _to_ids(table)]
        created = [self._cache.sequence(name).created_at for name in holders[:16]]
        return {
            "block_id": block_id,
            "state": _state_name(pool.states[block_id]),
            "ref_count": pool.ref_count(block_id),
            "sequences": holders,
            "age_seconds": now - min(created) if created else None,  # of the oldest holder
            "idle_seconds": None if released_at is None else now - released_at,
            "published_seconds": None if entry is None else now - entry.created_at,
        }

    def _read_sequences(self) -> dict[str, tuple[int, bytes]]:
        cache = self._cache
        return {name: (cache.length(name), self._read_table(name)) for name in cache.sequence_ids()}

    def _read_table(self, sequence_id: str) -> bytes:
        try:
            return self._cache.block_table(sequence_id).tobytes()
        except SequenceSwapped:
            return b""

    def _figures(self) -> Frame:
        usage, accounting, stats = self._cache.usage(), self._cache.accounting(), self._cache.stats
        token_bytes, engine = self._layout.token_bytes, self._engine()
        counts = None if engine is None else engine.stats
        return {
            "time": self._clock(),
            "blocks": {state: getattr(usage, state) for state in STATE.values},
            "bytes": memory_by_use(accounting, usage, self._layout),
            "host_blocks": host_blocks(usage),
            "num_swapped": usage.num_swapped,
            "swapped_tokens": usage.swapped_tokens,
            "usage": (usage.private + usage.shared) / usage.total,
            "token_occupancy": accounting.token_occupancy,
            "internal_fragmentation": accounting.internal_fragmentation,
            "external_fragmentation": accounting.external_fragmentation,
            "memory_saved": accounting.memory_saved,
            "sharing_factor": accounting.sharing_ratio,
            "num_tokens": accounting.num_tokens,
            "num_sequences": accounting.num_sequences,
            "contiguous": {
                "paged": accounting.held_blocks * self._layout.block_bytes,
                "max": accounting.contiguous_max * token_bytes,
                "pow2": accounting.contiguous_pow2 * token_bytes,
                "oracle": accounting.contiguous_oracle * token_bytes,
            },
            "queried_tokens": stats.queried_tokens,
            "hit_tokens": stats.hit_tokens,
            "evicted_blocks": stats.evicted_blocks,
            "copied_blocks": stats.copied_blocks,
            "failed_allocations": stats.failed_allocations,
            "generated_tokens": self._num_generated(),
            "running": 0 if counts is None else counts.num_running,
            "waiting": 0 if counts is None else counts.num_waiting,
        }


def _state_name(state: int) -> str:
    return BlockState(state).name.lower()


def _state_changes(before: bytes, now: bytes) -> Frame:
    """Return the changed states as runs (first block, count, state), or all of them where that is shorter."""
    if before == now:
        return {"runs": []}
    if len(before) != len(now):
        return {"states": _base64(now)}
    current = np.frombuffer(now, np.uint8)
    changed = np.flatnonzero(np.frombuffer(before, np.uint8) != current)
    if len(changed) > max(_MIN_CHANGES, len(now) // _WHOLE_STATES_SHARE):
        return {"states": _base64(now)}
    return {"runs": _runs(changed, current)}


def _runs(changed: npt.NDArray[np.intp], states: npt.NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    values = states[changed]
    starts = np.flatnonzero(np.r_[True, (np.diff(changed) != 1) | (np.diff(values) != 0)])
    counts = np.diff(np.r_[starts, len(changed)])
    return list(zip(changed[starts].tolist(), counts.tolist(), values[starts].tolist(), strict=True))


def _sequence_change(name: str, now: tuple[int, bytes], before: tuple[int, bytes] | None) -> Frame:
    """Return the sequence's length, and its table as: keep so many entries, then these.

    Tokens without a table are swapped out.
    """
    num_tokens, table = now
    keep = 0 if before is None else _common_entries(before[1], table)
    return {"id": name, "tokens": num_tokens, "keep": keep, "table": _base64(table[keep * 4 :])}


def _common_entries(before: bytes, now: bytes) -> int:
    """Return how many leading entries of two tables agree; nearly always one is the other's beginning."""
    if now.startswith(before):
        return len(before) // 4
    length = min(len(before), len(now)) // 4
    if now[: length * 4] == before[: length * 4]:
        return length
    differs = _to_ids(before)[:length] != _to_ids(now)[:length]
    return int(differs.argmax())


def _to_ids(table: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(table, np.int32)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


assert sys.byteorder == "little"  # what the page expects of a table's bytes
assert array("i").itemsize == 4
