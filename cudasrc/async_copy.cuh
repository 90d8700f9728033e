// cp.async: global to shared memory without registers. `valid` false writes zeros and reads nothing.
#pragma once
#include "numbers.cuh"

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return (uint32)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void copy16_async(uint32 destination, const void* source, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy4_async(uint32 destination, const void* source, bool valid) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for this thread's groups of copies but the latest kLatest.
template <int kLatest>
__device__ __forceinline__ void wait_copies_but() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLatest) : "memory");
}

__device__ __forceinline__ void wait_copies() { wait_copies_but<0>(); }
