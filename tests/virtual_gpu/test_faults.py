"""Planted faults in kernels: each is caught and named."""

from __future__ import annotations

import numpy as np
import pytest

from virtual_gpu.harness import Gpu, compile_cuda, ok


def fault_of(source: str, *arrays: np.ndarray, grid: int = 1, block: int = 64, shared: int = 0):
    gpu = Gpu()
    return gpu.fault(gpu.function(compile_cuda(source)), grid, block, *(gpu.put(a) for a in arrays), shared=shared)


def passes(source: str, *arrays: np.ndarray, grid: int = 1, block: int = 64, shared: int = 0) -> None:
    gpu = Gpu()
    gpu.run(gpu.function(compile_cuda(source)), grid, block, *(gpu.put(a) for a in arrays), shared=shared)


def words(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def test_an_access_behind_an_allocation_is_out_of_bounds_and_says_where():
    source = """extern "C" __global__ void k(int* x) { x[threadIdx.x] = 1; }"""
    fault = fault_of(source, words(63))
    assert fault.kind == "out of bounds"
    assert fault.kernel == "k"
    assert fault.thread == "CTA (0,0,0) thread (63,0,0)"
    assert "0 bytes behind allocation" in fault.message
    assert fault.ptx.startswith("st.global")
    assert fault.ptx_line > 0
    assert fault.source.endswith("test.cu:1")


def test_a_misaligned_vector_load_is_a_fault():
    source = """extern "C" __global__ void k(int* x) {
        int4 v = *(const int4*)(x + threadIdx.x); x[threadIdx.x] = v.x + v.y + v.z + v.w; }"""
    fault = fault_of(source, words(256))
    assert fault.kind == "misaligned"
    assert fault.address % 16 == 4


def test_reading_memory_nobody_wrote_is_a_fault():
    source = """extern "C" __global__ void k(int* out, const int* x) { out[threadIdx.x] = x[threadIdx.x]; }"""
    gpu = Gpu()
    fault = gpu.fault(gpu.function(compile_cuda(source)), 1, 64, gpu.put(words(64)), gpu.empty(256))
    assert fault.kind == "uninitialised read"


def test_reading_shared_memory_nobody_wrote_is_a_fault():
    source = """extern "C" __global__ void k(int* out) {
        __shared__ int s[64]; if (threadIdx.x < 60) s[threadIdx.x] = 1; __syncthreads();
        out[threadIdx.x] = s[threadIdx.x]; }"""
    fault = fault_of(source, words(64))
    assert fault.kind == "uninitialised read"
    assert "thread (60,0,0)" in fault.thread


def test_shared_memory_beyond_the_launch_is_out_of_bounds():
    source = """extern "C" __global__ void k(int* out) {
        extern __shared__ int s[]; s[threadIdx.x] = 1; __syncthreads(); out[threadIdx.x] = s[threadIdx.x]; }"""
    assert fault_of(source, words(64), shared=252).kind == "out of bounds"
    passes(source, words(64), shared=256)


MISSING_BARRIER = """extern "C" __global__ void k(int* out) {
    __shared__ int s[64]; s[threadIdx.x] = threadIdx.x; %s
    out[threadIdx.x] = s[63 - threadIdx.x]; }"""


def test_a_missing_barrier_is_a_race_although_the_result_is_right():
    fault = fault_of(MISSING_BARRIER % "", words(64))
    assert fault.kind == "race"
    assert "no barrier between" in fault.message
    passes(MISSING_BARRIER % "__syncthreads();", words(64))


def test_a_warp_needs_syncwarp_but_no_barrier():
    source = """extern "C" __global__ void k(int* out) {
        __shared__ int s[64]; int w = threadIdx.x & ~31; s[threadIdx.x] = threadIdx.x; %s
        out[threadIdx.x] = s[w + 31 - (threadIdx.x & 31)]; }"""
    assert fault_of(source % "", words(64)).kind == "race"
    passes(source % "__syncwarp();", words(64))


def test_overwriting_what_others_may_still_read_is_a_race():
    source = """extern "C" __global__ void k(int* out) {
        __shared__ int s[64]; int x = 0;
        for (int i = 0; i < 2; i++) { s[threadIdx.x] = i; __syncthreads(); x += s[63 - threadIdx.x]; %s }
        out[threadIdx.x] = x; }"""
    assert fault_of(source % "", words(64)).kind == "race"
    passes(source % "__syncthreads();", words(64))


def test_two_ctas_writing_one_word_race_and_atomics_do_not():
    source = """extern "C" __global__ void k(int* x) { if (threadIdx.x == 0) %s }"""
    fault = fault_of(source % "x[0] = 5;", words(4), grid=2)
    assert fault.kind == "race"
    assert "CTA number 0" in fault.message
    passes(source % "atomicAdd(x, 5);", words(4), grid=2)


def test_a_cta_reading_what_another_writes_is_a_race():
    source = """extern "C" __global__ void k(int* x) { x[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x + 64]; }"""
    assert fault_of(source, words(256), grid=3).kind == "race"


def test_the_last_cta_may_read_what_the_others_published_by_an_atomic():
    source = """extern "C" __global__ void k(int* x, int* counter) {
        __shared__ int last; x[blockIdx.x] = blockIdx.x; __threadfence();
        %s
        __syncthreads();
        if (last && threadIdx.x == 0) {
            int t = 0; for (int i = 0; i < gridDim.x; i++) t += x[i]; x[gridDim.x] = t; } }"""
    good = source % "if (threadIdx.x == 0) last = atomicAdd(counter, 1) == gridDim.x - 1;"
    gpu = Gpu()
    x = gpu.put(words(8))
    gpu.run(gpu.function(compile_cuda(good)), 5, 1, x, gpu.put(words(1)))
    assert gpu.get(x, 8, np.int32).tolist() == [0, 1, 2, 3, 4, 10, 0, 0]
    bad = source % "if (threadIdx.x == 0) last = blockIdx.x == gridDim.x - 1;"
    assert fault_of(bad, words(8), words(1), grid=5, block=1).kind == "race"


CP_ASYNC = """extern "C" __global__ void k(int* out, const int* in) {
    __shared__ __align__(16) int s[256]; unsigned a = __cvta_generic_to_shared(s + threadIdx.x * 4);
    asm volatile("cp.async.cg.shared.global [%%0], [%%1], 16, %%2;" :: "r"(a), 
        "l"(in + threadIdx.x * 4), "r"(threadIdx.x < 40 ? 16 : 8));
    asm volatile("cp.async.commit_group;"); %s __syncthreads();
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = s[threadIdx.x * 4 + i]; }"""


def test_reading_a_cp_async_that_was_not_waited_for_is_a_fault():
    assert fault_of(CP_ASYNC % "", words(256), words(256)).kind == "cp.async"
    assert fault_of(CP_ASYNC % 'asm volatile("cp.async.wait_group 1;");', words(256), words(256)).kind == "cp.async"


def test_cp_async_fills_with_zeros_behind_the_source_size():
    gpu = Gpu()
    out, data = gpu.put(words(256)), np.arange(1, 257, dtype=np.int32)
    source = CP_ASYNC % 'asm volatile("cp.async.wait_group 0;");'
    gpu.run(gpu.function(compile_cuda(source)), 1, 64, out, gpu.put(data))
    expected = data.reshape(64, 4).copy()
    expected[40:, 2:] = 0
    np.testing.assert_array_equal(gpu.get(out, (64, 4), np.int32), expected)


def test_after_a_fault_every_call_reports_it_until_the_context_goes():
    gpu = Gpu()
    driver = gpu.driver
    x = gpu.put(words(4))
    gpu.fault(gpu.function(compile_cuda("""extern "C" __global__ void k(int* x) { x[threadIdx.x] = 1; }""")), 1, 64, x)
    code = driver.cuMemAlloc(16)[0]
    assert code == driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert b"out of bounds" in ok(driver.cuGetErrorString(code))
    assert int(driver.cuStreamSynchronize(0)[0]) != 0


def test_bank_conflicts_and_sectors_are_counted():
    source = """extern "C" __global__ void k(float* out, const float* in) {
        __shared__ float s[32 * 33]; int t = threadIdx.x;
        s[t * STRIDE] = in[t * 8]; __syncwarp(); out[t] = s[t * STRIDE]; }"""
    for stride, ratio in ((1, 1), (2, 2), (32, 32), (33, 1)):
        gpu = Gpu()
        function = gpu.function(compile_cuda(source.replace("STRIDE", str(stride))))
        gpu.run(function, 1, 32, gpu.put(np.zeros(32, np.float32)), gpu.put(np.zeros(256, np.float32)))
        stats = gpu.driver.launches[-1]
        assert stats.bank_conflict_ratio == ratio
        assert (stats.sectors_read, stats.sectors_read_least, stats.sectors_written) == (32, 32, 4)


def test_reading_the_same_sectors_again_shows_against_the_least_possible():
    source = """extern "C" __global__ void k(float* out, const float* in) {
        float s = 0; for (int i = 0; i < 3; i++) s += __ldcg(in + threadIdx.x) * i; out[threadIdx.x] = s; }"""
    gpu = Gpu()
    text = compile_cuda(source.replace("__ldcg(in + threadIdx.x)", "((const volatile float*)in)[threadIdx.x]"))
    gpu.run(gpu.function(text), 1, 32, gpu.put(np.zeros(32, np.float32)), gpu.put(np.zeros(32, np.float32)))
    assert gpu.driver.launches[-1].read_ratio == pytest.approx(3.0)
