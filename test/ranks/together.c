/* SPDX-License-Identifier: Apache-2.0 */
/* Two ranks that begin on one core: the second leaves it within a few operations. */
#include <sched.h>

#include "rank.h"

/* Moves are at least PAUSE_MOST of spread.c apart. */
enum { SKIPPED = 77, ROUNDS = 8, OPERATIONS = 24, PAUSE_MS = 60 };

static void run_on(const cpu_set_t *mask)
{
    CHECK(sched_setaffinity(0, sizeof(*mask), mask) == 0, "sched_setaffinity");
}

static size_t lowest(const cpu_set_t *mask)
{
    size_t core = 0;
    while (!CPU_ISSET(core, mask))
        core++;
    return core;
}

/* Was this rank elsewhere after one of the operations? */
static bool leaves(const struct rank *self, size_t core)
{
    bool left = false;
    for (int i = 0; i < OPERATIONS; i++) {
        rank_sums(self, 1);
        left |= sched_getcpu() != (int)core;
    }
    return left;
}

int main(void)
{
    struct rank self;
    cpu_set_t all, one;
    int left = 0;
    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0, "sched_getaffinity");
    if (CPU_COUNT(&all) < 2)
        return SKIPPED;
    CPU_ZERO(&one);
    CPU_SET(lowest(&all), &one);
    rank_join(&self);
    for (int round = 0; round < ROUNDS; round++) {
        rank_sleep_ms(PAUSE_MS);
        run_on(&one);
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        run_on(&all);
        left += leaves(&self, lowest(&all));
    }
    /* Without it some succeed by chance, with it some fail where others run, too. */
    CHECK(self.rank == 0 || left > ROUNDS / 2, "left the core in %d of %d rounds", left,
          ROUNDS);
    rank_leave(&self);
    return 0;
}
