/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that the others left behind without their knowledge, and ranks that came back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "group/op.h"
#include "harness.h"

enum { SLOTS = 4 };

static struct harness harness;
static const struct group_algorithm *usual;

static struct hdl_op *sum(uint32_t rank, const int32_t *in, int32_t *out)
{
    struct hdl_op *op;
    CHECK(hdl_allreduce(harness.ranks[rank].group, in, out, 1, HDL_I32, HDL_SUM, NULL,
                        &op) == HDL_OK);
    return op;
}

/* The stop falls between the look at the peers' chunks and the reading of them: meanwhile
 * the others agree on the loss, and use every slot again. */
static enum hdl_status pull_late(struct hdl_op *op, uint64_t chunk)
{
    harness_lose(&harness, 2, true);
    for (int32_t i = 0; i < SLOTS + 1; i++) {
        int32_t in = 100 + i, out[2];
        struct hdl_op *first = sum(0, &in, &out[0]), *second = sum(1, &in, &out[1]);
        CHECK(hdl_op_wait(first, HDL_FOREVER) >= HDL_OK);
        CHECK(hdl_op_wait(second, HDL_FOREVER) >= HDL_OK);
        CHECK(out[0] == 2 * in && out[1] == 2 * in);
        hdl_op_free(first);
        hdl_op_free(second);
    }
    return usual->pull(op, chunk);
}

static void test_stopped_while_reading(void **state)
{
    (void)state;
    int32_t in[3] = {1, 10, 100}, out[3] = {0};
    struct hdl_op *op[3];
    harness_open(&harness, 3, 3, SLOTS, 4096);
    op[2] = sum(2, &in[2], &out[2]);
    usual = op[2]->algorithm;
    struct group_algorithm late = *usual;
    late.pull = pull_late;
    op[2]->algorithm = &late;
    for (uint32_t r = 0; r < 2; r++)
        op[r] = sum(r, &in[r], &out[r]);
    for (uint32_t r = 0; r < 2; r++) {
        CHECK(hdl_op_wait(op[r], HDL_FOREVER) == HDL_OK);
        CHECK(out[r] == 111);
    }
    CHECK(hdl_op_wait(op[2], HDL_FOREVER) == HDL_EFENCED);
    for (uint32_t r = 0; r < 3; r++)
        hdl_op_free(op[r]);
    harness_close(&harness);
}

/* To all: another interval of a rank. */
static void commit(uint32_t rank, uint64_t first, uint64_t last)
{
    struct ctl_view *view = ctl_view_new(&harness.env, harness.capacity, 0);
    CHECK(view);
    for (uint32_t r = 0; r < harness.capacity; r++)
        view->slots[r] = harness.view->slots[r];
    view->slots[rank].first = first;
    view->slots[rank].last = last;
    view->slots[rank].active = last == CTL_X_FOREVER;
    view->epoch = ++harness.epoch;
    ctl_view_count(view);
    for (uint32_t r = 0; r < harness.num_ranks; r++)
        group_commit(harness.ranks[r].group, view);
    ctl_view_unref(view);
}

/* It keeps its rank epoch: that its former interval is closed says nothing of the new. */
static void test_removed_and_back(void **state)
{
    (void)state;
    harness_open(&harness, 2, 2, SLOTS, 4096);
    struct hdl_group *group = harness.ranks[0].group;
    for (uint64_t n = 10; n < 30; n += 10) {
        const struct group_view *view;
        commit(1, 0, GROUP_X_END(n));
        view = atomic_load(&group->view);
        CHECK(!group_reads_no_more(group, view, 1));
        group_closed(group, 1, view->ctl->slots[1].rank_epoch);
        CHECK(group_reads_no_more(group, view, 1));
        commit(1, GROUP_X(n + 1, 0), CTL_X_FOREVER);
        CHECK(!group_reads_no_more(group, atomic_load(&group->view), 1));
    }
    harness_close(&harness);
}

/* A removed rank lives on, and its messages come until it has left. */
static void test_messages_of_a_removed_rank(void **state)
{
    (void)state;
    unsigned char data[8] = {7}, in[8] = {0};
    struct hdl_op *op;
    harness_open(&harness, 2, 2, SLOTS, 4096);
    struct hdl_group *group = harness.ranks[0].group, *other = harness.ranks[1].group;
    CHECK(hdl_recv(group, in, 8, HDL_U8, 1, 1, NULL, &op) == HDL_OK);
    commit(1, 0, GROUP_X_END(0));
    CHECK(hdl_op_test(op) == HDL_PENDING);
    CHECK(hdl_send(other, data, 8, HDL_U8, 0, 1, NULL, NULL) == HDL_OK);
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK && in[0] == 7);
    hdl_op_free(op);
    CHECK(hdl_recv(group, in, 8, HDL_U8, 1, 1, NULL, &op) == HDL_OK);
    atomic_store(&group_segment_head(other->segment)->left, 1);
    commit(1, 0, GROUP_X_END(0));
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_EPEER);
    hdl_op_free(op);
    harness_close(&harness);
}

/* All ranks begin an operation under the view that makes it the last of one of them. */
static void test_last_operation(void **state)
{
    (void)state;
    enum { COUNT = 3000 };
    static int32_t in[COUNT], out[3][COUNT];
    struct hdl_op *op[3];
    setenv("HEDDLE_TEST_PIECES", "1", 1);
    harness_open(&harness, 3, 3, SLOTS, 4096);
    unsetenv("HEDDLE_TEST_PIECES");
    for (size_t i = 0; i < COUNT; i++)
        in[i] = (int32_t)i;
    for (uint32_t r = 0; r < 3; r++) {
        struct ctl_open_op open[CTL_OPEN_MAX];
        struct ctl_answer answer = {.open = open};
        group_freeze(harness.ranks[r].group, &(struct ctl_prepare){.ballot = 2}, &answer);
        CHECK(hdl_allreduce(harness.ranks[r].group, in, out[r], COUNT, HDL_I32, HDL_SUM,
                            NULL, &op[r]) == HDL_OK);
    }
    commit(1, 0, GROUP_X_END(1));
    for (int rounds = 0; rounds < 100; rounds++)
        for (uint32_t r = 0; r < 3; r++)
            CHECK(hdl_op_test(op[r]) >= HDL_OK);
    for (uint32_t r = 0; r < 3; r++) {
        CHECK(hdl_op_test(op[r]) == HDL_OK);
        CHECK(out[r][COUNT - 1] == 3 * (COUNT - 1));
        hdl_op_free(op[r]);
    }
    harness_close(&harness);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stopped_while_reading),
        cmocka_unit_test(test_removed_and_back),
        cmocka_unit_test(test_messages_of_a_removed_rank),
        cmocka_unit_test(test_last_operation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
