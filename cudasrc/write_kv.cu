// Store new keys and values at their slots, converted to the pool's storage type.
//
// Plain storage: a thread per 16 bytes of the pool. Quantised: a warp per (token, KV head, K or V), which first finds
// the row's largest magnitude.
//
// -D HEAD_DIM STORAGE SOURCE (storage type of the sources)
#include "pool_write.cuh"

constexpr int kLanes = is_quantized(STORAGE) ? 32 : kPieces;  // threads of a row

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
                                    const int64 num_tokens, POOL_PARAMETERS) {
    const int64 thread = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    const int64 item = thread / kLanes, per_side = num_tokens * num_kv_heads;  // item: (K or V, token, KV head)
    const int piece = thread % kLanes;
    if (item >= 2 * per_side) return;
    const bool is_value = item >= per_side;
    const int64 row = is_value ? item - per_side : item, token = row / num_kv_heads;
    const int64 slot = slots[token];
    if (slot < 0) return;
    const PoolRow target = find_row(pool, slot, is_value, row % num_kv_heads, block_stride, head_stride, value_stride,
                                    scale_offset, block_shift, num_kv_heads);
    float elements[kElements];
    if (piece < kPieces) {
        load_source(is_value ? values : keys, row * HEAD_DIM + piece * kElements, elements);
    } else {
#pragma unroll
        for (int i = 0; i < kElements; i++) elements[i] = 0.0f;
    }
    if constexpr (is_quantized(STORAGE)) {
        const float scale = quantize(elements);
        if (piece == 0) *target.scale = scale;
        if (piece >= kPieces) return;
    }
    store_elements<STORAGE>(target.elements + piece * kElements * storage_bytes(STORAGE), elements);
}
