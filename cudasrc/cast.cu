// Convert an array. -D SOURCE, TARGET: float32, float16 or bfloat16.
#include "numbers.cuh"

extern "C" __global__ void cast(const void* __restrict__ source, void* __restrict__ target, const int64 count) {
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float value = load_element(source, SOURCE, i);
    if constexpr (TARGET == FLOAT32)
        reinterpret_cast<float*>(target)[i] = value;
    else
        reinterpret_cast<uint16*>(target)[i] = (uint16)pack<TARGET>(value, 0.0f);
}
