"""The KvCache service: requests checked, planned against the cache, run as one device job, answered."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from pagedkv.cache import CacheManager, PrefixExtras, Reservation, SwapPlan
from pagedkv.cache.live import MAX_ID_LENGTH
from pagedkv.compute.backend import Backend
from pagedkv.compute.swap import submit_swap
from pagedkv.config import MAX_SALT_BYTES, check_length, require
from pagedkv.errors import DeviceLost, InvalidArgument, QuotaExceeded
from pagedkv.rpc.attend import AttendCall, Attended, AttendPlan, plan_attend, read_attend, run_plans, slots_of
from pagedkv.rpc.batcher import Batcher, Call
from pagedkv.rpc.convert import to_attend_answer, to_cache_info, to_sequence_message, to_usage_message
from pagedkv.rpc.intake import TensorRequest
from pagedkv.rpc.interceptors import RpcObserver
from pagedkv.rpc.limits import (
    MAX_PAGE_TOKEN_LENGTH,
    MAX_REQUEST_ID_LENGTH,
    MAX_SEQUENCES,
    MAX_SWAPPED_BLOCKS,
    CacheLimits,
    check_answer,
)
from pagedkv.rpc.requests import (
    Array,
    check_own_id,
    check_sequence_ids,
    continues,
    read_new_rows,
    read_token_ids,
)
from pagedkv.rpc.retries import RetryMemory
from pagedkv.v1 import kv_cache_pb2, kv_cache_pb2_grpc

WaitingCall = Call[AttendCall, Attended]
_MAX_PAGE_SIZE, _DEFAULT_PAGE_SIZE = 1000, 100
_MAX_PLANNED = 512  # calls planned at a time
_ENTRY_BYTES = 64  # that a sequence in a page takes besides its message, and a page besides its sequences


class KvCacheService(kv_cache_pb2_grpc.KvCacheServicer):
    """Handlers run on the event loop that owns the cache; between planning and commit nothing is awaited."""

    def __init__(
        self,
        cache: CacheManager,
        backend: Backend,
        observer: RpcObserver,
        limits: CacheLimits,
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._observer = observer
        self._backend = backend
        self._layout = backend.layout
        self._shape = backend.layout.shape
        self._retries = RetryMemory()
        self._auditing = asyncio.Lock()  # one copy of the state at a time
        self._batcher: Batcher[AttendCall, Attended] = Batcher(self._launch)

    # -- sequences ----------------------------------------------------------------------------------------------

    async def GetCacheInfo(self, request: Any, context: Any) -> kv_cache_pb2.GetCacheInfoResponse:
        """Describe the pool."""
        config = self._cache.config
        return to_cache_info(self._layout, self._backend.name, config.sequence_limit, config.num_host_blocks)

    async def Allocate(self, request: kv_cache_pb2.AllocateRequest, context: Any) -> Any:
        """Start a sequence on its cached prefix."""
        self._backend.health.check()
        check_length("request_id", request.request_id, MAX_REQUEST_ID_LENGTH)
        if (answer := self._retries.find(request.request_id, request)) is not None:
            return answer
        check_own_id("sequence_id", request.sequence_id)
        check_length("salt", request.salt, MAX_SALT_BYTES)
        self._cache.check_length(len(request.token_ids))
        token_ids = read_token_ids(request.token_ids)
        extras = PrefixExtras(salt=request.salt if request.HasField("salt") else None)
        self._check_room(len(request.token_ids))
        made = self._cache.allocate(request.sequence_id, token_ids, extras=extras)
        answer = kv_cache_pb2.AllocateResponse(cached_token_count=made.num_cached_tokens)
        self._remember(request, answer, request.sequence_id, made.num_cached_tokens)
        return answer

    async def Fork(self, request: kv_cache_pb2.ForkRequest, context: Any) -> Any:
        """Start a sequence that shares all blocks of another."""
        self._backend.health.check()
        check_length("request_id", request.request_id, MAX_REQUEST_ID_LENGTH)
        if (answer := self._retries.find(request.request_id, request)) is not None:
            return answer
        check_own_id("parent_id", request.parent_id)
        check_own_id("child_id", request.child_id)
        self._check_room(self._cache.length(request.parent_id))
        self._cache.fork(request.parent_id, request.child_id)
        num_tokens = self._cache.length(request.child_id)
        answer = kv_cache_pb2.ForkResponse(token_count=num_tokens)
        self._remember(request, answer, request.child_id, num_tokens)
        return answer

    def _check_room(self, num_tokens: int) -> None:
        """Refuse a sequence beyond what may live, or whose tokens would be."""
        for field, value in (
            ("max_sequences", self._cache.num_sequences + 1),
            ("max_known_tokens", self._cache.num_known_tokens + num_tokens),
        ):
            limit = getattr(self._limits, field)
            if value > limit:
                raise QuotaExceeded(f"{field} is {limit}, would be {value}", field=field, value=value, limit=limit)

    def _remember(self, request: Any, answer: Message, sequence_id: str, num_tokens: int) -> None:
        self._retries.remember(request.request_id, request, answer, sequence_id=sequence_id, num_tokens=num_tokens)

    async def Truncate(self, request: kv_cache_pb2.TruncateRequest, context: Any) -> kv_cache_pb2.TruncateResponse:
        """Keep the first tokens only."""
        check_own_id("sequence_id", request.sequence_id)
        longest = self._cache.written(request.sequence_id)
        count = request.token_count
        require(0 <= count <= longest, "token_count", f"must be in [0, {longest}]", count, longest)
        self._cache.truncate(request.sequence_id, count)
        self._retries.note_truncated(request.sequence_id, count)
        return kv_cache_pb2.TruncateResponse()

    async def Free(self, request: kv_cache_pb2.FreeRequest, context: Any) -> kv_cache_pb2.FreeResponse:
        """End sequences."""
        check_sequence_ids(request.sequence_ids)
        self._cache.free_batch(request.sequence_ids)
        self._retries.note_freed(request.sequence_ids)
        return kv_cache_pb2.FreeResponse()

    async def SwapOut(self, request: kv_cache_pb2.SwapOutRequest, context: Any) -> kv_cache_pb2.SwapOutResponse:
        """Move sequences to host memory."""
        self._check_swap(request.sequence_ids)
        plan = self._cache.swap_out(request.sequence_ids)
        return kv_cache_pb2.SwapOutResponse(**await self._swap("out", plan))

    async def SwapIn(self, request: kv_cache_pb2.SwapInRequest, context: Any) -> kv_cache_pb2.SwapInResponse:
        """Move sequences back."""
        self._check_swap(request.sequence_ids)
        plan = self._cache.swap_in(request.sequence_ids)
        return kv_cache_pb2.SwapInResponse(**await self._swap("in", plan))

    def _check_swap(self, sequence_ids: Sequence[str]) -> None:
        """Refuse what takes long to plan; one sequence, however long, is moved by itself."""
        self._backend.health.check()
        check_sequence_ids(sequence_ids)
        num_blocks, limit = sum(map(self._cache.table_length, sequence_ids)), MAX_SWAPPED_BLOCKS
        fits = num_blocks <= limit or len(sequence_ids) == 1
        require(fits, "sequence_ids", f"must hold at most {limit} blocks together", num_blocks, limit)

    async def _swap(self, direction: str, plan: SwapPlan) -> dict[str, int]:
        """Run a plan's copies and return the fields of the answer."""
        num_bytes = len(plan.pairs) * self._layout.block_bytes
        if plan.pairs:
            done = asyncio.wrap_future(submit_swap(self._backend, direction, plan.pairs))
            done.add_done_callback(lambda job: self._note_swap(direction, num_bytes, job))
            try:
                await _completed(done)
            except Exception:
                self._backend.health.check()
                raise
        return {"block_count": len(plan.pairs), "byte_count": num_bytes, "kept_block_count": plan.num_kept}

    def _note_swap(self, direction: str, num_bytes: int, done: asyncio.Future[float]) -> None:
        """Tell of a swap's end. One that failed is final: what it should have copied is nowhere else."""
        error = None if done.cancelled() else done.exception()
        if error is not None:
            lost = DeviceLost("blocks could not be swapped; see the log")
            lost.__cause__ = error
            self._backend.health.fail(lost)
        elif not done.cancelled():
            self._observer.on_swap(direction, num_bytes, done.result())

    async def GetSequence(self, request: Any, context: Any) -> kv_cache_pb2.GetSequenceResponse:
        """Describe one sequence."""
        check_length("sequence_id", request.sequence_id, MAX_ID_LENGTH)
        view = self._cache.sequence(request.sequence_id)
        answer = kv_cache_pb2.GetSequenceResponse(sequence=to_sequence_message(view))
        check_answer("sequence_id", answer.ByteSize(), self._limits.max_message_bytes)
        return answer

    async def ListSequences(self, request: Any, context: Any) -> kv_cache_pb2.ListSequencesResponse:
        """List live sequences by pages; the token is when the last one of the page before was created.

        A page ends early where the answer would become larger than a message may be.
        """
        size, limit = request.page_size, _MAX_PAGE_SIZE
        require(0 <= size <= limit, "page_size", f"must be in [0, {limit}]", size, limit)
        check_length("page_token", request.page_token, MAX_PAGE_TOKEN_LENGTH)
        ids = self._cache.sequence_ids()
        start = self._page_start(ids, request.page_token) if request.page_token else 0
        end = start + (size or _DEFAULT_PAGE_SIZE)
        page = [to_sequence_message(self._cache.summary(name)) for name in ids[start:end]]
        page = page[: _num_fitting(page, self._limits.max_message_bytes)]
        is_last = start + len(page) >= len(ids)
        token = "" if is_last else self._cache.summary(ids[start + len(page) - 1]).created_at.hex()
        return kv_cache_pb2.ListSequencesResponse(sequences=page, next_page_token=token)

    def _page_start(self, ids: Sequence[str], page_token: str) -> int:
        """Return where the page begins, the last one of the page before may be gone."""
        try:
            created_at = float.fromhex(page_token)
        except (ValueError, OverflowError):
            raise InvalidArgument("is not from a page before", field="page_token", value=page_token) from None
        return bisect.bisect_right(ids, created_at, key=lambda name: self._cache.summary(name).created_at)

    async def GetUsage(self, request: Any, context: Any) -> kv_cache_pb2.GetUsageResponse:
        """Count blocks by state."""
        return to_usage_message(self._cache.usage())

    async def Audit(self, request: Any, context: Any) -> kv_cache_pb2.AuditResponse:
        """Recompute and compare everything, on a copy and off the loop; only a repair holds up other calls."""
        async with self._auditing:
            is_sound = await asyncio.to_thread(self._cache.begin_audit())
        findings = () if is_sound else self._cache.audit().findings
        return kv_cache_pb2.AuditResponse(ok=not findings, findings=findings)

    # -- tokens -------------------------------------------------------------------------------------------------

    async def Append(
        self, arrived: TensorRequest[kv_cache_pb2.AppendRequest], context: Any
    ) -> kv_cache_pb2.AppendResponse:
        """Write K and V of new tokens of one layer or of all."""
        self._backend.health.check()
        request = arrived.message
        check_own_id("sequence_id", request.sequence_id)
        layer = request.layer if request.HasField("layer") else None
        keys, values = await arrived.read(read_new_rows, layer, self._shape)
        num_tokens = keys.shape[0] if layer is not None else keys.shape[1]
        require(num_tokens >= 1, "keys.shape", "must hold at least one token", list(keys.shape), 1)
        token_ids = read_token_ids(request.token_ids, num_tokens)
        length = self._cache.length(request.sequence_id, layer)
        position = request.position if request.HasField("position") else length
        if not continues(position, num_tokens, length):
            return kv_cache_pb2.AppendResponse(token_count=length)
        reservation = self._cache.reserve(request.sequence_id, num_tokens, layer=layer, token_ids=token_ids)
        slots = slots_of(self._cache, self._layout, request.sequence_id, reservation.start, num_tokens)
        written = asyncio.wrap_future(self._backend.submit(lambda: self._write(reservation, keys, values, slots)))
        self._cache.commit(reservation)
        written.add_done_callback(lambda job: self._take_back_if_failed(job, (reservation,), slots))
        await _completed(written)
        return kv_cache_pb2.AppendResponse(token_count=length + num_tokens)

    async def Attend(self, arrived: TensorRequest[kv_cache_pb2.AttendRequest], context: Any) -> bytes:
        """Attend queries to sequences, after writing their newest K and V if given; the answer is ready to be sent."""
        return await self._attend(arrived)

    async def Step(
        self, requests: AsyncIterator[TensorRequest[kv_cache_pb2.AttendRequest]], context: Any
    ) -> AsyncIterator[bytes]:
        """Attend, request after request."""
        async for arrived in requests:
            yield await self._attend(arrived)

    async def _attend(self, arrived: TensorRequest[kv_cache_pb2.AttendRequest]) -> bytes:
        self._backend.health.check()
        call = await arrived.read(read_attend, self._shape, self._limits.max_message_bytes)
        done = await self._batcher.run(call)
        return to_attend_answer(done.output, done.lse, done.seconds)

    # -- launching ----------------------------------------------------------------------------------------------

    def _launch(self, calls: Sequence[WaitingCall]) -> tuple[list[WaitingCall], asyncio.Future[Any] | None]:
        """Run the calls in as few jobs as they allow; those that write to a sequence already written to are left.

        So are those behind what can be planned without holding the loop up.
        All is committed after all is planned: a commit may give duplicate blocks back, which must not be handed out
        to a later plan of the same job.
        """
        left: list[WaitingCall] = []
        written: set[str] = set()
        groups: dict[tuple[object, ...], list[tuple[WaitingCall, AttendPlan]]] = {}
        num_planned = _num_together(calls)
        for call in calls[:num_planned]:
            if call.request.rows is not None and not written.isdisjoint(call.request.ids):
                left.append(call)
            elif (plan := self._plan(call)) is not None:
                written.update(reservation.sequence_id for reservation in plan.reservations)
                groups.setdefault(plan.key, []).append((call, plan))
        work = [self._submit(group) for group in groups.values()]
        for group in groups.values():
            for _, plan in group:
                self._cache.commit_batch(plan.reservations)
        left += calls[num_planned:]
        return left, asyncio.gather(*work, return_exceptions=True) if work else None

    def _plan(self, call: WaitingCall) -> AttendPlan | None:
        """Plan a call; one that is refused is answered at once and holds up nobody."""
        try:
            self._backend.health.check()
            return plan_attend(call.request, self._cache, self._layout)
        except Exception as error:
            call.answer.set_exception(error)
            return None

    def _submit(self, group: Sequence[tuple[WaitingCall, AttendPlan]]) -> asyncio.Future[None]:
        plans = [plan for _, plan in group]
        return asyncio.ensure_future(
            self._answer(group, asyncio.wrap_future(self._backend.submit(lambda: run_plans(self._backend, plans))))
        )

    async def _answer(
        self, group: Sequence[tuple[WaitingCall, AttendPlan]], result: asyncio.Future[list[Attended]]
    ) -> None:
        """Answer the calls of a job that are still waited for; one that failed is done again call by call."""
        try:
            answers = await result
        except Exception as error:
            if len(group) > 1 and self._backend.health.failure is None:
                for member in group:
                    await self._submit([member])
                return
            for call, plan in group:
                self._take_back_if_failed(
                    result, plan.reservations, () if plan.rows is None else plan.rows.slot_mapping
                )
                if not call.answer.done():
                    call.answer.set_exception(error)
            return
        for (call, _), answer in zip(group, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(answer)

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

    def _take_back_if_failed(
        self, job: asyncio.Future[Any], reservations: Sequence[Reservation], slots: Iterable[int]
    ) -> None:
        """Have the cache distrust what a failed job was to write; its sequences are as long as before it.

        A copy that came before the write is in doubt as well, and with it the block's earlier tokens.
        """
        if job.cancelled() or job.exception() is None:
            return
        intact = {made.sequence_id: made.start for made in reservations if not made.copies}
        blocks = {int(slot) // self._layout.block_size for slot in slots if slot >= 0}
        self._cache.distrust(sorted(blocks), intact)


def _num_fitting(page: Sequence[kv_cache_pb2.Sequence], max_bytes: int) -> int:
    """Return how many leading sequences fit into an answer, at least one."""
    ends = itertools.accumulate(message.ByteSize() + _ENTRY_BYTES for message in page)
    return max(1, sum(end <= max_bytes - _ENTRY_BYTES for end in ends))


def _num_together(calls: Sequence[WaitingCall]) -> int:
    """Return how many leading calls are planned at a time, at least one."""
    ends = itertools.accumulate(len(call.request.ids) for call in calls[:_MAX_PLANNED])
    return max(1, sum(end <= MAX_SEQUENCES for end in ends))


async def _completed(job: asyncio.Future[Any]) -> None:
    """Await a job. The caller may go, but what is committed must be written."""
    try:
        await asyncio.shield(job)
    except asyncio.CancelledError:
        job.add_done_callback(lambda job: job.cancelled() or job.exception())  # somebody has looked
        raise
