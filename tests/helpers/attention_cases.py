"""Builders of paged attention cases and their comparison with the oracle; they serve every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from helpers.oracle import OracleResult, oracle_attention
from pagedkv.compute.backend import AttentionBatch, AttentionParams, Backend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.dtypes import DType

NUMPY_DTYPES: dict[DType, Any] = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: ml_dtypes.bfloat16,
}


def make_layout(
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    num_blocks: int = 32,
    num_layers: int = 2,
    dtype: DType = DType.FLOAT32,
) -> KvLayout:
    return KvLayout(KvShape(num_layers, num_heads, num_kv_heads, head_dim, dtype), num_blocks, block_size)


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences with their exact keys and values (as stored), tables of shuffled block ids, and queries."""

    keys: list[npt.NDArray[Any]]
    values: list[npt.NDArray[Any]]
    queries: npt.NDArray[np.float32]
    query_lens: list[int]
    batch: AttentionBatch
    slots: list[npt.NDArray[np.int64]]


def blocks_needed(context_lens: Sequence[int], block_size: int) -> int:
    return sum(-(-length // block_size) for length in context_lens)


def make_case(
    layout: KvLayout, context_lens: Sequence[int], query_lens: Sequence[int], rng: np.random.Generator
) -> Case:
    """Draw K, V and queries; block ids are shuffled, table entries nobody may read are an impossible id."""
    shape, size = layout.shape, layout.block_size
    dtype = NUMPY_DTYPES.get(shape.dtype, np.float32)
    ids = rng.permutation(layout.num_blocks)
    ids = np.concatenate([ids[ids != 0], [0]])  # block 0, which kernels name for want of another, is the last in use
    width = max([-(-length // size) for length in context_lens] + [1]) + 1
    tables = np.full((len(context_lens), width), 2**31 - 1, np.int32)
    keys, values, slots, used = [], [], [], 0
    for row, length in enumerate(context_lens):
        count = -(-length // size)
        tables[row, :count] = ids[used : used + count]
        used += count
        positions = np.arange(length)
        slots.append(tables[row, positions // size].astype(np.int64) * size + positions % size)
        keys.append(rng.standard_normal((length, shape.num_kv_heads, shape.head_dim)).astype(dtype))
        values.append(rng.standard_normal((length, shape.num_kv_heads, shape.head_dim)).astype(dtype))
    queries = rng.standard_normal((sum(query_lens), shape.num_heads, shape.head_dim)).astype(np.float32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    batch = AttentionBatch(tables, np.array(context_lens, np.int32), starts)
    return Case(keys, values, queries, list(query_lens), batch, slots)


def poison(backend: Backend) -> None:
    """Fill every slot with NaN (all bits set, which is NaN in each float dtype and in a scale)."""

    def job() -> None:
        bad = np.full(backend.layout.block_bytes, 0xFF, np.uint8)
        for block_id in range(backend.layout.num_blocks):
            backend.write_block(block_id, bad)

    backend.submit(job).result()


def fill(backend: Backend, case: Case, layer: int) -> None:
    """Write the case's keys and values into `layer`."""

    def job() -> None:
        for keys, values, slots in zip(case.keys, case.values, case.slots, strict=True):
            backend.write_kv(layer, backend.from_host(keys), backend.from_host(values), slots)

    backend.submit(job).result()


def attend(
    backend: Backend, case: Case, layer: int, params: AttentionParams | None = None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return output and lse of the case's batch as host arrays."""

    def job() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        queries = backend.from_host(case.queries)
        result = backend.attend(layer, queries, case.batch, params or AttentionParams())
        return backend.to_host(result.output), backend.to_host(result.lse)

    return backend.submit(job).result()


def expected(case: Case, params: AttentionParams | None = None) -> OracleResult:
    """Return the oracle's answer for the case."""
    options = asdict(params or AttentionParams())
    return oracle_attention(case.queries, case.keys, case.values, case.query_lens, **options)


def assert_close(
    actual: tuple[npt.NDArray[Any], npt.NDArray[Any]], oracle: OracleResult, tolerance: float = 2e-6
) -> None:
    """Check output and lse against the oracle, relative to the largest magnitude; empty rows must match exactly."""
    output, lse = actual
    empty = np.isneginf(oracle.lse)
    assert np.array_equal(np.isneginf(lse), empty)
    assert not np.any(output[empty])
    assert relative_error(output, oracle.output) <= tolerance
    assert relative_error(lse[~empty], oracle.lse[~empty]) <= tolerance


def relative_error(actual: npt.NDArray[Any], exact: npt.NDArray[Any]) -> float:
    """Return the largest error over the largest exact magnitude (at least 1); NaN counts as infinite."""
    if exact.size == 0:
        return 0.0
    error = np.abs(actual.astype(np.float64) - exact).max()
    return float("inf") if np.isnan(error) else float(error / max(1.0, np.abs(exact).max()))
