"""A model with captured decode steps and its twin without, on virtual GPUs whose driver and products can be failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver as real

from helpers.cuda import poison_given_back
from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.model import LoadedModel, StepInput
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
    """Counts calls, and fails the one named in `fail` with `fail_code` when its count gets there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, int] = {}
        self.fail_code = real.CUresult.CUDA_ERROR_OUT_OF_MEMORY

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
            return self.fail_code, None

        return fail


def open_backend(layout: KvLayout, **options: Any) -> tuple[CudaBackend, CountingDriver]:
    driver = CountingDriver(PROFILE)
    stand_ins = {"driver_module": driver, "cublas": ColumnwiseCublas(driver), "emit_ptx": True}
    backend = CudaBackend(layout, min_partition=MIN_PARTITION, **stand_ins, **options)
    poison_given_back(backend, driver)
    return backend, driver


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
