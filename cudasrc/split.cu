// Copy columns [first, first + width) of rows of x into a contiguous array; a thread per element.
#include "numbers.cuh"

extern "C" __global__ void split(const float* __restrict__ x,  // [num_rows, stride]
                                 float* __restrict__ y,        // [num_rows, width]
                                 const int64 count, const int64 width, const int64 stride, const int64 first) {
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i < count) y[i] = x[i / width * stride + first + i % width];
}
