// Rotate queries and keys in place, and store keys and values at their slots in the pool's storage type.
//
// Grid: (tokens, parts of their heads); a warp per row, one after another. A CTA finds its token's sines once, for all
// heads. A row passes through shared memory: loaded and stored 16 bytes a thread, rotated element by element, for the
// partner of an element may be anywhere in the row.
//
// -D HEAD_DIM STORAGE
#include "pool_write.cuh"
#include "rotary.cuh"

constexpr int kWarps = 4;
constexpr int kQuads = HEAD_DIM / 4;                     // 16-byte pieces of a float32 row
static_assert(!is_quantized(STORAGE) || kPieces <= 32, "a warp holds a quantised row");
constexpr int kPerLane = (HEAD_DIM + 31) / 32;           // elements of a row that a lane rotates

// Element `i` of a row after rotation; behind the pairs nothing changes.
__device__ __forceinline__ float rotate(const float* row, const float2* turns, int i, int num_pairs, bool interleaved) {
    if (i >= 2 * num_pairs) return row[i];
    const bool is_second = interleaved ? i & 1 : i >= num_pairs;
    const int pair = interleaved ? i >> 1 : is_second ? i - num_pairs : i;
    const int first = interleaved ? 2 * pair : pair, second = interleaved ? first + 1 : pair + num_pairs;
    return is_second ? rotate_second(row[first], row[second], turns[pair])
                     : rotate_first(row[first], row[second], turns[pair]);
}

__device__ __forceinline__ void copy_row(float* target, const float* source) {
#pragma unroll
    for (int quad = threadIdx.x & 31; quad < kQuads; quad += 32)
        reinterpret_cast<float4*>(target)[quad] = reinterpret_cast<const float4*>(source)[quad];
}

__device__ __forceinline__ void store_row(const PoolRow& target, const float* row) {
#pragma unroll
    for (int start = 0; start < kPieces; start += 32) {
        const int piece = start + (threadIdx.x & 31);
        float elements[kElements];
#pragma unroll
        for (int i = 0; i < kElements; i += 4) {
            float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (piece < kPieces) four = *reinterpret_cast<const float4*>(row + piece * kElements + i);
            elements[i] = four.x, elements[i + 1] = four.y, elements[i + 2] = four.z, elements[i + 3] = four.w;
        }
        if constexpr (is_quantized(STORAGE)) {
            const float scale = quantize(elements);
            if (piece == 0) *target.scale = scale;
        }
        if (piece < kPieces)
            store_elements<STORAGE>(target.elements + piece * kElements * storage_bytes(STORAGE), elements);
    }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps) rope_write_kv(
    uint8* __restrict__ pool,            // layer's first byte of block 0
    float* __restrict__ queries,         // [num_tokens, num_heads, HEAD_DIM]
    float* __restrict__ keys,            // [num_tokens, num_kv_heads, HEAD_DIM]
    float* __restrict__ values,          // as keys; only read
    const int* __restrict__ positions,   // [num_tokens]
    const int64* __restrict__ slots,     // [num_tokens], -1: do not write
    const float* __restrict__ inv_freq,  // [num_pairs], radians a position
    POOL_PARAMETERS, const int num_heads, const int num_pairs, const int interleaved, const float scale) {
    __shared__ float2 turns[HEAD_DIM / 2];
    __shared__ __align__(16) float rows[kWarps][HEAD_DIM];
    const int64 token = blockIdx.x, slot = slots[token];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int pair = threadIdx.x; pair < num_pairs; pair += 32 * kWarps)
        turns[pair] = find_turn(positions[token], inv_freq[pair], scale);
    __syncthreads();
    float* row = rows[warp];
    for (int i = blockIdx.y * kWarps + warp; i < num_heads + 2 * num_kv_heads; i += gridDim.y * kWarps) {
        const bool is_query = i < num_heads, is_value = i >= num_heads + num_kv_heads;
        if (is_value && slot < 0) continue;
        const int head = is_query ? i : is_value ? i - num_heads - num_kv_heads : i - num_heads;
        float* source = (is_query ? queries : is_value ? values : keys) +
                        (token * (is_query ? num_heads : num_kv_heads) + head) * HEAD_DIM;
        copy_row(row, source);
        __syncwarp();
        if (!is_value) {
            float rotated[kPerLane];
#pragma unroll
            for (int r = 0; r < kPerLane; r++)
                if (lane + 32 * r < HEAD_DIM) rotated[r] = rotate(row, turns, lane + 32 * r, num_pairs, interleaved);
            __syncwarp();
#pragma unroll
            for (int r = 0; r < kPerLane; r++)
                if (lane + 32 * r < HEAD_DIM) row[lane + 32 * r] = rotated[r];
            __syncwarp();
            copy_row(source, row);
        }
        if (!is_query && slot >= 0)
            store_row(find_row(pool, slot, is_value, head, block_stride, head_stride, value_stride, scale_offset,
                               block_shift, num_kv_heads), row);
        __syncwarp();  // the next row takes this one's place
    }
}
