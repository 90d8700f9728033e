"""Writing, copying, merging and moving blocks on the virtual GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from helpers.attention_cases import NUMPY_DTYPES, make_layout
from helpers.cuda import make_virtual_backend
from helpers.oracle import oracle_merge
from pagedkv.compute.backend import AttentionBatch, AttentionParams
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.kernels import storage_code
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError, InvalidArgument, UnsupportedModel


def write(backend: CudaBackend, keys: np.ndarray, values: np.ndarray, slots: np.ndarray, layer: int = 0) -> None:
    def job() -> None:
        backend.write_kv(layer, backend.from_host(keys), backend.from_host(values), slots)

    backend.submit(job).result()


def read(backend: CudaBackend, block_id: int) -> np.ndarray:
    return backend.submit(lambda: backend.read_block(block_id)).result()


@pytest.mark.parametrize("source", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_write_kv_stores_rounded_rows_at_their_slots_and_skips_minus_one(dtype, source):
    layout = make_layout(4, 2, 80, 8, 4, 2, dtype)
    backend, driver = make_virtual_backend(layout)
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((5, 2, 80)).astype(source) for _ in range(2))
    slots = np.array([9, 31, -1, 8, 15])
    for block_id in range(4):
        backend.submit(lambda b=block_id: backend.write_block(b, np.zeros(layout.block_bytes, np.uint8))).result()
    write(backend, keys, values, slots, layer=1)
    pool = np.stack([read(backend, block) for block in range(4)]).view(NUMPY_DTYPES[dtype])
    exact = np.zeros((4, 2, 2, 2, 8, 80), NUMPY_DTYPES[dtype])
    for token, slot in enumerate(slots):
        if slot >= 0:
            exact[slot // 8, 1, 0, :, slot % 8] = keys[token].astype(np.float32)
            exact[slot // 8, 1, 1, :, slot % 8] = values[token].astype(np.float32)
    assert pool.reshape(exact.shape).tobytes() == exact.tobytes()
    backend.close()
    driver.assert_clean()


def test_kn25_sources_at_odd_offsets_are_written_right_and_the_context_lives_on():
    layout = make_layout(2, 1, 128, 16, 2, 1, DType.BFLOAT16)
    backend, driver = make_virtual_backend(layout)
    flat = np.random.default_rng(0).standard_normal(3 * 128 + 1).astype(ml_dtypes.bfloat16)
    rows = flat[1:].reshape(3, 1, 128)
    write(backend, rows, rows, np.array([0, 1, 16]))
    stored = read(backend, 1).view(ml_dtypes.bfloat16).reshape(2, 16, 128)
    np.testing.assert_array_equal(stored[:, 0], np.stack([rows[2, 0]] * 2))
    with pytest.raises(InvalidArgument):
        KvShape(1, 1, 1, 46, DType.BFLOAT16)
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize(
    "copies", [[], [(0, 3), (1, 2)], [(0, 1), (1, 0)], [(0, 1), (1, 2), (2, 3)], [(2, 2), (0, 1), (0, 1)]]
)
def test_copy_blocks_reads_all_sources_first(copies):
    layout = make_layout(2, 1, 64, 8, 4, 2)
    backend, driver = make_virtual_backend(layout)
    before = np.random.default_rng(0).integers(0, 256, (4, layout.block_bytes), np.uint8)
    for block in range(4):
        backend.submit(lambda b=block: backend.write_block(b, before[b])).result()
    backend.submit(lambda: backend.copy_blocks(copies)).result()
    after = before.copy()
    for source, target in copies:
        after[target] = before[source]
    np.testing.assert_array_equal(np.stack([read(backend, block) for block in range(4)]), after)
    backend.close()
    driver.assert_clean()


def test_merge_states_equals_the_oracle_and_never_reads_an_empty_part():
    layout = make_layout(4, 2, 80)
    backend, driver = make_virtual_backend(layout)
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((3, 5, 4, 80)).astype(np.float32)
    lses = rng.standard_normal((3, 5, 4)).astype(np.float32)
    lses[1, 2], lses[:, 3] = -np.inf, -np.inf
    outputs[1, 2], outputs[:, 3] = np.nan, np.nan

    def job():
        result = backend.merge_states(backend.from_host(outputs), backend.from_host(lses))
        return backend.to_host(result.output), backend.to_host(result.lse)

    output, lse = backend.submit(job).result()
    exact = oracle_merge(outputs, lses)
    np.testing.assert_allclose(output, exact.output, atol=2e-6)
    np.testing.assert_allclose(lse, exact.lse, atol=2e-6)
    backend.close()
    driver.assert_clean()


def test_bad_arguments_are_refused_by_name_before_any_change():
    layout = make_layout(num_blocks=2)
    backend, driver = make_virtual_backend(layout)
    rows = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(InvalidArgument, match="layer"):
        write(backend, rows, rows, np.array([0]), layer=2)
    with pytest.raises(InvalidArgument, match="slot_mapping"):
        write(backend, rows, rows, np.array([32]))
    with pytest.raises(InvalidArgument, match="keys"):
        write(backend, rows[:, :1], rows, np.array([0]))
    with pytest.raises(InvalidArgument, match="two sources"):
        backend.submit(lambda: backend.copy_blocks([(0, 1), (1, 1)])).result()
    batch = AttentionBatch(np.array([[7]], np.int32), np.array([1], np.int32), np.array([0, 1], np.int32))
    queries = np.zeros((1, 8, 64), np.float32)
    with pytest.raises(InvalidArgument, match="block_tables"):
        backend.submit(lambda: backend.attend(0, backend.from_host(queries), batch, AttentionParams())).result()
    assert not [stats for stats in driver.launches if stats.kernel in ("write_kv", "copy_blocks", "attend")]
    backend.close()


def test_a_storage_type_without_kernels_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="float4"):
        storage_code("float4")  # type: ignore[arg-type]


def test_a_pool_that_does_not_fit_says_what_was_asked_what_is_free_and_what_to_lower():
    layout = make_layout(32, 32, 256, 128, num_blocks=100)
    with pytest.raises(DeviceError, match=rf"{layout.pool_bytes} bytes does not fit.*free.*lower --memory"):
        make_virtual_backend(layout)
