/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks join, leave, come back and are replaced while the others go on.
 *
 *     elastic grow      founders 0 and 1 loop; 2, then 3 are admitted from another thread
 *     elastic together  all members call admit at the same place: that is the boundary
 *     elastic remove    rank 1, then 3 are removed as planned and come back in place
 *     elastic replace   rank 1 is killed while all loop; a new process takes its place
 *     elastic alone     a joiner works over itself, wrong identities are refused
 *     elastic cycles    leave and join, 30 times
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

enum { AFTER = 50 };

static int rank, size;
static struct hdl_context *context;
static struct hdl_group *group;

static void found(int founders, int capacity, bool join)
{
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .rank = rank,
                                  .num_ranks = founders,
                                  .capacity = capacity,
                                  .timeout_us = 20000000,
                                  .join = join};
    CHECK_OK(hdl_group_create(context, &opts, &group));
}

static int sum(enum hdl_status *status)
{
    int mine = 1 << rank, all = -1;
    *status = hdl_allreduce(group, &mine, &all, 1, HDL_I32, HDL_SUM, NULL, NULL);
    return all;
}

static int sum_ok(void)
{
    enum hdl_status status;
    int all = sum(&status);
    CHECK(status == HDL_OK, "%s: %s", hdl_status_name(status), hdl_error_detail());
    return all;
}

static int active_mask(void)
{
    uint64_t active = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active};
    CHECK_OK(hdl_group_view(group, &view));
    CHECK(view.num_active == __builtin_popcountll(active), "%d active of %#lx",
          view.num_active, (unsigned long)active);
    return (int)active;
}

static void admit(int r)
{
    int32_t which = r;
    uint64_t first = 0;
    CHECK_OK(hdl_group_admit(group, &which, 1, 15000000, &first));
    CHECK(first > 0, "no boundary");
}

static void evict(int r)
{
    int32_t which = r;
    CHECK_OK(hdl_group_evict(group, &which, 1, 15000000));
}

/* ------------------------------------------------------------------------------ grow */

static void *admit_two(void *argument)
{
    (void)argument;
    rank_sleep_ms(20);
    admit(2);
    rank_sleep_ms(20);
    admit(3);
    return NULL;
}

/* Loops until all four have taken part AFTER times; values may only grow, and what the
 * view says before the call is what the call sums. */
static void loop_growing(int last, uint64_t from)
{
    int before = 0;
    uint64_t switched[16] = {0};
    for (int after = 0; after < AFTER;) {
        uint64_t number = hdl_group_next(group);
        CHECK(from == 0 || number >= from, "operation %lu", (unsigned long)number);
        int all = sum_ok();
        CHECK(all >= before, "sum %d after %d", all, before);
        if (all != before)
            switched[all] = number;
        before = all;
        after += all == last;
    }
    CHECK(active_mask() == last, "active %#x", active_mask());
    /* All switched at the same operations. */
    uint64_t mine[2] = {switched[7], switched[15]}, most[2], least[2];
    if (rank == 2)
        mine[0] = from;
    if (rank == 3)
        mine[0] = 0, mine[1] = from;
    CHECK_OK(hdl_allreduce(group, mine, most, 2, HDL_U64, HDL_MAX, NULL, NULL));
    if (rank == 3)
        mine[0] = UINT64_MAX;
    CHECK_OK(hdl_allreduce(group, mine, least, 2, HDL_U64, HDL_MIN, NULL, NULL));
    CHECK(most[0] == least[0] && most[1] == least[1], "switched at %lu..%lu and %lu..%lu",
          (unsigned long)least[0], (unsigned long)most[0], (unsigned long)least[1],
          (unsigned long)most[1]);
}

