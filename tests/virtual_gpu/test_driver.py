"""The driver's own rules: limits, handles, streams, events, graphs, and the faults that asynchrony brings."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest

from virtual_gpu import SM_90, Profile, VirtualDriver
from virtual_gpu.cublas import CublasError, VirtualCublas
from virtual_gpu.harness import Gpu, compile_cuda, ok

ADD_ONE = """extern "C" __global__ void k(float* x) { x[threadIdx.x] = x[threadIdx.x] + 1.0f; }"""
STATIC = """extern "C" __global__ void k(float* x) {
    __shared__ float a[1024]; extern __shared__ float b[];
    a[threadIdx.x] = 1; b[threadIdx.x] = 2; __syncthreads(); x[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x]; }"""
SCHEDULES = ["lazy", 0, 1, 2, 3, 4]


def pinned(gpu: Gpu, count: int) -> np.ndarray:
    """Pinned host memory as a float32 array."""
    address = ok(gpu.driver.cuMemHostAlloc(4 * count, 0))
    return np.frombuffer((ctypes.c_char * (4 * count)).from_address(address), np.float32)


def make_stream(gpu: Gpu):
    return ok(gpu.driver.cuStreamCreate(int(gpu.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def make_event(gpu: Gpu):
    return ok(gpu.driver.cuEventCreate(int(gpu.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)))


def test_calls_return_the_bindings_own_result_codes():
    driver = VirtualDriver()
    assert driver.cuDeviceGetCount() == (driver.CUresult.CUDA_ERROR_NOT_INITIALIZED, None)
    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    assert driver.cuDeviceGetCount() == (driver.CUresult.CUDA_SUCCESS, 1)
    _, name = driver.cuGetErrorName(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    assert name == b"CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(AttributeError, match="cuTexRefCreate"):
        _ = driver.cuTexRefCreate


def test_the_profile_is_what_the_device_reports():
    driver = Gpu(profile=SM_90).driver
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == 9
    free, total = ok(driver.cuMemGetInfo())
    assert free == total == SM_90.memory_bytes


def test_memory_is_accounted_and_runs_out():
    driver = Gpu(profile=Profile(memory_bytes=1 << 20)).driver
    first = ok(driver.cuMemAlloc(700_000))
    code, pointer = driver.cuMemAlloc(700_000)
    assert (code, pointer) == (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    assert b"700000 bytes asked" in ok(driver.cuGetErrorString(code))
    ok(driver.cuMemFree(first))
    for _ in range(5):
        ok(driver.cuMemFree(ok(driver.cuMemAlloc(700_000))))
    assert ok(driver.cuMemGetInfo())[0] == 1 << 20
    assert driver.cuMemFree(first)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE


def test_a_launch_with_too_much_shared_memory_fails_until_it_is_opted_in():
    gpu = Gpu()
    driver, function = gpu.driver, gpu.function(compile_cuda(STATIC))
    x = gpu.put(np.zeros(32, np.float32))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert gpu.launch(function, 1, 32, x, shared=45 << 10) == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert b"dynamic shared memory" in ok(driver.cuGetErrorString(driver.CUresult.CUDA_ERROR_INVALID_VALUE))
    ok(driver.cuFuncSetAttribute(function, attribute, 100 << 10))
    gpu.run(function, 1, 32, x, shared=100 << 10)
    assert driver.cuFuncSetAttribute(function, attribute, 163 << 10)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert (
        ok(driver.cuFuncGetAttribute(driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)) == 4096
    )


@pytest.mark.parametrize(("grid", "block"), [(0, 32), (1, 0), (1, 1025)])
def test_a_launch_of_an_impossible_size_is_refused(grid, block):
    gpu = Gpu()
    function = gpu.function(compile_cuda(ADD_ONE))
    code = gpu.launch(function, grid, block, gpu.put(np.zeros(4, np.float32)))
    assert code == gpu.driver.CUresult.CUDA_ERROR_INVALID_VALUE


def test_arguments_may_be_given_as_pointers_to_values():
    gpu = Gpu()
    source = """extern "C" __global__ void k(float* x, int n, float v) { if (threadIdx.x < n) x[threadIdx.x] = v; }"""
    x = gpu.put(np.zeros(32, np.float32))
    values = [np.array([x], np.uint64), np.array([5], np.int32), np.array([2.5], np.float32)]
    table = np.array([v.ctypes.data for v in values], np.uint64)
    function = gpu.function(compile_cuda(source))
    ok(gpu.driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, table.ctypes.data, 0))
    values[2][0] = 9.0  # arguments are taken at the call
    assert gpu.get(x, 32, np.float32).tolist() == [2.5] * 5 + [0.0] * 27


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("forgets", [False, True])
def test_a_forgotten_event_between_copy_and_compute_stream_shows(schedule, forgets):
    gpu = Gpu(schedule=schedule)
    driver = gpu.driver
    copy, compute, event = make_stream(gpu), make_stream(gpu), make_event(gpu)
    host, function = pinned(gpu, 32), gpu.function(compile_cuda(ADD_ONE))
    host[:] = 4
    x = gpu.put(np.zeros(32, np.float32))
    ok(driver.cuMemcpyHtoDAsync(x, host, 128, copy))
    ok(driver.cuEventRecord(event, copy))
    if not forgets:
        ok(driver.cuStreamWaitEvent(compute, event, 0))
    ok_code = gpu.launch(function, 1, 32, x, stream=compute)
    assert int(ok_code) == 0
    ok(driver.cuStreamSynchronize(compute))
    seen = driver.view(x, 128).view(np.float32).tolist()
    if not forgets:
        assert seen == [5.0] * 32
    elif schedule == "lazy":
        assert seen == [1.0] * 32  # the copy has not run: nothing asked for it


@pytest.mark.parametrize("waits", [False, True])
def test_a_pinned_buffer_reused_before_its_copy_ended_shows_as_wrong_data(waits):
    gpu = Gpu()
    driver, stream, event = gpu.driver, make_stream(gpu), make_event(gpu)
    host, x = pinned(gpu, 8), gpu.empty(64)
    host[:] = 1
    ok(driver.cuMemcpyHtoDAsync(x, host, 32, stream))
    ok(driver.cuEventRecord(event, stream))
    if waits:
        ok(driver.cuEventSynchronize(event))
    host[:] = 2
    ok(driver.cuMemcpyHtoDAsync(x + 32, host, 32, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert gpu.get(x, 16, np.float32).tolist() == ([1.0] if waits else [2.0]) * 8 + [2.0] * 8


def test_pageable_memory_is_read_at_the_call():
    gpu = Gpu()
    stream, host, x = make_stream(gpu), np.ones(8, np.float32), gpu.empty(32)
    ok(gpu.driver.cuMemcpyHtoDAsync(x, host, 32, stream))
    host[:] = 2
    ok(gpu.driver.cuStreamSynchronize(stream))
    assert gpu.get(x, 8, np.float32).tolist() == [1.0] * 8


def test_pageable_memory_may_be_read_as_late_as_the_copy_runs():
    gpu = Gpu()
    gpu.driver.config.pageable_late = True
    stream, host, x = make_stream(gpu), np.ones(8, np.float32), gpu.empty(32)
    ok(gpu.driver.cuMemcpyHtoDAsync(x, host, 32, stream))
    host[:] = 2
    ok(gpu.driver.cuStreamSynchronize(stream))
    assert gpu.get(x, 8, np.float32).tolist() == [2.0] * 8


def test_memory_freed_while_pending_work_uses_it_is_a_fault():
    gpu = Gpu()
    driver, stream = gpu.driver, make_stream(gpu)
    function, x = gpu.function(compile_cuda(ADD_ONE)), gpu.put(np.zeros(32, np.float32))
    gpu.launch(function, 1, 32, x, stream=stream)
    assert int(driver.cuMemFree(x)[0]) != 0
    assert driver.faults[0].kind == "freed too early"


def test_a_kernel_that_uses_freed_memory_is_a_fault():
    gpu = Gpu()
    function, x = gpu.function(compile_cuda(ADD_ONE)), gpu.put(np.zeros(32, np.float32))
    ok(gpu.driver.cuMemFree(x))
    fault = gpu.fault(function, 1, 32, x)
    assert fault.kind == "use after free"
    assert "was freed" in fault.message


def test_the_null_stream_orders_blocking_streams_only():
    gpu = Gpu()
    driver = gpu.driver
    blocking, free = ok(driver.cuStreamCreate(0)), make_stream(gpu)
    x = gpu.empty(8)
    for stream, offset in ((blocking, 0), (free, 4)):
        ok(driver.cuMemsetD32Async(x + offset, 7, 1, stream))
    ok(driver.cuMemsetD8(gpu.empty(4), 1, 4))
    ok(driver.cuStreamSynchronize(0))
    assert driver.is_initialised_range(x, 4)
    assert not driver.is_initialised_range(x + 4, 4)


def test_queries_make_progress_and_end_in_success():
    gpu = Gpu()
    driver, stream, event = gpu.driver, make_stream(gpu), make_event(gpu)
    x = gpu.empty(64)
    for i in range(3):
        ok(driver.cuMemsetD32Async(x + 4 * i, i, 1, stream))
    ok(driver.cuEventRecord(event, stream))
    codes = [driver.cuEventQuery(event)[0] for _ in range(5)]
    pending = driver.CUresult.CUDA_ERROR_NOT_READY
    assert codes == [pending, pending, pending, driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_SUCCESS]


def test_random_schedules_differ_where_streams_are_independent():
    orders = set()
    for seed in range(12):
        gpu = Gpu(schedule=seed)
        driver = gpu.driver
        streams = [make_stream(gpu) for _ in range(3)]
        order: list[int] = []
        for i in range(6):
            stream = driver.stream(streams[i % 3])
            driver.scheduler.enqueue(stream, "mark", lambda i=i, order=order: order.append(i))
        ok(driver.cuCtxSynchronize())
        assert sorted(order) == list(range(6))
        assert all(order.index(i) < order.index(i + 3) for i in range(3))
        orders.add(tuple(order))
    assert len(orders) > 3


def capture_two(gpu: Gpu, x: int, stream):
    driver, function = gpu.driver, gpu.function(compile_cuda(ADD_ONE))
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    gpu.launch(function, 1, 32, x, stream=stream)
    gpu.launch(function, 1, 32, x, stream=stream)
    graph = ok(driver.cuStreamEndCapture(stream))
    return ok(driver.cuGraphInstantiate(graph, 0))


def test_a_captured_graph_runs_nothing_until_it_is_launched_and_then_each_time():
    gpu = Gpu()
    driver, stream, x = gpu.driver, make_stream(gpu), gpu.put(np.zeros(32, np.float32))
    executable = capture_two(gpu, x, stream)
    assert gpu.get(x, 32, np.float32)[0] == 0
    for _ in range(3):
        ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert gpu.get(x, 32, np.float32).tolist() == [6.0] * 32
    ok(driver.cuGraphExecDestroy(executable))
    assert int(driver.cuGraphLaunch(executable, stream)[0]) != 0


def test_a_capture_follows_events_into_other_streams_and_must_be_joined():
    gpu = Gpu()
    driver, main, side = gpu.driver, make_stream(gpu), make_stream(gpu)
    fork, join = make_event(gpu), make_event(gpu)
    x = gpu.put(np.zeros(32, np.float32))
    function = gpu.function(compile_cuda(ADD_ONE))
    for is_joined in (True, False):
        ok(driver.cuStreamBeginCapture(main, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        ok(driver.cuEventRecord(fork, main))
        ok(driver.cuStreamWaitEvent(side, fork, 0))
        gpu.launch(function, 1, 32, x, stream=side)
        if is_joined:
            ok(driver.cuEventRecord(join, side))
            ok(driver.cuStreamWaitEvent(main, join, 0))
        code, _ = driver.cuStreamEndCapture(main)
        expected = "CUDA_SUCCESS" if is_joined else "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
        assert code.name == expected


def test_synchronising_or_allocating_during_a_capture_is_refused():
    gpu = Gpu()
    driver, stream = gpu.driver, make_stream(gpu)
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    refused = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert driver.cuStreamSynchronize(stream)[0] == refused
    assert driver.cuMemAlloc(64)[0] == refused
    assert driver.cuModuleLoadData(compile_cuda(ADD_ONE))[0] == refused


MODES = ("GLOBAL", "THREAD_LOCAL", "RELAXED")


def begin(gpu: Gpu, stream, mode: str) -> None:
    ok(
        gpu.driver.cuStreamBeginCapture(
            stream, getattr(gpu.driver.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
        )
    )


def elsewhere(gpu: Gpu, call, *args):
    """Make a call on another thread, in the same context; return its code's name."""
    with ThreadPoolExecutor(1, initializer=lambda: gpu.driver.cuCtxSetCurrent(0xC0)) as pool:
        return pool.submit(call, *args).result()[0].name.removeprefix("CUDA_")


