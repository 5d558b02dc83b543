/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A short life with a joiner, a removal and a return, whose standalone coordinator is
 * killed before or after any message that it sends and started again, and the second one
 * at the same message (the runner's sweep chooses). No operation fails, nobody is lost,
 * and every change is made in the end.
 *
 *     restarts HEDDLE   ranks 0 to 2 found the group, 3 joins; 0 starts the coordinator
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "member.h"

enum { END = 1 << 8, JOINER = 3, REMOVED = 2, LIVES = 2, PATIENCE_US = 2000000 };

static char address[64];
static const char *tool;
static _Atomic uint64_t end_at = UINT64_MAX;
static _Atomic pid_t coordinator;
static _Atomic bool over;
static _Atomic int killed;

/* The first lives end where the sweep says; "heddle" counts from its start. */
static void be_coordinator(int life)
{
    if (life < LIVES)
        (void)setenv("HEDDLE_TEST_FAULT_NOW", "1", 1);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl(tool, "heddle", "coordinator", "--listen", address, "--dead-after", "1",
          (char *)NULL);
    _exit(127);
}

static void *keep_coordinator(void *argument)
{
    for (int life = 0; !over; life++) {
        int code = 0;
        pid_t child = fork();
        if (child == 0)
            be_coordinator(life);
        coordinator = child;
        if (over && child > 0) /* perhaps it was not yet there to be told */
            (void)kill(child, SIGTERM);
        CHECK(child > 0 && waitpid(child, &code, 0) == child, "no coordinator");
        /* Also at its last message, when all is over. */
        bool kill_taken = WIFSIGNALED(code) && WTERMSIG(code) == SIGKILL;
        CHECK(over || kill_taken, "the coordinator ended with %#x", (unsigned)code);
        killed += kill_taken;
    }
    return argument;
}

/* While there is no coordinator a change may fail; it is asked for again. */
static bool again(const char *call, enum hdl_status status, double start)
{
    CHECK(status == HDL_OK || rank_now() - start < 15 * RANK_SLOW, "%s: %s: %s", call,
          hdl_status_name(status), hdl_error_detail());
    return status != HDL_OK;
}

static void *make_changes(void *argument)
{
    int32_t joiner = JOINER, removed = REMOVED;
    uint64_t first = 0;
    struct hdl_group *group = self.group;
    double start = rank_now();
    while (again("admit", hdl_group_admit(group, &joiner, 1, PATIENCE_US, &first), start))
        ;
    while (again("evict", hdl_group_evict(group, &removed, 1, PATIENCE_US), start))
        ;
    while (
        again("admit", hdl_group_admit(group, &removed, 1, PATIENCE_US, &first), start))
        ;
    end_at = hdl_group_next(group) > first ? hdl_group_next(group) : first;
    return argument;
}

static void join(void)
{
    double start = rank_now();
    while (again("join", hdl_group_join(self.group, PATIENCE_US, NULL), start))
        ;
}

/* All stop after the operation in which rank 0 says so. */
static void loop(void)
{
    double start = rank_now();
    for (int set = 0; !(set & END);) {
        int mine = 1 << self.rank | (hdl_group_next(self.group) >= end_at ? END : 0);
        enum hdl_status status =
            hdl_allreduce(self.group, &mine, &set, 1, HDL_I32, HDL_SUM, NULL, NULL);
        CHECK(rank_now() - start < 20 * RANK_SLOW, "still %s with sum %#x",
              hdl_status_name(status), set);
        if (status == HDL_ENOTMEMBER && self.rank == REMOVED) {
            join();
            set = 0;
            continue;
        }
        uint64_t failed = 0;
        hdl_last_failed(&failed, 1);
        CHECK(status == HDL_OK, "allreduce: %s, failed set %#lx: %s",
              hdl_status_name(status), (unsigned long)failed, hdl_error_detail());
        CHECK((set & ~(15 | END)) == 0 && set >> self.rank & 1, "sum %#x", set);
        CHECK((set & 3) == 3, "sum %#x without a founder", set);
    }
}

/* Processes that the runner has, this one counted. */
static int siblings(void)
{
    char path[64], line[256];
    int count = 0, pid, length;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", getppid(), getppid());
    FILE *file = fopen(path, "r");
    if (file && fgets(line, sizeof(line), file))
        for (char *at = line; sscanf(at, "%d%n", &pid, &length) == 1; at += length)
            count++;
    if (file)
        (void)fclose(file);
    return count;
}

int main(int argc, char **argv)
{
    pthread_t keeper, changes;
    CHECK(argc == 2, "restarts HEDDLE");
    tool = argv[1];
    self.rank = rank_env("RANK");
    snprintf(address, sizeof(address), "%s:%d", getenv("MASTER_ADDR"),
             rank_env("MASTER_PORT"));
    const struct hdl_context_opts opts = {.size = sizeof(opts),
                                          .coordinator = address,
                                          .standalone = true,
                                          .dead_after_us = 1000000};
    if (self.rank == 0)
        CHECK(pthread_create(&keeper, NULL, keep_coordinator, NULL) == 0, "no thread");
    CHECK_OK(hdl_context_create(&opts, &self.context));
    struct hdl_group_opts group = {.size = sizeof(group),
                                   .rank = self.rank,
                                   .num_ranks = 3,
                                   .capacity = 4,
                                   .join = self.rank == JOINER};
    double start = rank_now();
    while (again("create", hdl_group_create(self.context, &group, &self.group), start))
        ;
    if (self.rank == 0)
        CHECK(pthread_create(&changes, NULL, make_changes, NULL) == 0, "no thread");
    if (self.rank == JOINER)
        join();
    loop();
    if (self.rank == 0)
        pthread_join(changes, NULL);
    member_end();
    if (self.rank != 0)
        return 0;
    while (siblings() > 1) /* they may need the coordinator, to leave */
        rank_sleep_ms(1);
    over = true;
    (void)kill(coordinator, SIGTERM);
    pthread_join(keeper, NULL);
    if (killed)
        return 128 + SIGKILL; /* what the runner expects of the rank it names */
    rank_say("[life] whole");
    return 0;
}
