// Paged attention on CUDA cores: any storage type, float32 arithmetic throughout.
//
// Grid: (query tiles, KV heads, partitions); CTA: 4 warps. K and V tiles stream through a double buffer by cp.async.
// Scores: 4 lanes share a token, each takes every fourth piece of its row, so a key is read from shared memory once
// for all rows. Softmax: a warp per row. Values: a thread owns 16 bytes of the head dim for a quarter or so of the
// tokens; the parts meet at the end.
//
// -D HEAD_DIM STORAGE NUM_ROWS (1..8 rows of the query tile) TILE_TOKENS NUM_WARPS=4
#include "attend.cuh"

constexpr int kElements = lane_elements(STORAGE);
constexpr int kPieces = HEAD_DIM / kElements;  // what a thread reads at once
constexpr int kPieceBytes = kElements * storage_bytes(STORAGE);
constexpr int kLanesPerToken = 4;
constexpr int kTokensPerPass = kThreads / kLanesPerToken;
constexpr int kPasses = (TILE_TOKENS + kTokensPerPass - 1) / kTokensPerPass;
constexpr int kScoreStride = TILE_TOKENS + 8;
constexpr int kRowsPerWarp = (NUM_ROWS + NUM_WARPS - 1) / NUM_WARPS;

__device__ constexpr int power_below(int value) { return value >= 32 ? 32 : value >= 16 ? 16 : value >= 8 ? 8 : value >= 4 ? 4 : 2; }
constexpr int kGroups = power_below(kThreads / kPieces);  // thread groups, each with its own tokens
constexpr int kTokensPerGroup = TILE_TOKENS / kGroups;
constexpr int kTokensPerRead = kTokensPerGroup >= 4 ? 4 : kTokensPerGroup;
static_assert(kTokensPerGroup >= 1, "more thread groups than tokens");

// Products of the tile's keys with all rows into `scores` [NUM_ROWS, kScoreStride].
__device__ __forceinline__ void multiply_keys(const uint8* keys, const float* query, float* scores) {
    const int lane = threadIdx.x & 31, slice = lane >> 3;
    const int first = (threadIdx.x >> 5) * 8 + (lane & 7);
    if (first >= TILE_TOKENS) return;  // whole warps only
    float sums[kPasses][NUM_ROWS];
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++)
#pragma unroll
        for (int row = 0; row < NUM_ROWS; row++) sums[pass][row] = 0.0f;
#pragma unroll 2
    for (int piece = slice; piece < kPieces; piece += kLanesPerToken) {
        float key[kPasses][kElements];
#pragma unroll
        for (int pass = 0; pass < kPasses; pass++)
            load_elements<STORAGE>(keys + (first + pass * kTokensPerPass) * kRowStride + piece * kPieceBytes, key[pass]);
#pragma unroll
        for (int row = 0; row < NUM_ROWS; row++)
#pragma unroll
            for (int part = 0; part < kElements; part += 4) {
                const float4 q = *reinterpret_cast<const float4*>(query + row * HEAD_DIM + piece * kElements + part);
#pragma unroll
                for (int pass = 0; pass < kPasses; pass++) {
                    float sum = sums[pass][row];
                    sum = fmaf(q.x, key[pass][part], sum), sum = fmaf(q.y, key[pass][part + 1], sum);
                    sum = fmaf(q.z, key[pass][part + 2], sum), sum = fmaf(q.w, key[pass][part + 3], sum);
                    sums[pass][row] = sum;
                }
            }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++)
#pragma unroll
        for (int row = 0; row < NUM_ROWS; row++) {
            float sum = sums[pass][row];
            sum += __shfl_xor_sync(~0u, sum, 8), sum += __shfl_xor_sync(~0u, sum, 16);
            if (slice == row % kLanesPerToken) scores[row * kScoreStride + first + pass * kTokensPerPass] = sum;
        }
}

