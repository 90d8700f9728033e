"""Sequences and blocks: order, sharing, copy-on-write, and calls that fail."""

from __future__ import annotations

import pytest

from helpers.caches import Clock, assert_pool_clean, assert_sound, make_cache, run_prompt, snapshot, table, write
from pagedkv.cache import ReserveRequest
from pagedkv.errors import (
    InvalidArgument,
    OutOfBlocks,
    PositionMismatch,
    SequenceExists,
    SequenceNotFound,
    SequenceTooLong,
)


def test_table_of_new_sequence_has_lowest_ids_in_order():
    cache = make_cache(8, 4)
    cache.allocate("a")
    write(cache, "a", 9)
    assert table(cache, "a") == [0, 1, 2]


def test_free_uncached_blocks_come_back_in_table_order():
    cache = make_cache(8, 4)
    for name in "ab":
        cache.allocate(name)
        write(cache, name, 8)
    cache.free("a")
    cache.allocate("c")
    write(cache, "c", 16)
    assert table(cache, "c") == [0, 1, 4, 5]


def test_eviction_takes_free_blocks_then_oldest_release_deepest_first():
    cache = make_cache(8, 4)
    run_prompt(cache, "a", [1] * 8)  # blocks 0 1
    run_prompt(cache, "b", [2] * 8)  # blocks 2 3
    cache.free("b")
    cache.free("a")
    cache.allocate("c")
    write(cache, "c", 32)
    assert table(cache, "c") == [4, 5, 6, 7, 3, 2, 1, 0]


def test_hit_makes_block_young_again():
    cache = make_cache(4, 4)
    run_prompt(cache, "a", [1] * 4)
    run_prompt(cache, "b", [2] * 4)
    cache.free_batch(["a", "b"])
    assert run_prompt(cache, "c", [1] * 5) == 4
    cache.free("c")
    cache.allocate("d")
    write(cache, "d", 12)
    assert table(cache, "d") == [2, 3, 1]  # block 0 outlives block 1


def test_ba01_free_of_forks_in_any_order_returns_every_block_once():
    cache = make_cache(64, 16)
    cache.allocate("A")
    write(cache, "A", 200)
    for index in range(4):
        cache.fork("A", f"c{index}")
        write(cache, f"c{index}", 1, token_ids=None)
    for name in ["c2", "c0", "A", "c3", "c1"]:
        cache.free(name)
        assert_sound(cache)
    before = snapshot(cache)
    with pytest.raises(SequenceNotFound):
        cache.free("A")
    assert snapshot(cache) == before
    assert cache.usage().free == 64


def test_ba03_batch_free_that_names_a_sequence_twice_changes_nothing():
    cache = make_cache()
    for name in "ab":
        cache.allocate(name)
        write(cache, name, 20)
    before = snapshot(cache)
    with pytest.raises(InvalidArgument, match=r"sequence_ids\[2\]"):
        cache.free_batch(["a", "b", "a"])
    with pytest.raises(SequenceNotFound):
        cache.free_batch(["a", "x"])
    assert snapshot(cache) == before
    cache.free_batch(["a", "b"])
    assert_pool_clean(cache)


def test_ba09_allocate_of_a_live_id_is_refused_and_harms_nobody():
    cache = make_cache()
    run_prompt(cache, "S", [5] * 40)
    before = snapshot(cache)
    with pytest.raises(SequenceExists):
        cache.allocate("S", [5] * 40)
    with pytest.raises(SequenceExists):
        cache.fork("S", "S")
    assert snapshot(cache) == before
    cache.free("S")
    assert_pool_clean(cache)


def test_ba15_hit_blocks_of_a_request_that_did_not_fit_are_evictable_again():
    cache = make_cache(8, 16)
    run_prompt(cache, "warm", list(range(48)))
    cache.free("warm")
    cache.allocate("busy")
    write(cache, "busy", 64)
    prompt = list(range(96))
    assert cache.allocate("big", prompt).num_cached_tokens == 48
    with pytest.raises(OutOfBlocks) as error:
        cache.reserve("big", 48)
    assert (error.value.needed, error.value.free, error.value.evictable) == (3, 1, 0)
    cache.free("big")
    assert (cache.usage().cached, cache.num_available()) == (3, 4)
    cache.allocate("other")
    write(cache, "other", 64)
    assert_sound(cache)
    cache.free_batch(["busy", "other"])
    assert run_prompt(cache, "big", prompt) == 0
    assert_sound(cache)


