// Rotary position embedding in place; a thread per (token, head, pair).
#include "rotary.cuh"

extern "C" __global__ void rope(float* __restrict__ x,                 // [num_tokens, num_heads, head_dim]
                                const int* __restrict__ positions,     // [num_tokens]
                                const float* __restrict__ inv_freq,    // [num_pairs], radians a position
                                const int64 num_tokens, const int num_heads, const int head_dim,
                                const int num_pairs, const int interleaved, const float scale) {
    const int64 thread = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (thread >= num_tokens * num_heads * num_pairs) return;
    const int pair = thread % num_pairs;
    const int64 row = thread / num_pairs;
    const float2 turn = find_turn(positions[row / num_heads], inv_freq[pair], scale);
    float* first = x + row * head_dim + (interleaved ? 2 * pair : pair);
    float* second = first + (interleaved ? 1 : num_pairs);
    const float a = *first, b = *second;
    *first = rotate_first(a, b, turn);
    *second = rotate_second(a, b, turn);
}
