"""The KvCache service: requests checked, planned against the cache, run as one device job, answered."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pagedkv.cache import CacheManager, PrefixExtras, Reservation, ReserveRequest
from pagedkv.compute.backend import AttentionBatch, Backend
from pagedkv.config import require
from pagedkv.errors import DeviceError, InvalidArgument, PagedKvError, PositionMismatch
from pagedkv.rpc.convert import (
    check_shape,
    to_array,
    to_attention_params,
    to_cache_info,
    to_sequence_message,
    to_tensor,
    to_usage_message,
)
from pagedkv.rpc.retries import RetryMemory
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

T = TypeVar("T")
Array = npt.NDArray[Any]
_RESERVED_PREFIX = "~"  # ids of the engine's own sequences
_MAX_PAGE_SIZE, _DEFAULT_PAGE_SIZE = 1000, 100


@dataclass(frozen=True, slots=True)
class _AttendPlan:
    """What one Attend does: blocks to copy, rows to write, and the batch to attend."""

    layer: int
    queries: Array
    batch: AttentionBatch
    copies: list[tuple[int, int]]
    keys: Array | None
    values: Array | None
    slot_mapping: npt.NDArray[np.int64]


class KvCacheService(kv_cache_pb2_grpc.KvCacheServicer):
    """Handlers run on the event loop that owns the cache; between planning and commit nothing is awaited."""

    def __init__(self, cache: CacheManager, backend: Backend, on_device_failure: Callable[[], None]) -> None:
        self._cache = cache
        self._backend = backend
        self._layout = backend.layout
        self._shape = backend.layout.shape
        self._on_device_failure = on_device_failure
        self._failure: DeviceError | None = None
        self._retries = RetryMemory()

    # -- sequences ----------------------------------------------------------------------------------------------

    async def GetCacheInfo(self, request: Any, context: Any) -> kv_cache_pb2.GetCacheInfoResponse:
        """Describe the pool."""
        return to_cache_info(self._layout, self._backend.name, self._cache.config.sequence_limit)

    async def Allocate(self, request: kv_cache_pb2.AllocateRequest, context: Any) -> Any:
        """Start a sequence on its cached prefix."""
        self._check_device()
        if (answer := self._retries.find(request.request_id, request)) is not None:
            return answer
        _check_own_id("sequence_id", request.sequence_id)
        _check_token_ids(request.token_ids)
        extras = PrefixExtras(salt=request.salt if request.HasField("salt") else None)
        token_ids = request.token_ids if len(request.token_ids) else None
        made = self._cache.allocate(request.sequence_id, token_ids, extras=extras)
        answer = kv_cache_pb2.AllocateResponse(cached_token_count=made.num_cached_tokens)
        self._retries.remember(request.request_id, request, answer)
        return answer

    async def Fork(self, request: kv_cache_pb2.ForkRequest, context: Any) -> Any:
        """Start a sequence that shares all blocks of another."""
        if (answer := self._retries.find(request.request_id, request)) is not None:
            return answer
        _check_own_id("parent_id", request.parent_id)
        _check_own_id("child_id", request.child_id)
        self._cache.fork(request.parent_id, request.child_id)
        answer = kv_cache_pb2.ForkResponse(token_count=self._cache.length(request.child_id))
        self._retries.remember(request.request_id, request, answer)
        return answer

    async def Truncate(self, request: kv_cache_pb2.TruncateRequest, context: Any) -> kv_cache_pb2.TruncateResponse:
        """Keep the first tokens only."""
        _check_own_id("sequence_id", request.sequence_id)
        longest = max(self._cache.sequence(request.sequence_id).layer_lengths)
        count = request.token_count
        require(0 <= count <= longest, "token_count", f"must be in [0, {longest}]", count, longest)
        self._cache.truncate(request.sequence_id, count)
        return kv_cache_pb2.TruncateResponse()

    async def Free(self, request: kv_cache_pb2.FreeRequest, context: Any) -> kv_cache_pb2.FreeResponse:
        """End sequences."""
        _check_sequence_ids(request.sequence_ids)
        self._cache.free_batch(request.sequence_ids)
        return kv_cache_pb2.FreeResponse()

    async def GetSequence(self, request: Any, context: Any) -> kv_cache_pb2.GetSequenceResponse:
        """Describe one sequence."""
        view = self._cache.sequence(request.sequence_id)
        return kv_cache_pb2.GetSequenceResponse(sequence=to_sequence_message(view, full=True))

    async def ListSequences(self, request: Any, context: Any) -> kv_cache_pb2.ListSequencesResponse:
        """List live sequences by pages; the token is when the last one of the page before was created."""
        size, limit = request.page_size, _MAX_PAGE_SIZE
        require(0 <= size <= limit, "page_size", f"must be in [0, {limit}]", size, limit)
        size = size or _DEFAULT_PAGE_SIZE
        ids = self._cache.sequence_ids()
        start = self._page_start(ids, request.page_token) if request.page_token else 0
        page = [self._cache.sequence(name) for name in ids[start : start + size]]
        return kv_cache_pb2.ListSequencesResponse(
            sequences=[to_sequence_message(view, full=False) for view in page],
            next_page_token=page[-1].created_at.hex() if start + size < len(ids) else "",
        )

    def _page_start(self, ids: Sequence[str], page_token: str) -> int:
        """Return where the page begins, the last one of the page before may be gone."""
        try:
            created_at = float.fromhex(page_token)
        except (ValueError, OverflowError):
            raise InvalidArgument("is not from a page before", field="page_token", value=page_token) from None
        return bisect.bisect_right(ids, created_at, key=lambda name: self._cache.sequence(name).created_at)

    async def GetUsage(self, request: Any, context: Any) -> kv_cache_pb2.GetUsageResponse:
        """Count blocks by state."""
        return to_usage_message(self._cache.usage())

    async def Audit(self, request: Any, context: Any) -> kv_cache_pb2.AuditResponse:
        """Recompute and compare everything."""
        report = self._cache.audit()
        return kv_cache_pb2.AuditResponse(ok=report.ok, findings=report.findings)

    # -- tokens -------------------------------------------------------------------------------------------------

    async def Append(self, request: kv_cache_pb2.AppendRequest, context: Any) -> kv_cache_pb2.AppendResponse:
        """Write K and V of new tokens of one layer or of all."""
        self._check_device()
        _check_own_id("sequence_id", request.sequence_id)
        layer = request.layer if request.HasField("layer") else None
        keys, values = self._read_new_rows(request, layer)
        num_tokens = keys.shape[0] if layer is not None else keys.shape[1]
        require(num_tokens >= 1, "keys.shape", "must hold at least one token", list(keys.shape), 1)
        token_ids = _read_token_ids(request.token_ids, num_tokens)
        length = self._cache.length(request.sequence_id, layer)
        position = request.position if request.HasField("position") else length
        if not _is_new(position, num_tokens, length):
            return kv_cache_pb2.AppendResponse(token_count=length)
        reservation = self._cache.reserve(request.sequence_id, num_tokens, layer=layer, token_ids=token_ids)
        slots = self._slots(request.sequence_id, reservation.start, num_tokens)
        future = self._backend.submit(lambda: self._write(reservation, keys, values, slots))
        self._cache.commit(reservation)
        await self._completed(future)
        return kv_cache_pb2.AppendResponse(token_count=length + num_tokens)

    async def Attend(self, request: kv_cache_pb2.AttendRequest, context: Any) -> kv_cache_pb2.AttendResponse:
        """Attend queries to sequences, after writing their newest K and V if given."""
        return await self._attend(request)

    async def Step(self, request_iterator: Any, context: Any) -> AsyncIterator[kv_cache_pb2.AttendResponse]:
        """Attend, request after request."""
        async for request in request_iterator:
            yield await self._attend(request)

    async def _attend(self, request: kv_cache_pb2.AttendRequest) -> kv_cache_pb2.AttendResponse:
        self._check_device()
        params = to_attention_params(request.options, self._shape)
        plan, reservations = self._plan_attend(request)

        def job() -> tuple[Array, Array, float]:
            started = time.perf_counter()
            if plan.copies:
                self._backend.copy_blocks(plan.copies)
            if plan.keys is not None and len(plan.slot_mapping):
                self._write_rows(plan.layer, plan.keys, plan.values, plan.slot_mapping)
            result = self._backend.attend(plan.layer, self._backend.from_host(plan.queries), plan.batch, params)
            output, lse = self._backend.to_host(result.output), self._backend.to_host(result.lse)
            return output, lse, time.perf_counter() - started

        future = self._backend.submit(job)
        self._cache.commit_batch(reservations)
        output, lse, seconds = await self._completed(future)
        return kv_cache_pb2.AttendResponse(output=to_tensor(output), lse=to_tensor(lse), compute_seconds=seconds)

    # -- planning -----------------------------------------------------------------------------------------------

    def _plan_attend(self, request: kv_cache_pb2.AttendRequest) -> tuple[_AttendPlan, list[Reservation]]:
        """Check everything, then reserve what has to be written."""
        layer = request.layer
        require(
            0 <= layer < self._shape.num_layers,
            "layer",
            f"must be in [0, {self._shape.num_layers})",
            layer,
            self._shape.num_layers,
        )
        ids = list(request.sequence_ids)
        _check_sequence_ids(ids)
        query_lengths = _read_query_lengths(request.query_lengths, len(ids))
        num_queries = sum(query_lengths)
        queries = to_array(request.queries, "queries")
        check_shape(queries, "queries", (num_queries, self._shape.num_heads, self._shape.head_dim))
        require(not np.isnan(queries).any(), "queries.data", "must hold no NaN", "NaN")
        lengths = [self._cache.length(name, layer) for name in ids]
        if not request.HasField("keys") and not request.HasField("values"):
            for at, (asked, length) in enumerate(zip(query_lengths, lengths, strict=True)):
                require(asked <= length, f"query_lengths[{at}]", "exceeds the sequence's length", asked, length)
            return self._plan(layer, queries, ids, query_lengths, lengths, [], None, None), []
        keys, values = self._read_new_rows(request, layer)
        require(keys.shape[0] == num_queries, "keys.shape", "must hold one row a query", keys.shape[0], num_queries)
        return self._plan_writing(request, layer, queries, keys, values, ids, query_lengths, lengths)

    def _plan_writing(
        self,
        request: kv_cache_pb2.AttendRequest,
        layer: int,
        queries: Array,
        keys: Array,
        values: Array,
        ids: list[str],
        query_lengths: list[int],
        lengths: list[int],
    ) -> tuple[_AttendPlan, list[Reservation]]:
        positions = list(request.positions) or lengths
        require(len(positions) == len(ids), "positions", "must hold one a sequence", len(positions), len(ids))
        token_ids = _read_token_ids(request.token_ids, len(queries))
        starts = np.concatenate(([0], np.cumsum(query_lengths))).tolist()
        is_new = [
            asked > 0 and _is_new(position, asked, length, field=f"positions[{at}]")
            for at, (position, asked, length) in enumerate(zip(positions, query_lengths, lengths, strict=True))
        ]
        wanted = [
            ReserveRequest(
                ids[at], query_lengths[at], layer, None if token_ids is None else token_ids[starts[at] : starts[at + 1]]
            )
            for at in range(len(ids))
            if is_new[at]
        ]
        reservations = self._cache.reserve_batch(wanted) if wanted else []
        ends = [position + asked for position, asked in zip(positions, query_lengths, strict=True)]
        ends = [end if asked else length for end, asked, length in zip(ends, query_lengths, lengths, strict=True)]
        slots = np.full(len(queries), -1, dtype=np.int64)  # -1: a retried row, there already
        for at, fresh in enumerate(is_new):
            if fresh:
                slots[starts[at] : starts[at + 1]] = self._slots(ids[at], positions[at], query_lengths[at])
        plan = self._plan(layer, queries, ids, query_lengths, ends, reservations, (keys, values), slots)
        return plan, reservations

    def _plan(
        self,
        layer: int,
        queries: Array,
        ids: Sequence[str],
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        reservations: Sequence[Reservation],
        rows: tuple[Array, Array] | None,
        slots: npt.NDArray[np.int64] | None,
    ) -> _AttendPlan:
        tables = [self._cache.block_table(name) for name in ids]
        padded = np.zeros((len(ids), max(1, max(map(len, tables)))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        query_starts = np.concatenate(([0], np.cumsum(query_lengths))).astype(np.int32)
        return _AttendPlan(
            layer=layer,
            queries=queries if queries.dtype == np.float32 else queries.astype(np.float32),
            batch=AttentionBatch(padded, np.array(context_lengths, dtype=np.int32), query_starts),
            copies=[copy for reservation in reservations for copy in reservation.copies],
            keys=rows[0] if rows else None,
            values=rows[1] if rows else None,
            slot_mapping=np.empty(0, dtype=np.int64) if slots is None else slots,
        )

    def _read_new_rows(self, request: Any, layer: int | None) -> tuple[Array, Array]:
        """Return K and V, of one layer or [num_layers, ...], checked against the pool's shape and each other."""
        for field in ("keys", "values"):
            require(request.HasField(field), field, "is required, keys and values come together", None)
        row = (None, self._shape.num_kv_heads, self._shape.head_dim)
        expected = row if layer is not None else (self._shape.num_layers, *row)
        if layer is not None:
            limit = self._shape.num_layers
            require(0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit)
        keys, values = to_array(request.keys, "keys"), to_array(request.values, "values")
        check_shape(keys, "keys", expected)
        check_shape(values, "values", keys.shape)
        require(values.dtype == keys.dtype, "values.data_type", f"must be that of keys ({keys.dtype})", values.dtype)
        return keys, values

    def _slots(self, sequence_id: str, start: int, num_tokens: int) -> npt.NDArray[np.int64]:
        block_size = self._layout.block_size
        table = np.array(self._cache.block_table(sequence_id), dtype=np.int64)
        positions = np.arange(start, start + num_tokens)
        return table[positions // block_size] * block_size + positions % block_size

    # -- device -------------------------------------------------------------------------------------------------

    def _write(self, reservation: Reservation, keys: Array, values: Array, slots: npt.NDArray[np.int64]) -> None:
        if reservation.copies:
            self._backend.copy_blocks(reservation.copies)
        if reservation.layer is not None:
            self._write_rows(reservation.layer, keys, values, slots)
            return
        for layer in range(self._shape.num_layers):
            self._write_rows(layer, keys[layer], values[layer], slots)

    def _write_rows(self, layer: int, keys: Array, values: Array | None, slots: npt.NDArray[np.int64]) -> None:
        self._backend.write_kv(layer, self._backend.from_host(keys), self._backend.from_host(values), slots)  # type: ignore[arg-type]

    async def _completed(self, future: Any) -> Any:
        """Await a job. What fails after all checks is the device: nothing is answered from then on."""
        result = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(result)  # the caller may go, but what is committed must be written
        except asyncio.CancelledError:
            result.add_done_callback(self._note_unread)
            raise
        except Exception as error:
            failure = self._note_failure(error)
            if isinstance(error, PagedKvError):
                raise
            raise failure from error

    def _note_unread(self, result: asyncio.Future[Any]) -> None:
        """Look at a job's end that no caller waits for any more."""
        error = None if result.cancelled() else result.exception()
        if error is not None:
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> DeviceError:
        self._failure = error if isinstance(error, DeviceError) else DeviceError("the device failed; see the log")
        self._on_device_failure()
        return self._failure

    def _check_device(self) -> None:
        if self._failure is not None:
            raise self._failure


def _is_new(position: int, num_tokens: int, length: int, *, field: str = "position") -> bool:
    """Whether rows at `position` continue a layer of this length; False for a retry of rows that are there."""
    require(position >= 0, field, "must not be negative", position, 0)
    if position == length:
        return True
    if position + num_tokens <= length:
        return False
    raise PositionMismatch("the rows do not continue the layer", position=position, expected=length)


def _check_own_id(field: str, sequence_id: str) -> None:
    require(bool(sequence_id), field, "is required", sequence_id)
    reserved = sequence_id.startswith(_RESERVED_PREFIX)
    require(not reserved, field, f'must not begin with "{_RESERVED_PREFIX}"', sequence_id)


def _check_sequence_ids(ids: Sequence[str]) -> None:
    require(len(ids) >= 1, "sequence_ids", "must hold at least one", len(ids), 1)
    seen: set[str] = set()
    for at, name in enumerate(ids):
        _check_own_id(f"sequence_ids[{at}]", name)
        require(name not in seen, f"sequence_ids[{at}]", "names a sequence twice", name)
        seen.add(name)


def _check_token_ids(token_ids: Sequence[int]) -> None:
    for at, token_id in enumerate(token_ids):
        require(token_id >= 0, f"token_ids[{at}]", "must not be negative", token_id, 0)


def _read_token_ids(token_ids: Sequence[int], num_tokens: int) -> list[int] | None:
    if not token_ids:
        return None
    require(len(token_ids) == num_tokens, "token_ids", "must hold one a token", len(token_ids), num_tokens)
    _check_token_ids(token_ids)
    return list(token_ids)


def _read_query_lengths(query_lengths: Sequence[int], num_sequences: int) -> list[int]:
    if not query_lengths:
        return [1] * num_sequences
    count = len(query_lengths)
    require(count == num_sequences, "query_lengths", "must hold one a sequence", count, num_sequences)
    for at, length in enumerate(query_lengths):
        require(length >= 0, f"query_lengths[{at}]", "must not be negative", length, 0)
    return list(query_lengths)
