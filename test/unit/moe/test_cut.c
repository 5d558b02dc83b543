/* SPDX-License-Identifier: Apache-2.0 */
/* A rank is lost between its line of contributions and the contributions themselves: its
 * owner must lack them, and say so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "crowd.h"

enum { HIDDEN = 4, TOKENS = 2 };

static enum hdl_status (*put_all)(struct moe_peers *peers, uint32_t rank,
                                  const struct moe_put *put);
static size_t landed[2]; /* where the flags of rank 1's contributions begin, by half */
static _Atomic int num_cut;
static enum hdl_status dispatched[2], combined[2];
static int32_t still_active;
static uint8_t missing[TOKENS];

static enum hdl_status put_no_contribution(struct moe_peers *peers, uint32_t rank,
                                           const struct moe_put *put)
{
    for (int half = 0; half < 2; half++) {
        if (put->signal < landed[half] ||
            put->signal >= landed[half] + TOKENS * sizeof(uint64_t))
            continue;
        num_cut++;
        return HDL_OK;
    }
    return put_all(peers, rank, put);
}

static void step(struct crowd_rank *rank)
{
    int self = (int)rank->rank;
    float rows[TOKENS * HIDDEN] = {0}, got[2 * TOKENS * HIDDEN], sums[TOKENS * HIDDEN];
    const float ones[TOKENS] = {1, 1};
    const int32_t ids[TOKENS] = {1, 1}; /* the expert of rank 1 */
    int32_t counts[1], active[2] = {1, 1};
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = rows,
                                          .topk_ids = ids,
                                          .weights = ones,
                                          .num_tokens = self == 0 ? TOKENS : 0};
    struct hdl_moe_received in = {.size = sizeof(in), .rows = got, .counts = counts};
    const struct hdl_moe_outputs out = {.size = sizeof(out), .rows = got};
    const struct hdl_moe_result result = {
        .size = sizeof(result), .rows = sums, .missing = missing};
    const struct hdl_moe_call call = {.size = sizeof(call), .active = active};
    struct hdl_moe_handle handle;
    dispatched[self] = hdl_moe_dispatch(rank->moe, &tokens, &in, &call, &handle);
    if (self == 1) {
        combined[1] = hdl_moe_combine_send(rank->moe, &handle, &out, NULL);
        atomic_store(&rank->crowd->presence[1], MOE_ABSENT);
        return;
    }
    combined[0] = hdl_moe_combine(rank->moe, &handle, &out, &result, &call);
    still_active = active[1];
}

static void test_line_without_rows(void **state)
{
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = 2,
                                      .top_k = 1,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_F32,
                                      .lanes = 1};
    struct crowd *c = crowd_create(2, CROWD_MESSAGED, &opts, 0);
    assert_non_null(c);
    const struct hdl_moe *m = c->rank[1].moe;
    const struct moe_config *config = &m->config;
    struct moe_peers_ops ops = *m->peers->ops;
    put_all = ops.put;
    ops.put = put_no_contribution;
    c->rank[1].moe->peers->ops = &ops;
    for (int half = 0; half < 2; half++)
        landed[half] =
            moe_landed_from(&config->layout, &config->shape,
                            moe_half(&config->layout, 0, (uint64_t)half), 1, 0);
    crowd_run(c, step);
    assert_true(num_cut > 0);
    assert_true(dispatched[0] == HDL_OK && dispatched[1] == HDL_OK);
    assert_int_equal(combined[1], HDL_OK);
    assert_int_equal(combined[0], HDL_INCOMPLETE);
    assert_int_equal(still_active, 0);
    assert_true(missing[0] && missing[1]);
    crowd_destroy(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_line_without_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
