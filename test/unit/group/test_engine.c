/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting, deadlines, threads, views, memory failures and the dump of the engine. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "group/table.h"
#include "harness.h"

static void sum_ones(struct harness_rank *me)
{
    int32_t one = 1, sum = 0;
    CHECK(hdl_allreduce(me->group, &one, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL) ==
          HDL_OK);
    CHECK(sum == (int32_t)me->harness->num_ranks);
}

/* ----------------------------------------------------------------------- deadlines */

static void late_rank(struct harness_rank *me, void *argument)
{
    (void)argument;
    struct hdl_call call = {.size = sizeof(call), .timeout_us = 50000};
    sum_ones(me);
    if (me->rank == 1)
        return; /* never comes */
    /* A call's own word goes before the group's. */
    struct hdl_call never = {.size = sizeof(never), .timeout_us = HDL_FOREVER};
    struct hdl_op *op, *patient_op;
    me->group->op_timeout_ns = 10 * BASE_NS_PER_MS;
    CHECK(hdl_barrier(me->group, &never, &patient_op) == HDL_OK);
    CHECK(hdl_op_wait(patient_op, 50000) == HDL_PENDING);
    int64_t before = base_now_ns();
    CHECK(hdl_barrier(me->group, &call, &op) == HDL_OK);
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_ETIMEDOUT);
    CHECK(base_now_ns() - before >= 50 * BASE_NS_PER_MS);
    CHECK(strstr(base_detail(), "operation 3") && strstr(base_detail(), "barrier") &&
          strstr(base_detail(), "ranks 1"));
    hdl_op_free(op);
    CHECK(hdl_op_wait(patient_op, HDL_FOREVER) == HDL_ETIMEDOUT);
    hdl_op_free(patient_op);
    CHECK(hdl_barrier(me->group, NULL, NULL) == HDL_ETIMEDOUT);
}

static void test_deadline(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    harness_run(&h, late_rank, NULL);
    harness_close(&h);
}

static void patient(struct harness_rank *me, void *argument)
{
    (void)argument;
    struct hdl_op *op;
    if (me->rank == 1) {
        usleep(60000);
        CHECK(hdl_barrier(me->group, NULL, NULL) == HDL_OK);
        return;
    }
    CHECK(hdl_barrier(me->group, NULL, &op) == HDL_OK);
    CHECK(hdl_op_test(op) == HDL_PENDING);
    CHECK(hdl_op_wait(op, 0) == HDL_PENDING);
    CHECK(hdl_op_wait(op, 10000) == HDL_PENDING);
    CHECK(hdl_op_failed(op, NULL, 0) == 0);
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK);
    CHECK(hdl_op_test(op) == HDL_OK);
    CHECK(hdl_op_source(op, NULL, NULL) == HDL_EINVAL);
    CHECK(strcmp(hdl_op_detail(op), "") == 0);
    hdl_op_free(op);
}

static void test_wait_leaves_pending(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 2, 2, 4, 4096);
    harness_run(&h, patient, NULL);
    harness_close(&h);
}

/* ------------------------------------------------------------------------- threads */

enum { THREADS = 3, EACH = 300 };

struct caller {
    struct harness_rank *rank;
    int tag;
};

/* Collectives come from one thread of a rank; messages from all. */
static void *call_in(void *argument)
{
    struct caller *c = argument;
    struct hdl_group *g = c->rank->group;
    int32_t other = 1 - (int32_t)c->rank->rank;
    for (int32_t i = 0; i < EACH; i++) {
        int32_t out[30], in[30];
        struct hdl_op *op;
        for (int k = 0; k < 30; k++)
            out[k] = c->tag * 1000 + i + k;
        if (c->tag == 0) {
            sum_ones(c->rank);
            continue;
        }
        CHECK(hdl_send(g, out, 30, HDL_I32, other, c->tag, NULL, &op) == HDL_OK);
        CHECK(hdl_recv(g, in, 30, HDL_I32, other, c->tag, NULL, NULL) == HDL_OK);
        CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK);
        CHECK(memcmp(in, out, sizeof(in)) == 0);
        hdl_op_free(op);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    struct harness h;
    pthread_t threads[2][THREADS];
    struct caller callers[2][THREADS];
    harness_open(&h, 2, 2, 4, 4096);
    for (uint32_t r = 0; r < 2; r++) {
        for (int t = 0; t < THREADS; t++) {
            callers[r][t] = (struct caller){.rank = &h.ranks[r], .tag = t};
            CHECK(pthread_create(&threads[r][t], NULL, call_in, &callers[r][t]) == 0);
        }
    }
    for (int i = 0; i < 2 * THREADS; i++)
        pthread_join(threads[i / THREADS][i % THREADS], NULL);
    harness_close(&h);
}

/* --------------------------------------------------------------------------- views */

