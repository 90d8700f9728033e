"""Decode steps captured as CUDA graphs: what a replay computes, how much is captured, and what goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as real

from helpers.attention_cases import make_layout
from helpers.tiny_models import make_tiny_model
from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cuda import graphs
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError, InvalidArgument
from pagedkv.model import LoadedModel, StepInput, load_model, read_model_config
from virtual_gpu import VirtualDriver
from virtual_gpu.cublas import CublasError, Matrix, VirtualCublas
from virtual_gpu.profile import Profile

BLOCK_SIZE, NUM_BLOCKS = 8, 48
PROFILE = Profile(memory_bytes=48 << 20, host_bytes=16 << 20)
MIN_PARTITION = 16


class ColumnwiseCublas(VirtualCublas):
    """Products column by column: a row of the model's input gives the same bits in a batch of any size.

    `fail_at` makes the call of that number fail.
    """

    num_calls, fail_at = 0, -1

    def gemm_ex(self, *args: Any) -> None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise CublasError("a fault of the test")
        super().gemm_ex(*args)

    def _multiply(
        self, left: Matrix, right: Matrix, result: Matrix, transposed: tuple[bool, bool], factors: tuple[Any, Any]
    ) -> None:
        for column in range(right.columns):
            one, target = (
                Matrix(m.address + column * m.leading * m.dtype.itemsize, m.rows, 1, m.leading, m.dtype)
                for m in (right, result)
            )
            super()._multiply(left, one, target, transposed, factors)


class CountingDriver(VirtualDriver):
    """Counts calls, and fails the one named in `fail` when its count gets there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(found):
            return found
        self.calls[name] += 1
        if self.fail.get(name) != self.calls[name]:
            return found

        def fail(*args: Any) -> tuple[Any, ...]:
            if name == "cuStreamEndCapture":  # ends it in any case
                found(*args)
            return real.CUresult.CUDA_ERROR_UNKNOWN, None

        return fail


def open_backend(layout: KvLayout, **options: Any) -> tuple[CudaBackend, CountingDriver]:
    driver = CountingDriver(PROFILE)
    stand_ins = {"driver_module": driver, "cublas": ColumnwiseCublas(driver), "emit_ptx": True}
    return CudaBackend(layout, min_partition=MIN_PARTITION, **stand_ins, **options), driver


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


class Twins:
    """Sequences that decode on two models at once; their blocks are drawn at random from one free list."""

    def __init__(self, captured: LoadedModel, plain: LoadedModel) -> None:
        self.captured, self.plain = captured, plain
        self.rng = np.random.default_rng(0)
        self.free = [int(block) for block in self.rng.permutation(NUM_BLOCKS)]
        self.tables: dict[int, list[int]] = {}
        self.lens: dict[int, int] = {}

    @property
    def backend(self) -> CudaBackend:
        return self.captured.decoder._ops

    def add(self, sequence: int, num_tokens: int) -> None:
        """Prefill a sequence, token after token in one step."""
        self.tables[sequence], self.lens[sequence] = [], 0
        step = self.step_of([sequence], num_tokens)
        for model in (self.captured, self.plain):
            run(model, step)

    def step_of(self, sequences: Sequence[int], num_tokens: int = 1) -> StepInput:
        """Return a step that grows each sequence by `num_tokens`; only the last logits are wanted."""
        slots, positions = [], []
        for sequence in sequences:
            start = self.lens[sequence]
            self.lens[sequence] += num_tokens
            table = self.tables[sequence]
            while len(table) * BLOCK_SIZE < self.lens[sequence]:
                table.append(self.free.pop())
            for position in range(start, self.lens[sequence]):
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        width = max(len(self.tables[sequence]) for sequence in sequences)
        tables = np.zeros((len(sequences), width), np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(self.tables[sequence])] = self.tables[sequence]
        contexts = np.array([self.lens[sequence] for sequence in sequences], np.int32)
        starts = np.arange(len(sequences) + 1, dtype=np.int32) * num_tokens
        token_ids = self.rng.integers(0, 200, len(positions)).astype(np.int32)
        batch = AttentionBatch(tables, contexts, starts)
        return StepInput(token_ids, np.array(positions, np.int32), np.array(slots, np.int64), batch, (), starts[1:] - 1)

    def step(self, sequences: Sequence[int]) -> None:
        """Decode a token of each sequence on both models: the logits are the same bits."""
        step = self.step_of(sequences)
        np.testing.assert_array_equal(run(self.captured, step), run(self.plain, step), err_msg=str(sequences))