@pytest.mark.parametrize(
    ("mode", "is_own", "is_allowed"),
    [
        ("GLOBAL", True, False),
        ("THREAD_LOCAL", True, False),
        ("RELAXED", True, True),
        ("GLOBAL", False, False),
        ("THREAD_LOCAL", False, True),
        ("RELAXED", False, True),
    ],
)
@pytest.mark.parametrize("call", ["cuMemAlloc", "cuMemFree", "cuModuleLoadData", "cuEventQuery", "cuMemHostAlloc"])
def test_an_unsafe_call_breaks_the_captures_whose_mode_forbids_it(mode, is_own, is_allowed, call):
    gpu = Gpu()
    driver, stream = gpu.driver, make_stream(gpu)
    args = {"cuMemAlloc": (64,), "cuMemHostAlloc": (64, 0), "cuModuleLoadData": (compile_cuda(ADD_ONE),)}
    args |= {"cuMemFree": (gpu.empty(64),), "cuEventQuery": (make_event(gpu),)}
    begin(gpu, stream, mode)
    function = getattr(driver, call)
    code = function(*args[call])[0].name[5:] if is_own else elsewhere(gpu, function, *args[call])
    end = driver.cuStreamEndCapture(stream)[0].name[5:]
    refused = ("ERROR_STREAM_CAPTURE_UNSUPPORTED", "ERROR_STREAM_CAPTURE_INVALIDATED")
    assert (code, end) == (("SUCCESS", "SUCCESS") if is_allowed else refused)