static void *read_views(void *argument)
{
    struct harness *h = argument;
    struct hdl_group *g = h->ranks[0].group;
    uint64_t newest = 0;
    for (;;) {
        uint64_t active = 0, absent = 0;
        struct hdl_view view = {.mask_words = 1, .active = &active, .absent = &absent};
        CHECK(hdl_group_view(g, &view) == HDL_OK);
        CHECK(view.epoch >= newest);
        newest = view.epoch;
        /* Every committed view of this test has its counter's low bits as absent ranks.
         */
        CHECK(absent == (view.epoch & 0xe));
        CHECK(active == 0xf && view.num_active == 4);
        CHECK(view.num_absent == __builtin_popcountll(absent));
        if (__atomic_load_n(&h->stop[0], __ATOMIC_ACQUIRE))
            return NULL;
    }
}

static void test_views(void **state)
{
    (void)state;
    struct harness h;
    pthread_t readers[3];
    harness_open(&h, 4, 4, 4, 4096);
    uint64_t base = ctl_epoch(1, 16);
    struct hdl_group *g = h.ranks[0].group;
    struct hdl_view small = {.mask_words = 0, .active = &base};
    CHECK(hdl_group_view(g, &small) == HDL_EINVAL && small.mask_words == 1);
    for (uint64_t i = 0; i <= 1000; i++) {
        struct ctl_view *view = ctl_view_new(&h.env, 4, 0);
        view->epoch = base + i;
        for (uint32_t r = 0; r < 4; r++)
            view->slots[r] = (struct ctl_slot){.rank_epoch = ctl_rank_epoch(r, 1),
                                               .last = CTL_X_FOREVER,
                                               .active = true,
                                               .absent = r > 0 && (view->epoch >> r & 1)};
        ctl_view_count(view);
        group_commit(g, view);
        ctl_view_unref(view);
        for (int t = 0; i == 0 && t < 3; t++)
            CHECK(pthread_create(&readers[t], NULL, read_views, &h) == 0);
        if (i % 100 == 0) {
            group_engine_lock(h.ranks[0].engine);
            (void)group_progress(g);
            group_engine_unlock(h.ranks[0].engine);
        }
    }
    __atomic_store_n(&h.stop[0], 1, __ATOMIC_RELEASE);
    for (int t = 0; t < 3; t++)
        pthread_join(readers[t], NULL);
    harness_close(&h);
}

/* -------------------------------------------------------------------------- memory */

static _Thread_local int allocations_left = -1;

static void *counted_alloc(void *user, size_t size)
{
    (void)user;
    if (allocations_left == 0)
        return NULL;
    if (allocations_left > 0)
        allocations_left--;
    return malloc(size);
}

static void counted_release(void *user, void *ptr)
{
    (void)user;
    free(ptr);
}

/* The rank without memory says so; the others learn it; the next call works. */
static void without_memory(struct harness_rank *me, void *argument)
{
    (void)argument;
    size_t counts[3] = {1, 1, 1}, displs[3] = {0, 1, 2};
    int32_t one = 1, all[3];
    for (int i = 0; i < 5; i++) {
        allocations_left = me->rank == 1 ? 0 : -1;
        enum hdl_status status =
            hdl_allgatherv(me->group, &one, all, counts, displs, HDL_I32, NULL, NULL);
        allocations_left = -1;
        CHECK(status == (me->rank == 1 ? HDL_ENOMEM : HDL_EINVAL));
        CHECK(me->rank != 1 || strstr(base_detail(), "no memory"));
        sum_ones(me);
    }
}

/* What begins with a collective ends for all ranks, whichever allocation fails. */
static void without_memory_for_arena(struct harness_rank *me, void *argument)
{
    (void)argument;
    for (int left = 0; left < 3; left++) {
        struct group_arena *arena;
        char none = 0, notes[3];
        allocations_left = me->rank == 1 ? left : -1;
        enum hdl_status status = me->rank == 1
                                     ? group_arena_create(me->group, 4096, &arena)
                                     : group_told(hdl_allgather(me->group, &none, notes,
                                                                1, HDL_U8, NULL, NULL));
        allocations_left = -1;
        CHECK(status == (me->rank == 1 ? HDL_ENOMEM : HDL_EPEER));
        CHECK(strstr(base_detail(), me->rank == 1 ? "arena" : "rank 1 called a refused"));
        sum_ones(me);
    }
}

/* No operation objects are left either. */
static void without_objects(struct harness_rank *me, void *argument)
{
    enum { TAKEN = 100 };
    (void)argument;
    static struct hdl_op *taken[TAKEN];
    int n = 0;
    if (me->rank == 1) {
        allocations_left = 0;
        while (n < TAKEN && (taken[n] = group_op_alloc(me->engine)))
            n++;
        CHECK(n < TAKEN);
    }
    enum hdl_status status = hdl_barrier(me->group, NULL, NULL);
    CHECK(status == (me->rank == 1 ? HDL_ENOMEM : HDL_EINVAL));
    allocations_left = -1;
    while (n > 0)
        group_op_release(taken[--n]);
    sum_ones(me);
}

