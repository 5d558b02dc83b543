/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clocks jump: the time of day by weeks in both directions, the monotonic clock of one
 * process by a minute, as after a suspended virtual machine. Nobody is taken for dead. A
 * rank that stays in its own code meanwhile is named in the line about slow waits, and
 * waited for.
 */
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "member.h"

enum { MINUTE = 60, WEEKS = 3600 * 24 * 20, SLOW = 1, DEAD_AFTER_MS = 1000 };

static _Atomic long jump, day_jump;
static atomic_bool named;

/* Instead of libc's, for the library, too. */
int clock_gettime(clockid_t id, struct timespec *time)
{
    int result = (int)syscall(SYS_clock_gettime, id, time);
    bool day = id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE;
    time->tv_sec += day ? day_jump : jump;
    return result;
}

static void on_line(void *user, enum hdl_log_level level, const char *line)
{
    (void)user;
    (void)level;
    if (strstr(line, "missing ranks 1") && strstr(line, "allreduce") &&
        strstr(line, "operation"))
        named = true;
}

static void sums(void)
{
    for (int i = 0; i < 20; i++)
        CHECK(member_sum_ok() == (1 << self.size) - 1, "somebody is lost");
    rank_sleep_ms(20);
}

int main(void)
{
    const struct hdl_context_opts opts = {.size = sizeof(opts),
                                          .dead_after_us =
                                              DEAD_AFTER_MS * 1000 * RANK_SLOW,
                                          .log = on_line};
    member_begin(&opts, false);
    member_found(self.size, self.size, false);
    sums();
    for (int i = 0; i < 4; i++) {
        day_jump += i % 2 ? 2 * WEEKS : -WEEKS;
        sums();
        for (int r = 0; r < self.size; r++) {
            if (self.rank == r)
                jump += MINUTE;
            sums();
        }
    }
    /* The others wait for rank 1, and their clocks jump over the five seconds. */
    if (self.rank == SLOW)
        rank_sleep_ms(2 * DEAD_AFTER_MS * RANK_SLOW);
    struct hdl_op *op;
    int mine = 1, all = 0;
    CHECK_OK(hdl_allreduce(self.group, &mine, &all, 1, HDL_I32, HDL_SUM, NULL, &op));
    CHECK(self.rank == SLOW || hdl_op_wait(op, 500000) == HDL_PENDING, "too early");
    jump += self.rank == SLOW ? 0 : MINUTE;
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    CHECK(all == self.size, "sum %d", all);
    CHECK(self.rank == SLOW || named, "no line named the slow rank");
    sums();
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(view.num_active == self.size && view.num_absent == 0, "somebody was lost");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    member_end();
    return 0;
}
