"""The reader's end of a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from pagedkv.engine.request import GenerationChunk


class GenerationStream:
    """An async iterator of chunks, with at most one chunk waiting.

    Chunks that a slow reader has not taken yet grow together into one, so that a stream holds no more than the text
    of its own output and never slows the engine down.
    """

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._ready = asyncio.Event()
        self._pending: GenerationChunk | None = None
        self._error: BaseException | None = None
        self._ended = False

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> GenerationChunk:
        """Return the next chunk; the last one carries the finish reason. Raises what ended the request early."""
        if self._pending is None and not self._ended:
            await self._ready.wait()
        self._ready.clear()
        if self._pending is not None:
            chunk, self._pending = self._pending, None
            return chunk
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End the request now; its blocks are free when this returns. Does nothing once it has ended."""
        self._cancel()

    def push(self, chunk: GenerationChunk) -> None:
        """Add a chunk (engine only)."""
        waiting = self._pending
        if waiting is not None:
            chunk = replace(chunk, text=waiting.text + chunk.text, token_ids=waiting.token_ids + chunk.token_ids)
        self._pending = chunk
        if chunk.finish_reason is not None:
            self._ended = True
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error (engine only)."""
        self._error = error
        self._ended = True
        self._ready.set()
