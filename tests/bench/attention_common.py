"""What the attention benchmarks share: filled pools larger than the caches, and the read bandwidth limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.attention_cases import NUMPY_DTYPES, relative_error
from helpers.oracle import oracle_attention
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cpu.compile_cache import compile_kernel
from pagedkv.compute.cpu.pool import allocate_pool
from pagedkv.compute.cpu.simd import add, hsum, load, load_i64, splat, store_f32
from pagedkv.compute.cpu.threads import WorkerPool, claim
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType

ROTATION_BYTES = 1 << 30  # keys and values that every rotation passes through, so that no cache serves them
_RUN_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode or prefill problem; `context` counts the keys of a sequence, its own queries included."""

    batch: int
    context: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_len: int = 1

    def kv_bytes(self, dtype: DType) -> int:
        return 2 * self.batch * self.context * self.num_kv_heads * self.head_dim * dtype.itemsize

    def rotation(self, dtype: DType, rotation_bytes: int = ROTATION_BYTES) -> int:
        """Return the number of layers whose keys and values together have `rotation_bytes` or more."""
        return max(1, -(-rotation_bytes // self.kv_bytes(dtype)))

    def flops(self) -> float:
        """Multiplications and additions over the keys that a causal mask leaves."""
        keys = sum(self.context - self.query_len + 1 + row for row in range(self.query_len))
        return 4.0 * self.batch * self.num_heads * self.head_dim * keys


class FilledPool:
    """A backend whose every layer holds the shape's sequences on shuffled blocks; calls rotate over the layers."""

    def __init__(self, shape: Shape, dtype: DType, block_size: int, rotation_bytes: int = ROTATION_BYTES) -> None:
        self.shape = shape
        layers = shape.rotation(dtype, rotation_bytes)
        per_sequence = -(-shape.context // block_size)
        kv_shape = KvShape(layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype)
        layout = KvLayout(kv_shape, shape.batch * per_sequence, block_size)
        self.backend = CpuBackend(layout)
        rng = np.random.default_rng(0)
        tables = rng.permutation(layout.num_blocks).astype(np.int32).reshape(shape.batch, per_sequence)
        starts = np.arange(shape.batch + 1, dtype=np.int32) * shape.query_len
        self.batch = AttentionBatch(tables, np.full(shape.batch, shape.context, np.int32), starts)
        rows = shape.batch * shape.query_len
        self.queries = rng.standard_normal((rows, shape.num_heads, shape.head_dim)).astype(np.float32)
        self._layer = 0
        self._fill(rng)

    def _fill(self, rng: np.random.Generator) -> None:
        size, shape = self.backend.layout.block_size, self.shape
        positions = np.arange(shape.context)
        parts = [rng.standard_normal((shape.context, shape.num_kv_heads, shape.head_dim)) for _ in range(2)]
        self.keys, self.values = (part.astype(np.float32) for part in parts)
        for layer in range(self.backend.layout.shape.num_layers):
            for table in self.batch.block_tables:
                slots = table[positions // size].astype(np.int64) * size + positions % size
                self._run(lambda at=layer, to=slots: self.backend.write_kv(at, self.keys, self.values, to))

    def _run(self, job: Callable[[], Any]) -> Any:
        return self.backend.submit(job).result()

    def seconds(self) -> float:
        """Return the time of one call on the next layer."""
        layer, self._layer = self._layer, (self._layer + 1) % self.backend.layout.shape.num_layers

        def job() -> float:
            start = time.perf_counter()
            self.backend.attend(layer, self.queries, self.batch, AttentionParams())
            return time.perf_counter() - start

        return float(self._run(job))

    def error(self) -> float:
        """Return the relative error of the first sequence's first and last query on layer 0 against the oracle."""
        result = self._run(lambda: self.backend.attend(0, self.queries, self.batch, AttentionParams()))
        errors = []
        for row in {0, self.shape.query_len - 1}:
            keys, values = (array[: self.shape.context - self.shape.query_len + 1 + row] for array in self.stored())
            exact = oracle_attention(self.queries[row : row + 1], [keys], [values], [1])
            errors.append(relative_error(result.output[row : row + 1], exact.output))
        return max(errors)

    def stored(self) -> list[npt.NDArray[Any]]:
        """Return keys and values as the pool holds them (quantised pools: before quantisation)."""
        dtype = NUMPY_DTYPES.get(self.backend.layout.shape.dtype, np.float32)
        return [array.astype(dtype) for array in (self.keys, self.values)]

    def close(self) -> None:
        self.backend.close()


def _read_runs(args: int, thread: int) -> None:
    item = claim(args)
    while item >= 0:
        start = load_i64(args + 16) + item * _RUN_BYTES
        a = b = c = d = splat(np.float32(0.0), 16)
        for offset in range(0, _RUN_BYTES, 256):
            a = add(a, load(start + offset, 16))
            b = add(b, load(start + offset + 64, 16))
            c = add(c, load(start + offset + 128, 16))
            d = add(d, load(start + offset + 192, 16))
        store_f32(load_i64(args + 24) + 4 * item, hsum(add(add(a, b), add(c, d))))
        item = claim(args)


class ReadLimit:
    """Seconds to merely read a number of bytes on all threads, from a buffer larger than the caches."""

    def __init__(self, num_threads: int | None = None) -> None:
        layout = KvLayout(KvShape(1, 8, 8, 128), ROTATION_BYTES // (16 * 8 * 128 * 8), 16)
        self._buffer = allocate_pool(layout)
        self._buffer[:] = 0
        self._workers = WorkerPool(num_threads)
        self._kernel = compile_kernel(_read_runs, "read_runs")
        self._sums = np.zeros(self._buffer.size // _RUN_BYTES, np.float32)
        self._at = 0

    def seconds(self, num_bytes: int) -> float:
        runs = max(1, num_bytes // _RUN_BYTES)
        if (self._at + runs) * _RUN_BYTES > self._buffer.size:
            self._at = 0
        start = self._buffer.ctypes.data + self._at * _RUN_BYTES
        args = np.array([0, runs, start, self._sums.ctypes.data], np.int64)
        self._at += runs
        begin = time.perf_counter()
        self._workers.run(self._kernel, args)
        return (time.perf_counter() - begin) * num_bytes / (runs * _RUN_BYTES)
