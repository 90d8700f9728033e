"""Recorded steps: a repetition does what the operations themselves would do, with the inputs' present values."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from compute_dense.weights import make_weight
from helpers.model_runner import BLOCK_SIZE
from helpers.tiny_models import make_tiny_model
from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import InvalidArgument
from pagedkv.model import Decoder, StepInput, load_model, read_model_config

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def model(smollm2):
    backend = CpuBackend(KvLayout(read_model_config(smollm2).kv_shape(), NUM_BLOCKS, BLOCK_SIZE))
    yield load_model(smollm2, backend)
    backend.close()


@pytest.fixture
def backend(model):
    return model.decoder._ops


def make_step(context_lens: list[int], seed: int = 0, vocab_size: int = 40_000) -> StepInput:
    """One new token for each sequence, on blocks of its own in random order."""
    rng = np.random.default_rng(seed)
    contexts = np.array(context_lens, np.int32)
    widest = -(-int(contexts.max()) // BLOCK_SIZE)
    tables = rng.permutation(NUM_BLOCKS)[: len(contexts) * widest].reshape(len(contexts), widest).astype(np.int32)
    positions = contexts - 1
    slots = tables[np.arange(len(contexts)), positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
    rows = np.arange(len(contexts) + 1, dtype=np.int32)
    return StepInput(
        token_ids=rng.integers(0, vocab_size, len(contexts)).astype(np.int32),
        positions=positions,
        slot_mapping=slots + positions % BLOCK_SIZE,
        batch=AttentionBatch(tables, contexts, rows),
        copies=(),
        logit_rows=rows[:-1],
    )


def make_prompts_step(query_lens: list[int], seed: int = 0, logit_rows: list[int] | None = None) -> StepInput:
    """Chunks of these lengths, each behind up to 40 tokens; by default logits of each chunk's last token."""
    rng = np.random.default_rng(seed)
    lengths = np.array(query_lens, np.int32)
    contexts = lengths + rng.integers(0, 40, len(lengths)).astype(np.int32)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tables = rng.permutation(NUM_BLOCKS)[: len(contexts) * 8].reshape(len(contexts), 8).astype(np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    positions = (np.arange(starts[-1]) + np.repeat(contexts - lengths - starts[:-1], lengths)).astype(np.int32)
    slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    wanted = starts[1:] - 1 if logit_rows is None else np.array(logit_rows, np.int32)
    token_ids = rng.integers(0, 40_000, int(starts[-1])).astype(np.int32)
    return StepInput(token_ids, positions, slots, AttentionBatch(tables, contexts, starts), (), wanted)


def fill_pool(backend: CpuBackend) -> None:
    shape = backend.layout.shape
    slots = np.arange(NUM_BLOCKS * BLOCK_SIZE)
    for layer in range(shape.num_layers):
        rng = np.random.default_rng(layer)
        keys, values = rng.standard_normal((2, len(slots), shape.num_kv_heads, shape.head_dim), np.float32)
        backend.write_kv(layer, keys, values, slots)


def pool_bytes(backend: CpuBackend) -> np.ndarray:
    return np.stack([backend.read_block(block) for block in range(NUM_BLOCKS)])


@pytest.mark.parametrize("num_sequences", [1, 3, 11])
def test_repeated_decode_step_gives_the_bits_of_operations_one_by_one(model, backend, monkeypatch, num_sequences):
    rng = np.random.default_rng(num_sequences)
    steps = [make_step(list(rng.integers(1, 5 * BLOCK_SIZE, num_sequences)), seed) for seed in range(4)]
    with monkeypatch.context() as plain:
        plain.setattr(backend, "repeat", lambda shape, inputs, body, finish, padding: finish(body(inputs)))
        fill_pool(backend)
        expected = [model.decoder.forward(step).copy() for step in steps]
        expected_pool = pool_bytes(backend)
    fill_pool(backend)
    for step, logits in zip(steps, expected, strict=True):
        np.testing.assert_array_equal(model.decoder.forward(step), logits)
    np.testing.assert_array_equal(pool_bytes(backend), expected_pool)


PROMPTS = (([70, 1, 13], None), ([1, 40, 43], None), ([70, 1, 13], [83, 2]), ([50, 33, 1], []), ([20, 20, 44], []))


def test_repeated_step_with_prompts_gives_the_bits_of_operations_one_by_one(model, backend, monkeypatch):
    """Steps of one shape whose chunks, contexts and rows of logits differ, in turns with those of other shapes."""
    steps = [make_prompts_step(lengths, seed, rows) for seed, (lengths, rows) in enumerate(PROMPTS)]
    with monkeypatch.context() as plain:
        plain.setattr(backend, "repeats_prompts", False)
        fill_pool(backend)
        expected = [model.decoder.forward(step).copy() for step in steps]
        expected_pool = pool_bytes(backend)
    for _ in range(2):
        fill_pool(backend)
        for step, logits in zip(steps, expected, strict=True):
            np.testing.assert_array_equal(model.decoder.forward(step), logits)
        np.testing.assert_array_equal(pool_bytes(backend), expected_pool)


def test_repeated_step_refuses_a_row_that_it_does_not_have(model, backend):
    step = make_prompts_step([30, 5])
    model.decoder.forward(step)
    step.logit_rows[1] = 35
    with pytest.raises(IndexError, match="35"):
        model.decoder.forward(step)


def test_repeated_decode_step_of_a_long_context_takes_new_parts(model, backend, monkeypatch):
    """The record is made while no context is split over items; later ones are."""
    fill_pool(backend)
    model.decoder.forward(make_step([3]))
    step = make_step([NUM_BLOCKS * BLOCK_SIZE - 1])
    repeated = model.decoder.forward(dataclasses.replace(step)).copy()
    monkeypatch.setattr(backend, "repeat", lambda shape, inputs, body, finish, padding: finish(body(inputs)))
    np.testing.assert_array_equal(model.decoder.forward(step), repeated)


def test_repeated_step_refuses_a_block_outside_the_pool(model, backend):
    step = make_step([20])
    model.decoder.forward(step)
    step.batch.block_tables[0, 0] = NUM_BLOCKS
    with pytest.raises(InvalidArgument, match="block_tables"):
        model.decoder.forward(step)


@pytest.mark.parametrize("slot", [-2, NUM_BLOCKS * BLOCK_SIZE])
def test_repeated_step_refuses_a_slot_outside_the_pool_and_writes_nothing(model, backend, slot):
    step = make_step([20, 7])
    model.decoder.forward(step)
    before = pool_bytes(backend)
    step.slot_mapping[1] = slot
    with pytest.raises(InvalidArgument, match="slot_mapping"):
        model.decoder.forward(step)
    np.testing.assert_array_equal(pool_bytes(backend), before)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_decode_step_of_every_architecture_is_recorded_and_repeats_its_bits(tmp_path, monkeypatch, arch):
    path = make_tiny_model(tmp_path, arch=arch)
    backend = CpuBackend(KvLayout(read_model_config(path).kv_shape(), NUM_BLOCKS, BLOCK_SIZE))
    model = load_model(path, backend)
    rng, calls = np.random.default_rng(0), []
    steps = [make_step(list(rng.integers(1, 40, 3)), seed, vocab_size=200) for seed in range(3)]
    fill_pool(backend)
    monkeypatch.setattr(
        model.decoder, "_decode", lambda arrays: calls.append(1) or Decoder._decode(model.decoder, arrays)
    )
    repeated = [model.decoder.forward(step).copy() for step in steps]
    assert len(calls) == 1
    fill_pool(backend)
    monkeypatch.setattr(StepInput, "is_decode", False)
    for step, logits in zip(steps, repeated, strict=True):
        np.testing.assert_array_equal(model.decoder.forward(step), logits)
    backend.close()


@pytest.fixture
def ops(model, backend):
    weight, values = make_weight("Q4_1", 64, 64)
    return backend, backend.load_weight(weight), values


def test_body_with_work_outside_kernels_is_never_repeated(ops):
    backend, weight, _ = ops
    calls = []

    def body(arrays):
        calls.append(1)
        return backend.add(backend.linear(arrays[0], weight), arrays[1])

    for seed in range(3):
        inputs = list(np.random.default_rng(seed).standard_normal((2, 4, 64), np.float32))
        expected = backend.linear(inputs[0], weight) + inputs[1]
        np.testing.assert_array_equal(backend.repeat("outside", inputs, body), expected)
    assert len(calls) == 3


def test_body_of_kernels_runs_in_python_once_for_each_shape(ops):
    backend, weight, _ = ops
    calls = []

    def body(arrays):
        calls.append(len(arrays[0]))
        return backend.linear_many(arrays[0], [weight, weight])[1]

    for num_rows in (1, 2, 1, 2, 1):
        x = np.random.default_rng(num_rows).standard_normal((num_rows, 64), np.float32)
        np.testing.assert_array_equal(backend.repeat("kernels", [x], body), backend.linear(x, weight))
    assert calls == [1, 2]


def test_launches_of_another_thread_stay_out_of_the_record(ops):
    backend, weight, _ = ops
    x, other = np.ones((1, 64), np.float32), np.full((1, 64), 2, np.float32)
    results = []

    def body(arrays):
        thread = threading.Thread(target=lambda: results.append(backend.linear(other, weight)))
        thread.start()
        result = backend.linear(arrays[0], weight)
        threads.append(thread)
        return result

    threads: list[threading.Thread] = []
    for _ in range(2):
        np.testing.assert_array_equal(backend.repeat("threads", [x], body), backend.linear(x, weight))
    for thread in threads:
        thread.join()
    assert len(threads) == len(results) == 1
