"""The pool as other libraries see it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from helpers.cuda import make_virtual_backend
from helpers.dlpack import Consumed
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.dlpack import CUDA_DEVICE, layer_elements
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument
from virtual_gpu import VirtualDriver

TYPES = {  # DLDataTypeCode and bits
    DType.FLOAT32: (2, 32),
    DType.FLOAT16: (2, 16),
    DType.BFLOAT16: (4, 16),
    DType.INT8: (0, 8),
    DType.FLOAT8_E4M3: (10, 8),
}


@pytest.fixture
def opened():
    backend, driver = make_virtual_backend(make_layout(4, 2, 64, 16, 4, 2))
    yield backend, driver
    backend.close()
    driver.assert_clean()


def write_row(backend: CudaBackend, row: np.ndarray) -> None:
    """Put a row [2, 64] into layer 1 at offset 5 of block 2."""

    def job() -> None:
        tensor = backend.from_host(row[None])
        backend.write_kv(1, tensor, tensor, np.array([2 * 16 + 5]))

    backend.submit(job).result()


def read(driver: VirtualDriver, taken: Any, *index: int) -> np.ndarray:
    """Return a row of a consumed float32 tensor, as the device holds it."""
    offset = sum(i * stride for i, stride in zip(index, taken.strides, strict=False)) * 4
    return driver.view(taken.pointer + offset, taken.shape[-1] * 4).view(np.float32)


def test_a_layers_view_addresses_the_bytes_that_write_kv_stored(opened):
    backend, driver = opened
    row = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    write_row(backend, row)
    view = backend.pool.layer_view(1, is_value=True).__cuda_array_interface__
    assert view["shape"] == (4, 2, 16, 64)
    for head in range(2):
        offset = 2 * view["strides"][0] + head * view["strides"][1] + 5 * view["strides"][2]
        stored = driver.view(view["data"][0] + offset, 256).view(np.float32)
        np.testing.assert_array_equal(stored, row[head])


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 2)])
def test_a_capsule_of_the_version_asked_for_addresses_the_bytes_that_write_kv_stored(opened, version):
    backend, driver = opened
    row = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    write_row(backend, row)
    view = backend.pool.layer_view(1, is_value=True)
    assert view.__dlpack_device__() == (CUDA_DEVICE, 0)
    taken = Consumed(view.__dlpack__(stream=1, max_version=version))
    assert taken.name == ("dltensor_versioned" if version and version[0] else "dltensor")
    assert (taken.device, taken.shape, taken.lanes) == ((CUDA_DEVICE, 0), (4, 2, 16, 64), 1)
    for head in range(2):
        np.testing.assert_array_equal(read(driver, taken, 2, head, 5), row[head])
    taken.close()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("is_value", [False, True])
def test_a_layers_capsule_has_the_types_code_and_strides_in_elements(dtype, is_value):
    layout = make_layout(4, 2, 80, 8, 3, 2, dtype)
    backend, _ = make_virtual_backend(layout)
    taken = Consumed(backend.pool.layer_view(1, is_value).__dlpack__())
    assert taken.type == TYPES[dtype]
    assert taken.shape == (3, 2, 8, 80)
    assert taken.strides == (layout.block_stride, layout.head_stride, 80, 1)
    offset = layout.element_offset(0, 1, is_value, 0, 0) * dtype.itemsize
    assert taken.pointer == backend.pool.pointer + offset
    taken.close()
    backend.close()


@pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT8_E4M3])
def test_a_quantised_layers_scales_are_a_view_of_their_own(dtype):
    layout = make_layout(4, 2, 64, 16, 4, 2, dtype)
    backend, driver = make_virtual_backend(layout)
    row = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    write_row(backend, row)
    taken = Consumed(backend.pool.scale_view(1, is_value=True).__dlpack__())
    assert (taken.type, taken.shape) == ((2, 32), (4, 2, 16))
    for head in range(2):
        at = taken.pointer + (2 * taken.strides[0] + head * taken.strides[1] + 5) * 4
        expected = np.abs(row[head]).max() / np.float32(127 if dtype is DType.INT8 else 448)
        assert driver.view(at, 4).view(np.float32)[0] == expected
    taken.close()
    backend.close()
    with pytest.raises(InvalidArgument, match="dtype"):
        make_virtual_backend(make_layout())[0].pool.scale_view(0, is_value=False)


def test_the_raw_pool_is_a_capsule_of_bytes_over_all_blocks(opened):
    backend, _ = opened
    taken = Consumed(backend.pool.raw_view().__dlpack__())
    assert (taken.type, taken.pointer) == ((1, 8), backend.pool.pointer)
    assert taken.shape == (4, backend.layout.block_bytes)
    taken.close()


@pytest.mark.parametrize("schedule", ["lazy", *range(4)])
@pytest.mark.parametrize("number", [None, 1, 2, "own"])
def test_a_consumers_stream_sees_what_was_written_before_the_capsule_was_made(schedule, number):
    backend, driver = make_virtual_backend(make_layout(4, 2, 64, 16, 4, 2), schedule=schedule)
    with backend.device.context.pushed():
        stream = int(driver.cuStreamCreate(1)[1]) if number == "own" else number
    row = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    seen = np.empty(64, np.float32)

    def job() -> None:  # enqueues the write; nobody waits for it
        tensor = backend.from_host(row[None])
        backend.write_kv(1, tensor, tensor, np.array([2 * 16 + 5]))
        taken = Consumed(backend.pool.layer_view(1, is_value=False).__dlpack__(stream=stream))
        at = taken.pointer + (2 * taken.strides[0] + taken.strides[1] + 5 * taken.strides[2]) * 4
        driver.cuMemcpyDtoHAsync(seen.ctypes.data, at, 256, stream or 0)
        taken.close()

    backend.submit(job).result()
    np.testing.assert_array_equal(seen, row[1])
    backend.close()
    driver.assert_clean()


def test_a_consumer_that_asks_for_no_order_gets_none(opened):
    backend, driver = opened
    before = driver.scheduler.num_run
    Consumed(backend.pool.raw_view().__dlpack__(stream=-1)).close()
    assert driver.scheduler.num_run == before
    assert not driver.scheduler.null.waits


@pytest.mark.parametrize(
    ("options", "what"),
    [({"stream": 0}, "ambiguous"), ({"copy": True}, "copied"), ({"dl_device": (1, 0)}, "device")],
)
def test_what_cannot_be_lent_is_refused(opened, options, what):
    with pytest.raises(BufferError, match=what):
        opened[0].pool.raw_view().__dlpack__(**options)


def test_memory_lives_until_the_last_consumer_is_done_though_the_backend_is_closed():
    backend, driver = make_virtual_backend(make_layout(4, 2, 64, 16, 4, 2))
    row = np.ones((2, 64), np.float32)
    write_row(backend, row)
    pool = backend.pool
    view = pool.layer_view(1, is_value=True)
    taken, forgotten = Consumed(view.__dlpack__()), view.__dlpack__()
    backend.close()
    assert pool.pointer in driver.memory.live
    np.testing.assert_array_equal(read(driver, taken, 2, 1, 5), row[1])
    with pytest.raises(BufferError, match="closed"):
        view.__dlpack__()
    taken.close()
    assert pool.pointer in driver.memory.live
    del forgotten  # a capsule that nobody took
    gc.collect(0)
    assert not driver.memory.live
    assert driver.num_retained == 0
    driver.assert_clean()


def test_a_view_that_no_consumer_holds_does_not_keep_a_closed_pool():
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    view = backend.pool.raw_view()
    Consumed(view.__dlpack__()).close()
    backend.close()
    assert not driver.memory.live
    assert driver.num_retained == 0


def test_a_layer_outside_the_pool_has_no_view(opened):
    with pytest.raises(InvalidArgument, match="layer"):
        layer_elements(opened[0].layout, 0, 2, is_value=False)
