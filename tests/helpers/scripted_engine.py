"""An engine over a scripted decoder: the real scheduler, cache, sampler and text path, and no arithmetic.

The scripted model's next token depends on the last token and its position only, or is forced; it records every step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedkv.cache import CacheManager
from pagedkv.compute.health import DeviceHealth
from pagedkv.config import CacheConfig, EngineConfig
from pagedkv.engine import Engine, GenerationRequest, GenerationStream, SamplingParams

VOCAB_SIZE = 256


class InlineBackend:
    """Runs each job at once, on the caller's thread. Holds a token a slot, for decoders that look at the pool."""

    name = "cpu"

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.health = DeviceHealth()
        self.layout = SimpleNamespace(block_bytes=8 * block_size)
        self.pool = np.full((num_blocks, block_size), -1, np.int64)
        self.host_pool = np.full((num_host_blocks, block_size), -1, np.int64)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for device, host in pairs:
            self.host_pool[host] = self.pool[device]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        for device, host in pairs:
            self.pool[device] = self.host_pool[host]

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(job())
        except Exception as error:
            future.set_exception(error)
        self.health.note_job(future.exception())  # type: ignore[arg-type]
        return future

    def to_host(self, tensor: Any) -> Any:
        return tensor


def hashed_next_token(token_id: int, position: int) -> int:
    """A fixed pseudo-random walk over printable ASCII."""
    return 97 + (token_id * 31 + position * 17 + 7) % 26


@dataclass
class ScriptedDecoder:
    """Logits that name the next token; `next_token(token_id, position)` may also return a whole row."""

    next_token: Callable[[int, int], int | np.ndarray] = hashed_next_token
    steps: list[Any] = field(default_factory=list)
    before_step: Callable[[Any], None] = lambda step: None
    backend: Any = None

    def forward(self, step: Any) -> np.ndarray:
        self.before_step(step)
        self.steps.append(step)
        logits = np.zeros((len(step.logit_rows), VOCAB_SIZE), dtype=np.float32)
        for out, row in zip(logits, step.logit_rows, strict=True):
            chosen = self.next_token(int(step.token_ids[row]), int(step.positions[row]))
            if isinstance(chosen, np.ndarray):
                out[:] = chosen
            else:
                out[chosen] = 20.0
        return logits


def next_of_context(token_ids: Sequence[int]) -> int:
    """A token that changes with any token of the context, and with their order."""
    value = 7
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return 97 + value % 26


class PagedDecoder(ScriptedDecoder):
    """Keeps every token in its slot of the pool and reads its context there: a wrong block is a wrong token."""

    def forward(self, step: Any) -> np.ndarray:
        self.before_step(step)
        self.steps.append(step)
        pool = self.backend.pool
        for source, target in step.copies:
            pool[target] = pool[source]
        pool.reshape(-1)[step.slot_mapping] = step.token_ids
        logits = np.zeros((len(step.logit_rows), VOCAB_SIZE), dtype=np.float32)
        ends = step.batch.query_starts[1:] - 1
        for out, row in zip(logits, step.logit_rows, strict=True):
            index = int(np.flatnonzero(ends == row)[0])
            length = int(step.batch.context_lens[index])
            blocks = step.batch.block_tables[index][: -(-length // pool.shape[1])]
            out[next_of_context(pool[blocks].reshape(-1)[:length].tolist())] = 20.0
        return logits


def walk(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return what a PagedDecoder generates, undisturbed."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_of_context(token_ids))
    return token_ids[len(prompt) :]


class ByteTokenizer:
    """One token a byte; `texts` overrides some tokens' bytes."""

    def __init__(self, texts: dict[int, bytes] | None = None) -> None:
        self._texts = texts or {}

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts.get(token_id, bytes([token_id]))


def forced(prompt_length: int, token_ids: Sequence[int]) -> Callable[[int, int], int]:
    """Return a script that generates these tokens after a prompt of this length."""
    return lambda token_id, position: token_ids[min(position - prompt_length + 1, len(token_ids) - 1)]


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(97, 123, length).tolist())


@asynccontextmanager
async def scripted_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    num_host_blocks: int = 0,
    decoder: ScriptedDecoder | None = None,
    tokenizer: ByteTokenizer | None = None,
    eos_token_ids: Sequence[int] = (0,),
    context_length: int = 4096,
    observer: Any = None,
    **limits: Any,
) -> AsyncIterator[tuple[Engine, CacheManager, ScriptedDecoder]]:
    """Run an engine; at the end its cache must be clean and sound."""
    cache = CacheManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks))
    decoder = decoder or ScriptedDecoder()
    decoder.backend = InlineBackend(num_blocks, block_size, num_host_blocks)
    engine = Engine(
        backend=decoder.backend,  # type: ignore[arg-type]
        cache=cache,
        decoder=decoder,  # type: ignore[arg-type]
        tokenizer=tokenizer or ByteTokenizer(),  # type: ignore[arg-type]
        model_config=SimpleNamespace(  # type: ignore[arg-type]
            vocab_size=VOCAB_SIZE, context_length=context_length, eos_token_ids=frozenset(eos_token_ids)
        ),
        config=EngineConfig(**limits),
        observer=observer,
    )
    await engine.start()
    try:
        yield engine, cache, decoder
    finally:
        await engine.stop(0.0)
    assert_clean(cache)


def assert_clean(cache: CacheManager) -> None:
    """No generation holds a block, and the tables, counts and hashes agree."""
    usage = cache.usage()
    assert usage.free + usage.cached == usage.total, usage
    assert usage.host_free == usage.host_total, usage
    assert not cache.sequence_ids()
    report = cache.audit()
    assert report.ok, report.findings


def submit(engine: Engine, prompt: Sequence[int], **sampling: Any) -> GenerationStream:
    return engine.submit(GenerationRequest(tuple(prompt), SamplingParams(**{"max_tokens": 8, **sampling})))


async def collect(stream: GenerationStream) -> SimpleNamespace:
    """Read a stream to its end: .text .token_ids .finish_reason .num_cached_tokens .chunks."""
    chunks = [chunk async for chunk in stream]
    return SimpleNamespace(
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        finish_reason=chunks[-1].finish_reason,
        num_cached_tokens=chunks[-1].num_cached_tokens,
        chunks=chunks,
    )
