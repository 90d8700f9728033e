"""Decode steps captured as CUDA graphs: what a replay computes, how much is captured, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from cuda.bindings import driver as real

from helpers.captured_twins import BLOCK_SIZE, MIN_PARTITION, NUM_BLOCKS, Twins, open_backend, pool_of, run, submit
from helpers.device_memory import no_memory
from helpers.tiny_models import make_tiny_model
from pagedkv.compute.cuda import graphs
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import DeviceError, InvalidArgument
from pagedkv.model import StepInput, load_model, read_model_config


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("graphs"), arch="qwen3")


@pytest.fixture
def opened(model_path):
    """A model on a backend that captures, and its twin on one that does not."""
    layout = KvLayout(read_model_config(model_path).kv_shape(), NUM_BLOCKS, BLOCK_SIZE)
    backend, driver = open_backend(layout)
    plain, plain_driver = open_backend(layout, max_graph_rows=0)
    yield Twins(load_model(model_path, backend), load_model(model_path, plain)), driver
    for one, its_driver in ((backend, driver), (plain, plain_driver)):
        one.close()
        its_driver.assert_clean()
        assert not its_driver.memory.live


BATCHES = [[0], [0, 1], [1, 2, 0], [2], [0, 1, 2, 3], [3, 1], [4, 3, 2, 1, 0], [0, 1, 2], [4], [3, 4]]


def test_a_replay_gives_the_bits_of_the_operations_one_by_one(opened):
    """Lengths grow over blocks and partitions, sequences come, go and change places."""
    twins, _ = opened
    for sequence in range(5):
        twins.add(sequence, 3 + 9 * sequence)
    for batch in BATCHES * 2:
        twins.step(batch)
    np.testing.assert_array_equal(pool_of(twins.captured), pool_of(twins.plain))
    assert max(twins.lens.values()) > 2 * MIN_PARTITION


def test_50_random_stream_orders_of_unawaited_steps_give_the_same_bits(opened):
    twins, driver = opened
    for sequence in range(3):
        twins.add(sequence, 4)
    steps = [twins.step_of(batch) for batch in ([0, 1], [2], [1, 0], [0, 1, 2])]
    exact = [run(twins.plain, step) for step in steps]
    for seed in range(50):  # every schedule decodes the same tokens again
        driver.scheduler.random = random.Random(seed)
        futures = [submit(twins.captured, step) for step in steps]
        for future, logits in zip(futures, exact, strict=True):
            np.testing.assert_array_equal(future.result(), logits, err_msg=f"schedule {seed}")


def test_a_capture_is_made_once_for_each_bucket_and_then_a_step_is_one_copy_and_one_launch(opened):
    twins, driver = opened
    for sequence in range(5):
        twins.add(sequence, 4)
    for batch in BATCHES:
        run(twins.captured, twins.step_of(batch))
    assert twins.backend.graphs.num_captured == driver.calls["cuGraphInstantiate"] == 4  # 1, 2, 4 and 8 rows
    driver.calls.clear()
    for batch in BATCHES:
        run(twins.captured, twins.step_of(batch))
    launches = {name: count for name, count in driver.calls.items() if "Launch" in name or "Memcpy" in name}
    num_steps = len(BATCHES)
    assert launches == {
        "cuGraphLaunch": num_steps,
        "cuMemcpyHtoDAsync": num_steps,
        "cuMemcpyDtoHAsync": num_steps,  # the logits, asked for by the test
    }


def test_memory_stays_as_it_is_once_every_bucket_is_captured(opened):
    twins, driver = opened
    for sequence in range(5):
        twins.add(sequence, 4)
    for batch in BATCHES:
        run(twins.captured, twins.step_of(batch))
    used, for_graphs = driver.memory.used, twins.backend.graphs.allocated_bytes
    for batch in BATCHES * 2:
        run(twins.captured, twins.step_of(batch))
    assert (driver.memory.used, twins.backend.graphs.allocated_bytes) == (used, for_graphs)


def test_buckets_share_their_working_memory(opened):
    twins, _ = opened
    for sequence in range(5):
        twins.add(sequence, 4)
    run(twins.captured, twins.step_of([0, 1, 2, 3, 4]))
    alone = twins.backend.graphs.allocated_bytes
    for batch in ([0], [0, 1], [0, 1, 2]):
        run(twins.captured, twins.step_of(batch))
    assert twins.backend.graphs.allocated_bytes < 2.5 * alone


def test_replays_leave_memory_that_was_taken_after_the_capture_alone(opened):
    """Arrays of every size that a step works with, taken when its graph was there, and prefill in between."""
    twins, _ = opened
    for sequence in range(3):
        twins.add(sequence, 4)
    twins.step([0, 1, 2])
    sizes = [1 << power for power in range(6, 17)] * 2
    held = [np.random.default_rng(size).standard_normal(size).astype(np.float32) for size in sizes]
    backend = twins.backend
    tensors = backend.submit(lambda: [backend.from_host(array) for array in held]).result()
    twins.add(3, 30)
    for _ in range(3):
        twins.step([0, 1, 2])
        twins.step([3])
    for tensor, array in zip(tensors, held, strict=True):
        np.testing.assert_array_equal(backend.submit(lambda t=tensor: backend.to_host(t)).result(), array)


def test_the_longest_unused_graph_goes_when_there_are_too_many(opened, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    twins, driver = opened
    for sequence in range(5):
        twins.add(sequence, 4)
    for batch in ([0], [0, 1], [0], [0, 1, 2], [0], [0, 1]):  # the fourth drops two rows, the last four rows
        twins.step(batch)
    assert twins.backend.graphs.num_captured == 4
    assert driver.calls["cuGraphExecDestroy"] == 2


def test_what_is_no_pure_decode_step_is_not_captured(opened):
    twins, driver = opened
    twins.add(0, 4)
    twins.add(1, 11)
    run(twins.captured, twins.step_of([0, 1], 2))
    assert driver.calls["cuStreamBeginCapture"] == 0
    copying = twins.step_of([0])
    source, target = twins.tables[0][0], twins.free.pop()
    copying = StepInput(**{**{f: getattr(copying, f) for f in StepInput.__slots__}, "copies": [(source, target)]})
    assert np.isfinite(run(twins.captured, copying)).all()
    assert driver.calls["cuGraphLaunch"] == 1  # the copy goes before it
    blocks = pool_of(twins.captured)
    assert not np.array_equal(blocks[source], blocks[target])  # the step wrote to the source behind the copy


BAD: dict[str, Callable[[StepInput], None]] = {
    "block_tables": lambda step: step.batch.block_tables.__setitem__((0, 0), NUM_BLOCKS),
    "context_lens": lambda step: step.batch.context_lens.__setitem__(0, 10_000),
    "slot_mapping": lambda step: step.slot_mapping.__setitem__(0, NUM_BLOCKS * BLOCK_SIZE),
    "rows": lambda step: step.token_ids.__setitem__(0, 100_000),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["captured", "replayed"])
@pytest.mark.parametrize("field", BAD)
def test_bad_input_is_refused_by_name_and_the_next_step_is_right(opened, field, is_first):
    twins, driver = opened
    twins.add(0, 4)
    if not is_first:
        twins.step([0])
    step = twins.step_of([0])
    before = pool_of(twins.captured)
    arrays = {"block_tables": step.batch.block_tables, "context_lens": step.batch.context_lens}
    arrays |= {"slot_mapping": step.slot_mapping, "rows": step.token_ids}
    kept = arrays[field].copy()
    BAD[field](step)
    with pytest.raises(InvalidArgument, match=field):
        run(twins.captured, step)
    if not is_first:
        np.testing.assert_array_equal(pool_of(twins.captured), before)
    arrays[field][...] = kept
    np.testing.assert_array_equal(run(twins.captured, step), run(twins.plain, step))
    assert driver.calls["cuGraphLaunch"] == 2 - is_first


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate", "cuLaunchKernel"])
def test_kn30_a_step_that_cannot_be_captured_runs_without_a_graph_says_so_and_is_tried_again(opened, caplog, call):
    twins, driver = opened
    twins.add(0, 4)
    twins.add(1, 4)
    before = driver.calls.copy()
    twins.step([0, 1])
    launches = (driver.calls[call] - before[call]) // 2  # of a step: it ran once as it is and once under capture
    driver.fail[call] = driver.calls[call] + (launches + 5 if call == "cuLaunchKernel" else 1)
    for _ in range(3):
        twins.step([0])
    assert [record.getMessage() for record in caplog.records] == [
        "steps of 1 rows cannot be captured as a graph for now and run without"
    ]
    assert counters(twins) == (2, 1, 3, 1)
    assert twins.backend.health.failure is None


def counters(twins):
    """Captures, captures that failed, steps by a graph, steps that should have been."""
    found = twins.backend.graphs
    return found.num_captured, found.num_failed, found.num_replayed, found.num_fallbacks


@pytest.mark.parametrize("products_before", [3, 20], ids=["first-run", "under-capture"])
def test_kn30_a_step_whose_products_fail_once_runs_without_a_graph_once(opened, caplog, products_before):
    twins, driver = opened
    twins.add(0, 4)
    cublas = twins.backend._cublas
    cublas.fail_at = cublas.num_calls + products_before
    for _ in range(2):
        twins.step([0])
    assert counters(twins) == (1, 1, 1, 1)
    assert driver.calls["cuGraphLaunch"] == len(caplog.records) == 1
    assert twins.backend.health.failure is None


def test_kn30_a_step_that_can_never_be_captured_is_tried_more_and_more_rarely(opened):
    twins, driver = opened
    twins.add(0, 4)
    driver.cuStreamBeginCapture = lambda *args: (real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    for _ in range(20):
        twins.step([0])
    assert counters(twins) == (0, 5, 0, 20)  # at steps 1, 2, 4, 8 and 16


def test_kn30_an_odd_batch_is_padded_though_every_block_of_the_pool_is_taken(opened):
    """All blocks hold tokens: the padding reads none and writes none."""
    twins, _ = opened
    for sequence in range(3):
        twins.add(sequence, 4)
    for sequence in range(3, 48):
        twins.add(sequence, BLOCK_SIZE)
    assert not twins.free
    before = counters(twins)
    for _ in range(2):
        twins.step([0, 1, 2])
    np.testing.assert_array_equal(pool_of(twins.captured), pool_of(twins.plain))
    assert np.subtract(counters(twins), before).tolist() == [1, 0, 2, 0]


def test_kn30_a_capture_without_memory_is_counted_and_made_when_there_is_memory_again(opened):
    twins, driver = opened
    for sequence in range(3):
        twins.add(sequence, 4)
    twins.step([0])
    with no_memory(driver), pytest.raises(DeviceError, match="does not fit"):
        run(twins.captured, twins.step_of([0, 1, 2]))
    assert counters(twins)[:2] == (1, 1)
    for sequence in range(3):  # the step that failed wrote nothing
        twins.lens[sequence] -= 1
    twins.step([0, 1, 2])
    assert counters(twins)[:3] == (2, 1, 2)
    assert twins.backend.health.failure is None


def test_a_fault_of_a_replay_fails_its_step_and_every_later_one(opened):
    twins, driver = opened
    twins.add(0, 4)
    run(twins.captured, twins.step_of([0]))
    driver.fail, driver.fail_code = {"cuGraphLaunch": 2}, real.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(DeviceError, match="cuGraphLaunch"):
        run(twins.captured, twins.step_of([0]))
    with pytest.raises(DeviceError, match="cuGraphLaunch"):
        run(twins.captured, twins.step_of([0]))


def test_steps_of_two_models_on_one_backend_are_told_apart(model_path, tmp_path):
    other_path = make_tiny_model(tmp_path, arch="qwen3", seed=5)
    layout = KvLayout(read_model_config(model_path).kv_shape(), NUM_BLOCKS, BLOCK_SIZE)
    backend, driver = open_backend(layout)
    first, second = load_model(model_path, backend), load_model(other_path, backend)
    twins = Twins(first, second)
    twins.add(0, 4)
    step = twins.step_of([0])
    results = [run(model, step) for model in (first, second, first, second)]
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_array_equal(results[1], results[3])
    assert not np.array_equal(results[0], results[1])
    backend.close()
    driver.assert_clean()
