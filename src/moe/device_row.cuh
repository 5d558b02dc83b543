/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of elements on the device: conversions, quantising to FP8, copies of any
 * alignment. */
#ifndef MOE_DEVICE_ROW_CUH
#define MOE_DEVICE_ROW_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "moe/device_line.cuh"

/* Element types as float: ELEMENTS of them in a vector of 16 B. */
template <int TYPE> struct element;

/* What both types of 2 B have in common. */
template <int TYPE> struct short_element {
    enum { BYTES = 2, COUNT = 8 };
    static __device__ __forceinline__ uint4 pack(const float *f)
    {
        typedef element<TYPE> e;
        return make_uint4(e::two(f[0], f[1]), e::two(f[2], f[3]), e::two(f[4], f[5]),
                          e::two(f[6], f[7]));
    }
};

template <> struct element<MOE_GPU_BF16> : short_element<MOE_GPU_BF16> {
    static __device__ __forceinline__ void unpack(uint4 v, float *f)
    {
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[2 * i] = __uint_as_float(w[i] << 16);
            f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    }
    static __device__ __forceinline__ uint32_t two(float lo, float hi)
    {
        __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
        return *reinterpret_cast<uint32_t *>(&h);
    }
};

template <> struct element<MOE_GPU_F16> : short_element<MOE_GPU_F16> {
    static __device__ __forceinline__ void unpack(uint4 v, float *f)
    {
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 t = __half22float2(*reinterpret_cast<__half2 *>(&w[i]));
            f[2 * i] = t.x;
            f[2 * i + 1] = t.y;
        }
    }
    static __device__ __forceinline__ uint32_t two(float lo, float hi)
    {
        __half2 h = __floats2half2_rn(lo, hi);
        return *reinterpret_cast<uint32_t *>(&h);
    }
};

template <> struct element<MOE_GPU_F32> {
    enum { BYTES = 4, COUNT = 4 };
    static __device__ __forceinline__ void unpack(uint4 v, float *f)
    {
        f[0] = __uint_as_float(v.x);
        f[1] = __uint_as_float(v.y);
        f[2] = __uint_as_float(v.z);
        f[3] = __uint_as_float(v.w);
    }
    static __device__ __forceinline__ uint4 pack(const float *f)
    {
        return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]),
                          __float_as_uint(f[2]), __float_as_uint(f[3]));
    }
};

/* Up to 16 B at a byte address of any alignment; what lies beyond `bytes` reads as 0. */
MOE_COLD uint4 load_narrow(const unsigned char *from, int bytes)
{
    uint32_t w[4] = {0, 0, 0, 0};
    for (int i = 0; i < bytes && i < 16; i++)
        w[i >> 2] |= (uint32_t)from[i] << (8 * (i & 3));
    return make_uint4(w[0], w[1], w[2], w[3]);
}

MOE_COLD void store_narrow(unsigned char *to, uint4 v, int bytes)
{
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < bytes && i < 16; i++)
        to[i] = (unsigned char)(w[i >> 2] >> (8 * (i & 3)));
}

/* A vector of a row at byte offset `at` out of `limit` bytes. WIDE: rows are multiples of
 * 16 B at addresses that are. */
template <bool WIDE>
MOE_DEVICE uint4 load_vector(const void *row, uint32_t at, uint32_t limit)
{
    const unsigned char *from = (const unsigned char *)row + at;
    if (at >= limit)
        return make_uint4(0, 0, 0, 0);
    if (WIDE)
        return __ldg((const uint4 *)from);
    return load_narrow(from, (int)limit - (int)at);
}

/* A lane's part of a row: 16 B, or 8 B where the vector is split over two lines. */
template <bool WIDE>
MOE_DEVICE void store_part(void *row, uint32_t at, uint32_t limit, uint4 v, bool split)
{
    unsigned char *to = (unsigned char *)row + at;
    if (at >= limit)
        return;
    if (!WIDE) {
        uint32_t size = split ? 8 : 16;
        store_narrow(to, v, (int)(limit - at < size ? limit - at : size));
    } else if (split) {
        *(uint2 *)to = make_uint2(v.x, v.y);
    } else {
        *(uint4 *)to = v;
    }
}

/* Four floats as e4m3, nearest even, saturated; any NaN becomes 0x7f. */
MOE_DEVICE uint32_t four_e4m3(float a, float b, float c, float d)
{
    uint16_t lo, hi;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(d), "f"(c));
    return (uint32_t)hi << 16 | lo;
}

struct fp8_scale {
    float inverse; /* what elements are multiplied with */
    uint32_t bits; /* the scale as stored: f32, or the biased exponent */
};

/* For a whole warp, in which neighbours have the same maximum: a division is long, so
 * each of them makes one. */
MOE_DEVICE fp8_scale scale_of(float amax, uint32_t format)
{
    fp8_scale s;
    amax = fmaxf(amax, 1e-4f);
    if (format == MOE_GPU_FP8) {
        const bool odd = threadIdx.x & 1;
        const float mine = __fdiv_rn(odd ? amax : 448.0f, odd ? 448.0f : amax);
        const float other = __shfl_xor_sync(ALL_LANES, mine, 1);
        s.inverse = odd ? other : mine;
        s.bits = __float_as_uint(odd ? mine : other);
        return s;
    }
    uint32_t b = __float_as_uint(__fdiv_rn(amax, 448.0f));
    uint32_t exponent = (b >> 23) + ((b & 0x7fffff) != 0);
    s.inverse = __uint_as_float((254 - exponent) << 23);
    s.bits = format == MOE_GPU_UE8M0 ? exponent : exponent << 23;
    return s;
}

/* Largest finite magnitude of 8 elements; Inf and NaN do not count. */
MOE_DEVICE float finite_amax(const float *f, int n)
{
    float m = 0;
#pragma unroll
    for (int i = 0; i < n; i++) {
        float a = fabsf(f[i]);
        if (a <= 3.402823466e38f)
            m = fmaxf(m, a);
    }
    return m;
}

#endif
