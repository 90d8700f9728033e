"""The generation engine: a loop that schedules, computes and samples one step after another."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pagedkv.cache import CacheManager, SwapPlan
from pagedkv.compute.backend import Backend
from pagedkv.compute.swap import submit_swap
from pagedkv.config import EngineConfig, require
from pagedkv.engine.batch import build_step_input
from pagedkv.engine.observer import EngineObserver, NullObserver, StepReport
from pagedkv.engine.outbox import Outbox
from pagedkv.engine.request import FinishReason, GenerationRequest
from pagedkv.engine.sampler import FloatArray, sample_rows
from pagedkv.engine.scheduler import ScheduledChunk, Scheduler
from pagedkv.engine.state import RequestState
from pagedkv.engine.stream import GenerationStream
from pagedkv.errors import (
    DeviceLost,
    Draining,
    NumericalError,
    QuotaExceeded,
    SequenceTooLong,
)
from pagedkv.model import Decoder, ModelConfig, StepInput, Tokenizer

_log = logging.getLogger(__name__)
_NUM_CHECKED = 2**14  # ids looked at in one go: turning them into an array holds the interpreter
_LAUNCH_SECONDS = 0.001  # a job launches its kernels within this time
_BLOCKED_POLL_SECONDS = 0.02  # how soon to look again when other holders of the pool keep every request waiting


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests in the engine now; those swapped out are among the waiting."""

    num_running: int
    num_waiting: int
    num_swapped: int


