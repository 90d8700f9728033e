// Store the arguments as they came: a check of the widths that the launcher packs, and of a live context.
#include "numbers.cuh"

extern "C" __global__ void echo(int64* __restrict__ out, const int a, const int64 b, const float c, const int64 d) {
    out[0] = a, out[1] = b, out[2] = __float_as_int(c), out[3] = d, out[4] = (int64)out;
}
