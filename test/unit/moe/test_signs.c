/* SPDX-License-Identifier: Apache-2.0 */
/* Two ranks of which one masks the other, by put: without a sign of each other they lack
 * each other for a step, nobody waits for ever, and the next step is whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "crowd.h"

enum { HIDDEN = 4, MASKED = 2, STEPS = MASKED + 2 };

static _Atomic int sent_without_sign;
static int late_mask; /* the masked rank masks the other, too, while it receives */
static enum hdl_status ends[2][STEPS];
static int32_t lost[2][STEPS];
static float sums[2][STEPS][2 * HIDDEN];

/* Each rank has a token for each of both experts; its value is rank * 10 + step. */
static void step(struct crowd_rank *rank, int number)
{
    int self = (int)rank->rank, other = 1 - self;
    float rows[2 * HIDDEN], got[4 * HIDDEN] = {0};
    const float ones[2] = {1, 1};
    const int32_t ids[2] = {0, 1};
    int32_t counts[1], active[2] = {1, 1};
    for (int i = 0; i < 2 * HIDDEN; i++)
        rows[i] = (float)(10 * self + number);
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = rows,
                                          .topk_ids = ids,
                                          .weights = ones,
                                          .num_tokens = 2};
    struct hdl_moe_received in = {.size = sizeof(in), .rows = got, .counts = counts};
    const struct hdl_moe_outputs out = {.size = sizeof(out), .rows = got};
    const struct hdl_moe_result result = {.size = sizeof(result),
                                          .rows = sums[self][number]};
    const struct hdl_moe_call call = {.size = sizeof(call), .active = active};
    struct hdl_moe_handle handle;
    while (self == 1 && !atomic_load(&sent_without_sign))
        usleep(100);
    assert_int_equal(hdl_moe_dispatch_send(rank->moe, &tokens, NULL, &handle), HDL_OK);
    if (self == 0 && number == MASKED)
        atomic_store(&sent_without_sign, 1);
    active[other] = self == 0 ? number >= MASKED : !late_mask || number != MASKED;
    enum hdl_status status = hdl_moe_dispatch_recv(rank->moe, &handle, &in, &call);
    assert_true(status >= HDL_OK);
    active[other] = self == 1 || number >= MASKED;
    ends[self][number] = hdl_moe_combine(rank->moe, &handle, &out, &result, &call);
    lost[self][number] = !active[other];
}

static void steps(struct crowd_rank *rank)
{
    for (int i = 0; i < STEPS; i++)
        step(rank, i);
}

static void run(enum crowd_kind kind)
{
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = 2,
                                      .top_k = 1,
                                      .hidden = HIDDEN,
                                      .max_tokens = 2,
                                      .dtype = HDL_F32,
                                      .lanes = 1};
    struct crowd *c = crowd_create(2, kind, &opts, 0);
    assert_non_null(c);
    atomic_store(&sent_without_sign, 0);
    memset(sums, 0, sizeof(sums));
    crowd_run(c, steps);
    crowd_destroy(c);
}

/* The own expert's part is there; the other's only in whole steps. */
static void check_sums(int self, int number, bool whole)
{
    for (int i = 0; i < 2 * HIDDEN; i++) {
        bool own = i / HIDDEN == self;
        float value = (float)(10 * self + number);
        assert_true(sums[self][number][i] == (own || whole ? value : 0));
    }
}

static void test_no_sign(void **state)
{
    for (late_mask = 0; late_mask < 2; late_mask++) {
        run(CROWD_MESSAGED);
        for (int self = 0; self < 2; self++) {
            assert_int_equal(ends[self][MASKED], HDL_INCOMPLETE);
            assert_true(lost[self][MASKED]);
            check_sums(self, MASKED, false);
            assert_int_equal(ends[self][MASKED + 1], HDL_OK);
            check_sums(self, MASKED + 1, true);
        }
    }
}

/* Where memory is mapped a step needs no sign. */
static void test_mapped(void **state)
{
    late_mask = 0;
    run(CROWD_MAPPED);
    for (int self = 0; self < 2; self++) {
        assert_int_equal(ends[self][MASKED], HDL_OK);
        check_sums(self, MASKED, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_sign),
        cmocka_unit_test(test_mapped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
