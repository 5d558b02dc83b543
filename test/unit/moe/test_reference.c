/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle against values worked out by hand, and the quantisers bit by bit. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "moe/element.h"
#include "moe/reference.h"

enum { MOST = 4096 };

struct setup {
    struct base_env env;
    struct moe_config config;
    struct moe_reference_rank ranks[8];
    float rows[8][MOST], weights[8][MOST], outputs[8][MOST * 4], result[MOST];
    int64_t ids[8][MOST];
    int32_t counts[64];
};

static struct setup *make(uint32_t ranks, int experts, int k, int hidden, int tokens)
{
    struct setup *s = calloc(1, sizeof(*s));
    struct hdl_moe_opts opts = {.size = sizeof(opts),
                                .num_experts = experts,
                                .top_k = k,
                                .hidden = hidden,
                                .max_tokens = tokens,
                                .dtype = HDL_F32};
    base_env_init(&s->env);
    assert_int_equal(moe_config_init(&s->env, &s->config, &opts, (int32_t)ranks), HDL_OK);
    for (uint32_t r = 0; r < ranks; r++) {
        for (int i = 0; i < MOST; i++) {
            s->rows[r][i] = (float)(r * 16 + (uint32_t)(i / hidden) + 1);
            s->weights[r][i] = 0.5f;
        }
        s->ranks[r] = (struct moe_reference_rank){.rows = s->rows[r],
                                                  .ids = s->ids[r],
                                                  .weights = s->weights[r],
                                                  .outputs = s->outputs[r]};
    }
    return s;
}

static void drop(struct setup *s)
{
    moe_config_free(&s->env, &s->config);
    free(s);
}

/* Dispatches on all ranks; expert e gives (e + 1) * x. */
static void experts(struct setup *s)
{
    const struct moe_shape *h = &s->config.shape;
    for (uint32_t r = 0; r < h->ranks; r++) {
        uint32_t local = moe_map_local_experts(&s->config.map, r),
                 at = s->config.map.first[r];
        struct hdl_moe_received out = {
            .size = sizeof(out), .rows = s->outputs[r], .counts = s->counts + at};
        memset(s->outputs[r], 0xff, sizeof(s->outputs[r]));
        moe_reference_dispatch(&s->config, s->ranks, r, &out);
        for (uint32_t e = 0; e < local; e++) {
            float *x = s->outputs[r] +
                       (size_t)e * s->config.layout.sources * h->max_tokens * h->hidden;
            for (size_t i = 0; i < (size_t)s->counts[at + e] * h->hidden; i++)
                x[i] *= (float)(s->config.map.list[at + e] + 1);
        }
    }
}

static void expect(struct setup *s, uint32_t rank, const float *values,
                   const uint8_t *missing)
{
    uint8_t flags[64];
    struct hdl_moe_result out = {
        .size = sizeof(out), .rows = s->result, .missing = flags};
    memset(s->result, 0xff, sizeof(s->result));
    assert_true(moe_reference_combine(&s->config, s->ranks, rank, &out));
    for (int64_t t = 0; t < s->ranks[rank].tokens; t++) {
        assert_int_equal(flags[t], missing ? missing[t] : 0);
        for (uint32_t h = 0; h < s->config.shape.hidden; h++)
            assert_true(s->result[t * s->config.shape.hidden + h] == values[t]);
    }
}

static struct setup *basic(void)
{
    static const int64_t ids[2][6] = {{0, 1, 2, 3, 0, 3}, {1, 2, 3, 0, 2, 1}};
    struct setup *s = make(2, 4, 2, 8, 8);
    for (int r = 0; r < 2; r++) {
        memcpy(s->ids[r], ids[r], sizeof(ids[r]));
        s->ranks[r].tokens = 3;
    }
    return s;
}

static void test_basic(void **state)
{
    struct setup *s = basic();
    experts(s);
    for (int e = 0; e < 4; e++)
        assert_int_equal(s->counts[e], 3);
    expect(s, 0, (float[]){1.5f, 7, 7.5f}, NULL);
    expect(s, 1, (float[]){42.5f, 45, 47.5f}, NULL);
    drop(s);
}

static void test_nothing_chosen(void **state)
{
    struct setup *s = basic();
    for (int i = 0; i < 6; i++)
        s->ids[0][i] = -1;
    experts(s);
    assert_int_equal(s->counts[0] + s->counts[1] + s->counts[2] + s->counts[3], 6);
    expect(s, 0, (float[]){0, 0, 0}, NULL);
    assert_int_equal(base_float_bits(s->result[0]), 0);
    expect(s, 1, (float[]){42.5f, 45, 47.5f}, NULL);
    drop(s);
}

