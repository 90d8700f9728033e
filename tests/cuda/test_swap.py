"""Swapping on the virtual GPU: pinned host blocks, and copies that stay in order whatever the streams do."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from helpers.cuda import make_virtual_backend
from pagedkv.compute.cuda.streams import StreamPair
from pagedkv.compute.swap import submit_swap
from pagedkv.errors import DeviceError, InvalidArgument
from virtual_gpu.profile import Profile

SCHEDULES = ["lazy", *range(6)]


def make_rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((8, 1, 64)).astype(np.float32)


def stored_keys(data: np.ndarray) -> np.ndarray:
    """Return the keys [8, 64] in a block's bytes."""
    return data.view(np.float32).reshape(2, 8, 64)[0]


def write_block(backend, block: int, rows: np.ndarray) -> None:
    tensor = backend.from_host(rows)
    backend.write_kv(0, tensor, tensor, np.arange(8) + 8 * block)


def reuse_blocks(backend, run) -> list:
    """Write, swap out, give the device blocks to others at once, swap in elsewhere; return what came back.

    `run` runs, or submits, each part.
    """
    for block in range(3):
        run(lambda b=block: write_block(backend, b, make_rows(b)))
    run(lambda: backend.swap_out([(0, 1), (1, 2), (2, 0)]))
    for block in range(3):
        run(lambda b=block: write_block(backend, b, make_rows(100 + b)))
    run(lambda: backend.swap_in([(3, 1), (4, 2), (5, 0)]))
    run(lambda: backend.swap_out([(0, 1)]))  # the host block has another owner at once, too
    run(lambda: write_block(backend, 0, make_rows(200)))
    run(lambda: backend.swap_in([(1, 1)]))
    return [run(lambda b=block: backend.read_block(b)) for block in (3, 4, 5, 1, 0)]


def expected_rows() -> list[np.ndarray]:
    return [make_rows(seed)[:, 0] for seed in (0, 1, 2, 100, 200)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_swapped_out_block_is_handed_out_at_once_and_no_copy_sees_its_next_owner(schedule):
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), schedule=schedule, num_host_blocks=3)
    futures = reuse_blocks(backend, backend.submit)
    for future, wanted in zip(futures, expected_rows(), strict=True):
        np.testing.assert_array_equal(stored_keys(future.result()), wanted)
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("forgotten", ["copy", "compute"])
def test_a_forgotten_event_of_a_swap_is_a_wrong_result(forgotten, monkeypatch):
    """The order is the events' doing: without either, some schedule gives other bytes or reads bytes nobody wrote."""
    join, wrong = StreamPair.join, 0

    def forget(self, waiting, earlier):
        if waiting is not getattr(self, forgotten):
            join(self, waiting, earlier)

    def all_right(backend) -> bool:
        found = backend.submit(lambda: reuse_blocks(backend, lambda part: part())).result()  # all enqueued at once
        return all(np.array_equal(stored_keys(data), rows) for data, rows in zip(found, expected_rows(), strict=True))

    for schedule in SCHEDULES:
        backend, _ = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), schedule=schedule, num_host_blocks=3)
        assert all_right(backend)
        monkeypatch.setattr(StreamPair, "join", forget)
        try:
            wrong += not all_right(backend)
        except DeviceError:
            wrong += 1
        monkeypatch.setattr(StreamPair, "join", join)
        with suppress(DeviceError):  # copies may still be pending, which the device notices
            backend.close()
    assert wrong > 0


def test_neighbouring_blocks_are_one_copy():
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), num_host_blocks=4)
    sizes = []
    copy = driver.cuMemcpyDtoHAsync
    driver.cuMemcpyDtoHAsync = lambda *args: sizes.append(args[2]) or copy(*args)
    for block in range(6):
        backend.submit(lambda b=block: write_block(backend, b, make_rows(b)))
    submit_swap(backend, "out", [(1, 0), (2, 1), (3, 2), (5, 3)]).result()
    assert sizes == [3 * backend.layout.block_bytes, backend.layout.block_bytes]
    backend.close()
    driver.assert_clean()


def test_bad_pairs_are_refused_and_the_device_goes_on():
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), num_host_blocks=2)
    with pytest.raises(InvalidArgument, match="host block"):
        submit_swap(backend, "out", [(0, 2)]).result()
    backend.submit(lambda: write_block(backend, 0, make_rows(0))).result()
    backend.close()
    driver.assert_clean()


def test_a_host_pool_that_does_not_fit_says_how_much_was_asked_and_which_flag_to_lower():
    profile = Profile(memory_bytes=4 << 20, host_bytes=1 << 20)
    with pytest.raises(DeviceError, match=r"host pool of 4194304 bytes .* --swap-memory"):
        make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), profile=profile, num_host_blocks=1024)
