"""What ends one job and what ends the device; memory that runs out, and comes back."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from helpers.attention_cases import make_layout
from helpers.captured_twins import CountingDriver
from helpers.cuda import make_virtual_backend
from helpers.device_memory import no_memory
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.cuda.driver import Driver, unwrap
from pagedkv.compute.cuda.kernels import plain_variant
from pagedkv.errors import DeviceError, DeviceLost
from virtual_gpu.cublas import VirtualCublas
from virtual_gpu.profile import Profile

MEGABYTE = 1 << 20
FINAL = [
    *("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ASSERT", "MISALIGNED_ADDRESS", "INVALID_PC"),
    *("INVALID_ADDRESS_SPACE", "ILLEGAL_INSTRUCTION", "HARDWARE_STACK_ERROR", "ECC_UNCORRECTABLE", "CONTAINED"),
    *("NVLINK_UNCORRECTABLE", "CONTEXT_IS_DESTROYED", "INVALID_CONTEXT", "DEINITIALIZED", "TENSOR_MEMORY_LEAK"),
    *("MPS_CLIENT_TERMINATED", "EXTERNAL_DEVICE", "UNKNOWN"),
]
PASSING = ["OUT_OF_MEMORY", "INVALID_VALUE", "LAUNCH_OUT_OF_RESOURCES", "NOT_SUPPORTED", "STREAM_CAPTURE_INVALIDATED"]


@pytest.fixture
def opened():
    """A small backend whose device has 4 MiB and as much pinned memory."""
    profile = Profile(memory_bytes=4 * MEGABYTE + 4096, host_bytes=4 * MEGABYTE)
    backend, driver = make_virtual_backend(make_layout(num_blocks=1, num_layers=1), profile=profile)
    yield backend, driver
    backend.close()
    driver.assert_clean()
    assert not driver.memory.live


def copy_of(backend: CudaBackend, array: np.ndarray) -> np.ndarray:
    """Send an array to the device and back in a job."""
    return backend.submit(lambda: backend.to_host(backend.from_host(array))).result()


def assert_works(backend: CudaBackend) -> None:
    array = np.arange(1000, dtype=np.float32)
    np.testing.assert_array_equal(copy_of(backend, array), array)
    assert backend.health.failure is None


@pytest.mark.parametrize("name", FINAL)
def test_cu03_a_status_that_spoils_the_context_is_a_lost_device(name):
    with pytest.raises(DeviceLost, match=name):
        unwrap((getattr(bindings.CUresult, f"CUDA_ERROR_{name}"),), "cuEventSynchronize")


@pytest.mark.parametrize("name", PASSING)
def test_cu03_a_status_of_one_call_is_no_lost_device(name):
    with pytest.raises(DeviceError, match=name) as caught:
        unwrap((getattr(bindings.CUresult, f"CUDA_ERROR_{name}"),), "cuLaunchKernel")
    assert not isinstance(caught.value, DeviceLost)


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned"])
def test_cu03_a_job_without_memory_fails_alone_and_the_next_one_works(opened, pinned):
    backend, driver = opened
    with no_memory(driver, pinned=pinned):
        with pytest.raises(DeviceError, match="does not fit") as caught:
            copy_of(backend, np.zeros(1000, np.float32))
        assert not isinstance(caught.value, DeviceLost)
        assert int(caught.value.details["asked"]) >= 4000
    assert_works(backend)


def test_cu03_work_enqueued_before_the_memory_ended_is_done_and_its_staging_comes_back(opened):
    backend, _ = opened

    def job() -> None:
        backend.from_host(np.zeros(1000, np.float32))
        backend.device.scratch.empty((1 << 30,), np.float32)

    for _ in range(3):
        with pytest.raises(DeviceError, match="scratch memory of"):
            backend.submit(job).result()
    assert backend.device.pinned.allocated_bytes == 4096
    assert_works(backend)


def test_cu03_a_launch_that_the_driver_refuses_ends_its_job_alone(opened):
    backend, _ = opened

    def job() -> None:
        out = backend.device.scratch.empty((5,), np.int64)
        backend.device.launch(plain_variant("echo"), (1, 1 << 20, 1), out.pointer, 1, 2, 3.0, 4)

    with pytest.raises(DeviceError, match="INVALID_VALUE"):
        backend.submit(job).result()
    assert_works(backend)


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventCreate"])
def test_cu03_any_call_that_fails_in_passing_ends_at_most_its_job_and_keeps_no_staging(call):
    driver = CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE))
    backend, _ = open_on(driver)
    driver.fail_code = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    driver.fail[call] = driver.calls[call] + 1
    array = np.arange(1000, dtype=np.float32)
    with suppress(DeviceError):
        copy_of(backend, array)
    for _ in range(3):
        assert_works(backend)
    assert backend.device.pinned.allocated_bytes == 2 * 4096
    backend.close()
    driver.assert_clean()


def open_on(driver: CountingDriver) -> tuple[CudaBackend, CountingDriver]:
    cublas = VirtualCublas(driver)
    layout = make_layout(num_blocks=1, num_layers=1)
    return CudaBackend(layout, driver_module=driver, cublas=cublas, emit_ptx=True), driver


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventSynchronize", "cuLaunchKernel"])
def test_cu03_a_final_status_of_any_call_is_the_answer_to_every_later_job(call):
    backend, driver = open_on(CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE)))
    driver.fail_code = bindings.CUresult.CUDA_ERROR_LAUNCH_FAILED
    driver.fail[call] = driver.calls[call] + 1

    def job() -> None:
        out = backend.device.scratch.empty((5,), np.int64)
        backend.device.launch(plain_variant("echo"), (1, 1, 1), out.pointer, 1, 2, 3.0, 4)

    with pytest.raises(DeviceLost, match=call):
        backend.submit(job).result()
    assert isinstance(backend.health.failure, DeviceLost)
    with pytest.raises(DeviceLost, match=call):
        backend.submit(lambda: 1).result()
    backend.close()


def test_cu03_a_product_that_fails_ends_its_job_alone():
    backend, driver = make_virtual_backend(make_layout(num_blocks=1))
    weight = backend.submit(lambda: backend.from_host(np.ones((8, 8), np.float32))).result()
    backend._cublas.gemm_ex = None  # any error of the bindings

    def job() -> None:
        backend.linear(backend.from_host(np.ones((1, 8), np.float32)), weight)

    with pytest.raises(DeviceError, match="cuBLAS gemm_ex"):
        backend.submit(job).result()
    assert_works(backend)
    backend.close()
    driver.assert_clean()


def test_cu04_memory_of_one_size_class_serves_another(opened):
    backend, driver = opened
    sizes = [int(size * MEGABYTE) for size in (0.6, 0.7, 0.8, 0.95, 1.1, 1.25, 1.4)]
    for size in [*sizes, *reversed(sizes)]:
        array = np.full(size, size % 251, np.uint8)
        np.testing.assert_array_equal(copy_of(backend, array), array)
        del array
        gc.collect(0)
    assert backend.device.allocated_bytes <= driver.memory.device_size


def test_cu04_memory_that_a_job_still_reads_is_not_taken_from_it(opened):
    """Arrays dropped on the host whose kernels have not run yet, in the midst of a job that needs their memory."""
    backend, _ = opened

    def job() -> list[np.ndarray]:
        results = []
        for number in range(8):
            size = (90_000 + 30_000 * number,)
            results.append(
                backend.to_host(backend.add(*(backend.from_host(np.full(size, np.float32(number))) for _ in "ab")))
            )
        return results

    backend.device.pinned._limit = 0  # staging is not what this is about
    for number, array in enumerate(backend.submit(lambda: job()).result()):
        assert (array == 2 * number).all()
    assert backend.health.failure is None


def test_cu04_staging_memory_is_bounded_and_copies_beyond_it_are_right(opened):
    backend, _ = opened
    backend.device.pinned._limit = MEGABYTE
    arrays = [np.random.default_rng(n).integers(0, 255, 600_000 + 70_000 * n, np.uint8) for n in range(4)]
    for _ in range(2):
        for array in arrays:
            np.testing.assert_array_equal(copy_of(backend, array), array)
            assert backend.device.pinned.allocated_bytes <= MEGABYTE


def test_a_source_beyond_the_staging_limit_may_be_changed_at_once(monkeypatch):
    monkeypatch.setattr("pagedkv.compute.cuda.device.STAGING_LIMIT", 1000)
    for schedule in ("lazy", *range(4)):
        backend, driver = make_virtual_backend(make_layout(num_blocks=1), schedule=schedule)
        array = np.arange(4000, dtype=np.float32)

        def job(backend=backend, array=array) -> np.ndarray:
            tensor = backend.from_host(array)
            array[:] = -1
            return backend.to_host(tensor)

        np.testing.assert_array_equal(backend.submit(job).result(), np.arange(4000, dtype=np.float32))
        assert driver.scheduler.num_run  # the copy was waited for
        backend.close()
        driver.assert_clean()


def test_who_waits_for_the_device_sleeps():
    flags: list[int] = []
    backend, driver = make_virtual_backend(make_layout(num_blocks=1))
    create = driver.cuEventCreate
    driver.cuEventCreate = lambda flag: flags.append(flag) or create(flag)
    backend.submit(lambda: backend.stopwatch(lambda seconds: None)()).result()
    backend.close()
    assert flags
    assert all(flag & bindings.CUevent_flags.CU_EVENT_BLOCKING_SYNC for flag in flags)


def calls_of_construction() -> list[tuple[str, int]]:
    driver = CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE))
    backend = open_with_host_pool(driver)
    calls = driver.calls.copy()
    backend.close()
    return [(name, count) for name, most in calls.items() for count in range(1, most + 1)]


def open_with_host_pool(driver: CountingDriver) -> CudaBackend:
    layout = make_layout(num_blocks=1, num_layers=1)
    return CudaBackend(layout, driver_module=driver, emit_ptx=True, num_host_blocks=2)


def threads_of_device() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("pagedkv-cuda") and thread.is_alive()
    ]


@pytest.mark.parametrize(("call", "number"), calls_of_construction())
def test_a_construction_that_fails_at_any_call_leaves_nothing_taken(call, number):
    driver = CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE))
    driver.fail_code = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    driver.fail[call] = number
    before = threads_of_device()
    with suppress(DeviceError):
        open_with_host_pool(driver).close()
    driver.assert_clean()
    assert (driver.num_retained, len(driver.memory.live), len(driver.scheduler.streams)) == (0, 0, 1)
    assert threads_of_device() == before


def test_the_callers_context_is_current_again_after_construction_and_close():
    driver = CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE))
    Driver(driver).call("cuInit", 0)
    for mine in (0, 0xABC0):
        driver.cuCtxSetCurrent(bindings.CUcontext(mine))
        backend = open_with_host_pool(driver)
        assert int(driver.cuCtxGetCurrent()[1]) == mine
        backend.submit(lambda: None).result()
        backend.close()
        assert int(driver.cuCtxGetCurrent()[1]) == mine


def test_the_callers_context_is_current_again_after_a_construction_that_failed():
    driver = CountingDriver(Profile(memory_bytes=MEGABYTE, host_bytes=MEGABYTE))
    driver.cuCtxSetCurrent(bindings.CUcontext(0xABC0))
    with pytest.raises(DeviceError, match="the page pool"):
        CudaBackend(make_layout(num_blocks=10_000), driver_module=driver, emit_ptx=True)
    assert int(driver.cuCtxGetCurrent()[1]) == 0xABC0
