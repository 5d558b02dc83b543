/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every rank is stopped for 200 ms again and again, as by a scheduler that has better
 * things to do, and the last one leaves and joins meanwhile: nobody is lost, and every
 * operation ends HDL_OK.
 */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "member.h"

enum { STALL_MS = 200, DEAD_AFTER_MS = 1000, CYCLES = 3 };

/* A process that was forked before the library was used. */
static pid_t start_stalling(void)
{
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0, "no child");
    if (child > 0)
        return child;
    unsigned seed = (unsigned)getpid();
    int stalls = getenv("HEDDLE_SOAK") ? 100 : 4;
    for (int i = 0; i < stalls && getppid() == parent; i++) {
        rank_sleep_ms(rand_r(&seed) % STALL_MS);
        kill(parent, SIGSTOP);
        rank_sleep_ms(STALL_MS);
        kill(parent, SIGCONT);
    }
    _exit(0);
}

int main(void)
{
    pid_t child = start_stalling();
    const struct hdl_context_opts opts = {
        .size = sizeof(opts), .dead_after_us = DEAD_AFTER_MS * 1000 * RANK_SLOW};
    int code, last, all, without;
    member_begin(&opts, false);
    member_found(self.size, self.size, false);
    last = self.size - 1;
    all = (1 << self.size) - 1;
    without = all & ~(1 << last);
    for (int stalled = 1, mine = 1, cycle = 0; stalled || cycle < CYCLES; cycle++) {
        if (mine && waitpid(child, &code, WNOHANG) == child)
            mine = 0;
        for (int i = 0; i < 10; i++)
            CHECK(member_sum_ok() == all, "somebody is lost");
        if (self.rank == last) {
            CHECK_OK(hdl_group_leave(self.group, CHANGE_US));
            CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
        } else {
            member_sum_until(without, 0);
            member_admit(last);
        }
        CHECK_OK(
            hdl_allreduce(self.group, &mine, &stalled, 1, HDL_I32, HDL_MAX, NULL, NULL));
    }
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK(stats.evidence_exit + stats.evidence_closed + stats.evidence_silence == 0,
          "somebody was taken for dead");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    member_end();
    return 0;
}
