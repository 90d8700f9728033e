// Rotary position embedding of one pair. The angle is reduced to half turns in float64, for a float32 product of
// position 100,000 has lost the third decimal of its angle.
#pragma once
#include "numbers.cuh"

// The cosine (x) and the sine (y) of a position's angle, times `scale`.
__device__ __forceinline__ float2 find_turn(int position, float inv_freq, float scale) {
    const double half_turns = (double)position * inv_freq * 0.31830988618379067154;
    const float reduced = (float)(half_turns - 2.0 * rint(half_turns * 0.5));
    float sine, cosine;
    sincospif(reduced, &sine, &cosine);
    return make_float2(cosine * scale, sine * scale);
}

__device__ __forceinline__ float rotate_first(float first, float second, float2 turn) {
    return fmaf(first, turn.x, -second * turn.y);
}

__device__ __forceinline__ float rotate_second(float first, float second, float2 turn) {
    return fmaf(first, turn.y, second * turn.x);
}
