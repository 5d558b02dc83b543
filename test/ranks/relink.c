/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A data link between two ranks is cut while operations run: it is made again, the
 * operations end with HDL_OK and the right bytes, and the reconnection is counted.
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

int main(void)
{
    rank_join(&self);
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
