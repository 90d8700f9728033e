// Rotary position embedding in place; a thread per (token, head, pair). The angle is reduced to half turns in float64,
// for a float32 product of position 100,000 has lost the third decimal of its angle.
#include "numbers.cuh"

extern "C" __global__ void rope(float* __restrict__ x,                 // [num_tokens, num_heads, head_dim]
                                const int* __restrict__ positions,     // [num_tokens]
                                const float* __restrict__ inv_freq,    // [num_pairs], radians a position
                                const int64 num_tokens, const int num_heads, const int head_dim,
                                const int num_pairs, const int interleaved, const float scale) {
    const int64 thread = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (thread >= num_tokens * num_heads * num_pairs) return;
    const int pair = thread % num_pairs;
    const int64 row = thread / num_pairs;
    const double half_turns = (double)positions[row / num_heads] * inv_freq[pair] * 0.31830988618379067154;
    const float reduced = (float)(half_turns - 2.0 * rint(half_turns * 0.5));
    float sine, cosine;
    sincospif(reduced, &sine, &cosine);
    sine *= scale, cosine *= scale;
    float* first = x + row * head_dim + (interleaved ? 2 * pair : pair);
    float* second = first + (interleaved ? 1 : num_pairs);
    const float a = *first, b = *second;
    *first = a * cosine - b * sine;
    *second = fmaf(a, sine, b * cosine);
}
