"""Starts on CUDA that cannot go well: each is refused by one error that says what to change, and takes nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from helpers.cuda import virtual_opener
from helpers.tiny_models import make_tiny_model
from pagedkv.cli import backends
from pagedkv.cli.assemble import build_service
from pagedkv.cli.options import DEFAULT_MEMORY, ServeOptions
from pagedkv.compute.cuda import compiler, kernels, select
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.compiler import Compiler
from pagedkv.compute.cuda.driver import require_driver
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError, InvalidArgument, UnsupportedModel
from virtual_gpu import VirtualDriver
from virtual_gpu.profile import Profile

SHAPE = KvShape(2, 8, 2, 64)
BLOCK = 2 * 2 * 2 * 16 * 64 * 4
MEMORY = 4 << 20


def make_options(**changes):
    given = {"model": None, "shape": SHAPE, "backend": "cuda", "port": 0, "metrics_port": None, **changes}
    return ServeOptions(**given)


def make_driver(**profile):
    return VirtualDriver(Profile(**{"memory_bytes": MEMORY, "host_bytes": 4 << 20, **profile}))


def assert_untouched(driver):
    """Nothing on the device is taken any more, and no call was wrong."""
    driver.assert_clean()
    assert (driver.num_retained, len(driver.memory.live), len(driver.scheduler.streams)) == (0, 0, 1)


def refused(driver, error, **options):
    with pytest.raises(error) as caught:
        build_service(make_options(**options), open_backend=virtual_opener(driver))
    assert_untouched(driver)
    return caught.value


def opened(driver, **options):
    """Open, note the lines said, close."""
    said = []
    service = build_service(make_options(**options), open_backend=virtual_opener(driver), say=said.append)
    service.backend.close()
    assert_untouched(driver)
    return service.layout, "\n".join(said)


def test_a_pool_of_a_share_is_one_of_what_kernels_leave_and_says_what_is_left():
    layout, said = opened(make_driver(), memory="0.5")
    assert layout.num_blocks == (MEMORY - 4096) // 2 // BLOCK  # modules keep a little
    assert "cuda, Virtual GPU (sm_80), sm_80 (as asked)" in said
    assert f"{layout.num_blocks} blocks of 16 tokens" in said
    assert "GiB of the device are left" in said


@pytest.mark.parametrize(("options", "blocks"), [({"blocks": 7}, 7), ({"memory": str(5 * BLOCK + 1)}, 5)])
def test_a_pool_has_the_blocks_asked_for_or_as_many_as_its_bytes_hold(options, blocks):
    assert opened(make_driver(), **options)[0].num_blocks == blocks


def test_a_pool_beyond_the_device_memory_says_asked_free_and_which_flag_to_lower():
    error = refused(make_driver(), DeviceError, blocks=1000)
    assert f"the page pool of {1000 * BLOCK} bytes does not fit: {MEMORY} of {MEMORY} bytes are free" in error.message
    assert "lower --memory or --blocks" in error.message
    assert error.details == {"asked": str(1000 * BLOCK), "free": str(MEMORY)}


def test_a_host_pool_beyond_the_pinned_memory_says_which_flag_to_lower():
    error = refused(make_driver(), DeviceError, blocks=4, swap_memory="64MiB")
    assert "the host pool of 67108864 bytes does not fit in pinned memory; lower --swap-memory" in error.message


def test_a_pool_of_a_share_leaves_room_for_weights_workspace_and_the_arrays_of_steps(tmp_path):
    driver = make_driver(memory_bytes=32 << 20)
    options = make_options(model=str(make_tiny_model(tmp_path)), shape=None, memory="0.999", max_batch_tokens=64)
    service = build_service(options, open_backend=virtual_opener(driver))
    left = driver.memory.device_size - driver.memory.used
    assert service.model is not None
    needed = backends.working_bytes(options, service.model.config)
    assert needed <= left < needed + 0.001 * driver.memory.device_size + service.layout.block_bytes
    service.backend.close()
    assert_untouched(driver)


def test_weights_beyond_the_device_memory_say_asked_free_and_which_flag_to_lower(tmp_path):
    path = make_tiny_model(tmp_path)
    error = refused(make_driver(memory_bytes=256 << 10), DeviceError, model=str(path), shape=None, memory="0.97")
    assert "does not fit" in error.message
    assert "lower --memory" in error.message
    assert int(error.details["asked"]) > int(error.details["free"])


def test_a_pool_of_bytes_beyond_what_weights_left_says_asked_free_and_which_flag_to_lower(tmp_path):
    path = make_tiny_model(tmp_path)
    error = refused(make_driver(memory_bytes=8 << 20), DeviceError, model=str(path), shape=None, memory="7MiB")
    assert "the page pool of" in error.message
    assert int(error.details["asked"]) > int(error.details["free"])


def test_a_share_that_holds_no_block_is_refused_by_its_field():
    error = refused(make_driver(), InvalidArgument, memory="0.001")
    assert error.field == "memory"
    assert "raise --memory" in error.message


def test_a_driver_too_old_is_refused_with_both_versions_before_anything_is_taken():
    error = refused(make_driver(driver_version=12_040), DeviceError)
    major = Compiler().version[0]
    assert "supports CUDA 12.4" in error.message
    assert error.details == {"driver_version": "12.4", "needed_version": f"{major}.0"}


@pytest.mark.parametrize(
    ("driver", "compiler_version", "is_ptx", "fits"),
    [
        (13_000, (13, 5), False, True),
        (12_090, (13, 0), False, False),
        (13_040, (13, 5), True, False),
        (13_050, (13, 5), True, True),
        (14_000, (13, 5), True, True),
    ],
)
def test_a_driver_takes_cubins_of_its_major_version_and_ptx_no_newer_than_itself(
    driver, compiler_version, is_ptx, fits
):
    if fits:
        require_driver(driver, compiler_version, is_ptx)
        return
    with pytest.raises(DeviceError, match="too old"):
        require_driver(driver, compiler_version, is_ptx)


def test_ptx_is_refused_by_a_driver_older_than_the_compiler_that_takes_its_cubins():
    driver = make_driver(driver_version=Compiler().version[0] * 1000)
    error = refused(driver, DeviceError, blocks=2)
    assert "PTX of NVRTC" in error.message


def test_a_device_too_old_is_refused_by_its_capability():
    assert "7.5 is too old" in refused(make_driver(capability=(7, 5)), DeviceError).message


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_no_driver_is_refused_when_cuda_is_asked_for_and_auto_takes_the_cpu_and_says_why():
    with pytest.raises(DeviceError, match="no NVIDIA driver here"):
        build_service(make_options())
    said = []
    service = build_service(make_options(backend="auto", blocks=2), say=said.append)
    service.backend.close()
    assert service.backend.name == "cpu"
    assert said[0].endswith("threads (no NVIDIA driver here)")
    assert "\n" not in said[0]


def test_auto_takes_the_gpu_where_cuda_can_run_and_does_not_hide_a_pool_that_does_not_fit(monkeypatch):
    driver, said = make_driver(), []
    monkeypatch.setattr(backends, "open_cuda", virtual_opener(driver))
    service = build_service(make_options(backend="auto", blocks=2), say=said.append)
    service.backend.close()
    assert service.backend.name == "cuda"
    assert "cuda, Virtual GPU (sm_80), sm_80 (it is there)" in said[0]
    with pytest.raises(DeviceError, match="lower --memory or --blocks"):
        build_service(make_options(backend="auto", blocks=1000))
    assert_untouched(driver)


NO_NVRTC = "NVRTC is not there: install pagedkv"


def without_nvrtc(monkeypatch):
    def missing(*arguments, **options):
        raise ImportError("no such library")

    monkeypatch.setattr(select, "Compiler", missing)


@pytest.mark.parametrize(
    ("profile", "prepare", "reason"),
    [
        ({"capability": (7, 5)}, None, "7.5 is too old"),
        ({"driver_version": 12_040}, None, "the driver is too old"),
        ({}, without_nvrtc, NO_NVRTC),
        ({"memory_bytes": 1 << 20}, None, "does not fit"),
    ],
)
def test_auto_takes_the_cpu_when_the_gpu_that_is_there_cannot_be_used_and_says_why_in_one_line(
    monkeypatch, profile, prepare, reason
):
    """Too old a device, too old a driver, no compiler, and no memory left for a pool that nobody sized."""
    driver, said = make_driver(**profile), []
    monkeypatch.setattr(backends, "open_cuda", virtual_opener(driver))
    if prepare:
        prepare(monkeypatch)
    service = build_service(make_options(backend="auto", memory=DEFAULT_MEMORY), say=said.append)
    service.backend.close()
    assert service.backend.name == "cpu"
    (line,) = [line for line in said if "backend" in line]
    assert reason in line
    assert "\n" not in line
    assert_untouched(driver)


def test_auto_takes_the_cpu_when_the_weights_do_not_fit_beside_a_pool_that_nobody_sized(monkeypatch, tmp_path):
    driver, said = make_driver(), []
    size = backends.size_pool
    monkeypatch.setattr(backends, "open_cuda", virtual_opener(driver))
    monkeypatch.setattr(
        backends, "size_pool", lambda options, shape, free: size(replace(options, memory="0.97"), shape, free)
    )
    options = make_options(model=str(make_tiny_model(tmp_path)), shape=None, backend="auto")
    service = build_service(options, say=said.append)
    service.backend.close()
    assert service.backend.name == "cpu"
    assert any("does not fit" in line for line in said)
    assert_untouched(driver)


@pytest.mark.parametrize("length", [2049, 1_000_000])
def test_a_length_beyond_the_models_context_is_refused_before_a_backend_is_opened(tmp_path, length):
    opened = []
    options = make_options(model=str(make_tiny_model(tmp_path)), shape=None, backend="cpu", max_model_len=length)
    with pytest.raises(InvalidArgument, match=f"is beyond the model's context of 2048, got {length}") as caught:
        build_service(options, open_backend=lambda *given: opened.append(given))
    assert caught.value.field == "max_model_len"
    assert caught.value.details["limit"] == "2048"
    assert opened == []


def test_a_model_without_cublas_is_refused_though_a_bare_cache_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(select, "load_cublas", lambda: None)
    driver = make_driver()
    opener = virtual_opener(driver, cublas=None)
    options = make_options(model=str(make_tiny_model(tmp_path)), shape=None, blocks=4)
    with pytest.raises(DeviceError, match=r"cuBLAS.*install pagedkv"):
        build_service(options, open_backend=opener)
    assert_untouched(driver)
    build_service(make_options(blocks=4), open_backend=opener).backend.close()
    assert_untouched(driver)


def test_a_storage_type_without_kernels_is_refused_by_name_before_any_memory_is_taken(monkeypatch):
    monkeypatch.delitem(kernels.STORAGE_CODES, DType.FLOAT16)
    driver = make_driver()
    taken = []
    monkeypatch.setattr(driver, "cuMemAlloc", lambda size: taken.append(size))
    error = refused(driver, UnsupportedModel, shape=KvShape(2, 8, 2, 64, DType.FLOAT16))
    assert "float16 storage" in error.message
    assert error.details["field"] == "dtype"
    assert taken == []


@pytest.mark.parametrize("head_dim", [48, 63, 100, 512])
def test_a_head_dim_without_kernels_is_refused_by_name_before_a_backend_is_opened(head_dim):
    with pytest.raises(InvalidArgument) as caught:
        KvShape(2, 8, 2, head_dim)
    assert caught.value.field == "head_dim"


def test_a_kernel_that_does_not_compile_ends_the_start_with_source_options_and_log(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "_default_cache", lambda: tmp_path)
    good = compiler._read
    monkeypatch.setattr(compiler, "_read", lambda file: good(file) + ("\nnonsense;" if file == "write_kv.cu" else ""))
    compiler._digest.cache_clear()
    try:
        error = refused(make_driver(), DeviceError, blocks=4)
    finally:
        compiler._digest.cache_clear()
    assert "write_kv.cu does not compile with --gpu-architecture=compute_80" in error.message
    assert "nonsense" in error.message
    assert error.details["source"] == "write_kv.cu"


def test_a_backend_closed_twice_is_closed_once():
    driver = make_driver()
    service = build_service(make_options(blocks=4), open_backend=virtual_opener(driver))
    assert isinstance(service.backend, CudaBackend)
    service.backend.close()
    service.backend.close()
    assert_untouched(driver)