def test_sc09_each_extra_writer_of_a_shared_tail_copies_once_and_the_last_writes_in_place():
    cache = make_cache(16, 16)
    cache.allocate("p")
    write(cache, "p", 24)
    for child in "abc":
        cache.fork("p", child)
    tail = table(cache, "p")[1]
    copies = [write(cache, name, 1).copies for name in ["p", "a", "b", "c"]]  # the parent first
    assert [[source for source, _ in made] for made in copies] == [[tail], [tail], [tail], []]
    assert table(cache, "c")[1] == tail
    assert len({table(cache, name)[1] for name in "pabc"}) == 4
    assert cache.stats.copied_blocks == 3
    assert_sound(cache)


def test_sc09_writers_in_one_batch_copy_once_each_but_for_the_last():
    cache = make_cache(16, 16)
    cache.allocate("p")
    write(cache, "p", 24)
    cache.fork("p", "a")
    cache.fork("p", "b")
    made = cache.reserve_batch([ReserveRequest(name, 1) for name in "pab"])
    assert [len(reservation.copies) for reservation in made] == [1, 1, 0]
    assert_sound(cache)
    cache.commit_batch(made)
    assert_sound(cache)


def test_cancel_of_a_copy_gives_the_shared_block_back():
    cache = make_cache(16, 16, clock=Clock())
    cache.allocate("p")
    write(cache, "p", 24)
    cache.fork("p", "a")
    before = snapshot(cache)
    cache.cancel(cache.reserve("a", 20))
    assert snapshot(cache) == before
    assert_sound(cache)


def test_copy_source_freed_by_its_last_holder_stays_in_flight_until_commit():
    cache = make_cache(16, 16)
    cache.allocate("p")
    write(cache, "p", 24)
    cache.fork("p", "a")
    reservation = cache.reserve("a", 1)
    cache.free("p")
    assert cache.usage().in_flight == 1
    assert_sound(cache)
    cache.commit(reservation)
    assert cache.usage().in_flight == 0
    assert_sound(cache)


def test_copy_source_whose_sequence_ends_before_the_commit_is_evicted_before_its_prefix():
    cache = make_cache(4, 4)
    prompt = [1] * 13
    run_prompt(cache, "a", prompt)  # blocks 0 1 2, published, and the tail in 3
    cache.truncate("a", 11)
    assert cache.reserve("a", 1).copies == ((2, 3),)
    cache.free("a")
    cache.allocate("b")
    write(cache, "b", 5)  # block 3, and one by eviction
    assert cache.probe_prefix(prompt) == 8
    assert_sound(cache)


