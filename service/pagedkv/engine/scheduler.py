"""Which tokens are computed in the next step: continuous batching with chunked prefill.

Running requests come first, so that a stream never waits for a new prompt longer than one step; what is left of the
step's token budget goes to prompts, in order of arrival. Blocks are taken on demand. When the pool has none left, the
request that joined last gives its blocks back. Either it is computed again later from its tokens (recompute), and most
of its prefix is usually still cached, or its blocks wait in the host pool and come back as they are (swap). Preempted
requests are at the head of the queue, so they are back before any new one joins.

A step that failed is computed again request by request, each alone, so that the one it fails for is found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pagedkv.cache import CacheManager, PrefixExtras, Reservation, ReserveRequest, SwapPlan
from pagedkv.config import EngineConfig
from pagedkv.engine.state import RequestState
from pagedkv.errors import OutOfBlocks, OutOfHostBlocks

WATERMARK = 0.01  # share of the pool kept free for running requests to grow into before another one may join


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The tokens [start, start + num_tokens) of one request, computed in this step."""

    request: RequestState
    reservation: Reservation

    @property
    def produces_token(self) -> bool:
        """Whether the chunk reaches the request's last token, so that its logits give the next one."""
        return self.reservation.start + self.reservation.num_tokens == len(self.request.token_ids)


class Scheduler:
    """Owns the waiting and the running requests and their sequences in the cache."""

    def __init__(
        self,
        cache: CacheManager,
        config: EngineConfig,
        *,
        on_admitted: Callable[[RequestState], None],
        on_preempted: Callable[[RequestState, str, str, int], None],
        on_swap: Callable[[RequestState, str, SwapPlan], None],
    ) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._cache = cache
        self._config = config
        self._on_admitted = on_admitted
        self._on_preempted = on_preempted
        self._on_swap = on_swap  # must queue the plan's copies at once

    def add(self, request: RequestState) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """Forget a request and free its blocks; does nothing for one that is gone already."""
        if request in self.running:
            self.running.remove(request)
            self._cache.free(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)
            if request.is_swapped:
                self._cache.free(request.request_id)

    def schedule(self) -> list[ScheduledChunk]:
        """Reserve the next step's slots; empty if nothing can run now. The caller commits the reservations."""
        self._admit()
        while self.running:
            plan = self._plan()
            try:
                reservations = self._cache.reserve_batch([reserve for _, reserve in plan])
            except OutOfBlocks:
                self.preempt(self.running[-1])
                continue
            return [ScheduledChunk(request, made) for (request, _), made in zip(plan, reservations, strict=True)]
        return []

    def preempt(self, request: RequestState) -> None:
        """Take a running request's blocks; it goes back to the head of the queue."""
        if self._config.preemption != "swap" or not self._try_swap_out(request):
            self.recompute(request, "out_of_blocks")

    def recompute(self, request: RequestState, reason: str) -> None:
        """Drop what a running or swapped request has computed; it waits, at the head of the queue if it ran."""
        if request in self.running:
            self._put_back(request)
        request.is_swapped = False
        self._cache.free(request.request_id)
        num_tokens_lost, request.num_computed = request.num_computed, 0
        self._on_preempted(request, "recompute", reason, num_tokens_lost)

    def _put_back(self, request: RequestState) -> None:
        self.running.remove(request)
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _try_swap_out(self, request: RequestState) -> bool:
        try:
            plan = self._cache.swap_out((request.request_id,))
        except OutOfHostBlocks:
            return False
        self._put_back(request)
        request.is_swapped = True
        self._on_preempted(request, "swap", "out_of_blocks", 0)
        self._on_swap(request, "out", plan)
        return True

    def _try_swap_in(self, request: RequestState) -> bool:
        """Bring a request back if the pool can also give what its next step needs."""
        next_tokens = request.num_uncomputed
        if self._cache.swap_in_need(request.request_id, next_tokens).total > self._num_unclaimed():
            return False
        plan = self._cache.swap_in((request.request_id,), next_tokens)
        request.is_swapped = False
        self._on_swap(request, "in", plan)
        return True

    def _plan(self) -> list[tuple[RequestState, ReserveRequest]]:
        batch = [request for request in self.running if request.is_suspect][:1] or self.running
        budget = self._config.max_batch_tokens - sum(request.num_uncomputed == 1 for request in batch)
        plan = []
        for request in batch:
            num_tokens = request.num_uncomputed
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                start = request.num_computed
                token_ids = request.token_ids[start : start + num_tokens]
                plan.append((request, ReserveRequest(request.request_id, num_tokens, token_ids=token_ids)))
        return plan

    def _admit(self) -> None:
        budget = self._config.max_batch_tokens - sum(request.num_uncomputed for request in self.running)
        while self.waiting and len(self.running) < self._config.max_num_seqs and budget > 0:
            request = self.waiting[0]
            if not (self._try_swap_in(request) if request.is_swapped else self._try_allocate(request)):
                return
            self.waiting.popleft()
            self.running.append(request)
            self._on_admitted(request)
            budget -= request.num_uncomputed

    def _try_allocate(self, request: RequestState) -> bool:
        """Take the request's cached prefix if the pool can also give the rest of its tokens and leave headroom."""
        extras = PrefixExtras(salt=request.salt)
        num_cached = self._cache.probe_prefix(request.token_ids, extras)
        if self._num_blocks(len(request.token_ids) + 1 - num_cached) > self._num_unclaimed():
            return False
        is_recompute = request.num_preemptions > 0
        allocation = self._cache.allocate(
            request.request_id, request.token_ids, extras=extras, is_recompute=is_recompute
        )
        num_cached = allocation.num_cached_tokens
        if self._num_blocks(len(request.token_ids) + 1 - num_cached) > self._num_unclaimed():
            self._cache.free(request.request_id)  # the cached prefix itself was what looked available
            return False
        request.num_computed = num_cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached
        return True

    def _num_unclaimed(self) -> int:
        """Blocks the pool can give beyond what running requests need now and soon."""
        if not self.running:
            return self._cache.num_available()
        tables = (len(self._cache.block_table(request.request_id)) for request in self.running)
        needs = (self._num_blocks(len(request.token_ids)) for request in self.running)
        claimed = sum(max(0, need - held) for need, held in zip(needs, tables, strict=True))
        return self._cache.num_available() - claimed - int(WATERMARK * self._cache.config.num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.config.block_size)
