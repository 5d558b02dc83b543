/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes that would wrap in 32 bits, regions that must not overlap, options out of range.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "moe/config.h"

static struct base_env env;

static enum hdl_status init(struct moe_config *config, struct hdl_moe_opts opts,
                            int ranks)
{
    opts.size = sizeof(opts);
    enum hdl_status status = moe_config_init(&env, config, &opts, ranks);
    if (status == HDL_OK)
        moe_config_free(&env, config);
    return status;
}

static void test_large(void **state)
{
    struct moe_config c;
    struct hdl_moe_opts o = {
        .num_experts = 256, .top_k = 8, .hidden = 7168, .max_tokens = 1024};
    assert_int_equal(init(&c, o, 8), HDL_OK);
    assert_true(c.layout.buffer_bytes == UINT64_C(3758096384));
    assert_true(c.layout.take_rows * 7168 == UINT64_C(1879048192));
    o.max_tokens = 2048;
    assert_int_equal(init(&c, o, 8), HDL_OK);
    assert_true(c.layout.buffer_bytes == UINT64_C(7516192768));
    o.max_tokens = INT32_MAX;
    o.hidden = INT32_MAX;
    assert_int_equal(init(&c, o, 8), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "overflow"));
}

static void test_size_hint(void **state)
{
    struct hdl_moe_opts o = {.size = sizeof(o),
                             .num_experts = 256,
                             .top_k = 8,
                             .hidden = 7168,
                             .max_tokens = 1024,
                             .format = HDL_MOE_FP8};
    struct hdl_moe_sizes s = {.size = sizeof(s)};
    assert_int_equal(hdl_moe_size_hint(&o, 8, &s), HDL_OK);
    assert_true(s.combine_buffer_elements == UINT64_C(1879048192));
    assert_true(s.combine_buffer_bytes == UINT64_C(3758096384));
    assert_true(s.out_rows == 32 * 8 * 1024);
    assert_int_equal(s.row_bytes, 7168);
    assert_int_equal(s.scale_bytes, 56 * 4);
    assert_true(s.arena_bytes > 2 * s.combine_buffer_bytes);
    o.max_tokens = o.hidden = INT32_MAX;
    assert_int_equal(hdl_moe_size_hint(&o, 8, &s), HDL_EINVAL);
    assert_int_equal(hdl_moe_size_hint(&o, 8, NULL), HDL_EINVAL);
}

/* The arena of GPUs is as large whatever protocol rows travel by. */
static void test_gpu_options(void **state)
{
    struct hdl_moe_opts o = {.size = sizeof(o),
                             .num_experts = 256,
                             .top_k = 8,
                             .hidden = 7168,
                             .max_tokens = 128,
                             .format = HDL_MOE_FP8,
                             .memory = HDL_MOE_CUDA};
    struct hdl_moe_sizes s = {.size = sizeof(s)};
    assert_int_equal(hdl_moe_size_hint(&o, 4, &s), HDL_OK);
    /* 2 lanes of 2 halves; lines of 128 B hold 120 */
    size_t rows = 2 * 2 * 4 * 128 * (size_t)(7168 + 224 + 14336);
    assert_true(s.arena_bytes > rows && s.arena_bytes < rows / 10 * 11);
    struct hdl_moe_opts p = o;
    p.protocol = HDL_MOE_BULK;
    assert_int_equal(hdl_moe_size_hint(&p, 4, &s), HDL_OK);
    assert_true(s.arena_bytes > rows && s.arena_bytes < rows / 10 * 11);
    assert_true(s.combine_buffer_bytes == UINT64_C(64) * 4 * 128 * 7168 * 2);
    assert_int_equal(hdl_moe_size_hint(&o, 33, &s), HDL_EINVAL); /* 256 / 33 */
    p = o;
    p.combine_wire = HDL_MOE_WIRE_FP8; /* 4 parts of 14 scales: 8,192 B a contribution */
    assert_int_equal(hdl_moe_size_hint(&p, 4, &s), HDL_OK);
    rows = 2 * 2 * 4 * 128 * (size_t)(7936 + 8192);
    assert_true(s.arena_bytes > rows && s.arena_bytes < rows / 50 * 51);
}

