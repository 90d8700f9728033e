"""What the live sequences hold, summed up as it changes, in O(1) a block."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from pagedkv.cache.block_pool import BlockPool
from pagedkv.cache.sequence import Sequence


class Ledger:
    """Takes and drops the references of block tables, and keeps the sums that go with them.

    A block holds as many tokens as the one of its sequences that sees most of it. `views` says, for the blocks where
    that may differ (shared, published or held by a reservation) and by sequence, how many tokens it sees; a sequence
    that is not listed sees the whole block. Of all other blocks the one holder sees all there is.
    """

    __slots__ = (
        "_pool",
        "block_size",
        "claimed_tokens",
        "logical_blocks",
        "logical_tokens",
        "num_tokens",
        "pow2_tokens",
        "views",
    )

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.num_tokens = 0  # physical: a token that several sequences share counts once
        self.logical_tokens = 0
        self.logical_blocks = 0
        self.claimed_tokens = 0  # logical tokens, and those that are reserved or written in some layers only
        self.pow2_tokens = 0
        self.views: dict[int, dict[str, int]] = {}
        self._pool = pool
        self.block_size = block_size

    def fill(self, block: int) -> int:
        """Return the tokens in a shared or published block."""
        ref_count, views = self._pool.ref_count(block), self.views.get(block, ())
        return self.block_size if ref_count > len(views) else max(self.views[block].values()) if views else 0

    def enter(self, block: int, sequence_id: str, view: int, now: float) -> None:
        """Take a reference to a shared, published or in-flight block of which the sequence sees `view` tokens."""
        before = self.fill(block)
        self._pool.acquire(block, now)
        self.see(block, sequence_id, view)
        self.num_tokens += self.fill(block) - before

    def see(self, block: int, sequence_id: str, view: int) -> None:
        """Note how much of a shared or published block a sequence sees; the caller sums up."""
        if view < self.block_size:
            self.views.setdefault(block, {})[sequence_id] = view
        else:
            self._unsee(block, sequence_id)

    def leave(self, block: int, sequence_id: str, view: int, now: float) -> None:
        """Drop a sequence's reference to any block of which it sees `view` tokens."""
        if block in self.views:
            before = self.fill(block)
            self._unsee(block, sequence_id)
            self._pool.release((block,), now)
            self.num_tokens += self.fill(block) - before
        elif self._pool.release((block,), now):
            self.num_tokens -= view

    def leave_all(self, sequence: Sequence, keep: int, now: float) -> None:
        """Drop a sequence's references to its blocks from index `keep` on, the last first."""
        blocks, size, length = sequence.table[keep:], self.block_size, sequence.length
        if self.views and not self.views.keys().isdisjoint(blocks):
            for index in range(len(sequence.table) - 1, keep - 1, -1):
                view = min(size, max(0, length - index * size))
                self.leave(sequence.table[index], sequence.sequence_id, view, now)
        else:  # whoever sees a part of a block sees all there is, so all but the full blocks are private
            num_full = max(0, length // size - keep)
            num_released = self._pool.release(blocks, now)
            self.num_tokens -= (num_released - len(blocks) + num_full) * size
            self.num_tokens -= length % size if length >= keep * size else 0
        del sequence.table[keep:]
        self.logical_blocks -= len(blocks)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Raise the sequence's length to `num_tokens`."""
        length, size = sequence.length, self.block_size
        added = num_tokens - length
        self.logical_tokens += added
        self.num_tokens += added
        if self.views and length % size:
            block = sequence.table[length // size]
            if sequence.sequence_id in self.views.get(block, ()):
                view = min(size, length % size + added)
                before = self.fill(block)
                self.see(block, sequence.sequence_id, view)
                self.num_tokens += self.fill(block) - before - (view - length % size)
        sequence.length = num_tokens
        if num_tokens > sequence.pow2:
            self.set_pow2(sequence)

    def shrink(self, sequence: Sequence, num_tokens: int) -> None:
        """Lower the sequence's length to `num_tokens`, once the blocks wholly behind it are left."""
        length, size = sequence.length, self.block_size
        self.logical_tokens -= length - num_tokens
        view = num_tokens % size
        if view:
            block = sequence.table[num_tokens // size]
            before = min(size, length - num_tokens + view)
            if block in self.views or not self._pool.is_writable(block):
                before = self.fill(block)
                self.see(block, sequence.sequence_id, view)
                view = self.fill(block)
            self.num_tokens -= before - view
        sequence.length = num_tokens
        self.set_pow2(sequence)

    def set_pow2(self, sequence: Sequence) -> None:
        """Bring the power-of-two reservation in line with the length."""
        pow2 = next_pow2(sequence.length)
        self.pow2_tokens += pow2 - sequence.pow2
        sequence.pow2 = pow2

    def copy(self, pool: BlockPool) -> Ledger:
        """Return a ledger with the same sums and views, over a copy of the pool."""
        twin = Ledger(pool, self.block_size)
        twin.restore(self, {block: views.copy() for block, views in self.views.items()})
        return twin

    def recount(self, sequences: SequenceOf[Sequence]) -> Ledger:
        """Return a ledger with all sums computed from the tables alone."""
        fresh, size = Ledger(self._pool, self.block_size), self.block_size
        fills: dict[int, int] = {}
        for sequence in sequences:
            fresh.logical_tokens += sequence.length
            fresh.logical_blocks += len(sequence.table)
            fresh.claimed_tokens += sequence.claimed
            fresh.pow2_tokens += next_pow2(sequence.length)
            for index, block in enumerate(sequence.table):
                view = min(size, max(0, sequence.length - index * size))
                fills[block] = max(view, fills.get(block, 0))
        fresh.num_tokens = sum(fills.values())
        return fresh

    def restore(self, other: Ledger, views: dict[int, dict[str, int]]) -> None:
        """Take over the sums of another ledger."""
        for name, value in other.sums().items():
            setattr(self, name, value)
        self.views = views

    def sums(self) -> dict[str, int]:
        """Return the sums by name."""
        names = ("num_tokens", "logical_tokens", "logical_blocks", "claimed_tokens", "pow2_tokens")
        return {name: getattr(self, name) for name in names}

    def _unsee(self, block: int, sequence_id: str) -> None:
        views = self.views.get(block)
        if views is not None:
            views.pop(sequence_id, None)
            if not views:
                del self.views[block]


def next_pow2(num_tokens: int) -> int:
    """Return the smallest power of two that holds `num_tokens`; 0 for none."""
    return 1 << (num_tokens - 1).bit_length() if num_tokens else 0
