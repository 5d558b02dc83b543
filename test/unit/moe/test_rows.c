/* SPDX-License-Identifier: Apache-2.0 */
/* Every processor variant of the row loops against scalar code, bit by bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/random.h"
#include "moe/config.h"
#include "moe/element.h"
#include "moe/reference.h"
#include "moe/rows.h"

enum { MOST = 1100, PARTS = 5 };

static const char *const variants[] = {"plain", "avx2", "avx512"};
static const uint32_t hidden[] = {1,   7,   16,  100, 127, 128, 129,
                                  130, 256, 511, 512, 513, 1000};

static uint64_t seed = 1;

/* Floats of every size, with some infinities, NaNs, zeros and subnormals. */
static float any_float(int wild)
{
    uint64_t r = base_splitmix_next(&seed);
    if (wild && r % 16 == 0) {
        static const float special[] = {INFINITY, -INFINITY, NAN,   -0.0f,
                                        0.0f,     1e-40f,    -1e38f};
        return special[r / 16 % 7];
    }
    float x = (float)(int32_t)r / 0x1p31f;
    return ldexpf(x, wild ? (int)(r >> 40 & 63) - 40 : (int)(r >> 40 & 7) - 4);
}

static void fill(enum hdl_dtype dtype, void *row, size_t n, int wild)
{
    for (size_t i = 0; i < n; i++)
        moe_store(dtype, row, i, any_float(wild));
}

/* Equal bits, or both NaN. */
static void same(enum hdl_dtype dtype, const void *a, const void *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float x = moe_load(dtype, a, i), y = moe_load(dtype, b, i);
        if (isnan(x) && isnan(y))
            continue;
        assert_int_equal(base_float_bits(x), base_float_bits(y));
    }
}

static void check_quantise(enum hdl_dtype dtype, enum hdl_moe_format format, uint32_t h)
{
    static uint8_t row[MOST * 4 + 8], a[MOST], b[MOST], scale_a[64], scale_b[64];
    uint8_t *src = row + (dtype == HDL_F32 ? 4 : 2); /* aligned to an element only */
    fill(dtype, src, h, 1);
    memset(scale_a, 0xff, sizeof(scale_a));
    memset(scale_b, 0xff, sizeof(scale_b));
    moe_reference_quantise(format, dtype, src, h, a, scale_a);
    moe_rows_quantise(format, dtype, src, h, b, scale_b);
    assert_memory_equal(a, b, h);
    assert_memory_equal(scale_a, scale_b, sizeof(scale_a));
}

static void test_quantise(void **state)
{
    static const enum hdl_dtype types[] = {HDL_BF16, HDL_F16, HDL_F32};
    for (size_t v = 0; v < 3; v++) {
        if (!moe_rows_use(variants[v]))
            continue;
        for (int i = 0; i < 40; i++)
            for (size_t t = 0; t < 3; t++)
                for (int f = HDL_MOE_FP8; f <= HDL_MOE_FP8_UE8M0; f++)
                    check_quantise(types[t], f, hidden[(size_t)i % 13]);
    }
}

/* All of e4m3: every rounding boundary from below and above. */
static void test_every_code(void **state)
{
    uint8_t got[128];
    float x[128];
    for (size_t v = 0; v < 3; v++) {
        if (!moe_rows_use(variants[v]))
            continue;
        for (uint32_t code = 0; code < 0x7e; code++) {
            float low = base_e4m3_to_float((uint8_t)code);
            float high = base_e4m3_to_float((uint8_t)(code + 1));
            float tie = (low + high) / 2;
            memset(x, 0, sizeof(x));
            x[0] = 448.0f; /* scale 1 */
            x[1] = low;
            x[2] = tie;
            x[3] = nextafterf(tie, 0);
            x[4] = nextafterf(tie, 1000);
            x[5] = -tie;
            float scale;
            moe_rows_quantise(HDL_MOE_FP8, HDL_F32, x, 128, got, &scale);
            assert_int_equal(got[1], code);
            assert_int_equal(got[2], code + (code & 1));
            assert_int_equal(got[3], code);
            assert_int_equal(got[4], code + 1);
            assert_int_equal(got[5], (code + (code & 1)) | 0x80);
        }
    }
}

static void scalar_give(const struct moe_wire *w, uint8_t *dst, const void *const *srcs,
                        const float *weights, size_t n)
{
    float acc[MOST];
    for (size_t h = 0; h < w->hidden; h++) {
        acc[h] = weights ? 0 : moe_load(w->dtype, srcs[0], h);
        for (size_t i = 0; weights && i < n; i++)
            acc[h] = fmaf(weights[i], moe_load(w->dtype, srcs[i], h), acc[h]);
        if (w->kind != HDL_MOE_WIRE_FP8)
            moe_store(w->kind == HDL_MOE_WIRE_F32 ? HDL_F32 : w->dtype, dst, h, acc[h]);
    }
    if (w->kind == HDL_MOE_WIRE_FP8)
        moe_reference_quantise(HDL_MOE_FP8, HDL_F32, acc, w->hidden, dst,
                               dst + w->scale_offset);
}

