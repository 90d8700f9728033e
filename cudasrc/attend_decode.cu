// Paged attention on tensor cores for up to 16 rows of queries: decoding, and short drafts, of grouped heads.
//
// Grid: (query tiles, KV heads, partitions). The warps of a CTA share the rows and divide the keys: each streams every
// NUM_WARPS-th tile of 16 keys through a ring of its own by cp.async, with a softmax state of its own, and never waits
// for another warp until all meet at the end. So many bytes are under way at any time, which is what decoding lives on.
//
// S[rows, keys] = Q K^T, then O^T[dims, rows] = V^T P^T: the accumulator of S is, element for element, the second
// operand of P^T, and 8 rows waste nothing of O. Queries and weights are split into a high and a low part, so that
// only the sums are rounded, as in float32. Elements of 8 bits are widened in registers: of the 16 dims of a step a
// lane takes 4 neighbours of a key, and two dims of V lie where the operand has rows 8 apart. A key's scale multiplies
// its scores; a value's scale, relative to the largest seen, its weights, so that they stay within float16.
//
// -D HEAD_DIM STORAGE (1 to 4) NUM_ROWS (8 or 16) NUM_WARPS TILE_TOKENS=16*NUM_WARPS STAGES
#include "attend.cuh"
#include "matrix.cuh"

constexpr int kTokens = 16;  // of a warp's tile
constexpr int kSteps = HEAD_DIM / 16;
constexpr int kStepsPerRead = is_quantized(STORAGE) ? 2 : 1;  // an ldmatrix.x4 reads 16 keys, 32 bytes each
constexpr int kRowTiles = NUM_ROWS / 8;
constexpr int kSideBytes = kTokens * kRowStride;  // K or V
constexpr int kRingBytes = 2 * kSideBytes + (is_quantized(STORAGE) ? 2 * kTokens * 4 : 0);  // of a slot
constexpr int kPartStride = HEAD_DIM + 4;  // floats of an output row: columns hit different banks
static_assert(STAGES * kRingBytes >= NUM_ROWS * kPartStride * 4, "a warp's outputs take the place of its ring");

// Where a warp's keys come from; offsets in bytes.
struct Keys {
    const uint8* base;  // of the KV head in block 0
    const int* table;
    int64 block_stride, value_stride, scale_delta, value_scale_delta;
    int block_shift, end;

    // The block of this lane's key of a tile.
    __device__ __forceinline__ int find_block(int first) const {
        const int token = first + (threadIdx.x & (kTokens - 1));
        return token < end ? table[token >> block_shift] : 0;
    }

    // Start the copies of a tile, `block` as by find_block; keys outside the work become zeros.
    __device__ __forceinline__ void load(uint8* slot, int first, int block) const {
        const int lane = threadIdx.x & 31, block_mask = (1 << block_shift) - 1;
        const uint32 target = shared_address(slot);
        if (first < end) {
#pragma unroll
            for (int start = 0; start < kTokens * kRowPieces; start += 32) {
                const int item = start + lane, row = item / kRowPieces, piece = item % kRowPieces;
                const int64 found = __shfl_sync(~0u, block, row & (kTokens - 1));
                if (kTokens * kRowPieces % 32 != 0 && item >= kTokens * kRowPieces) break;
                const bool valid = first + row < end;
                const uint8* source =
                    base + found * block_stride + ((first + row) & block_mask) * (int64)kRowBytes + piece * 16;
                copy16_async(target + row * kRowStride + piece * 16, source, valid);
                copy16_async(target + kSideBytes + row * kRowStride + piece * 16, source + value_stride, valid);
            }
            if constexpr (is_quantized(STORAGE)) {  // 16 scales of keys, 16 of values
                const int token = first + (lane & (kTokens - 1));
                const uint8* source = base + block * block_stride + scale_delta + (token & block_mask) * 4;
                copy4_async(target + 2 * kSideBytes + lane * 4, lane < kTokens ? source : source + value_scale_delta,
                            token < end);
            }
        }
        commit_copies();
    }
};

// The rows as operand A, both parts, for every lane: [kSteps, kRowTiles, 32] of {high, high, low, low}.
__device__ __forceinline__ void load_queries(uint4* fragments, const float* queries, const Work& work, int kv_head,
                                             int num_heads) {
    for (int item = threadIdx.x; item < kSteps * kRowTiles * 32; item += kThreads) {
        const int lane = item & 31, row = item / 32 % kRowTiles * 8 + (lane >> 2), step = item / (32 * kRowTiles);
        const int first = step * 16 + (lane & 3) * (is_quantized(STORAGE) ? 4 : 2);
        const int second = first + (is_quantized(STORAGE) ? 2 : 8);
        float2 pairs[2] = {make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f)};
        if (row < work.num_rows) {
            const float* source = queries + work.query_row(row, kv_head, num_heads) * HEAD_DIM;
            pairs[0] = clamp_queries(*reinterpret_cast<const float2*>(source + first));
            pairs[1] = clamp_queries(*reinterpret_cast<const float2*>(source + second));
        }
        uint4 parts;
        pack_parts(parts.x, parts.z, pairs[0].x, pairs[0].y);
        pack_parts(parts.y, parts.w, pairs[1].x, pairs[1].y);
        fragments[item] = parts;
    }
}

