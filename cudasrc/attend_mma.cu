// Paged attention on tensor cores (mma.sync m16n8k16), for storage of 16 and of 8 bits.
//
// Grid: (query tiles, KV heads, partitions); each warp owns 16 rows of the query tile, all warps share the K and V
// tiles, which stream through a double buffer by cp.async. Scores and outputs stay in registers; the accumulator of
// q.k is, element for element, the first operand of the product with V. The queries are float32: in bfloat16 they are
// split into a high and a low part (two products), in float16 one rounding of 2^-11 is left.
//
// Elements of 8 bits are exact in float16: each tile is widened once, in shared memory, for all warps. A key's scale
// multiplies its scores; a value's scale, relative to the largest seen, multiplies its weights, so that they stay
// within float16.
//
// -D HEAD_DIM STORAGE (1 to 4) NUM_WARPS NUM_ROWS=16*NUM_WARPS TILE_TOKENS
#include "attend.cuh"
#include "matrix.cuh"

constexpr int kSteps = HEAD_DIM / 16;
constexpr int kParts = STORAGE == BFLOAT16 ? 2 : 1;
constexpr int kWideStride = (HEAD_DIM / 8 | 1) * 16;  // of a row of 16-bit elements
constexpr bool kKeepQuery = HEAD_DIM <= 128;  // longer rows do not fit the registers: read again for each tile

// One 16 x 16 step of this warp's queries as operand A; `upper` and `lower` are this lane's two rows or null.
__device__ __forceinline__ void load_query(uint32 (&fragment)[kParts][4], const float* upper, const float* lower,
                                           int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float* row = i & 1 ? lower : upper;
        const int column = step * 16 + (i >> 1) * 8 + (threadIdx.x & 3) * 2;
        float2 pair = make_float2(0.0f, 0.0f);
        if (row) pair = clamp_queries(*reinterpret_cast<const float2*>(row + column));
        if constexpr (kParts == 2)
            pack_parts(fragment[0][i], fragment[kParts - 1][i], pair.x, pair.y);
        else
            fragment[0][i] = pack<kOperand>(pair.x, pair.y);
    }
}

// Widen K and V of a stage, [2, TILE_TOKENS] rows.
__device__ __forceinline__ void widen_tiles(uint8* wide, const uint8* stage) {
    constexpr int kChunks = HEAD_DIM / 8;
    for (int item = threadIdx.x; item < 2 * TILE_TOKENS * kChunks; item += kThreads) {
        const int row = item / kChunks, chunk = item % kChunks;
        const uint2 bytes = *reinterpret_cast<const uint2*>(stage + row * kRowStride + chunk * 8);
        *reinterpret_cast<uint4*>(wide + row * kWideStride + chunk * 16) =
            make_uint4(widen<0, 1>(bytes.x), widen<2, 3>(bytes.x), widen<0, 1>(bytes.y), widen<2, 3>(bytes.y));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attend_mma(ATTEND_PARAMETERS) {
    extern __shared__ __align__(16) uint8 stages[];  // two; behind them a stage's widened tiles
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

    SoftmaxState states[2];  // this lane's rows: lane / 4 and lane / 4 + 8; `sum` holds this lane's columns only
    const float* query_rows[2];
    int positions[2];
    float slopes[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = warp * 16 + (lane >> 2) + r * 8;
        const bool is_live = row < work.num_rows;
        query_rows[r] = is_live ? queries + work.query_row(row, kv_head, num_heads) * HEAD_DIM : nullptr;
        positions[r] = is_live ? work.position(row) : -1;
        slopes[r] = is_live && alibi_slopes ? alibi_slopes[work.head(row, kv_head)] : 0.0f;
        states[r].init();
        if (sinks && blockIdx.z == 0 && is_live) {
            states[r].max = sinks[work.head(row, kv_head)] * kLog2E;
            states[r].sum = states[r].max == NEGATIVE_INFINITY || (lane & 3) ? 0.0f : 1.0f;
        }
    }
    uint32 query[kKeepQuery ? kSteps : 1][kParts][4];
    if constexpr (kKeepQuery) {
#pragma unroll
        for (int step = 0; step < kSteps; step++) load_query(query[step], query_rows[0], query_rows[1], step);
    }
    float output[HEAD_DIM / 8][4];
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) output[n][i] = 0.0f;

    // keys before this one are visible to all rows, with nothing but the scale to apply
    const bool is_plain = soft_cap <= 0.0f && window <= 0 && !alibi_slopes;
    const int all_visible = is_plain ? min(work.position(0) + 1, work.end) : 0;
    const float plain_scale = scale * kLog2E;
    int stage = 0;
    float largest_scale = 0.0f;  // of the values seen: what quantised outputs are relative to
    for (int first = work.begin; first < work.end; first += TILE_TOKENS, stage ^= 1) {
        const uint8* tile = stages + stage * kStageBytes;
        const float* scales = reinterpret_cast<const float*>(tile + 2 * kTileBytes);  // of K, then of V
        wait_copies();
        __syncthreads();  // the tile is there, and nobody reads the other stage any more
        if (first + TILE_TOKENS < work.end)
            load_tile(stages + (stage ^ 1) * kStageBytes, head_base, table, first + TILE_TOKENS, work.end,
                      block_stride, value_stride, scale_delta, value_scale_delta, block_shift);
        if constexpr (is_quantized(STORAGE)) {
            widen_tiles(stages + 2 * kStageBytes, tile);
            __syncthreads();
        }
        constexpr int kStride = is_quantized(STORAGE) ? kWideStride : kRowStride;
        const uint32 keys = shared_address(is_quantized(STORAGE) ? stages + 2 * kStageBytes : tile);
        const uint32 values = keys + TILE_TOKENS * kStride;

        float scores[TILE_TOKENS / 8][4];
#pragma unroll
        for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
        // matrices of an ldmatrix.x4: tokens 0-7 and 8-15, each with the step's dims 0-7 and 8-15
        const uint32 key_lane = ((lane & 7) + (lane >> 4) * 8) * kStride + ((lane >> 3) & 1) * 16;
#pragma unroll(kKeepQuery ? kSteps : 1)
        for (int step = 0; step < kSteps; step++) {
            if constexpr (!kKeepQuery) load_query(query[0], query_rows[0], query_rows[1], step);
            const auto& a = query[kKeepQuery ? step : 0];
#pragma unroll
            for (int n = 0; n < TILE_TOKENS / 8; n += 2) {
                uint32 b[4];
                load_matrices(b, keys + key_lane + n * 8 * kStride + step * 32);
#pragma unroll
                for (int part = 0; part < kParts; part++) {
                    multiply(scores[n], a[part], b[0], b[1]);
                    multiply(scores[n + 1], a[part], b[2], b[3]);
                }
            }
        }

        float best[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
        if constexpr (is_quantized(STORAGE)) {
#pragma unroll
            for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[n][i] *= scales[n * 8 + (lane & 3) * 2 + (i & 1)] * kWidened;
        }
        if (first + TILE_TOKENS <= all_visible) {
#pragma unroll
            for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[n][i] *= plain_scale;
        } else {
#pragma unroll
            for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    scores[n][i] = transform_score(scores[n][i], first + n * 8 + (lane & 3) * 2 + (i & 1),
                                                   positions[i >> 1], work.end, window, scale, soft_cap, slopes[i >> 1]);
        }
#pragma unroll
        for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) best[i >> 1] = fmaxf(best[i >> 1], scores[n][i]);
        float shrink = 1.0f, inverse_scale = 0.0f;
        if constexpr (is_quantized(STORAGE)) {
            const float before = largest_scale;
            for (int t = lane; t < TILE_TOKENS; t += 32) largest_scale = fmaxf(largest_scale, scales[TILE_TOKENS + t]);
            largest_scale = warp_max(largest_scale);
            inverse_scale = invert_scale(largest_scale);
            if (largest_scale > 0.0f) shrink = before / largest_scale;
        }
        float factors[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 1));
            best[r] = fmaxf(best[r], __shfl_xor_sync(~0u, best[r], 2));
            factors[r] = states[r].raise(best[r]) * shrink;
        }
        if (__any_sync(~0u, factors[0] != 1.0f || factors[1] != 1.0f)) {  // rare once many keys were seen
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) output[n][i] *= factors[i >> 1];
        }
