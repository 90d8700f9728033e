"""The kernels' cache on disk: what is damaged there is compiled again, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from helpers.attention_cases import make_layout
from helpers.captured_twins import CountingDriver
from helpers.cuda import SMALL
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler, Target
from pagedkv.compute.cuda.kernels import plain_variant
from pagedkv.errors import DeviceError

DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "one-bit": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
    "garbage": lambda data: bytes(range(256)) * 8,
}
ADD, HERE = plain_variant("add"), Target(80, is_ptx=True)


def open_on(driver: CountingDriver, compiler: Compiler) -> CudaBackend:
    return CudaBackend(make_layout(num_blocks=1), driver_module=driver, compiler=compiler, emit_ptx=True)


def assert_adds(backend: CudaBackend) -> None:
    x = np.arange(100, dtype=np.float32)
    result = backend.submit(lambda: backend.to_host(backend.add(backend.from_host(x), backend.from_host(x)))).result()
    np.testing.assert_array_equal(result, 2 * x)


@pytest.mark.parametrize("ending", ["bin", "log"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_entry_is_compiled_again_once_and_works(tmp_path: Path, damage, ending):
    Compiler(cache_dir=tmp_path).compile(ADD, HERE)
    for path in tmp_path.glob(f"*.{ending}"):
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    for compiled in (1, 0):
        compiler, driver = Compiler(cache_dir=tmp_path), CountingDriver(SMALL)
        backend = open_on(driver, compiler)
        assert_adds(backend)
        assert compiler.num_compiled == compiled
        backend.close()
        driver.assert_clean()


@pytest.mark.parametrize("code", ["INVALID_IMAGE", "NO_BINARY_FOR_GPU", "NOT_FOUND", "UNSUPPORTED_PTX_VERSION"])
@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_binary_that_does_not_load_is_compiled_afresh_once(tmp_path: Path, call, code):
    Compiler(cache_dir=tmp_path).compile(ADD, HERE)
    compiler, driver = Compiler(cache_dir=tmp_path), CountingDriver(SMALL)
    driver.fail, driver.fail_code = {call: 1}, getattr(bindings.CUresult, f"CUDA_ERROR_{code}")
    backend = open_on(driver, compiler)
    assert_adds(backend)
    assert compiler.num_compiled == 1
    assert backend.health.failure is None
    backend.close()
    driver.assert_clean()


def test_a_binary_that_never_loads_ends_its_job_alone_after_one_more_compilation(tmp_path: Path):
    compiler, driver = Compiler(cache_dir=tmp_path), CountingDriver(SMALL)
    backend = open_on(driver, compiler)
    load = driver.cuModuleLoadData
    driver.cuModuleLoadData = lambda image: (bindings.CUresult.CUDA_ERROR_INVALID_IMAGE, None)
    with pytest.raises(DeviceError, match="INVALID_IMAGE"):
        assert_adds(backend)
    assert compiler.num_compiled == 2
    driver.cuModuleLoadData = load
    assert_adds(backend)
    backend.close()
