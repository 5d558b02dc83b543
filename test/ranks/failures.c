/* SPDX-License-Identifier: Apache-2.0 */
/* Several ranks are lost, one by one or two at once; the last one works alone. */
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;
static uint64_t told; /* every loss shows in at least one operation */

/* Sums until the ranks of `lost` are all gone: told as failed, or not active any more. */
static void until(uint64_t lost)
{
    double limit = rank_now() + 10;
    for (uint64_t gone = 0; gone != lost;) {
        int32_t value = self.rank + 1, wanted = 0;
        uint64_t failed = 0, active = 0;
        struct hdl_view view = {.mask_words = 1, .active = &active};
        enum hdl_status status =
            hdl_allreduce(self.group, &value, &value, 1, HDL_I32, HDL_SUM, NULL, NULL);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        hdl_last_failed(&failed, 1);
        CHECK((status == HDL_INCOMPLETE) == (failed != 0), "%s with failed set %#lx",
              hdl_status_name(status), (unsigned long)failed);
        CHECK((failed & ~lost) == 0, "failed set %#lx blames a living rank",
              (unsigned long)failed);
        CHECK_OK(hdl_group_view(self.group, &view));
        told |= failed;
        gone = told & (failed | ~active);
        for (int r = 0; r < self.size; r++)
            wanted += (failed | (told & ~active)) >> r & 1 ? 0 : r + 1;
        CHECK(value == wanted, "sum %d, not %d, failed %#lx active %#lx", value, wanted,
              (unsigned long)failed, (unsigned long)active);
        CHECK(rank_now() < limit, "the loss of %#lx is not noticed", (unsigned long)lost);
    }
}

static uint64_t views(void)
{
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    return stats.views;
}

int main(int argc, char **argv)
{
    bool at_once = argc > 1 && strcmp(argv[1], "together") == 0;
    rank_join(&self);
    CHECK(self.size == 4, "run it with 4 ranks");
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == 4, "sum %d", one);
    if (at_once) {
        /* Within one another's ballot, or just after it. */
        if (self.rank == 1 || self.rank == 3) {
            double end = rank_now() + 1e-6 * (25 << getpid() % 6 * 2);
            while (self.rank == 3 && rank_now() < end)
                continue;
            raise(SIGKILL);
        }
        uint64_t before = views();
        until(1 << 1 | 1 << 3);
        if (self.rank == 0)
            rank_say("in %s", views() - before == 1 ? "one view" : "two views");
    } else {
        if (self.rank == 1)
            _exit(0);
        until(1 << 1);
        if (self.rank == 3)
            _exit(0);
        until(1 << 1 | 1 << 3);
    }
    if (self.rank == 2)
        _exit(0);
    until(1 << 1 | 1 << 2 | 1 << 3);
    enum hdl_status status = hdl_barrier(self.group, NULL, NULL);
    CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    rank_leave(&self);
    return 0;
}