@pytest.mark.parametrize("mode", MODES)
def test_waiting_for_the_context_breaks_a_capture_of_any_mode(mode):
    gpu = Gpu()
    stream = make_stream(gpu)
    begin(gpu, stream, mode)
    assert elsewhere(gpu, gpu.driver.cuCtxSynchronize) == "ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert gpu.driver.cuStreamEndCapture(stream)[0].name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_ends_on_its_own_thread_unless_it_is_relaxed(mode):
    gpu = Gpu()
    stream = make_stream(gpu)
    begin(gpu, stream, mode)
    wanted = "SUCCESS" if mode == "RELAXED" else "ERROR_STREAM_CAPTURE_WRONG_THREAD"
    assert elsewhere(gpu, gpu.driver.cuStreamEndCapture, stream) == wanted


@pytest.mark.parametrize("is_blocking", [False, True])
def test_the_legacy_stream_breaks_the_capture_of_a_blocking_stream(is_blocking):
    gpu = Gpu()
    driver, x = gpu.driver, gpu.empty(64)
    stream = ok(driver.cuStreamCreate(0)) if is_blocking else make_stream(gpu)
    begin(gpu, stream, "THREAD_LOCAL")
    wanted = "ERROR_STREAM_CAPTURE_IMPLICIT" if is_blocking else "SUCCESS"
    assert elsewhere(gpu, driver.cuMemsetD8Async, x, 0, 64, 0) == wanted
    code = driver.cuStreamEndCapture(stream)[0].name
    assert code == ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED" if is_blocking else "CUDA_SUCCESS")


