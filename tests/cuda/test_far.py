"""KN-01 for every kernel and storage type: what lies beyond the reach of 32-bit numbers is found all the same.

Memory for that is not there. Addresses are moved back, so that only the exact 64-bit sum lands in an allocation, and
of grids with too many CTAs the last ones are run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import Case, assert_close, attend, expected, fill, make_case, make_layout
from helpers.cuda import make_virtual_backend
from helpers.oracle import oracle_attention
from pagedkv.compute.backend import AttentionBatch, AttentionParams, Rotation
from pagedkv.compute.cuda.array import DeviceArray
from pagedkv.compute.cuda.attention import _Launch
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.kernels import choose_attention, plain_variant, rope_write_variant, write_variant
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType
from virtual_gpu import VirtualDriver

SHIFT = 2**24  # blocks; of at least 4 KiB each, so that pieces of 16 bytes are more than 2^31, too
FAR = 2**32 + 3 * 128  # elements: beyond 32 bits, signed or not
KERNELS = {"attend": (False, 1), "attend_decode": (True, 1), "attend_mma": (True, 17)}  # tensor cores, queries
PLAIN = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)


def move_pool(backend: CudaBackend, shift: int) -> None:
    """Let block ids begin at `shift`: the pool's address is that of a block that is not there."""
    layout = backend.layout
    backend.layout = KvLayout(layout.shape, layout.num_blocks + shift, layout.block_size)
    backend.pool.pointer -= shift * layout.block_bytes
    assert abs(shift) * layout.block_bytes // 16 > 2**31


def move_case(case: Case, layout: KvLayout) -> None:
    used = case.batch.block_tables != 2**31 - 1
    case.batch.block_tables[used] += SHIFT
    for slots in case.slots:
        slots += SHIFT * layout.block_size


def attend_near_and_far(layout: KvLayout, kernel: str) -> tuple[Case, list[Any]]:
    """Return a case, and what attention gives for it with the pool in its place and far away."""
    tensor_cores, num_queries = KERNELS[kernel]
    backend, driver = make_virtual_backend(layout, tensor_cores=tensor_cores)
    case = make_case(layout, [90], [num_queries], np.random.default_rng(0))
    results = []
    for shift in (0, SHIFT):
        if shift:
            move_pool(backend, shift)
            move_case(case, layout)
            backend.submit(lambda: backend.copy_blocks(copies_to_free_blocks(case, backend.layout))).result()
        fill(backend, case, 0)
        results.append(attend(backend, case, 0))
    assert kernel in {stats.kernel for stats in driver.launches}
    move_pool(backend, -SHIFT)
    backend.close()
    driver.assert_clean()
    return case, results


def copies_to_free_blocks(case: Case, layout: KvLayout) -> list[tuple[int, int]]:
    """Return a copy of each block in use to one that is not, all of them far; the table then names the copies."""
    table = case.batch.block_tables[0]
    used = [int(block) for block in table if block != 2**31 - 1]
    free = [block for block in range(SHIFT, layout.num_blocks) if block not in used][: len(used)]
    table[: len(used)] = free
    size = layout.block_size
    case.slots[0][:] = np.repeat(np.array(free), size)[: len(case.slots[0])] * size + case.slots[0] % size
    return list(zip(used, free, strict=True))


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(k, d) for k in KERNELS for d in DType if k == "attend" or d is not DType.FLOAT32]
)
def test_kn01_blocks_beyond_32_bits_give_what_near_ones_give(kernel, dtype):
    layout = make_layout(2, 1, 64, 16, 14, 2, dtype)
    case, (near, far) = attend_near_and_far(layout, kernel)
    for one, other in zip(near, far, strict=True):
        np.testing.assert_array_equal(one, other)
    if dtype in PLAIN:
        assert_close(far, expected(case), 2e-3 if kernel == "attend_mma" else 2e-5)


