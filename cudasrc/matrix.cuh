// Tensor cores: the product of two tiles, tiles of 8 x 8 from shared memory, and bytes widened to operands.
// -D STORAGE (1 to 4)
#pragma once
#include "async_copy.cuh"

constexpr int kOperand = STORAGE == BFLOAT16 ? BFLOAT16 : FLOAT16;
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsFloat8 = true;  // by an instruction
#else
constexpr bool kConvertsFloat8 = false;
#endif
constexpr float kWidened = STORAGE == FLOAT8 && !kConvertsFloat8 ? 256.0f : 1.0f;  // an element over what it is widened to

// c[16, 8] += a[16, 16] b[16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    if constexpr (kOperand == FLOAT16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_matrices(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Two of a word's bytes, picked by a nibble each of `bytes`, as two float16: a signed byte plus 1152 is 1024 and its
// bits, an e4m3 has float16's form but for the bias where no instruction converts it.
template <int kLow, int kHigh>
__device__ __forceinline__ uint32 widen(uint32 word) {
    constexpr uint32 kSelect = 0x4040 | kHigh << 8 | kLow;
    if constexpr (STORAGE == INT8) {
        const uint32 biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, kSelect);
        uint32 wide;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(biased), "r"(0x64806480u));
        return wide;
    }
#if __CUDA_ARCH__ >= 890
    const uint32 pair = kLow == 0 && kHigh == 1 ? word : __byte_perm(word, 0, kHigh << 4 | kLow);
    uint32 wide;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(wide) : "r"(pair));
    return wide;
#else
    const uint32 spread = __byte_perm(word, 0, kSelect);
    return ((spread & 0x00800080u) << 8) | ((spread & 0x007F007Fu) << 7);
#endif
}

// A pair of queries that the operands can hold; see clamp_to_half.
__device__ __forceinline__ float2 clamp_queries(float2 pair) {
    if constexpr (kOperand == BFLOAT16) return pair;
    return make_float2(clamp_to_half(pair.x), clamp_to_half(pair.y));
}

// A pair of floats as two operands whose sum has twice the bits: the high part and what is left.
__device__ __forceinline__ void pack_parts(uint32& high, uint32& low, float x, float y) {
    high = pack<kOperand>(x, y);
    low = pack<kOperand>(x - unpack<kOperand>(high & 0xFFFFu), y - unpack<kOperand>(high >> 16));
}