def test_a_thread_that_is_relaxed_may_do_what_global_captures_forbid():
    gpu = Gpu()
    driver, stream = gpu.driver, make_stream(gpu)
    modes = driver.CUstreamCaptureMode
    begin(gpu, stream, "GLOBAL")
    before = ok(driver.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_RELAXED))
    assert before == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    ok(driver.cuMemAlloc(64))
    ok(driver.cuStreamEndCapture(stream))


def test_a_pageable_source_is_staged_at_the_call_and_a_pinned_one_copied_by_its_end():
    gpu = Gpu()
    driver, x = gpu.driver, gpu.empty(64)
    ok(driver.cuMemcpyHtoD(x, np.ones(8, np.float32), 32))
    assert not driver.is_initialised_range(x, 32)  # no stream but the legacy one waits for the rest of its way
    ok(driver.cuMemcpyHtoD(x + 32, pinned(gpu, 8), 32))
    assert driver.is_initialised_range(x, 64)


def test_poisoned_memory_is_as_new_in_stream_order():
    gpu = Gpu()
    driver, stream, function = gpu.driver, make_stream(gpu), gpu.function(compile_cuda(ADD_ONE))
    x = gpu.put(np.zeros(32, np.float32))
    gpu.launch(function, 1, 32, x, stream=stream)
    driver.poison(x, stream)
    gpu.launch(function, 1, 32, x, stream=stream)
    assert int(driver.cuStreamSynchronize(stream)[0]) != 0
    assert [fault.kind for fault in driver.faults] == ["uninitialised read"]
    assert len(driver.launches) == 1