class Engine:
    """Generates text for many requests at once on the cache's page pool.

    Every method is called on the event loop. Requests join and leave the batch at every step.

    What goes wrong is sorted. A row of logits, a sampler or a text that fails ends its own request. A step that fails
    on the device is taken back and computed again request by request, and ends the one that fails alone. A lost
    device, or an end of the engine's loop that nobody asked for, is final: the backend's health tells it.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        cache: CacheManager,
        decoder: Decoder,
        tokenizer: Tokenizer,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        observer: EngineObserver | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_config = model_config
        self.config = config or EngineConfig()
        self._backend = backend
        self._cache = cache
        self._decoder = decoder
        self._observer: EngineObserver = observer or NullObserver()
        has_host_pool = self.config.preemption != "swap" or cache.config.num_host_blocks > 0
        require(has_host_pool, "preemption", "needs a host pool (--swap-memory)", self.config.preemption)
        self._scheduler = Scheduler(
            cache,
            self.config,
            on_admitted=self._note_admitted,
            on_preempted=self._note_preempted,
            on_swap=self._submit_swap,
        )
        self._swaps: list[asyncio.Future[None]] = []  # queued since the last step
        self._badly_swapped: set[int] = set()  # device blocks of swaps that failed since then
        self._outbox = Outbox(self._observer)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._next_id = 0
        self._draining = False
        self._is_stopped = False

    @property
    def stats(self) -> EngineStats:
        """Counts of requests now."""
        waiting = self._scheduler.waiting
        num_swapped = sum(request.is_swapped for request in waiting)
        return EngineStats(len(self._scheduler.running), len(waiting), num_swapped)

    @property
    def is_healthy(self) -> bool:
        """False from the moment the device, or the engine itself, is lost."""
        return self._backend.health.failure is None

    @property
    def max_model_len(self) -> int:
        """Most tokens that a prompt and its output may have together."""
        limits = (self.model_config.context_length, self._cache.config.sequence_limit, self.config.max_model_len)
        return min(limit for limit in limits if limit is not None)

    async def start(self) -> None:
        """Start the loop."""
        self._loop = asyncio.get_running_loop()
        self._backend.health.watch_on(self._loop, self._end_all)
        self._task = asyncio.create_task(self._run(), name="pagedkv-engine")
        self._task.add_done_callback(self._note_end)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Refuse new requests, let those in the engine end for up to `grace_seconds`, cancel the rest.

        Those are told all the text that they have, also what was held back lest it begin a stop string.
        """
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        except TimeoutError:
            for request in [*self._scheduler.running, *self._scheduler.waiting]:
                request.release_text()
                self._end(request, FinishReason.CANCELLED)
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, *self._swaps, return_exceptions=True)

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Queue a request and return its stream.

        Raises InvalidArgument for an empty prompt or a token id outside the vocabulary, SequenceTooLong for a prompt
        that leaves no room for a token in the model's context, the limit configured or the whole pool, QuotaExceeded
        when too many requests wait, Draining after `stop`, DeviceLost once the device is lost.
        """
        self._check_open()
        max_tokens = self._check_request(request)
        request_id = f"~gen-{self._next_id}"
        self._next_id += 1
        stream = GenerationStream(request_id, lambda: self._end(state, FinishReason.CANCELLED))
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else self.model_config.eos_token_ids
        state = RequestState(
            request_id,
            request,
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            token_bytes=self.tokenizer.token_bytes,
            special_text=self.tokenizer.special_text,
            stream=stream,
            now=time.perf_counter(),
        )
        self._scheduler.add(state)
        self._idle.clear()
        self._wake.set()
        self._observer.on_queued(request_id, state.num_prompt_tokens, request.trace_context)
        return stream

    def check_prompt_length(self, num_tokens: int) -> None:
        """Raise SequenceTooLong for a prompt that leaves no room in the model's context, as configured, or the pool."""
        limit = self.max_model_len
        if num_tokens > limit:
            raise SequenceTooLong("the prompt is too long", num_tokens=num_tokens, limit=limit)
        if num_tokens == limit:
            raise SequenceTooLong("the prompt leaves no room for a new token", num_tokens=limit, limit=limit - 1)

    def _end_all(self, error: DeviceLost) -> None:
        """End every request with the error; `_check_open` refuses later ones by it."""
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(request, FinishReason.ERROR, error)
        self._idle.set()

    def _check_open(self) -> None:
        self._backend.health.check()
        if self._draining:
            raise Draining("the server is shutting down")
        limit = self.config.max_waiting
        if len(self._scheduler.waiting) >= limit:
            raise QuotaExceeded(f"{limit} requests are waiting already", field="max_waiting", limit=limit)

    def _check_request(self, request: GenerationRequest) -> int:
        """Return the number of tokens the request may generate."""
        vocab_size, prompt = self.model_config.vocab_size, request.prompt_token_ids
        require(len(prompt) > 0, "prompt", "must hold at least one token", len(prompt), 1)
        self.check_prompt_length(len(prompt))
        check_token_ids("prompt_token_ids", prompt, vocab_size)
        check_token_ids("stop_token_ids", request.sampling.stop_token_ids, vocab_size)
        return min(request.sampling.max_tokens, self.max_model_len - len(prompt))

    async def _run(self) -> None:
        while True:
            await self._step_or_wait()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Tell of the loop's end: it has none of its own, so whatever ended it before `stop` is final."""
        if self._is_stopped:
            return
        error = None if task.cancelled() else task.exception()
        lost = error if isinstance(error, DeviceLost) else DeviceLost("the engine's loop has ended; see the log")
        if lost is not error:
            lost.__cause__ = error
        self._backend.health.fail(lost)

    async def _step_or_wait(self) -> None:
        chunks = self._scheduler.schedule()
        if chunks:
            await self._step(chunks)
            return
        self._outbox.deliver()
        self._wake.clear()
        if self._scheduler.waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _BLOCKED_POLL_SECONDS)
            return
        self._idle.set()
        await self._wake.wait()

    async def _step(self, chunks: Sequence[ScheduledChunk]) -> None:
        started = time.perf_counter()
        step = build_step_input(chunks, self._cache)
        future = self._backend.submit(lambda: self._forward(step))
        self._cache.commit_batch([chunk.reservation for chunk in chunks])
        for chunk in chunks:
            chunk.request.num_computed += chunk.reservation.num_tokens
        ready = [chunk.request for chunk in chunks if chunk.produces_token]
        try:
            logits = await self._completion(future)
            self._outbox.deliver()  # nothing is left of the last step unless the device was that fast
            sampled = await sample_rows([request.sampler for request in ready], logits)
        except DeviceLost:
            raise
        except Exception as error:
            self._take_back(chunks, step, error)
            return
        now = time.perf_counter()
        for request, token_id in zip(ready, sampled, strict=True):
            if request.finish_reason is None:
                self._accept(request, token_id, now)
        self._observer.on_step(_report(chunks, step, now - started))

    def _take_back(self, chunks: Sequence[ScheduledChunk], step: StepInput, error: Exception) -> None:
        """Undo a step that failed: nobody knows what it wrote. Of several requests each is tried again, alone."""
        _log.warning("a step of %d requests failed: %s", len(chunks), error)
        self._outbox.deliver()
        doubtful = {int(slot) // self._cache.config.block_size for slot in step.slot_mapping} | self._badly_swapped
        requests = [chunk.request for chunk in chunks if chunk.request.finish_reason is None]
        if self._badly_swapped:
            requests = list(self._scheduler.running)
            for request in [request for request in self._scheduler.waiting if request.is_swapped]:
                self._scheduler.recompute(request, "step_failed")
        elif len(chunks) == 1:
            for request in requests:
                self._end(request, FinishReason.ERROR, error)
            requests = []
        for request in reversed(requests):  # so that they wait in their order
            request.is_suspect = True
            self._scheduler.recompute(request, "step_failed")
        self._badly_swapped = set()
        self._cache.distrust(sorted(doubtful))

    def _forward(self, step: StepInput) -> FloatArray:
        """Run the model inside a backend job.

        What the last step produced is delivered when the kernels run, at the latest with this step's end: messages and
        figures need the interpreter, without which the job could not launch them.
        """
        self._loop.call_soon_threadsafe(self._loop.call_later, _LAUNCH_SECONDS, self._outbox.deliver)
        return self._backend.to_host(self._decoder.forward(step))

    async def _completion(self, future: Future[FloatArray]) -> FloatArray:
        """Return a step's logits; raises what the step or a swap before it met."""
        done = asyncio.wrap_future(future)
        if self._swaps:
            swaps, self._swaps = self._swaps, []
            try:
                await asyncio.gather(*swaps)
            except BaseException:
                await asyncio.gather(done, *swaps, return_exceptions=True)
                raise
        return await done

    def _accept(self, request: RequestState, token_id: int | Exception, now: float) -> None:
        """Take a sampled token in; readers and observers hear of it from the outbox."""
        try:
            if isinstance(token_id, Exception):
                raise token_id
            request.accept(token_id)
        except Exception as error:
            if isinstance(error, NumericalError):  # its cached prefix may be what is bad: the next one computes anew
                self._cache.forget(self._cache.block_table(request.request_id))
            self._end(request, FinishReason.ERROR, error)
            return
        request.is_suspect = False
        self._outbox.add(request, now)
        if request.finish_reason is not None:
            self._forget(request)

    def _end(self, request: RequestState, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request from outside its own text; does nothing if it has ended."""
        if request.finish_reason is not None:
            return
        self._outbox.deliver()
        request.finish_reason = reason
        if error is None:
            request.send()
        else:
            request.stream.fail(error)
        self._forget(request)
        self._outbox.note_if_finished(request)

    def _forget(self, request: RequestState) -> None:
        self._scheduler.remove(request)
        self._wake.set()

    def _note_admitted(self, request: RequestState) -> None:
        waited = time.perf_counter() - request.queued_at
        self._observer.on_scheduled(request.request_id, waited, request.num_cached_tokens)

    def _note_preempted(self, request: RequestState, mode: str, reason: str, num_tokens_lost: int) -> None:
        self._observer.on_preempted(request.request_id, mode, reason, num_tokens_lost)

    def _submit_swap(self, request: RequestState, direction: str, plan: SwapPlan) -> None:
        """Queue a plan's copies ahead of the next step, which fails if they do."""
        if plan.pairs:
            done = submit_swap(self._backend, direction, plan.pairs)
            self._swaps.append(asyncio.ensure_future(self._watch_swap(request.request_id, direction, plan, done)))

    async def _watch_swap(self, request_id: str, direction: str, plan: SwapPlan, done: Future[float]) -> None:
        try:
            seconds = await asyncio.wrap_future(done)
        except Exception:
            self._badly_swapped.update(device for device, _ in plan.pairs)
            raise
        num_bytes = len(plan.pairs) * self._backend.layout.block_bytes
        self._observer.on_swap(direction, num_bytes, seconds, request_id)


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument naming the first position whose id is outside [0, vocab_size)."""
    for start in range(0, len(token_ids), _NUM_CHECKED):
        ids = np.fromiter(token_ids[start : start + _NUM_CHECKED], np.int64)
        outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if outside.size:
            at = int(outside[0])
            what = f"must be in [0, {vocab_size})"
            require(False, f"{field}[{start + at}]", what, int(ids[at]), vocab_size)


def _report(chunks: Sequence[ScheduledChunk], step: StepInput, seconds: float) -> StepReport:
    num_decode = sum(chunk.reservation.num_tokens == 1 for chunk in chunks)
    num_prefill = sum(chunk.reservation.num_tokens for chunk in chunks) - num_decode
    return StepReport(len(chunks), num_prefill, num_decode, len(step.copies), seconds)
