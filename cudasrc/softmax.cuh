// The online softmax as a monoid over (max, sum): scores are in units of log2, so that exp2 is one instruction.
// Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#pragma once
#include "numbers.cuh"

// 2^x, denormal results flushed to zero: one instruction, where exp2f takes four.
__device__ __forceinline__ float exp2_flushed(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct SoftmaxState {
    float max;  // of the scores times log2(e); -inf while nothing was seen
    float sum;  // of exp2(score - max)

    __device__ __forceinline__ void init() { max = NEGATIVE_INFINITY, sum = 0.0f; }

    // Take in a new maximum; return the factor that all sums and outputs gathered so far must be scaled by.
    __device__ __forceinline__ float raise(float seen) {
        const float next = fmaxf(max, seen);
        const float factor = max == next ? 1.0f : exp2_flushed(max - next);
        max = next, sum *= factor;
        return factor;
    }

    // exp2 of a score relative to the maximum; a masked score (-inf) weighs nothing, even before any maximum.
    __device__ __forceinline__ float weight(float score) const {
        return exp2_flushed(score - (max == NEGATIVE_INFINITY ? 0.0f : max));
    }

    __device__ __forceinline__ float normalizer() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }

    // Natural logarithm of the sum of exponentials. NaN of scores that are not finite, never what stands for "empty".
    __device__ __forceinline__ float lse() const {
        return sum == 0.0f ? NEGATIVE_INFINITY : max * kLn2 + logf(sum);
    }
};

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
    return value;
}