static void test_no_memory(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    for (uint32_t r = 0; r < 3; r++) {
        h.ranks[r].env.alloc = counted_alloc;
        h.ranks[r].env.release = counted_release;
    }
    harness_run(&h, without_memory, NULL);
    harness_run(&h, without_memory_for_arena, NULL);
    harness_run(&h, without_objects, NULL);
    for (uint32_t r = 0; r < 3; r++) {
        h.ranks[r].env.alloc = NULL;
        h.ranks[r].env.release = NULL;
    }
    harness_close(&h);
}

/* ----------------------------------------------------------------- local completion */

static void local_completion(struct harness_rank *me, void *argument)
{
    (void)argument;
    int32_t one = 1, sum = 0;
    uint64_t mask = 0;
    if (me->rank == 2)
        return;
    CHECK(hdl_allreduce(me->group, &one, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL) ==
          HDL_EPEER);
    CHECK(hdl_last_failed(&mask, 1) == 1 && mask == 4);
    CHECK(hdl_allreduce(me->group, &one, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL) >=
          HDL_OK);
    CHECK(sum == 2);
}

static void test_local_completion(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    for (uint32_t r = 0; r < 3; r++)
        h.ranks[r].group->completion_local = true;
    harness_start(&h, local_completion, NULL);
    pthread_join(h.ranks[2].thread, NULL);
    while (atomic_load(&h.ranks[0].group->next) < 2 ||
           atomic_load(&h.ranks[1].group->next) < 2)
        usleep(1000);
    harness_lose(&h, 2, true);
    harness_join(&h);
    harness_close(&h);
}

/* --------------------------------------------------------------- counters and dump */

static void some_work(struct harness_rank *me, void *argument)
{
    (void)argument;
    for (int i = 0; i < 100; i++)
        sum_ones(me);
}

static void test_stats_and_text(void **state)
{
    (void)state;
    struct harness h;
    char text[65536];
    harness_open(&h, 2, 2, 4, 4096);
    harness_run(&h, some_work, NULL);
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK(hdl_group_stats(h.ranks[0].group, &stats) == HDL_OK);
    CHECK(stats.ops_issued == 100 && stats.ops_done == 100 && stats.ops_failed == 0);
    CHECK(stats.bytes_sent == 400 && stats.bytes_received == 400);
    size_t n = group_engine_describe(h.ranks[0].engine, text, sizeof(text));
    CHECK(n == strlen(text));
    CHECK(strstr(text, "op 100 allreduce count 1 type i32 op sum: HDL_OK"));
    CHECK(strstr(text, "op 37 ") && !strstr(text, "op 36 "));
    harness_close(&h);
}

/* Ranks of more than one word of the mask, each counted once. */
static void test_many_failed(void **state)
{
    (void)state;
    struct harness h;
    struct hdl_op *op;
    uint64_t mask[2];
    harness_open(&h, 2, 100, 4, 65536);
    CHECK(hdl_barrier(h.ranks[0].group, NULL, &op) == HDL_OK);
    group_engine_lock(h.ranks[0].engine);
    for (int i = 0; i < 2; i++) {
        group_op_mark_failed(op, 3);
        group_op_mark_failed(op, 70);
        group_op_mark_failed(op, 99);
    }
    group_op_finish(op, HDL_EPEER);
    group_engine_unlock(h.ranks[0].engine);
    CHECK(hdl_op_failed(op, mask, 2) == 3);
    CHECK(mask[0] == 1 << 3 && mask[1] == (UINT64_C(1) << 6 | UINT64_C(1) << 35));
    hdl_op_free(op);
    harness_close(&h);
}

static void test_overrides(void **state)
{
    (void)state;
    CHECK(group_table_check("") == HDL_OK);
    CHECK(group_table_check("allreduce=direct,reduce=pieces") == HDL_OK);
    CHECK(group_table_check("allreduce=ring") == HDL_EINVAL);
    CHECK(strstr(base_detail(), "\"allreduce=ring\": allreduce has pieces, direct"));
    CHECK(strstr(base_detail(), "allreduce=ring"));
    CHECK(group_table_check("direct") == HDL_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_deadline),       cmocka_unit_test(test_wait_leaves_pending),
        cmocka_unit_test(test_threads),        cmocka_unit_test(test_views),
        cmocka_unit_test(test_no_memory),      cmocka_unit_test(test_local_completion),
        cmocka_unit_test(test_stats_and_text), cmocka_unit_test(test_overrides),
        cmocka_unit_test(test_many_failed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
