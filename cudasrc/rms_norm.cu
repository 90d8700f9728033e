// y = x / sqrt(mean(x^2) + epsilon) * weight; a CTA per row, which stays in L1 between the two passes.
#include "softmax.cuh"

extern "C" __global__ void rms_norm(const float* __restrict__ x,       // [num_rows, width]
                                    const float* __restrict__ weight,  // [width]
                                    float* __restrict__ y,             // [num_rows, width]
                                    const int64 width, const float epsilon) {
    __shared__ float partial[32];
    const float* row = x + blockIdx.x * width;
    float sum = 0.0f;
    for (int64 i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; warp++) sum += partial[warp];
    const float factor = 1.0f / sqrtf(sum / (float)width + epsilon);
    for (int64 i = threadIdx.x; i < width; i += blockDim.x) y[blockIdx.x * width + i] = row[i] * factor * weight[i];
}
