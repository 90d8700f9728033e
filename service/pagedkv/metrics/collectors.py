"""What is, when asked: figures read from the live cache and engine at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from pagedkv.cache import Accounting, CacheManager, CacheStats, Usage
from pagedkv.compute.layout import KvLayout
from pagedkv.metrics.recorder import Recorder
from pagedkv.metrics.registry import BACKEND, BACKEND_USE, DTYPE, HOST_STATE, STATE

Values = Mapping[tuple[str, ...], float]

_STAT_COUNTERS: Final = {
    f"pagedkv_{name}_total": name
    for name in [
        "allocated_blocks",
        "released_blocks",
        "quarantined_blocks",
        "refused_releases",
        "published_blocks",
        "evicted_blocks",
        "copied_blocks",
        "deduplicated_blocks",
        "hash_collisions",
    ]
}


class EngineView(Protocol):
    """What is read of an engine."""

    @property
    def stats(self) -> EngineCounts:
        """Counts of requests now."""

    @property
    def is_healthy(self) -> bool:
        """False once the device has failed."""


class EngineCounts(Protocol):
    """Requests in the engine now."""

    @property
    def num_running(self) -> int:
        """In the batch."""

    @property
    def num_waiting(self) -> int:
        """In the queue."""

    @property
    def num_swapped(self) -> int:
        """In the queue, with their blocks in host memory."""


class LiveCollector:
    """Reads one cache, and one engine if there is one. `read` runs on the loop, so all figures are of one moment."""

    def __init__(self, cache: CacheManager, layout: KvLayout, backend_name: str, recorder: Recorder) -> None:
        self.engine: EngineView | None = None
        self.is_healthy: Callable[[], bool] = lambda: self.engine is None or self.engine.is_healthy
        self.backend_memory: Callable[[], Mapping[str, int]] = dict
        self._cache = cache
        self._layout = layout
        self._info = (BACKEND.bounded(backend_name), DTYPE.bounded(str(layout.shape.dtype)))
        self._recorder = recorder
        self._highest: dict[tuple[str, ...], float] = {}

    def read(self) -> dict[str, Values]:
        """Return the values of every live metric by name and label values."""
        usage, accounting = self._cache.usage(), self._cache.accounting()
        return {
            **_pool_gauges(usage, self._layout, self._info),
            **_host_gauges(usage, self._layout),
            **_accounting_gauges(accounting, usage, self._layout),
            "pagedkv_backend_memory_bytes": self._backend_memory(),
            **self._engine_gauges(),
            **{
                name: {labels: self._monotone(name, labels, value) for labels, value in values.items()}
                for name, values in _counters(self._cache.stats).items()
            },
        }

    def _backend_memory(self) -> Values:
        memory = self.backend_memory()
        return {(use,): memory.get(use, 0) for use in BACKEND_USE.values}

    def _engine_gauges(self) -> dict[str, Values]:
        stats = None if self.engine is None else self.engine.stats
        return {
            "pagedkv_num_requests_running": {(): 0 if stats is None else stats.num_running},
            "pagedkv_num_requests_waiting": {(): 0 if stats is None else stats.num_waiting},
            "pagedkv_num_requests_swapped": {(): 0 if stats is None else stats.num_swapped},
            "pagedkv_device_healthy": {(): float(self.is_healthy())},
        }

    def _monotone(self, name: str, labels: tuple[str, ...], value: float) -> float:
        """Return the value, or the highest shown before: a counter that fell would look like a restart."""
        key = (name, *labels)
        highest = self._highest.get(key, 0.0)
        if value < highest:
            self._recorder.note_fault(name)
        self._highest[key] = value = max(value, highest)
        return value


def _pool_gauges(usage: Usage, layout: KvLayout, info: tuple[str, str]) -> dict[str, Values]:
    states: dict[tuple[str, ...], float] = {(state,): getattr(usage, state) for state in STATE.values}
    return {
        "pagedkv_cache_info": {info: 1.0},
        "pagedkv_pool_blocks": {(): usage.total},
        "pagedkv_pool_bytes": {(): usage.total * layout.block_bytes},
        "pagedkv_block_size_tokens": {(): layout.block_size},
        "pagedkv_blocks": states,
        "pagedkv_state_bytes": {labels: count * layout.block_bytes for labels, count in states.items()},
        "pagedkv_kv_cache_usage_ratio": {(): (usage.private + usage.shared) / usage.total},
    }


def host_blocks(usage: Usage) -> dict[str, int]:
    """Return the host blocks by state; they sum to the host pool."""
    return {"free": usage.host_free, "private": usage.host_private, "shared": usage.host_shared}


def _host_gauges(usage: Usage, layout: KvLayout) -> dict[str, Values]:
    blocks, used = host_blocks(usage), usage.host_private + usage.host_shared
    states: dict[tuple[str, ...], float] = {(state,): blocks[state] for state in HOST_STATE.values}
    return {
        "pagedkv_host_pool_blocks": {(): usage.host_total},
        "pagedkv_host_pool_bytes": {(): usage.host_total * layout.block_bytes},
        "pagedkv_host_blocks": states,
        "pagedkv_host_state_bytes": {labels: count * layout.block_bytes for labels, count in states.items()},
        "pagedkv_host_memory_bytes": {
            ("tokens",): usage.swapped_tokens * layout.token_bytes,
            ("tail",): used * layout.block_bytes - usage.swapped_tokens * layout.token_bytes,
            ("free",): usage.host_free * layout.block_bytes,
        },
        "pagedkv_swapped_sequences": {(): usage.num_swapped},
        "pagedkv_swapped_tokens": {(): usage.swapped_tokens},
    }


def memory_by_use(accounting: Accounting, usage: Usage, layout: KvLayout) -> dict[str, int]:
    """Return the pool's bytes by what they are used for; they sum to the pool."""
    slot_bytes = layout.token_bytes
    return {
        "tokens": accounting.num_tokens * slot_bytes,
        "tail": accounting.tail_slots * slot_bytes,
        "reserved": accounting.reserved_slots * slot_bytes,
        "cached": accounting.cached_slots * slot_bytes,
        "held_back": (usage.pinned + usage.in_flight) * layout.block_bytes,
        "free": usage.free * layout.block_bytes,
    }