TURNS = """extern "C" __global__ void k(int* order, int* next) {
    if (threadIdx.x % 32 == 0) for (int i = 0; i < 3; i++) order[atomicAdd(next, 1)] = threadIdx.x / 32; }"""


def test_warps_take_turns_by_seed():
    orders = set()
    for seed in (None, *range(6)):
        gpu = Gpu()
        gpu.driver.config.warp_seed = seed
        order, count = gpu.put(np.full(12, -1, np.int32)), gpu.put(np.zeros(1, np.int32))
        gpu.run(gpu.function(compile_cuda(TURNS)), 1, 128, order, count)
        turns = gpu.get(order, 12, np.int32).tolist()
        assert sorted(turns) == sorted([0, 1, 2, 3] * 3)
        orders.add(tuple(turns))
    assert len(orders) > 3


def test_a_graph_destroyed_while_a_launch_is_pending_is_a_fault():
    gpu = Gpu()
    driver, stream, x = gpu.driver, make_stream(gpu), gpu.put(np.zeros(32, np.float32))
    first, second = capture_two(gpu, x, stream), capture_two(gpu, x, stream)
    ok(driver.cuGraphLaunch(second, stream))
    ok(driver.cuGraphExecDestroy(first))
    assert int(driver.cuGraphExecDestroy(second)[0]) != 0
    assert driver.faults[0].kind == "freed too early"


def test_a_call_on_a_thread_without_a_context_or_after_its_release_is_refused():
    gpu = Gpu()
    driver, refused = gpu.driver, gpu.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(driver.cuMemAlloc, 64).result()[0] == refused
        ok(pool.submit(driver.cuCtxSetCurrent, 0xC0).result())
        ok(pool.submit(driver.cuMemAlloc, 64).result())
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert driver.cuMemAlloc(64)[0] == refused