// Add the tile's values, weighted, to this thread's part of every row's output.
__device__ __forceinline__ void add_values(const uint8* values, const float* weights, const float* factors,
                                           float (&outputs)[NUM_ROWS][kElements]) {
    const int piece = threadIdx.x % kPieces, group = threadIdx.x / kPieces;
    if (group >= kGroups) return;
#pragma unroll
    for (int row = 0; row < NUM_ROWS; row++)
#pragma unroll
        for (int i = 0; i < kElements; i++) outputs[row][i] *= factors[row];
#pragma unroll 1
    for (int round = 0; round < kTokensPerGroup / kTokensPerRead; round++) {
        const int token = (round * kGroups + group) * kTokensPerRead;
        float value[kTokensPerRead][kElements];
#pragma unroll
        for (int t = 0; t < kTokensPerRead; t++)
            load_elements<STORAGE>(values + (token + t) * kRowStride + piece * kPieceBytes, value[t]);
#pragma unroll
        for (int row = 0; row < NUM_ROWS; row++) {
            float weight[kTokensPerRead];
            const float* source = weights + row * kScoreStride + token;
            if constexpr (kTokensPerRead == 4) {
                const float4 four = *reinterpret_cast<const float4*>(source);
                weight[0] = four.x, weight[1] = four.y, weight[2] = four.z, weight[3] = four.w;
            } else {
#pragma unroll
                for (int t = 0; t < kTokensPerRead; t++) weight[t] = source[t];
            }
#pragma unroll
            for (int t = 0; t < kTokensPerRead; t++)
#pragma unroll
                for (int i = 0; i < kElements; i++) outputs[row][i] = fmaf(weight[t], value[t][i], outputs[row][i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attend(ATTEND_PARAMETERS) {
    extern __shared__ __align__(16) uint8 stages[];  // two stages; at the end the parts of the outputs
    __shared__ __align__(16) float query[NUM_ROWS * HEAD_DIM];
    __shared__ __align__(16) float scores[NUM_ROWS * kScoreStride];
    __shared__ float factors[NUM_ROWS];
    const int kv_head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Work work =
        find_work(tiles, context_lens, query_starts, output_starts, num_heads, num_kv_heads, min_partition, window);
    const int* table = block_tables + work.sequence * table_stride;
    const uint8* head_base = pool + kv_head * head_stride;
    const int64 scale_delta = scale_offset + kv_head * ((4ll << block_shift) - head_stride);
    const int64 value_scale_delta = num_kv_heads * (4ll << block_shift);

    if (work.begin < work.end)
        load_tile(stages, head_base, table, work.begin, work.end, block_stride, value_stride, scale_delta,
                  value_scale_delta, block_shift);
    for (int i = threadIdx.x; i < NUM_ROWS * HEAD_DIM; i += kThreads) {
        const int row = i / HEAD_DIM;
        query[i] = row < work.num_rows
                       ? queries[work.query_row(row, kv_head, num_heads) * HEAD_DIM + i % HEAD_DIM] : 0.0f;
    }
    SoftmaxState states[kRowsPerWarp];
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; r++) {
        const int row = warp + r * NUM_WARPS;
        states[r].init();
        if (sinks && blockIdx.z == 0 && row < work.num_rows) {
            states[r].max = sinks[work.head(row, kv_head)] * kLog2E;
            states[r].sum = states[r].max == NEGATIVE_INFINITY ? 0.0f : 1.0f;
        }
    }
    float outputs_part[NUM_ROWS][kElements];
#pragma unroll
    for (int row = 0; row < NUM_ROWS; row++)
#pragma unroll
        for (int i = 0; i < kElements; i++) outputs_part[row][i] = 0.0f;

    int stage = 0;
    for (int first = work.begin; first < work.end; first += TILE_TOKENS, stage ^= 1) {
        const uint8* tile = stages + stage * kStageBytes;
        wait_copies();
        __syncthreads();  // the tile is there, and nobody reads the other stage any more
        if (first + TILE_TOKENS < work.end)
            load_tile(stages + (stage ^ 1) * kStageBytes, head_base, table, first + TILE_TOKENS, work.end,
                      block_stride, value_stride, scale_delta, value_scale_delta, block_shift);
        multiply_keys(tile, query, scores);
        __syncthreads();
        const float* key_scales = reinterpret_cast<const float*>(tile + 2 * kTileBytes);
#pragma unroll
        for (int r = 0; r < kRowsPerWarp; r++) {
            const int row = warp + r * NUM_WARPS;
            if (row >= work.num_rows) {  // a whole warp; rows of no query weigh nothing
                if (row < NUM_ROWS) {
                    for (int t = lane; t < TILE_TOKENS; t += 32) scores[row * kScoreStride + t] = 0.0f;
                    if (lane == 0) factors[row] = 1.0f;
                }
                continue;
            }
            const int position = work.position(row);
            const float slope = alibi_slopes ? alibi_slopes[work.head(row, kv_head)] : 0.0f;
            float best = NEGATIVE_INFINITY;
            for (int t = lane; t < TILE_TOKENS; t += 32) {
                float product = scores[row * kScoreStride + t];
                if constexpr (is_quantized(STORAGE)) product *= key_scales[t];
                const float score =
                    transform_score(product, first + t, position, work.end, window, scale, soft_cap, slope);
                scores[row * kScoreStride + t] = score;
                best = fmaxf(best, score);
            }
            const float factor = states[r].raise(warp_max(best));
            float sum = 0.0f;
            for (int t = lane; t < TILE_TOKENS; t += 32) {
                float weight = states[r].weight(scores[row * kScoreStride + t]);
                sum += weight;
                if constexpr (is_quantized(STORAGE)) weight *= key_scales[TILE_TOKENS + t];
                scores[row * kScoreStride + t] = weight;
            }
            states[r].sum += warp_sum(sum);
            if (lane == 0) factors[row] = factor;
        }
        __syncthreads();
        add_values(tile + kTileBytes, scores, factors, outputs_part);
    }

    __syncthreads();  // the stages become the parts [kGroups, NUM_ROWS, HEAD_DIM]
    float* parts = reinterpret_cast<float*>(stages);
    const int piece = threadIdx.x % kPieces, group = threadIdx.x / kPieces;
    if (group < kGroups) {
#pragma unroll
        for (int row = 0; row < NUM_ROWS; row++)
#pragma unroll
            for (int i = 0; i < kElements; i += 4)
                *reinterpret_cast<float4*>(parts + (group * NUM_ROWS + row) * HEAD_DIM + piece * kElements + i) =
                    make_float4(outputs_part[row][i], outputs_part[row][i + 1], outputs_part[row][i + 2],
                                outputs_part[row][i + 3]);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; r++) {
        const int row = warp + r * NUM_WARPS;
        if (lane == 0 && row < work.num_rows) {
            factors[row] = states[r].normalizer();
            lses[blockIdx.z * num_queries * num_heads + work.output_row(row, kv_head, num_heads)] = states[r].lse();
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < work.num_rows * HEAD_DIM; i += kThreads) {
        const int row = i / HEAD_DIM;
        float sum = 0.0f;
#pragma unroll
        for (int g = 0; g < kGroups; g++) sum += parts[g * NUM_ROWS * HEAD_DIM + i];
        const int64 at = blockIdx.z * num_queries * num_heads + work.output_row(row, kv_head, num_heads);
        outputs[at * HEAD_DIM + i % HEAD_DIM] = sum * factors[row];
    }
}
