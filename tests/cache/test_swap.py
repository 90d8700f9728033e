"""Swapping: where the blocks go, what stays shared, what is refused. Case ids are those of tests/cases.md."""

from __future__ import annotations

import pytest

from helpers.caches import assert_pool_clean, assert_sound, make_cache, run_prompt, snapshot, table, write
from pagedkv.config import CacheConfig
from pagedkv.errors import (
    InvalidArgument,
    OutOfBlocks,
    OutOfHostBlocks,
    PositionMismatch,
    SequenceNotFound,
    SequenceSwapped,
    SwapUnavailable,
)


def make_group(cache, num_shared=3, num_forks=2):
    """Start forks that share full blocks and hold one private block each; return their names."""
    cache.allocate("fork-0")
    write(cache, "fork-0", num_shared * 16)
    names = [f"fork-{index}" for index in range(num_forks)]
    for name in names[1:]:
        cache.fork("fork-0", name)
    for name in names:
        write(cache, name, 5)
    return names


@pytest.mark.parametrize("batches", [[["fork-0", "fork-1"]], [["fork-0"], ["fork-1"]], [["fork-1"], ["fork-0"]]])
def test_sc16_a_forked_group_is_copied_once_and_shares_again(batches):
    cache = make_cache(num_host_blocks=8)
    make_group(cache)
    out = [pair for names in batches for pair in cache.swap_out(names).pairs]
    assert len(out) == len({host for _, host in out}) == 5
    assert (cache.usage().host_private, cache.usage().host_shared, cache.usage().host_free) == (2, 3, 3)
    assert cache.usage().free == 64
    back = [pair for names in batches for pair in cache.swap_in(names).pairs]
    assert len(back) == 5
    assert table(cache, "fork-0")[:3] == table(cache, "fork-1")[:3]
    assert {cache.pool.ref_count(block) for block in table(cache, "fork-0")[:3]} == {2}
    assert (cache.usage().shared, cache.usage().private, cache.usage().host_free) == (3, 2, 8)
    assert_sound(cache)


@pytest.mark.parametrize("gone", ["fork-0", "fork-1", "fork-2"])
def test_ba11_a_group_that_still_names_a_freed_fork_is_refused_whole_and_its_rest_comes_clean(gone):
    cache = make_cache(num_host_blocks=8)
    names = make_group(cache, num_forks=3)
    cache.free(gone)
    before = snapshot(cache)
    for refused in (cache.swap_out, cache.swap_in, cache.free_batch):
        with pytest.raises(SequenceNotFound):
            refused(names)
        assert snapshot(cache) == before
    assert_sound(cache)
    left = [name for name in names if name != gone]
    assert len(cache.swap_out(left).pairs) == 3 + 2
    released = cache.stats.released_blocks
    cache.free(left[0])
    cache.swap_in(left[1:])
    cache.free_batch(left[1:])
    assert cache.stats.released_blocks - released == 4
    assert cache.usage().host_free == 8
    assert_pool_clean(cache)


