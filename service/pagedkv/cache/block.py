"""What a block can be, and how many blocks are what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BlockState(IntEnum):
    """The one state of a block. The numbers are what the pool's state map holds, one byte a block."""

    FREE = 0  # nobody holds it and it cannot be found
    CACHED = 1  # nobody holds it, but its hash finds it; evicted when the free blocks run out
    PRIVATE = 2  # in one block table
    SHARED = 3  # in several block tables
    PINNED = 4  # in no block table, yet never given out: pinned, or quarantined by an audit
    IN_FLIGHT = 5  # in no block table, but a copy that an open reservation asked for may still read it


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks by state, which sum to `total`, and the tokens that live sequences hold, each physical token once.

    Swapped sequences hold host blocks only, whose three states sum to `host_total`.
    """

    free: int
    cached: int
    private: int
    shared: int
    pinned: int
    in_flight: int
    total: int
    num_tokens: int
    host_free: int = 0
    host_private: int = 0  # in one swapped sequence's table
    host_shared: int = 0  # in several
    host_total: int = 0
    num_swapped: int = 0  # sequences
    swapped_tokens: int = 0  # tokens that they hold, each physical token once


@dataclass(slots=True)
class CacheStats:
    """Monotone counters. Prompt tokens are counted when a sequence first commits, so that a retry counts once."""

    queried_tokens: int = 0  # of prompts given to allocate with their ids
    hit_tokens: int = 0  # of those, found in the prefix cache
    recompute_queried_tokens: int = 0  # the same two for prompts computed again after a preemption
    recompute_hit_tokens: int = 0
    allocated_blocks: int = 0  # taken from the pool
    released_blocks: int = 0  # given back by their last holder
    evicted_blocks: int = 0
    published_blocks: int = 0
    copied_blocks: int = 0  # by copy-on-write
    swapped_out_blocks: int = 0  # copied to host memory
    swapped_in_blocks: int = 0  # copied back
    deduplicated_blocks: int = 0
    hash_collisions: int = 0
    failed_allocations: int = 0
    refused_releases: int = 0  # of blocks that nobody held; stays 0 unless the pool's caller errs
    quarantined_blocks: int = 0
