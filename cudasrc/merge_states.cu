// Merge partial attention results by their lse: partitions of one sequence, cascades, parts from other servers.
// A warp per (query, head), first a lane per part, then 16 bytes of the output a lane; an empty part (lse -inf) is
// never read, for its output may be anything.
#include "softmax.cuh"

constexpr int kQuads = 2;  // of a lane: head dims up to 256

extern "C" __global__ void merge_states(const float* __restrict__ outputs,  // [num_parts, num_rows, head_dim]
                                        const float* __restrict__ lses,     // [num_parts, num_rows]
                                        const int* __restrict__ queries,    // the place of each query, or null
                                        float* __restrict__ output,         // [all rows, head_dim]
                                        float* __restrict__ lse,            // [all rows]
                                        const int64 num_rows, const int num_parts, const int num_heads,
                                        const int head_dim) {
    const int64 row = (blockIdx.x * (int64)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31;
    if (row >= num_rows) return;  // whole warps only
    SoftmaxState state;
    state.init();
    for (int part = lane; part < num_parts; part += 32) state.raise(lses[part * num_rows + row] * kLog2E);
    state.max = warp_max(state.max);
    for (int part = lane; part < num_parts; part += 32) state.sum += state.weight(lses[part * num_rows + row] * kLog2E);
    state.sum = warp_sum(state.sum);
    const float factor = state.normalizer();
    float4 total[kQuads];
#pragma unroll
    for (int quad = 0; quad < kQuads; quad++) total[quad] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int first = 0; first < num_parts; first += 32) {
        const int mine = first + lane;
        const float own = mine < num_parts ? state.weight(lses[mine * num_rows + row] * kLog2E) * factor : 0.0f;
#pragma unroll 4
        for (int part = first; part < min(first + 32, num_parts); part++) {
            const float weight = __shfl_sync(~0u, own, part - first);
            if (weight == 0.0f) continue;  // the whole warp
#pragma unroll
            for (int quad = 0; quad < kQuads; quad++) {
                const int dim = (quad * 32 + lane) * 4;
                if (dim >= head_dim) continue;
                const float4 value =
                    *reinterpret_cast<const float4*>(outputs + (part * num_rows + row) * head_dim + dim);
                total[quad].x = fmaf(weight, value.x, total[quad].x);
                total[quad].y = fmaf(weight, value.y, total[quad].y);
                total[quad].z = fmaf(weight, value.z, total[quad].z);
                total[quad].w = fmaf(weight, value.w, total[quad].w);
            }
        }
    }
    const int64 target = queries ? queries[row / num_heads] * (int64)num_heads + row % num_heads : row;
#pragma unroll
    for (int quad = 0; quad < kQuads; quad++) {
        const int dim = (quad * 32 + lane) * 4;
        if (dim < head_dim) *reinterpret_cast<float4*>(output + target * head_dim + dim) = total[quad];
    }
    if (lane == 0) lse[target] = state.lse();
}
