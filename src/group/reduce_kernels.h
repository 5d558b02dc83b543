/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Template of the reduction kernels, included once for each instruction set by reduce.c
 * with V(name) = the variant's name, STREAM_BLOCK(dst, src, bytes) and HAVE_F16C defined.
 *
 * Every operator is a three-address loop out[i] = a[i] op b[i] that the compiler
 * vectorises. `out` may be `a` or `b`: an element is read before it is written, which
 * ivdep promises.
 */

#ifdef __clang__
#define NO_CARRIED_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_CARRIED_DEPENDENCE _Pragma("GCC ivdep")
#endif

#define KERNEL(name, type, expr)                                                         \
    static void V(name)(void *out_, const void *a_, const void *b_, size_t n)            \
    {                                                                                    \
        type##_any *out = out_;                                                          \
        const type##_any *a = a_, *b = b_;                                               \
        NO_CARRIED_DEPENDENCE                                                            \
        for (size_t i = 0; i < n; i++) {                                                 \
            type x = a[i], y = b[i];                                                     \
            out[i] = (type)(expr);                                                       \
        }                                                                                \
    }

#define ARITHMETIC_KERNELS(type)                                                         \
    KERNEL(sum_##type, type, x + y)                                                      \
    KERNEL(prod_##type, type, x *y)

/* A NaN on either side wins; for integers the second test is never true. */
#define ORDER_KERNELS(type)                                                              \
    KERNEL(min_##type, type, x < y || x != x ? x : y)                                    \
    KERNEL(max_##type, type, x > y || x != x ? x : y)

#define BIT_KERNELS(type)                                                                \
    KERNEL(band_##type, type, x &y)                                                      \
    KERNEL(bor_##type, type, x | y)                                                      \
    KERNEL(bxor_##type, type, x ^ y)

ARITHMETIC_KERNELS(u8)
ARITHMETIC_KERNELS(u16)
ARITHMETIC_KERNELS(u32)
ARITHMETIC_KERNELS(u64)
ARITHMETIC_KERNELS(f32)
ARITHMETIC_KERNELS(f64)
ORDER_KERNELS(i8)
ORDER_KERNELS(u8)
ORDER_KERNELS(i16)
ORDER_KERNELS(u16)
ORDER_KERNELS(i32)
ORDER_KERNELS(u32)
ORDER_KERNELS(i64)
ORDER_KERNELS(u64)
ORDER_KERNELS(f32)
ORDER_KERNELS(f64)
BIT_KERNELS(u8)
BIT_KERNELS(u16)
BIT_KERNELS(u32)
BIT_KERNELS(u64)
/* Any non-zero byte is true; results are 0 or 1. */
KERNEL(any_bool, u8, (x != 0) | (y != 0))
KERNEL(all_bool, u8, (x != 0) & (y != 0))
KERNEL(xor_bool, u8, (x != 0) ^ (y != 0))

#define DIVIDE_KERNEL(type)                                                              \
    static void V(div_##type)(void *acc_, size_t n, size_t divisor)                      \
    {                                                                                    \
        type##_any *acc = acc_;                                                          \
        type d = (type)divisor;                                                          \
        NO_CARRIED_DEPENDENCE                                                            \
        for (size_t i = 0; i < n; i++)                                                   \
            acc[i] = (type)(acc[i] / d);                                                 \
    }

DIVIDE_KERNEL(f32)
DIVIDE_KERNEL(f64)

static void V(load_bf16)(float *acc, const void *src_, size_t n)
{
    const u16_any *src = src_;
    NO_CARRIED_DEPENDENCE
    for (size_t i = 0; i < n; i++)
        ((u32_any *)acc)[i] = (uint32_t)src[i] << 16;
}

static void V(store_bf16)(void *dst_, const float *acc, size_t n)
{
    u16_any *dst = dst_;
    NO_CARRIED_DEPENDENCE
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = ((const u32_any *)acc)[i];
        uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        uint32_t nan = (bits >> 16) | 0x40;
        dst[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
    }
}

static void V(load_f16)(float *acc, const void *src_, size_t n)
{
    const u16_any *src = src_;
    size_t i = 0;
#if HAVE_F16C
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(acc + i,
                         _mm256_cvtph_ps(_mm_loadu_si128((const void *)(src + i))));
#endif
    for (; i < n; i++)
        acc[i] = base_f16_to_float(src[i]);
}

static void V(store_f16)(void *dst_, const float *acc, size_t n)
{
    u16_any *dst = dst_;
    size_t i = 0;
#if HAVE_F16C
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(acc + i),
                                                            _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        dst[i] = base_f16_from_float(acc[i]);
}

static const struct reduce_ops
    V(ops) =
        {
            .native =
                {
                    [HDL_SUM] = {[HDL_I8] = V(sum_u8),
                                 [HDL_U8] = V(sum_u8),
                                 [HDL_I16] = V(sum_u16),
                                 [HDL_U16] = V(sum_u16),
                                 [HDL_I32] = V(sum_u32),
                                 [HDL_U32] = V(sum_u32),
                                 [HDL_I64] = V(sum_u64),
                                 [HDL_U64] = V(sum_u64),
                                 [HDL_BOOL] = V(any_bool),
                                 [HDL_F32] = V(sum_f32),
                                 [HDL_F64] = V(sum_f64)},
                    [HDL_PROD] = {[HDL_I8] = V(prod_u8),
                                  [HDL_U8] = V(prod_u8),
                                  [HDL_I16] = V(prod_u16),
                                  [HDL_U16] = V(prod_u16),
                                  [HDL_I32] = V(prod_u32),
                                  [HDL_U32] = V(prod_u32),
                                  [HDL_I64] = V(prod_u64),
                                  [HDL_U64] = V(prod_u64),
                                  [HDL_BOOL] = V(all_bool),
                                  [HDL_F32] = V(prod_f32),
                                  [HDL_F64] = V(prod_f64)},
                    [HDL_MIN] = {[HDL_I8] = V(min_i8),
                                 [HDL_U8] = V(min_u8),
                                 [HDL_I16] = V(min_i16),
                                 [HDL_U16] = V(min_u16),
                                 [HDL_I32] = V(min_i32),
                                 [HDL_U32] = V(min_u32),
                                 [HDL_I64] = V(min_i64),
                                 [HDL_U64] = V(min_u64),
                                 [HDL_BOOL] = V(all_bool),
                                 [HDL_F32] = V(min_f32),
                                 [HDL_F64] = V(min_f64)},
                    [HDL_MAX] = {[HDL_I8] = V(max_i8),
                                 [HDL_U8] = V(max_u8),
                                 [HDL_I16] = V(max_i16),
                                 [HDL_U16] = V(max_u16),
                                 [HDL_I32] = V(max_i32),
                                 [HDL_U32] = V(max_u32),
                                 [HDL_I64] = V(max_i64),
                                 [HDL_U64] = V(max_u64),
                                 [HDL_BOOL] = V(any_bool),
                                 [HDL_F32] = V(max_f32),
                                 [HDL_F64] = V(max_f64)},
                    [HDL_BAND] = {[HDL_I8] = V(band_u8),
                                  [HDL_U8] = V(band_u8),
                                  [HDL_I16] = V(band_u16),
                                  [HDL_U16] = V(band_u16),
                                  [HDL_I32] = V(band_u32),
                                  [HDL_U32] = V(band_u32),
                                  [HDL_I64] = V(band_u64),
                                  [HDL_U64] = V(band_u64),
                                  [HDL_BOOL] = V(all_bool)},
                    [HDL_BOR] = {[HDL_I8] = V(bor_u8),
                                 [HDL_U8] = V(bor_u8),
                                 [HDL_I16] = V(bor_u16),
                                 [HDL_U16] = V(bor_u16),
                                 [HDL_I32] = V(bor_u32),
                                 [HDL_U32] = V(bor_u32),
                                 [HDL_I64] = V(bor_u64),
                                 [HDL_U64] = V(bor_u64),
                                 [HDL_BOOL] = V(any_bool)},
                    [HDL_BXOR] = {[HDL_I8] = V(bxor_u8),
                                  [HDL_U8] = V(bxor_u8),
                                  [HDL_I16] = V(bxor_u16),
                                  [HDL_U16] = V(bxor_u16),
                                  [HDL_I32] = V(bxor_u32),
                                  [HDL_U32] = V(bxor_u32),
                                  [HDL_I64] = V(bxor_u64),
                                  [HDL_U64] = V(bxor_u64),
                                  [HDL_BOOL] = V(xor_bool)},
                },
            .load_bf16 = V(load_bf16),
            .store_bf16 = V(store_bf16),
            .load_f16 = V(load_f16),
            .store_f16 = V(store_f16),
            .divide_f32 = V(div_f32),
            .divide_f64 = V(div_f64),
            .stream = V(stream),
};

#undef KERNEL
#undef ARITHMETIC_KERNELS
#undef ORDER_KERNELS
#undef BIT_KERNELS
#undef DIVIDE_KERNEL
#undef NO_CARRIED_DEPENDENCE