static void grow(void)
{
    pthread_t thread;
    uint64_t first = 0;
    found(2, 4, rank >= 2);
    if (rank == 0)
        CHECK(pthread_create(&thread, NULL, admit_two, NULL) == 0, "no thread");
    if (rank >= 2) {
        CHECK(sum_ok() == 1 << rank, "alone");
        CHECK_OK(hdl_group_join(group, 20000000, &first));
        CHECK(hdl_group_next(group) == first, "next %lu, first %lu",
              (unsigned long)hdl_group_next(group), (unsigned long)first);
    }
    loop_growing(15, first);
    if (rank == 0)
        pthread_join(thread, NULL);
}

static void together(void)
{
    uint64_t first = 0;
    found(2, 4, rank >= 2);
    if (rank >= 2) {
        for (int i = 0; i < 100; i++)
            CHECK(sum_ok() == 1 << rank, "alone");
        CHECK_OK(hdl_group_join(group, 20000000, &first));
    } else {
        int32_t both[2] = {2, 3};
        for (int i = 0; i < 10; i++)
            CHECK(sum_ok() == 3, "two");
        CHECK_OK(hdl_group_admit(group, both, 2, 20000000, &first));
    }
    CHECK(first == 11, "first is %lu", (unsigned long)first);
    CHECK(active_mask() == 15 && hdl_group_size(group) == 4, "active %#x", active_mask());
    for (int i = 0; i < AFTER; i++)
        CHECK(sum_ok() == 15, "four");
    /* A large one, and messages with the newcomers, both ways. */
    enum { COUNT = 300000 };
    float *values = malloc(COUNT * sizeof(float));
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(rank + 1);
    CHECK_OK(hdl_allreduce(group, values, values, COUNT, HDL_F32, HDL_SUM, NULL, NULL));
    for (int i = 0; i < COUNT; i++)
        CHECK(values[i] == 10, "element %d is %g", i, (double)values[i]);
    free(values);
    int to = (rank + 1) % 4, from = (rank + 3) % 4, got[100], sent[100];
    for (int i = 0; i < 100; i++)
        sent[i] = rank * 1000 + i;
    struct hdl_op *op;
    CHECK_OK(hdl_send(group, sent, 100, HDL_I32, to, 5, NULL, &op));
    CHECK_OK(hdl_recv(group, got, 100, HDL_I32, from, 5, NULL, NULL));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    for (int i = 0; i < 100; i++)
        CHECK(got[i] == from * 1000 + i, "element %d is %d", i, got[i]);
}

/* ---------------------------------------------------------------------------- remove */

/* P-14: the others go on at once; who is removed lives, may work alone no more, and comes
 * back in place. */
static void remove_planned(void)
{
    found(4, 4, false);
    CHECK(sum_ok() == 15, "four");
    int gone[2] = {1, 3}, mask = 15;
    for (int i = 0; i < 2; i++) {
        mask &= ~(1 << gone[i]);
        if (rank == 0)
            evict(gone[i]);
        if (rank == gone[i]) {
            double start = rank_now();
            while (active_mask() & 1 << rank)
                CHECK(rank_now() - start < 10, "never removed");
            enum hdl_status status;
            (void)sum(&status);
            CHECK(status == HDL_ENOTMEMBER, "%s", hdl_status_name(status));
            CHECK_OK(hdl_group_join(group, 60000000, NULL));
            break;
        }
        double start = rank_now();
        while (active_mask() & 1 << gone[i])
            CHECK(rank_now() - start < 10, "never seen");
        for (int k = 0; k < AFTER; k++)
            CHECK(sum_ok() == mask, "without %d", gone[i]);
        CHECK(hdl_last_failed(NULL, 0) == 0, "a planned removal is no failure");
    }
    if (rank == 0 || rank == 2) {
        /* Before the commit of the first both are at the same place. */
        int32_t both[2] = {1, 3};
        CHECK_OK(hdl_group_admit(group, both, 2, 20000000, NULL));
    }
    for (int k = 0; k < AFTER; k++)
        CHECK(sum_ok() == 15, "all again");
    CHECK(active_mask() == 15, "active %#x", active_mask());
    CHECK_OK(hdl_barrier(group, NULL, NULL));
}

