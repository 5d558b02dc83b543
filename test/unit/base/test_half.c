/* SPDX-License-Identifier: Apache-2.0 */
/* Small floating-point types: every value survives, and rounding is to nearest, ties to
 * even. */
#include "unit.h"

#include <math.h>

#include "base/half.h"
#include "base/random.h"

/* One type: its conversions through 16-bit numbers, and its largest positive finite code.
 */
struct type {
    const char *name;
    uint32_t codes;
    uint32_t largest;
    float (*to)(uint32_t);
    uint32_t (*from)(float);
};

static float f16_to(uint32_t v)
{
    return base_f16_to_float((uint16_t)v);
}
static uint32_t f16_from(float v)
{
    return base_f16_from_float(v);
}
static float bf16_to(uint32_t v)
{
    return base_bf16_to_float((uint16_t)v);
}
static uint32_t bf16_from(float v)
{
    return base_bf16_from_float(v);
}
static float e4m3_to(uint32_t v)
{
    return base_e4m3_to_float((uint8_t)v);
}
static uint32_t e4m3_from(float v)
{
    return base_e4m3_from_float(v);
}
static float e5m2_to(uint32_t v)
{
    return base_e5m2_to_float((uint8_t)v);
}
static uint32_t e5m2_from(float v)
{
    return base_e5m2_from_float(v);
}

static const struct type types[] = {
    {"f16", 0x10000, 0x7bff, f16_to, f16_from},
    {"bf16", 0x10000, 0x7f7f, bf16_to, bf16_from},
    {"e4m3", 0x100, 0x7e, e4m3_to, e4m3_from},
    {"e5m2", 0x100, 0x7b, e5m2_to, e5m2_from},
};
enum { NUM_TYPES = sizeof(types) / sizeof(types[0]) };

static void test_every_value_survives(void **state)
{
    for (size_t t = 0; t < NUM_TYPES; t++) {
        for (uint32_t code = 0; code < types[t].codes; code++) {
            float value = types[t].to(code);
            if (isnan(value))
                assert_true(isnan(types[t].to(types[t].from(value))));
            else
                assert_int_equal(types[t].from(value), code);
        }
    }
}

/* The neighbours of a value below `largest`: the nearer one wins, a tie goes to the even
 * code. */
static void check_between(const struct type *type, uint32_t low)
{
    double a = (double)type->to(low);
    double b = (double)type->to(low + 1);
    float middle = (float)((a + b) / 2);
    assert_true((double)middle == (a + b) / 2 || type->codes == 0x10000);
    if ((double)middle != (a + b) / 2)
        return;
    assert_int_equal(type->from(middle), low + (low & 1));
    assert_int_equal(type->from(nextafterf(middle, 0.0f)), low);
    assert_int_equal(type->from(nextafterf(middle, INFINITY)), low + 1);
    assert_int_equal(type->from(-middle) & (type->codes / 2 - 1), low + (low & 1));
}

static void test_rounding(void **state)
{
    for (size_t t = 0; t < NUM_TYPES; t++) {
        for (uint32_t low = 0; low < types[t].largest; low++)
            check_between(&types[t], low);
    }
}

static void test_overflow(void **state)
{
    assert_int_equal(base_f16_from_float(65519.0f), 0x7bff);
    assert_int_equal(base_f16_from_float(65520.0f), 0x7c00);
    assert_int_equal(base_f16_from_float(-INFINITY), 0xfc00);
    assert_int_equal(base_bf16_from_float(3.4e38f), 0x7f80);
    assert_int_equal(base_e5m2_from_float(61439.0f), 0x7b);
    assert_int_equal(base_e5m2_from_float(61440.0f), 0x7c);
    assert_int_equal(base_e4m3_from_float(464.0f), 0x7e);
    assert_int_equal(base_e4m3_from_float(465.0f), 0x7f);
    assert_int_equal(base_e4m3_from_float(-INFINITY), 0xff);
    assert_true(isnan(base_bf16_to_float(base_bf16_from_float(NAN))));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_value_survives),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
