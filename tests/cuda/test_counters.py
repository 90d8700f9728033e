"""Performance facts that need no clock, from the virtual GPU's counters."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.attention_cases import attend, fill, make_case, make_layout
from helpers.cuda import make_virtual_backend
from pagedkv.dtypes import DType
from virtual_gpu.profile import Profile

DECODE = make_layout(32, 8, 128, 16, 4 * 32, 1, DType.FLOAT16)
PROFILE = Profile(memory_bytes=128 << 20, host_bytes=128 << 20)


def read_of_pool(driver, backend) -> np.ndarray:
    """Sectors of the pool: read, read least, written, written least."""
    return driver.memory.totals[driver.memory.find(backend.pool.pointer).index].copy()


@pytest.mark.parametrize(("kernel", "tensor_cores"), [("attend", False), ("attend_decode", None)])
def test_decode_reads_each_kv_sector_once_by_16_byte_copies_without_bank_conflicts(kernel, tensor_cores):
    backend, driver = make_virtual_backend(DECODE, profile=PROFILE, tensor_cores=tensor_cores)
    case = make_case(DECODE, [512] * 4, [1] * 4, np.random.default_rng(0))
    fill(backend, case, 0)
    before = read_of_pool(driver, backend)
    attend(backend, case, 0)
    read = (read_of_pool(driver, backend) - before)[0]
    least = 4 * 512 * 8 * 128 * 2 * 2 // 32
    assert read <= 1.02 * least
    stats = next(launch for launch in reversed(driver.launches) if launch.kernel == kernel)
    assert (stats.instructions["mma"] > 0) == (kernel == "attend_decode")
    assert stats.bank_conflict_ratio <= 1.1
    assert stats.global_load_bytes[16] >= 4 * 512 * 8 * 128 * 2 * 2 // 16
    backend.close()


def test_tensor_core_path_uses_mma_without_bank_conflicts():
    layout = make_layout(32, 8, 128, 16, 32, 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout, profile=PROFILE)
    case = make_case(layout, [128], [16], np.random.default_rng(0))
    fill(backend, case, 0)
    attend(backend, case, 0)
    stats = next(launch for launch in reversed(driver.launches) if launch.kernel == "attend_mma")
    assert stats.instructions["mma"] > 0
    assert stats.bank_conflict_ratio <= 1.1
    backend.close()


def test_write_kv_and_copy_blocks_move_each_sector_of_the_pool_once():
    layout = make_layout(32, 8, 128, 16, 4, 1, DType.FLOAT16)
    backend, driver = make_virtual_backend(layout)
    case = make_case(layout, [32], [1], np.random.default_rng(0))
    fill(backend, case, 0)
    sectors = 2 * layout.block_bytes // 32
    np.testing.assert_array_equal(read_of_pool(driver, backend), [0, 0, sectors, sectors])
    assert driver.launches[0].global_load_bytes[16] * 16 == 2 * layout.block_bytes  # sources; the rest are slots
    backend.submit(lambda: backend.copy_blocks([(0, 2), (1, 3)])).result()
    np.testing.assert_array_equal(read_of_pool(driver, backend), [sectors, sectors, 2 * sectors, 2 * sectors])
    backend.close()
