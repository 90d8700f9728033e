"""Who is connected to the metrics server and why, so that no kind of connection takes the places of another.

Beyond a kind's limit the oldest gives way: a request that is sent in one piece is read, answered and gone within
milliseconds, so the oldest is one that idles, or reads slowly. Streams stay; a new one beyond their limit is refused.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final

MAX_OF_EACH_KIND: Final = 64


class Kind(Enum):
    """What a connection is here for."""

    ARRIVING = "has not sent its request yet"
    PROBE = "asks for metrics, health or readiness"
    PAGE = "asks for anything else"
    STREAM = "watches the page map"


class Connections:
    """The tasks of open connections by kind, each kind's oldest first."""

    def __init__(self) -> None:
        self._by_kind: dict[Kind, dict[asyncio.Task[None], None]] = {kind: {} for kind in Kind}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """All of them."""
        return [task for tasks in self._by_kind.values() for task in tasks]

    def count(self, kind: Kind) -> int:
        """Return how many are of a kind."""
        return len(self._by_kind[kind])

    def has_room(self, kind: Kind) -> bool:
        """Whether the kind is below its limit."""
        return self.count(kind) < MAX_OF_EACH_KIND

    def enter(self, task: asyncio.Task[None], kind: Kind) -> None:
        """Count a connection as of this kind from now on; the kind's oldest ends if there are too many."""
        self.leave(task)
        if not self.has_room(kind):
            oldest = next(iter(self._by_kind[kind]))
            self.leave(oldest)
            oldest.cancel()
        self._by_kind[kind][task] = None

    def leave(self, task: asyncio.Task[None]) -> None:
        """Forget a connection; does nothing for one that is forgotten already."""
        for tasks in self._by_kind.values():
            tasks.pop(task, None)
