"""Free runs against a plain count, and the ratios on figures done by hand."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.caches import make_cache, run_prompt, write
from pagedkv.cache.accounting import count_free_runs


@given(st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 5]), min_size=1, max_size=300))
def test_free_runs_equal_a_plain_count(states):
    runs = [len(list(run)) for is_free, run in groupby(states, lambda state: state in (0, 1)) if is_free]
    counted = count_free_runs(bytes(states))
    assert (counted.num_free, counted.largest) == (sum(runs), max(runs, default=0))
    expected = [0] * (max(runs, default=0)).bit_length()
    for run in runs:
        expected[run.bit_length() - 1] += 1
    assert counted.histogram == tuple(expected)


def test_ratios_of_a_forked_sequence():
    cache = make_cache(16, 16, max_sequence_tokens=100)
    cache.allocate("a")
    write(cache, "a", 40)
    cache.fork("a", "b")
    accounting = cache.accounting()
    assert accounting.internal_fragmentation == pytest.approx(1 - 40 / 48)
    assert accounting.token_occupancy == pytest.approx(40 / 256)
    assert (accounting.sharing_ratio, accounting.memory_saved) == (2, 0.5)
    assert (accounting.contiguous_max, accounting.contiguous_pow2, accounting.contiguous_oracle) == (200, 128, 80)
    assert (accounting.tail_slots, accounting.reserved_slots, accounting.cached_slots) == (8, 0, 0)


def test_waste_is_told_apart_by_cause():
    cache = make_cache(16, 16)
    run_prompt(cache, "gone", [1] * 32)
    cache.free("gone")
    cache.allocate("a")
    write(cache, "a", 10)
    cache.reserve("a", 4)
    accounting = cache.accounting()
    assert (accounting.tail_slots, accounting.reserved_slots, accounting.cached_slots) == (2, 4, 32)


def test_external_fragmentation_is_the_share_outside_the_largest_run():
    cache = make_cache(10, 4)
    for index in range(5):
        cache.allocate(str(index))
        write(cache, str(index), 8)
    cache.free_batch(["1", "3", "4"])
    accounting = cache.accounting()
    assert accounting.free_runs.histogram == (0, 1, 1)
    assert accounting.external_fragmentation == pytest.approx(1 / 3)


def test_empty_and_full_pools_have_figures():
    cache = make_cache(2, 4)
    empty = cache.accounting()
    assert (empty.internal_fragmentation, empty.sharing_ratio, empty.memory_saved) == (0, 1, 0)
    cache.allocate("a")
    write(cache, "a", 8)
    assert (cache.accounting().external_fragmentation, cache.accounting().token_occupancy) == (0, 1)


def test_tokens_of_a_shared_block_are_those_of_whoever_sees_most():
    cache = make_cache(8, 16)
    cache.allocate("a")
    write(cache, "a", 12)
    cache.fork("a", "b")
    cache.truncate("b", 5)
    assert cache.usage().num_tokens == 12
    cache.free("a")
    assert cache.usage().num_tokens == 5
    write(cache, "b", 2)
    assert cache.usage().num_tokens == 7
    assert cache.audit().ok
