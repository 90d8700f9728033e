"""Blocks to the host pool and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.attention_cases import make_layout
from helpers.numpy_dense import NumpyBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.compute.swap import join_pairs, submit_swap
from pagedkv.config import KvShape
from pagedkv.errors import InvalidArgument


def fill_blocks(backend, seed=0) -> np.ndarray:
    """Give every block other bytes; return them [num_blocks, block_bytes]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 255, (backend.layout.num_blocks, backend.layout.block_bytes), dtype=np.uint8)
    for block, data in enumerate(blocks):
        backend.write_block(block, data)
    return blocks


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8))
def test_joined_pairs_are_the_same_pairs_in_as_few_runs_as_can_be(devices, hosts, count):
    pairs = list(zip(devices[:count], hosts[:count], strict=True))
    runs = join_pairs(pairs)
    assert sorted((d + i, h + i) for d, h, length in runs for i in range(length)) == sorted(pairs)
    ends = {(d + length, h + length) for d, h, length in runs}
    assert not ends & {(d, h) for d, h, _ in runs}


@pytest.mark.parametrize("pairs", [[(0, 0), (1, 1), (2, 2)], [(4, 0), (1, 2), (3, 1)], [(2, 2)], []])
def test_blocks_swapped_out_come_back_elsewhere_bit_for_bit(make_backend, pairs):
    backend = make_backend(make_layout(num_blocks=6), num_host_blocks=3)
    before = fill_blocks(backend)
    submit_swap(backend, "out", pairs).result()
    fill_blocks(backend, 1)
    back = [(5 - device, host) for device, host in pairs]
    submit_swap(backend, "in", back).result()
    for (device, _), (target, _) in zip(pairs, back, strict=True):
        assert np.array_equal(backend.read_block(target), before[device])


def test_a_job_after_a_swap_out_may_rewrite_the_block(make_backend):
    backend = make_backend(make_layout(num_blocks=4), num_host_blocks=2)
    before = fill_blocks(backend)
    done = submit_swap(backend, "out", [(2, 1)])
    backend.submit(lambda: backend.write_block(2, before[0]))
    submit_swap(backend, "in", [(3, 1)]).result()
    assert done.result() >= 0
    assert np.array_equal(backend.read_block(3), before[2])


@pytest.mark.parametrize(
    "pairs", [[(0, 0), (4, 1)], [(0, 2)], [(-1, 0)], [(0, -1)], [(0, 0), (0, 1)], [(0, 0), (1, 0)]]
)
def test_pairs_outside_the_pools_or_named_twice_are_refused_and_nothing_moves(make_backend, pairs):
    backend = make_backend(make_layout(num_blocks=4), num_host_blocks=2)
    before = fill_blocks(backend)
    for swap in (backend.swap_out, backend.swap_in):
        with pytest.raises(InvalidArgument, match="pairs"):
            swap(pairs)
    assert all(np.array_equal(backend.read_block(block), data) for block, data in enumerate(before))


def test_a_failed_swap_is_its_futures_error(make_backend):
    backend = make_backend(make_layout(num_blocks=4))
    with pytest.raises(InvalidArgument, match="host block"):
        submit_swap(backend, "out", [(0, 0)]).result()


def test_a_host_pool_larger_than_the_machine_is_refused_with_numbers(make_backend):
    with pytest.raises(InvalidArgument, match="MiB"):
        make_backend(KvLayout(KvShape(64, 64, 64, 128), 1, 128), num_host_blocks=1 << 20)


def test_the_reference_backend_swaps_as_the_cpu_backend_does(make_backend):
    layout = make_layout(num_blocks=4)
    backends = (make_backend(layout, num_host_blocks=2), NumpyBackend(layout, num_host_blocks=2))
    for backend in backends:
        rng = np.random.default_rng(0)
        for block in range(4):
            backend.write_block(block, rng.standard_normal(layout.block_bytes // 4).astype(np.float32).view(np.uint8))
        backend.swap_out([(0, 1), (3, 0)])
        backend.swap_in([(1, 0), (2, 1)])
    for block in range(4):
        assert np.array_equal(*(backend.read_block(block) for backend in backends))
