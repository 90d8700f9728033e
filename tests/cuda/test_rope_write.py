"""Rotation and cache write in one launch, against float64 and against the operations it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.attention_cases import make_layout, poison
from helpers.cuda import SMALL, make_virtual_backend
from helpers.numpy_dense import NumpyBackend
from pagedkv.compute.backend import Rotation
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler, Target
from pagedkv.compute.cuda.kernels import all_variants
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument
from virtual_gpu.counters import LaunchStats
from virtual_gpu.profile import TWO_SMS, Profile

POSITIONS = np.array([0, 5, 777, 131_071, 16], np.int32)
SLOTS = np.array([9, 31, -1, 8, 0])


def make_rotation(num_pairs: int, *, interleaved: bool = True) -> Rotation:
    return Rotation((1e5 ** (-np.arange(num_pairs) / num_pairs)).astype(np.float32), interleaved, 1.25)


def draw_rows(num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int = 5) -> list[np.ndarray]:
    rng = np.random.default_rng(head_dim)
    shapes = [(num_tokens, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def rope_write(
    backend: CudaBackend, layer: int, rows: list[np.ndarray], slots: np.ndarray, rotation: Rotation
) -> list[np.ndarray]:
    """Run the operation; return queries, keys and values as it left them."""

    def job() -> list[np.ndarray]:
        tensors = [backend.from_host(array) for array in rows]
        backend.rope_write_kv(layer, *tensors, POSITIONS[: len(slots)], slots, rotation)
        return [backend.to_host(tensor) for tensor in tensors]

    return backend.submit(job).result()


def check(
    head_dim: int, dtype: DType, rotation: Rotation, *, heads: int = 6, kv_heads: int = 2, profile: Profile = SMALL
) -> None:
    """Rotated rows against float64; the stored bytes against those of `write_kv` of the rotated rows."""
    layout = make_layout(heads, kv_heads, head_dim, 8, 4, 2, dtype)
    backend, driver = make_virtual_backend(layout, profile=profile)
    rows = draw_rows(heads, kv_heads, head_dim)
    poison(backend)
    after = rope_write(backend, 1, rows, SLOTS, rotation)
    reference = NumpyBackend(make_layout(num_blocks=1), np.float64)
    for exact, actual in zip(rows[:2], after[:2], strict=True):
        wide = exact.astype(np.float64)
        reference.rope(wide, POSITIONS, rotation)
        np.testing.assert_allclose(actual, wide, atol=2e-6)
    np.testing.assert_array_equal(after[2], rows[2])

    def job() -> list[np.ndarray]:
        backend.write_kv(0, backend.from_host(after[1]), backend.from_host(after[2]), SLOTS)
        return [backend.read_block(block) for block in range(4)]

    layers = np.stack(backend.submit(job).result()).reshape(4, 2, -1)
    np.testing.assert_array_equal(layers[:, 1], layers[:, 0])
    assert (layers != 0xFF).any()
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_rope_write_any_head_dim_and_storage_equals_rope_then_write(head_dim, dtype):
    check(head_dim, dtype, make_rotation(head_dim // 2, interleaved=head_dim % 64 == 0))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_pairs", [1, 10, 16, 40])
def test_rope_write_of_part_of_the_head_dim_leaves_the_rest_alone(num_pairs, interleaved):
    check(80, DType.BFLOAT16, make_rotation(num_pairs, interleaved=interleaved))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (24, 8)])
def test_rope_write_any_number_of_heads_equals_rope_then_write(heads, kv_heads):
    check(64, DType.FLOAT16, make_rotation(32), heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 8), (9, 3)])
def test_rope_write_on_a_full_device_gives_a_warp_several_rows_and_equals_rope_then_write(heads, kv_heads, dtype):
    """A large device does so from 89 tokens on. A warp's next row, of another kind, takes the place of the last one."""
    check(64, dtype, make_rotation(32), heads=heads, kv_heads=kv_heads, profile=replace(TWO_SMS, num_sms=1))


def test_rope_write_without_tokens_launches_nothing():
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    after = rope_write(backend, 0, draw_rows(8, 2, 64, 0), np.zeros(0, np.int64), make_rotation(32))
    assert [array.shape for array in after] == [(0, 8, 64), (0, 2, 64), (0, 2, 64)]
    assert not driver.launches
    backend.close()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("layer", {"layer": 9}),
        ("queries", {"rows": draw_rows(7, 2, 64)}),
        ("values", {"rows": [*draw_rows(8, 2, 64)[:2], np.zeros((4, 2, 64), np.float32)]}),
        ("keys", {"rows": [a.astype(np.float16) if i == 1 else a for i, a in enumerate(draw_rows(8, 2, 64))]}),
        ("slot_mapping", {"slots": np.array([0, 1, 2, 3, 32])}),
        ("inv_freq", {"rotation": make_rotation(33)}),
    ],
)
def test_rope_write_refuses_bad_arguments_by_name_and_changes_nothing(field, change):
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    good = {"layer": 0, "rows": draw_rows(8, 2, 64), "slots": np.arange(5), "rotation": make_rotation(32)}
    with pytest.raises(InvalidArgument, match=field):
        rope_write(backend, **(good | change))
    assert not driver.launches
    backend.close()


def test_rope_write_is_one_launch_of_16_byte_stores_that_touches_each_sector_once():
    layout = make_layout(32, 8, 128, 16, 4, 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout)
    rows = draw_rows(32, 8, 128, 32)
    slots = np.random.default_rng(0).permutation(64)[:32]
    positions = np.arange(32, dtype=np.int32)

    def job() -> None:
        tensors = [backend.from_host(array) for array in rows]
        backend.rope_write_kv(0, *tensors, positions, slots, make_rotation(64))

    backend.submit(job).result()
    assert len(driver.launches) == 1
    stats: LaunchStats = driver.launches[0]
    pool = driver.memory.totals[driver.memory.find(backend.pool.pointer).index]
    least = 2 * 32 * 8 * 128 * 2 // 32
    assert least == pool[3] <= pool[2] <= 1.02 * least
    assert stats.write_ratio <= 1.02
    assert stats.global_store_bytes.keys() == {16}
    assert stats.global_load_bytes[16] == sum(array.nbytes for array in rows) // 16
    assert stats.bank_conflict_ratio <= 1.25  # reading 32 bytes a thread for a 16-bit store takes two turns
    backend.close()
    driver.assert_clean()


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, DType.FLOAT32), (128, DType.INT8), (256, DType.FLOAT8_E4M3)])
def test_fused_kernels_compile_without_spills_or_stack(arch, head_dim, dtype):
    compiler = Compiler()
    for variant in all_variants(KvShape(1, 8, 1, head_dim, dtype)):
        if variant.name in ("rope_write_kv", "rms_norm", "write_kv"):
            resources = compiler.compile(variant, Target(arch)).resources
            assert (resources.spilled_bytes, resources.stack_bytes) == (0, 0), variant.label