static void test_masked(void **state)
{
    struct setup *s = basic();
    int32_t active[2] = {1, 0};
    s->ranks[0].active = active;
    experts(s);
    expect(s, 0, (float[]){1.5f, 0, 1.5f}, (uint8_t[]){0, 1, 1});
    drop(s);
}

static void test_uneven(void **state)
{
    static const int tokens[4] = {5, 0, 3, 1}, counts[8] = {3, 1, 2, 3, 3, 1, 2, 3};
    struct setup *s = make(4, 8, 2, 8, 8);
    for (int r = 0; r < 4; r++) {
        s->ranks[r].tokens = tokens[r];
        for (int t = 0; t < tokens[r]; t++) {
            s->ids[r][2 * t] = (r + t) % 8;
            s->ids[r][2 * t + 1] = (r + t + 4) % 8;
        }
    }
    experts(s);
    for (int e = 0; e < 8; e++)
        assert_int_equal(s->counts[e], counts[e]);
    expect(s, 0, (float[]){3, 8, 15, 24, 15}, NULL);
    expect(s, 2, (float[]){165, 204, 105}, NULL);
    expect(s, 3, (float[]){294}, NULL);
    drop(s);
}

static void test_named_twice(void **state)
{
    struct setup *s = make(2, 4, 2, 8, 8);
    s->ids[0][0] = s->ids[0][1] = 3;
    s->weights[0][0] = 0.25f;
    s->weights[0][1] = 0.75f;
    s->ranks[0].tokens = s->ranks[1].tokens = 1;
    s->ids[1][0] = s->ids[1][1] = -1;
    experts(s);
    assert_int_equal(s->counts[3], 1);
    expect(s, 0, (float[]){4}, NULL);
    s->config.exact = true;
    expect(s, 0, (float[]){4}, NULL);
    drop(s);
}

static void test_three_ranks(void **state)
{
    static const int counts[9] = {3, 3, 2, 3, 3, 2, 3, 3, 2};
    struct setup *s = make(3, 9, 2, 4, 4);
    for (int r = 0; r < 3; r++) {
        s->ranks[r].tokens = 4;
        for (int t = 0; t < 4; t++) {
            s->ids[r][2 * t] = (3 * r + t) % 9;
            s->ids[r][2 * t + 1] = (3 * r + t + 4) % 9;
        }
    }
    experts(s);
    for (int e = 0; e < 9; e++)
        assert_int_equal(s->counts[e], counts[e]);
    drop(s);
}

static void test_quantise(void **state)
{
    static const uint32_t hidden[] = {1,   7,   16,  100,  127,  128,
                                      129, 130, 256, 1000, 2880, 7168};
    static const uint32_t groups[] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 8, 23, 56};
    for (size_t i = 0; i < 12; i++)
        assert_int_equal(moe_scale_groups(hidden[i]), groups[i]);

    float row[130] = {448.0f, -1.0f, INFINITY, NAN, -0.0f, 1.0f};
    uint8_t data[130], exponents[4];
    float scales[2];
    row[129] = 896.0f;
    moe_reference_quantise(HDL_MOE_FP8, HDL_F32, row, 130, data, scales);
    assert_true(scales[0] == 1.0f && scales[1] == 2.0f);
    assert_int_equal(data[0], 0x7e);
    assert_int_equal(data[1], 0xb8);
    assert_int_equal(data[2], 0x7e);
    assert_int_equal(data[3], 0x7f);
    assert_int_equal(data[4], 0x80);
    assert_int_equal(data[5], 0x38);
    assert_int_equal(data[129], 0x7e);
    row[129] = 897.0f; /* just above a power of two: rounded up */
    moe_reference_quantise(HDL_MOE_FP8_POW2, HDL_F32, row, 130, data, scales);
    assert_true(scales[0] == 1.0f && scales[1] == 4.0f);
    moe_reference_quantise(HDL_MOE_FP8_UE8M0, HDL_F32, row, 130, data, exponents);
    assert_int_equal(exponents[0], 127);
    assert_int_equal(exponents[1], 129);
    assert_int_equal(exponents[2], 0);
    memset(row, 0, sizeof(row));
    moe_reference_quantise(HDL_MOE_FP8, HDL_F32, row, 130, data, scales);
    assert_true(scales[0] == 1e-4f / 448.0f);
    assert_int_equal(data[7], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_basic),       cmocka_unit_test(test_nothing_chosen),
        cmocka_unit_test(test_masked),      cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_named_twice), cmocka_unit_test(test_three_ranks),
        cmocka_unit_test(test_quantise),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