def test_truncate_into_a_published_block_leaves_it_to_the_cache():
    cache = make_cache(8, 4)
    run_prompt(cache, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    cache.truncate("a", 6)
    reservation = write(cache, "a", 2, token_ids=[60, 70])
    assert reservation.copies == ((1, 2),)
    assert table(cache, "a") == [0, 2]
    cache.free("a")
    assert cache.probe_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    assert cache.probe_prefix([1, 2, 3, 4, 5, 6, 60, 70, 9]) == 8
    assert_pool_clean(cache)


def test_truncate_then_other_tokens_makes_the_new_ones_known():
    cache = make_cache(8, 4)
    run_prompt(cache, "a", [1, 2, 3])
    cache.truncate("a", 1)
    write(cache, "a", 3, token_ids=[7, 8, 9])
    assert cache.sequence("a").num_known_tokens == 4
    assert cache.probe_prefix([1, 7, 8, 9, 0]) == 4


def test_layers_have_lengths_of_their_own_and_commit_is_their_minimum():
    cache = make_cache(8, 4, num_layers=2)
    cache.allocate("a", [1, 2, 3, 4, 5])
    write(cache, "a", 5, layer=0)
    assert (cache.length("a"), cache.length("a", 0), cache.length("a", 1)) == (0, 5, 0)
    assert cache.accounting().reserved_slots == 5
    assert cache.probe_prefix([1, 2, 3, 4, 5]) == 0
    with pytest.raises(PositionMismatch):
        cache.reserve("a", 1)
    with pytest.raises(PositionMismatch):
        cache.fork("a", "b")
    assert write(cache, "a", 5, layer=1).start == 0
    assert len(table(cache, "a")) == 2
    assert cache.probe_prefix([1, 2, 3, 4, 5]) == 4
    assert_sound(cache)


def test_reservation_is_committed_or_cancelled_once():
    cache = make_cache()
    cache.allocate("a")
    reservation = cache.reserve("a", 3)
    cache.commit(reservation)
    for again in (cache.commit, cache.cancel):
        with pytest.raises(InvalidArgument, match="not open"):
            again(reservation)
    assert cache.length("a") == 3


def test_batch_of_which_one_does_not_fit_takes_nothing():
    cache = make_cache(4, 4)
    for name in "abc":
        cache.allocate(name)
    write(cache, "a", 3)
    before = snapshot(cache)
    with pytest.raises(OutOfBlocks) as error:
        cache.reserve_batch([ReserveRequest("a", 1), ReserveRequest("b", 8), ReserveRequest("c", 8)])
    assert (error.value.needed, error.value.free, error.value.total) == (4, 3, 4)
    assert snapshot(cache) == before
    write(cache, "b", 12)
    assert table(cache, "b") == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda c: c.allocate(""), InvalidArgument, "sequence_id"),
        (lambda c: c.allocate("x" * 257), InvalidArgument, "sequence_id"),
        (lambda c: c.allocate("n", [1, 2**31]), InvalidArgument, "token_ids[1]"),
        (lambda c: c.allocate("n", [1, "2"]), InvalidArgument, "token_ids[1]"),
        (lambda c: c.allocate("n", [0] * 101), SequenceTooLong, None),
        (lambda c: c.reserve("a", 0), InvalidArgument, "num_tokens"),
        (lambda c: c.reserve("a", 1, layer=1), InvalidArgument, "layer"),
        (lambda c: c.reserve("a", 1, layer=-1), InvalidArgument, "layer"),
        (lambda c: c.reserve("a", 98), SequenceTooLong, None),
        (lambda c: c.reserve("a", 2, token_ids=[4]), InvalidArgument, "token_ids"),
        (lambda c: c.reserve("a", 2, token_ids=[4, 6]), InvalidArgument, "token_ids[1]"),
        (lambda c: c.reserve("x", 1), SequenceNotFound, None),
        (lambda c: c.reserve_batch([ReserveRequest("a", 1), ReserveRequest("a", 1)]), InvalidArgument, "requests[1]"),
        (lambda c: c.reserve("open", 1), InvalidArgument, "sequence_id"),
        (lambda c: c.fork("open", "n"), InvalidArgument, "parent_id"),
        (lambda c: c.fork("x", "n"), SequenceNotFound, None),
        (lambda c: c.fork("a", ""), InvalidArgument, "child_id"),
        (lambda c: c.truncate("a", -1), InvalidArgument, "num_tokens"),
        (lambda c: c.truncate("a", 4), InvalidArgument, "num_tokens"),
        (lambda c: c.truncate("open", 0), InvalidArgument, "sequence_id"),
        (lambda c: c.length("a", 1), InvalidArgument, "layer"),
        (lambda c: c.sequence("x"), SequenceNotFound, None),
        (lambda c: c.block_table("x"), SequenceNotFound, None),
    ],
)
def test_bad_call_names_its_field_and_changes_nothing(call, error, field):
    cache = make_cache(16, 16, max_sequence_tokens=100)
    cache.allocate("a", [1, 2, 3, 4, 5])
    write(cache, "a", 3)
    cache.allocate("open")
    cache.reserve("open", 5)
    before = snapshot(cache)
    with pytest.raises(error) as raised:
        call(cache)
    assert field is None or raised.value.field == field
    assert snapshot(cache) == before
    assert_sound(cache)


def test_block_table_is_a_copy():
    cache = make_cache()
    cache.allocate("a")
    write(cache, "a", 3)
    held = memoryview(cache.block_table("a"))  # a live table could not grow while this exists
    write(cache, "a", 40)
    assert list(held) == [0]


def test_a_block_that_an_open_reservation_will_copy_is_not_written_in_place():
    cache = make_cache(num_blocks=8, block_size=4)
    run_prompt(cache, "a", [1, 2, 3])
    cache.fork("a", "b")
    held = cache.reserve("b", 1)
    cache.truncate("a", 1)
    rewritten = cache.reserve("a", 1)
    assert held.copies[0][0] == rewritten.copies[0][0]
    cache.commit_batch([held, rewritten])
    assert_sound(cache)
