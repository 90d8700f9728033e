// Choose a token from each row of logits; a CTA per row.
//
// Temperature 0 takes the largest logit (the lowest id among equals). Otherwise the Gumbel trick: the largest of
// logit / temperature - log(-log(u)) is a draw from the softmax; u is a hash of (seed, id), so that a draw repeats.
#include "numbers.cuh"

__device__ __forceinline__ float uniform(uint64 seed, uint32 id) {  // splitmix64, in (0, 1)
    uint64 z = seed + (id + 1ull) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return ((uint32)(z >> 41) + 0.5f) * (1.0f / 8388608.0f);
}

__device__ __forceinline__ void take_better(float& value, int& id, float other_value, int other_id) {
    if (other_value > value || (other_value == value && other_id < id)) value = other_value, id = other_id;
}

extern "C" __global__ void sample(const float* __restrict__ logits,        // [gridDim.x, vocab_size]
                                  const float* __restrict__ temperatures,  // [gridDim.x], 0 = greedy
                                  const uint64* __restrict__ seeds,        // [gridDim.x]
                                  int* __restrict__ tokens,                // [gridDim.x]
                                  const int64 vocab_size) {
    __shared__ float values[32];
    __shared__ int ids[32];
    const float temperature = temperatures[blockIdx.x];
    const uint64 seed = seeds[blockIdx.x];
    float value = NEGATIVE_INFINITY;
    int id = 0x7FFFFFFF;
    for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) {
        float score = logits[blockIdx.x * vocab_size + i];
        if (temperature > 0.0f) score = score / temperature - logf(-logf(uniform(seed, i)));
        take_better(value, id, score, i);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        take_better(value, id, __shfl_xor_sync(~0u, value, step), __shfl_xor_sync(~0u, id, step));
    if ((threadIdx.x & 31) == 0) values[threadIdx.x >> 5] = value, ids[threadIdx.x >> 5] = id;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int warp = 1; warp < blockDim.x / 32; warp++) take_better(value, id, values[warp], ids[warp]);
    tokens[blockIdx.x] = id;
}
