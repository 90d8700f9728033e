"""Calls that come while the device is busy run together, in one launch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, eq=False)
class Call(Generic[Request, Answer]):
    """A request and the future of its answer, which is cancelled if the caller goes."""

    request: Request
    answer: asyncio.Future[Answer]


class Batcher(Generic[Request, Answer]):
    """Launches a call at once while nothing is in flight; calls that come meanwhile wait and are launched together.

    `launch` gets calls in their order of arrival, starts what it can, and returns the calls it leaves for the next
    launch with an awaitable that completes with the work it started (None if it started none). It answers the calls
    itself and raises nothing. Everything happens on the event loop, launches without an await in between.
    """

    def __init__(
        self,
        launch: Callable[
            [Sequence[Call[Request, Answer]]], tuple[list[Call[Request, Answer]], asyncio.Future[object] | None]
        ],
    ) -> None:
        self._launch = launch
        self._waiting: list[Call[Request, Answer]] = []
        self._is_busy = False

    def run(self, request: Request) -> Awaitable[Answer]:
        """Return the answer to come. Cancelling it before the launch withdraws the request, later only its answer."""
        call: Call[Request, Answer] = Call(request, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        if not self._is_busy:
            self._launch_waiting()
        return call.answer

    def _launch_waiting(self) -> None:
        while self._waiting and not self._is_busy:
            calls = [call for call in self._waiting if not call.answer.done()]
            self._waiting, work = self._launch(calls)
            if work is not None:
                self._is_busy = True
                work.add_done_callback(self._go_on)

    def _go_on(self, work: asyncio.Future[object]) -> None:
        self._is_busy = False
        self._launch_waiting()
