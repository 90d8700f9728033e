"""Divergence, loops, barriers, calls, early exits."""

from __future__ import annotations

import numpy as np
import pytest

from virtual_gpu import UnsupportedPtx
from virtual_gpu.harness import Gpu, compile_cuda


def run_cuda(source: str, grid: int, block: int, num_words: int, *arrays: np.ndarray, **options) -> np.ndarray:
    """Run `k(int* out, const int*...)` and return `out`, which starts as zeros."""
    gpu = Gpu(**options)
    out = gpu.put(np.zeros(num_words, np.int32))
    gpu.run(gpu.function(compile_cuda(source)), grid, block, out, *(gpu.put(a) for a in arrays))
    return gpu.get(out, num_words, np.int32)


def test_nested_branches_reconverge_with_each_threads_own_result():
    source = """extern "C" __global__ void k(int* out) {
        int t = threadIdx.x, r = 0;
        if (t % 2) { if (t % 3) r = t * 10; else r = t * 100; } else { if (t > 40) r = -t; else r = t; }
        out[blockIdx.x * blockDim.x + t] = r + __popc(__activemask());
    }"""
    result = run_cuda(source, 2, 96, 192)
    t = np.arange(96)
    expected = np.where(t % 2 == 1, np.where(t % 3 != 0, t * 10, t * 100), np.where(t > 40, -t, t)) + 32
    np.testing.assert_array_equal(result, np.tile(expected, 2))


