"""Streams as queues that run as late as anyone allows, or in a seeded random order; events, captures, graphs."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Op:
    """One piece of device work. `touches` are addresses it may use, for the check on freeing."""

    name: str
    action: Callable[[], None]
    stream: Stream
    waits: list[Op]
    touches: tuple[int, ...] = ()
    is_done: bool = False
    capture: Capture | None = None
    graph: Graph | None = None  # that it launches


@dataclass(eq=False)
class Stream:
    handle: int
    is_blocking: bool  # synchronises with the null stream
    ops: deque[Op] = field(default_factory=deque)
    waits: list[Op] = field(default_factory=list)  # for the next op
    last: Op | None = None
    capture: Capture | None = None
    captured_last: Op | None = None


@dataclass(eq=False)
class Event:
    handle: int
    has_timing: bool
    last: Op | None = None  # the most recent record
    time: float = 0.0


@dataclass(eq=False)
class Capture:
    origin: Stream
    mode: str  # GLOBAL, THREAD_LOCAL or RELAXED
    thread: int  # that began it
    is_invalid: bool = False  # by a call that the mode forbids
    nodes: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Graph:
    nodes: list[Op]


class Scheduler:
    """Order of execution: stream order, event waits, and the null stream's rules; otherwise free."""

    def __init__(self, schedule: str | int) -> None:
        self.random = None if schedule == "lazy" else random.Random(int(schedule))
        self.queue_lock = threading.RLock()
        self.engine_lock = threading.RLock()
        self.null = Stream(0, True)
        self.streams: dict[int, Stream] = {0: self.null}
        self.failed: Callable[[Op, BaseException], None] = lambda op, error: None
        self.has_failed = False
        self.num_run = 0

    def enqueue(
        self,
        stream: Stream,
        name: str,
        action: Callable[[], None],
        touches: Iterable[int] = (),
        graph: Graph | None = None,
    ) -> Op:
        """Append work to a stream (or to the graph that the stream is being captured into)."""
        with self.queue_lock:
            waits, stream.waits = stream.waits, []
            op = Op(name, action, stream, waits, tuple(touches), graph=graph)
            if stream.capture is not None:
                op.capture = stream.capture
                if stream.captured_last is not None:
                    op.waits.append(stream.captured_last)
                stream.captured_last = op
                stream.capture.nodes.append(op)
                return op
            if stream is self.null:
                op.waits += [s.last for s in self.streams.values() if s.is_blocking and s.last and not s.last.is_done]
            elif stream.is_blocking and self.null.last is not None and not self.null.last.is_done:
                op.waits.append(self.null.last)
            stream.ops.append(op)
            stream.last = op
        if self.random is not None:
            self._wander(self.random.choice((0, 0, 1, 2, 5)))
        return op

    def wait_for(self, stream: Stream, op: Op) -> None:
        """Make the stream's next work wait for `op`."""
        with self.queue_lock:
            if op.capture is not None and stream.capture is None:
                stream.capture = op.capture
                stream.captured_last = None
            if not op.is_done:
                stream.waits.append(op)

    def complete(self, op: Op) -> None:
        """Run whatever `op` depends on, and it."""
        while not op.is_done:
            with self.engine_lock:
                if not op.is_done:
                    self._run(self._random_head() or self._head_towards(op))

    def step_towards(self, op: Op) -> None:
        """Run one piece of work that `op` needs."""
        if not op.is_done:
            with self.engine_lock:
                if not op.is_done:
                    self._run(self._head_towards(op))

    def complete_stream(self, stream: Stream) -> None:
        with self.queue_lock:
            last = stream.last
            waits = list(stream.waits)
        for op in [*waits, *([last] if last else [])]:
            self.complete(op)

    def complete_all(self) -> None:
        for stream in list(self.streams.values()):
            self.complete_stream(stream)

    def pending(self) -> list[Op]:
        with self.queue_lock:
            return [op for stream in self.streams.values() for op in stream.ops if not op.is_done]

    def _head_towards(self, op: Op) -> Op:
        current = op
        while True:
            head = current.stream.ops[0]
            blocking = next((w for w in head.waits if not w.is_done), None)
            if blocking is None:
                return head
            current = blocking

    def _random_head(self) -> Op | None:
        if self.random is None:
            return None
        with self.queue_lock:
            heads = [s.ops[0] for s in self.streams.values() if s.ops]
            ready = [op for op in heads if all(w.is_done for w in op.waits)]
        return self.random.choice(ready) if ready else None

    def _wander(self, steps: int) -> None:
        for _ in range(steps):
            with self.engine_lock:
                op = self._random_head()
                if op is None:
                    return
                self._run(op)

    def _run(self, op: Op) -> None:
        self.num_run += 1
        try:
            if not self.has_failed:
                op.action()
        except Exception as error:
            self.has_failed = True
            self.failed(op, error)
        finally:
            with self.queue_lock:
                op.is_done = True
                op.stream.ops.popleft()

    def run_graph(self, nodes: list[Op]) -> None:
        """Run captured work in an order that its dependencies allow."""
        left = list(nodes)
        finished: set[Any] = set()
        members = set(map(id, nodes))
        while left:
            ready = [n for n in left if all(id(w) in finished or id(w) not in members for w in n.waits)]
            node = ready[0] if self.random is None else self.random.choice(ready)
            node.action()
            finished.add(id(node))
            left.remove(node)
