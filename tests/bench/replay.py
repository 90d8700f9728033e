"""Replay a trace against one memory, a token a step for every running request, and see what the slots are used for."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedkv.cache import CacheManager, ReserveRequest
from pagedkv.config import CacheConfig
from pagedkv.engine.scheduler import WATERMARK
from pagedkv.errors import OutOfBlocks
from tests.bench.contiguous import ContiguousMemory
from tests.bench.traces import TraceRequest

CAUSES = ("tokens", "reserved", "internal", "external")


@dataclass(slots=True)
class Usage:
    """Slots by what they are used for, in the terms of the vLLM paper's Figure 2."""

    tokens: int = 0  # hold a token
    reserved: int = 0  # will hold a token of their request later
    internal: int = 0  # belong to a request that will never use them
    external: int = 0  # belong to nobody, or were lost to rounding


@dataclass(slots=True)
class ReplayResult:
    """Means over the steps during which somebody waited for memory (or over all, if nobody ever did)."""

    name: str
    num_slots: int
    shares: dict[str, float] = field(default_factory=dict)
    mean_concurrent: float = 0.0
    peak_concurrent: int = 0
    num_refusals: int = 0  # attempts to admit the next request, or to grow one, that found no memory
    num_preemptions: int = 0
    num_steps: int = 0


@dataclass(slots=True)
class _Running:
    request: TraceRequest
    index: int
    num_tokens: int  # in memory now


class PagedMemory:
    """The real CacheManager, driven as the engine drives it."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        config = CacheConfig(num_blocks=num_slots // block_size, block_size=block_size, prefix_caching=False)
        self._cache = CacheManager(config)

    def admit(self, running: _Running, others: Sequence[_Running]) -> bool:
        """Write the request's tokens if the pool has the blocks for them and for everybody's next token."""
        growing = sum(other.num_tokens % self._block_size == 0 for other in others)
        if others:
            growing += int(WATERMARK * self._cache.config.num_blocks)
        needed = running.num_tokens // self._block_size + 1
        if needed > self._cache.num_available() - growing:
            return False
        self._cache.allocate(str(running.index))
        self._cache.commit(self._cache.reserve(str(running.index), running.num_tokens))
        return True

    def grow(self, running: Sequence[_Running]) -> bool:
        """Write one more token of every request; False, and nothing changed, if the pool has no block for one."""
        try:
            reservations = self._cache.reserve_batch([ReserveRequest(str(item.index), 1) for item in running])
        except OutOfBlocks:
            return False
        self._cache.commit_batch(reservations)
        return True

    def release(self, running: _Running) -> None:
        """Free the request's blocks."""
        self._cache.free(str(running.index))

    def usage(self, running: Sequence[_Running], num_slots: int) -> Usage:
        """Return today's use, tokens and blocks as the cache itself counts them."""
        usage = self._cache.usage()
        held = (usage.private + usage.shared) * self._block_size
        return Usage(usage.num_tokens, 0, held - usage.num_tokens, num_slots - held)


class ReservingMemory:
    """A contiguous policy behind the same face: growing never fails, for everything was reserved."""

    def __init__(self, num_slots: int, policy: str) -> None:
        self._memory = ContiguousMemory.of_policy(policy, num_slots)

    def admit(self, running: _Running, others: Sequence[_Running]) -> bool:
        """Reserve the request's run."""
        return self._memory.admit(running.index, running.request)

    def grow(self, running: Sequence[_Running]) -> bool:
        """Do nothing."""
        return True

    def release(self, running: _Running) -> None:
        """Give the run back."""
        self._memory.release(running.index)

    def usage(self, running: Sequence[_Running], num_slots: int) -> Usage:
        """Return today's use."""
        usage = Usage()
        for item in running:
            usage.tokens += item.num_tokens
            usage.reserved += item.request.num_tokens - item.num_tokens
            usage.internal += self._memory.policy(item.request) - item.request.num_tokens
        usage.external = num_slots - usage.tokens - usage.reserved - usage.internal
        return usage


class Replay:
    """One run. `step_seconds` is how long a step takes, which sets how many arrivals fall into it."""

    def __init__(self, name: str, memory: PagedMemory | ReservingMemory, num_slots: int, step_seconds: float) -> None:
        self._memory = memory
        self._step_seconds = step_seconds
        self._result = ReplayResult(name, num_slots)
        self._running: list[_Running] = []
        self._waiting: deque[_Running] = deque()
        self._totals = {True: Usage(), False: Usage()}  # by whether somebody waited
        self._steps = {True: 0, False: 0}
        self._concurrent = {True: 0, False: 0}

    def run(self, trace: Sequence[TraceRequest]) -> ReplayResult:
        """Replay the whole trace."""
        arrivals = deque(_Running(request, index, request.num_prompt_tokens) for index, request in enumerate(trace))
        while arrivals or self._waiting or self._running:
            now = self._result.num_steps * self._step_seconds
            while arrivals and arrivals[0].request.arrival_seconds <= now:
                self._waiting.append(arrivals.popleft())
            self._step()
        return self._summary()

    def _step(self) -> None:
        self._result.num_steps += 1
        self._admit()
        while self._running and not self._memory.grow(self._running):
            self._preempt()
        for item in self._running:
            item.num_tokens += 1
        self._record()
        for item in [item for item in self._running if item.num_tokens >= item.request.num_tokens]:
            self._memory.release(item)
            self._running.remove(item)

    def _admit(self) -> None:
        while self._waiting:
            if not self._memory.admit(self._waiting[0], self._running):
                self._result.num_refusals += 1
                if not self._running:
                    raise ValueError(f"{self._waiting[0].request} does not fit {self._result.num_slots} slots")
                return
            self._running.append(self._waiting.popleft())

    def _preempt(self) -> None:
        newest = self._running.pop()
        self._memory.release(newest)
        self._waiting.appendleft(newest)
        self._result.num_preemptions += 1
        self._result.num_refusals += 1

    def _record(self) -> None:
        contended = bool(self._waiting)
        usage, total = self._memory.usage(self._running, self._result.num_slots), self._totals[contended]
        for cause in CAUSES:
            setattr(total, cause, getattr(total, cause) + getattr(usage, cause))
        self._steps[contended] += 1
        self._concurrent[contended] += len(self._running)
        self._result.peak_concurrent = max(self._result.peak_concurrent, len(self._running))

    def _summary(self) -> ReplayResult:
        contended = self._steps[True] > 0
        num_steps, total = self._steps[contended], self._totals[contended]
        slots = num_steps * self._result.num_slots
        self._result.shares = {cause: getattr(total, cause) / slots for cause in CAUSES}
        self._result.mean_concurrent = self._concurrent[contended] / num_steps
        return self._result


def replay(name: str, trace: Sequence[TraceRequest], num_slots: int, *, step_seconds: float = 0.03) -> ReplayResult:
    """Replay against a contiguous policy by its name, or against blocks of N tokens by the name "paged N"."""
    if name.startswith("paged "):
        memory: PagedMemory | ReservingMemory = PagedMemory(num_slots, int(name.removeprefix("paged ")))
    else:
        memory = ReservingMemory(num_slots, name)
    return Replay(name, memory, num_slots, step_seconds).run(trace)
