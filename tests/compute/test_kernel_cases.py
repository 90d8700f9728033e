"""Faults of other systems' kernels as cases; each test carries the id of its row in the case list."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention_cases import assert_close, attend, blocks_needed, expected, fill, make_case, make_layout, poison
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.layout import KvLayout
from pagedkv.config import BLOCK_SIZES, HEAD_DIMS, KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument


def run(make_backend, layout, context_lens, query_lens, params=None, *, seed=0, mutate=None):
    """Return the attention of a fresh case and the oracle's answer."""
    num_blocks = max(layout.num_blocks, blocks_needed(context_lens, layout.block_size))
    backend = make_backend(KvLayout(layout.shape, num_blocks, layout.block_size))
    case = make_case(backend.layout, context_lens, query_lens, np.random.default_rng(seed))
    if mutate:
        mutate(case)
    poison(backend)
    fill(backend, case, 1)
    return attend(backend, case, 1, params), expected(case, params)


def attend_dense(backend, keys, values, queries, query_len=1, params=None):
    """Attend one sequence of explicit keys and values [context, num_kv_heads, head_dim]."""
    case = make_case(backend.layout, [len(keys)], [query_len], np.random.default_rng(1))
    case.keys[0][:], case.values[0][:], case.queries[:] = keys, values, queries
    fill(backend, case, 1)
    return attend(backend, case, 1, params)[0]


def test_kn01_element_offset_past_two_to_the_31_is_exact() -> None:
    layout = KvLayout(KvShape(1, 32, 8, 128, DType.BFLOAT16), 131080, 16)
    assert layout.element_offset(131076, 0, True, 7, 15) == 131076 * 32768 + 16384 + 7 * 2048 + 15 * 128
    assert layout.element_offset(131076, 0, True, 7, 15) > 2**31


def test_kn03_block_ids_above_65535_reach_their_own_block(make_backend) -> None:
    layout = make_layout(
        num_heads=1, num_kv_heads=1, block_size=8, num_blocks=65600, num_layers=1, dtype=DType.BFLOAT16
    )
    backend = make_backend(layout)
    case = make_case(layout, [40], [1], np.random.default_rng(0))
    case.batch.block_tables[0, :5] = range(65534, 65539)
    case.slots[0][:] = np.arange(65534 * 8, 65534 * 8 + 40)
    fill(backend, case, 0)
    assert_close(attend(backend, case, 0), expected(case))
    assert not any(backend.read_block(block).any() for block in range(5))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_kn04_every_block_size_equals_oracle(make_backend, block_size) -> None:
    lengths = [block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    assert_close(*run(make_backend, make_layout(head_dim=128, block_size=block_size), lengths, [1, 1, 1, 1]))


def test_kn04_unsupported_block_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="block_size"):
        make_layout(block_size=256)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_kn05_head_dim_is_right_or_refused(make_backend, head_dim) -> None:
    if head_dim not in HEAD_DIMS:
        with pytest.raises(InvalidArgument, match="head_dim"):
            make_layout(head_dim=head_dim)
        return
    assert_close(*run(make_backend, make_layout(head_dim=head_dim), [77, 77], [1, 77]))


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 4), (24, 8), (64, 4), (71, 1), (12, 12)])
def test_kn06_group_sizes_equal_oracle_in_both_phases(make_backend, heads) -> None:
    assert_close(*run(make_backend, make_layout(*heads), [21, 21], [1, 9]))


def test_kn06_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_kv_heads"):
        make_layout(30, 4)


@pytest.mark.parametrize("group", [4, 8])
def test_kn07_head_dim_256_writes_every_dimension(make_backend, group) -> None:
    layout = make_layout(2 * group, 2, 256, num_blocks=4)
    values = np.broadcast_to(np.arange(256) / 256, (33, 2, 256))
    output = attend_dense(make_backend(layout), np.zeros((33, 2, 256)), values, 1.0)
    assert np.allclose(output, np.arange(256) / 256, atol=1e-6)


def test_kn08_scores_of_minus_60000_keep_their_weights(make_backend) -> None:
    layout = make_layout(4, 1, 64, num_blocks=8)
    keys, values = np.full((20, 1, 64), -250.0), np.zeros((20, 1, 64))
    values[:] = np.arange(20)[:, None, None]
    keys[0], values[0] = 0.0, 1e4  # out of the window
    params = AttentionParams(scale=1.0, window=19)
    output = attend_dense(make_backend(layout), keys, values, 3.75, params=params)
    assert np.allclose(output, np.arange(1, 20).mean(), rtol=1e-6)