static float wire_value(const struct moe_wire *w, const uint8_t *part, size_t h)
{
    float scale;
    if (w->kind == HDL_MOE_WIRE_F32)
        return moe_load(HDL_F32, part, h);
    if (w->kind == HDL_MOE_WIRE_ROW)
        return moe_load(w->dtype, part, h);
    memcpy(&scale, part + w->scale_offset + h / MOE_SCALE_GROUP * 4, 4);
    return base_e4m3_to_float(part[h]) * scale;
}

static void scalar_take(const struct moe_wire *w, uint8_t *dst, const struct moe_take *t)
{
    for (size_t h = 0; h < w->hidden; h++) {
        float acc = 0;
        for (size_t i = 0; i < t->n; i++) {
            float x = wire_value(w, t->parts[i], h);
            acc = t->weights ? fmaf(t->weights[i], x, acc) : acc + x;
        }
        for (int b = 0; b < 2; b++)
            acc += t->bias[b] ? moe_load(w->dtype, t->bias[b], h) : 0.0f;
        if (t->accumulate)
            acc += moe_load(w->dtype, dst, h);
        moe_store(w->dtype, dst, h, acc);
    }
}

static uint8_t rows[PARTS][MOST * 4], parts[PARTS][MOST * 4 + 64], part[MOST * 4 + 64];
static uint8_t out_a[MOST * 4], out_b[MOST * 4];

static void check_sum(enum hdl_dtype dtype, enum hdl_moe_wire kind, uint32_t h, int round)
{
    struct moe_wire w = {kind, dtype, h, ((size_t)h + 3) / 4 * 4};
    const void *srcs[PARTS], *wire_rows[PARTS];
    float weights[PARTS];
    size_t n = 1 + (size_t)round % PARTS;
    size_t bytes =
        w.kind == HDL_MOE_WIRE_FP8 ? w.scale_offset + 4 * moe_scale_groups(h) : 0;
    for (size_t i = 0; i < n; i++) {
        fill(dtype, rows[i], h, round % 7 == 0);
        srcs[i] = rows[i];
        wire_rows[i] = parts[i];
        weights[i] = any_float(0);
    }
    for (size_t i = 0; i < n; i++) {
        bool one = i % 2 == 1;
        moe_rows_give(&w, parts[i], srcs + i, one ? NULL : weights, one ? 1 : n - i,
                      i == 0);
        scalar_give(&w, part, srcs + i, one ? NULL : weights, one ? 1 : n - i);
        for (size_t gap = h; bytes && gap < w.scale_offset; gap++)
            part[gap] = parts[i][gap] = 0;
        if (bytes)
            assert_memory_equal(part, parts[i], bytes);
        else
            same(kind == HDL_MOE_WIRE_F32 ? HDL_F32 : dtype, part, parts[i], h);
    }
    moe_rows_fence();
    struct moe_take t = {wire_rows,
                         round & 1 ? weights : NULL,
                         n,
                         {round & 2 ? rows[0] : NULL, round & 4 ? rows[n - 1] : NULL},
                         (round & 8) != 0};
    fill(dtype, out_a, h, 0);
    memcpy(out_b, out_a, sizeof(out_a));
    scalar_take(&w, out_a, &t);
    moe_rows_take(&w, out_b, &t, (round & 16) != 0);
    same(dtype, out_a, out_b, h);
}

static void test_sums(void **state)
{
    static const enum hdl_dtype types[] = {HDL_BF16, HDL_F16, HDL_F32};
    for (size_t v = 0; v < 3; v++) {
        if (!moe_rows_use(variants[v]))
            continue;
        for (int i = 0; i < 78; i++)
            for (size_t t = 0; t < 3; t++)
                for (int w = HDL_MOE_WIRE_ROW; w <= HDL_MOE_WIRE_FP8; w++)
                    check_sum(types[t], w, hidden[(size_t)i % 13], i);
    }
}

static void test_copy(void **state)
{
    _Alignas(64) static uint8_t src[512], a[512 + 64], b[512 + 64];
    for (size_t i = 0; i < sizeof(src); i++)
        src[i] = (uint8_t)(i * 7 + i / 256);
    for (size_t v = 0; v < 3; v++) {
        if (!moe_rows_use(variants[v]))
            continue;
        for (size_t bytes = 0; bytes < 300; bytes += 13) {
            void *dst[2] = {a + bytes % 3, b};
            memset(a, 0xee, sizeof(a));
            memset(b, 0xee, sizeof(b));
            moe_rows_copy(dst, 2, src, bytes, bytes % 2);
            moe_rows_fence();
            assert_memory_equal(dst[0], src, bytes);
            assert_memory_equal(b, src, bytes);
            assert_int_equal(b[bytes], 0xee);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantise),
        cmocka_unit_test(test_every_code),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_copy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
