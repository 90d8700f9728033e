"""Swapping sequences out to host blocks and in again; see `host_pool` for how sharing survives.

Device blocks are released at once: whatever their next owner does comes behind the plan's copies, because the caller
submits these before anything else and the device queue is ordered. So are blocks that come in findable at once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from pagedkv.cache.block import BlockState
from pagedkv.cache.block_pool import BlockPool
from pagedkv.cache.ledger import Ledger
from pagedkv.cache.prefix_index import PrefixIndex
from pagedkv.cache.sequence import Sequence
from pagedkv.errors import OutOfHostBlocks, SwapUnavailable

_MISSING = -1  # in a table under construction: the block is to come from the pool


@dataclass(frozen=True, slots=True)
class SwapPlan:
    """Copies to run, as one job, before any other: (device block, host block) pairs, whole blocks over all layers.

    `num_kept` blocks needed no copy: they had a copy in host memory, or were still on the device.
    """

    pairs: tuple[tuple[int, int], ...] = ()
    num_kept: int = 0


@dataclass(frozen=True, slots=True)
class SwapNeed:
    """Blocks that a swap-in takes from what the pool has available, by what for."""

    num_fresh: int  # to copy into
    num_cached: int  # found cached: they need no copy, but count as available until then
    num_next: int  # for the next tokens

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_fresh + self.num_cached + self.num_next


class Swapper:
    """Moves sequences between the pool and its host pool; the caller checks that the pool has what a swap-in needs."""

    def __init__(
        self, pool: BlockPool, ledger: Ledger, index: PrefixIndex, *, block_size: int, sequence_limit: int
    ) -> None:
        self._pool, self._host = pool, pool.host
        self._ledger = ledger
        self._index = index
        self._block_size = block_size
        self._sequence_limit = sequence_limit

    def swap_out(self, sequences: SequenceOf[Sequence], now: float) -> SwapPlan:
        """Move sequences to host blocks, all or none. Raises OutOfHostBlocks, SwapUnavailable."""
        pool, host = self._pool, self._host
        if not host.num_blocks:
            raise SwapUnavailable("there is no host pool; start the service with --swap-memory")
        blocks = list(dict.fromkeys(block for sequence in sequences for block in sequence.table))
        fresh = [block for block in blocks if block not in host.host_of]
        if len(fresh) > len(host.free):
            raise OutOfHostBlocks(needed=len(fresh), free=len(host.free), total=host.num_blocks)
        pairs = tuple((block, host.free.pop()) for block in fresh)
        for block, copy in pairs:
            host.pair(block, copy)
        for sequence in sequences:
            sequence.host_table = array("i", [host.host_of[block] for block in sequence.table])
            for at, copy in enumerate(sequence.host_table):
                host.enter(copy, sequence.sequence_id, self._view(sequence, at))
        for sequence in sequences:
            self._leave_device(sequence, now)
        pool.stats.swapped_out_blocks += len(pairs)
        return SwapPlan(pairs, len(blocks) - len(pairs))

    def _leave_device(self, sequence: Sequence, now: float) -> None:
        ledger = self._ledger
        ledger.claimed_tokens -= sequence.claimed
        ledger.logical_tokens -= sequence.length
        ledger.pow2_tokens -= sequence.pow2
        sequence.pow2 = 0
        ledger.leave_all(sequence, 0, now)
        sequence.touched_at = now
        self._host.num_sequences += 1

    def forget(self, sequence: Sequence) -> None:
        """Give a swapped sequence's host blocks back."""
        assert sequence.host_table is not None
        for host in reversed(sequence.host_table):
            self._host.leave(host, sequence.sequence_id)
        sequence.host_table = None
        self._host.num_sequences -= 1

    def need(self, sequences: SequenceOf[Sequence], next_tokens: int) -> SwapNeed:
        """Return the blocks that these swapped sequences take, with room for each one's next tokens."""
        pool = self._pool
        fresh: set[int] = set()  # host blocks
        kept: set[int] = set()  # device blocks
        tails: Counter[tuple[int, int]] = Counter()  # blocks that the next tokens begin in
        refs: Counter[tuple[int, int]] = Counter()
        num_next = 0
        for sequence in sequences:
            entries = self._locate(sequence)
            fresh.update(host for device, host in entries if device == _MISSING)
            kept.update(device for device, _ in entries if device != _MISSING)
            places = [(device, host if device == _MISSING else _MISSING) for device, host in entries]
            refs.update(places)
            written = sequence.written
            room = min(next_tokens, self._sequence_limit - written)
            if room > 0:
                num_next += max(0, -(-(written + room) // self._block_size) - len(places))
                if sequence.length % self._block_size:
                    tails[places[sequence.length // self._block_size]] += 1
        for place, num_writers in tails.items():
            device = place[0]
            is_kept = device in pool.published or device in pool.holds
            others = refs[place] - num_writers + (0 if device == _MISSING else pool.ref_count(device))
            num_next += num_writers if is_kept or others else num_writers - 1
        cached = sum(pool.states[block] == BlockState.CACHED for block in kept)
        return SwapNeed(len(fresh), cached, num_next)

    def _locate(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Return, for each entry, the device block that still holds it, or _MISSING, and its host block."""
        assert sequence.host_table is not None
        found = self._index.find_blocks(
            sequence.chain_root, sequence.token_ids, sequence.extras, sequence.num_published
        )
        twins = self._host.device_of
        return [
            (found[at].block_id if at < len(found) else twins.get(host, _MISSING), host)
            for at, host in enumerate(sequence.host_table)
        ]

    def swap_in(self, sequences: SequenceOf[Sequence], now: float) -> SwapPlan:
        """Move sequences back, all or none; the pool must have the blocks of `need`."""
        located = [self._locate(sequence) for sequence in sequences]
        for sequence, entries in zip(sequences, located, strict=True):  # take what is there before anything is evicted
            sequence.table = array("i", [device for device, _ in entries])
            for at, (device, _) in enumerate(entries):
                if device != _MISSING:
                    self._ledger.enter(device, sequence.sequence_id, self._view(sequence, at), now)
        missing = dict.fromkeys(host for entries in located for device, host in entries if device == _MISSING)
        fresh = dict(zip(missing, self._pool.take(len(missing), now), strict=True))
        for sequence in sequences:
            self._fill(sequence, fresh, now)
        kept = {device for entries in located for device, _ in entries if device != _MISSING}
        for sequence in sequences:
            self._arrive(sequence, now)
        pairs = tuple((device, host) for host, device in fresh.items())
        self._pool.stats.swapped_in_blocks += len(pairs)
        return SwapPlan(pairs, len(kept))

    def _fill(self, sequence: Sequence, fresh: dict[int, int], now: float) -> None:
        """Put fresh blocks where a table has none; a block that another swapped sequence needs too becomes a twin."""
        ledger, host_pool = self._ledger, self._host
        assert sequence.host_table is not None
        for at, (device, host) in enumerate(zip(sequence.table, sequence.host_table, strict=True)):
            if device != _MISSING:
                continue
            device, view = fresh[host], self._view(sequence, at)
            sequence.table[at] = device
            if host in host_pool.device_of:
                ledger.enter(device, sequence.sequence_id, view, now)
                continue
            ledger.num_tokens += view
            if len(host_pool.holders[host]) > 1:
                host_pool.pair(device, host)
                ledger.see(device, sequence.sequence_id, view)

    def _arrive(self, sequence: Sequence, now: float) -> None:
        ledger = self._ledger
        self.forget(sequence)
        ledger.logical_blocks += len(sequence.table)
        ledger.logical_tokens += sequence.length
        ledger.claimed_tokens += sequence.written
        ledger.set_pow2(sequence)
        sequence.touched_at = now
        if sequence.is_hashable:
            sequence.num_published = self._num_found(sequence)
            self._index.publish(sequence, now)
        else:
            sequence.num_published = min(sequence.num_published, self._num_found(sequence))

    def _num_found(self, sequence: Sequence) -> int:
        """Return how many leading blocks of the table are published."""
        published = self._pool.published
        for at, block in enumerate(sequence.table[: sequence.num_published]):
            if block not in published:
                return at
        return sequence.num_published

    def _view(self, sequence: Sequence, at: int) -> int:
        return min(self._block_size, max(0, sequence.length - at * self._block_size))
