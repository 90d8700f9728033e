"""The pool's blocks: who is free, who is held how often, and which full blocks can be found by their hash.

Free blocks are a stack, cached ones an OrderedDict from the least to the most recently released: it is an intrusive
doubly linked list in C, O(1) from the middle; and as blocks that nobody
can find are never taken from the middle, they need no links and move in slices. Free blocks are given out before any
cached one is evicted. Release goes from the tail of a table to its head, so that of one release the deepest block is
evicted first, and a cached block's parent is always still there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, Protocol

from pagedkv.cache.block import BlockState, CacheStats
from pagedkv.cache.host_pool import HostPool

_FREE: Final = int(BlockState.FREE)  # plain ints: comparing enum members costs as much as all the rest of a release
_CACHED: Final = int(BlockState.CACHED)
_PRIVATE: Final = int(BlockState.PRIVATE)
_SHARED: Final = int(BlockState.SHARED)
_PINNED: Final = int(BlockState.PINNED)
_IN_FLIGHT: Final = int(BlockState.IN_FLIGHT)


class CacheObserver(Protocol):
    """Told of cached blocks; called on the loop, must return at once and never raise."""

    def on_evicted(self, idle_seconds: float, lifetime_seconds: float) -> None:
        """Note an eviction: how long nobody held the block, and how long ago it was published."""

    def on_reused(self, gap_seconds: float) -> None:
        """Note a hit on a block that nobody held, and for how long."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Cached blocks that were forgotten, and published blocks kept because sequences hold them."""

    num_dropped: int
    num_kept: int


class PublishedBlock:
    """A full block that its digest finds. `parent` is the block before it, or the chain's root digest."""

    __slots__ = ("block_id", "content", "created_at", "digest", "parent", "tokens")

    def __init__(
        self,
        block_id: int,
        digest: bytes,
        tokens: bytes,
        content: bytes,
        parent: PublishedBlock | bytes,
        created_at: float,
    ) -> None:
        self.block_id = block_id
        self.digest = digest
        self.tokens = tokens  # packed int32
        self.content = content
        self.parent = parent
        self.created_at = created_at


