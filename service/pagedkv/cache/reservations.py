"""Reserve, commit, cancel: how tokens come into a sequence.

A reservation's blocks are in the table from the start, so that kernels can be launched on it. A block that must be
copied before it is written is replaced in the table at once and put on hold: it is neither given out nor forgotten
until the reservation is committed (the copy is queued by then) or cancelled (the table gets it back).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from pagedkv.cache.block_hash import pack_token_ids
from pagedkv.cache.block_pool import BlockPool
from pagedkv.cache.ledger import Ledger
from pagedkv.cache.prefix_index import PrefixIndex
from pagedkv.cache.sequence import Reservation, ReserveRequest, Sequence
from pagedkv.config import CacheConfig, require
from pagedkv.errors import InvalidArgument, PositionMismatch, SequenceSwapped, SequenceTooLong

# A checked reserve request: sequence, layer, start, number of tokens, ids that become known, number of blocks to append
# to the table, whether the block at `start` is copied first. A plain tuple: a named one takes a tenth of a whole step.
Plan: TypeAlias = "tuple[Sequence, int | None, int, int, array[int] | None, int, bool]"


class Reservations:
    """Plans, makes and ends reservations; the caller sees to it that the pool has the blocks that plans need."""

    def __init__(self, config: CacheConfig, pool: BlockPool, ledger: Ledger, index: PrefixIndex) -> None:
        self._pool = pool
        self._ledger = ledger
        self._index = index
        self._block_size = config.block_size
        self._num_layers = config.num_layers
        self._sequence_limit = config.sequence_limit

    def plan(self, sequence: Sequence, request: ReserveRequest, unshared: dict[int, int]) -> Plan:
        """Check a request and return what it takes; changes nothing but `unshared`.

        `unshared` holds the ref counts that blocks will have after the copies planned so far in the batch, so that
        the last of several writers writes in place.
        """
        _, num_tokens, layer, token_ids = request
        if sequence.open is not None:
            raise InvalidArgument("the sequence has an open reservation", field="sequence_id")
        if sequence.host_table is not None:
            raise SequenceSwapped(sequence.sequence_id)
        if layer is None:
            if sequence.layer_lengths is not None:
                check_layers_equal(sequence)
            start = sequence.length
        else:
            require(0 <= layer < self._num_layers, "layer", f"must be in [0, {self._num_layers})", layer)
            start = sequence.layer_length(layer)
        if num_tokens < 1:
            raise InvalidArgument(
                f"must be at least 1, got {num_tokens}", field="num_tokens", value=num_tokens, limit=1
            )
        end = start + num_tokens
        if end > self._sequence_limit:
            raise SequenceTooLong("the sequence would be too long", num_tokens=end, limit=self._sequence_limit)
        new_token_ids = None if token_ids is None else _new_token_ids(sequence, start, num_tokens, token_ids)
        size, num_blocks = self._block_size, len(sequence.table)
        num_fresh = (end + size - 1) // size - num_blocks
        needs_copy = False
        if start % size:
            block = sequence.table[start // size]
            needs_copy = not self._pool.is_writable(block) and self._is_copied(block, unshared)
        return sequence, layer, start, num_tokens, new_token_ids, num_fresh if num_fresh > 0 else 0, needs_copy

    def _is_copied(self, block: int, unshared: dict[int, int]) -> bool:
        """Whether the next writer of a block that is not its own needs a copy, after those planned so far."""
        if block in self._pool.published or block in self._pool.holds:
            return True
        ref_count = unshared.get(block, self._pool.ref_count(block))
        unshared[block] = ref_count - 1
        return ref_count > 1

    def apply(self, plan: Plan, fresh: list[int], now: float) -> Reservation:
        """Make the planned reservation, popping its blocks off the end of `fresh`."""
        sequence, layer, start, num_tokens, new_token_ids, num_fresh, needs_copy = plan
        copies = (self._replace(sequence, start, fresh.pop(), now),) if needs_copy else ()
        reservation = Reservation(sequence.sequence_id, layer, start, num_tokens, copies)
        sequence.num_fresh = num_fresh
        if self._pool.host.host_of:
            for block in sequence.table[start // self._block_size :]:
                self._pool.host.part(block)  # it is written in place
        if num_fresh:
            blocks = fresh[: -num_fresh - 1 : -1]
            del fresh[-num_fresh:]
            sequence.table.extend(blocks)
            self._ledger.logical_blocks += num_fresh
        sequence.num_known_before = len(sequence.token_ids)
        if new_token_ids:
            sequence.token_ids.extend(new_token_ids)
        if layer is None:
            self._ledger.claimed_tokens += num_tokens
        else:
            self._ledger.claimed_tokens += max(0, start + num_tokens - sequence.written)
        sequence.open = reservation
        sequence.touched_at = now
        return reservation

    def _replace(self, sequence: Sequence, start: int, fresh: int, now: float) -> tuple[int, int]:
        """Put a fresh block in place of one that must not be written; return the copy to run."""
        index, view = start // self._block_size, start % self._block_size
        source = sequence.table[index]
        self._pool.hold(source)
        self._ledger.leave(source, sequence.sequence_id, view, now)
        sequence.table[index] = fresh
        self._ledger.num_tokens += view
        return source, fresh

    def commit(self, sequence: Sequence, now: float) -> None:
        """End the open reservation, its tokens being written."""
        _, layer, start, num_tokens, copies = _open(sequence)
        sequence.open = None
        sequence.touched_at = now
        if copies:
            self._release_copies(copies, now)
            self._pool.stats.copied_blocks += len(copies)
        if sequence.uncounted is not None:
            self._count_hits(sequence)
        length = start + num_tokens
        if layer is not None:
            lengths = sequence.layer_lengths or [sequence.length] * self._num_layers
            lengths[layer] = length
            length = min(lengths)
            sequence.layer_lengths = None if length == max(lengths) else lengths
        if length > sequence.length:
            self._ledger.grow(sequence, length)
            if sequence.is_hashable and length // self._block_size > sequence.num_published:
                self._index.publish(sequence, now)

    def cancel(self, sequence: Sequence, now: float) -> None:
        """End the open reservation as if it had not been made."""
        reservation, size = _open(sequence), self._block_size
        claimed = sequence.claimed
        sequence.open = None
        self._ledger.claimed_tokens -= claimed - sequence.written
        del sequence.token_ids[sequence.num_known_before :]
        self._ledger.leave_all(sequence, len(sequence.table) - sequence.num_fresh, now)
        for source, fresh in reservation.copies:
            sequence.table[reservation.start // size] = source
            self._ledger.leave(fresh, sequence.sequence_id, reservation.start % size, now)
            self._ledger.enter(source, sequence.sequence_id, reservation.start % size, now)
        self._release_copies(reservation.copies, now)

    def void(self, sequence: Sequence, now: float) -> None:
        """End the open reservation of a sequence before it leaves its blocks: the source of a copy hangs on them."""
        if sequence.open is not None:
            self._release_copies(sequence.open.copies, now)
            sequence.open = None

    def _release_copies(self, copies: tuple[tuple[int, int], ...], now: float) -> None:
        for source, _ in copies:
            self._pool.unhold(source, now)

    def _count_hits(self, sequence: Sequence) -> None:
        stats = self._pool.stats
        assert sequence.uncounted is not None
        queried, hit, is_recompute = sequence.uncounted
        sequence.uncounted = None
        if is_recompute:
            stats.recompute_queried_tokens += queried
            stats.recompute_hit_tokens += hit
        else:
            stats.queried_tokens += queried
            stats.hit_tokens += hit


def _open(sequence: Sequence) -> Reservation:
    assert sequence.open is not None
    return sequence.open


def check_layers_equal(sequence: Sequence) -> None:
    """Raise PositionMismatch unless all layers have the same length."""
    if sequence.layer_lengths is not None:
        raise PositionMismatch(
            "the sequence's layers differ in length", position=sequence.written, expected=sequence.length
        )


def _new_token_ids(sequence: Sequence, start: int, num_tokens: int, token_ids: SequenceOf[int]) -> array[int] | None:
    """Return the ids that become known; None if they leave a gap after the known ones."""
    packed = pack_token_ids(token_ids)
    if len(packed) != num_tokens:
        require(False, "token_ids", f"must hold num_tokens ({num_tokens}) ids", len(packed), num_tokens)
    known = sequence.token_ids
    num_known = len(known) - start
    if num_known == 0:
        return packed
    if num_known < 0:
        return None
    known = known[start : start + num_tokens]
    if known != packed[: len(known)]:
        position = next(i for i, pair in enumerate(zip(known, packed, strict=False)) if pair[0] != pair[1])
        require(False, f"token_ids[{position}]", f"contradicts the known id {known[position]}", packed[position])
    return packed[num_known:]
