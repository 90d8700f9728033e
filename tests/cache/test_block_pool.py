"""The pool below the manager."""

from __future__ import annotations

from pagedkv.cache.block import BlockState, CacheStats
from pagedkv.cache.block_pool import BlockPool


def make_pool(num_blocks):
    return BlockPool(num_blocks, CacheStats())


def test_ba03_release_that_names_a_block_twice_frees_it_once():
    pool = make_pool(10)
    blocks = pool.take(10, 0.0)
    assert pool.release([7, 7, 9], 0.0) == 2
    assert (len(pool.free), pool.stats.refused_releases) == (2, 1)
    assert sorted([*pool.take(2, 0.0), *set(blocks) - {7, 9}]) == blocks


def test_take_after_release_gives_the_same_blocks_in_the_same_order():
    pool = make_pool(100)
    for _ in range(3):
        blocks = pool.take(40, 0.0)
        assert blocks == list(range(40))
        pool.release(blocks, 0.0)


def test_shared_block_is_released_by_its_last_holder():
    pool = make_pool(2)
    (block,) = pool.take(1, 0.0)
    pool.acquire(block, 0.0)
    pool.acquire(block, 0.0)
    states = []
    for expected in (0, 0, 1):
        assert pool.release([block], 0.0) == expected
        states.append(pool.states[block])
    assert states == [BlockState.SHARED, BlockState.PRIVATE, BlockState.FREE]


def test_held_block_is_in_flight_until_its_last_hold_is_dropped():
    pool = make_pool(1)
    (block,) = pool.take(1, 0.0)
    pool.hold(block)
    pool.hold(block)
    pool.release([block], 0.0)
    assert (pool.num_in_flight, pool.num_available, pool.num_held) == (1, 0, 0)
    pool.unhold(block, 0.0)
    assert pool.num_in_flight == 1
    pool.unhold(block, 0.0)
    assert (pool.num_in_flight, pool.num_available) == (0, 1)
    assert pool.stats.released_blocks == 1
