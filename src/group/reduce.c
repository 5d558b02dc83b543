/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise reduction: choice of the kernel, blocks, types that accumulate in f32. */
#include "group/reduce.h"

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"
#include "base/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* A block of accumulators stays in the first-level cache. */
enum { BLOCK = 1024 };

typedef int8_t i8;
typedef uint8_t u8;
typedef int16_t i16;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef int64_t i64;
typedef uint64_t u64;
typedef float f32;
typedef double f64;
/* The same in memory that has no alignment and may be seen through other types. */
typedef i8 i8_any __attribute__((may_alias));
typedef u8 u8_any __attribute__((may_alias));
typedef i16 i16_any __attribute__((aligned(1), may_alias));
typedef u16 u16_any __attribute__((aligned(1), may_alias));
typedef i32 i32_any __attribute__((aligned(1), may_alias));
typedef u32 u32_any __attribute__((aligned(1), may_alias));
typedef i64 i64_any __attribute__((aligned(1), may_alias));
typedef u64 u64_any __attribute__((aligned(1), may_alias));
typedef f32 f32_any __attribute__((aligned(1), may_alias));
typedef f64 f64_any __attribute__((aligned(1), may_alias));

typedef void combine_fn(void *out, const void *a, const void *b, size_t n);

struct reduce_ops {
    combine_fn *native[BASE_NUM_REDOPS][BASE_NUM_DTYPES];
    void (*load_bf16)(float *acc, const void *src, size_t n);
    void (*store_bf16)(void *dst, const float *acc, size_t n);
    void (*load_f16)(float *acc, const void *src, size_t n);
    void (*store_f16)(void *dst, const float *acc, size_t n);
    void (*divide_f32)(void *acc, size_t n, size_t divisor);
    void (*divide_f64)(void *acc, size_t n, size_t divisor);
    void (*stream)(void *dst, const void *src, size_t bytes);
};

/* Contracting a*b+c would make the bits depend on the instruction set. */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#if defined(__x86_64__)

#define STREAM_FUNCTION(name, width, vector, load, store)                                \
    static void name(void *dst, const void *src, size_t bytes)                           \
    {                                                                                    \
        size_t head = -(uintptr_t)dst % (width);                                         \
        head = head < bytes ? head : bytes;                                              \
        memcpy(dst, src, head);                                                          \
        size_t at = head;                                                                \
        for (; at + (width) <= bytes; at += (width))                                     \
            store((vector *)((char *)dst + at),                                          \
                  load((const void *)((const char *)src + at)));                         \
        memcpy((char *)dst + at, (const char *)src + at, bytes - at);                    \
    }

