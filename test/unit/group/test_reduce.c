/* SPDX-License-Identifier: Apache-2.0 */
/* Reduction kernels against a scalar definition, for every type, operator and odd size.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/half.h"
#include "base/random.h"
#include "group/reduce.h"

enum { MAX_COUNT = 4099, MAX_RANKS = 5, GUARD = 64 };

static uint64_t seed;

static uint64_t next_random(void)
{
    return base_splitmix_next(&seed);
}

static bool is_signed(enum hdl_dtype t)
{
    return t == HDL_I8 || t == HDL_I16 || t == HDL_I32 || t == HDL_I64;
}

static bool is_float(enum hdl_dtype t)
{
    return t >= HDL_F16;
}

/* Element i of `p` as a double (floats) or as its bits, sign-extended (integers). */
static double get_float(enum hdl_dtype t, const void *p, size_t i)
{
    uint16_t h;
    float f;
    double d;
    switch (t) {
    case HDL_F16:
        memcpy(&h, (const char *)p + 2 * i, 2);
        return base_f16_to_float(h);
    case HDL_BF16:
        memcpy(&h, (const char *)p + 2 * i, 2);
        return base_bf16_to_float(h);
    case HDL_F8E4M3:
        return base_e4m3_to_float(((const uint8_t *)p)[i]);
    case HDL_F8E5M2:
        return base_e5m2_to_float(((const uint8_t *)p)[i]);
    case HDL_F64:
        memcpy(&d, (const char *)p + 8 * i, 8);
        return d;
    default:
        memcpy(&f, (const char *)p + 4 * i, 4);
        return f;
    }
}

static void put_float(enum hdl_dtype t, void *p, size_t i, double v)
{
    uint16_t h;
    float f = (float)v;
    switch (t) {
    case HDL_F16:
        h = base_f16_from_float(f);
        memcpy((char *)p + 2 * i, &h, 2);
        break;
    case HDL_BF16:
        h = base_bf16_from_float(f);
        memcpy((char *)p + 2 * i, &h, 2);
        break;
    case HDL_F8E4M3:
        ((uint8_t *)p)[i] = base_e4m3_from_float(f);
        break;
    case HDL_F8E5M2:
        ((uint8_t *)p)[i] = base_e5m2_from_float(f);
        break;
    case HDL_F64:
        memcpy((char *)p + 8 * i, &v, 8);
        break;
    default:
        memcpy((char *)p + 4 * i, &f, 4);
    }
}

static int64_t get_int(enum hdl_dtype t, const void *p, size_t i)
{
    size_t width = base_dtype_size(t);
    uint64_t bits = 0;
    memcpy(&bits, (const char *)p + i * width, width);
    unsigned shift = 64 - 8 * (unsigned)width;
    return is_signed(t) ? (int64_t)(bits << shift) >> shift : (int64_t)bits;
}

static void put_int(enum hdl_dtype t, void *p, size_t i, uint64_t v)
{
    size_t width = base_dtype_size(t);
    memcpy((char *)p + i * width, &v, width);
}

static bool int_less(enum hdl_dtype t, int64_t a, int64_t b)
{
    return is_signed(t) ? a < b : (uint64_t)a < (uint64_t)b;
}

static uint64_t combine_int(enum hdl_dtype t, enum hdl_redop op, int64_t a, int64_t b)
{
    bool truth = t == HDL_BOOL;
    switch (op) {
    case HDL_PROD:
        return truth ? a && b : (uint64_t)a * (uint64_t)b;
    case HDL_MIN:
        return truth ? a && b : (uint64_t)(int_less(t, a, b) ? a : b);
    case HDL_MAX:
        return truth ? a || b : (uint64_t)(int_less(t, b, a) ? a : b);
    case HDL_BAND:
        return truth ? a && b : (uint64_t)(a & b);
    case HDL_BOR:
        return truth ? a || b : (uint64_t)(a | b);
    case HDL_BXOR:
        return truth ? !a != !b : (uint64_t)(a ^ b);
    default:
        return truth ? a || b : (uint64_t)a + (uint64_t)b;
    }
}

static double combine_float(enum hdl_dtype t, enum hdl_redop op, double a, double b)
{
    double r;
    switch (op) {
    case HDL_PROD:
        r = t == HDL_F64 ? a * b : (double)((float)a * (float)b);
        break;
    case HDL_MIN:
        return isnan(a) || isnan(b) ? NAN : a < b ? a : b;
    case HDL_MAX:
        return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
    default:
        r = t == HDL_F64 ? a + b : (double)((float)a + (float)b);
    }
    return r;
}

static void expect(enum hdl_dtype t, enum hdl_redop op, void *out,
                   const void *const *srcs, size_t n, size_t i)
{
    if (is_float(t)) {
        double acc = get_float(t, srcs[0], i);
        for (size_t r = 1; r < n; r++)
            acc = combine_float(t, op, acc, get_float(t, srcs[r], i));
        if (op == HDL_AVG && n > 1)
            acc = t == HDL_F64 ? acc / (double)n : (double)((float)acc / (float)n);
        put_float(t, out, 0, acc);
        return;
    }
    int64_t acc = get_int(t, srcs[0], i);
    for (size_t r = 1; r < n; r++) {
        put_int(t, out, 0, combine_int(t, op, acc, get_int(t, srcs[r], i)));
        acc = get_int(t, out, 0);
    }
    if (op == HDL_AVG && n > 1)
        acc = is_signed(t) ? acc / (int64_t)n : (int64_t)((uint64_t)acc / n);
    put_int(t, out, 0, (uint64_t)acc);
}