@pytest.mark.parametrize("empty_parts", [1, 2, 6])
def test_kn10_empty_parts_are_neutral(make_backend, empty_parts) -> None:
    backend = make_backend(make_layout())
    outputs, lses = np.zeros((empty_parts + 1, 3, 8, 64), np.float32), np.full((empty_parts + 1, 3, 8), -np.inf, "f")
    outputs[empty_parts // 2], lses[empty_parts // 2] = 0.5, 2.0
    lses[:, 0] = -np.inf
    outputs[:, 0] = np.nan  # an empty part's output is not read
    result = backend.merge_states(outputs, lses)
    assert not result.output[0].any()
    assert np.isneginf(result.lse[0]).all()
    assert np.all(result.output[1:] == 0.5)
    assert np.allclose(result.lse[1:], 2.0, atol=1e-6)


def test_kn11_sequence_without_keys_gives_no_rows_and_leaves_others_alone(make_backend) -> None:
    assert_close(*run(make_backend, make_layout(), [0, 1, 17], [0, 1, 1]))
    (output, lse), _ = run(make_backend, make_layout(), [0], [0])
    assert output.shape == (0, 8, 64)
    assert lse.shape == (0, 8)


def test_kn12_long_context_equals_oracle(make_backend) -> None:
    assert_close(*run(make_backend, make_layout(2, 1, 128, 128), [13000, 41003], [1, 1]))


def test_kn14_slot_minus_one_writes_nothing(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=4))
    poison(backend)
    rows = np.ones((4, 2, 64), np.float32)
    backend.write_kv(0, rows, rows, np.array([5, -1, 7, -1]))
    blocks = np.stack([backend.read_block(block) for block in range(4)]).view(np.float32)
    written = ~np.isnan(blocks).reshape(4, 2, 2, 2, 16, 64)
    assert written.sum() == 2 * 2 * 2 * 64
    assert written[0, 0, :, :, [5, 7]].all()


@pytest.mark.parametrize("filler", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("block_size", [8, 16])
def test_kn16_bytes_behind_the_context_do_not_matter(make_backend, filler, block_size) -> None:
    layout = make_layout(block_size=block_size)
    backend = make_backend(layout)
    bytes_of_filler = np.full(layout.block_bytes // 4, filler, np.float32).view(np.uint8)
    for block in range(layout.num_blocks):
        backend.write_block(block, bytes_of_filler)
    case = make_case(layout, [13, 13], [1, 13], np.random.default_rng(0))
    fill(backend, case, 1)
    assert_close(attend(backend, case, 1), expected(case))


@pytest.mark.parametrize("num_heads", [8, 12])
@pytest.mark.parametrize("context", [1, 2, 17, 300])
def test_kn17_alibi_agrees_between_decode_and_prefill(make_backend, num_heads, context) -> None:
    slopes = (2.0 ** -np.linspace(0.5, 8, num_heads)).astype(np.float32)
    params = AttentionParams(alibi_slopes=slopes)
    backend = make_backend(make_layout(num_heads, 4, num_blocks=20))
    case = make_case(backend.layout, [context], [context], np.random.default_rng(0))
    fill(backend, case, 1)
    prefill = attend(backend, case, 1, params)
    assert_close(prefill, expected(case, params))
    last = AttentionBatch(case.batch.block_tables, case.batch.context_lens, np.array([0, 1], np.int32))
    decode = backend.attend(1, case.queries[-1:], last, params)
    assert np.allclose(decode.output[0], prefill[0][-1], atol=2e-6)


def test_kn18_soft_cap_leaves_no_trace_of_masked_values(make_backend) -> None:
    def mark_masked(case) -> None:
        case.values[0][:32] = 1e4

    params = AttentionParams(soft_cap=30.0, window=8)
    (output, _), exact = run(make_backend, make_layout(), [40], [1], params, mutate=mark_masked)
    assert np.abs(output - exact.output).max() < 1e-5


@pytest.mark.parametrize("window", [4, 16])
def test_kn20_window_sees_exactly_its_newest_keys(make_backend, window) -> None:
    backend = make_backend(make_layout(2, 1, 64, num_blocks=8))
    for context in (window - 1, window, window + 1, 3 * window):
        values = np.eye(context, 64)[:, None]
        output = attend_dense(backend, np.zeros((context, 1, 64)), values, 1.0, context, AttentionParams(window=window))
        for position in range(context):
            seen = np.flatnonzero(output[position, 0])
            assert list(seen) == list(range(max(0, position - window + 1), position + 1))


def test_kn22_window_of_unaligned_batches_equals_batches_of_one(make_backend) -> None:
    for lengths in ([64, 50, 33, 17], [4096, 4081]):
        params = AttentionParams(window=32)
        assert_close(*run(make_backend, make_layout(), lengths, [1] * len(lengths), params))


def test_kn22_blocks_behind_the_window_are_not_read(make_backend) -> None:
    backend = make_backend(make_layout())
    case = make_case(backend.layout, [100], [3], np.random.default_rng(0))
    fill(backend, case, 1)
    params = AttentionParams(window=20)
    case.batch.block_tables[0, :4] = -1  # query 97 sees keys from 78 on, in block 4
    assert_close(attend(backend, case, 1, params), expected(case, params))


@pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT8_E4M3])
def test_kn23_scales_apply_on_every_path(make_backend, dtype) -> None:
    layout = make_layout(dtype=dtype)
    tolerance = 0.02 if dtype is DType.INT8 else 0.12
    for query_lens in ([1, 1], [5, 33], [64, 1]):
        assert_close(*run(make_backend, layout, [64, 77], query_lens), tolerance)