// scores += the rows' step times 8 keys' step {b0, b1}.
__device__ __forceinline__ void multiply_keys(float (&scores)[4], const uint4* fragments, int step, uint32 b0, uint32 b1) {
    const uint4 upper = fragments[step * kRowTiles * 32 + (threadIdx.x & 31)];
    uint4 lower = make_uint4(0, 0, 0, 0);
    if constexpr (kRowTiles == 2) lower = fragments[(step * kRowTiles + 1) * 32 + (threadIdx.x & 31)];
    const uint32 high[4] = {upper.x, lower.x, upper.y, lower.y}, low[4] = {upper.z, lower.z, upper.w, lower.w};
    multiply(scores, high, b0, b1);
    multiply(scores, low, b0, b1);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) attend_decode(ATTEND_PARAMETERS) {
    extern __shared__ __align__(16) uint8 stages[];  // [NUM_WARPS, STAGES] slots; at the end the warps' outputs
    __shared__ uint4 fragments[kSteps * kRowTiles * 32];
    __shared__ float maxima[NUM_WARPS][NUM_ROWS], sums[NUM_WARPS][NUM_ROWS];
    const int kv_head = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const Work work =
        find_work(tiles, context_lens, query_starts, output_starts, num_heads, num_kv_heads, min_partition, window);
    const Keys source = {pool + kv_head * head_stride, block_tables + work.sequence * table_stride, block_stride,
                         value_stride, scale_offset + kv_head * ((4ll << block_shift) - head_stride),
                         num_kv_heads * (4ll << block_shift), block_shift, work.end};
    uint8* ring = stages + warp * STAGES * kRingBytes;
    int ahead = work.begin + warp * kTokens, block = source.find_block(ahead);  // of the tile to be loaded next
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++, ahead += TILE_TOKENS) {
        source.load(ring + stage * kRingBytes, ahead, block);
        block = source.find_block(ahead + TILE_TOKENS);
    }
    load_queries(fragments, queries, work, kv_head, num_heads);

    SoftmaxState states[kRowTiles];  // of rows lane / 4 and lane / 4 + 8; `sum` holds this lane's columns only
    int positions[kRowTiles];
    float slopes[kRowTiles], output[kSteps][kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; r++) {
        const int row = (lane >> 2) + r * 8;
        const bool is_live = row < work.num_rows;
        positions[r] = is_live ? work.position(row) : -1;
        slopes[r] = is_live && alibi_slopes ? alibi_slopes[work.head(row, kv_head)] : 0.0f;
        states[r].init();
        if (sinks && blockIdx.z == 0 && warp == 0 && is_live) {
            states[r].max = sinks[work.head(row, kv_head)] * kLog2E;
            states[r].sum = states[r].max == NEGATIVE_INFINITY || (lane & 3) ? 0.0f : 1.0f;
        }
#pragma unroll
        for (int step = 0; step < kSteps; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) output[step][r][i] = 0.0f;
    }
    __syncthreads();  // the fragments are there

    // of an ldmatrix.x4: keys 0-7 with the step's first 16 bytes, with its second, keys 8-15 likewise
    const uint32 lane_row = ((lane & 7) + (lane >> 4) * 8) * kRowStride, lane_piece = ((lane >> 3) & 1) * 16;
    float largest_scale = 0.0f;  // of the values seen: what quantised outputs are relative to
    int slot = 0;
    for (int first = work.begin + warp * kTokens; first < work.end; first += TILE_TOKENS) {
        wait_copies_but<STAGES - 2>();
        __syncwarp();  // the tile is there, and no lane reads the slot before it any more
        source.load(ring + (slot == 0 ? STAGES - 1 : slot - 1) * kRingBytes, ahead, block);
        ahead += TILE_TOKENS;
        block = source.find_block(ahead);
        const uint8* tile = ring + slot * kRingBytes;
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        const float* scales = reinterpret_cast<const float*>(tile + 2 * kSideBytes);  // of K, then of V
        const uint32 keys = shared_address(tile) + lane_row, values = keys + kSideBytes;

        float scores[2][4] = {{0.0f, 0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f, 0.0f}};  // of keys 0-7 and 8-15
#pragma unroll
        for (int step = 0; step < kSteps; step += kStepsPerRead) {
            uint32 b[4];
            load_matrices(b, keys + step / kStepsPerRead * 32 + (step + kStepsPerRead <= kSteps ? lane_piece : 0));
            if constexpr (!is_quantized(STORAGE)) {
                multiply_keys(scores[0], fragments, step, b[0], b[1]);
                multiply_keys(scores[1], fragments, step, b[2], b[3]);
            } else {
#pragma unroll
                for (int i = 0; i < 2 && step + i < kSteps; i++) {
                    multiply_keys(scores[0], fragments, step + i, widen<0, 1>(b[i]), widen<2, 3>(b[i]));
                    multiply_keys(scores[1], fragments, step + i, widen<0, 1>(b[2 + i]), widen<2, 3>(b[2 + i]));
                }
            }
        }

        float shrink = 1.0f, inverse_scale = 1.0f;
        if constexpr (is_quantized(STORAGE)) {
            const float before = largest_scale;
            largest_scale = fmaxf(largest_scale, warp_max(scales[kTokens + (lane & (kTokens - 1))]));
            inverse_scale = invert_scale(largest_scale);
            if (largest_scale > 0.0f) shrink = before / largest_scale;
        }
        uint32 high[kRowTiles][2], low[kRowTiles][2];  // the weights as operand B
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
            float best = NEGATIVE_INFINITY;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& score = scores[i >> 1][2 * r + (i & 1)];
                const int token = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
                if constexpr (is_quantized(STORAGE)) score *= scales[token] * kWidened;
                score = transform_score(score, first + token, positions[r], work.end, window, scale, soft_cap, slopes[r]);
                best = fmaxf(best, score);
            }
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
            best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
            const float factor = states[r].raise(best) * shrink;
