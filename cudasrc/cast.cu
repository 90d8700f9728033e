// Convert an array. A finite number that float16 cannot hold becomes its largest one, so that a product of activations
// never overflows in silence; infinities and what is not a number stay what they are.
// -D SOURCE, TARGET: float32, float16 or bfloat16.
#include "numbers.cuh"

extern "C" __global__ void cast(const void* __restrict__ source, void* __restrict__ target, const int64 count) {
    const int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (i >= count) return;
    float value = load_element(source, SOURCE, i);
    if constexpr (TARGET == FLOAT16) value = clamp_to_half(value);
    if constexpr (TARGET == FLOAT32)
        reinterpret_cast<float*>(target)[i] = value;
    else
        reinterpret_cast<uint16*>(target)[i] = (uint16)pack<TARGET>(value, 0.0f);
}
