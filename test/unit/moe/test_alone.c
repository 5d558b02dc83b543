/* SPDX-License-Identifier: Apache-2.0 */
/* One rank whose peers are lost, were never there or do not come: what it waits for, and
 * what it says is missing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "crowd.h"

enum { HIDDEN = 4, TOKENS = 2, RANKS = 3 };

static struct crowd *c;
static struct moe_peers_ops ops; /* of rank 0 */
static const struct moe_peers_ops *usual;
static int waits, unsettled; /* calls of wait; how often puts have still to leave */

/* No peer comes: as a wait that lasted until its deadline. */
static bool wait_in_vain(struct moe_peers *peers, bool (*test)(void *), void *argument,
                         int64_t deadline_ns)
{
    waits++;
    return test(argument);
}

static bool settled_late(struct moe_peers *peers, uint32_t rank, uint64_t mark)
{
    return unsettled == 0 || --unsettled == 0;
}

static void open_crowd(enum crowd_kind kind, bool late_weights)
{
    /* Expert 0 is held by ranks 1 and 2, expert 1 by rank 0. */
    static const int32_t counts[RANKS] = {1, 1, 1}, ids[RANKS] = {1, 0, 0};
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = 2,
                                      .top_k = 1,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_F32,
                                      .expert_counts = counts,
                                      .expert_ids = ids,
                                      .late_weights = late_weights,
                                      .lanes = 1};
    c = crowd_create(RANKS, kind, &opts, 0);
    assert_non_null(c);
    struct moe_peers *peers = c->rank[0].moe->peers;
    usual = peers->ops;
    ops = *usual;
    ops.wait = wait_in_vain;
    ops.settled = settled_late;
    peers->ops = &ops;
    waits = unsettled = 0;
}

static void set_presence(enum moe_presence others)
{
    for (uint32_t r = 1; r < RANKS; r++)
        atomic_store(&c->presence[r], others);
}

/* Each token goes to the expert of its place in `ids`. */
static struct hdl_moe_tokens tokens_of(const int32_t *ids)
{
    static const float rows[TOKENS * HIDDEN], ones[TOKENS] = {1, 1};
    return (struct hdl_moe_tokens){
        .size = sizeof(struct hdl_moe_tokens),
        .rows = rows,
        .topk_ids = ids,
        .weights = c->rank[0].moe->config.shape.late_weights ? NULL : ones,
        .num_tokens = TOKENS};
}

/* Both halves of a step of one rank; returns the status of combine. */
static enum hdl_status step(struct crowd_rank *rank, const int32_t *ids, int32_t *active,
                            uint8_t *missing)
{
    float got[RANKS * TOKENS * HIDDEN], sums[TOKENS * HIDDEN];
    const float ones[TOKENS] = {1, 1};
    int32_t counts[1];
    const struct hdl_moe_tokens tokens = tokens_of(ids);
    struct hdl_moe_received in = {.size = sizeof(in), .rows = got, .counts = counts};
    const struct hdl_moe_outputs out = {
        .size = sizeof(out), .rows = got, .weights = tokens.weights ? NULL : ones};
    const struct hdl_moe_result result = {
        .size = sizeof(result), .rows = sums, .missing = missing};
    const struct hdl_moe_call call = {.size = sizeof(call), .active = active};
    struct hdl_moe_handle handle;
    if (hdl_moe_dispatch(rank->moe, &tokens, &in, &call, &handle) < HDL_OK)
        return HDL_EINTERNAL;
    return hdl_moe_combine(rank->moe, &handle, &out, &result, &call);
}

/* Nothing is waited for of ranks that are lost, however many steps later. */
static void test_lost_peers(void **state)
{
    static const int32_t own[TOKENS] = {1, 1};
    open_crowd(CROWD_MESSAGED, false);
    set_presence(MOE_ABSENT);
    for (int i = 0; i < 5; i++) {
        int32_t active[RANKS] = {1, 1, 1};
        uint8_t missing[TOKENS];
        assert_int_equal(step(&c->rank[0], own, active, missing), HDL_OK);
        assert_true(!active[1] && !active[2] && !missing[0] && !missing[1]);
    }
    assert_int_equal(waits, 0);
    crowd_destroy(c);
}