def test_kn26_bfloat16_sums_of_8192_keys_do_not_stall(make_backend) -> None:
    backend = make_backend(make_layout(2, 1, 64, num_blocks=512, dtype=DType.BFLOAT16))
    values = np.ones((8192, 1, 64))
    assert np.allclose(attend_dense(backend, np.zeros_like(values), values, 1.0), 1.0, atol=1e-5)
    values *= (np.arange(8192) / 8192)[:, None, None]
    assert np.allclose(attend_dense(backend, np.zeros_like(values), values, 1.0), 0.5, rtol=0.01)


def test_kn28_scratch_follows_the_shape_of_each_call(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=300))
    for lengths in ([512], [2100, 2100], [17], [4000]):
        case = make_case(backend.layout, lengths, [1] * len(lengths), np.random.default_rng(0))
        fill(backend, case, 1)
        assert_close(attend(backend, case, 1), expected(case))


def test_kn32_exact_block_boundaries_read_no_block_too_far(make_backend) -> None:
    backend = make_backend(make_layout())
    for length in (15, 16, 17, 31, 32, 33):
        poison(backend)
        case = make_case(backend.layout, [length], [1], np.random.default_rng(length))
        fill(backend, case, 1)
        assert_close(attend(backend, case, 1), expected(case))


def test_rt08_masked_sums_agree_for_every_thread_count(make_backend) -> None:
    params = AttentionParams(window=9, sinks=np.ones(8, np.float32))
    lengths = list(range(1, 41))
    layout = make_layout(num_blocks=blocks_needed(lengths, 16))
    case = make_case(layout, lengths, [1] * 40, np.random.default_rng(0))
    outputs = []
    for num_threads in (1, 2, 8, 16):
        backend = make_backend(layout, num_threads=num_threads)
        fill(backend, case, 1)
        outputs.append(attend(backend, case, 1, params))
        assert_close(outputs[-1], expected(case, params))
    assert all(np.abs(output[0] - outputs[0][0]).max() <= 1e-6 for output in outputs)


def test_split_context_agrees_for_every_thread_count(make_backend) -> None:
    layout = make_layout(num_blocks=200)
    case = make_case(layout, [3001], [1], np.random.default_rng(0))
    for num_threads in (1, 4, 16):
        backend = make_backend(layout, num_threads=num_threads)
        fill(backend, case, 1)
        assert_close(attend(backend, case, 1), expected(case))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("group", [1, 5])
def test_queries_on_a_long_context_beside_short_sequences_equal_oracle(make_backend, dtype, group) -> None:
    lengths, query_lens = [2100, 130, 1, 2048, 2300], [300, 130, 1, 1, 7]
    layout = make_layout(2 * group, 2, 64, num_blocks=blocks_needed(lengths, 16), dtype=dtype)
    for num_threads in (1, 3):
        backend = make_backend(layout, num_threads=num_threads)
        case = make_case(layout, lengths, query_lens, np.random.default_rng(group))
        fill(backend, case, 1)
        assert_close(attend(backend, case, 1), expected(case))