/* --------------------------------------------------------------------------- replace */

static pid_t child;

/* A new process with this program, as rank `as`. */
static void spawn(int as, const char *mode)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", as);
    child = fork();
    if (child == 0) {
        setenv("RANK", text, 1);
        setenv("LOCAL_RANK", text, 1);
        execl("/proc/self/exe", "elastic", mode, (char *)NULL);
        _exit(127);
    }
    CHECK(child > 0, "no process");
}

static void reap(void)
{
    int code;
    CHECK(waitpid(child, &code, 0) == child && WIFEXITED(code) && WEXITSTATUS(code) == 0,
          "the new process ended with %#x", (unsigned)code);
}

/* Everybody goes on until the sum over all is right AFTER times in a row. */
static void loop_until_whole(void)
{
    bool lost = false;
    for (int after = 0; after < AFTER;) {
        enum hdl_status status;
        int all = sum(&status);
        uint64_t mask = 0;
        hdl_last_failed(&mask, 1);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        CHECK(status == HDL_OK ? mask == 0 : mask == 2, "failed %#lx",
              (unsigned long)mask);
        CHECK(all == 15 || all == 13, "sum %d", all);
        lost |= all == 13;
        after = lost && all == 15 ? after + 1 : 0;
    }
}

static void replace(void)
{
    found(4, 4, false);
    for (int i = 0; i < 20; i++)
        CHECK(sum_ok() == 15, "four");
    if (rank == 1) {
        rank_say("kill me");
        for (;;)
            (void)sum_ok();
    }
    enum hdl_status status = HDL_OK;
    while (status == HDL_OK)
        (void)sum(&status);
    CHECK(status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    if (rank == 0)
        spawn(1, "replacement");
    int32_t one = 1;
    CHECK_OK(hdl_group_admit(group, &one, 1, 20000000, NULL));
    for (int i = 0; i < AFTER; i++)
        CHECK(sum_ok() == 15, "whole");
    if (rank == 0)
        reap();
}

/* The replacement asks before the death is agreed, the survivors do not stop. */
static void *admit_one(void *argument)
{
    (void)argument;
    spawn(1, "replacement_looping");
    while (active_mask() & 2)
        rank_sleep_ms(1);
    admit(1);
    return NULL;
}

static void replace_looping(void)
{
    pthread_t thread;
    found(4, 4, false);
    for (int i = 0; i < 20; i++)
        CHECK(sum_ok() == 15, "four");
    if (rank == 0)
        CHECK(pthread_create(&thread, NULL, admit_one, NULL) == 0, "no thread");
    if (rank == 1) {
        rank_say("kill me");
        for (;;)
            (void)sum_ok();
    }
    loop_until_whole();
    if (rank == 0) {
        pthread_join(thread, NULL);
        reap();
    }
}

static void replacement(bool looping)
{
    found(4, 4, true);
    CHECK_OK(hdl_group_join(group, 20000000, NULL));
    for (int i = 0; i < AFTER; i++)
        CHECK(sum_ok() == 15, "whole%s", looping ? ", looping" : "");
}

/* ----------------------------------------------------------------------------- alone */

static void alone(void)
{
    struct hdl_group *other;
    found(2, 3, rank >= 2);
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .num_ranks = 2,
                                  .capacity = 3,
                                  .join = true,
                                  .timeout_us = 500000};
    if (rank == 2) {
        for (int i = 0; i < 5; i++)
            CHECK(sum_ok() == 4, "alone");
        int mine = 7, all[3] = {-1, -1, -1};
        CHECK_OK(hdl_allgather(group, &mine, all, 1, HDL_I32, NULL, NULL));
        CHECK(all[0] == -1 && all[1] == -1 && all[2] == 7, "%d %d %d", all[0], all[1],
              all[2]);
        CHECK_OK(hdl_barrier(group, NULL, NULL));
        CHECK_STATUS(hdl_group_join(group, 300000, NULL), HDL_ETIMEDOUT);
        rank_check_text(hdl_error_detail(), "no member has admitted rank 2", NULL);
        CHECK(sum_ok() == 4, "alone after a failed join");
        int wrong[3] = {3, -1, 1};
        for (int i = 0; i < 3; i++) {
            opts.rank = wrong[i];
            CHECK_STATUS(hdl_group_create(context, &opts, &other), HDL_EINVAL);
        }
        CHECK_OK(hdl_group_join(group, 20000000, NULL));
    } else {
        for (int i = 0; i < AFTER; i++)
            CHECK(sum_ok() == 3, "two");
        rank_sleep_ms(1000);
        struct hdl_member member = {.size = sizeof(member)};
        CHECK_OK(hdl_group_member(group, 1, &member));
        CHECK(member.member == HDL_MEMBER_ACTIVE && member.process == HDL_PROCESS_LIVE &&
                  member.job_rank == 1 && member.last == UINT64_MAX,
              "member %d process %d", member.member, member.process);
        int32_t two = 2;
        CHECK_OK(hdl_group_admit(group, &two, 1, 20000000, NULL));
    }
    for (int i = 0; i < AFTER; i++)
        CHECK(sum_ok() == 7, "three");
}

