// Merge partial attention results by their lse: partitions of one sequence, cascades, parts from other servers.
// A warp per (query, head); an empty part (lse -inf) is never read, for its output may be anything.
#include "softmax.cuh"

extern "C" __global__ void merge_states(const float* __restrict__ outputs,  // [num_parts, num_rows, head_dim]
                                        const float* __restrict__ lses,     // [num_parts, num_rows]
                                        float* __restrict__ output,         // [num_rows, head_dim]
                                        float* __restrict__ lse,            // [num_rows]
                                        const int64 num_rows, const int num_parts, const int head_dim) {
    const int64 row = (blockIdx.x * (int64)blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x & 31;
    if (row >= num_rows) return;
    SoftmaxState state;
    state.init();
    for (int part = 0; part < num_parts; part++) state.raise(lses[part * num_rows + row] * kLog2E);
    for (int part = 0; part < num_parts; part++) state.sum += state.weight(lses[part * num_rows + row] * kLog2E);
    const float factor = state.normalizer();
    for (int dim = lane * 4; dim < head_dim; dim += 128) {
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int part = 0; part < num_parts; part++) {
            const float weight = state.weight(lses[part * num_rows + row] * kLog2E) * factor;
            if (weight == 0.0f) continue;
            const float4 value =
                *reinterpret_cast<const float4*>(outputs + (part * num_rows + row) * head_dim + dim);
            sum.x = fmaf(weight, value.x, sum.x), sum.y = fmaf(weight, value.y, sum.y);
            sum.z = fmaf(weight, value.z, sum.z), sum.w = fmaf(weight, value.w, sum.w);
        }
        *reinterpret_cast<float4*>(output + row * head_dim + dim) = sum;
    }
    if (lane == 0) lse[row] = state.lse();
}
