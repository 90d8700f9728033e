// Copy whole blocks, all copies of a step in one launch: grid.y is the copy, each thread moves 16 bytes at a time.
#include "numbers.cuh"

extern "C" __global__ void copy_blocks(const uint4* source, uint4* destination,
                                       const int2* __restrict__ copies,  // [gridDim.y]: source, destination block
                                       const int64 block_pieces) {       // 16-byte pieces of a block
    const int2 copy = copies[blockIdx.y];
    const uint4* from = source + copy.x * block_pieces;
    uint4* to = destination + copy.y * block_pieces;
    const int64 step = (int64)gridDim.x * blockDim.x;
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < block_pieces; i += step) to[i] = from[i];
}
