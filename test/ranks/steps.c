/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A short life with a joiner, a removal and a return, in which one rank is killed before
 * or after any message that it sends (the runner's sweep chooses). The others come to an
 * end in time: with right sums and the lost rank in the failed set, or, without the
 * coordinator's rank, with HDL_ECOORD.
 *
 *     steps VICTIM       ranks 0 to 2 found the group, 3 joins; 0 has the coordinator
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "member.h"

enum { END = 1 << 8, JOINER = 3, REMOVED = 2, PATIENCE_US = 3000000 };

static int victim;
/* Rank 0: all changes were made, or cannot be made; the end is said in this operation or
 * later, which all ranks take part in. */
static _Atomic uint64_t end_at = UINT64_MAX;

static void arm(void)
{
    union {
        void *symbol;
        void (*call)(void);
    } fault = {dlsym(RTLD_DEFAULT, "fault_arm")};
    if (fault.symbol && self.rank == victim)
        fault.call();
}

/* What a call may end with when the victim is gone. */
static bool excused(enum hdl_status status)
{
    if (victim == 0)
        return status == HDL_ECOORD || status == HDL_ETIMEDOUT || status == HDL_EPEER ||
               status == HDL_EABORTED;
    return status == HDL_ETIMEDOUT || status == HDL_EPEER;
}

/* The rest of the life makes no sense without the victim: a proper end. */
static void check(const char *call, enum hdl_status status)
{
    if (status == HDL_OK)
        return;
    CHECK(excused(status), "%s: %s: %s", call, hdl_status_name(status),
          hdl_error_detail());
    hdl_group_destroy(self.group);
    hdl_context_destroy(self.context);
    exit(0);
}

static bool change(const char *call, enum hdl_status status)
{
    CHECK(status == HDL_OK || excused(status), "%s: %s: %s", call,
          hdl_status_name(status), hdl_error_detail());
    return status == HDL_OK;
}

static void *make_changes(void *argument)
{
    int32_t joiner = JOINER, removed = REMOVED;
    int64_t short_us = PATIENCE_US / 10;
    int64_t patience_us = victim == JOINER ? short_us : PATIENCE_US;
    int64_t again_us = victim == REMOVED ? short_us : PATIENCE_US;
    uint64_t first = 0;
    struct hdl_group *group = self.group;
    (void)change("admit", hdl_group_admit(group, &joiner, 1, patience_us, &first));
    (void)change("evict", hdl_group_evict(group, &removed, 1, PATIENCE_US));
    (void)change("admit", hdl_group_admit(group, &removed, 1, again_us, &first));
    (void)change("sync", hdl_group_sync(group, PATIENCE_US));
    end_at = first;
    return argument;
}

/* All stop after the operation in which rank 0 says so. */
static void loop(void)
{
    double start = rank_now();
    for (int set = 0; !(set & END);) {
        uint64_t failed = 0;
        int mine = 1 << self.rank | (hdl_group_next(self.group) >= end_at ? END : 0);
        enum hdl_status status =
            hdl_allreduce(self.group, &mine, &set, 1, HDL_I32, HDL_SUM, NULL, NULL);
        hdl_last_failed(&failed, 1);
        CHECK(rank_now() - start < 8 * RANK_SLOW, "still %s with sum %#x: %s",
              hdl_status_name(status), set, hdl_error_detail());
        if (status == HDL_ENOTMEMBER) {
            CHECK(self.rank == REMOVED, "removed without a reason");
            check("join", hdl_group_join(self.group, PATIENCE_US, NULL));
            set = 0;
            continue;
        }
        if (status == HDL_INCOMPLETE) {
            CHECK(failed == 1u << victim && !(set >> victim & 1),
                  "failed set %#lx, sum %#x", (unsigned long)failed, set);
            continue;
        }
        check("allreduce", status);
        CHECK((set & ~(15 | END)) == 0 && set >> self.rank & 1, "sum %#x", set);
    }
}

int main(int argc, char **argv)
{
    const struct hdl_context_opts opts = {.size = sizeof(opts),
                                          .timeout_us = PATIENCE_US};
    pthread_t thread;
    victim = argc > 1 ? atoi(argv[1]) : 0;
    self.rank = rank_env("RANK");
    arm();
    enum hdl_status status = hdl_context_create(&opts, &self.context);
    check("context", status);
    struct hdl_group_opts group = {.size = sizeof(group),
                                   .rank = self.rank,
                                   .num_ranks = 3,
                                   .capacity = 4,
                                   .timeout_us = PATIENCE_US / 3,
                                   .join = self.rank == JOINER};
    status = hdl_group_create(self.context, &group, &self.group);
    /* Rank 0's call has failed, too, and it stays 2 s at most for those that are late. */
    if (status == HDL_ECOORD && victim != 0 && self.rank != 0)
        status = HDL_EPEER;
    check("create", status);
    if (self.rank == 0)
        CHECK(pthread_create(&thread, NULL, make_changes, NULL) == 0, "no thread");
    if (self.rank == JOINER)
        check("join", hdl_group_join(self.group, PATIENCE_US, NULL));
    loop();
    if (self.rank == 0)
        pthread_join(thread, NULL);
    hdl_group_destroy(self.group);
    hdl_context_destroy(self.context);
    if (self.rank == victim)
        rank_say("[life] whole");
    return 0;
}
