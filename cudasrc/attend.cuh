// What both attention paths share: arguments, work of a CTA, the paged tile loader, the score's transformation.
//
// A CTA owns (query tile, KV head, partition). The rows of a tile are (query position, head of the group) pairs, so
// K and V are fetched once for the whole group. A sequence's visible keys are divided into partitions here, on the
// device, from its length: a captured launch stays right when lengths change. An empty partition has lse = -inf.
#pragma once
#include "async_copy.cuh"
#include "softmax.cuh"

#define ATTEND_PARAMETERS                                                                          \
    const uint8 *__restrict__ pool,              /* layer's first byte of block 0 */                \
        const float *__restrict__ queries,       /* [num_queries, num_heads, HEAD_DIM] */           \
        const int *__restrict__ block_tables,    /* [num_sequences, table_stride] */                \
        const int *__restrict__ context_lens,    /* [num_sequences] */                              \
        const int *__restrict__ query_starts,    /* [num_sequences + 1] */                          \
        const int *__restrict__ output_starts,   /* [num_sequences]: as query_starts, of the outputs */ \
        const int2 *__restrict__ tiles,          /* [num_tiles]: sequence, number of its tile */    \
        const float *__restrict__ alibi_slopes,  /* [num_heads] or null */                          \
        const float *__restrict__ sinks,         /* [num_heads] or null */                          \
        float *__restrict__ outputs,             /* [num_partitions, num_queries, num_heads, HEAD_DIM] */ \
        float *__restrict__ lses,                /* [num_partitions, num_queries, num_heads] */     \
        const int64 table_stride, const int64 num_queries, const int64 block_stride, /* bytes */    \
        const int64 head_stride, const int64 value_stride, const int64 scale_offset, /* bytes */    \
        const int block_shift,                   /* log2 of the block size */                       \
        const int num_heads, const int num_kv_heads, const int min_partition, const int window,     \
        const float scale, const float soft_cap

constexpr int kRowBytes = HEAD_DIM * storage_bytes(STORAGE);
constexpr int kRowPieces = kRowBytes / 16;
constexpr int kRowStride = (kRowPieces | 1) * 16;  // an odd number of 16-byte pieces: columns hit different banks
constexpr int kTileBytes = TILE_TOKENS * kRowStride;
constexpr int kScaleBytes = is_quantized(STORAGE) ? TILE_TOKENS * 4 : 0;
constexpr int kStageBytes = 2 * (kTileBytes + kScaleBytes);  // K, V, their scales
constexpr int kThreads = NUM_WARPS * 32;

// The keys [begin, end) that a CTA attends to, and where its rows lie.
struct Work {
    int sequence, first_row, num_rows, group_size, first_position;
    int begin, end;
    int64 first_query, first_output;

    __device__ __forceinline__ int position(int row) const { return first_position + (first_row + row) / group_size; }
    __device__ __forceinline__ int head(int row, int kv_head) const {
        return kv_head * group_size + (first_row + row) % group_size;
    }
    // Index of a row among the batch's queries, and in [num_queries, num_heads] of the outputs.
    __device__ __forceinline__ int64 query_row(int row, int kv_head, int num_heads) const {
        return (first_query + (first_row + row) / group_size) * num_heads + head(row, kv_head);
    }
    __device__ __forceinline__ int64 output_row(int row, int kv_head, int num_heads) const {
        return (first_output + (first_row + row) / group_size) * num_heads + head(row, kv_head);
    }
};

__device__ __forceinline__ Work find_work(const int2* tiles, const int* context_lens, const int* query_starts,
                                          const int* output_starts, int num_heads, int num_kv_heads, int min_partition, int window) {
    Work work;
    const int2 tile = tiles[blockIdx.x];
    work.sequence = tile.x;
    work.group_size = num_heads / num_kv_heads;
    work.first_query = query_starts[tile.x], work.first_output = output_starts[tile.x];
    const int query_len = query_starts[tile.x + 1] - query_starts[tile.x];
    const int context_len = context_lens[tile.x];
    work.first_row = tile.y * NUM_ROWS;
    work.num_rows = min(NUM_ROWS, query_len * work.group_size - work.first_row);
    work.first_position = context_len - query_len;
    const int oldest = work.position(0), newest = work.position(work.num_rows - 1);
    const int first_key = window > 0 ? max(0, oldest - window + 1) : 0;
    const int num_keys = newest + 1 - first_key;
    const int even = (num_keys + gridDim.z - 1) / gridDim.z;
    const int length = max(min_partition, (even + TILE_TOKENS - 1) / TILE_TOKENS * TILE_TOKENS);
    const int64 begin = first_key + (int64)blockIdx.z * length;
    work.begin = (int)min(begin, (int64)newest + 1);
    work.end = (int)min(begin + length, (int64)newest + 1);
    return work;
}

// Start the copies of keys [first, first + TILE_TOKENS) of K and V; tokens outside the work become zeros, for a slot
// nobody wrote may hold NaN and 0 * NaN is NaN.
__device__ __forceinline__ void load_tile(uint8* stage, const uint8* head_base, const int* table, int first, int end,
                                          int64 block_stride, int64 value_stride, int64 scale_delta,
                                          int64 value_scale_delta, int block_shift) {
    const int block_mask = (1 << block_shift) - 1;
    const uint32 keys = shared_address(stage), values = keys + kTileBytes;
#pragma unroll 4
    for (int start = 0; start < TILE_TOKENS * kRowPieces; start += kThreads) {
        const int item = start + threadIdx.x;
        if (TILE_TOKENS * kRowPieces % kThreads != 0 && item >= TILE_TOKENS * kRowPieces) break;
        const int row = item / kRowPieces, piece = item % kRowPieces, token = first + row;
        const bool valid = token < end;
        const int64 block = valid ? table[token >> block_shift] : 0;
        const uint8* source = head_base + block * block_stride + (token & block_mask) * (int64)kRowBytes + piece * 16;
        const uint32 target = row * kRowStride + piece * 16;
        copy16_async(keys + target, source, valid);
        copy16_async(values + target, source + value_stride, valid);
    }
    if constexpr (is_quantized(STORAGE)) {
        for (int row = threadIdx.x; row < TILE_TOKENS; row += kThreads) {
            const int token = first + row;
            const bool valid = token < end;
            const int64 block = valid ? table[token >> block_shift] : 0;
            const uint8* source = head_base + block * block_stride + scale_delta + (token & block_mask) * 4;
            copy4_async(keys + 2 * kTileBytes + row * 4, source, valid);
            copy4_async(keys + 2 * kTileBytes + kScaleBytes + row * 4, source + value_scale_delta, valid);
        }
    }
    commit_copies();
}

// From q.k to the score in units of log2: scale, soft cap, ALiBi, mask.
__device__ __forceinline__ float transform_score(float product, int key, int position, int end, int window,
                                                 float scale, float soft_cap, float slope) {
    float score = product * scale;
    if (soft_cap > 0.0f) score = soft_cap * tanhf(score / soft_cap);
    score += slope * (float)(key - position);
    const bool visible = key <= position && key < end && (window <= 0 || key > position - window);
    return visible ? score * kLog2E : NEGATIVE_INFINITY;
}
