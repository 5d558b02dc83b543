/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A data link between two ranks is cut while operations run: it is made again, the
 * operations end with HDL_OK and the right bytes, and the reconnection is counted.
 * Argument "held": it stays cut for longer than link_timeout, in a group with manual
 * policy: the operation ends HDL_ELINK on all, nobody is removed, and once the link is
 * back the next one works.
 */
#include <stdlib.h>
#include <string.h>

#include "group/group.h"
#include "net/net.h"
#include "rank.h"

enum { COUNT = 1 << 18, ROUNDS = 30 };

static struct rank self;

static void sums(int rounds)
{
    static float data[COUNT];
    for (int round = 0; round < rounds; round++) {
        for (size_t i = 0; i < COUNT; i++)
            data[i] = (float)((i + (size_t)round) % 1000) + (float)self.rank;
        CHECK_OK(
            hdl_allreduce(self.group, data, data, COUNT, HDL_F32, HDL_SUM, NULL, NULL));
        for (size_t i = 0; i < COUNT; i++) {
            float wanted = (float)((i + (size_t)round) % 1000) * (float)self.size +
                           (float)(self.size * (self.size - 1) / 2);
            CHECK(data[i] == wanted, "element %zu of round %d is %g, not %g", i, round,
                  (double)data[i], (double)wanted);
        }
    }
}

static uint64_t reconnects(void)
{
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    return stats.reconnects;
}

static void held(void)
{
    struct hdl_group *group;
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .name = "manual",
                                  .manual_deactivate = true,
                                  .manual_sync = true};
    CHECK_OK(hdl_group_create(self.context, &opts, &group));
    /* The other group would remove a rank. */
    hdl_group_destroy(self.group);
    self.group = NULL;
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    struct net *net = group->engine->net;
    if (self.rank == 0) {
        net_test_hold_links(net, true);
        CHECK(net_test_break_link(group->peer[1].remote) > 0, "nothing was cut");
    }
    double start = rank_now();
    one = 1;
    CHECK_STATUS(hdl_allreduce(group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL),
                 HDL_ELINK);
    double waited = rank_now() - start;
    CHECK(one == 1, "the buffer was written: %d", one);
    CHECK(waited > 0.5 && waited < 10, "HDL_ELINK after %.2f s", waited);
    if (self.rank == 0)
        net_test_hold_links(net, false);
    one = 1;
    CHECK_OK(hdl_allreduce(group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == self.size, "sum %d", one);
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_view(group, &view));
    CHECK(view.num_absent == 0 && view.num_active == self.size, "somebody was lost");
    CHECK_OK(hdl_barrier(group, NULL, NULL));
    hdl_group_destroy(group);
}

int main(int argc, char **argv)
{
    rank_join(&self);
    if (argc > 1 && strcmp(argv[1], "held") == 0) {
        held();
        rank_leave(&self);
        return 0;
    }
    sums(5);
    int next = (self.rank + 1) % self.size;
    const char *path = hdl_group_transport(self.group, next);
    CHECK(strncmp(path, "fabric", 6) == 0, "the link is %s", path);
    uint64_t before = reconnects();
    struct hdl_op *op;
    static float data[COUNT];
    CHECK_OK(hdl_allreduce(self.group, data, data, COUNT, HDL_F32, HDL_SUM, NULL, &op));
    if (self.rank == 0)
        CHECK(net_test_break_link(self.group->peer[next].remote) > 0, "nothing was cut");
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    sums(ROUNDS);
    CHECK(self.rank != 0 || reconnects() > before, "the reconnection was not counted");
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(view.num_absent == 0 && view.num_active == self.size, "somebody was lost");
    /* Nobody leaves before all have looked. */
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    rank_leave(&self);
    return 0;
}
