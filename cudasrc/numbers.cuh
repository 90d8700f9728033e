// Storage types of the page pool and their conversions, by PTX alone: no CUDA header is needed at run time.
//
// -D STORAGE=0 float32, 1 float16, 2 bfloat16, and with a float32 scale per token and KV head: 3 float8 e4m3, 4 int8.
#pragma once

typedef unsigned char uint8;
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2
#define FLOAT8 3
#define INT8 4

#define NEGATIVE_INFINITY __int_as_float(0xFF800000)  // INFINITY is not defined at run-time compilation
#define POSITIVE_INFINITY __int_as_float(0x7F800000)
#define NOT_A_NUMBER __int_as_float(0x7FC00000)
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ constexpr bool is_quantized(int storage) { return storage == FLOAT8 || storage == INT8; }

__device__ constexpr int storage_bytes(int storage) { return storage == FLOAT32 ? 4 : is_quantized(storage) ? 1 : 2; }

// The magnitude that the largest of a quantised row is stored as.
__device__ constexpr float largest_stored(int storage) { return storage == INT8 ? 127.0f : 448.0f; }

__device__ __forceinline__ float float_from_half(uint32 bits) {
    float value;
    asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
    return value;
}

__device__ __forceinline__ float float_from_bfloat(uint32 bits) { return __uint_as_float(bits << 16); }

// The nearest number that float16 holds, for finite numbers.
__device__ __forceinline__ float clamp_to_half(float value) {
    return fabsf(value) < POSITIVE_INFINITY ? fminf(fmaxf(value, -65504.0f), 65504.0f) : value;
}

// e4m3 has float16's sign and a bias smaller by 8: move the bits into place, multiply by 2^8.
__device__ __forceinline__ float float_from_e4m3(uint32 bits) {
    return float_from_half(((bits & 0x80u) << 8) | ((bits & 0x7Fu) << 7)) * 256.0f;
}

// Round to nearest even, saturate at 448.
__device__ __forceinline__ uint32 e4m3_from_float(float value) {
    const uint32 bits = __float_as_uint(value), sign = (bits >> 24) & 0x80u;
    const float magnitude = fminf(fabsf(value), 448.0f);
    if (magnitude < 0.015625f) return sign | (uint32)__float2int_rn(magnitude * 512.0f);
    const uint32 wide = __float_as_uint(magnitude);
    return sign | (((wide + 0x7FFFFu + ((wide >> 20) & 1u)) >> 20) - (120u << 3));
}

// Byte `index` of a word of signed bytes: with its sign flipped it becomes the low mantissa bits of 2^23 by one permute.
__device__ __forceinline__ float float_from_int8(uint32 word, int index) {
    const uint32 bits = __byte_perm(word ^ 0x80808080u, 0x4B000000u, 0x7440 + index);
    return __uint_as_float(bits) - 8388736.0f;
}

// Round to nearest even, saturate at 127.
__device__ __forceinline__ uint32 int8_from_float(float value) {
    return (uint32)__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f)) & 0xFFu;
}

// 1 / a scale of values; 0 for a scale whose reciprocal no float holds, which only a block from elsewhere can have.
__device__ __forceinline__ float invert_scale(float scale) { return scale > 1e-37f ? 1.0f / scale : 0.0f; }

// Two floats into one register of two 16-bit numbers, `low` in the lower half.
template <int kStorage>
__device__ __forceinline__ uint32 pack(float low, float high) {
    uint32 packed;
    if constexpr (kStorage == FLOAT16)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <int kStorage>
__device__ __forceinline__ float unpack(uint32 bits16) {
    return kStorage == FLOAT16 ? float_from_half(bits16) : float_from_bfloat(bits16);
}

template <int kStorage>
__device__ __forceinline__ float unpack_byte(uint32 word, int index) {
    if constexpr (kStorage == INT8) return float_from_int8(word, index);
    return float_from_e4m3((word >> (8 * index)) & 0xFFu);
}

template <int kStorage>
__device__ __forceinline__ uint32 byte_from_float(float value) {
    return kStorage == INT8 ? int8_from_float(value) : e4m3_from_float(value);
}

// What a thread reads in one access of at most 16 bytes: 4 float32, or 8 of a smaller type.
__device__ constexpr int lane_elements(int storage) { return storage == FLOAT32 ? 4 : 8; }

template <int kStorage>
__device__ __forceinline__ void load_elements(const void* address, float (&values)[lane_elements(kStorage)]) {
    if constexpr (kStorage == FLOAT32) {
        const float4 four = *reinterpret_cast<const float4*>(address);
        values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
    } else if constexpr (is_quantized(kStorage)) {
        const uint2 eight = *reinterpret_cast<const uint2*>(address);
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = unpack_byte<kStorage>(i < 4 ? eight.x : eight.y, i & 3);
    } else {
        const uint4 eight = *reinterpret_cast<const uint4*>(address);
        const uint32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[2 * i] = unpack<kStorage>(words[i] & 0xFFFFu);
            values[2 * i + 1] = unpack<kStorage>(words[i] >> 16);
        }
    }
}

template <int kStorage>
__device__ __forceinline__ void store_elements(void* address, const float (&values)[lane_elements(kStorage)]) {
    if constexpr (kStorage == FLOAT32) {
        *reinterpret_cast<float4*>(address) = make_float4(values[0], values[1], values[2], values[3]);
    } else if constexpr (is_quantized(kStorage)) {
        uint2 eight = make_uint2(0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            eight.x |= byte_from_float<kStorage>(values[i]) << (8 * i);
            eight.y |= byte_from_float<kStorage>(values[4 + i]) << (8 * i);
        }
        *reinterpret_cast<uint2*>(address) = eight;
    } else {
        *reinterpret_cast<uint4*>(address) =
            make_uint4(pack<kStorage>(values[0], values[1]), pack<kStorage>(values[2], values[3]),
                       pack<kStorage>(values[4], values[5]), pack<kStorage>(values[6], values[7]));
    }
}

__device__ __forceinline__ float load_element(const void* array, int storage, int64 index) {
    if (storage == FLOAT32) return reinterpret_cast<const float*>(array)[index];
    const uint32 bits = reinterpret_cast<const uint16*>(array)[index];
    return storage == FLOAT16 ? float_from_half(bits) : float_from_bfloat(bits);
}
