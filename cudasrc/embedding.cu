// Rows of a table as float32; a CTA per row. -D SOURCE: storage type of the table.
#include "numbers.cuh"

extern "C" __global__ void embedding(const void* __restrict__ table,  // [num_entries, width]
                                     const int* __restrict__ rows,    // [gridDim.x]
                                     float* __restrict__ y,           // [gridDim.x, width]
                                     const int64 width) {
    const int64 source = rows[blockIdx.x] * width, target = blockIdx.x * width;
    for (int64 i = threadIdx.x; i < width; i += blockDim.x) y[target + i] = load_element(table, SOURCE, source + i);
}
