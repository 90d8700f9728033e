// Store new keys and values at their slots, converted to the pool's storage type.
//
// Plain storage: a thread per 16 bytes of the pool. Quantised: a warp per (token, KV head, K or V), which first finds
// the row's largest magnitude; its scale is that over 448.
//
// -D HEAD_DIM STORAGE SOURCE (storage type of the sources)
#include "softmax.cuh"

constexpr int kElements = lane_elements(STORAGE);
constexpr int kPieces = HEAD_DIM / kElements;

template <int kCount>
__device__ __forceinline__ void load_source(const void* source, int64 index, float (&values)[kCount]) {
    const uint8* address = reinterpret_cast<const uint8*>(source) + index * storage_bytes(SOURCE);
    if constexpr (lane_elements(SOURCE) == kCount) {
        load_elements<SOURCE>(address, values);
    } else if constexpr (SOURCE == FLOAT32) {  // 8 elements by two reads
        const float4 low = reinterpret_cast<const float4*>(address)[0], high = reinterpret_cast<const float4*>(address)[1];
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    } else {  // 4 elements of 2 bytes
        const uint2 four = *reinterpret_cast<const uint2*>(address);
        values[0] = unpack<SOURCE>(four.x & 0xFFFFu), values[1] = unpack<SOURCE>(four.x >> 16);
        values[2] = unpack<SOURCE>(four.y & 0xFFFFu), values[3] = unpack<SOURCE>(four.y >> 16);
    }
}

extern "C" __global__ void write_kv(uint8* __restrict__ pool,          // layer's first byte of block 0
                                    const void* __restrict__ keys,     // [num_tokens, num_kv_heads, HEAD_DIM]
                                    const void* __restrict__ values,   // as keys
                                    const int64* __restrict__ slots,   // [num_tokens], -1: do not write
                                    const int64 num_tokens, const int64 block_stride, const int64 head_stride,
                                    const int64 value_stride, const int64 scale_offset, const int block_shift,
                                    const int num_kv_heads) {
    const int64 thread = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    const int64 item = STORAGE == FLOAT8 ? thread / 32 : thread / kPieces;  // (K or V, token, KV head)
    const int piece = STORAGE == FLOAT8 ? thread % 32 : thread % kPieces;
    const int64 per_side = num_tokens * num_kv_heads;
    if (item >= 2 * per_side) return;
    const bool is_value = item >= per_side;
    const int64 row = is_value ? item - per_side : item, token = row / num_kv_heads, head = row % num_kv_heads;
    const int64 slot = slots[token];
    if (slot < 0) return;
    const int64 offset = slot & ((1 << block_shift) - 1);
    uint8* block = pool + (slot >> block_shift) * block_stride;
    uint8* target = block + is_value * value_stride + head * head_stride + offset * HEAD_DIM * storage_bytes(STORAGE);
    float elements[kElements];
    if (piece < kPieces) {
        load_source(is_value ? values : keys, row * HEAD_DIM + piece * kElements, elements);
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) elements[i] = 0.0f;
    }
    if constexpr (STORAGE == FLOAT8) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < kElements; i++) largest = fmaxf(largest, fabsf(elements[i]));
        largest = warp_max(largest);
        const float inverse = largest > 0.0f ? 448.0f / largest : 0.0f;
#pragma unroll
        for (int i = 0; i < kElements; i++) elements[i] *= inverse;
        const int64 scale = ((is_value * num_kv_heads + head) << block_shift) + offset;
        if (piece == 0) reinterpret_cast<float*>(block + scale_offset)[scale] = largest / 448.0f;
        if (piece >= kPieces) return;
    }
    store_elements<STORAGE>(target + piece * kElements * storage_bytes(STORAGE), elements);
}
