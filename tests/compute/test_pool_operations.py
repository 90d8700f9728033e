from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from helpers.attention_cases import NUMPY_DTYPES, assert_close, attend, expected, fill, make_case, make_layout
from helpers.oracle import oracle_merge
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cpu.features import usable_isas
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

USABLE_ISAS = [isa.name for isa in usable_isas()]


def fill_blocks(backend) -> np.ndarray:
    """Give every block other bytes; return them [num_blocks, block_bytes]."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (backend.layout.num_blocks, backend.layout.block_bytes), dtype=np.uint8)
    for block, data in enumerate(blocks):
        backend.write_block(block, data)
    return blocks


def pool_bytes(backend) -> np.ndarray:
    return np.stack([backend.read_block(block) for block in range(backend.layout.num_blocks)])


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 1), (1, 2)],
        [(0, 1), (1, 0)],
        [(0, 1), (0, 2)],
        [],
        [(0, 1), (0, 1)],
        [(0, 1), (1, 2), (2, 0), (3, 3)],
    ],
)
def test_sc11_copies_act_as_if_all_sources_were_read_first(make_backend, copies) -> None:
    backend = make_backend(make_layout(num_blocks=5))
    wanted = fill_blocks(backend)
    before = wanted.copy()
    for source, destination in copies:
        wanted[destination] = before[source]
    backend.copy_blocks(copies)
    assert np.array_equal(pool_bytes(backend), wanted)


def test_sc11_two_sources_for_one_destination_are_refused(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=5))
    before = fill_blocks(backend)
    with pytest.raises(InvalidArgument, match="copies"):
        backend.copy_blocks([(3, 4), (0, 2), (1, 2)])
    assert np.array_equal(pool_bytes(backend), before)


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@pytest.mark.parametrize("isa", [None, *(name for name in ("avx2", "portable") if name in USABLE_ISAS)])
def test_write_kv_rounds_as_numpy_and_touches_nothing_else(make_backend, source, dtype, isa) -> None:
    layout = make_layout(head_dim=80, num_blocks=6, dtype=dtype)
    backend = make_backend(layout, isa=isa)
    rng = np.random.default_rng(0)
    keys, values = ((rng.standard_normal((30, 2, 80)) * 10.0 ** rng.integers(-9, 4)).astype(source) for _ in "kv")
    slots = rng.permutation(6 * 16)[:30]
    wanted = np.zeros((6, 2, 2, 2, 16, 80), NUMPY_DTYPES[dtype])
    for token, slot in enumerate(slots):
        for part, rows in enumerate((keys, values)):
            wanted[slot // 16, 1, part, :, slot % 16] = rows[token].astype(np.float32).astype(wanted.dtype)
    backend.write_kv(1, keys, values, slots)
    written = pool_bytes(backend).view(wanted.dtype).reshape(wanted.shape)
    assert np.array_equal(written, wanted)


@pytest.mark.parametrize(("dtype", "bound"), [(DType.INT8, 0.5 / 127), (DType.FLOAT8_E4M3, 2.0**-4)])
@pytest.mark.parametrize("isa", [None, "portable"])
def test_write_kv_8_bit_error_stays_within_half_a_step(make_backend, dtype, bound, isa) -> None:
    layout = make_layout(num_blocks=1, num_layers=1, dtype=dtype)
    backend = make_backend(layout, isa=isa)
    rows = np.random.default_rng(0).standard_normal((16, 2, 64)).astype(np.float32)
    rows[3] = 0.0
    backend.write_kv(0, rows, 7 * rows, np.arange(16))
    block = backend.read_block(0)
    scales = block[layout.scale_offset :].view(np.float32).reshape(2, 2, 16)
    kind = np.int8 if dtype is DType.INT8 else ml_dtypes.float8_e4m3fn
    stored = block[: layout.scale_offset].view(kind).astype(np.float64).reshape(2, 2, 16, 64)
    for part, factor in ((0, 1), (1, 7)):
        exact = factor * rows.transpose(1, 0, 2).astype(np.float64)
        peaks = np.abs(exact).max(-1, keepdims=True)
        error = np.abs(stored[part] * scales[part][..., None] - exact)
        allowed = bound * (peaks if dtype is DType.INT8 else np.maximum(np.abs(exact), peaks / 448 / 4)) * 1.0001
        assert np.all(error <= allowed)


def test_write_kv_of_strided_sources_stores_their_rows(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=1, num_layers=1))
    wide = np.random.default_rng(0).standard_normal((4, 2, 129)).astype(np.float32)
    backend.write_kv(0, wide[:, :, 1:65], wide[:, :, 65:], np.arange(4))
    stored = backend.read_block(0).view(np.float32).reshape(2, 2, 16, 64)
    assert np.array_equal(stored[0, :, :4], wide[:, :, 1:65].transpose(1, 0, 2))


def test_denormals_are_read_and_written_without_trap_or_nan(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=2))
    case = make_case(backend.layout, [20], [1], np.random.default_rng(0))
    case.keys[0][:] = 1e-40
    fill(backend, case, 0)
    assert_close(attend(backend, case, 0), expected(case))


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_merge_states_equals_oracle(make_backend, num_parts) -> None:
    backend = make_backend(make_layout())
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((num_parts, 5, 8, 64)).astype(np.float32)
    lses = (10 * rng.standard_normal((num_parts, 5, 8))).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    result = backend.merge_states(outputs, lses)
    assert_close((result.output, result.lse), oracle_merge(outputs, lses))


def test_merge_states_of_halves_equals_attention_over_the_whole(make_backend) -> None:
    backend = make_backend(make_layout())
    case = make_case(backend.layout, [64], [1], np.random.default_rng(0))
    fill(backend, case, 0)
    whole = backend.attend(0, case.queries, case.batch, AttentionParams())
    halves = []
    for columns in (slice(0, 2), slice(2, 4)):
        tables = np.ascontiguousarray(case.batch.block_tables[:, columns])
        half = AttentionBatch(tables, np.array([32], np.int32), case.batch.query_starts)
        halves.append(backend.attend(0, case.queries, half, AttentionParams()))
    merged = backend.merge_states(np.stack([h.output for h in halves]), np.stack([h.lse for h in halves]))
    assert np.allclose(merged.output, whole.output, atol=1e-6)
    assert np.allclose(merged.lse, whole.lse, atol=1e-6)


def test_rt06_attention_from_eight_threads_is_right_and_does_not_abort(make_backend) -> None:
    backend = make_backend(make_layout(num_blocks=40))
    case = make_case(backend.layout, [100, 33, 300], [1, 3, 1], np.random.default_rng(0))
    fill(backend, case, 0)
    exact, results = expected(case), []

    def work() -> None:
        for index in range(200):
            if index % 2:  # through the queue, and straight from this thread
                result = attend(backend, case, 0)
            else:
                direct = backend.attend(0, case.queries, case.batch, AttentionParams())
                result = (direct.output, direct.lse)
            if index % 50 == 0:
                results.append(result)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 * 4
    for result in results:
        assert_close(result, exact)
