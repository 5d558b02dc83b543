/* SPDX-License-Identifier: Apache-2.0 */
/* A mapped source that goes two steps on while a rank is between the flag of its header
 * and the header itself: that rank must lack the source, whatever the new header says. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "crowd.h"

enum { HIDDEN = 4, TOKENS = 2 };

static struct crowd *c;
static struct moe_peers_ops slow_ops;
static uint32_t later_tokens; /* of the source, in the steps that the slow rank misses */
static bool refuses;          /* the last of them */
static struct hdl_moe_handle first;
static float sent[TOKENS * HIDDEN], got[2][4 * TOKENS * HIDDEN], sums[TOKENS * HIDDEN];
static int32_t counts[2][1], source_token[2][2 * TOKENS];
static int32_t ids[TOKENS]; /* expert 0, of the slow rank */

static struct hdl_moe_tokens tokens_of(uint32_t n)
{
    static float ones[TOKENS] = {1, 1};
    return (struct hdl_moe_tokens){.size = sizeof(struct hdl_moe_tokens),
                                   .rows = sent,
                                   .topk_ids = ids,
                                   .weights = ones,
                                   .num_tokens = n};
}

static struct hdl_moe_received received_of(int rank)
{
    return (struct hdl_moe_received){.size = sizeof(struct hdl_moe_received),
                                     .rows = got[rank],
                                     .counts = counts[rank],
                                     .source_token = source_token[rank]};
}

/* The source waits for the slow rank no more. */
static void finish(const struct hdl_moe_handle *handle)
{
    int32_t active[2] = {0, 1};
    const struct hdl_moe_call alone = {.size = sizeof(alone), .active = active};
    const struct hdl_moe_outputs out = {.size = sizeof(out), .rows = got[1]};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = sums};
    struct hdl_moe_received in = received_of(1);
    struct hdl_moe *m = c->rank[1].moe;
    assert_true(hdl_moe_dispatch_recv(m, handle, &in, &alone) >= HDL_OK);
    assert_true(hdl_moe_combine(m, handle, &out, &result, &alone) >= HDL_OK);
}

static enum hdl_status run_ahead(struct moe_peers *peers)
{
    struct moe_lane *lane = c->rank[0].moe->lanes;
    if (lane->phase != MOE_SENT || lane->source[1].state != MOE_SOURCE_CAME)
        return HDL_OK;
    c->rank[0].moe->peers->ops = c->rank[1].moe->peers->ops; /* only once */
    finish(&first);
    for (int i = 0; i < 2; i++) {
        struct hdl_moe_handle handle;
        const struct hdl_moe_tokens tokens = tokens_of(later_tokens);
        bool bad = refuses && i == 1;
        ids[0] = bad ? 99 : 0;
        assert_int_equal(hdl_moe_dispatch_send(c->rank[1].moe, &tokens, NULL, &handle),
                         bad ? HDL_EINVAL : HDL_OK);
        if (!bad)
            finish(&handle);
    }
    return HDL_OK;
}

static void leave_behind(uint32_t later, bool refusal)
{
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = 2,
                                      .top_k = 1,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_F32,
                                      .lanes = 1};
    int32_t active[2] = {1, 1};
    const struct hdl_moe_call call = {.size = sizeof(call), .active = active};
    const struct hdl_moe_tokens tokens = tokens_of(TOKENS), none = tokens_of(0);
    struct hdl_moe_received in = received_of(0);
    struct hdl_moe_handle handle;
    c = crowd_create(2, CROWD_MAPPED, &opts, 0);
    later_tokens = later;
    refuses = refusal;
    ids[0] = 0;
    slow_ops = *c->rank[0].moe->peers->ops;
    slow_ops.check = run_ahead;
    assert_int_equal(hdl_moe_dispatch_send(c->rank[1].moe, &tokens, NULL, &first),
                     HDL_OK);
    c->rank[0].moe->peers->ops = &slow_ops;
    assert_int_equal(hdl_moe_dispatch(c->rank[0].moe, &none, &in, &call, &handle),
                     HDL_INCOMPLETE);
    assert_int_equal(active[1], 0);
    for (int i = 0; i < counts[0][0]; i++)
        assert_int_equal(source_token[0][i], -1);
    crowd_destroy(c);
}

static void test_header_without_tokens(void **state)
{
    leave_behind(0, false);
}

static void test_header_with_tokens(void **state)
{
    leave_behind(1, false);
    leave_behind(TOKENS, false);
}

static void test_refusal(void **state)
{
    leave_behind(1, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header_without_tokens),
        cmocka_unit_test(test_header_with_tokens),
        cmocka_unit_test(test_refusal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