def test_sc16_a_later_append_to_a_shared_tail_copies_as_before_the_swap():
    cache = make_cache(num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    cache.fork("a", "b")
    cache.swap_out(["a", "b"])
    cache.swap_in(["a", "b"])
    assert len(write(cache, "b", 1).copies) == 1
    assert not write(cache, "a", 1).copies
    assert_sound(cache)


def test_a_fork_that_runs_on_keeps_the_shared_blocks_and_the_other_takes_them_again():
    cache = make_cache(num_host_blocks=8)
    make_group(cache)
    shared = table(cache, "fork-1")[:3]
    plan = cache.swap_out(["fork-0"])
    assert (len(plan.pairs), cache.usage().free) == (4, 60)
    plan = cache.swap_in(["fork-0"])
    assert (len(plan.pairs), plan.num_kept) == (1, 3)
    assert table(cache, "fork-0")[:3] == shared


def test_a_tail_that_the_fork_wrote_on_is_copied_back_and_not_shared():
    cache = make_cache(num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    cache.fork("a", "b")
    cache.swap_out(["a"])
    assert not write(cache, "b", 1).copies  # in place: it is the last holder on the device
    plan = cache.swap_in(["a"])
    assert (len(plan.pairs), plan.num_kept) == (1, 1)
    assert table(cache, "a")[1] != table(cache, "b")[1]
    assert_sound(cache)


def test_blocks_still_in_the_prefix_cache_are_found_and_not_copied():
    cache = make_cache(num_host_blocks=8)
    run_prompt(cache, "a", list(range(40)))
    before = table(cache, "a")
    cache.swap_out(["a"])
    plan = cache.swap_in(["a"])
    assert (len(plan.pairs), plan.num_kept) == (1, 2)
    assert table(cache, "a")[:2] == before[:2]


def test_blocks_computed_again_by_another_sequence_are_found_by_their_hash():
    cache = make_cache(num_host_blocks=8)
    run_prompt(cache, "a", list(range(40)))
    cache.swap_out(["a"])
    cache.allocate("evicts")
    write(cache, "evicts", 16 * cache.num_available())
    cache.free("evicts")
    run_prompt(cache, "b", list(range(40)))
    plan = cache.swap_in(["a"])
    assert (len(plan.pairs), plan.num_kept) == (1, 2)
    assert table(cache, "a")[:2] == table(cache, "b")[:2]


def test_blocks_that_come_back_are_findable_again():
    cache = make_cache(num_blocks=4, num_host_blocks=8)
    run_prompt(cache, "a", list(range(40)))
    cache.swap_out(["a"])
    cache.allocate("b")
    write(cache, "b", 64)  # evicts everything
    cache.free("b")
    assert len(cache.swap_in(["a"]).pairs) == 3
    assert cache.probe_prefix(list(range(40))) == 32


@pytest.mark.parametrize(("num_free", "fits"), [(2, False), (3, True)])
def test_sc08_swap_in_counts_the_block_of_the_next_token(num_free, fits):
    cache = make_cache(num_blocks=8, num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 32)
    cache.swap_out(["a"])
    cache.allocate("other")
    write(cache, "other", 16 * (8 - num_free))
    before = snapshot(cache)
    if not fits:
        with pytest.raises(OutOfBlocks) as caught:
            cache.swap_in(["a"])
        assert (caught.value.needed, caught.value.free) == (3, 2)
        assert snapshot(cache) == before
        assert len(cache.swap_in(["a"], next_tokens=0).pairs) == 2
        return
    cache.swap_in(["a"])
    write(cache, "a", 1)
    assert cache.usage().free == 0


def test_sc08_the_copy_of_a_shared_tail_counts_as_the_next_tokens_block():
    cache = make_cache(num_blocks=5, num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    cache.fork("a", "b")
    assert cache.swap_out(["a"]).num_kept == 0
    assert cache.swap_in_need("a").total == 1  # both blocks are there; the write copies the tail
    cache.allocate("other")
    write(cache, "other", 48)
    with pytest.raises(OutOfBlocks):
        cache.swap_in(["a"])
    cache.truncate("other", 32)
    cache.swap_in(["a"])
    assert len(write(cache, "a", 1).copies) == 1


def test_blocks_that_are_found_cached_do_not_count_as_free_ones():
    cache = make_cache(num_blocks=3, num_host_blocks=8)
    run_prompt(cache, "a", list(range(33)))
    cache.swap_out(["a"])
    cache.allocate("other")
    write(cache, "other", 16)
    assert cache.num_available() == 2  # both cached, and both the sequence's own
    with pytest.raises(OutOfBlocks):
        cache.swap_in(["a"])


def test_a_swapped_sequence_refuses_what_needs_its_blocks():
    cache = make_cache(num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    cache.swap_out(["a"])
    before = snapshot(cache)
    calls = (
        lambda: cache.reserve("a", 1),
        lambda: cache.fork("a", "b"),
        lambda: cache.truncate("a", 3),
        lambda: cache.block_table("a"),
        lambda: cache.check_resident(["a"]),
    )
    for call in calls:
        with pytest.raises(SequenceSwapped):
            call()
    assert snapshot(cache) == before
    assert cache.length("a") == 20
    view = cache.sequence("a")
    assert (view.is_swapped, view.num_tokens, view.block_table, len(view.host_table)) == (True, 20, (), 2)


def test_free_of_a_swapped_sequence_gives_the_host_blocks_back():
    cache = make_cache(num_host_blocks=8)
    names = make_group(cache)
    cache.swap_out(names)
    cache.free(names[0])
    assert cache.usage().host_free == 4
    cache.free_batch(names[1:])
    assert (cache.usage().host_free, cache.usage().num_swapped, cache.usage().swapped_tokens) == (8, 0, 0)
    assert_pool_clean(cache)


def test_swapping_what_is_there_already_does_nothing():
    cache = make_cache(num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    assert cache.swap_in(["a"]).pairs == ()
    cache.swap_out(["a"])
    before = snapshot(cache)
    assert cache.swap_out(["a"]).pairs == ()
    assert snapshot(cache) == before


def test_layers_of_different_length_survive_a_swap():
    cache = make_cache(num_host_blocks=8, num_layers=2)
    cache.allocate("a")
    write(cache, "a", 20, layer=0)
    write(cache, "a", 3, layer=1)
    cache.swap_out(["a"])
    cache.swap_in(["a"])
    assert cache.sequence("a").layer_lengths == (20, 3)
    with pytest.raises(PositionMismatch):
        cache.reserve("a", 1)
    write(cache, "a", 17, layer=1)
    assert_sound(cache)


def test_a_refused_swap_out_changes_nothing():
    cache = make_cache(num_host_blocks=4)
    names = make_group(cache)
    cache.allocate("open")
    cache.reserve("open", 3)
    before = snapshot(cache)
    refusals = [
        (names, OutOfHostBlocks),
        ([names[0], "gone"], SequenceNotFound),
        ([names[0], names[0]], InvalidArgument),
        ([names[0], "open"], InvalidArgument),
    ]
    for asked, error in refusals:
        with pytest.raises(error):
            cache.swap_out(asked)
        assert snapshot(cache) == before
    with pytest.raises(OutOfHostBlocks) as caught:
        cache.swap_out(names)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (5, 4, 4)
    assert "host blocks" in str(caught.value)


def test_without_a_host_pool_swapping_is_unavailable():
    cache = make_cache()
    cache.allocate("a")
    with pytest.raises(SwapUnavailable, match="--swap-memory"):
        cache.swap_out(["a"])
    with pytest.raises(InvalidArgument, match="num_host_blocks"):
        CacheConfig(8, num_host_blocks=-1)


def test_swapped_sequences_leave_the_figures_of_the_device():
    cache = make_cache(num_host_blocks=8)
    cache.allocate("a")
    write(cache, "a", 20)
    cache.swap_out(["a"])
    accounting, usage = cache.accounting(), cache.usage()
    assert (accounting.num_sequences, accounting.held_blocks, accounting.num_tokens) == (0, 0, 0)
    assert (accounting.contiguous_max, accounting.contiguous_pow2, accounting.contiguous_oracle) == (0, 0, 0)
    assert (usage.num_swapped, usage.swapped_tokens, usage.host_private) == (1, 20, 2)


@pytest.mark.parametrize("damage", ["holders", "free_list", "twin", "table", "sums"])
def test_audit_finds_and_repairs_damage_to_the_host_pool(damage):
    cache = make_cache(num_host_blocks=8)
    names = make_group(cache)
    cache.swap_out(names[:1])
    host = cache.host
    match damage:
        case "holders":
            next(iter(host.holders.values()))["stranger"] = 3
        case "free_list":
            host.free.pop()
        case "twin":
            host.host_of[60] = next(iter(host.holders))
        case "table":
            cache._sequences.find(names[0]).host_table[2] = 99
        case "sums":
            host.num_tokens += 1
    assert not cache.audit().ok
    assert_sound(cache)
    cache.free_batch(names)
    assert cache.usage().host_free == 8