def _accounting_gauges(accounting: Accounting, usage: Usage, layout: KvLayout) -> dict[str, Values]:
    slot_bytes = layout.token_bytes
    saved_blocks = accounting.logical_blocks - accounting.held_blocks
    runs = accounting.free_runs
    return {
        "pagedkv_memory_bytes": {(use,): size for use, size in memory_by_use(accounting, usage, layout).items()},
        "pagedkv_token_occupancy_ratio": {(): accounting.token_occupancy},
        "pagedkv_internal_fragmentation_ratio": {(): accounting.internal_fragmentation},
        "pagedkv_external_fragmentation_ratio": {(): accounting.external_fragmentation},
        "pagedkv_largest_free_run_blocks": {(): runs.largest},
        "pagedkv_free_runs": {
            (str(1 << k),): runs.histogram[k] if k < len(runs.histogram) else 0 for k in range(usage.total.bit_length())
        },
        "pagedkv_contiguous_bytes": {
            ("max",): accounting.contiguous_max * slot_bytes,
            ("pow2",): accounting.contiguous_pow2 * slot_bytes,
            ("oracle",): accounting.contiguous_oracle * slot_bytes,
        },
        "pagedkv_sequences": {(): accounting.num_sequences},
        "pagedkv_tokens": {("physical",): accounting.num_tokens, ("logical",): accounting.logical_tokens},
        "pagedkv_held_blocks": {(): accounting.held_blocks},
        "pagedkv_logical_blocks": {(): accounting.logical_blocks},
        "pagedkv_sharing_factor": {(): accounting.sharing_ratio},
        "pagedkv_memory_saved_ratio": {(): accounting.memory_saved},
        "pagedkv_memory_saved_bytes": {(): saved_blocks * layout.block_bytes},
    }


def _counters(stats: CacheStats) -> dict[str, Values]:
    return {
        "pagedkv_prefix_cache_queries_total": {
            ("prompt",): stats.queried_tokens,
            ("recompute",): stats.recompute_queried_tokens,
        },
        "pagedkv_prefix_cache_hits_total": {
            ("prompt",): stats.hit_tokens,
            ("recompute",): stats.recompute_hit_tokens,
        },
        "pagedkv_swapped_blocks_total": {("in",): stats.swapped_in_blocks, ("out",): stats.swapped_out_blocks},
        "pagedkv_allocation_failures_total": {("out_of_blocks",): stats.failed_allocations, ("quota",): 0},
        **{name: {(): getattr(stats, field)} for name, field in _STAT_COUNTERS.items()},
    }