static void fill(enum hdl_dtype t, void *p, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t r = next_random();
        if (!is_float(t))
            put_int(t, p, i, t == HDL_BOOL ? (r & 3) == 0 : r);
        else if (r % 97 == 0 && t != HDL_F8E4M3)
            put_float(t, p, i, r & 128 ? (double)INFINITY : (double)NAN);
        else
            put_float(t, p, i, ((double)(r % 4001) - 2000) / 64);
    }
}

static bool same(enum hdl_dtype t, const void *a, const void *b)
{
    if (is_float(t) && isnan(get_float(t, a, 0)) && isnan(get_float(t, b, 0)))
        return true;
    return memcmp(a, b, base_dtype_size(t)) == 0;
}

static void check_case(enum hdl_dtype t, enum hdl_redop op, size_t n, size_t count,
                       size_t shift, bool stream, bool in_place)
{
    size_t width = base_dtype_size(t), bytes = count * width;
    enum hdl_dtype part = t == HDL_C64 ? HDL_F32 : t == HDL_C128 ? HDL_F64 : t;
    size_t parts = bytes / base_dtype_size(part);
    char *memory[MAX_RANKS], *keep = malloc(bytes + 1);
    const void *srcs[MAX_RANKS], *old[MAX_RANKS];
    for (size_t r = 0; r < n; r++) {
        memory[r] = malloc(bytes + 2 * GUARD);
        fill(part, memory[r] + shift, parts);
        srcs[r] = old[r] = memory[r] + shift;
    }
    char *out = malloc(bytes + 2 * GUARD);
    memset(out, 0xA5, bytes + 2 * GUARD);
    char *dst = in_place ? memory[n - 1] + shift : out + GUARD + shift;
    if (in_place) {
        memcpy(keep, dst, bytes);
        old[n - 1] = keep;
    }
    group_reduce(dst, srcs, n, count, t, op, stream);
    for (size_t i = 0; i < parts; i++) {
        char want[16];
        expect(part, op, want, old, n, i);
        if (!same(part, dst + i * base_dtype_size(part), want))
            fail_msg("%s %s n %zu count %zu shift %zu stream %d in place %d element %zu",
                     hdl_dtype_name(t), hdl_redop_name(op), n, count, shift, stream,
                     in_place, i);
    }
    if (!in_place) {
        assert_int_equal((uint8_t)dst[-1], 0xA5);
        assert_int_equal((uint8_t)dst[bytes], 0xA5);
    }
    for (size_t r = 0; r < n; r++)
        free(memory[r]);
    free(keep);
    free(out);
}

static void test_every_type_and_operator(void **state)
{
    static const size_t counts[] = {0, 1, 3, 63, 64, 65, 1023, 1025, MAX_COUNT};
    (void)state;
    for (int t = HDL_I8; t <= HDL_F8E5M2; t++)
        for (int op = HDL_SUM; op <= HDL_MAX + 3; op++) {
            if (!group_reduce_supported((enum hdl_dtype)t, (enum hdl_redop)op))
                continue;
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
                for (size_t n = 1; n <= MAX_RANKS; n += 1 + (n == 3))
                    check_case((enum hdl_dtype)t, (enum hdl_redop)op, n, counts[c],
                               next_random() % 5, next_random() & 1, next_random() & 1);
        }
}

static void test_supported_pairs(void **state)
{
    (void)state;
    assert_false(group_reduce_supported(HDL_F32, HDL_BAND));
    assert_false(group_reduce_supported(HDL_BOOL, HDL_AVG));
    assert_false(group_reduce_supported(HDL_C64, HDL_MIN));
    assert_false(group_reduce_supported(HDL_F8E4M3, HDL_PROD));
    assert_false(group_reduce_supported((enum hdl_dtype)99, HDL_SUM));
    assert_false(group_reduce_supported(HDL_I32, (enum hdl_redop) - 1));
    assert_true(group_reduce_supported(HDL_F8E4M3, HDL_SUM));
    assert_true(group_reduce_supported(HDL_C128, HDL_PREMUL_SUM));
    assert_true(group_reduce_supported(HDL_BOOL, HDL_BXOR));
}

static void test_premultiply(void **state)
{
    float f[3] = {1, -2, 4};
    int32_t i[2] = {3, -4};
    uint16_t h[1] = {base_f16_from_float(3)};
    (void)state;
    group_premultiply(f, f, 3, HDL_F32, 0.5);
    assert_true(f[0] == 0.5f && f[1] == -1 && f[2] == 2);
    group_premultiply(i, i, 2, HDL_I32, -2);
    assert_int_equal(i[0], -6);
    assert_int_equal(i[1], 8);
    group_premultiply(h, h, 1, HDL_F16, 2);
    assert_true(base_f16_to_float(h[0]) == 6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_type_and_operator),
        cmocka_unit_test(test_supported_pairs),
        cmocka_unit_test(test_premultiply),
    };
    return cmocka_run_group_tests_name("reduce", tests, NULL, NULL);
}