class BlockPool:
    """State of every block. Callers check that what they ask for is possible; nothing here can fail half-way."""

    def __init__(
        self, num_blocks: int, stats: CacheStats, observer: CacheObserver | None = None, host: HostPool | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.host = host or HostPool(0)
        self.states = bytearray(num_blocks)  # BlockState of each block
        self.shared: dict[int, int] = {}  # ref count of the blocks held more than once
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, and neighbours stay together
        self.cached: OrderedDict[int, float] = OrderedDict()  # block -> when it was released; oldest first
        self.published: dict[int, PublishedBlock] = {}  # by block
        self.index: dict[bytes, PublishedBlock] = {}  # by digest
        self.holds: dict[int, int] = {}  # block -> open reservations whose copies read it
        self.quarantined: set[int] = set()
        self._num_idle_held = 0
        self.stats = stats
        self._observer = observer

    def watch(self, observer: CacheObserver) -> None:
        """Tell `observer` of cached blocks from now on, in place of any other."""
        self._observer = observer

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return len(self.free) + len(self.cached)

    @property
    def num_held(self) -> int:
        """Blocks in at least one table."""
        return self.num_blocks - len(self.free) - len(self.cached) - self._num_idle_held

    @property
    def num_pinned(self) -> int:
        """Blocks that nobody holds and nobody gets."""
        return sum(self.states[block] == _PINNED for block in self.quarantined)

    @property
    def num_in_flight(self) -> int:
        """Blocks that only an open reservation's copy needs."""
        return sum(self.states[block] == _IN_FLIGHT for block in self.holds)

    def ref_count(self, block: int) -> int:
        """Return the number of tables that hold the block."""
        state = self.states[block]
        return self.shared[block] if state == _SHARED else int(state == _PRIVATE)

    def take(self, count: int, now: float) -> list[int]:
        """Return `count` blocks, private to the caller; evicts cached ones only when no free one is left."""
        free, states = self.free, self.states
        num_free = min(count, len(free))
        blocks = free[len(free) - num_free :]
        blocks.reverse()
        del free[len(free) - num_free :]
        if count > num_free:
            blocks += self._evict(count - num_free, now)
        for block in blocks:
            states[block] = _PRIVATE
        self.stats.allocated_blocks += count
        return blocks

    def _evict(self, count: int, now: float) -> list[int]:
        cached, published, index, observer = self.cached, self.published, self.index, self._observer
        twins = self.host.host_of
        blocks = []
        for _ in range(count):
            block, released_at = cached.popitem(last=False)
            entry = published.pop(block)
            del index[entry.digest]
            blocks.append(block)
            if twins:
                self.host.part(block)
            if observer is not None:
                observer.on_evicted(now - released_at, now - entry.created_at)
        self.stats.evicted_blocks += count
        return blocks

    def acquire(self, block: int, now: float) -> None:
        """Take one more reference to a cached, held or in-flight block."""
        state = self.states[block]
        if state == _PRIVATE:
            self.states[block] = _SHARED
            self.shared[block] = 2
        elif state == _SHARED:
            self.shared[block] += 1
        else:
            self.states[block] = _PRIVATE
            if state == _CACHED:
                released_at = self.cached.pop(block)
                if self._observer is not None:
                    self._observer.on_reused(now - released_at)
            else:
                self._num_idle_held -= 1

    def release(self, blocks: Sequence[int], now: float) -> int:
        """Drop one reference to each, last first; return how many are held by nobody now."""
        states, shared, published, free, cached = self.states, self.shared, self.published, self.free, self.cached
        guarded, twins = bool(self.holds or self.quarantined), self.host.host_of
        num_released = 0
        for block in reversed(blocks):
            state = states[block]
            if state == _PRIVATE:
                num_released += 1
                if guarded and (block in self.holds or block in self.quarantined):
                    states[block] = _IN_FLIGHT if block in self.holds else _PINNED
                    self._num_idle_held += 1
                    if block not in self.holds:
                        self.host.part(block)
                elif block in published:
                    states[block] = _CACHED
                    cached[block] = now
                else:
                    states[block] = _FREE
                    free.append(block)
                    if twins:
                        self.host.part(block)
            elif state == _SHARED:
                count = shared[block] - 1
                if count > 1:
                    shared[block] = count
                else:
                    states[block] = _PRIVATE
                    del shared[block]
            else:
                self.stats.refused_releases += 1
        self.stats.released_blocks += num_released
        return num_released

    def hold(self, block: int) -> None:
        """Keep a block from being given out although no table may hold it."""
        self.holds[block] = self.holds.get(block, 0) + 1

    def unhold(self, block: int, now: float) -> None:
        """Drop a hold; the last one lets a block go that no table holds."""
        count = self.holds.pop(block) - 1
        if count:
            self.holds[block] = count
        elif self.states[block] == _IN_FLIGHT:
            self.states[block] = _PRIVATE  # held by the hold itself, for one moment
            self._num_idle_held -= 1
            self.release((block,), now)
            self.stats.released_blocks -= 1  # its last table counted it

    def is_writable(self, block: int) -> bool:
        """Whether one table holds the block and nothing promises its content: no hash, no twin, no copy to come."""
        is_promised = block in self.published or block in self.host.host_of or block in self.holds
        return self.states[block] == _PRIVATE and not is_promised

    def find(
        self, digest: bytes, tokens: bytes, content: bytes, parent: PublishedBlock | bytes
    ) -> PublishedBlock | None:
        """Return the published block with this digest if its tokens, and all before them, are really equal."""
        entry = self.index.get(digest)
        if entry is None or entry.tokens != tokens or entry.parent != parent or entry.content != content:
            return None
        return entry

    def publish(self, entry: PublishedBlock) -> None:
        """Make a held, full block findable."""
        self.published[entry.block_id] = entry
        self.index[entry.digest] = entry
        self.stats.published_blocks += 1

    def unpublish(self, block: int) -> None:
        """Forget a block's hash; its state stays."""
        entry = self.published.pop(block)
        if self.index.get(entry.digest) is entry:
            del self.index[entry.digest]

    def copy(self) -> BlockPool:
        """Return a pool of the same state, but for the order of cached blocks, with a host pool of its own."""
        twin = copy(self)
        twin.host = self.host.copy()
        twin.states, twin.free = self.states[:], self.free[:]
        twin.cached = dict(self.cached)  # type: ignore[assignment]  # an ordered copy takes twice the time
        twin.shared, twin.holds, twin.quarantined = self.shared.copy(), self.holds.copy(), self.quarantined.copy()
        twin.published, twin.index = self.published.copy(), self.index.copy()  # their entries never change
        return twin

    def restore(self, states: Sequence[BlockState], shared: dict[int, int], holds: dict[int, int]) -> None:
        """Rebuild the lists for these states, keeping the order of what was in the right list."""
        now = max(self.cached.values(), default=0.0)
        free = [block for block in dict.fromkeys(self.free) if 0 <= block < self.num_blocks and not states[block]]
        listed = set(free)
        cached = OrderedDict((b, at) for b, at in self.cached.items() if states[b] == _CACHED)
        for block, state in enumerate(states):
            if state == _FREE and block not in listed:
                free.append(block)
            elif state == _CACHED:
                cached.setdefault(block, now)
        self.states = bytearray(states)
        self.free, self.cached, self.shared, self.holds = free, cached, shared, holds
        self._num_idle_held = sum(state in (_PINNED, _IN_FLIGHT) for state in states)

    def flush(self) -> FlushResult:
        """Forget every cached block that no table holds."""
        num_dropped = len(self.cached)
        self._forget(list(self.cached))
        return FlushResult(num_dropped, len(self.published))

    def forget_with_descendants(self, blocks: Container[int]) -> set[int]:
        """Make these blocks unfindable, and all that are chained to one; return those that were findable.

        O(published blocks), for failures. `published` keeps the order of publishing: a parent before its children.
        """
        lost: dict[int, None] = {}
        for block, entry in self.published.items():
            if block in blocks or (isinstance(entry.parent, PublishedBlock) and entry.parent.block_id in lost):
                lost[block] = None
        self._forget(lost)
        return set(lost)

    def _forget(self, blocks: Iterable[int]) -> None:
        """Unpublish blocks, given parents first; those that nobody holds are free then."""
        for block in reversed(list(blocks)):
            self.unpublish(block)
            if self.states[block] == _CACHED:
                del self.cached[block]
                self.host.part(block)
                self.states[block] = _FREE
                self.free.append(block)
