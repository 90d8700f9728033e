"""An audit finds any damage, puts it right, and keeps what is in doubt from being given out."""

from __future__ import annotations

import pytest

from helpers.caches import assert_sound, make_cache, run_prompt, write
from pagedkv.cache import BlockState
from pagedkv.errors import OutOfBlocks


def make_busy_cache():
    """Blocks 0 1 shared by a and b, 2 of a, 3 of b, 4 5 cached, 6 to 15 free."""
    cache = make_cache(16, 4)
    run_prompt(cache, "a", [1] * 9)
    run_prompt(cache, "b", [1] * 8 + [2])
    run_prompt(cache, "c", [3] * 8)
    cache.free("c")
    assert [cache.pool.states[block] for block in range(7)] == [3, 3, 2, 2, 1, 1, 0]
    return cache


def damage_state(cache):
    cache.pool.states[2] = BlockState.FREE


def damage_free_list(cache):
    cache.pool.free.append(2)


def damage_free_list_twice(cache):
    cache.pool.free.append(cache.pool.free[-1])


def damage_lost_block(cache):
    cache.pool.free.remove(9)


def damage_ref_count(cache):
    cache.pool.shared[0] += 1


def damage_cached(cache):
    del cache.pool.cached[4]


def damage_digest(cache):
    cache.pool.published[0].tokens = b"\1\0\0\0" * 3 + b"\7\0\0\0"


def damage_index(cache):
    cache.pool.index[b"wrong"] = cache.pool.published[4]


def damage_tokens(cache):
    cache._sequences.find("a").token_ids[0] = 77


def damage_table(cache):
    cache._sequences.find("a").table[2] = 3


def damage_table_range(cache):
    cache._sequences.find("a").table[2] = 999


def damage_sum(cache):
    cache.ledger.num_tokens += 1


def damage_views(cache):
    cache.ledger.views[0] = {"a": 1}


def damage_hold(cache):
    cache.pool.hold(6)


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_quarantined_and_service_goes_on(damage):
    cache = make_busy_cache()
    damage(cache)
    assert not cache.audit().ok
    usage = cache.usage()
    states = (usage.free, usage.cached, usage.private, usage.shared, usage.pinned, usage.in_flight)
    assert sum(states) == usage.total
    assert_sound(cache)
    cache.free_batch(["a", "b"])
    assert_sound(cache)
    cache.allocate("new")
    write(cache, "new", 4 * cache.num_available())
    assert_sound(cache)


@pytest.mark.parametrize("damage", DAMAGES)
def test_audit_of_a_copy_finds_the_same_damage_and_repairs_nothing(damage):
    cache = make_busy_cache()
    damage(cache)
    assert not cache.begin_audit()()
    assert not cache.audit().ok
    assert cache.begin_audit()()


def test_audit_of_a_copy_is_of_the_moment_of_the_copy():
    cache = make_busy_cache()
    sound = cache.begin_audit()
    damage_ref_count(cache)
    damaged = cache.begin_audit()
    cache.audit()
    cache.free_batch(["a", "b"])
    cache.allocate("new")
    write(cache, "new", 40)
    assert sound()
    assert not damaged()


def test_quarantined_block_is_pinned_once_free_and_never_given_out():
    cache = make_busy_cache()
    damage_ref_count(cache)
    report = cache.audit()
    assert report.num_quarantined == 1
    assert report.findings[0].startswith("block 0:")
    assert cache.probe_prefix([1] * 9) == 0
    cache.free_batch(["a", "b"])
    usage = cache.usage()
    assert (usage.pinned, cache.num_available()) == (1, 15)
    cache.allocate("new")
    with pytest.raises(OutOfBlocks):
        cache.reserve("new", 64)
    assert 0 not in cache.block_table("new")


def test_published_descendants_of_a_doubtful_block_are_forgotten():
    cache = make_busy_cache()
    damage_digest(cache)
    assert not cache.audit().ok
    assert set(cache.pool.published) == {4, 5}
    assert_sound(cache)
    write(cache, "a", 8, token_ids=[5] * 8)  # its later blocks could not be found and are not published
    assert set(cache.pool.published) == {4, 5}
    assert_sound(cache)