def submit(model: LoadedModel, step: StepInput) -> Any:
    backend = model.decoder._ops
    return backend.submit(lambda: backend.to_host(model.decoder.forward(step)))


def run(model: LoadedModel, step: StepInput) -> np.ndarray:
    return submit(model, step).result()


def pool_of(model: LoadedModel) -> np.ndarray:
    backend = model.decoder._ops
    return np.stack(backend.submit(lambda: [backend.read_block(block) for block in range(NUM_BLOCKS)]).result())


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
def test_a_step_that_cannot_be_captured_runs_without_a_graph_and_says_so(opened, caplog, call):
    twins, driver = opened
    twins.add(0, 4)
    twins.add(1, 4)
    before = driver.calls.copy()
    twins.step([0, 1])
    launches = (driver.calls[call] - before[call]) // 2  # of a step: it ran once as it is and once under capture
    driver.fail[call] = driver.calls[call] + (launches + 5 if call == "cuLaunchKernel" else 1)
    for _ in range(3):
        twins.step([0])
    assert driver.calls["cuGraphLaunch"] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "steps of 1 rows cannot be captured as a graph and run without"
    ]
    assert twins.backend.failure is None


@pytest.mark.parametrize("products_before", [3, 20], ids=["first-run", "under-capture"])
def test_a_step_whose_products_fail_once_runs_without_a_graph(opened, caplog, products_before):
    twins, driver = opened
    twins.add(0, 4)
    cublas = twins.backend._cublas
    cublas.fail_at = cublas.num_calls + products_before
    for _ in range(2):
        twins.step([0])
    assert driver.calls["cuGraphLaunch"] == 0
    assert len(caplog.records) == 1
    assert twins.backend.failure is None


def test_a_fault_of_a_replay_fails_its_step_and_every_later_one(opened):
    twins, driver = opened
    twins.add(0, 4)
    run(twins.captured, twins.step_of([0]))
    driver.fail["cuGraphLaunch"] = 2
    with pytest.raises(DeviceError, match="cuGraphLaunch"):
        run(twins.captured, twins.step_of([0]))
    with pytest.raises(DeviceError, match="cuGraphLaunch"):
        run(twins.captured, twins.step_of([0]))


@pytest.fixture
def small():
    backend, driver = open_backend(make_layout(num_blocks=2), weight_dtype=DType.FLOAT32)
    yield backend, driver
    backend.close()
    driver.assert_clean()


def repeat_rows(backend: CudaBackend, table: Any, rows: np.ndarray, **options: Any) -> np.ndarray:
    def job() -> np.ndarray:
        return backend.to_host(backend.repeat("rows", [rows], lambda arrays: backend.take_rows(table, arrays[0])))

    return backend.submit(job).result()


def test_a_step_without_padding_is_captured_for_each_number_of_rows(small):
    backend, _ = small
    values = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    for rows in ([1], [2, 3], [4, 5, 8], [0, 0, 1], [7]):
        index = np.array(rows, np.int32)
        np.testing.assert_array_equal(repeat_rows(backend, table, index), values[index])
    assert backend.graphs.num_captured == 3


@pytest.mark.parametrize("rows", [np.zeros(0, np.int32), np.zeros(65, np.int32)])
def test_no_rows_and_too_many_rows_run_as_they_are(small, rows):
    backend, _ = small
    values = np.ones((3, 16), np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    np.testing.assert_array_equal(repeat_rows(backend, table, rows), values[rows])
    assert not backend.graphs.num_captured


def test_a_body_that_uploads_something_else_each_time_is_not_captured(small, caplog):
    backend, _ = small
    calls: list[int] = []

    def body(arrays: Sequence[np.ndarray]) -> Any:
        calls.append(1)
        return backend.add(backend.from_host(np.full((1, 4), len(calls), np.float32)), backend.from_host(arrays[0]))

    for _ in range(2):
        x = np.ones((1, 4), np.float32)
        result = backend.submit(lambda x=x: backend.to_host(backend.repeat("changing", [x], body))).result()
        np.testing.assert_array_equal(result, np.full((1, 4), len(calls) + 1))
    assert not backend.graphs.num_captured
    assert len(caplog.records) == 1


def test_an_input_of_another_type_than_the_kernels_read_is_not_captured(small):
    backend, _ = small
    values = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    for _ in range(2):
        np.testing.assert_array_equal(repeat_rows(backend, table, np.array([3], np.int64)), values[[3]])
    assert not backend.graphs.num_captured


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
