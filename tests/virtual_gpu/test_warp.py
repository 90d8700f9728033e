"""Shuffles, votes, ldmatrix and mma.sync against the PTX manual's formulas."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from virtual_gpu.harness import Gpu, compile_cuda, evaluate

LANES = np.arange(32, dtype=np.uint32)


def shuffle(mode: str, b: object, c: int) -> tuple[list[int], list[int]]:
    """Values (100 + source lane) and predicates."""
    code = f"shfl.sync.{mode}.b32 %t|%p, %a, %b, {c}, -1; selp.u32 %u, 1000, 0, %p; add.u32 %d, %t, %u;"
    result = evaluate(code, "u32", a=("u32", LANES), b=("u32", np.broadcast_to(b, 32)))
    return (result % 1000).tolist(), (result // 1000).tolist()


def test_shuffle_bfly_exchanges_lanes():
    values, valid = shuffle("bfly", 5, 31)
    assert values == [lane ^ 5 for lane in range(32)]
    assert valid == [1] * 32


def test_shuffle_down_keeps_its_own_value_past_the_end():
    values, valid = shuffle("down", 3, 31)
    assert values == [min(lane + 3, 31) if lane + 3 < 32 else lane for lane in range(32)]
    assert valid == [int(lane + 3 < 32) for lane in range(32)]


def test_shuffle_up_in_segments_of_eight():
    values, valid = shuffle("up", 1, 0x1800)
    assert values == [lane if lane % 8 == 0 else lane - 1 for lane in range(32)]
    assert valid == [int(lane % 8 != 0) for lane in range(32)]


def test_shuffle_idx_with_a_source_of_its_own_in_each_thread():
    values, _ = shuffle("idx", (LANES * 7) % 32, 31)
    assert values == [lane * 7 % 32 for lane in range(32)]
    values, _ = shuffle("idx", 2, 0x1C1F)  # width 4: lane 2 of each group
    assert values == [lane // 4 * 4 + 2 for lane in range(32)]


def test_votes_and_ballots():
    code = "setp.lt.u32 %p, %a, 5; vote.sync.ballot.b32 %d, %p, -1;"
    assert set(evaluate(code, "u32", a=("u32", LANES)).tolist()) == {0x1F}
    for mode, expected in (("all", 0), ("any", 1), ("uni", 0)):
        code = f"setp.lt.u32 %p, %a, 5; vote.sync.{mode}.pred %p2, %p, -1; selp.u32 %d, 1, 0, %p2;"
        assert set(evaluate(code, "u32", a=("u32", LANES)).tolist()) == {expected}
    code = "setp.lt.u32 %p, %a, 5; vote.sync.all.pred %p2, !%p, -1; selp.u32 %d, 1, 0, %p2;"
    assert set(evaluate(code, "u32", a=("u32", LANES + 9)).tolist()) == {1}


def test_redux_reduces_over_the_warp():
    assert set(evaluate("redux.sync.add.u32 %d, %a, -1;", "u32", a=("u32", LANES)).tolist()) == {496}
    assert set(evaluate("redux.sync.min.s32 %d, %a, -1;", "s32", a=("s32", LANES.astype(int) - 9)).tolist()) == {-9}


def test_a_shuffle_from_an_absent_thread_is_a_fault():
    source = """extern "C" __global__ void k(int* out) {
        if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, (int)threadIdx.x, 20);
    }"""
    gpu = Gpu()
    assert gpu.fault(gpu.function(compile_cuda(source)), 1, 32, gpu.put(np.zeros(32, np.int32))).kind == "warp"


def test_a_mask_that_names_a_thread_elsewhere_is_a_fault():
    source = """extern "C" __global__ void k(int* out) {
        if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffff, (int)threadIdx.x, 1);
        else out[threadIdx.x] = 5;
    }"""
    gpu = Gpu()
    assert gpu.fault(gpu.function(compile_cuda(source)), 1, 32, gpu.put(np.zeros(32, np.int32))).kind == "warp"


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_ldmatrix_gives_each_thread_its_pair_of_each_row(count, trans):
    registers = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    names = ", ".join(f"%{i}" for i in range(count))
    source = f"""extern "C" __global__ void k(unsigned* out, const unsigned short* in) {{
        __shared__ __align__(16) unsigned short s[256];
        for (int i = threadIdx.x; i < 256; i += 32) s[i] = in[i];
        __syncthreads();
        unsigned a = __cvta_generic_to_shared(s + threadIdx.x * 8), r[{count}];
        asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%{count}];"
            : {registers} : "r"(a));
        for (int i = 0; i < {count}; i++) out[i * 32 + threadIdx.x] = r[i];
    }}"""
    gpu = Gpu()
    data = np.arange(256, dtype=np.uint16)
    out = gpu.put(np.zeros(count * 32, np.uint32))
    gpu.run(gpu.function(compile_cuda(source)), 1, 32, out, gpu.put(data))
    result = gpu.get(out, (count, 32), np.uint32)
    for i in range(count):
        tile = data[i * 64 : i * 64 + 64].reshape(8, 8)
        tile = tile.T if trans else tile
        for lane in range(32):
            low, high = tile[lane // 4, lane % 4 * 2], tile[lane // 4, lane % 4 * 2 + 1]
            assert result[i, lane] == int(low) | int(high) << 16


def fragments_a(a: np.ndarray, per: int) -> np.ndarray:
    """[lanes, values] of A [16, K] by the manual: row g or g + 8, column in groups of four threads."""
    num_values = a.size // 32
    out = np.empty((32, num_values), a.dtype)
    for lane in range(32):
        for i in range(num_values):
            register, j = divmod(i, per)
            row = lane // 4 + 8 * (register % 2)
            column = lane % 4 * per + j + 4 * per * (register // 2)
            out[lane, i] = a[row, column]
    return out


def fragments_b(b: np.ndarray, per: int) -> np.ndarray:
    """[lanes, values] of B [K, 8]."""
    num_values = b.size // 32
    out = np.empty((32, num_values), b.dtype)
    for lane in range(32):
        for i in range(num_values):
            register, j = divmod(i, per)
            out[lane, i] = b[lane % 4 * per + j + 4 * per * register, lane // 4]
    return out


MMA = [
    ("m16n8k16", "f16", np.float16, 2),
    ("m16n8k16", "bf16", ml_dtypes.bfloat16, 2),
    ("m16n8k8", "f16", np.float16, 2),
    ("m16n8k8", "tf32", np.float32, 1),
    ("m16n8k4", "tf32", np.float32, 1),
]


@pytest.mark.parametrize(("shape", "kind", "dtype", "per"), MMA)
def test_mma_multiplies_the_matrices_whose_fragments_the_manual_defines(shape, kind, dtype, per):
    depth = int(shape.split("k")[1])
    rng = np.random.default_rng(3)
    a = rng.integers(-8, 9, (16, depth)).astype(dtype)
    b = rng.integers(-8, 9, (depth, 8)).astype(dtype)
    c = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    na, nb = 16 * depth // 32 // per, 8 * depth // 32 // per
    names = [f"%{i}" for i in range(8 + na + nb)]
    groups = [names[:4], names[4 : 4 + na], names[4 + na : 4 + na + nb], names[4 + na + nb :]]
    operands = ", ".join("{" + ", ".join(g) + "}" for g in groups)
    inputs = [
        *(f'"r"(a[{i}])' for i in range(na)),
        *(f'"r"(b[{i}])' for i in range(nb)),
        *(f'"f"(c[{i}])' for i in range(4)),
    ]
    source = f"""extern "C" __global__ void k(float* out, const unsigned* pa, const unsigned* pb, const float* pc) {{
        int l = threadIdx.x; unsigned a[{na}], b[{nb}]; float c[4], d[4];
        for (int i = 0; i < {na}; i++) a[i] = pa[l * {na} + i];
        for (int i = 0; i < {nb}; i++) b[i] = pb[l * {nb} + i];
        for (int i = 0; i < 4; i++) c[i] = pc[l * 4 + i];
        asm volatile("mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {operands};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : {", ".join(inputs)});
        for (int i = 0; i < 4; i++) out[l * 4 + i] = d[i];
    }}"""
    c_index = [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in range(32) for i in range(4)]
    gpu = Gpu()
    out = gpu.empty(512)
    gpu.run(
        gpu.function(compile_cuda(source)), 1, 32, out,
        gpu.put(fragments_a(a, per).view(np.uint32)), gpu.put(fragments_b(b, per).view(np.uint32)),
        gpu.put(np.array([c[i] for i in c_index], np.float32)),
    )  # fmt: skip
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_array_equal(gpu.get(out, 128, np.float32), [expected[i] for i in c_index])


def test_mma_in_a_partial_warp_is_a_fault():
    source = """extern "C" __global__ void k(float* out) {
        if (threadIdx.x < 16) { float d0, d1, d2, d3; unsigned z = out[0] > 1e9f;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};"
            : "=f"(d0), "=f"(d1), "=f"(d2), "=f"(d3) : "r"(z));
        out[threadIdx.x] = d0; }
    }"""
    gpu = Gpu()
    assert gpu.fault(gpu.function(compile_cuda(source)), 1, 32, gpu.put(np.zeros(32, np.float32))).kind == "warp"