#pragma unroll
        for (int n = 0; n < TILE_TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = states[i >> 1].weight(scores[n][i]);
                states[i >> 1].sum += scores[n][i];
                if constexpr (is_quantized(STORAGE))
                    scores[n][i] *= scales[TILE_TOKENS + n * 8 + (lane & 3) * 2 + (i & 1)] * inverse_scale;
            }

        // matrices of an ldmatrix.x4.trans: tokens 0-7 and 8-15 of dims 0-7, then of dims 8-15
        const uint32 value_lane = (lane & 15) * kStride + (lane >> 4) * 16;
#pragma unroll
        for (int step = 0; step < TILE_TOKENS / 16; step++) {
            const uint32 a[4] = {
                pack<kOperand>(scores[2 * step][0], scores[2 * step][1]),
                pack<kOperand>(scores[2 * step][2], scores[2 * step][3]),
                pack<kOperand>(scores[2 * step + 1][0], scores[2 * step + 1][1]),
                pack<kOperand>(scores[2 * step + 1][2], scores[2 * step + 1][3]),
            };
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n += 2) {
                uint32 b[4];
                load_matrices_transposed(b, values + value_lane + step * 16 * kStride + n * 16);
                multiply(output[n], a, b[0], b[1]);
                multiply(output[n + 1], a, b[2], b[3]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        states[r].sum += __shfl_xor_sync(~0u, states[r].sum, 1);
        states[r].sum += __shfl_xor_sync(~0u, states[r].sum, 2);
        const int row = warp * 16 + (lane >> 2) + r * 8;
        if (row >= work.num_rows) continue;
        const int64 at = blockIdx.z * num_queries * num_heads + work.output_row(row, kv_head, num_heads);
        if ((lane & 3) == 0) lses[at] = states[r].lse();
        const float factor = states[r].normalizer() * (is_quantized(STORAGE) ? largest_scale * kWidened : 1.0f);
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; n++)
            *reinterpret_cast<float2*>(outputs + at * HEAD_DIM + n * 8 + (lane & 3) * 2) =
                make_float2(output[n][2 * r] * factor, output[n][2 * r + 1] * factor);
    }
}
