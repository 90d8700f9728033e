"""Attend calls: checked, planned against the cache, and run as one device job for all that fit together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.cache import CacheManager, Reservation, ReserveRequest
from pagedkv.compute.backend import AttentionBatch, AttentionParams, Backend, pad_block_tables
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape, require
from pagedkv.dtypes import DType
from pagedkv.rpc.convert import attend_answer_bytes, check_shape, to_array, to_attention_params
from pagedkv.rpc.intake import TensorRequest
from pagedkv.rpc.limits import check_answer
from pagedkv.rpc.requests import (
    Array,
    check_sequence_ids,
    continues,
    read_new_rows,
    read_query_lengths,
    read_token_ids,
)
from pagedkv.rpc.rows import check_storable
from pagedkv.v1 import kv_cache_pb2

_MERGED_QUERIES = 256  # calls of more queries fill a launch by themselves


@dataclass(frozen=True, slots=True)
class NewRows:
    """K and V [num_tokens, ...] to write and where; slot -1 is a retried row, there already."""

    keys: Array
    values: Array
    slot_mapping: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """What one Attend does: blocks to copy and rows to write as reserved, then queries to attend.

    Calls of equal `key` may run as one.
    """

    key: tuple[object, ...]
    layer: int
    params: AttentionParams
    queries: Array
    tables: list[npt.NDArray[np.int32]]
    context_lens: list[int]
    query_lens: list[int]
    reservations: list[Reservation]
    rows: NewRows | None


@dataclass(frozen=True, slots=True)
class Attended:
    """Output and lse of one call's queries; `job_seconds` gets the seconds of the job that it was part of."""

    output: Array
    lse: Array
    job_seconds: list[float]

    @property
    def seconds(self) -> float:
        """Seconds that the device spent on the job; valid once it is complete."""
        return self.job_seconds[0]


@dataclass(frozen=True, slots=True)
class AttendCall:
    """An Attend request, checked as far as that goes without the cache. `rows` are K and V, if there are any to write.

    `token_ids`, in order of the queries, and `positions` may be missing.
    """

    key: tuple[object, ...]
    layer: int
    params: AttentionParams
    ids: list[str]
    query_lens: list[int]
    queries: Array
    rows: tuple[Array, Array] | None
    positions: list[int] | None
    token_ids: array[int] | None


def read_attend(
    arrived: TensorRequest[kv_cache_pb2.AttendRequest], shape: KvShape, max_answer_bytes: int
) -> AttendCall:
    """Check everything that a request says by itself, the size of its answer included. Raises InvalidArgument."""
    request, layer, limit = arrived.message, arrived.message.layer, shape.num_layers
    params = to_attention_params(request.options, shape)
    require(0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit)
    check_sequence_ids(request.sequence_ids)
    ids = list(request.sequence_ids)
    query_lens = read_query_lengths(request.query_lengths, len(ids))
    num_queries = sum(query_lens)
    queries = to_array(request.queries, "queries", arrived.elements.get("queries"))
    check_shape(queries, "queries", (num_queries, shape.num_heads, shape.head_dim))
    answer_bytes = attend_answer_bytes(num_queries, shape)
    check_answer("queries.shape", answer_bytes, max_answer_bytes)
    check_storable(queries, "queries.data", DType.FLOAT32)
    writes = request.HasField("keys") or request.HasField("values")
    rows = _read_rows(arrived, num_queries, shape) if writes else None
    options = request.options.SerializeToString(deterministic=True)
    is_large = num_queries > _MERGED_QUERIES
    return AttendCall(
        key=(layer, options, object() if is_large else None),
        layer=layer,
        params=params,
        ids=ids,
        query_lens=query_lens,
        queries=queries,
        rows=rows,
        positions=_read_positions(request.positions, len(ids)) if writes else None,
        token_ids=read_token_ids(request.token_ids, num_queries) if writes else None,
    )


def _read_rows(arrived: TensorRequest[Any], num_queries: int, shape: KvShape) -> tuple[Array, Array]:
    keys, values = read_new_rows(arrived, arrived.message.layer, shape)
    require(keys.shape[0] == num_queries, "keys.shape", "must hold one row a query", keys.shape[0], num_queries)
    return keys, values


def _read_positions(positions: Sequence[int], num_sequences: int) -> list[int] | None:
    count = len(positions)
    require(count in (0, num_sequences), "positions", "must hold one a sequence", count, num_sequences)
    return list(positions) if count else None


