"""Everything a caller can get wrong is refused with its field, and changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.attention_cases import assert_close, attend, expected, fill, make_case, make_layout
from pagedkv.compute.backend import AttentionParams
from pagedkv.errors import InvalidArgument


@pytest.fixture
def backend(make_backend):
    return make_backend(make_layout(num_blocks=8))


def rows(tokens=4, heads=2, dim=64, dtype=np.float32):
    return np.ones((tokens, heads, dim), dtype)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("layer", (2, rows(), rows(), np.arange(4))),
        ("layer", (-1, rows(), rows(), np.arange(4))),
        ("keys", (0, rows(heads=3), rows(), np.arange(4))),
        ("keys", (0, rows(dim=80), rows(), np.arange(4))),
        ("keys", (0, rows(dtype=np.float64), rows(), np.arange(4))),
        ("keys", (0, [[1.0]], rows(), np.arange(4))),
        ("values", (0, rows(), rows(5), np.arange(4))),
        ("values", (0, rows(), rows(dtype=np.int32), np.arange(4))),
        ("values", (0, rows(), rows(dtype=np.float16), np.arange(4))),
        ("slot_mapping", (0, rows(), rows(), np.arange(3))),
        ("slot_mapping", (0, rows(), rows(), np.arange(4.0))),
        ("slot_mapping", (0, rows(), rows(), np.array([0, 1, 2, 128]))),
        ("slot_mapping", (0, rows(), rows(), np.array([0, 1, 2, -2]))),
    ],
)
def test_write_kv_refuses_bad_arguments_and_changes_nothing(backend, field, arguments) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend.write_kv(*arguments)
    assert caught.value.field == field
    assert not any(backend.read_block(block).any() for block in range(8))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("context_lens", {"context_lens": np.array([33, 40], np.int32)}),
        ("context_lens", {"context_lens": np.array([20, 2], np.int32)}),
        ("context_lens", {"context_lens": np.array([20.0, 40.0])}),
        ("context_lens", {"context_lens": np.array([-1, 40], np.int32)}),
        ("query_starts", {"query_starts": np.array([1, 2, 5], np.int32)}),
        ("query_starts", {"query_starts": np.array([0, 5, 4], np.int32)}),
        ("query_starts", {"query_starts": np.array([0, 1, 3], np.int32)}),
        ("query_starts", {"query_starts": np.array([0, 4], np.int32)}),
        ("block_tables", {"block_tables": np.array([[0, 1, 2], [3, 8, 4]], np.int32)}),
        ("block_tables", {"block_tables": np.array([[0, -2, 2], [3, 5, 4]], np.int32)}),
        ("block_tables", {"block_tables": np.array([[0, 1, 2]], np.int32)}),
        ("block_tables", {"block_tables": np.array([0, 1, 2], np.int32)}),
        ("context_lens", {"block_tables": np.array([[0, 1], [3, 5]], np.int32)}),
    ],
)
def test_kn31_impossible_metadata_is_refused_and_the_backend_stays_usable(backend, field, change) -> None:
    case = make_case(backend.layout, [20, 40], [1, 3], np.random.default_rng(0))
    fill(backend, case, 0)
    if "context_lens" in change and change["context_lens"][0] == 33:
        change = {**change, "block_tables": case.batch.block_tables[:, :2].copy()}
    with pytest.raises(InvalidArgument) as caught:
        backend.attend(0, case.queries, replace(case.batch, **change), AttentionParams())
    assert caught.value.field == field
    assert_close(attend(backend, case, 0), expected(case))


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("scale", AttentionParams(scale=float("nan"))),
        ("window", AttentionParams(window=0)),
        ("soft_cap", AttentionParams(soft_cap=-1.0)),
        ("soft_cap", AttentionParams(soft_cap=float("inf"))),
        ("alibi_slopes", AttentionParams(alibi_slopes=np.ones(3, np.float32))),
        ("sinks", AttentionParams(sinks=np.full(8, np.nan, np.float32))),
    ],
)
def test_attend_refuses_bad_options(backend, field, params) -> None:
    case = make_case(backend.layout, [20], [1], np.random.default_rng(0))
    with pytest.raises(InvalidArgument) as caught:
        backend.attend(0, case.queries, case.batch, params)
    assert caught.value.field == field


@pytest.mark.parametrize("copies", [[(0, 8)], [(-1, 0)], [(0, 1), (8, 2)]])
def test_copy_blocks_refuses_ids_outside_the_pool(backend, copies) -> None:
    with pytest.raises(InvalidArgument, match="copies"):
        backend.copy_blocks(copies)
    assert not any(backend.read_block(block).any() for block in range(8))


def test_block_access_outside_the_pool_is_refused(backend) -> None:
    for bad in (-1, 8):
        with pytest.raises(InvalidArgument, match="block_id"):
            backend.read_block(bad)
    with pytest.raises(InvalidArgument, match="data"):
        backend.write_block(0, np.zeros(7, np.uint8))


@pytest.mark.parametrize("shape", [(2, 3, 8, 80), (2, 3, 7, 64), (3, 8, 64), (0, 3, 8, 64)])
def test_merge_states_refuses_bad_shapes(backend, shape) -> None:
    with pytest.raises(InvalidArgument, match="outputs"):
        backend.merge_states(np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32))
