"""The live stream: one task looks at the cache a few times a second and tells every subscriber what changed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final

from pagedkv.metrics.frames import FrameSource

_INTERVAL_SECONDS: Final = 0.1
_MAX_LOAD: Final = 0.02  # share of the loop's time that frames may take: at a high cost they come less often
_MAX_QUEUED_FRAMES: Final = 32


class Subscriber:
    """A bounded queue of encoded frames. One that falls behind loses them and gets a new snapshot instead."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[str] = asyncio.Queue(_MAX_QUEUED_FRAMES)
        self.needs_snapshot = True
        self.num_dropped = 0

    def offer(self, frame: str) -> None:
        """Queue a frame; never waits."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.num_dropped += self._frames.qsize() + 1
            while not self._frames.empty():
                self._frames.get_nowait()
            self.needs_snapshot = True

    async def frames(self) -> AsyncIterator[str]:
        """Yield frames as they come, for ever."""
        while True:
            yield await self._frames.get()


class Broadcaster:
    """Makes one delta for all subscribers; does nothing while there are none."""

    def __init__(self, source: FrameSource) -> None:
        self._source = source
        self._subscribers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def subscribed(self) -> Iterator[Subscriber]:
        """Subscribe for as long as the block runs."""
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="pagedkv-page-map")
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    async def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._subscribers:
            started = time.perf_counter()
            self._publish()
            spent = time.perf_counter() - started
            await asyncio.sleep(max(_INTERVAL_SECONDS, spent / _MAX_LOAD))

    def _publish(self) -> None:
        """Send the delta, and to those without a base a snapshot of the same moment."""
        delta = json.dumps(self._source.advance(), separators=(",", ":"))
        snapshot = None
        for subscriber in self._subscribers:
            if subscriber.needs_snapshot:
                snapshot = snapshot or json.dumps(self._source.snapshot(), separators=(",", ":"))
                subscriber.needs_snapshot = False
                subscriber.offer(snapshot)
            else:
                subscriber.offer(delta)
