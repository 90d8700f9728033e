"""The blocking face of the asyncio client: one background loop, every call forwarded to it."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

import numpy.typing as npt

from pagedkv.client.asynchronous import AsyncClient, AsyncStep
from pagedkv.client.types import Attention, Chunk

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Return the method that runs an AsyncClient's coroutine method to its end."""

    @functools.wraps(method)
    def call(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._client, *args, **kwargs))

    return cast("Callable[Concatenate[Client, P], T]", call)


class Client:
    """A connection to a pagedkv server, to be used as a context manager; see AsyncClient for what the calls do."""

    def __init__(self, target: str, *, timeout: float | None = None, max_message_bytes: int = 64 * 2**20) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagedkv-client", daemon=True)
        self._thread.start()
        self._client = self._run(_connect(target, timeout, max_message_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls are cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    info = _blocking(AsyncClient.info)
    allocate = _blocking(AsyncClient.allocate)
    append = _blocking(AsyncClient.append)
    fork = _blocking(AsyncClient.fork)
    truncate = _blocking(AsyncClient.truncate)
    free = _blocking(AsyncClient.free)
    swap_out = _blocking(AsyncClient.swap_out)
    swap_in = _blocking(AsyncClient.swap_in)
    sequence = _blocking(AsyncClient.sequence)
    sequences = _blocking(AsyncClient.sequences)
    usage = _blocking(AsyncClient.usage)
    audit = _blocking(AsyncClient.audit)
    model_info = _blocking(AsyncClient.model_info)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)

    def attend(
        self, sequence_ids: Sequence[str], queries: npt.NDArray[Any], *, layer: int, **options: Any
    ) -> Attention:
        """See AsyncClient.attend."""
        return self._run(self._client.attend(sequence_ids, queries, layer=layer, **options))

    def generate(self, prompt: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Stream a generation; the options are those of AsyncClient.generate. Closing the iterator cancels it."""
        stream: Any = self._client.generate(prompt, **options)
        try:
            while (chunk := self._run(_next(stream))) is not None:
                yield chunk
        finally:
            if not self._loop.is_closed():
                self._run(stream.aclose())

    def step(self) -> Step:
        """Open a stream of attend calls: `with client.step() as step`."""
        return Step(self._run(_open_step(self._client)), self._run)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class Step:
    """The blocking face of AsyncStep."""

    def __init__(self, step: AsyncStep, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._step = step
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._run(self._step.close())

    def attend(
        self, sequence_ids: Sequence[str], queries: npt.NDArray[Any], *, layer: int, **options: Any
    ) -> Attention:
        """See AsyncStep.attend."""
        result: Attention = self._run(self._step.attend(sequence_ids, queries, layer=layer, **options))
        return result


async def _connect(target: str, timeout: float | None, max_message_bytes: int) -> AsyncClient:
    return AsyncClient(target, timeout=timeout, max_message_bytes=max_message_bytes)


async def _open_step(client: AsyncClient) -> AsyncStep:
    return client.step()


async def _next(stream: Any) -> Chunk | None:
    chunk: Chunk | None = await anext(stream, None)
    return chunk
