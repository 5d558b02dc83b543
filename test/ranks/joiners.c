/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Joiners in bad company.
 *
 *     joiners slow    one that is busy for longer than dead_after is not lost
 *     joiners busy    two at once, while the coordinator's rank waits in an operation
 *     joiners again   one dies after its admission, and a new process takes its slot
 *     joiners vain    one dies before its admission, and another one takes its slot
 *     joiners early   one is admitted before its predecessor's death is in any view
 *     joiners far     one of another host is refused by a group in shared memory
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "member.h"

enum { AFTER = 50 };

/* How long one is slow, or waits. */
static int dead_after_ms = 300, busy_ms = 750, late_ms = 300;

static uint64_t views(void)
{
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    return stats.views;
}

static void sums(int wanted)
{
    for (int i = 0; i < AFTER; i++) {
        int all = member_sum_ok();
        CHECK(all == wanted, "sum %#x, not %#x", all, wanted);
    }
}

/* ---------------------------------------------------------------------------- slow */

static void slow(void)
{
    member_found(2, 3, self.rank == 2);
    if (self.rank == 2) {
        double until = rank_now() + 1e-3 * busy_ms;
        while (rank_now() < until)
            CHECK(member_sum_ok() == 4, "alone");
        until = rank_now() + 1e-3 * busy_ms;
        while (rank_now() < until)
            continue; /* the user's own work */
        CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    } else {
        member_admit(2);
    }
    sums(7);
}

/* ---------------------------------------------------------------------------- busy */

/* Rank 0's thread is inside the operation all the time until rank 1 comes, and rank 1's
 * other thread admits the two that arrive meanwhile. */
static void busy(void)
{
    uint64_t before = 0;
    member_found(2, 4, self.rank >= 2);
    if (self.rank >= 2) {
        CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    } else {
        CHECK(member_sum_ok() == 3, "two");
        before = views();
        if (self.rank == 1) {
            const int32_t both[] = {2, 3};
            rank_sleep_ms(late_ms);
            CHECK_OK(hdl_group_admit(self.group, both, 2, CHANGE_US, NULL));
            rank_sleep_ms(300);
        }
        double start = rank_now();
        CHECK(member_sum_ok() == 3, "two");
        CHECK(self.rank == 1 || rank_now() - start > 0.8e-3 * late_ms,
              "rank 0 did not wait");
        CHECK(views() - before <= 2, "%lu views for two joiners",
              (unsigned long)(views() - before));
    }
    member_sum_until(15, 0);
    sums(15);
}

/* --------------------------------------------------------------------------- again */

static void again(void)
{
    member_found(2, 3, self.rank == 2);
    if (self.rank == 2) {
        CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
        CHECK(member_sum_ok() == 7, "three");
        raise(SIGKILL);
    }
    member_admit(2);
    CHECK(member_sum_ok() == 7, "three");
    member_sum_until(3, 4);
    pid_t child = self.rank == 0 ? member_spawn(2, "replacement") : 0;
    member_admit(2);
    sums(7);
    if (child)
        member_reap(child);
}

static void replacement(void)
{
    member_found(2, 3, true);
    CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    sums(7);
}

/* ---------------------------------------------------------------------------- vain */

/* Until both members see rank 2 so. */
static void await_ready(bool ready)
{
    struct hdl_member member = {.size = sizeof(member)};
    do {
        rank_sleep_ms(1);
        CHECK_OK(hdl_group_member(self.group, 2, &member));
    } while ((member.member == HDL_MEMBER_READY) != ready);
    member_sum_until(3, 4);
}

static void vain(void)
{
    member_found(3, 3, false);
    CHECK(member_sum_ok() == 7, "three");
    if (self.rank == 2)
        raise(SIGKILL);
    member_sum_until(3, 4);
    pid_t child = self.rank == 0 ? member_spawn(2, "replacement") : 0;
    await_ready(true);
    if (child) {
        (void)kill(child, SIGKILL);
        (void)waitpid(child, NULL, 0);
    }
    await_ready(false);
    child = self.rank == 0 ? member_spawn(2, "replacement") : 0;
    member_admit(2);
    sums(7);
    if (child)
        member_reap(child);
}

/* --------------------------------------------------------------------------- early */

/* The members know of the death before the library does: whoever admits means the next
 * process, not the one that is still in the view. */
static void early(void)
{
    member_found(3, 3, false);
    CHECK(member_sum_ok() == 7, "three");
    if (self.rank == 2) {
        rank_say("stop me");
        rank_sleep_ms(60000);
    }
    rank_sleep_ms(self.rank == 0 ? 50 : 100);
    if (member_active() & 4)
        rank_say("before the view");
    int32_t two = 2;
    if (self.rank == 0) {
        /* Rank 2 is stopped, killed in a moment, and replaced after that. */
        double start = rank_now();
        CHECK_STATUS(hdl_group_admit(self.group, &two, 1, 200000, NULL), HDL_ETIMEDOUT);
        CHECK(rank_now() - start > 0.19, "told at once that a stopped rank is in");
        rank_say("kill it");
    }
    pid_t child = self.rank == 0 ? member_spawn(2, "early_replacement") : 0;
    member_admit(2);
    CHECK(member_active() == 7, "active %#x", member_active());
    member_sum_until(7, 4);
    if (child)
        member_reap(child);
}

static void early_replacement(void)
{
    member_found(3, 3, true);
    CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    member_sum_until(7, 4);
}

/* ----------------------------------------------------------------------------- far */

static void far(void)
{
    member_found(2, 2, false);
    CHECK(member_sum_ok() == 3, "two");
    CHECK(strcmp(hdl_group_transport(self.group, 1 - self.rank), "shm") == 0, "%s",
          hdl_group_transport(self.group, 1 - self.rank));
    if (self.rank == 1)
        raise(SIGKILL);
    member_sum_until(1, 2);
    setenv("HEDDLE_HOST", "elsewhere", 1);
    pid_t child = member_spawn(1, "far_replacement");
    member_reap(child);
    /* Another one, on this host, is welcome. */
    unsetenv("HEDDLE_HOST");
    child = member_spawn(1, "near_replacement");
    member_admit(1);
    sums(3);
    member_reap(child);
}

static void far_replacement(bool near)
{
    member_found(2, 2, true);
    if (!near) {
        CHECK_STATUS(hdl_group_join(self.group, CHANGE_US, NULL), HDL_ENOTSUP);
        rank_check_text(hdl_error_detail(), "rank 1 is on another host", NULL);
        return;
    }
    CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    sums(3);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "slow";
    if (getenv("HEDDLE_SOAK"))
        dead_after_ms = 1000, busy_ms = 5000, late_ms = 10000;
    const struct hdl_context_opts opts = {
        .size = sizeof(opts), .dead_after_us = dead_after_ms * 1000 * RANK_SLOW};
    member_begin(strcmp(mode, "slow") == 0 ? &opts : NULL, strstr(mode, "replacement"));
    if (strcmp(mode, "slow") == 0)
        slow();
    else if (strcmp(mode, "busy") == 0)
        busy();
    else if (strcmp(mode, "again") == 0)
        again();
    else if (strcmp(mode, "replacement") == 0)
        replacement();
    else if (strcmp(mode, "vain") == 0)
        vain();
    else if (strcmp(mode, "early") == 0)
        early();
    else if (strcmp(mode, "early_replacement") == 0)
        early_replacement();
    else if (strcmp(mode, "far") == 0)
        far();
    else
        far_replacement(strcmp(mode, "near_replacement") == 0);
    member_end();
    return 0;
}
