/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every collective of four ranks while rank 1 is gone: exact results and failed sets.
 * With the argument "manual" the lost rank stays active, and every operation reports it.
 */
#include <string.h>
#include <unistd.h>

#include "rank.h"

enum { LOST = 1, COUNT = 5, FAR = 100000 };

static struct rank self;
static const int32_t poison = -1;
static bool manual;

/* While the lost rank is active, operations over it say so. */
static void expect(const char *what, enum hdl_status status)
{
    uint64_t active = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active};
    CHECK_OK(hdl_group_view(self.group, &view));
    bool still = active & 1 << LOST;
    CHECK(still == manual, "the lost rank is %s", still ? "active" : "not active");
    CHECK(view.size == 4 && view.num_active == (still ? 4 : 3) &&
              view.num_absent == still,
          "size %d active %d absent %d", view.size, view.num_active, view.num_absent);
    CHECK(status == (still ? HDL_INCOMPLETE : HDL_OK), "%s: %s: %s", what,
          hdl_status_name(status), hdl_error_detail());
    rank_check_failed(still ? LOST : -1);
}

static int32_t term(int rank, size_t i)
{
    return (rank + 1) * 100 + (int32_t)(i % 50);
}

static int32_t total(size_t i)
{
    return term(0, i) + term(2, i) + term(3, i);
}

static void check_sum(const char *what, const int32_t *got, size_t count, size_t first)
{
    for (size_t i = 0; i < count; i++)
        CHECK(got[i] == total(first + i), "%s: element %zu is %d, not %d", what, i,
              got[i], total(first + i));
}

static void check_blocks(const char *what, const int32_t *got, size_t count, size_t first)
{
    for (int r = 0; r < 4; r++)
        for (size_t i = 0; i < count; i++) {
            int32_t wanted = r == LOST ? poison : term(r, first + i);
            CHECK(got[(size_t)r * count + i] == wanted,
                  "%s: element %zu of rank %d is %d", what, i, r,
                  got[(size_t)r * count + i]);
        }
}

