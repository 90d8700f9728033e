"""The control plane: sequences and their block tables over one pool of blocks.

Synchronous and never awaiting, to be called from one thread, so every call is atomic. Each call checks everything
before it changes anything: a call that raises has changed nothing.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

from pagedkv.cache.accounting import Accounting, account, count_usage
from pagedkv.cache.audit import AuditReport, audit, begin_audit
from pagedkv.cache.block import CacheStats, Usage
from pagedkv.cache.block_hash import NO_EXTRAS, BlockHash, PrefixExtras, hash_block, pack_token_ids
from pagedkv.cache.block_pool import BlockPool, CacheObserver, FlushResult
from pagedkv.cache.host_pool import HostPool
from pagedkv.cache.ledger import Ledger
from pagedkv.cache.live import LiveSequences, check_unique
from pagedkv.cache.prefix_index import PrefixIndex
from pagedkv.cache.reservations import Reservations, check_layers_equal
from pagedkv.cache.sequence import Allocation, Reservation, ReserveRequest, Sequence, SequenceView
from pagedkv.cache.swap import SwapNeed, Swapper, SwapPlan
from pagedkv.config import CacheConfig, require
from pagedkv.errors import OutOfBlocks, SequenceTooLong

_ROOT_BYTES = 32


class CacheManager:
    """Hands out the blocks of one pool; see the design's cache rules."""

    def __init__(
        self,
        config: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
        *,
        observer: CacheObserver | None = None,
        block_hash: BlockHash = hash_block,
    ) -> None:
        self.config = config
        self.stats = CacheStats()
        self.host = HostPool(config.num_host_blocks)
        self.pool = BlockPool(config.num_blocks, self.stats, observer, self.host)
        self.ledger = Ledger(self.pool, config.block_size)
        self._index = PrefixIndex(self.pool, self.ledger, config.block_size, block_hash)
        self._reservations = Reservations(config, self.pool, self.ledger, self._index)
        self._swapper = Swapper(
            self.pool,
            self.ledger,
            self._index,
            block_size=config.block_size,
            sequence_limit=config.sequence_limit,
        )
        self._sequences = LiveSequences()
        self._root = os.urandom(_ROOT_BYTES) if config.hash_root is None else config.hash_root
        self._block_size = config.block_size
        self._sequence_limit = config.sequence_limit
        self._clock = clock

    # -- sequences ----------------------------------------------------------------------------------------------

    def allocate(
        self,
        sequence_id: str,
        token_ids: SequenceOf[int] | None = None,
        *,
        extras: PrefixExtras = NO_EXTRAS,
        is_recompute: bool = False,
    ) -> Allocation:
        """Start a sequence on the cached blocks of its prefix; takes no other block.

        `token_ids` may reach beyond what will be written. A prompt computed again after a preemption says so, as its
        hits are counted apart. Raises InvalidArgument, SequenceExists, SequenceTooLong.
        """
        self._sequences.check_new("sequence_id", sequence_id)
        known = array("i") if token_ids is None else pack_token_ids(token_ids)
        self.check_length(len(known))
        now = self._clock()
        sequence = Sequence(sequence_id, extras, extras.chain_root(self._root), now)
        sequence.token_ids = known
        sequence.charge = len(known)
        sequence.is_hashable = self.config.prefix_caching
        found = self._index.find(sequence.chain_root, known, extras) if sequence.is_hashable else []
        for entry in found:
            self.ledger.enter(entry.block_id, sequence_id, self._block_size, now)
        sequence.table.extend([entry.block_id for entry in found])
        sequence.num_published = len(found)
        sequence.num_cached_tokens = num_cached = len(found) * self._block_size
        self.ledger.logical_blocks += len(found)
        self.ledger.claimed_tokens += num_cached
        self.ledger.logical_tokens += num_cached
        sequence.length = num_cached
        self.ledger.set_pow2(sequence)
        sequence.uncounted = None if token_ids is None else (len(known), num_cached, is_recompute)
        self._sequences.add(sequence)
        return Allocation(sequence_id, num_cached)

    def probe_prefix(self, token_ids: SequenceOf[int], extras: PrefixExtras = NO_EXTRAS) -> int:
        """Return how many tokens an allocate would find now; changes nothing."""
        if not self.config.prefix_caching:
            return 0
        found = self._index.find(extras.chain_root(self._root), pack_token_ids(token_ids), extras)
        return len(found) * self._block_size

    def fork(self, parent_id: str, child_id: str) -> None:
        """Start a sequence that shares all blocks of another.

        Raises SequenceNotFound, SequenceExists, SequenceSwapped, PositionMismatch while the parent's layers differ in
        length, and InvalidArgument while the parent has an open reservation.
        """
        parent = self._sequences.find_idle("parent_id", parent_id)
        self._sequences.check_new("child_id", child_id)
        check_layers_equal(parent)
        child = Sequence(child_id, parent.extras, parent.chain_root, self._clock())
        child.table = parent.table[:]
        child.token_ids = parent.token_ids[: parent.length]
        child.num_published, child.is_hashable = parent.num_published, parent.is_hashable
        for block in child.table:
            self.pool.acquire(block, child.created_at)
        view = parent.length % self._block_size
        if view:
            self.ledger.see(child.table[-1], parent_id, view)
            self.ledger.see(child.table[-1], child_id, view)
        child.charge = child.length = parent.length
        self.ledger.logical_blocks += len(child.table)
        self.ledger.logical_tokens += child.length
        self.ledger.claimed_tokens += child.length
        self.ledger.set_pow2(child)
        self._sequences.add(child)

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Give tokens back: every layer keeps at most the first `num_tokens`.

        Raises SequenceNotFound, SequenceSwapped, and InvalidArgument beyond the sequence's length or with an open
        reservation.
        """
        sequence = self._sequences.find_idle("sequence_id", sequence_id)
        written = sequence.written
        require(0 <= num_tokens <= written, "num_tokens", f"must be in [0, {written}]", num_tokens, written)
        sequence.touched_at = now = self._clock()
        if num_tokens == written:
            return
        self.ledger.claimed_tokens -= written - num_tokens
        self.ledger.leave_all(sequence, -(-num_tokens // self._block_size), now)
        if num_tokens < sequence.length:
            self.ledger.shrink(sequence, num_tokens)
        if sequence.layer_lengths is not None:
            lengths = [min(length, num_tokens) for length in sequence.layer_lengths]
            sequence.layer_lengths = None if min(lengths) == max(lengths) else lengths
        del sequence.token_ids[num_tokens:]
        sequence.num_published = min(sequence.num_published, sequence.length // self._block_size)

    def free(self, sequence_id: str) -> None:
        """End a sequence; an open reservation of it is void. Raises SequenceNotFound."""
        self._free(self._sequences.find(sequence_id), self._clock())

    def free_batch(self, sequence_ids: SequenceOf[str]) -> None:
        """End all of these sequences or none. Raises SequenceNotFound, InvalidArgument for one named twice."""
        sequences = self._sequences.find_all(sequence_ids)
        now = self._clock()
        for sequence in sequences:
            self._free(sequence, now)

    # -- swapping -----------------------------------------------------------------------------------------------

    def swap_out(self, sequence_ids: SequenceOf[str]) -> SwapPlan:
        """Move these sequences to host memory, all or none; the plan's copies must be the next job.

        What they shared they share in host memory, and each block is copied once. Those swapped out already are left
        alone. Raises SequenceNotFound, OutOfHostBlocks, SwapUnavailable without a host pool, and InvalidArgument for
        one named twice or with an open reservation.
        """
        sequences = [found for found in self._sequences.find_all_closed(sequence_ids) if found.host_table is None]
        return self._swapper.swap_out(sequences, self._clock())

    def swap_in(self, sequence_ids: SequenceOf[str], next_tokens: int = 1) -> SwapPlan:
        """Move these sequences back, all or none; the plan's copies must be the next job.

        Blocks that are still on the device, held by a fork or cached, are taken as they are. Succeeds only where the
        pool can also give what each sequence's `next_tokens` need. Those that are not swapped out are left alone.
        Raises SequenceNotFound, OutOfBlocks, and InvalidArgument for one named twice.
        """
        sequences = [found for found in self._sequences.find_all_closed(sequence_ids) if found.host_table is not None]
        need = self._swapper.need(sequences, next_tokens)
        self._check_available(need.total)
        return self._swapper.swap_in(sequences, self._clock())

    def swap_in_need(self, sequence_id: str, next_tokens: int = 1) -> SwapNeed:
        """Return what swapping a sequence in would take now. Raises SequenceNotFound."""
        sequence = self._sequences.find(sequence_id)
        return self._swapper.need((sequence,) if sequence.host_table is not None else (), next_tokens)

    # -- tokens -------------------------------------------------------------------------------------------------

    def reserve(
        self,
        sequence_id: str,
        num_tokens: int,
        *,
        layer: int | None = None,
        token_ids: SequenceOf[int] | None = None,
    ) -> Reservation:
        """Plan slots for the next tokens of one layer, or of all layers; see reserve_batch."""
        return self.reserve_batch((ReserveRequest(sequence_id, num_tokens, layer, token_ids),))[0]

    def reserve_batch(self, requests: SequenceOf[ReserveRequest]) -> list[Reservation]:
        """Plan slots for the next tokens of several sequences, all or none.

        The slots are in the block tables at once, but nothing counts as written before the commit. Raises
        SequenceNotFound, SequenceSwapped, SequenceTooLong, OutOfBlocks, PositionMismatch for a request over all layers
        while their lengths differ, and InvalidArgument for a sequence named twice or with an open reservation, a number
        or layer out of range, or token ids that contradict known ones.
        """
        if len({request[0] for request in requests}) != len(requests):
            check_unique("requests", [request[0] for request in requests])
        unshared: dict[int, int] = {}
        find, plan = self._sequences.find, self._reservations.plan
        plans = [plan(find(request[0]), request, unshared) for request in requests]
        now = self._clock()
        fresh: list[int] = []
        needed = sum([made[5] + made[6] for made in plans])
        if needed:
            self._check_available(needed)
            fresh = self.pool.take(needed, now)
            fresh.reverse()  # so that each plan pops its own
        apply = self._reservations.apply
        return [apply(made, fresh, now) for made in plans]

    def commit(self, reservation: Reservation) -> None:
        """Mark a reservation's tokens written. Raises InvalidArgument if it is not open."""
        self.commit_batch((reservation,))

    def commit_batch(self, reservations: SequenceOf[Reservation]) -> None:
        """Mark the tokens of all reservations written, or of none. Blocks full in all layers become findable."""
        if len({reservation[0] for reservation in reservations}) != len(reservations):
            check_unique("reservations", [reservation[0] for reservation in reservations])
        sequences = [self._sequences.find_open(reservation) for reservation in reservations]
        now, commit = self._clock(), self._reservations.commit
        for sequence in sequences:
            commit(sequence, now)

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation's blocks back. Raises InvalidArgument if it is not open."""
        sequence = self._sequences.find_open(reservation)
        self._reservations.cancel(sequence, self._clock())

    # -- reading ------------------------------------------------------------------------------------------------

    def sequence(self, sequence_id: str) -> SequenceView:
        """Return a sequence as it is now. Raises SequenceNotFound."""
        return self._sequences.find(sequence_id).view(self.config.num_layers)

    def summary(self, sequence_id: str) -> SequenceView:
        """Return a sequence as it is now without its tables and layer lengths. Raises SequenceNotFound."""
        return self._sequences.find(sequence_id).summary()

    def table_length(self, sequence_id: str) -> int:
        """Return the entries of a sequence's block table, or of its host table. Raises SequenceNotFound."""
        sequence = self._sequences.find(sequence_id)
        return len(sequence.table if sequence.host_table is None else sequence.host_table)

    def written(self, sequence_id: str) -> int:
        """Return the tokens written in at least one layer. Raises SequenceNotFound."""
        return self._sequences.find(sequence_id).written

    def check_length(self, num_tokens: int) -> None:
        """Raise SequenceTooLong for more tokens than a sequence may hold."""
        if num_tokens > self._sequence_limit:
            raise SequenceTooLong("the tokens are too many", num_tokens=num_tokens, limit=self._sequence_limit)

    @property
    def num_sequences(self) -> int:
        """Live sequences, swapped ones included."""
        return len(self._sequences)

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the live sequences began with, by their ids or from their parents; each one's counts."""
        return self._sequences.charge

    def block_table(self, sequence_id: str) -> array[int]:
        """Return a copy of a sequence's block ids as int32, reserved blocks included.

        Raises SequenceNotFound, SequenceSwapped.
        """
        return self._sequences.find_resident(sequence_id).table[:]

    def check_resident(self, sequence_ids: SequenceOf[str]) -> None:
        """Raise SequenceNotFound or SequenceSwapped unless all of these sequences are on the device."""
        for sequence_id in sequence_ids:
            self._sequences.find_resident(sequence_id)

    def length(self, sequence_id: str, layer: int | None = None) -> int:
        """Return the tokens committed in `layer`, or in all layers. Raises SequenceNotFound."""
        self._check_layer(layer)
        return self._sequences.find(sequence_id).layer_length(layer)

    def sequence_ids(self) -> list[str]:
        """Return the ids of all live sequences, the oldest first."""
        return self._sequences.ids()

    def num_available(self) -> int:
        """Return the blocks that can be taken now: free ones, and cached ones by eviction."""
        return self.pool.num_available

    def usage(self) -> Usage:
        """Return the blocks by state."""
        return count_usage(self.pool, self.ledger)

    def accounting(self) -> Accounting:
        """Return where the memory is and why."""
        return account(
            self.pool,
            self.ledger,
            num_sequences=len(self._sequences) - self.host.num_sequences,
            block_size=self._block_size,
            sequence_limit=self._sequence_limit,
        )

    # -- upkeep -------------------------------------------------------------------------------------------------

    def flush_prefix_cache(self) -> FlushResult:
        """Make nothing that was computed so far findable, on the device and in host memory, as after new weights.

        Cached blocks are free then. Blocks that live sequences hold are kept for these alone and counted, swapped ones
        too: no other sequence finds them again, whatever is written behind them.
        """
        num_swapped = 0
        for sequence in self._sequences:
            if sequence.host_table is not None:
                num_swapped += sequence.num_published
            if sequence.table or sequence.host_table:
                sequence.is_hashable = False
                sequence.num_published = 0
        return self.pool.flush(num_swapped)

    def forget(self, block_ids: SequenceOf[int]) -> None:
        """Make these blocks, and all that continue them, unfindable for good: their K and V proved bad.

        Sequences that hold one keep it, and publish nothing more. O(published blocks), as `distrust`: for failures.
        """
        named = frozenset(block_ids)
        lost = self.pool.forget_with_descendants(named) | named
        copies = {self.host.host_of[block] for block in lost if block in self.host.host_of}
        for sequence in self._sequences:
            held, bad = (sequence.table, lost) if sequence.host_table is None else (sequence.host_table, copies)
            first = next((at for at, block in enumerate(held) if block in bad), None)
            if first is not None:
                sequence.is_hashable = False
                sequence.num_published = min(sequence.num_published, first)

    def distrust(self, block_ids: SequenceOf[int], intact: Mapping[str, int] | None = None) -> None:
        """Take back that these blocks were written, after work that failed on the device behind its commit.

        Nobody finds them any more, and every sequence that holds one ends before it: after the tokens that `intact`
        names for it, else at the block's first. Those with an open reservation are left alone: their work comes later.
        """
        doubtful = frozenset(block_ids)
        for sequence in list(self._sequences):
            index = next((at for at, block in enumerate(sequence.table) if block in doubtful), None)
            if index is not None and sequence.open is None:
                num_tokens = max(index * self._block_size, (intact or {}).get(sequence.sequence_id, 0))
                self.truncate(sequence.sequence_id, min(num_tokens, sequence.written))
        self.forget(block_ids)

    def audit(self) -> AuditReport:
        """Recompute everything from the block tables, compare, and repair; blocks in doubt are never given out."""
        return audit(self.pool, self.ledger, list(self._sequences), self._index.hash_block)

    def begin_audit(self) -> Callable[[], bool]:
        """Return an audit of the cache as it is now, to be run on any thread; it tells whether everything agreed.

        Copying 100,000 blocks takes about a tenth of the time of an audit. It repairs nothing.
        """
        return begin_audit(self.pool, self.ledger, list(self._sequences), self._index.hash_block)

    # -- private ------------------------------------------------------------------------------------------------

    def _free(self, sequence: Sequence, now: float) -> None:
        self._sequences.remove(sequence)
        if sequence.host_table is not None:
            self._swapper.forget(sequence)
            return
        ledger = self.ledger
        ledger.claimed_tokens -= sequence.claimed
        ledger.logical_tokens -= sequence.length
        ledger.pow2_tokens -= sequence.pow2
        self._reservations.void(sequence, now)
        ledger.leave_all(sequence, 0, now)

    def _check_layer(self, layer: int | None) -> None:
        limit = self.config.num_layers
        require(layer is None or 0 <= layer < limit, "layer", f"must be in [0, {limit})", layer, limit)

    def _check_available(self, needed: int) -> None:
        pool = self.pool
        if needed > pool.num_available:
            self.stats.failed_allocations += 1
            raise OutOfBlocks(needed=needed, free=pool.num_available, evictable=len(pool.cached), total=pool.num_blocks)
