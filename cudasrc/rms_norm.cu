// y = x / sqrt(mean(x^2) + epsilon) * weight; with ADD, x += residual first. A CTA per row, which stays in L1 between
// the two passes.
//
// -D ADD (0 or 1) VECTOR (elements a thread moves at once: 4, or 1 where the width is no multiple of 4) NUM_THREADS
#include "softmax.cuh"

struct Part {
    float values[VECTOR];
};

__device__ __forceinline__ Part load_part(const float* address) {
    Part part;
    if constexpr (VECTOR == 4) {
        const float4 four = *reinterpret_cast<const float4*>(address);
        part.values[0] = four.x, part.values[1] = four.y, part.values[2] = four.z, part.values[3] = four.w;
    } else {
        part.values[0] = *address;
    }
    return part;
}

__device__ __forceinline__ void store_part(float* address, const Part& part) {
    if constexpr (VECTOR == 4)
        *reinterpret_cast<float4*>(address) =
            make_float4(part.values[0], part.values[1], part.values[2], part.values[3]);
    else
        *address = part.values[0];
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) rms_norm(
    float* x,                            // [num_rows, width]
    const float* __restrict__ residual,  // [num_rows, width]; read with ADD only
    const float* __restrict__ weight,    // [width]
    float* __restrict__ y,               // [num_rows, width]
    const int64 width, const float epsilon) {
    __shared__ float partial[NUM_THREADS / 32];
    const int64 base = blockIdx.x * width;
    float sum = 0.0f;
#pragma unroll 2
    for (int64 i = threadIdx.x * VECTOR; i < width; i += NUM_THREADS * VECTOR) {
        Part part = load_part(x + base + i);
        if constexpr (ADD) {
            const Part other = load_part(residual + base + i);
#pragma unroll
            for (int v = 0; v < VECTOR; v++) part.values[v] += other.values[v];
            store_part(x + base + i, part);
        }
#pragma unroll
        for (int v = 0; v < VECTOR; v++) sum = fmaf(part.values[v], part.values[v], sum);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < NUM_THREADS / 32; warp++) sum += partial[warp];
    const float factor = 1.0f / sqrtf(sum / (float)width + epsilon);
#pragma unroll 2
    for (int64 i = threadIdx.x * VECTOR; i < width; i += NUM_THREADS * VECTOR) {
        Part part = load_part(x + base + i);
        const Part gain = load_part(weight + i);
#pragma unroll
        for (int v = 0; v < VECTOR; v++) part.values[v] = part.values[v] * factor * gain.values[v];
        store_part(y + base + i, part);
    }
}
