/* SPDX-License-Identifier: Apache-2.0 */
/* Founding, sums over sets of ranks, changes of membership, new processes. */
#include "member.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

struct member self;

void member_begin(const struct hdl_context_opts *opts, bool replacement)
{
    self.rank = rank_env("RANK");
    self.size = rank_env("WORLD_SIZE");
    enum hdl_status status;
    double start = rank_now();
    do
        status = hdl_context_create(opts, &self.context);
    while (status == HDL_EINVAL && replacement && rank_now() - start < 10 * RANK_SLOW);
    CHECK(status == HDL_OK, "%s: %s", hdl_status_name(status), hdl_error_detail());
}

void member_end(void)
{
    hdl_group_destroy(self.group);
    hdl_context_destroy(self.context);
}

void member_found(int founders, int capacity, bool join)
{
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .rank = self.rank,
                                  .num_ranks = founders,
                                  .capacity = capacity,
                                  .timeout_us = CHANGE_US,
                                  .join = join};
    CHECK_OK(hdl_group_create(self.context, &opts, &self.group));
}

int member_sum(enum hdl_status *status)
{
    int mine = 1 << self.rank, all = -1;
    *status = hdl_allreduce(self.group, &mine, &all, 1, HDL_I32, HDL_SUM, NULL, NULL);
    return all;
}

int member_sum_ok(void)
{
    enum hdl_status status;
    int all = member_sum(&status);
    CHECK(status == HDL_OK, "%s: %s", hdl_status_name(status), hdl_error_detail());
    return all;
}

void member_sum_until(int wanted, int lost)
{
    double start = rank_now();
    for (int all = -1; all != wanted;) {
        enum hdl_status status;
        uint64_t failed = 0;
        all = member_sum(&status);
        hdl_last_failed(&failed, 1);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        CHECK((status == HDL_OK) == (failed == 0) && (failed & ~(uint64_t)lost) == 0,
              "%s, failed set %#lx, lost %#x", hdl_status_name(status),
              (unsigned long)failed, lost);
        CHECK(rank_now() - start < 15 * RANK_SLOW, "the sum is %#x, not %#x", all,
              wanted);
    }
}

int member_active(void)
{
    uint64_t active = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active};
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(view.num_active == __builtin_popcountll(active), "%d active of %#lx",
          view.num_active, (unsigned long)active);
    return (int)active;
}

void member_admit(int rank)
{
    int32_t which = rank;
    uint64_t first = 0;
    CHECK_OK(hdl_group_admit(self.group, &which, 1, CHANGE_US, &first));
    CHECK(first > 0, "no boundary");
}

void member_evict(int rank)
{
    int32_t which = rank;
    CHECK_OK(hdl_group_evict(self.group, &which, 1, CHANGE_US));
}

void member_await(int rank, bool active)
{
    double start = rank_now();
    while ((member_active() >> rank & 1) != active) {
        CHECK(rank_now() - start < 10 * RANK_SLOW, "rank %d is %sactive", rank,
              active ? "not " : "");
        rank_sleep_ms(1);
    }
}

pid_t member_spawn(int rank, const char *mode)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", rank);
    pid_t child = fork();
    if (child == 0) {
        setenv("RANK", text, 1);
        setenv("LOCAL_RANK", text, 1);
        execl("/proc/self/exe", "rank", mode, (char *)NULL);
        _exit(127);
    }
    CHECK(child > 0, "no process");
    return child;
}

void member_reap(pid_t child)
{
    int code;
    CHECK(waitpid(child, &code, 0) == child && WIFEXITED(code) && WEXITSTATUS(code) == 0,
          "the new process ended with %#x", (unsigned)code);
}
