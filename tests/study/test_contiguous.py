"""The buddy allocator of the fragmentation study: no overlap, nothing lost, everything merges back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.contiguous import POLICIES, BuddyAllocator
from tests.bench.traces import TraceRequest


@given(st.integers(1, 300), st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=60))
def test_buddy_allocator_runs_never_overlap_and_all_come_back(num_slots, steps):
    allocator, held = BuddyAllocator(num_slots), []
    whole = [set(starts) for starts in allocator._free]
    for take, size in steps:
        if take and (run := allocator.allocate(size)) is not None:
            start, order = run
            assert size <= 1 << order < 2 * size
            assert all(start >= s + (1 << o) or s >= start + (1 << order) for s, o in held)
            assert start + (1 << order) <= num_slots
            held.append(run)
        elif not take and held:
            allocator.release(*held.pop(size % len(held)))
        assert allocator.num_free + sum(1 << order for _, order in held) == num_slots
    for run in held:
        allocator.release(*run)
    assert allocator._free == whole


def test_policies_reserve_what_the_paper_says():
    request = TraceRequest(0.0, 100, 25)
    assert {name: policy(request) for name, policy in POLICIES.items()} == {"Max": 2048, "Pow2": 132, "Oracle": 125}
