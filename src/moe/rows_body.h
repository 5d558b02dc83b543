/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of rows.c, compiled once for each processor variant.
 *
 * ROWS(name) names the variant's functions, ROWS_TARGET is its attribute; ROWS_F16 and
 * ROWS_STREAM say that it has instructions for f16 and for stores past the cache,
 * ROWS_WIDTH how many floats its vectors hold (0 = none are used by name). The loops are
 * written so that the compiler vectorises them: no branches, integer tests for NaN and
 * infinity, blocks of fixed size in the first cache.
 */

ROWS_TARGET static void ROWS(load)(enum hdl_dtype dtype, const uint8_t *src, float *dst,
                                   size_t n)
{
    if (dtype == HDL_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, src + 2 * i, 2);
            dst[i] = base_float_from_bits((uint32_t)v << 16);
        }
    } else if (dtype == HDL_F16) {
        size_t i = 0;
#if ROWS_F16
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(
                dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(src + 2 * i))));
#endif
        for (; i < n; i++)
            dst[i] = moe_load(HDL_F16, src, i);
    } else {
        memcpy(dst, src, n * sizeof(float));
    }
}

ROWS_TARGET static void ROWS(store)(enum hdl_dtype dtype, uint8_t *dst, const float *src,
                                    size_t n)
{
    if (dtype == HDL_BF16) {
        for (size_t i = 0; i < n; i++) {
            uint32_t bits = base_float_bits(src[i]);
            uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            uint32_t quiet = bits >> 16 | 0x40;
            uint16_t v = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
            memcpy(dst + 2 * i, &v, 2);
        }
    } else if (dtype == HDL_F16) {
        size_t i = 0;
#if ROWS_F16
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128(
                (void *)(dst + 2 * i),
                _mm256_cvtps_ph(_mm256_loadu_ps(src + i),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
        for (; i < n; i++)
            moe_store(HDL_F16, dst, i, src[i]);
    } else {
        memcpy(dst, src, n * sizeof(float));
    }
}

/* e4m3 of x * inverse: by bits where the result is normal, by an addition that leaves the
 * fraction in the low bits where it is subnormal. */
ROWS_TARGET static void ROWS(encode)(const float *restrict x, float inverse,
                                     uint8_t *restrict dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = base_float_bits(x[i] * inverse);
        uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
        uint32_t capped = size > 0x43e00000 ? 0x43e00000 : size; /* 448 */
        uint32_t normal = (capped - 0x3c000000 + 0x7ffff + (capped >> 20 & 1)) >> 20;
        float shifted = base_float_from_bits(capped) + 16384.0f;
        uint32_t small = base_float_bits(shifted) - 0x46800000;
        uint32_t is_small = 0u - (uint32_t)(capped < 0x3c800000); /* 2^-6 */
        uint32_t is_nan = 0u - (uint32_t)(size > 0x7f800000);
        uint32_t code = (small & is_small) | (normal & ~is_small) | sign;
        dst[i] = (uint8_t)((0x7f & is_nan) | (code & ~is_nan));
    }
}

/* The largest finite magnitude, at least the floor. */
ROWS_TARGET static float ROWS(amax)(const float *x, size_t n)
{
    uint32_t most = base_float_bits(MOE_AMAX_FLOOR);
    for (size_t i = 0; i < n; i++) {
        uint32_t size = base_float_bits(x[i]) & 0x7fffffff;
        uint32_t finite = size & (0u - (uint32_t)(size < 0x7f800000));
        most = most > finite ? most : finite;
    }
    return base_float_from_bits(most);
}

ROWS_TARGET static void ROWS(quantise)(enum hdl_moe_format format, enum hdl_dtype dtype,
                                       const void *src, uint32_t hidden, uint8_t *data,
                                       void *scales)
{
    float x[MOE_SCALE_GROUP];
    size_t width = dtype == HDL_F32 ? 4 : 2;
    for (uint32_t g = 0, at = 0; at < hidden; g++, at += MOE_SCALE_GROUP) {
        size_t n = hidden - at < MOE_SCALE_GROUP ? hidden - at : MOE_SCALE_GROUP;
        ROWS(load)(dtype, (const uint8_t *)src + at * width, x, n);
        struct moe_scale s = moe_scale_of(format, ROWS(amax)(x, n));
        ROWS(encode)(x, s.inverse, data + at, n);
        moe_put_scale(format, scales, g, s);
    }
}

#if ROWS_WIDTH == 16
typedef __m512 ROWS(vector);

ROWS_TARGET static inline __m512 ROWS(widen)(const uint8_t *src)
{
    __m256i half = _mm256_loadu_si256((const void *)src);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The high half of each element is its bf16. */
ROWS_TARGET static inline __m512i ROWS(round)(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x);
    __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i sum = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    sum = _mm512_mask_add_epi32(sum, odd, sum, _mm512_set1_epi32(1));
    return _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
}

ROWS_TARGET static inline void ROWS(narrow)(uint8_t *dst, __m512 a, __m512 b, bool stream)
{
    __m512i high = _mm512_load_si512((const void *)rows_high_halves);
    __m512i all = _mm512_permutex2var_epi16(ROWS(round)(a), high, ROWS(round)(b));
    if (stream)
        _mm512_stream_si512((void *)dst, all);
    else
        _mm512_storeu_si512((void *)dst, all);
}

#define ROWS_ZERO _mm512_setzero_ps()
#define ROWS_ALL(weight) _mm512_set1_ps(weight)
#define ROWS_FMA _mm512_fmadd_ps
#define ROWS_ADD _mm512_add_ps
#elif ROWS_WIDTH == 8
typedef __m256 ROWS(vector);

ROWS_TARGET static inline __m256 ROWS(widen)(const uint8_t *src)
{
    __m128i half = _mm_loadu_si128((const void *)src);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

ROWS_TARGET static inline __m256i ROWS(round)(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)),
                              nan);
}

