/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A worker registers in a group and is killed before all founders are there: whoever
 * waits for it hears of it at once, and the next start with its successor is not blocked.
 */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

static void first_life(int size)
{
    struct hdl_context *context = rank_context(1, size);
    struct hdl_group *group;
    struct hdl_group_opts opts = {.size = sizeof(opts)};
    rank_say("registers");
    if (hdl_group_create(context, &opts, &group) == HDL_OK)
        _exit(9);
    _exit(8);
}

int main(void)
{
    int rank = rank_env("RANK"), size = rank_env("WORLD_SIZE");
    struct rank self;
    if (rank == 1) {
        pid_t child = fork();
        int status = 0;
        CHECK(child >= 0, "no child");
        if (child == 0)
            first_life(size);
        rank_sleep_ms(700);
        CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child,
              "no kill");
        CHECK(WIFSIGNALED(status), "the first life ended by itself: %#x", status);
    }
    if (rank == size - 1)
        rank_sleep_ms(1500);
    double start = rank_now();
    self.context = rank_context(rank, size);
    struct hdl_group_opts opts = {.size = sizeof(opts)};
    enum hdl_status status = hdl_group_create(self.context, &opts, &self.group);
    CHECK(status == HDL_OK || rank != 1, "the successor got %s", hdl_error_detail());
    if (status == HDL_EPEER) {
        rank_check_text(hdl_error_detail(), "rank 1 was lost", NULL);
        status = hdl_group_create(self.context, &opts, &self.group);
    }
    CHECK_OK(status);
    CHECK(rank_now() - start < 10 * RANK_SLOW, "joining took %.1f s", rank_now() - start);
    int32_t one = 1;
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == size, "sum %d", one);
    rank_leave(&self);
    return 0;
}
