"""Attention problems for the GPU check: NumPy alone, for the machine may have nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from tests.helpers.oracle import oracle_attention


@dataclass(frozen=True)
class Problem:
    """Shape of one attention call."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: DType = DType.FLOAT16
    params: AttentionParams = field(default_factory=AttentionParams)
    shuffled: bool = True
    tensor_cores: bool | None = None
    min_partition: int = 64

    @property
    def layout(self) -> KvLayout:
        """The smallest pool that holds the problem, one layer."""
        blocks = sum(-(-length // self.block_size) for length in self.context_lens)
        shape = KvShape(1, self.num_heads, self.num_kv_heads, self.head_dim, self.dtype)
        return KvLayout(shape, max(1, blocks), self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a decode step must read."""
        return sum(self.context_lens) * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of a causal prefill: two products, half of the square."""
        pairs = sum(q * (c - q) + q * (q + 1) // 2 for c, q in zip(self.context_lens, self.query_lens, strict=True))
        return 4 * pairs * self.num_heads * self.head_dim

    @property
    def label(self) -> str:
        """One line that names the shape."""
        lens = f"{len(self.context_lens)} x {max(self.context_lens)}"
        heads = f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"
        return f"{lens} q{max(self.query_lens)} {heads} B{self.block_size} {self.dtype} P{self.min_partition}"


def batch_of(problem: Problem, rng: np.random.Generator) -> AttentionBatch:
    """Return block tables over the whole pool, shuffled or in order."""
    size, count = problem.block_size, problem.layout.num_blocks
    ids = rng.permutation(count) if problem.shuffled else np.arange(count)
    counts = [-(-length // size) for length in problem.context_lens]
    tables, used = np.full((len(counts), max([*counts, 1])), 2**31 - 1, np.int32), 0
    for row, blocks in enumerate(counts):
        tables[row, :blocks] = ids[used : used + blocks]
        used += blocks
    starts = np.concatenate([[0], np.cumsum(problem.query_lens)]).astype(np.int32)
    return AttentionBatch(tables, np.array(problem.context_lens, np.int32), starts)


def slots_of(batch: AttentionBatch, row: int, block_size: int) -> np.ndarray:
    """Return the slot of each key of a sequence."""
    positions = np.arange(int(batch.context_lens[row]))
    return batch.block_tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size


def representable(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return float32 values that the storage type holds exactly."""
    if dtype is DType.FLOAT16:
        return array.astype(np.float16).astype(np.float32)
    if dtype is DType.BFLOAT16:
        return (array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return array.astype(np.float32)


def attention_error(problem: Problem, **backend_options: Any) -> float:
    """Run the problem on a pool full of NaN; return the largest error of output and lse against the oracle."""
    rng, layout = np.random.default_rng(7), problem.layout
    batch, shape = batch_of(problem, rng), problem.layout.shape
    lens = [(length, shape.num_kv_heads, shape.head_dim) for length in problem.context_lens]
    keys, values = ([representable(rng.standard_normal(s), problem.dtype) for s in lens] for _ in range(2))
    queries = rng.standard_normal((sum(problem.query_lens), shape.num_heads, shape.head_dim)).astype(np.float32)
    options = {"tensor_cores": problem.tensor_cores, "min_partition": problem.min_partition}
    backend = CudaBackend(layout, **options, **backend_options)

    def job() -> tuple[np.ndarray, np.ndarray]:
        for block_id in range(layout.num_blocks):
            backend.write_block(block_id, np.full(layout.block_bytes, 0xFF, np.uint8))
        for row, (k, v) in enumerate(zip(keys, values, strict=True)):
            slots = slots_of(batch, row, problem.block_size)
            backend.write_kv(0, backend.from_host(k), backend.from_host(v), slots)
        result = backend.attend(0, backend.from_host(queries), batch, problem.params)
        return backend.to_host(result.output), backend.to_host(result.lse)

    try:
        output, lse = backend.submit(job).result()
    finally:
        backend.close()
    exact = oracle_attention(queries, keys, values, problem.query_lens, **asdict(problem.params))
    pairs = ((output, exact.output), (lse, exact.lse))
    errors = [float(np.abs(actual - want).max() / max(1.0, np.abs(want).max())) for actual, want in pairs]
    return float("inf") if np.isnan(errors).any() else max(errors)


def correctness_problems(tiny: bool) -> list[Problem]:
    """Return the problems to check: the shapes of tests/cuda, which are those that the kernels branch on.

    Every dtype, head dim, group size, block size, path and option, with several hundred keys in one partition and in
    many; lengths and windows that end and begin at every key of a tile.
    """
    small = Problem((33, 1, 0), (1, 1, 0), 4, 2, 64)
    if tiny:
        return [small, Problem((40,), (20,), 4, 2, 64, tensor_cores=True), Problem((70,), (1,), 3, 1, 80)]
    floats, dims, blocks = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16), (64, 80, 128, 256), (8, 16, 32)
    mixed, queries = (1, 15, 16, 17, 700, 90), (1, 1, 1, 2, 1, 33)
    found = [
        Problem(mixed, queries, 8, 2, dim, block, dtype, tensor_cores=cores)
        for dim in dims
        for block, dtype in zip(blocks, floats, strict=True)
        for cores in (False, True)
    ]
    found += [
        Problem(mixed, queries, group, 1, 128, tensor_cores=c) for group in (1, 3, 4, 7, 8) for c in (False, True)
    ]
    slopes, sinks = np.linspace(0.01, 0.5, 8).astype(np.float32), np.linspace(-2, 4, 8).astype(np.float32)
    options = [
        AttentionParams(window=50),
        AttentionParams(soft_cap=2.0),
        AttentionParams(alibi_slopes=slopes),
        AttentionParams(sinks=sinks),
    ]
    found += [Problem(mixed, queries, 8, 2, params=p, tensor_cores=c) for p in options for c in (False, True)]
    found += [replace(problem, min_partition=1024) for problem in found]  # a CTA sees many tiles
    return [*found, *branching_problems(), Problem((131072,), (1,), 1, 1, 128)]


def branching_problems() -> list[Problem]:
    """Return every block size, every residue of a length and of a window's begin, and forty partitions."""
    paths = ((False, 1), (True, 1), (True, 9))  # tensor cores, queries: attend, attend_decode, attend_mma
    residues, many = tuple(range(70, 134)), (2600, 40)
    found = []
    for cores, queries in paths:
        common = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 64, "tensor_cores": cores}
        for block in (8, 16, 32, 64, 128):
            lens = (block + 9, 2 * block + 1, 333)
            found.append(Problem(lens, (queries,) * 3, block_size=block, **common))
        for window in (None, 70):
            params = AttentionParams(window=window)
            found.append(Problem(residues, (queries,) * 64, params=params, min_partition=96, **common))
        found.append(Problem(many, (queries,) * 2, min_partition=16, **common))
    return found