/* ---------------------------------------------------------------------------- cycles */

static _Atomic uint64_t told;

static void on_view(void *user, struct hdl_group *g, uint64_t epoch)
{
    CHECK(user == &told && g == group, "another's callback");
    told = epoch;
}

static void cycles(void)
{
    found(3, 3, false);
    CHECK_OK(hdl_group_on_view(group, on_view, (void *)&told));
    for (int i = 0; i < 30; i++) {
        CHECK(sum_ok() == 7, "cycle %d", i);
        if (rank == 2) {
            CHECK_OK(hdl_group_leave(group, 20000000));
            enum hdl_status status;
            (void)sum(&status);
            CHECK(status == HDL_ENOTMEMBER, "%s", hdl_status_name(status));
            CHECK_OK(hdl_group_join(group, 20000000, NULL));
            continue;
        }
        int32_t two = 2;
        double start = rank_now();
        while (active_mask() & 4)
            CHECK(rank_now() - start < 10, "never left");
        CHECK(sum_ok() == 3, "without 2 in cycle %d", i);
        CHECK_OK(hdl_group_admit(group, &two, 1, 20000000, NULL));
    }
    CHECK(sum_ok() == 7, "at the end");
    CHECK_OK(hdl_group_sync(group, 1000000));
    rank_sleep_ms(100);
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_view(group, &view));
    CHECK(told > 0 && told <= view.epoch, "told of view %lu", (unsigned long)told);
    CHECK_OK(hdl_group_on_view(group, NULL, NULL));
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "grow";
    rank = rank_env("RANK");
    size = rank_env("WORLD_SIZE");
    /* A replacement may be faster than the end of its predecessor. */
    enum hdl_status status;
    double start = rank_now();
    do
        status = hdl_context_create(NULL, &context);
    while (status == HDL_EINVAL && strncmp(mode, "replacement", 11) == 0 &&
           rank_now() - start < 10);
    CHECK(status == HDL_OK, "%s: %s", hdl_status_name(status), hdl_error_detail());
    if (strcmp(mode, "grow") == 0)
        grow();
    else if (strcmp(mode, "together") == 0)
        together();
    else if (strcmp(mode, "remove") == 0)
        remove_planned();
    else if (strcmp(mode, "replace") == 0)
        replace();
    else if (strcmp(mode, "replace_looping") == 0)
        replace_looping();
    else if (strncmp(mode, "replacement", 11) == 0)
        replacement(mode[11] != 0);
    else if (strcmp(mode, "alone") == 0)
        alone();
    else
        cycles();
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return 0;
}
