// x += y; y is repeated every `period` elements, so that a bias is added to each row.
#include "numbers.cuh"

extern "C" __global__ void add(float* __restrict__ x, const float* __restrict__ y, const int64 count,
                               const int64 period) {
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i < count) x[i] += y[i % period];
}
