"""The prefix cache: what may hit, what must not, and in which order it goes."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.caches import Clock, assert_pool_clean, assert_sound, make_cache, run_prompt, table, write
from pagedkv.cache import PrefixExtras
from pagedkv.errors import InvalidArgument, OutOfBlocks

PROMPT = list(range(100, 148))


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (63, 48), (64, 48), (65, 64), (128, 112)])
def test_pc01_last_token_of_a_fully_cached_prompt_is_left_to_compute(length, hit):
    cache = make_cache()
    prompt = list(range(length))
    run_prompt(cache, "a", prompt)
    cache.free("a")
    assert cache.allocate("b", prompt).num_cached_tokens == hit
    assert cache.reserve("b", length - hit).num_tokens >= 1


def test_pc03_equal_digests_of_other_tokens_never_hit():
    def weak(parent, tokens, content):
        return bytes([sum(tokens[::4]) % 4])

    cache = make_cache(256, block_hash=weak)
    for index in range(50):
        assert run_prompt(cache, f"s{index}", [index, *range(47)]) == 0
        assert_sound(cache)
    assert cache.stats.hash_collisions > 0


def test_pc03_equal_tokens_after_another_prefix_never_hit_under_a_weak_hash():
    cache = make_cache(block_hash=lambda parent, tokens, content: sha256(tokens).digest())
    run_prompt(cache, "a", [1] * 16 + [3] * 16 + [0])
    run_prompt(cache, "b", [2] * 16 + [9] * 16 + [0])
    assert cache.probe_prefix([2] * 16 + [3] * 16 + [0]) == 16
    assert_sound(cache)


def test_pc04_digests_of_two_processes_differ_unless_the_root_is_given():
    def digests(**options):
        cache = make_cache(**options)
        run_prompt(cache, "a", PROMPT)
        return set(cache.pool.index)

    assert digests().isdisjoint(digests())
    assert digests(hash_root=b"r") == digests(hash_root=b"r")
    assert all(len(digest) == 32 for digest in digests())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"adapter": "X"}, {"salt": b"X"}),
        ({"model": "X"}, {"adapter": "X"}),
        ({"salt": b""}, {}),
        ({"model": ""}, {}),
        ({"salt": b"a", "model": "bc"}, {"salt": b"ab", "model": "c"}),
        ({"model": "a", "adapter": "bc"}, {"model": "ab", "adapter": "c"}),
    ],
)
def test_pc05_other_extras_never_hit(first, second):
    cache = make_cache()
    run_prompt(cache, "a", PROMPT, **first)
    assert cache.probe_prefix(PROMPT, PrefixExtras(**second)) == 0
    assert cache.probe_prefix(PROMPT, PrefixExtras(**first)) == 32


def test_pc07_content_digest_of_a_block_separates_it_and_all_after_it():
    cache = make_cache()
    prompt = [*PROMPT, 0]
    run_prompt(cache, "a", prompt, block_digests={1: b"cat"})
    assert run_prompt(cache, "b", prompt, block_digests={1: b"dog"}) == 16
    assert cache.probe_prefix(prompt, PrefixExtras(block_digests={1: b"cat"})) == 48
    assert cache.probe_prefix(prompt) == 16
    first, second = table(cache, "a"), table(cache, "b")
    assert first[0] == second[0]
    assert set(first[1:]).isdisjoint(second[1:])
    assert_sound(cache)


def test_pc09_blocks_that_a_request_hits_do_not_count_as_room_for_it():
    cache = make_cache(6, 16)
    run_prompt(cache, "p", PROMPT[:32])
    cache.free("p")
    cache.allocate("x")
    write(cache, "x", 16)
    assert cache.num_available() == 5
    prompt = [*PROMPT[:32], *range(64)]
    assert cache.allocate("big", prompt).num_cached_tokens == 32
    with pytest.raises(OutOfBlocks):
        cache.reserve("big", 64)
    cache.free("big")
    assert cache.num_available() == 5
    cache.free("x")
    assert run_prompt(cache, "big", prompt) == 32
    assert_sound(cache)


def test_pc11_evicted_block_is_found_under_its_new_content_only():
    cache = make_cache(1, 16)
    for _ in range(2):
        for salt in (1, 2):
            content = [salt] * 16
            assert run_prompt(cache, "a", content) == 0
            cache.free("a")
            assert cache.probe_prefix([*content, 0]) == 16
            assert cache.probe_prefix([3 - salt] * 17) == 0
            assert_pool_clean(cache)


def test_pc12_block_is_found_only_when_committed():
    cache = make_cache()
    cache.allocate("a", PROMPT)
    reservation = cache.reserve("a", 48)
    assert cache.allocate("b", PROMPT).num_cached_tokens == 0
    cache.commit(reservation)
    assert cache.allocate("c", [*PROMPT, 0]).num_cached_tokens == 48
    write(cache, "b", 48)  # computed twice, kept once
    assert table(cache, "b") == table(cache, "a")
    assert cache.stats.deduplicated_blocks == 3
    assert_sound(cache)


def test_pc13_claiming_a_cached_block_keeps_it_findable():
    cache = make_cache()
    prompt = [*PROMPT, *range(16)]
    run_prompt(cache, "1", prompt)
    cache.free("1")
    assert [run_prompt(cache, name, prompt) for name in "23"] == [48, 48]
    assert [cache.pool.ref_count(block) for block in table(cache, "2")[:3]] == [2, 2, 2]
    cache.free_batch(["2", "3"])
    assert run_prompt(cache, "4", prompt) == 48
    assert_sound(cache)


def test_pc15_chunked_prefill_publishes_whole_blocks_only():
    cache = make_cache()
    prompt = list(range(100))
    cache.allocate("a", prompt)
    for end in range(20, 101, 20):
        write(cache, "a", 20, prompt[end - 20 : end])
        assert cache.probe_prefix([*prompt, 0]) == end // 16 * 16


def test_pc18_deepest_block_is_evicted_first_every_time():
    cache = make_cache(3, 16)
    for _ in range(50):
        run_prompt(cache, "p", PROMPT)
        cache.free("p")
        cache.allocate("x")
        write(cache, "x", 1)
        cache.free("x")
        assert cache.probe_prefix(PROMPT) == 32
        assert cache.probe_prefix([*PROMPT, 0]) == 32


def test_pc19_flush_says_what_it_kept():
    cache = make_cache()
    run_prompt(cache, "a", PROMPT[:32])
    run_prompt(cache, "b", [7] * 16)
    cache.free("b")
    first = cache.flush_prefix_cache()
    assert (first.num_dropped, first.num_kept) == (1, 2)
    assert cache.probe_prefix(PROMPT) == 32
    cache.free("a")
    second = cache.flush_prefix_cache()
    assert (second.num_dropped, second.num_kept) == (2, 0)
    assert cache.probe_prefix(PROMPT) == 0
    assert cache.usage().free == 64
    assert_pool_clean(cache)


@pytest.mark.parametrize(("shared", "hit"), [(1, 0), (15, 0), (16, 16), (17, 16), (31, 16), (32, 32)])
def test_pc21_hits_are_whole_blocks(shared, hit):
    cache = make_cache()
    prefix = PROMPT[:shared]
    run_prompt(cache, "a", prefix + [1] * 20)
    assert run_prompt(cache, "b", prefix + [2] * 20) == hit


def test_blocks_after_tokens_without_ids_are_never_found():
    cache = make_cache(16, 4)
    cache.allocate("a", [1, 2, 3, 4, 5])
    write(cache, "a", 6)
    write(cache, "a", 6, token_ids=[7, 8, 9, 10, 11, 12])
    assert cache.sequence("a").num_known_tokens == 5
    assert cache.probe_prefix(list(range(1, 14))) == 4


def test_prefix_caching_off_never_hits():
    cache = make_cache(prefix_caching=False)
    run_prompt(cache, "a", PROMPT)
    assert (cache.probe_prefix(PROMPT), run_prompt(cache, "b", PROMPT)) == (0, 0)
    cache.free_batch(["a", "b"])
    assert cache.usage().free == 64


def test_hits_count_once_at_the_first_commit_and_recomputing_apart():
    cache = make_cache()
    run_prompt(cache, "a", PROMPT)
    cache.allocate("retry", PROMPT)
    cache.free("retry")
    run_prompt(cache, "b", PROMPT)
    write(cache, "b", 1)
    cache.allocate("c", PROMPT, is_recompute=True)
    write(cache, "c", 16)
    stats = cache.stats
    assert (stats.queried_tokens, stats.hit_tokens) == (96, 32)
    assert (stats.recompute_queried_tokens, stats.recompute_hit_tokens) == (48, 32)


def test_observer_learns_of_reuse_and_eviction_with_durations():
    class Observer:
        def __init__(self):
            self.seen = []

        def on_evicted(self, idle_seconds, lifetime_seconds):
            self.seen.append(("evicted", idle_seconds, lifetime_seconds))

        def on_reused(self, gap_seconds):
            self.seen.append(("reused", gap_seconds))

    clock, observer = Clock(), Observer()
    cache = make_cache(2, 4, clock=clock, observer=observer)
    run_prompt(cache, "a", [1] * 4)
    clock.now = 10
    cache.free("a")
    clock.now = 13
    cache.allocate("b", [1] * 5)
    clock.now = 14
    cache.free("b")
    clock.now = 20
    cache.allocate("c")
    write(cache, "c", 8)
    assert observer.seen == [("reused", 3), ("evicted", 6, 20)]


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_hit_is_the_common_prefix_in_whole_blocks(first, second):
    cache = make_cache(32, 4)
    run_prompt(cache, "a", [9, *first])
    both = zip([9, *first], [9, *second], strict=False)
    common = next((i for i, (x, y) in enumerate(both) if x != y), min(len(first), len(second)) + 1)
    assert cache.probe_prefix([9, *second]) == min(common, len(second)) // 4 * 4


@pytest.mark.parametrize(
    "extras", [{"salt": "text"}, {"model": b"m"}, {"block_digests": {-1: b""}}, {"block_digests": {0: "text"}}]
)
def test_extras_of_another_type_are_refused(extras):
    with pytest.raises(InvalidArgument) as error:
        PrefixExtras(**extras)
    assert error.value.field == next(iter(extras))


def test_forgotten_blocks_take_what_continues_them_along_and_nothing_else():
    cache = make_cache(num_blocks=16, block_size=4)
    run_prompt(cache, "head", PROMPT[:5])
    run_prompt(cache, "long", PROMPT[:17])
    run_prompt(cache, "other", [999, *PROMPT[:16]])
    cache.free_batch(["long", "other"])
    cache.forget([table(cache, "head")[0]])
    assert cache.probe_prefix(PROMPT[:17]) == 0
    assert cache.probe_prefix([999, *PROMPT[:16]]) == 16
    assert (cache.usage().cached, cache.usage().private) == (4, 2)
    assert_sound(cache)
    cache.free("head")
    run_prompt(cache, "again", PROMPT[:17])
    assert cache.probe_prefix(PROMPT[:17]) == 16
    assert_sound(cache)


def test_a_sequence_that_holds_a_forgotten_block_publishes_nothing_more():
    cache = make_cache(num_blocks=16, block_size=4)
    run_prompt(cache, "a", PROMPT[:9])
    cache.forget(cache.block_table("a"))
    write(cache, "a", 8, PROMPT[9:17])
    assert cache.probe_prefix(PROMPT[:17]) == 0
    assert_sound(cache)


def test_distrusted_blocks_end_every_sequence_before_them():
    cache = make_cache(num_blocks=16, block_size=4)
    run_prompt(cache, "writer", PROMPT[:6])
    cache.fork("writer", "early")
    write(cache, "writer", 5, PROMPT[6:11])
    cache.allocate("reader", PROMPT[:11])
    cache.distrust(table(cache, "writer")[1:], intact={"writer": 6})
    assert {name: cache.length(name) for name in cache.sequence_ids()} == {"writer": 6, "early": 6, "reader": 4}
    assert cache.probe_prefix(PROMPT[:11]) == 4
    assert_sound(cache)