ROWS_TARGET static inline void ROWS(narrow)(uint8_t *dst, __m256 a, __m256 b, bool stream)
{
    __m256i mixed = _mm256_packus_epi32(ROWS(round)(a), ROWS(round)(b));
    __m256i all = _mm256_permute4x64_epi64(mixed, 0xd8);
    if (stream)
        _mm256_stream_si256((void *)dst, all);
    else
        _mm256_storeu_si256((void *)dst, all);
}

#define ROWS_ZERO _mm256_setzero_ps()
#define ROWS_ALL(weight) _mm256_set1_ps(weight)
#define ROWS_FMA _mm256_fmadd_ps
#define ROWS_ADD _mm256_add_ps
#endif

/* Sums of bf16, the common case, in one pass and in registers; returns how many elements
 * it made. */
ROWS_TARGET static size_t ROWS(sum)(uint8_t *dst, const struct moe_take *t, size_t count,
                                    bool stream)
{
    size_t i = 0;
#if ROWS_WIDTH
    const uint8_t *also[3];
    size_t num_also = 0;
    for (int b = 0; b < 2; b++) {
        if (t->bias[b])
            also[num_also++] = t->bias[b];
    }
    if (t->accumulate)
        also[num_also++] = dst;
    stream = stream && ((uintptr_t)dst & (4 * ROWS_WIDTH - 1)) == 0;
    for (; i + 2 * ROWS_WIDTH <= count; i += 2 * ROWS_WIDTH) {
        ROWS(vector) a = ROWS_ZERO, b = a;
        for (size_t p = 0; p < t->n; p++) {
            const uint8_t *row = (const uint8_t *)t->parts[p] + 2 * i;
            ROWS(vector) x = ROWS(widen)(row), y = ROWS(widen)(row + 2 * ROWS_WIDTH);
            if (t->weights) {
                a = ROWS_FMA(ROWS_ALL(t->weights[p]), x, a);
                b = ROWS_FMA(ROWS_ALL(t->weights[p]), y, b);
            } else {
                a = ROWS_ADD(a, x);
                b = ROWS_ADD(b, y);
            }
        }
        for (size_t p = 0; p < num_also; p++) {
            a = ROWS_ADD(a, ROWS(widen)(also[p] + 2 * i));
            b = ROWS_ADD(b, ROWS(widen)(also[p] + 2 * i + 2 * ROWS_WIDTH));
        }
        ROWS(narrow)(dst + 2 * i, a, b, stream);
    }
#undef ROWS_ZERO
#undef ROWS_ALL
#undef ROWS_FMA
#undef ROWS_ADD
#endif
    return i;
}

