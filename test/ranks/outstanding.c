/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that overlap: many at once, waited for in any order, tested, dropped. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { MANY = 200, LARGE = 300000 };

static struct rank self;

static float sum_of(int i)
{
    return (float)(self.size * i + self.size * (self.size - 1) / 2);
}

static void test_many(void)
{
    static struct hdl_op *ops[MANY];
    static float values[MANY];
    for (int i = 0; i < MANY; i++) {
        values[i] = (float)(i + self.rank);
        CHECK_OK(hdl_allreduce(self.group, &values[i], &values[i], 1, HDL_F32, HDL_SUM,
                               NULL, &ops[i]));
    }
    /* Ranks wait in different orders. */
    for (int i = 0; i < MANY; i++) {
        int at = self.rank % 2 ? MANY - 1 - i : i;
        CHECK_OK(hdl_op_wait(ops[at], HDL_FOREVER));
        CHECK(values[at] == sum_of(at), "operation %d gave %g", at, (double)values[at]);
        CHECK(hdl_op_failed(ops[at], NULL, 0) == 0, "operation %d has lost ranks", at);
        CHECK(strcmp(hdl_op_detail(ops[at]), "") == 0, "detail '%s'",
              hdl_op_detail(ops[at]));
        hdl_op_free(ops[at]);
    }
}

/* Large ones of several kinds, all in flight, while blocking ones follow them. */
static void test_large(void)
{
    size_t ranks = (size_t)self.size;
    float *sum = malloc(LARGE * sizeof(float));
    int32_t *own = malloc(LARGE * sizeof(int32_t));
    int32_t *all = malloc(LARGE * ranks * sizeof(int32_t));
    double *sent = malloc(LARGE * sizeof(double));
    struct hdl_op *ops[3];
    CHECK(sum && own && all && sent, "no memory");
    for (size_t i = 0; i < LARGE; i++) {
        sum[i] = (float)((int)(i % 1000) + self.rank);
        own[i] = (int32_t)i * 8 + self.rank;
        sent[i] = self.rank == 0 ? (double)i : -1;
    }
    CHECK_OK(hdl_allreduce(self.group, sum, sum, LARGE, HDL_F32, HDL_SUM, NULL, &ops[0]));
    CHECK_OK(hdl_allgather(self.group, own, all, LARGE, HDL_I32, NULL, &ops[1]));
    CHECK_OK(hdl_broadcast(self.group, sent, sent, LARGE, HDL_F64, 0, NULL, &ops[2]));
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    for (int i = 2; i >= 0; i--) {
        CHECK_OK(hdl_op_wait(ops[i], HDL_FOREVER));
        hdl_op_free(ops[i]);
    }
    for (size_t i = 0; i < LARGE; i++) {
        CHECK(sum[i] == sum_of((int)(i % 1000)), "sum %zu is %g", i, (double)sum[i]);
        CHECK(sent[i] == (double)i, "broadcast %zu is %g", i, sent[i]);
        for (size_t r = 0; r < ranks; r++)
            CHECK(all[r * LARGE + i] == (int32_t)i * 8 + (int32_t)r,
                  "gathered %zu of %zu", i, r);
    }
    free(sum);
    free(own);
    free(all);
    free(sent);
}

static void test_waits(void)
{
    struct hdl_op *op;
    int32_t one = 1;
    if (self.rank == self.size - 1)
        rank_sleep_ms(200);
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, &op));
    if (self.size > 1 && self.rank == 0) {
        CHECK_STATUS(hdl_op_test(op), HDL_PENDING);
        double start = rank_now();
        CHECK_STATUS(hdl_op_wait(op, 20000), HDL_PENDING);
        CHECK(rank_now() - start >= 0.02, "the wait returned %g s early",
              0.02 - (rank_now() - start));
        CHECK_STATUS(hdl_op_wait(op, 0), HDL_PENDING);
    }
    enum hdl_status status = HDL_PENDING;
    while (status == HDL_PENDING) {
        status = hdl_op_test(op);
        rank_sleep_ms(1);
    }
    CHECK_OK(status);
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    CHECK(one == self.size, "sum %d", one);
    hdl_op_free(op);
}

/* Dropped handles, and progress while nobody waits. */
static void test_dropped(void)
{
    static int32_t values[MANY];
    struct hdl_op *op;
    for (int i = 0; i < MANY; i++) {
        values[i] = self.rank + i;
        CHECK_OK(hdl_allreduce(self.group, &values[i], &values[i], 1, HDL_I32, HDL_MAX,
                               NULL, &op));
        hdl_op_free(op);
    }
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    double limit = rank_now() + 20;
    do {
        rank_sleep_ms(5);
        CHECK_OK(hdl_group_stats(self.group, &stats));
    } while (stats.ops_done < stats.ops_issued && rank_now() < limit);
    CHECK(stats.ops_done == stats.ops_issued, "nobody makes progress");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    for (int i = 0; i < MANY; i++)
        CHECK(values[i] == self.size - 1 + i, "dropped operation %d gave %d", i,
              values[i]);
}

static void test_counters(void)
{
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK(stats.ops_issued >= 2 * MANY + 5 && stats.ops_issued == stats.ops_done,
          "issued %llu done %llu", (unsigned long long)stats.ops_issued,
          (unsigned long long)stats.ops_done);
    CHECK(stats.ops_failed == 0 && stats.stale_drops == 0 && stats.redone_chunks == 0,
          "a calm group has failed %llu, dropped %llu, redone %llu",
          (unsigned long long)stats.ops_failed, (unsigned long long)stats.stale_drops,
          (unsigned long long)stats.redone_chunks);
}

int main(void)
{
    rank_join(&self);
    test_many();
    test_large();
    test_waits();
    test_dropped();
    test_counters();
    rank_leave(&self);
    return 0;
}
