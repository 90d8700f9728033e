"""The blocking face of the asyncio client: one background loop, every call forwarded to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast

from pagedkv.client.asynchronous import AsyncClient, AsyncStep
from pagedkv.client.failure import cut_off
from pagedkv.client.types import Chunk
from pagedkv.errors import TransportError

P = ParamSpec("P")
T = TypeVar("T")


class _Face(Protocol):
    """What has an asyncio object behind it, and runs its coroutines to their end."""

    _behind: Any

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T: ...


def _blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Return the method that runs a coroutine method to its end."""

    @functools.wraps(method)
    def call(self: _Face, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._behind, *args, **kwargs))

    return cast("Callable[Concatenate[Any, P], T]", call)


def _iterating(
    method: Callable[Concatenate[Any, P], AsyncIterator[T]],
) -> Callable[Concatenate[Any, P], Iterator[T]]:
    """Return the method that iterates over an asynchronous iterator; closing it early closes that."""

    @functools.wraps(method)
    def call(self: _Face, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return _iterate(self._run, method(self._behind, *args, **kwargs))

    return cast("Callable[Concatenate[Any, P], Iterator[T]]", call)


class Client:
    """A connection to a pagedkv server, to be used as a context manager; see AsyncClient for what the calls do.

    Threads may share it. A process that was forked from its own may not.
    """

    def __init__(self, target: str, *, timeout: float | None = None, max_message_bytes: int = 32 * 2**20) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagedkv-client", daemon=True)
        self._thread.start()
        self._is_open, self._gate = True, threading.Lock()
        try:
            self._behind = self._run(_connect(target, timeout, max_message_bytes))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running calls end with TransportError. Idempotent."""
        with self._gate:
            if not self._is_open:
                return
            self._is_open = False
            ended = self._submit(_end(self._behind))
        _wait(ended)
        self._stop()

    info = _blocking(AsyncClient.info)
    allocate = _blocking(AsyncClient.allocate)
    append = _blocking(AsyncClient.append)
    attend = _blocking(AsyncClient.attend)
    fork = _blocking(AsyncClient.fork)
    truncate = _blocking(AsyncClient.truncate)
    free = _blocking(AsyncClient.free)
    swap_out = _blocking(AsyncClient.swap_out)
    swap_in = _blocking(AsyncClient.swap_in)
    sequence = _blocking(AsyncClient.sequence)
    sequences = _blocking(AsyncClient.sequences)
    usage = _blocking(AsyncClient.usage)
    audit = _blocking(AsyncClient.audit)
    generate = _iterating(AsyncClient.generate)
    model_info = _blocking(AsyncClient.model_info)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)

    def step(self) -> Step:
        """Open a stream of attend calls: `with client.step() as step`."""
        return Step(self._run(_open_step(self._behind)), self._run)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if not self._is_open:
                coroutine.close()
                raise cut_off(is_closed=True)
            future = self._submit(coroutine)
        return _wait(future)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._process != os.getpid():  # the loop's thread is not here: the call would wait for ever
            coroutine.close()
            raise RuntimeError("this client belongs to the process that was forked; make a new one in the child")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Step:
    """The blocking face of AsyncStep."""

    def __init__(self, step: AsyncStep, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._behind = step
        self._run = run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream; an attend of another thread ends with TransportError. Idempotent."""
        with contextlib.suppress(TransportError):  # the client may be closed by now, and the stream with it
            self._run(self._behind.close())

    attend = _blocking(AsyncStep.attend)


def _wait(future: concurrent.futures.Future[T]) -> T:
    """Return the result; an interrupted wait, as by Ctrl-C, cancels the call."""
    try:
        return future.result()
    except concurrent.futures.CancelledError:
        raise cut_off(is_closed=True) from None
    except BaseException:
        future.cancel()
        raise


def _iterate(run: Callable[[Coroutine[Any, Any, Any]], Any], stream: Any) -> Iterator[Any]:
    try:
        while (item := run(_next(stream))) is not None:
            yield item
    finally:
        with contextlib.suppress(TransportError):  # the client may be closed by now
            run(stream.aclose())


async def _connect(target: str, timeout: float | None, max_message_bytes: int) -> AsyncClient:
    return AsyncClient(target, timeout=timeout, max_message_bytes=max_message_bytes)


async def _end(client: AsyncClient) -> None:
    """Close the client and wait until all that runs on its loop has ended, or those who wait for it would wait on."""
    await client.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


async def _open_step(client: AsyncClient) -> AsyncStep:
    return client.step()


async def _next(stream: Any) -> Chunk | None:
    chunk: Chunk | None = await anext(stream, None)
    return chunk