static void test_all(size_t count)
{
    static int32_t src[4 * FAR], dst[4 * FAR];
    struct hdl_group *g = self.group;
    for (size_t i = 0; i < 4 * count; i++)
        src[i] = term(self.rank, i);
    memset(dst, 0xff, sizeof(dst));
    expect("all_reduce", hdl_allreduce(g, src, dst, count, HDL_I32, HDL_SUM, NULL, NULL));
    check_sum("all_reduce", dst, count, 0);
    memset(dst, 0xff, sizeof(dst));
    expect("all_gather", hdl_allgather(g, src, dst, count, HDL_I32, NULL, NULL));
    check_blocks("all_gather", dst, count, 0);
    memset(dst, 0xff, sizeof(dst));
    expect("all_to_all", hdl_alltoall(g, src, dst, count, HDL_I32, NULL, NULL));
    check_blocks("all_to_all", dst, count, count * (size_t)self.rank);
    memset(dst, 0xff, sizeof(dst));
    expect("reduce_scatter",
           hdl_reduce_scatter(g, src, dst, count, HDL_I32, HDL_SUM, NULL, NULL));
    check_sum("reduce_scatter", dst, count, count * (size_t)self.rank);
    memset(dst, 0xff, sizeof(dst));
    expect("broadcast", hdl_broadcast(g, src, dst, count, HDL_I32, 3, NULL, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK(dst[i] == term(3, i), "broadcast: element %zu is %d", i, dst[i]);
    memset(dst, 0xff, sizeof(dst));
    expect("reduce", hdl_reduce(g, src, dst, count, HDL_I32, HDL_SUM, 2, NULL, NULL));
    if (self.rank == 2)
        check_sum("reduce", dst, count, 0);
    memset(dst, 0xff, sizeof(dst));
    expect("gather", hdl_gather(g, src, dst, count, HDL_I32, 0, NULL, NULL));
    if (self.rank == 0)
        check_blocks("gather", dst, count, 0);
    memset(dst, 0xff, sizeof(dst));
    expect("scatter", hdl_scatter(g, src, dst, count, HDL_I32, 0, NULL, NULL));
    for (size_t i = 0; i < count; i++)
        CHECK(dst[i] == term(0, count * (size_t)self.rank + i),
              "scatter: element %zu is %d", i, dst[i]);
    expect("barrier", hdl_barrier(g, NULL, NULL));
}

/* A lost root is an error that names it, on all; nothing is written. */
static void test_lost_root(void)
{
    int32_t src[COUNT] = {0}, dst[4 * COUNT];
    memset(dst, 0xff, sizeof(dst));
    CHECK_STATUS(hdl_broadcast(self.group, src, dst, COUNT, HDL_I32, LOST, NULL, NULL),
                 HDL_EPEER);
    rank_check_failed(LOST);
    CHECK_STATUS(hdl_scatter(self.group, src, dst, COUNT, HDL_I32, LOST, NULL, NULL),
                 HDL_EPEER);
    CHECK_STATUS(
        hdl_reduce(self.group, src, dst, COUNT, HDL_I32, HDL_SUM, LOST, NULL, NULL),
        HDL_EPEER);
    CHECK_STATUS(hdl_gather(self.group, src, dst, COUNT, HDL_I32, LOST, NULL, NULL),
                 HDL_EPEER);
    for (int i = 0; i < 4 * COUNT; i++)
        CHECK(dst[i] == poison, "element %d was written", i);
}

static void test_point_to_point(void)
{
    int32_t out = self.rank, in = -1;
    struct hdl_op *op;
    CHECK_STATUS(hdl_recv(self.group, &in, 1, HDL_I32, LOST, 0, NULL, NULL), HDL_EPEER);
    rank_check_failed(LOST);
    CHECK_STATUS(hdl_send(self.group, &out, 1, HDL_I32, LOST, 0, NULL, NULL), HDL_EPEER);
    rank_check_failed(LOST);
    /* The living are not disturbed. */
    int next = self.rank == 0 ? 2 : self.rank == 2 ? 3 : 0;
    int before = self.rank == 0 ? 3 : self.rank == 2 ? 0 : 2;
    CHECK_OK(hdl_recv(self.group, &in, 1, HDL_I32, before, 0, NULL, &op));
    CHECK_OK(hdl_send(self.group, &out, 1, HDL_I32, next, 0, NULL, NULL));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    CHECK(in == before, "got %d", in);
}

/* A rank that leaves changes the view: nobody does before all have looked. */
static void wait_for_all(void)
{
    int32_t x = 0;
    for (int r = 2; r < 4 && self.rank == 0; r++)
        CHECK_OK(hdl_recv(self.group, &x, 1, HDL_I32, r, 1, NULL, NULL));
    for (int r = 2; r < 4 && self.rank == 0; r++)
        CHECK_OK(hdl_send(self.group, &x, 1, HDL_I32, r, 1, NULL, NULL));
    if (self.rank == 0)
        return;
    CHECK_OK(hdl_send(self.group, &x, 1, HDL_I32, 0, 1, NULL, NULL));
    CHECK_OK(hdl_recv(self.group, &x, 1, HDL_I32, 0, 1, NULL, NULL));
}

int main(int argc, char **argv)
{
    manual = argc > 1 && strcmp(argv[1], "manual") == 0;
    rank_join(&self);
    if (manual) {
        struct hdl_group_opts opts = {.size = sizeof(opts),
                                      .name = "manual",
                                      .manual_deactivate = true,
                                      .manual_sync = true};
        hdl_group_destroy(self.group);
        CHECK_OK(hdl_group_create(self.context, &opts, &self.group));
    }
    CHECK(self.size == 4, "run it with 4 ranks");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == LOST)
        _exit(0);
    enum hdl_status status = hdl_barrier(self.group, NULL, NULL);
    while (status == HDL_OK)
        status = hdl_barrier(self.group, NULL, NULL);
    CHECK_STATUS(status, HDL_INCOMPLETE);
    test_all(COUNT);
    test_all(FAR);
    test_lost_root();
    test_point_to_point();
    test_all(1);
    wait_for_all();
    rank_leave(&self);
    return 0;
}