def test_loops_of_different_lengths_end_for_each_thread_at_its_own_count():
    source = """extern "C" __global__ void k(int* out) {
        int n = (threadIdx.x * 7 + blockIdx.x) % 13, x = 1;
        for (int i = 0; i < n; i++) { if (i % 3 == 2) continue; x = x * 3 + i; if (x > 5000) break; }
        out[blockIdx.x * blockDim.x + threadIdx.x] = x;
    }"""
    expected = []
    for lane in range(3 * 64):
        n, x = (lane % 64 * 7 + lane // 64) % 13, 1
        for i in range(n):
            if i % 3 == 2:
                continue
            x = x * 3 + i
            if x > 5000:
                break
        expected.append(x)
    assert run_cuda(source, 3, 64, 192).tolist() == expected


def test_threads_that_return_early_do_not_hold_up_a_barrier():
    source = """extern "C" __global__ void k(int* out) {
        __shared__ int s[64];
        if (threadIdx.x >= 40) return;
        s[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = s[39 - threadIdx.x];
    }"""
    assert run_cuda(source, 1, 64, 64).tolist() == [*range(39, -1, -1), *[0] * 24]


def test_a_block_that_is_no_multiple_of_a_warp_runs_only_its_threads():
    source = """extern "C" __global__ void k(int* out) {
        atomicAdd(out, 1);
        out[1 + blockIdx.x * 33 + threadIdx.x] = __ballot_sync(__activemask(), 1);
    }"""
    result = run_cuda(source, 2, 33, 67)
    assert result[0] == 66
    assert result[1:].tolist() == ([-1] * 32 + [1]) * 2


def test_switch_jumps_through_a_table():
    source = """extern "C" __global__ void k(int* out) {
        int t = threadIdx.x, r;
        switch (t % 8) { case 0: r = 5; break; case 1: r = t; break; case 2: r = t * t; break; case 3: r = -1; break;
            case 4: r = 17 - t; break; case 5: r = t << 3; break; case 6: r = 1000; break; default: r = 3; }
        out[t] = r;
    }"""
    t = np.arange(64)
    table = [np.full(64, 5), t, t * t, np.full(64, -1), 17 - t, t << 3, np.full(64, 1000), np.full(64, 3)]
    np.testing.assert_array_equal(run_cuda(source, 1, 64, 64), np.choose(t % 8, table))


def test_calls_of_device_functions_are_followed():
    source = """
    __device__ __noinline__ int twice(int x, int* where) { if (x > 10) { *where = x; return 1; } return x * 2; }
    extern "C" __global__ void k(int* out) {
        int t = threadIdx.x;
        out[t] = twice(t, out + 32 + t) + twice(t + 8, out + 64 + t);
    }"""
    result = run_cuda(source, 1, 32, 96)
    expected = [(1 if t > 10 else 2 * t) + (1 if t + 8 > 10 else 2 * (t + 8)) for t in range(32)]
    assert result[:32].tolist() == expected
    assert result[32:64].tolist() == [t if t > 10 else 0 for t in range(32)]


def test_local_arrays_are_private_to_a_thread():
    source = """extern "C" __global__ void k(int* out) {
        int a[8];
        for (int i = 0; i < 8; i++) a[(i * 3 + threadIdx.x) % 8] = i + threadIdx.x;
        out[threadIdx.x] = a[out[threadIdx.x] + threadIdx.x % 8];
    }"""
    result = run_cuda(source, 1, 32, 32)
    expected = []
    for t in range(32):
        a = [0] * 8
        for i in range(8):
            a[(i * 3 + t) % 8] = i + t
        expected.append(a[t % 8])
    assert result.tolist() == expected


def test_barrier_reductions_count_over_the_cta():
    source = """extern "C" __global__ void k(int* out) {
        int t = threadIdx.x;
        out[t] = __syncthreads_count(t % 3 == 0) + 1000 * __syncthreads_or(t == 5) + 10000 * __syncthreads_and(t < 63);
    }"""
    assert set(run_cuda(source, 1, 64, 64).tolist()) == {22 + 1000}


def test_a_barrier_in_divergent_code_that_some_never_reach_is_a_fault():
    source = """extern "C" __global__ void k(int* out) {
        if (threadIdx.x < 32) { asm volatile("bar.sync 1, 64;"); }
        else { asm volatile("bar.sync 2, 64;"); }
        out[threadIdx.x] = 1;
    }"""
    gpu = Gpu()
    fault = gpu.fault(gpu.function(compile_cuda(source)), 1, 64, gpu.put(np.zeros(64, np.int32)))
    assert fault.kind == "barrier"
    assert "bar.sync" in fault.ptx


def test_batches_of_ctas_give_the_same_result_as_one():
    source = """extern "C" __global__ void k(int* out) {
        __shared__ int s[32];
        s[threadIdx.x] = blockIdx.x;
        __syncthreads();
        atomicAdd(out + blockIdx.x, s[31 - threadIdx.x]);
    }"""
    gpu = Gpu()
    gpu.driver.config.max_lanes = 96
    out = gpu.put(np.zeros(50, np.int32))
    gpu.run(gpu.function(compile_cuda(source)), 50, 32, out)
    assert gpu.get(out, 50, np.int32).tolist() == [32 * i for i in range(50)]


def test_an_unsupported_instruction_is_refused_by_name_and_line_at_load():
    text = (
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() {\n.reg .b32 %r;\ntex.1d.v4.f32.s32 %r;\n}"
    )
    with pytest.raises(UnsupportedPtx, match=r"line 6.*tex\.1d"):
        Gpu().function(text)


def test_a_failed_device_assertion_stops_the_context():
    source = """extern "C" __global__ void k(int* out) { if (out[threadIdx.x] == 0) __trap(); }"""
    gpu = Gpu()
    assert gpu.fault(gpu.function(compile_cuda(source)), 1, 32, gpu.put(np.zeros(32, np.int32))).kind == "trap"


def test_counters_tell_divergence_and_instructions():
    source = """extern "C" __global__ void k(int* out) { if (out[threadIdx.x * 32]) out[threadIdx.x] = 7; }"""
    gpu = Gpu()
    data = np.zeros(32 * 32, np.int32)
    data[0::64] = 1
    gpu.run(gpu.function(compile_cuda(source)), 1, 32, gpu.put(data))
    stats = gpu.driver.launches[-1]
    assert stats.num_divergent_branches == 1
    assert stats.instructions["ld"] >= 1
    assert (stats.sectors_read, stats.sectors_read_least) == (32, 32)
    assert stats.global_load_bytes == {4: 32}
