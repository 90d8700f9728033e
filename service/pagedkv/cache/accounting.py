"""Where the memory is and why: figures kept up to date by every call, and the free runs counted when asked for."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.cache.block import BlockState, Usage
from pagedkv.cache.block_pool import BlockPool
from pagedkv.cache.ledger import Ledger

_AVAILABLE_BITS = bytes(ord("1") if state in (BlockState.FREE, BlockState.CACHED) else ord("0") for state in range(256))


@dataclass(frozen=True, slots=True)
class FreeRuns:
    """Runs of neighbouring ids among the blocks that can be given out, cached ones included."""

    num_free: int
    largest: int
    histogram: tuple[int, ...]  # [k]: runs with a length in [2**k, 2**(k + 1))


@dataclass(frozen=True, slots=True)
class Accounting:
    """The pool at one moment. Figures are in blocks or tokens (slots); a block is counted once however many hold it.

    `tail_slots`, `reserved_slots` (claimed but not yet committed in all layers) and `cached_slots` are the waste by
    cause. `contiguous_*` are the slots that the live sequences would take from an allocator that reserves the longest
    sequence allowed, the next power of two, or exactly the length (Orca Max, Pow2 and Oracle in the vLLM paper,
    section 6.1); a live sequence's final length is not known, so the last two are what they would take so far.
    """

    block_size: int
    total_blocks: int
    held_blocks: int
    logical_blocks: int
    num_sequences: int
    num_tokens: int
    logical_tokens: int
    tail_slots: int
    reserved_slots: int
    cached_slots: int
    contiguous_max: int
    contiguous_pow2: int
    contiguous_oracle: int
    free_runs: FreeRuns

    @property
    def internal_fragmentation(self) -> float:
        """Share of the held slots that hold no token."""
        return 1 - self.num_tokens / (self.held_blocks * self.block_size) if self.held_blocks else 0.0

    @property
    def token_occupancy(self) -> float:
        """Share of all slots that hold a token."""
        return self.num_tokens / (self.total_blocks * self.block_size)

    @property
    def sharing_ratio(self) -> float:
        """Blocks as the tables count them over blocks held."""
        return self.logical_blocks / self.held_blocks if self.held_blocks else 1.0

    @property
    def memory_saved(self) -> float:
        """Share of the tables' blocks that sharing made unnecessary."""
        return 1 - self.held_blocks / self.logical_blocks if self.logical_blocks else 0.0

    @property
    def external_fragmentation(self) -> float:
        """Share of the free blocks outside the largest run; it fails no paged allocation."""
        return 1 - self.free_runs.largest / self.free_runs.num_free if self.free_runs.num_free else 0.0


def count_free_runs(states: bytes | bytearray) -> FreeRuns:
    """Count the runs of blocks that can be given out.

    Keeping them at each change would cost the hot path more than everything else it does. Counted on demand they are
    big-integer arithmetic: a map of n bits, eroded by 1, 2, 4, ... bits, keeps exactly the runs that are longer. That
    is O(n log n) bit operations, 64 or so at a time: a third of a millisecond for 100,000 blocks, however fragmented.
    """
    bits = int(states.translate(_AVAILABLE_BITS), 2)
    eroded, counts = [], []  # [k]: the map eroded by 2**k - 1, and the runs of at least 2**k
    current = bits
    while current:
        eroded.append(current)
        counts.append((current & ~(current << 1)).bit_count())
        current &= current >> (1 << (len(eroded) - 1))
    histogram = tuple(count - longer for count, longer in zip(counts, [*counts, 0][1:], strict=True))
    return FreeRuns(bits.bit_count(), _longest_run(eroded), histogram)


def _longest_run(eroded: list[int]) -> int:
    """Binary search between the last two powers: erode by less wherever the whole step leaves nothing."""
    if not eroded:
        return 0
    current, length = eroded[-1], 1 << (len(eroded) - 1)
    for k in range(len(eroded) - 2, -1, -1):
        shorter = current & (eroded[k] >> length)  # runs of at least `length` that go on for 2**k more
        if shorter:
            current, length = shorter, length + (1 << k)
    return length


def count_usage(pool: BlockPool, ledger: Ledger) -> Usage:
    """Return the blocks of both pools by state."""
    host = pool.host
    return Usage(
        free=len(pool.free),
        cached=len(pool.cached),
        private=pool.num_held - len(pool.shared),
        shared=len(pool.shared),
        pinned=pool.num_pinned,
        in_flight=pool.num_in_flight,
        total=pool.num_blocks,
        num_tokens=ledger.num_tokens,
        host_free=len(host.free),
        host_private=len(host.holders) - host.num_shared,
        host_shared=host.num_shared,
        host_total=host.num_blocks,
        num_swapped=host.num_sequences,
        swapped_tokens=host.num_tokens,
    )


def account(pool: BlockPool, ledger: Ledger, *, num_sequences: int, block_size: int, sequence_limit: int) -> Accounting:
    """Read the ledger; only the free runs are counted."""
    reserved = ledger.claimed_tokens - ledger.logical_tokens
    return Accounting(
        block_size=block_size,
        total_blocks=pool.num_blocks,
        held_blocks=pool.num_held,
        logical_blocks=ledger.logical_blocks,
        num_sequences=num_sequences,
        num_tokens=ledger.num_tokens,
        logical_tokens=ledger.logical_tokens,
        tail_slots=pool.num_held * block_size - ledger.num_tokens - reserved,
        reserved_slots=reserved,
        cached_slots=len(pool.cached) * block_size,
        contiguous_max=num_sequences * sequence_limit,
        contiguous_pow2=ledger.pow2_tokens,
        contiguous_oracle=ledger.logical_tokens,
        free_runs=count_free_runs(pool.states),
    )