/* A slot without a rank is nobody who is missed. */
static void test_vacant_slots(void **state)
{
    static const int32_t own[TOKENS] = {1, 1};
    int32_t active[RANKS] = {1, 1, 1};
    uint8_t missing[TOKENS];
    open_crowd(CROWD_MAPPED, false);
    set_presence(MOE_NO_MEMBER);
    assert_int_equal(step(&c->rank[0], own, active, missing), HDL_OK);
    assert_true(active[1] && active[2]);
    crowd_destroy(c);
}

/* A refused step waits for nobody; the one after it does, also if it only sends. */
static void test_after_a_refusal(void **state)
{
    static const int32_t bad[TOKENS] = {0, 99};
    struct hdl_moe_handle handle;
    open_crowd(CROWD_MESSAGED, false);
    const struct hdl_moe_tokens tokens = tokens_of(bad);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(waits, 0);
        assert_int_equal(hdl_moe_dispatch_send(c->rank[0].moe, &tokens, NULL, &handle),
                         HDL_EINVAL);
    }
    assert_int_equal(waits, 1);
    crowd_destroy(c);
}

/* A half is written again when what was put from it has left; so is its memory given
 * back. */
static void test_puts_leave_a_half(void **state)
{
    static const int32_t bad[TOKENS] = {0, 99};
    open_crowd(CROWD_MESSAGED, false);
    const struct hdl_moe_tokens tokens = tokens_of(bad);
    struct hdl_moe_handle handle;
    unsettled = 2;
    assert_int_equal(hdl_moe_dispatch_send(c->rank[0].moe, &tokens, NULL, &handle),
                     HDL_EINVAL);
    assert_int_equal(unsettled, 0);
    assert_int_equal(waits, 1);
    unsettled = 2;
    crowd_destroy(c);
    assert_int_equal(waits, 2);
}

static enum hdl_status ends[RANKS];
static int32_t seen[RANKS][RANKS];
static uint8_t lacks[RANKS][TOKENS];

static void whole_step(struct crowd_rank *rank)
{
    static const int32_t replicated[TOKENS] = {0, 0};
    uint32_t self = rank->rank;
    for (int r = 0; r < RANKS; r++)
        seen[self][r] = 1;
    if (self != 1)
        ends[self] = step(rank, replicated, seen[self], lacks[self]);
}

/* Tokens of an expert that a lost rank held go to the rank that holds it, too. */
static void test_replicas(void **state)
{
    open_crowd(CROWD_MAPPED, false);
    c->rank[0].moe->peers->ops = usual;
    atomic_store(&c->presence[1], MOE_ABSENT);
    crowd_run(c, whole_step);
    for (int r = 0; r < RANKS; r += 2) {
        assert_int_equal(ends[r], HDL_OK);
        assert_true(!lacks[r][0] && !lacks[r][1]);
    }
    crowd_destroy(c);
}

/* A peer sent its tokens and gives no weights: its contributions are dropped, and it is
 * named. */
static void test_late_weights_do_not_come(void **state)
{
    static const int32_t own[TOKENS] = {1, 1};
    int32_t active[RANKS] = {1, 1, 0};
    uint8_t missing[TOKENS];
    struct hdl_moe_handle handle;
    open_crowd(CROWD_MAPPED, true);
    const struct hdl_moe_tokens tokens = tokens_of(own);
    assert_int_equal(hdl_moe_dispatch_send(c->rank[1].moe, &tokens, NULL, &handle),
                     HDL_OK);
    assert_int_equal(step(&c->rank[0], own, active, missing), HDL_INCOMPLETE);
    assert_true(active[0] && !active[1] && !missing[0] && !missing[1]);
    crowd_destroy(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lost_peers),
        cmocka_unit_test(test_vacant_slots),
        cmocka_unit_test(test_after_a_refusal),
        cmocka_unit_test(test_puts_leave_a_half),
        cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_late_weights_do_not_come),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