/* acc += weight * row, or acc += row with weight NULL; `first`: acc counts as +0. (Asked
 * in the loop, because a memset of this length is slower than the whole loop.) */
ROWS_TARGET static void ROWS(add)(float *restrict acc, enum hdl_dtype dtype,
                                  const uint8_t *restrict row, const float *weight,
                                  bool first, size_t n)
{
    float x[ROWS_BLOCK];
    if (dtype == HDL_BF16 && weight) { /* the common case, without a pass over x */
        float w = *weight;
        for (size_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, row + 2 * i, 2);
            acc[i] = __builtin_fmaf(w, base_float_from_bits((uint32_t)v << 16),
                                    first ? 0.0f : acc[i]);
        }
        return;
    }
    ROWS(load)(dtype, row, x, n);
    if (weight) {
        float w = *weight;
        for (size_t i = 0; i < n; i++)
            acc[i] = __builtin_fmaf(w, x[i], first ? 0.0f : acc[i]);
    } else {
        for (size_t i = 0; i < n; i++)
            acc[i] = (first ? 0.0f : acc[i]) + x[i];
    }
}

/* Stores a part of a result, past the cache if that was asked for. */
ROWS_TARGET static void ROWS(put)(enum hdl_dtype dtype, uint8_t *dst, const float *src,
                                  size_t n, bool stream)
{
#if ROWS_STREAM
    size_t bytes = n * (dtype == HDL_F32 ? 4 : 2), i = 0;
    uint8_t packed[ROWS_BLOCK * 4] __attribute__((aligned(64)));
    if (stream && ((uintptr_t)dst & 31) == 0) {
        ROWS(store)(dtype, packed, src, n);
        for (; i + 32 <= bytes; i += 32)
            _mm256_stream_si256((void *)(dst + i),
                                _mm256_load_si256((const void *)(packed + i)));
        memcpy(dst + i, packed + i, bytes - i);
        return;
    }
#else
    (void)stream;
#endif
    ROWS(store)(dtype, dst, src, n);
}

ROWS_TARGET static void ROWS(give)(const struct moe_wire *w, void *dst,
                                   const void *const *srcs, const float *weights,
                                   size_t n, bool stream)
{
    size_t width = w->dtype == HDL_F32 ? 4 : 2;
    float acc[ROWS_BLOCK] __attribute__((aligned(64)));
    size_t at = 0;
    if (w->dtype == HDL_BF16 && w->kind == HDL_MOE_WIRE_ROW && weights)
        at = ROWS(sum)(dst, &(struct moe_take){.parts = srcs, .weights = weights, .n = n},
                       w->hidden, stream);
    for (; at < w->hidden; at += ROWS_BLOCK) {
        size_t m = w->hidden - at < ROWS_BLOCK ? w->hidden - at : ROWS_BLOCK;
        if (weights) {
            for (size_t i = 0; i < n; i++)
                ROWS(add)
            (acc, w->dtype, (const uint8_t *)srcs[i] + at * width, &weights[i], i == 0,
             m);
        } else {
            ROWS(load)(w->dtype, (const uint8_t *)srcs[0] + at * width, acc, m);
        }
        if (w->kind == HDL_MOE_WIRE_FP8) {
            uint8_t *scales = (uint8_t *)dst + w->scale_offset;
            ROWS(quantise)
            (HDL_MOE_FP8, HDL_F32, acc, (uint32_t)m, (uint8_t *)dst + at,
             scales + at / MOE_SCALE_GROUP * sizeof(float));
            continue;
        }
        size_t out = w->kind == HDL_MOE_WIRE_F32 ? 4 : width;
        ROWS(put)
        (out == 4 ? HDL_F32 : w->dtype, (uint8_t *)dst + at * out, acc, m, stream);
    }
}

