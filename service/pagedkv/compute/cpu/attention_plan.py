"""How one attention batch is cut into work items: queries into units, long contexts into parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cpu import attention_args as at

_ITEMS_PER_THREAD: Final = 16  # enough that threads end together, few enough that merging costs nothing
_LAST_ITEMS_PER_THREAD: Final = 3  # claimed when a thread is free, so that none waits behind a long one
_SHORTEST_PART: Final = 256  # tokens

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What cutting depends on besides the batch."""

    block_size: int
    chunk_tokens: int
    num_kv_heads: int
    unit_queries: int  # most queries of one item
    num_threads: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Records of the work items, and the arrays whose addresses they hold."""

    records: Words  # [num_units, ITEM_WORDS]
    counters: Words  # parts still to come of each split unit
    partial_queries: int  # queries that leave partial results, each counted once a part
    tables: npt.NDArray[np.int32]
    batch: AttentionBatch  # a copy, by which a repeated batch is known
    window: int | None
    num_items: int  # work items: KV heads of units
    num_claimed_early: int  # of these, the first whose successor is claimed ahead of time

    def serves(self, batch: AttentionBatch, window: int | None) -> bool:
        """Whether this plan was made from an equal batch."""
        mine = self.batch
        return (
            window == self.window
            and _are_equal(batch.context_lens, mine.context_lens)
            and _are_equal(batch.query_starts, mine.query_starts)
            and _are_equal(batch.block_tables, mine.block_tables)
        )


def make_plan(batch: AttentionBatch, window: int | None, limits: PlanLimits) -> AttentionPlan:
    """Cut a batch that passed validation; the order is longest item first."""
    tables = np.array(batch.block_tables, dtype=np.int32, order="C")
    starts, contexts = batch.query_starts.astype(np.int64), batch.context_lens.astype(np.int64)
    query_lens = np.diff(starts)
    sequence, index = _spread(-(-query_lens // limits.unit_queries))
    first_query = index * limits.unit_queries
    num_queries = np.minimum(limits.unit_queries, query_lens[sequence] - first_query)
    position = contexts[sequence] - query_lens[sequence] + first_query
    oldest = np.zeros_like(position) if window is None else np.maximum(0, position - window + 1)
    first_token = oldest // limits.block_size * limits.block_size
    stop_token = position + num_queries

    part_tokens = _part_tokens(int((stop_token - first_token).sum()), limits)
    num_parts = -(-(stop_token - first_token) // part_tokens)
    unit, part = _spread(num_parts)
    is_split = num_parts > 1
    partial_queries = np.where(is_split, num_parts * num_queries, 0)
    records = np.empty((len(unit), at.ITEM_WORDS), np.int64)
    columns = {
        at.ITEM_FIRST_QUERY: (starts[sequence] + first_query)[unit],
        at.ITEM_NUM_QUERIES: num_queries[unit],
        at.ITEM_POSITION: position[unit],
        at.ITEM_FIRST_TOKEN: first_token[unit] + part * part_tokens,
        at.ITEM_STOP_TOKEN: np.minimum(stop_token[unit], first_token[unit] + (part + 1) * part_tokens),
        at.ITEM_TABLE: tables.ctypes.data + sequence[unit] * tables.strides[0],
        at.ITEM_PART: np.where(is_split[unit], part, -1),
        at.ITEM_FIRST_PARTIAL: (np.cumsum(partial_queries) - partial_queries)[unit],
        at.ITEM_NUM_PARTS: num_parts[unit],
        at.ITEM_COUNTER: unit,
    }
    for offset, column in columns.items():
        records[:, offset // 8] = column
    cost = (records[:, at.ITEM_STOP_TOKEN // 8] - records[:, at.ITEM_FIRST_TOKEN // 8]) * num_queries[unit]
    records = np.ascontiguousarray(records[np.argsort(-cost, kind="stable")])
    copy = AttentionBatch(tables, batch.context_lens.copy(), batch.query_starts.copy())
    counters = np.repeat(num_parts, limits.num_kv_heads)
    num_items = len(records) * limits.num_kv_heads
    num_early = max(0, num_items - _LAST_ITEMS_PER_THREAD * limits.num_threads)
    return AttentionPlan(records, counters, int(partial_queries.sum()), tables, copy, window, num_items, num_early)


def _are_equal(given: npt.NDArray[Any], mine: npt.NDArray[Any]) -> bool:
    """np.array_equal with less around it; a batch that was not checked yet may hold anything."""
    if not isinstance(given, np.ndarray) or given.shape != mine.shape:
        return False
    return bool(np.logical_and.reduce(given == mine, axis=None))


def _spread(counts: Words) -> tuple[Words, Words]:
    """Return, for each of sum(counts) members, the group it is of and its number within the group."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)


def _part_tokens(total_tokens: int, limits: PlanLimits) -> int:
    wanted = total_tokens * limits.num_kv_heads // (limits.num_threads * _ITEMS_PER_THREAD)
    step = limits.chunk_tokens
    return max(_SHORTEST_PART, -(-wanted // step) * step)