#pragma unroll
            for (int n = 0; n < 2; n++) {
                float weights[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    weights[i] = states[r].weight(scores[n][2 * r + i]);
                    states[r].sum += weights[i];
                    if constexpr (is_quantized(STORAGE))
                        weights[i] *= scales[kTokens + n * 8 + (lane & 3) * 2 + i] * inverse_scale;
                }
                pack_parts(high[r][n], low[r][n], weights[0], weights[1]);
            }
            // a lane's columns of O^T are rows 2 (lane % 4) and the next, whose factors their own lanes know
            if (!__any_sync(~0u, factor != 1.0f)) continue;  // often so once many keys were seen
            const float factors[2] = {__shfl_sync(~0u, factor, (lane & 3) * 8), __shfl_sync(~0u, factor, (lane & 3) * 8 + 4)};
#pragma unroll
            for (int step = 0; step < kSteps; step++)
#pragma unroll
                for (int i = 0; i < 4; i++) output[step][r][i] *= factors[i & 1];
        }

#pragma unroll
        for (int step = 0; step < kSteps; step += kStepsPerRead) {
            uint32 v[4];
            load_matrices_transposed(
                v, values + step / kStepsPerRead * 32 + (step + kStepsPerRead <= kSteps ? lane_piece : 0));
#pragma unroll
            for (int i = 0; i < kStepsPerRead && step + i < kSteps; i++) {
                uint32 a[4] = {v[0], v[1], v[2], v[3]};
                if constexpr (is_quantized(STORAGE)) {
                    a[0] = widen<0, 2>(v[i]), a[1] = widen<1, 3>(v[i]);
                    a[2] = widen<0, 2>(v[2 + i]), a[3] = widen<1, 3>(v[2 + i]);
                }
#pragma unroll
                for (int r = 0; r < kRowTiles; r++) {
                    multiply(output[step + i][r], a, high[r][0], high[r][1]);
                    multiply(output[step + i][r], a, low[r][0], low[r][1]);
                }
            }
        }
    }

    __syncwarp();  // the ring becomes this warp's outputs [NUM_ROWS, kPartStride]
    float* part = reinterpret_cast<float*>(ring);
    const float unit = is_quantized(STORAGE) ? largest_scale * kWidened : 1.0f;
#pragma unroll
    for (int r = 0; r < kRowTiles; r++) {
#pragma unroll
        for (int step = 0; step < kSteps; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int dim = is_quantized(STORAGE) ? (lane >> 2) * 2 + (i >> 1) : (lane >> 2) + (i >> 1) * 8;
                part[(r * 8 + (lane & 3) * 2 + (i & 1)) * kPartStride + step * 16 + dim] = output[step][r][i] * unit;
            }
        float sum = states[r].sum;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if ((lane & 3) == 0) maxima[warp][(lane >> 2) + r * 8] = states[r].max, sums[warp][(lane >> 2) + r * 8] = sum;
    }
    __syncthreads();
    for (int item = threadIdx.x; item < work.num_rows * (HEAD_DIM / 4); item += kThreads) {
        const int row = item / (HEAD_DIM / 4), dim = item % (HEAD_DIM / 4) * 4;
        SoftmaxState state;
        state.init();
#pragma unroll
        for (int w = 0; w < NUM_WARPS; w++) state.raise(maxima[w][row]);
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < NUM_WARPS; w++) {
            const float weight = state.weight(maxima[w][row]);
            const float4 value = *reinterpret_cast<const float4*>(
                stages + w * STAGES * kRingBytes + (row * kPartStride + dim) * 4);
            state.sum = fmaf(weight, sums[w][row], state.sum);
            total.x = fmaf(weight, value.x, total.x), total.y = fmaf(weight, value.y, total.y);
            total.z = fmaf(weight, value.z, total.z), total.w = fmaf(weight, value.w, total.w);
        }
        const int64 at = blockIdx.z * num_queries * num_heads + work.output_row(row, kv_head, num_heads);
        const float factor = state.normalizer();
        *reinterpret_cast<float4*>(outputs + at * HEAD_DIM + dim) =
            make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
        if (dim == 0) lses[at] = state.lse();
    }
}
