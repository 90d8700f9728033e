"""What all clients together may have under way: bytes of requests, and open streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from pagedkv.errors import QuotaExceeded
from pagedkv.rpc.freed_memory import FreedMemory, find_trim

CALL_BYTES: Final = 16 * 2**10  # that each call counts besides its message
_SMALL_MESSAGE_BYTES: Final = 64 * 2**10
_RESERVE: Final = 8  # large calls leave one part in so many to small ones


class BytesInFlight:
    """Counts the bytes of the requests that were received and not yet answered, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._freed = FreedMemory(find_trim())
        self._waiting: list[asyncio.Future[None]] = []
        self.num_bytes = 0

    def take(self, message_bytes: int) -> int:
        """Count a message; returns what to give back. Raises QuotaExceeded.

        Large messages leave some room, so that the small calls of others go on while one client fills it.
        """
        self.check(message_bytes)
        self.num_bytes += message_bytes + CALL_BYTES
        return message_bytes + CALL_BYTES

    def check(self, message_bytes: int) -> None:
        """Raise QuotaExceeded if there is no room for a message."""
        needed, limit = self.num_bytes + message_bytes + CALL_BYTES, self._limit_for(message_bytes)
        if needed > limit:
            raise QuotaExceeded(
                f"{self.num_bytes} bytes of requests are under way already, this one has {message_bytes}",
                field="max_inflight_bytes",
                value=needed,
                limit=limit,
            )

    def give_back(self, num_bytes: int) -> None:
        """Forget a message that is done with."""
        self.num_bytes -= num_bytes
        self._freed.note(num_bytes)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def room_for(self, message_bytes: int) -> None:
        """Wait until a message could be taken: a stream is slowed down where a call of its own would be refused."""
        while self.num_bytes + message_bytes + CALL_BYTES > self._limit_for(message_bytes):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def _limit_for(self, message_bytes: int) -> int:
        return self._limit if message_bytes <= _SMALL_MESSAGE_BYTES else self._limit - self._limit // _RESERVE

    @contextmanager
    def holding(self, message_bytes: int) -> Iterator[None]:
        """Count a message while the block runs."""
        num_bytes = self.take(message_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)


class OpenStreams:
    """Counts open streams of one kind, up to a limit that the field names."""

    def __init__(self, field: str, limit: int) -> None:
        self._field, self._limit = field, limit
        self._num_streams = 0

    @contextmanager
    def another(self) -> Iterator[None]:
        """Count a stream while the block runs. Raises QuotaExceeded."""
        limit = self._limit
        if self._num_streams >= limit:
            raise QuotaExceeded(f"{limit} streams are open already", field=self._field, limit=limit)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1


class ReceivingTurns:
    """Lets each connection have only so many messages received at a time; further calls of it wait in order.

    The library takes in whatever it is asked to receive, all at once. Other connections are not concerned, whether
    messages are large or never end.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: dict[str, _Peer] = {}

    async def receive(self, context: Any) -> Any:
        """Return the next message of a call in its connection's turn; grpc.aio.EOF if there is none."""
        name = context.peer()
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(asyncio.Semaphore(self._limit))
        peer.num_calls += 1
        try:
            async with peer.turns:
                return await context.read()
        finally:
            peer.num_calls -= 1
            if not peer.num_calls:
                del self._peers[name]


@dataclass(slots=True)
class _Peer:
    turns: asyncio.Semaphore
    num_calls: int = 0
