/* SPDX-License-Identifier: Apache-2.0 */
/* Several ranks are lost, one by one or two at once; the last one works alone. */
#include <string.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

/* Until the failed set is `lost`; then the sum over the others. */
static void until(uint64_t lost)
{
    double limit = rank_now() + 10;
    for (;;) {
        int32_t value = self.rank + 1;
        uint64_t mask = 0;
        enum hdl_status status =
            hdl_allreduce(self.group, &value, &value, 1, HDL_I32, HDL_SUM, NULL, NULL);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        hdl_last_failed(&mask, 1);
        CHECK((mask & ~lost) == 0, "failed set %#lx blames a living rank",
              (unsigned long)mask);
        int32_t wanted = 0;
        for (int r = 0; r < self.size; r++)
            wanted += mask >> r & 1 ? 0 : r + 1;
        CHECK(value == wanted, "sum %d, failed %#lx", value, (unsigned long)mask);
        if (mask == lost)
            return;
        CHECK(rank_now() < limit, "the loss of %#lx is not noticed", (unsigned long)lost);
    }
}

int main(int argc, char **argv)
{
    bool at_once = argc > 1 && strcmp(argv[1], "together") == 0;
    rank_join(&self);
    CHECK(self.size == 4, "run it with 4 ranks");
    until(0);
    if (at_once) {
        if (self.rank == 1 || self.rank == 3)
            _exit(0);
        until(1 << 1 | 1 << 3);
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
