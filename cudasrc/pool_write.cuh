// The way of a new key or value into the pool: its place, and its scale where the storage is quantised.
// -D STORAGE HEAD_DIM
#pragma once
#include "softmax.cuh"

#define POOL_PARAMETERS                                                                                  \
    const int64 block_stride, const int64 head_stride, const int64 value_stride, const int64 scale_offset, /* bytes */ \
        const int block_shift, const int num_kv_heads

constexpr int kElements = lane_elements(STORAGE);
constexpr int kPieces = HEAD_DIM / kElements;  // stores of a row
constexpr float kSmallestPeak = 1e-30f;        // a quantised row below it is stored as zeros

struct PoolRow {
    uint8* elements;  // HEAD_DIM of the storage type
    float* scale;
};

__device__ __forceinline__ PoolRow find_row(uint8* pool, int64 slot, bool is_value, int64 head, POOL_PARAMETERS) {
    const int64 offset = slot & ((1 << block_shift) - 1);
    uint8* block = pool + (slot >> block_shift) * block_stride;
    PoolRow row;
    row.elements = block + is_value * value_stride + head * head_stride + offset * HEAD_DIM * storage_bytes(STORAGE);
    row.scale = reinterpret_cast<float*>(block + scale_offset) + ((is_value * num_kv_heads + head) << block_shift) + offset;
    return row;
}

// Divide the row that a warp holds by its scale and return the scale. Lanes beyond the row hold zeros; all take part.
// A row below the smallest peak becomes zeros with a scale of 0. One that is not finite throughout gets a scale that is
// not a number: it reads as that, all of it, as its own elements would from wider storage.
__device__ __forceinline__ float quantize(float (&elements)[kElements]) {
    constexpr float kLargest = largest_stored(STORAGE);
    float peak = 0.0f;
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < kElements; i++) {
        peak = fmaxf(peak, fabsf(elements[i]));
        is_finite = is_finite && fabsf(elements[i]) < POSITIVE_INFINITY;  // false for what is not a number
    }
    is_finite = __all_sync(~0u, is_finite);
    peak = warp_max(peak);
    const bool is_stored = is_finite && peak >= kSmallestPeak;
    const float factor = kLargest / peak;
#pragma unroll
    for (int i = 0; i < kElements; i++) elements[i] = is_stored ? elements[i] * factor : 0.0f;
    return is_stored ? peak / kLargest : is_finite ? 0.0f : NOT_A_NUMBER;
}