def test_module_variables_hold_their_initial_values():
    source = """__constant__ float c[3] = {1.5f, 2.5f, -1.0f}; __device__ int g = 7;
    extern "C" __global__ void k(float* x) { x[threadIdx.x] = c[threadIdx.x % 3] + g; }"""
    gpu = Gpu()
    module = ok(gpu.driver.cuModuleLoadData(compile_cuda(source)))
    function = ok(gpu.driver.cuModuleGetFunction(module, b"k"))
    pointer, size = ok(gpu.driver.cuModuleGetGlobal(module, b"g"))
    assert size == 4
    x = gpu.empty(12)
    gpu.run(function, 1, 3, x)
    assert gpu.get(x, 3, np.float32).tolist() == [8.5, 9.5, 6.0]
    ok(gpu.driver.cuMemsetD32(pointer, 1, 1))
    gpu.run(function, 1, 3, x)
    assert gpu.get(x, 3, np.float32).tolist() == [2.5, 3.5, 0.0]


def test_a_copy_kernel_may_move_bytes_nobody_wrote_and_others_may_not():
    source = """extern "C" __global__ void copy_blocks(float* x, const float* y) { x[threadIdx.x] = y[threadIdx.x]; }"""
    gpu = Gpu()
    x, y = gpu.empty(128), gpu.empty(128)
    gpu.run(gpu.function(compile_cuda(source), "copy_blocks"), 1, 32, x, y)
    assert np.isnan(gpu.get(x, 32, np.float32)).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_cublas_multiplies_column_major_matrices_in_stream_order(dtype):
    gpu = Gpu()
    cublas, stream = VirtualCublas(gpu.driver), make_stream(gpu)
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(3, 8)).astype(dtype), rng.normal(size=(5, 8)).astype(dtype)
    px, pw, py = gpu.put(x), gpu.put(w), gpu.empty(60)
    handle = cublas.create()
    cublas.set_stream(handle, stream)
    one, zero = np.array([1], np.float32), np.array([0], np.float32)
    kind = {"float32": 0, "float16": 2}[dtype]
    # y[3, 5] = x w.T row-major is y.T = w x.T column-major
    cublas.gemm_ex(handle, 1, 0, 5, 3, 8, one.ctypes.data, pw, kind, 8, px, kind, 8, zero.ctypes.data, py, 0, 5, 68, -1)
    assert not gpu.driver.is_initialised_range(py, 60)
    ok(gpu.driver.cuStreamSynchronize(stream))
    np.testing.assert_allclose(
        gpu.get(py, (3, 5), np.float32), x.astype(np.float64) @ w.T.astype(np.float64), rtol=1e-4, atol=1e-5
    )


def test_a_product_under_capture_needs_a_workspace_that_is_set_behind_the_stream():
    gpu = Gpu()
    driver, cublas, stream = gpu.driver, VirtualCublas(gpu.driver), make_stream(gpu)
    handle, one, x = cublas.create(), np.ones(1, np.float32), gpu.put(np.ones((4, 4), np.float32))
    operands = (one.ctypes.data, x, 0, 4, x, 0, 4, np.zeros(1, np.float32).ctypes.data, gpu.empty(64), 0, 4, 68, -1)
    workspace = gpu.empty(4096)
    for is_right in (False, True):
        cublas.set_workspace(handle, workspace, 4096)
        cublas.set_stream(handle, stream)
        if is_right:
            cublas.set_workspace(handle, workspace, 4096)
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
        with nullcontext() if is_right else pytest.raises(CublasError, match="without a workspace"):
            cublas.gemm_ex(handle, 1, 0, 4, 4, 4, *operands)
        ok(driver.cuStreamEndCapture(stream))
    with pytest.raises(CublasError, match="a workspace of"):
        cublas.set_workspace(handle, workspace + 16, 64)
