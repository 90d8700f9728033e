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


def submit_write(backend, block: int, rows: np.ndarray):
    def job():
        tensor = backend.from_host(rows)
        backend.write_kv(0, tensor, tensor, np.arange(8) + 8 * block)

    return backend.submit(job)


def reuse_blocks(backend) -> list[np.ndarray]:
    """Write, swap out, give the device blocks to others at once, swap in elsewhere; return what came back."""
    written = [make_rows(seed) for seed in range(3)]
    for block, rows in enumerate(written):
        submit_write(backend, block, rows)
    submit_swap(backend, "out", [(0, 1), (1, 2), (2, 0)])
    for block in range(3):
        submit_write(backend, block, make_rows(100 + block))
    submit_swap(backend, "in", [(3, 1), (4, 2), (5, 0)])
    submit_swap(backend, "out", [(0, 1)])  # the host block has another owner at once, too
    submit_write(backend, 0, make_rows(200))
    submit_swap(backend, "in", [(1, 1)])
    found = [backend.submit(lambda b=b: backend.read_block(b)) for b in (3, 4, 5, 1, 0)]
    return [stored_keys(future.result()) for future in found]


def expected_rows() -> list[np.ndarray]:
    return [make_rows(seed)[:, 0] for seed in (0, 1, 2, 100, 200)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_swapped_out_block_is_handed_out_at_once_and_no_copy_sees_its_next_owner(schedule):
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), schedule=schedule, num_host_blocks=3)
    for found, wanted in zip(reuse_blocks(backend), expected_rows(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("forgotten", ["copy", "compute"])
def test_a_forgotten_event_of_a_swap_is_a_wrong_result(forgotten, monkeypatch):
    """The order is the events' doing: without either, some schedule gives other bytes or reads bytes nobody wrote."""
    join, wrong = StreamPair.join, 0

    def forget(self, waiting, earlier):
        if waiting is not getattr(self, forgotten):
            join(self, waiting, earlier)

    for schedule in SCHEDULES:
        backend, _ = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), schedule=schedule, num_host_blocks=3)
        monkeypatch.setattr(StreamPair, "join", forget)
        try:
            found = reuse_blocks(backend)
            wrong += not all(map(np.array_equal, found, expected_rows()))
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
        submit_write(backend, block, make_rows(block))
    submit_swap(backend, "out", [(1, 0), (2, 1), (3, 2), (5, 3)]).result()
    assert sizes == [3 * backend.layout.block_bytes, backend.layout.block_bytes]
    backend.close()
    driver.assert_clean()


def test_bad_pairs_are_refused_and_the_device_goes_on():
    backend, driver = make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), num_host_blocks=2)
    with pytest.raises(InvalidArgument, match="host block"):
        submit_swap(backend, "out", [(0, 2)]).result()
    submit_write(backend, 0, make_rows(0)).result()
    backend.close()
    driver.assert_clean()


def test_a_host_pool_that_does_not_fit_says_how_much_was_asked_and_which_flag_to_lower():
    profile = Profile(memory_bytes=4 << 20, host_bytes=1 << 20)
    with pytest.raises(DeviceError, match=r"host pool of 4194304 bytes .* --swap-memory"):
        make_virtual_backend(make_layout(2, 1, 64, 8, 6, 1), profile=profile, num_host_blocks=1024)