#ifdef __clang__
#pragma clang attribute push(                                                            \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))),                  \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c,prefer-vector-width=512")
#endif
#define V(name) avx512_##name
#define HAVE_F16C 1
STREAM_FUNCTION(avx512_stream, 64, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
#include "group/reduce_kernels.h"
#undef V
#undef HAVE_F16C
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define V(name) avx2_##name
#define HAVE_F16C 1
STREAM_FUNCTION(avx2_stream, 32, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
#include "group/reduce_kernels.h"
#undef V
#undef HAVE_F16C
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif /* __x86_64__ */

#define V(name) plain_##name
#define HAVE_F16C 0
static void plain_stream(void *dst, const void *src, size_t bytes)
{
    memcpy(dst, src, bytes);
}
#include "group/reduce_kernels.h"
#undef V
#undef HAVE_F16C
#pragma GCC diagnostic pop

static const struct reduce_ops *variant(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &avx512_ops;
    if (__builtin_cpu_supports("avx2"))
        return &avx2_ops;
#endif
    return &plain_ops;
}

const char *group_reduce_variant(void)
{
    const struct reduce_ops *ops = variant();
#if defined(__x86_64__)
    if (ops == &avx512_ops)
        return "avx512";
    if (ops == &avx2_ops)
        return "avx2";
#endif
    return ops == &plain_ops ? "plain" : "";
}

static bool is_fp8(enum hdl_dtype dtype)
{
    return dtype == HDL_F8E4M3 || dtype == HDL_F8E5M2;
}

static bool is_narrow_float(enum hdl_dtype dtype)
{
    return dtype == HDL_F16 || dtype == HDL_BF16 || is_fp8(dtype);
}

static bool is_complex(enum hdl_dtype dtype)
{
    return dtype == HDL_C64 || dtype == HDL_C128;
}

bool group_reduce_supported(enum hdl_dtype dtype, enum hdl_redop redop)
{
    bool bits = redop == HDL_BAND || redop == HDL_BOR || redop == HDL_BXOR;
    bool linear = redop == HDL_SUM || redop == HDL_AVG || redop == HDL_PREMUL_SUM;
    if (redop < HDL_SUM || redop > HDL_PREMUL_SUM || dtype < HDL_I8 || dtype > HDL_F8E5M2)
        return false;
    if (is_complex(dtype))
        return linear;
    if (is_fp8(dtype))
        return redop == HDL_SUM || redop == HDL_AVG || redop == HDL_MIN ||
               redop == HDL_MAX;
    if (dtype == HDL_BOOL)
        return redop != HDL_AVG && redop != HDL_PREMUL_SUM;
    if (dtype == HDL_F16 || dtype == HDL_BF16 || dtype == HDL_F32 || dtype == HDL_F64)
        return !bits;
    return true;
}

bool group_reduce_splits(enum hdl_dtype dtype, enum hdl_redop redop)
{
    return !is_narrow_float(dtype) || redop == HDL_MIN || redop == HDL_MAX;
}

static void load_narrow(const struct reduce_ops *ops, enum hdl_dtype dtype, float *acc,
                        const void *src, size_t n)
{
    const uint8_t *bytes = src;
    if (dtype == HDL_BF16)
        ops->load_bf16(acc, src, n);
    else if (dtype == HDL_F16)
        ops->load_f16(acc, src, n);
    else
        for (size_t i = 0; i < n; i++)
            acc[i] = dtype == HDL_F8E4M3 ? base_e4m3_to_float(bytes[i])
                                         : base_e5m2_to_float(bytes[i]);
}

static void store_narrow(const struct reduce_ops *ops, enum hdl_dtype dtype, void *dst,
                         const float *acc, size_t n)
{
    uint8_t *bytes = dst;
    if (dtype == HDL_BF16)
        ops->store_bf16(dst, acc, n);
    else if (dtype == HDL_F16)
        ops->store_f16(dst, acc, n);
    else
        for (size_t i = 0; i < n; i++)
            bytes[i] = dtype == HDL_F8E4M3 ? base_e4m3_from_float(acc[i])
                                           : base_e5m2_from_float(acc[i]);
}

struct job {
    const struct reduce_ops *ops;
    combine_fn *combine;
    enum hdl_dtype dtype; /* of the accumulators if native, of the elements if narrow */
    size_t width;
    size_t n;
    bool average, stream;
};

/* One block of a type that accumulates in f32; the stack buffers are at most 8 KiB. */
static void reduce_narrow_block(const struct job *job, char *dst, const void *const *srcs,
                                size_t at, size_t count)
{
    _Alignas(64) float acc[BLOCK], next[BLOCK];
    load_narrow(job->ops, job->dtype, acc, (const char *)srcs[0] + at, count);
    for (size_t s = 1; s < job->n; s++) {
        load_narrow(job->ops, job->dtype, next, (const char *)srcs[s] + at, count);
        job->combine(acc, acc, next, count);
    }
    if (job->average)
        job->ops->divide_f32(acc, count, job->n);
    if (!job->stream) {
        store_narrow(job->ops, job->dtype, dst + at, acc, count);
        return;
    }
    store_narrow(job->ops, job->dtype, next, acc, count);
    job->ops->stream(dst + at, next, count * job->width);
}

/* Division towards zero of the wrapped sum. */
static void divide_integers(enum hdl_dtype dtype, void *acc, size_t n, size_t divisor)
{
#define DIVIDE(type)                                                                     \
    for (size_t i = 0; i < n; i++)                                                       \
    ((type##_any *)acc)[i] = (type)(((type##_any *)acc)[i] / (int64_t)divisor)
    switch (dtype) {
    case HDL_I8:
        DIVIDE(i8);
        break;
    case HDL_U8:
        DIVIDE(u8);
        break;
    case HDL_I16:
        DIVIDE(i16);
        break;
    case HDL_U16:
        DIVIDE(u16);
        break;
    case HDL_I32:
        DIVIDE(i32);
        break;
    case HDL_U32:
        DIVIDE(u32);
        break;
    case HDL_I64:
        DIVIDE(i64);
        break;
    default:
        for (size_t i = 0; i < n; i++)
            ((u64_any *)acc)[i] /= divisor;
    }
#undef DIVIDE
}

/* The type whose elements those of a complex type are. */
static enum hdl_dtype real_type(enum hdl_dtype dtype)
{
    if (dtype == HDL_C64)
        return HDL_F32;
    return dtype == HDL_C128 ? HDL_F64 : dtype;
}

void group_divide(void *dst, size_t count, enum hdl_dtype dtype, size_t n)
{
    if (is_complex(dtype))
        count *= 2;
    dtype = real_type(dtype);
    if (dtype == HDL_F32)
        variant()->divide_f32(dst, count, n);
    else if (dtype == HDL_F64)
        variant()->divide_f64(dst, count, n);
    else
        divide_integers(dtype, dst, count, n);
}

static void reduce_native_block(const struct job *job, char *dst, const void *const *srcs,
                                size_t at, size_t count)
{
    _Alignas(64) char block[BLOCK * 8];
    bool direct = !job->stream && !job->average;
    const void *acc = (const char *)srcs[0] + at;
    for (size_t s = 1; s < job->n; s++) {
        void *out = direct && s + 1 == job->n ? (void *)(dst + at) : block;
        job->combine(out, acc, (const char *)srcs[s] + at, count);
        acc = out;
    }
    if (acc == dst + at)
        return;
    if (job->average) {
        if (acc != block)
            memcpy(block, acc, count * job->width);
        group_divide(block, count, job->dtype, job->n);
        acc = block;
    }
    if (job->stream)
        job->ops->stream(dst + at, acc, count * job->width);
    else
        memcpy(dst + at, acc, count * job->width);
}

void group_reduce(void *dst, const void *const *srcs, size_t n, size_t count,
                  enum hdl_dtype dtype, enum hdl_redop redop, bool stream)
{
    bool narrow = is_narrow_float(dtype);
    struct job job = {
        .ops = variant(), .dtype = real_type(dtype), .n = n, .stream = stream};

    if (is_complex(dtype))
        count *= 2;
    job.width = base_dtype_size(job.dtype);
    job.average = redop == HDL_AVG && n > 1;
    if (redop == HDL_AVG || redop == HDL_PREMUL_SUM)
        redop = HDL_SUM;
    job.combine = job.ops->native[redop][narrow ? HDL_F32 : job.dtype];

    for (size_t i = 0; i < count; i += BLOCK) {
        size_t part = count - i < BLOCK ? count - i : BLOCK;
        if (narrow)
            reduce_narrow_block(&job, dst, srcs, i * job.width, part);
        else
            reduce_native_block(&job, dst, srcs, i * job.width, part);
    }
#if defined(__x86_64__)
    if (stream)
        _mm_sfence();
#endif
}

static void premultiply_narrow(void *dst, const void *src, size_t count,
                               enum hdl_dtype dtype, float scalar)
{
    const struct reduce_ops *ops = variant();
    size_t width = base_dtype_size(dtype);
    _Alignas(64) float acc[BLOCK];
    for (size_t i = 0; i < count; i += BLOCK) {
        size_t part = count - i < BLOCK ? count - i : BLOCK;
        load_narrow(ops, dtype, acc, (const char *)src + i * width, part);
        for (size_t j = 0; j < part; j++)
            acc[j] *= scalar;
        store_narrow(ops, dtype, (char *)dst + i * width, acc, part);
    }
}

void group_premultiply(void *dst, const void *src, size_t count, enum hdl_dtype dtype,
                       double scalar)
{
#define PREMULTIPLY(type, factor)                                                        \
    for (size_t i = 0; i < count; i++)                                                   \
    ((type##_any *)dst)[i] = (type)(((const type##_any *)src)[i] * (factor))
    if (is_complex(dtype))
        count *= 2;
    switch (dtype) {
    case HDL_F32:
    case HDL_C64:
        PREMULTIPLY(f32, (float)scalar);
        break;
    case HDL_F64:
    case HDL_C128:
        PREMULTIPLY(f64, scalar);
        break;
    case HDL_I8:
        PREMULTIPLY(i8, (int8_t)scalar);
        break;
    case HDL_U8:
        PREMULTIPLY(u8, (uint8_t)scalar);
        break;
    case HDL_I16:
        PREMULTIPLY(i16, (int16_t)scalar);
        break;
    case HDL_U16:
        PREMULTIPLY(u16, (uint16_t)scalar);
        break;
    case HDL_I32:
        PREMULTIPLY(u32, (uint32_t)(int32_t)scalar);
        break;
    case HDL_U32:
        PREMULTIPLY(u32, (uint32_t)scalar);
        break;
    case HDL_I64:
        PREMULTIPLY(u64, (uint64_t)(int64_t)scalar);
        break;
    case HDL_U64:
        PREMULTIPLY(u64, (uint64_t)scalar);
        break;
    default:
        premultiply_narrow(dst, src, count, dtype, (float)scalar);
    }
#undef PREMULTIPLY
}