def test_kn01_copied_blocks_beyond_32_bits_carry_their_bytes():
    layout = make_layout(2, 1, 64, 16, 4, 1)
    backend, driver = make_virtual_backend(layout)
    data = np.random.default_rng(0).integers(0, 256, layout.block_bytes, np.uint8)
    move_pool(backend, SHIFT)

    def job() -> np.ndarray:
        backend.write_block(SHIFT + 1, data)
        backend.copy_blocks([(SHIFT + 1, SHIFT + 2), (SHIFT + 2, SHIFT + 3)])  # the second by way of scratch memory
        return backend.read_block(SHIFT + 2)

    np.testing.assert_array_equal(backend.submit(job).result(), data)
    move_pool(backend, -SHIFT)
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("dtype", list(DType))
def test_kn01_rope_write_to_blocks_beyond_32_bits_stores_what_it_stores_near(dtype):
    layout = make_layout(2, 1, 64, 16, 4, 1, dtype)
    backend, driver = make_virtual_backend(layout)
    rows = [np.random.default_rng(n).standard_normal((2, n, 64)).astype(np.float32) for n in (2, 1, 1)]
    rotation = Rotation(np.full(32, 0.5, np.float32), interleaved=True)

    def write(first: int) -> np.ndarray:
        slots = np.array([first * 16 + 3, first * 16 + 16 + 9])
        for block in (first, first + 1):
            backend.write_block(block, np.zeros(layout.block_bytes, np.uint8))
        tensors = [backend.from_host(array) for array in rows]
        backend.rope_write_kv(0, *tensors, np.array([3, 700], np.int32), slots, rotation)
        return [backend.read_block(block) for block in (first, first + 1)]

    near = backend.submit(lambda: write(0)).result()
    move_pool(backend, SHIFT)
    np.testing.assert_array_equal(backend.submit(lambda: write(SHIFT + 2)).result(), near)
    move_pool(backend, -SHIFT)
    backend.close()
    driver.assert_clean()


@dataclass
class FarScratch:
    """Stands in for scratch memory: of every array the last bytes alone are there."""

    backend: CudaBackend

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return far_array(self.backend, np.full(4096, np.nan, np.float32).view(dtype), shape)


def far_array(backend: CudaBackend, tail: np.ndarray, shape: tuple[int, ...]) -> DeviceArray:
    """Return an array of which only `tail`, its last elements, is in memory."""
    held = backend.device._lasting.empty(tail.shape, tail.dtype)
    stream = backend.device.streams.compute
    backend.device.driver.call("cuMemcpyHtoDAsync", held.pointer, tail, tail.nbytes, stream)
    backend.device.driver.call("cuStreamSynchronize", stream)
    missing = math.prod(shape) * tail.itemsize - tail.nbytes
    return DeviceArray(held.pointer - missing, shape, tail.dtype, held)


def read_tail(backend: CudaBackend, array: DeviceArray, count: int) -> np.ndarray:
    """Return the last `count` elements."""
    tail = np.empty(count, array.dtype)
    backend.device.driver.call("cuMemcpyDtoH", tail, array.pointer + array.nbytes - tail.nbytes, tail.nbytes)
    return tail


@pytest.fixture
def far():
    """A backend whose scratch memory is far and whose driver runs the last CTA of each grid; jobs run at once."""
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    scratch, driver.config.last_ctas = backend.device.scratch, 1
    backend.device.scratch = FarScratch(backend)
    yield backend, driver
    backend.device.scratch = scratch
    backend.close()
    driver.assert_clean()