static void test_refused(void **state)
{
    struct moe_config c;
    const struct hdl_moe_opts good = {
        .num_experts = 8, .top_k = 2, .hidden = 8, .max_tokens = 4};
    struct hdl_moe_opts o = good;
    assert_int_equal(init(&c, o, 4), HDL_OK);
    o.num_experts = 10;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "10 experts"));
    assert_non_null(strstr(base_detail(), "4 ranks"));
    o = good;
    o.top_k = 9;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
    o = good;
    o.dp_size = 3;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
    o = good;
    o.max_tokens = 0;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
    o = good;
    o.dtype = HDL_I64;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
    o = good;
    o.exact = true;
    o.layout = HDL_MOE_RANK_MAJOR;
    assert_int_equal(init(&c, o, 4), HDL_EINVAL);
}

static void test_map(void **state)
{
    struct moe_map map;
    const int32_t counts[3] = {2, 0, 3}, ids[5] = {0, 2, 0, 1, 2};
    uint64_t active = 7;
    assert_int_equal(moe_map_init(&env, &map, 3, 3, counts, ids), HDL_OK);
    assert_int_equal(moe_map_local_experts(&map, 1), 0);
    struct moe_place p = moe_map_place(&map, 1, 1, 0, 0, &active);
    assert_true(p.rank == 2 && p.local == 1);
    p = moe_map_place(&map, 1, 0, 2, 5, &active); /* the own rank first */
    assert_true(p.rank == 2 && p.local == 0);
    p = moe_map_place(&map, 1, 2, 1, 0, &active); /* (1 + 0) mod 2: the second holder */
    assert_true(p.rank == 2 && p.local == 2);
    p = moe_map_place(&map, 1, 2, 1, 1, &active);
    assert_true(p.rank == 0 && p.local == 1);
    active = 3; /* rank 2 masked: passed over */
    p = moe_map_place(&map, 1, 2, 1, 0, &active);
    assert_true(p.rank == 0 && p.local == 1);
    moe_map_free(&env, &map);
    assert_int_equal(moe_map_init(&env, &map, 3, 4, counts, ids), HDL_EINVAL);
    assert_non_null(strstr(base_detail(), "expert 3 has no holder"));
    const int32_t twice[5] = {0, 0, 0, 1, 2};
    assert_int_equal(moe_map_init(&env, &map, 3, 3, counts, twice), HDL_EINVAL);
}

static void test_regions(void **state)
{
    struct moe_config c;
    for (int layout = 0; layout < 4; layout++) {
        struct hdl_moe_opts o = {.num_experts = 12,
                                 .top_k = 3,
                                 .hidden = 100,
                                 .max_tokens = 5,
                                 .layout = layout,
                                 .late_weights = true};
        assert_int_equal(init(&c, o, 6), HDL_OK);
        const struct moe_layout *l = &c.layout;
        const struct moe_shape *s = &c.shape;
        size_t half = moe_half(l, 1, 1);
        assert_true(moe_header(l, half, 6) <= half + l->weights);
        assert_true(moe_weights(l, s, half, 6, 0) <= half + l->arrive);
        assert_true(moe_arrive(l, s, half, 6, 0) <= half + l->line_out);
        assert_true(moe_line_out(l, half, 6) <= half + l->line_in);
        assert_true(moe_line_in(l, half, 6) <= half + l->landed);
        assert_true(moe_landed_from(l, s, half, 6, 0) <= half + l->slot);
        assert_true(moe_slot(l, s, half, 6, 0) <= half + l->give);
        assert_true(moe_give(l, s, half, 6, 0, 0) <= half + l->take);
        assert_true(moe_take_from(l, s, half, 6, 0, 0) <= half + l->half_bytes);
        assert_true(half + l->half_bytes <= moe_buffer(l, 1));
        assert_true(moe_buffer(l, 1) + l->buffer_bytes <= l->total_bytes);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_large),       cmocka_unit_test(test_size_hint),
        cmocka_unit_test(test_gpu_options), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_map),         cmocka_unit_test(test_regions),
    };
    base_env_init(&env);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