/* e4m3 with its scales; block by block, `at` is a multiple of the group. */
ROWS_TARGET static void ROWS(decode)(const uint8_t *data, const uint8_t *scales,
                                     float *dst, size_t n)
{
    for (size_t g = 0; g < n; g += MOE_SCALE_GROUP) {
        size_t m = n - g < MOE_SCALE_GROUP ? n - g : MOE_SCALE_GROUP;
        float scale;
        memcpy(&scale, scales + g / MOE_SCALE_GROUP * sizeof(float), sizeof(float));
        for (size_t i = 0; i < m; i++) {
            uint32_t code = data[g + i];
            uint32_t size = code & 0x7f;
            float value = base_float_from_bits(size << 20) * 0x1p120f;
            uint32_t bits = base_float_bits(value) | (code & 0x80) << 24;
            bits = size == 0x7f ? 0x7fc00000 | (code & 0x80) << 24 : bits;
            dst[g + i] = base_float_from_bits(bits) * scale;
        }
    }
}

ROWS_TARGET static void ROWS(take)(const struct moe_wire *w, void *dst,
                                   const struct moe_take *t, bool stream)
{
    size_t width = w->dtype == HDL_F32 ? 4 : 2;
    float acc[ROWS_BLOCK] __attribute__((aligned(64)));
    float x[ROWS_BLOCK];
    size_t at = 0;
    if (w->dtype == HDL_BF16 && w->kind == HDL_MOE_WIRE_ROW)
        at = ROWS(sum)(dst, t, w->hidden, stream);
    for (; at < w->hidden; at += ROWS_BLOCK) {
        size_t m = w->hidden - at < ROWS_BLOCK ? w->hidden - at : ROWS_BLOCK;
        if (t->n == 0)
            memset(acc, 0, sizeof(acc));
        for (size_t i = 0; i < t->n; i++) {
            const uint8_t *part = t->parts[i];
            const float *weight = t->weights ? &t->weights[i] : NULL;
            if (w->kind == HDL_MOE_WIRE_FP8) {
                ROWS(decode)
                (part + at, part + w->scale_offset + at / MOE_SCALE_GROUP * sizeof(float),
                 x, m);
                ROWS(add)(acc, HDL_F32, (const uint8_t *)x, weight, i == 0, m);
            } else if (w->kind == HDL_MOE_WIRE_F32) {
                ROWS(add)(acc, HDL_F32, part + at * 4, weight, i == 0, m);
            } else {
                ROWS(add)(acc, w->dtype, part + at * width, weight, i == 0, m);
            }
        }
        for (int b = 0; b < 2; b++) {
            if (t->bias[b])
                ROWS(add)
            (acc, w->dtype, (const uint8_t *)t->bias[b] + at * width, NULL, false, m);
        }
        if (t->accumulate)
            ROWS(add)(acc, w->dtype, (const uint8_t *)dst + at * width, NULL, false, m);
        ROWS(put)(w->dtype, (uint8_t *)dst + at * width, acc, m, stream);
    }
}

ROWS_TARGET static void ROWS(copy)(void *const *dst, size_t n, const uint8_t *src,
                                   size_t bytes, bool stream)
{
    size_t i = 0;
#if ROWS_STREAM
    bool aligned = stream;
    for (size_t d = 0; d < n; d++)
        aligned = aligned && ((uintptr_t)dst[d] & 31) == 0;
    for (; aligned && i + 64 <= bytes; i += 64) {
        __m256i a = _mm256_loadu_si256((const void *)(src + i));
        __m256i b = _mm256_loadu_si256((const void *)(src + i + 32));
        for (size_t d = 0; d < n; d++) {
            _mm256_stream_si256((void *)((uint8_t *)dst[d] + i), a);
            _mm256_stream_si256((void *)((uint8_t *)dst[d] + i + 32), b);
        }
    }
#else
    (void)stream;
#endif
    for (size_t d = 0; d < n; d++)
        memcpy((uint8_t *)dst[d] + i, src + i, bytes - i);
}

static const struct rows_table ROWS(table) = {
    .name = ROWS_NAME,
    .copy = ROWS(copy),
    .quantise = ROWS(quantise),
    .give = ROWS(give),
    .take = ROWS(take),
};