def plan_attend(call: AttendCall, cache: CacheManager, layout: KvLayout) -> AttendPlan:
    """Check the call against the cache, then reserve what has to be written."""
    lengths = [cache.length(name, call.layer) for name in call.ids]
    cache.check_resident(call.ids)
    if call.rows is not None:
        context_lens, reservations, rows = _reserve_rows(call, lengths, cache, layout)
    else:
        context_lens, reservations, rows = lengths, [], None
        for at, (asked, length) in enumerate(zip(call.query_lens, lengths, strict=True)):
            require(asked <= length, f"query_lengths[{at}]", "exceeds the sequence's length", asked, length)
    return AttendPlan(
        key=call.key,
        layer=call.layer,
        params=call.params,
        queries=call.queries,
        tables=[np.array(cache.block_table(name), dtype=np.int32) for name in call.ids],
        context_lens=context_lens,
        query_lens=call.query_lens,
        reservations=reservations,
        rows=rows,
    )


def _reserve_rows(
    call: AttendCall, lengths: Sequence[int], cache: CacheManager, layout: KvLayout
) -> tuple[list[int], list[Reservation], NewRows]:
    """Return the context lengths after writing, what was reserved, and the rows with their slots."""
    assert call.rows is not None
    ids, query_lens, token_ids = call.ids, call.query_lens, call.token_ids
    num_queries, positions = len(call.queries), call.positions or list(lengths)
    starts = np.concatenate(([0], np.cumsum(query_lens))).tolist()
    fresh = [
        at
        for at, (position, asked, length) in enumerate(zip(positions, query_lens, lengths, strict=True))
        if asked > 0 and continues(position, asked, length, field=f"positions[{at}]")
    ]
    wanted = [
        ReserveRequest(
            ids[at],
            query_lens[at],
            call.layer,
            None if token_ids is None else token_ids[starts[at] : starts[at + 1]],
        )
        for at in fresh
    ]
    reservations = cache.reserve_batch(wanted) if wanted else []
    slots = np.full(num_queries, -1, dtype=np.int64)
    for at in fresh:
        slots[starts[at] : starts[at + 1]] = slots_of(cache, layout, ids[at], positions[at], query_lens[at])
    ends = [
        position + asked if asked else length
        for position, asked, length in zip(positions, query_lens, lengths, strict=True)
    ]
    return ends, reservations, NewRows(*call.rows, slots)


def slots_of(
    cache: CacheManager, layout: KvLayout, sequence_id: str, start: int, num_tokens: int
) -> npt.NDArray[np.int64]:
    """Return the slots of a sequence's positions [start, start + num_tokens), reserved ones included."""
    block_size = layout.block_size
    table = np.array(cache.block_table(sequence_id), dtype=np.int64)
    positions = np.arange(start, start + num_tokens)
    return table[positions // block_size] * block_size + positions % block_size


def run_plans(backend: Backend, plans: Sequence[AttendPlan]) -> list[Attended]:
    """Copy, write and attend for plans of one key, inside a device job; the answers come in the plans' order."""
    seconds: list[float] = []
    stop = backend.stopwatch(seconds.append)
    first = plans[0]
    copies = [copy for plan in plans for reservation in plan.reservations for copy in reservation.copies]
    if copies:
        backend.copy_blocks(copies)
    for plan in plans:
        if plan.rows is not None and len(plan.rows.slot_mapping):
            keys, values = backend.from_host(plan.rows.keys), backend.from_host(plan.rows.values)
            backend.write_kv(first.layer, keys, values, plan.rows.slot_mapping)
    queries = np.concatenate([plan.queries for plan in plans], dtype=np.float32) if len(plans) > 1 else first.queries
    queries = queries.astype(np.float32, copy=False)
    result = backend.attend(first.layer, backend.from_host(queries), _to_batch(plans), first.params)
    output, lse = backend.to_host(result.output), backend.to_host(result.lse)
    stop()
    ends = np.cumsum([len(plan.queries) for plan in plans])
    return [
        Attended(output[end - len(plan.queries) : end], lse[end - len(plan.queries) : end], seconds)
        for plan, end in zip(plans, ends.tolist(), strict=True)
    ]


def _to_batch(plans: Sequence[AttendPlan]) -> AttentionBatch:
    tables = [table for plan in plans for table in plan.tables]
    context_lens = [length for plan in plans for length in plan.context_lens]
    query_lens = [length for plan in plans for length in plan.query_lens]
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return AttentionBatch(pad_block_tables(tables), np.array(context_lens, dtype=np.int32), starts)
