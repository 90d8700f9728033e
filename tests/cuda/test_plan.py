"""How a batch is launched: kernels by the rows of its sequences, partitions by the keys that a tile can see."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention_cases import assert_close, attend, blocks_needed, expected, fill, make_case, make_layout, poison
from helpers.cuda import make_virtual_backend
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cpu import validation
from pagedkv.compute.cuda.kernels import choose_attention
from pagedkv.compute.cuda.plan import divide
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

MIXED = [(150, 1), (40, 40), (1, 1), (90, 20), (0, 0), (64, 2)]  # context and query lengths


def make_batch(lens: list[tuple[int, int]]) -> AttentionBatch:
    contexts = np.array([context for context, _ in lens], np.int32)
    starts = np.cumsum([0, *(queries for _, queries in lens)]).astype(np.int32)
    return AttentionBatch(np.zeros((len(lens), 64), np.int32), contexts, starts)


def shares(shape: KvShape, lens: list[tuple[int, int]], window: int | None = None, capacity: int | None = None):
    return divide(make_batch(lens), shape.group_size, window, lambda rows: choose_attention(shape, rows), capacity)


def test_a_mixed_batch_is_one_launch_for_decoding_and_one_for_prompts():
    found = shares(KvShape(1, 4, 1, 64, DType.FLOAT16), MIXED)
    assert [share.variant.name for share in found] == ["attend_decode", "attend_mma"]
    assert [share.query_lens.tolist() for share in found] == [[1, 0, 1, 0, 0, 2], [0, 40, 0, 20, 0, 0]]
    assert [share.longest for share in found] == [150, 90]


@pytest.mark.parametrize("lens", [[(9, 1), (300, 1)], [(40, 40), (90, 20)], [(9, 9)]])
def test_a_batch_that_one_kernel_serves_is_one_launch(lens):
    (share,) = shares(KvShape(1, 4, 1, 64, DType.FLOAT16), lens)
    assert share.query_lens.tolist() == [queries for _, queries in lens]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.INT8])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("min_partition", [64, 256])
def test_a_mixed_batch_equals_the_oracle_row_by_row(dtype, window, min_partition):
    contexts, queries = map(list, zip(*MIXED, strict=True))
    layout = make_layout(4, 1, 64, 16, blocks_needed(contexts, 16) + 2, 2, dtype)
    backend, driver = make_virtual_backend(layout, min_partition=min_partition)
    case = make_case(layout, contexts, queries, np.random.default_rng(0))
    poison(backend)
    fill(backend, case, 1)
    params = AttentionParams(window=window)
    result = attend(backend, case, 1, params)
    backend.close()
    driver.assert_clean()
    tolerance = {DType.FLOAT32: 2e-6, DType.FLOAT16: 2e-3, DType.INT8: 3e-2}[dtype]
    assert_close(result, expected(case, params), tolerance)
    launches = [stats for stats in driver.launches if stats.kernel.startswith("attend")]
    assert len(launches) == (1 if dtype is DType.FLOAT32 else 2)  # 8 rows are the same tile as many there


@pytest.mark.parametrize(("capacity", "context"), [(None, 4096), (8192, 100)])
def test_a_window_bounds_the_keys_that_partitions_are_made_for(capacity, context):
    shape = KvShape(1, 4, 1, 64, DType.FLOAT16)
    (share,) = shares(shape, [(context, 1)], 32, capacity)
    assert share.longest == 32
    (share,) = shares(shape, [(context, 64)], 32, capacity)
    assert share.longest == 31 + 17  # rows of a tile of 64, 4 to a position, begin anywhere in one
    (share,) = shares(shape, [(40, 1)], 10_000)
    assert share.longest == 40


def test_decoding_in_a_window_needs_no_partitions_however_long_the_context():
    layout = make_layout(4, 1, 64, 16, blocks_needed([600], 16), 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout, min_partition=64)
    case = make_case(layout, [600], [1], np.random.default_rng(0))
    fill(backend, case, 0)
    params = AttentionParams(window=48)
    assert_close(attend(backend, case, 0, params), expected(case, params), 2e-6)
    assert "merge_states" not in {stats.kernel for stats in driver.launches}
    backend.close()


def test_a_batch_is_checked_once_a_job_and_not_once_a_layer(monkeypatch):
    layout = make_layout(4, 1, 64, 16, 8, 4, DType.FLOAT16)
    backend, _ = make_virtual_backend(layout)
    case = make_case(layout, [20, 9], [1, 1], np.random.default_rng(0))
    for layer in range(4):
        fill(backend, case, layer)
    checks = []
    good = validation.check_batch
    monkeypatch.setattr(validation, "check_batch", lambda *args: checks.append(args) or good(*args))
    params = [AttentionParams(), AttentionParams(window=8)] * 2

    def job():
        queries = backend.from_host(case.queries)
        return [backend.attend(layer, queries, case.batch, params[layer]).output for layer in range(4)]

    for number in (1, 2):
        backend.submit(job).result()
        assert len(checks) == 2 * number  # once for each window
    case.batch.block_tables[0, 0] = 99
    with pytest.raises(InvalidArgument, match="block_tables"):
        backend.submit(job).result()
    backend.close()
