// y = silu(gate) * up, a thread per element.
#include "numbers.cuh"

extern "C" __global__ void silu_mul(const float* __restrict__ gate, const float* __restrict__ up,
                                    float* __restrict__ y, const int64 count) {
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i < count) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}