def draw(count: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(dtype)


def last_of(far: tuple[CudaBackend, VirtualDriver], count: int, operation: Any) -> np.ndarray:
    """Run an operation as a job and return the last elements of its result."""
    backend = far[0]

    def job() -> np.ndarray:
        result = operation(backend)
        backend.device.driver.call("cuStreamSynchronize", backend.device.streams.compute)
        return read_tail(backend, result, count)

    return backend.submit(job).result()


def test_kn01_add_beyond_32_bits(far):
    x, y = draw(512), draw(512, seed=1)
    got = last_of(far, 128, lambda b: b.add(far_array(b, x, (FAR,)), far_array(b, y, (FAR,))))
    np.testing.assert_array_equal(got, (x + y)[-128:])


def test_kn01_silu_mul_beyond_32_bits(far):
    gate, up = draw(512), draw(512, seed=1)
    got = last_of(far, 128, lambda b: b.silu_mul(far_array(b, gate, (FAR,)), far_array(b, up, (FAR,))))
    np.testing.assert_allclose(got, (gate / (1 + np.exp(-gate)) * up)[-128:], rtol=1e-5)


@pytest.mark.parametrize(("source", "code"), [(np.float32, 1), (np.float32, 2), (np.float16, 0), (np.float16, 2)])
def test_kn01_cast_beyond_32_bits(far, source, code):
    values = (np.arange(512) % 251).astype(source)  # exact in each type
    got = last_of(far, 128, lambda b: b.cast(far_array(b, values, (FAR,)), code))
    wide = got.astype(np.uint32) << 16
    exact = {0: got, 1: got.view(np.float16) if code == 1 else got, 2: wide.view(np.float32)}[code]
    np.testing.assert_array_equal(exact.astype(np.float32), values[-128:].astype(np.float32))


@pytest.mark.parametrize("part", [0, 1])
def test_kn01_split_beyond_32_bits(far, part):
    x, rows = draw(4096), FAR // 4
    got = last_of(far, 32, lambda b: b.split(far_array(b, x, (rows, 4)), (1, 3))[part])
    exact = x.reshape(-1, 4)[:, :1] if part == 0 else x.reshape(-1, 4)[:, 1:]
    np.testing.assert_array_equal(got, exact.reshape(-1)[-32:])


@pytest.mark.parametrize("width", [64, 65])
def test_kn01_rms_norm_beyond_32_bits(far, width):
    rows = 2**32 // width + 3
    x, residual, gain = draw(4 * width), draw(4 * width, seed=1), draw(width, seed=2)

    def operation(backend: CudaBackend) -> DeviceArray:
        arrays = [far_array(backend, array, (rows, width)) for array in (x, residual)]
        return backend.add_rms_norm(*arrays, backend.from_host(gain), 1e-5)

    row = (x + residual)[-width:].astype(np.float64)
    exact = row / np.sqrt((row**2).mean() + 1e-5) * gain
    np.testing.assert_allclose(last_of(far, width, operation), exact, atol=2e-6)


def test_kn01_rope_beyond_32_bits(far):
    tokens, position = 2**25 + 2, 7
    x = draw(256)

    def operation(backend: CudaBackend) -> DeviceArray:
        array = far_array(backend, x, (tokens, 2, 64))
        positions = far_array(backend, np.full(4, position, np.int32), (tokens,))
        inv_freq = backend.from_host(np.full(32, 0.25, np.float32))
        count, pointers = tokens * 2 * 32, (array.pointer, positions.pointer, inv_freq.pointer)
        backend.device.launch_items(plain_variant("rope"), count, *pointers, tokens, 2, 64, 32, 0, 1.0)
        return array

    low, high = x[-64:-32].astype(np.float64), x[-32:].astype(np.float64)
    turn = np.exp(0.25j * position) * (low + 1j * high)
    np.testing.assert_allclose(last_of(far, 64, operation), np.concatenate([turn.real, turn.imag]), atol=2e-6)


def test_kn01_embedding_from_and_to_beyond_32_bits(far):
    rows, table = 2**26 + 2, draw(256)

    def operation(backend: CudaBackend) -> DeviceArray:
        source = far_array(backend, table, (rows, 64))
        index = far_array(backend, np.array([0, rows - 2], np.int32), (rows,))
        target = backend.device.scratch.empty((rows, 64), np.float32)
        pointers = (source.pointer, index.pointer, target.pointer)
        backend.device.launch(plain_variant("embedding", SOURCE=0), (rows, 1, 1), *pointers, 64)
        return target

    np.testing.assert_array_equal(last_of(far, 64, operation), table[-128:-64])


def test_kn01_sample_beyond_32_bits(far):
    rows, vocabulary = 2**25 + 2, 300
    logits = draw(600)

    def operation(backend: CudaBackend) -> DeviceArray:
        array = far_array(backend, logits, (rows, vocabulary))
        temperatures = far_array(backend, np.zeros(2, np.float32), (rows,))
        seeds, tokens = (far_array(backend, np.zeros(2, dtype), (rows,)) for dtype in (np.uint64, np.int32))
        pointers = [a.pointer for a in (array, temperatures, seeds, tokens)]
        backend.device.launch(plain_variant("sample"), (rows, 1, 1), *pointers, vocabulary)
        return tokens

    assert last_of(far, 1, operation)[0] == logits[-300:].argmax()


@pytest.mark.parametrize("is_fused", [False, True], ids=["write_kv", "rope_write_kv"])
def test_kn01_rows_beyond_32_bits_are_written(is_fused):
    """The last of 2^26 tokens is stored, as its keys and values are found."""
    layout, tokens = make_layout(2, 1, 64, 16, 2, 1), 2**26 + 2
    backend, driver = make_virtual_backend(layout)
    rows = [draw(4 * heads * 64, seed=heads) for heads in (2, 1, 1)]

    def job() -> np.ndarray:
        backend.write_block(0, np.zeros(layout.block_bytes, np.uint8))
        shapes = ((tokens, heads, 64) for heads in (2, 1, 1))
        queries, keys, values = (far_array(backend, row, shape) for row, shape in zip(rows, shapes, strict=True))
        slots, inv_freq = (
            far_array(backend, np.array([-1, -1, 3, 9]), (tokens,)),
            backend.from_host(np.ones(32, np.float32)),
        )
        positions = far_array(backend, np.zeros(4, np.int32), (tokens,))
        driver.config.last_ctas = 1
        pool, strides = backend.pool.pointer, backend._pool_arguments
        if is_fused:
            arrays = (queries, keys, values, positions, slots, inv_freq)
            pointers, variant = [array.pointer for array in arrays], rope_write_variant(layout.shape)
            backend.device.launch(variant, (tokens, 1, 1), pool, *pointers, *strides, 2, 32, 0, 1.0)
        else:
            pointers = (pool, keys.pointer, values.pointer, slots.pointer)
            count = 2 * tokens * 16
            backend.device.launch_items(write_variant(layout.shape, 0), count, *pointers, tokens, *strides)
        return backend.read_block(0)

    stored = backend.submit(job).result().view(np.float32).reshape(2, 16, 64)
    np.testing.assert_array_equal(stored[1, 9], rows[2][-64:])
    if is_fused:  # whose CTA is a token, where the other's is a side
        np.testing.assert_array_equal(stored[0, 9], rows[1][-64:])
    driver.config.last_ctas = None
    backend.close()
    driver.assert_clean()


def test_more_copies_than_a_grid_holds_are_all_made():
    """The last of each launch is looked at; what the others would touch is not there."""
    layout = make_layout(2, 1, 64, 8, 3, 1)
    backend, driver = make_virtual_backend(layout)
    targets = list(range(3, 66_003))
    targets[65_534], targets[-1] = 1, 2

    def job() -> list[np.ndarray]:
        backend.write_block(0, np.arange(layout.block_bytes).astype(np.uint8))
        backend.layout, driver.config.last_ctas = KvLayout(layout.shape, 70_000, 8), 1
        backend.copy_blocks([(0, target) for target in targets])
        return [backend.read_block(block) for block in (1, 2)]

    for block in backend.submit(job).result():
        np.testing.assert_array_equal(block, np.arange(layout.block_bytes).astype(np.uint8))
    assert len([launch for launch in driver.launches if launch.kernel == "copy_blocks"]) == 2
    driver.config.last_ctas = None
    backend.close()
    driver.assert_clean()


def test_kn01_merge_states_beyond_32_bits(far):
    rows, part = 2**26 + 2, draw(4096)

    def operation(backend: CudaBackend) -> DeviceArray:
        lses = far_array(backend, np.zeros(256, np.float32), (1, rows, 8))
        return backend.merge_states(far_array(backend, part, (1, rows, 8, 64)), lses).output

    np.testing.assert_array_equal(last_of(far, 64, operation), part[-64:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_kn01_queries_and_outputs_beyond_32_bits(kernel):
    """The last of 2^30 queries attends, in the second of two partitions: output rows are numbered beyond 2^31."""
    tensor_cores, num_queries = KERNELS[kernel]
    layout = make_layout(4, 2, 64, 16, 8, 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout, min_partition=64, tensor_cores=tensor_cores)
    case = make_case(layout, [100], [num_queries], np.random.default_rng(0))
    fill(backend, case, 0)
    variant, total = choose_attention(layout.shape, num_queries * 2, tensor_cores), 2**30
    starts = np.array([total - num_queries, total], np.int32)
    batch = AttentionBatch(case.batch.block_tables, case.batch.context_lens, starts)

    def job() -> np.ndarray:
        queries = far_array(backend, case.queries.reshape(-1), (total, 4, 64))
        outputs = far_array(backend, np.zeros(num_queries * 256, np.float32), (2, total, 4, 64))
        lses = far_array(backend, np.zeros(num_queries * 4, np.float32), (2, total, 4))
        tiles = backend.from_host(np.zeros((1, 2), np.int32))
        launch = _Launch(variant, (1, 2, 2), total, tiles, backend.from_host(starts), None)
        driver.config.last_ctas = 2
        backend._launch_attend(launch, 0, queries, batch, AttentionParams(), (outputs, lses))
        backend.device.driver.call("cuStreamSynchronize", backend.device.streams.compute)
        return read_tail(backend, outputs, num_queries * 256)

    got = backend.submit(job).result().reshape(num_queries, 4, 64)[-1]
    keys, values = case.keys[0][64:], case.values[0][64:]
    exact = oracle_attention(case.queries[-1:], [keys], [values], [1]).output[0]
    assert np.abs(got - exact).max() < 2e-3
    driver.config.last_ctas = None
    backend.close()
    driver.assert_clean()
