/* SPDX-License-Identifier: Apache-2.0 */
/* Overlapping groups, sub-groups, orders of ranks, and two contexts in one process. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

static struct hdl_group *make(const char *name, const int32_t *ranks, int num_ranks)
{
    for (int i = 0; i < num_ranks; i++) {
        if (ranks[i] != self.rank)
            continue;
        struct hdl_group_opts opts = {.size = sizeof(opts),
                                      .name = name,
                                      .rank = i,
                                      .num_ranks = num_ranks,
                                      .ranks = ranks};
        struct hdl_group *group;
        CHECK_OK(hdl_group_create(self.context, &opts, &group));
        CHECK(hdl_group_rank(group) == i && hdl_group_size(group) == num_ranks,
              "rank %d of %d", hdl_group_rank(group), hdl_group_size(group));
        return group;
    }
    return NULL;
}

static void sum(struct hdl_group *group, const int32_t *ranks, int num_ranks)
{
    int32_t value = self.rank + 1, wanted = 0;
    for (int i = 0; i < num_ranks; i++)
        wanted += ranks[i] + 1;
    CHECK_OK(hdl_allreduce(group, &value, &value, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(value == wanted, "sum %d, not %d", value, wanted);
}

/* {0,1,2} and {1,2,3}: operations of both in flight, in different orders of waiting. */
static void test_overlap(void)
{
    static const int32_t left[] = {0, 1, 2}, right[] = {3, 2, 1};
    static float a[100000], b[100000];
    struct hdl_group *l = make("left", left, 3), *r = make("right", right, 3);
    struct hdl_op *lo = NULL, *ro = NULL;
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 100000; i++)
            a[i] = b[i] = (float)self.rank;
        if (l)
            CHECK_OK(hdl_allreduce(l, a, a, 100000, HDL_F32, HDL_SUM, NULL, &lo));
        if (r)
            CHECK_OK(hdl_allreduce(r, b, b, 100000, HDL_F32, HDL_SUM, NULL, &ro));
        if (r && self.rank == 1)
            CHECK_OK(hdl_op_wait(ro, HDL_FOREVER));
        if (l)
            CHECK_OK(hdl_op_wait(lo, HDL_FOREVER));
        if (r && self.rank != 1)
            CHECK_OK(hdl_op_wait(ro, HDL_FOREVER));
        CHECK(!l || (a[0] == 3 && a[99999] == 3), "left sum %g", (double)a[0]);
        CHECK(!r || (b[0] == 6 && b[99999] == 6), "right sum %g", (double)b[0]);
        hdl_op_free(lo);
        hdl_op_free(ro);
        lo = ro = NULL;
    }
    hdl_group_destroy(r);
    hdl_group_destroy(l);
}

static void test_parts(void)
{
    static const int32_t even[] = {0, 2}, odd[] = {3, 1}, alone[] = {0, 1, 2, 3};
    struct hdl_group *half = self.rank % 2 ? make("odd", odd, 2) : make("even", even, 2);
    struct hdl_group *single = make(self.rank == 0   ? "one0"
                                    : self.rank == 1 ? "one1"
                                    : self.rank == 2 ? "one2"
                                                     : "one3",
                                    &alone[self.rank], 1);
    for (int i = 0; i < 100; i++) {
        sum(half, self.rank % 2 ? odd : even, 2);
        sum(single, &alone[self.rank], 1);
        if (i % 10 == 0)
            sum(self.group, alone, 4);
    }
    CHECK(strcmp(hdl_group_transport(single, 0), "self") == 0, "transport %s",
          hdl_group_transport(single, 0));
    hdl_group_destroy(single);
    hdl_group_destroy(half);
}

/* A second job of the same processes, with ranks in the other order, found by a
 * directory. */
static void test_contexts(void)
{
    char path[64] = "/tmp/heddle-test-XXXXXX";
    if (self.rank == 0)
        CHECK(mkdtemp(path), "no directory");
    CHECK_OK(hdl_broadcast(self.group, path, path, sizeof(path), HDL_U8, 0, NULL, NULL));
    struct hdl_context_opts opts = {.size = sizeof(opts),
                                    .rank = self.size - 1 - self.rank,
                                    .num_ranks = self.size,
                                    .shared_dir = path};
    struct hdl_context *second;
    CHECK_OK(hdl_context_create(&opts, &second));
    struct hdl_group *group = rank_group(second, "mirror");
    int32_t all[4], own = self.rank;
    CHECK_OK(hdl_allgather(group, &own, all, 1, HDL_I32, NULL, NULL));
    for (int r = 0; r < self.size; r++)
        CHECK(all[r] == self.size - 1 - r, "mirror rank %d is %d", r, all[r]);
    static const int32_t ranks[] = {0, 1, 2, 3};
    sum(self.group, ranks, 4);
    hdl_group_destroy(group);
    hdl_context_destroy(second);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 0) {
        char command[128];
        snprintf(command, sizeof(command), "rm -r %s", path);
        CHECK(system(command) == 0, "cannot remove %s", path);
    }
}

int main(void)
{
    rank_join(&self);
    CHECK(self.size == 4, "run it with 4 ranks");
    test_overlap();
    test_parts();
    test_contexts();
    rank_leave(&self);
    return 0;
}
