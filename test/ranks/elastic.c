/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ranks join, leave, come back and are replaced while the others go on.
 *
 *     elastic grow      founders 0 and 1 loop; another thread admits 2, then 3, at random
 *     elastic together  all members call admit at the same place: that is the boundary
 *     elastic remove    rank 1, then 3 are removed as planned and come back in place
 *     elastic replace   rank 1 is killed while all loop; a new process takes its place
 *     elastic alone     a joiner works over itself, wrong identities are refused
 *     elastic cycles    leave and join, 10 times, with a callback for each view
 *     elastic gone      a rank is removed as planned and exits at once, several times
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "member.h"

enum { AFTER = 50 };

/* ------------------------------------------------------------------------------ grow */

static void *admit_two(void *argument)
{
    (void)argument;
    unsigned seed = (unsigned)getpid();
    rank_sleep_ms(rand_r(&seed) % 40);
    member_admit(2);
    rank_sleep_ms(rand_r(&seed) % 40);
    member_admit(3);
    return NULL;
}

/* Loops until all four have taken part AFTER times; values may only grow, and what the
 * view says before the call is what the call sums. */
static void loop_growing(int last, uint64_t from)
{
    int before = 0;
    uint64_t switched[16] = {0};
    for (int after = 0; after < AFTER;) {
        uint64_t number = hdl_group_next(self.group);
        CHECK(from == 0 || number >= from, "operation %lu", (unsigned long)number);
        int all = member_sum_ok();
        CHECK(all >= before, "sum %d after %d", all, before);
        if (all != before)
            switched[all] = number;
        before = all;
        after += all == last;
    }
    CHECK(member_active() == last, "active %#x", member_active());
    /* All switched at the same operations. */
    uint64_t mine[2] = {switched[7], switched[15]}, most[2], least[2];
    if (self.rank == 2)
        mine[0] = from;
    if (self.rank == 3)
        mine[0] = 0, mine[1] = from;
    CHECK_OK(hdl_allreduce(self.group, mine, most, 2, HDL_U64, HDL_MAX, NULL, NULL));
    if (self.rank == 3)
        mine[0] = UINT64_MAX;
    CHECK_OK(hdl_allreduce(self.group, mine, least, 2, HDL_U64, HDL_MIN, NULL, NULL));
    CHECK(most[0] == least[0] && most[1] == least[1], "switched at %lu..%lu and %lu..%lu",
          (unsigned long)least[0], (unsigned long)most[0], (unsigned long)least[1],
          (unsigned long)most[1]);
}

static void grow(void)
{
    pthread_t thread;
    uint64_t first = 0;
    member_found(2, 4, self.rank >= 2);
    if (self.rank == 0)
        CHECK(pthread_create(&thread, NULL, admit_two, NULL) == 0, "no thread");
    if (self.rank >= 2) {
        CHECK(member_sum_ok() == 1 << self.rank, "alone");
        CHECK_OK(hdl_group_join(self.group, 20000000, &first));
        CHECK(hdl_group_next(self.group) == first, "next %lu, first %lu",
              (unsigned long)hdl_group_next(self.group), (unsigned long)first);
    }
    loop_growing(15, first);
    if (self.rank == 0) {
        pthread_join(thread, NULL);
        rank_say("all switched");
    }
}

static void together(void)
{
    uint64_t first = 0;
    member_found(2, 4, self.rank >= 2);
    if (self.rank >= 2) {
        for (int i = 0; i < 100; i++)
            CHECK(member_sum_ok() == 1 << self.rank, "alone");
        CHECK_OK(hdl_group_join(self.group, 20000000, &first));
    } else {
        int32_t both[2] = {2, 3};
        for (int i = 0; i < 10; i++)
            CHECK(member_sum_ok() == 3, "two");
        CHECK_OK(hdl_group_admit(self.group, both, 2, 20000000, &first));
    }
    CHECK(first == 11, "first is %lu", (unsigned long)first);
    CHECK(member_active() == 15 && hdl_group_size(self.group) == 4, "active %#x",
          member_active());
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 15, "four");
    /* A large one, and messages with the newcomers, both ways. */
    enum { COUNT = 300000 };
    float *values = malloc(COUNT * sizeof(float));
    for (int i = 0; i < COUNT; i++)
        values[i] = (float)(self.rank + 1);
    CHECK_OK(
        hdl_allreduce(self.group, values, values, COUNT, HDL_F32, HDL_SUM, NULL, NULL));
    for (int i = 0; i < COUNT; i++)
        CHECK(values[i] == 10, "element %d is %g", i, (double)values[i]);
    free(values);
    int to = (self.rank + 1) % 4, from = (self.rank + 3) % 4, got[100], sent[100];
    for (int i = 0; i < 100; i++)
        sent[i] = self.rank * 1000 + i;
    struct hdl_op *op;
    CHECK_OK(hdl_send(self.group, sent, 100, HDL_I32, to, 5, NULL, &op));
    CHECK_OK(hdl_recv(self.group, got, 100, HDL_I32, from, 5, NULL, NULL));
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
    member_found(4, 4, false);
    CHECK(member_sum_ok() == 15, "four");
    int gone[2] = {1, 3}, mask = 15;
    for (int i = 0; i < 2; i++) {
        mask &= ~(1 << gone[i]);
        if (self.rank == 0)
            member_evict(gone[i]);
        if (self.rank == gone[i]) {
            double start = rank_now();
            while (member_active() & 1 << self.rank)
                CHECK(rank_now() - start < 10, "never removed");
            enum hdl_status status;
            (void)member_sum(&status);
            CHECK(status == HDL_ENOTMEMBER, "%s", hdl_status_name(status));
            CHECK_OK(hdl_group_join(self.group, 60000000, NULL));
            break;
        }
        double start = rank_now();
        while (member_active() & 1 << gone[i])
            CHECK(rank_now() - start < 10, "never seen");
        for (int k = 0; k < AFTER; k++)
            CHECK(member_sum_ok() == mask, "without %d", gone[i]);
        CHECK(hdl_last_failed(NULL, 0) == 0, "a planned removal is no failure");
    }
    if (self.rank == 0 || self.rank == 2) {
        /* Before the commit of the first both are at the same place. */
        int32_t both[2] = {1, 3};
        CHECK_OK(hdl_group_admit(self.group, both, 2, 20000000, NULL));
    }
    for (int k = 0; k < AFTER; k++)
        CHECK(member_sum_ok() == 15, "all again");
    CHECK(member_active() == 15, "active %#x", member_active());
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* --------------------------------------------------------------------------- replace */

static pid_t child;

/* Everybody goes on until the sum over all is right AFTER times in a row. */
static void loop_until_whole(void)
{
    bool lost = false;
    for (int after = 0; after < AFTER;) {
        enum hdl_status status;
        int all = member_sum(&status);
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

/* Another group says of the rank only that its former process is lost; its views do not
 * end waits for windows of the new one. */
static void windows_of_the_new(struct hdl_group *other)
{
    struct hdl_window *window;
    struct hdl_peer_window *peer;
    char handle[HDL_WINDOW_HANDLE_BYTES] = {0}, all[4][HDL_WINDOW_HANDLE_BYTES];
    size_t length = sizeof(handle);
    CHECK_OK(hdl_window_create(self.context, 64, HDL_WINDOW_HOST, &window));
    CHECK_OK(hdl_window_pack(window, handle, &length));
    CHECK_OK(hdl_allgather(self.group, handle, all, sizeof(handle), HDL_U8, NULL, NULL));
    CHECK_OK(hdl_window_open(self.context, all[1], sizeof(handle), &peer));
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 3)
        CHECK_OK(hdl_group_leave(other, CHANGE_US));
    struct hdl_view view = {.num_active = 3};
    while (other && view.num_active == 3)
        CHECK_OK(hdl_group_view(other, &view));
    if (other)
        CHECK_STATUS(hdl_window_wait(window, 0, 1, peer, 10000), HDL_ETIMEDOUT);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    hdl_window_close(peer);
    hdl_window_destroy(window);
    hdl_group_destroy(other);
}

static void replace(void)
{
    struct hdl_group *other;
    struct hdl_group_opts opts = {
        .size = sizeof(opts), .name = "other", .rank = self.rank, .num_ranks = 4};
    member_found(4, 4, false);
    CHECK_OK(hdl_group_create(self.context, &opts, &other));
    for (int i = 0; i < 20; i++)
        CHECK(member_sum_ok() == 15, "four");
    if (self.rank == 1) {
        rank_say("kill me");
        for (;;)
            (void)member_sum_ok();
    }
    enum hdl_status status = HDL_OK;
    while (status == HDL_OK)
        (void)member_sum(&status);
    CHECK(status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    if (self.rank == 0)
        child = member_spawn(1, "replacement");
    int32_t one = 1;
    CHECK_OK(hdl_group_admit(self.group, &one, 1, 20000000, NULL));
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 15, "whole");
    windows_of_the_new(other);
    if (self.rank == 0)
        member_reap(child);
}

/* The replacement asks before the death is agreed, the survivors do not stop. */
static void *admit_one(void *argument)
{
    (void)argument;
    child = member_spawn(1, "replacement_looping");
    while (member_active() & 2)
        rank_sleep_ms(1);
    member_admit(1);
    return NULL;
}

static void replace_looping(void)
{
    pthread_t thread;
    member_found(4, 4, false);
    for (int i = 0; i < 20; i++)
        CHECK(member_sum_ok() == 15, "four");
    if (self.rank == 0)
        CHECK(pthread_create(&thread, NULL, admit_one, NULL) == 0, "no thread");
    if (self.rank == 1) {
        rank_say("kill me");
        for (;;)
            (void)member_sum_ok();
    }
    loop_until_whole();
    if (self.rank == 0) {
        pthread_join(thread, NULL);
        member_reap(child);
    }
}

static void replacement(bool looping)
{
    member_found(4, 4, true);
    CHECK_OK(hdl_group_join(self.group, 20000000, NULL));
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 15, "whole%s", looping ? ", looping" : "");
    if (!looping)
        windows_of_the_new(NULL);
}

/* ----------------------------------------------------------------------------- alone */

static void alone(void)
{
    struct hdl_group *other;
    member_found(2, 3, self.rank >= 2);
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .num_ranks = 2,
                                  .capacity = 3,
                                  .join = true,
                                  .timeout_us = 500000};
    if (self.rank == 2) {
        for (int i = 0; i < 5; i++)
            CHECK(member_sum_ok() == 4, "alone");
        int mine = 7, all[3] = {-1, -1, -1};
        CHECK_OK(hdl_allgather(self.group, &mine, all, 1, HDL_I32, NULL, NULL));
        CHECK(all[0] == -1 && all[1] == -1 && all[2] == 7, "%d %d %d", all[0], all[1],
              all[2]);
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        CHECK_STATUS(hdl_group_join(self.group, 300000, NULL), HDL_ETIMEDOUT);
        rank_say("has waited");
        rank_check_text(hdl_error_detail(), "no member has admitted rank 2", NULL);
        CHECK(member_sum_ok() == 4, "alone after a failed join");
        int wrong[3] = {3, -1, 1};
        for (int i = 0; i < 3; i++) {
            opts.rank = wrong[i];
            CHECK_STATUS(hdl_group_create(self.context, &opts, &other), HDL_EINVAL);
        }
        CHECK_OK(hdl_group_join(self.group, 20000000, NULL));
    } else {
        for (int i = 0; i < AFTER; i++)
            CHECK(member_sum_ok() == 3, "two");
        if (self.rank == 1)
            rank_await_cont(true);
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        struct hdl_member member = {.size = sizeof(member)};
        CHECK_OK(hdl_group_member(self.group, 1, &member));
        CHECK(member.member == HDL_MEMBER_ACTIVE && member.process == HDL_PROCESS_LIVE &&
                  member.job_rank == 1 && member.last == UINT64_MAX,
              "member %d process %d", member.member, member.process);
        int32_t two = 2;
        CHECK_OK(hdl_group_admit(self.group, &two, 1, 20000000, NULL));
    }
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == 7, "three");
}

/* ---------------------------------------------------------------------------- cycles */

static _Atomic uint64_t told;

static void on_view(void *user, struct hdl_group *g, uint64_t epoch)
{
    CHECK(user == &told && g == self.group, "another's callback");
    told = epoch;
}

static void cycles(void)
{
    member_found(3, 3, false);
    CHECK_OK(hdl_group_on_view(self.group, on_view, (void *)&told));
    for (int i = 0; i < 10; i++) {
        CHECK(member_sum_ok() == 7, "cycle %d", i);
        if (self.rank == 2) {
            CHECK_OK(hdl_group_leave(self.group, 20000000));
            enum hdl_status status;
            (void)member_sum(&status);
            CHECK(status == HDL_ENOTMEMBER, "%s", hdl_status_name(status));
            CHECK_OK(hdl_group_join(self.group, 20000000, NULL));
            continue;
        }
        int32_t two = 2;
        double start = rank_now();
        while (member_active() & 4)
            CHECK(rank_now() - start < 10, "never left");
        CHECK(member_sum_ok() == 3, "without 2 in cycle %d", i);
        CHECK_OK(hdl_group_admit(self.group, &two, 1, 20000000, NULL));
    }
    CHECK(member_sum_ok() == 7, "at the end");
    CHECK_OK(hdl_group_sync(self.group, 1000000));
    rank_sleep_ms(100);
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(told > 0 && told <= view.epoch, "told of view %lu", (unsigned long)told);
    CHECK_OK(hdl_group_on_view(self.group, NULL, NULL));
}

/* ------------------------------------------------------------------------------ gone */

static void *admit_or_evict(void *evict)
{
    if (evict)
        member_evict(2);
    else
        member_admit(2);
    return NULL;
}

/* Sums until the set is `wanted`, and then `after` times more; none is incomplete. Rank 0
 * asks for the change meanwhile. */
static void go_on_to(int wanted, int after, bool evict)
{
    static int evicts;
    pthread_t thread;
    double start = rank_now();
    if (self.rank == 0)
        CHECK(pthread_create(&thread, NULL, admit_or_evict, evict ? &evicts : NULL) == 0,
              "no thread");
    while (member_sum_ok() != wanted)
        CHECK(rank_now() - start < 15 * RANK_SLOW, "never %#x", wanted);
    for (int i = 0; i < after; i++)
        CHECK(member_sum_ok() == wanted, "not %#x", wanted);
    if (self.rank == 0)
        CHECK(pthread_join(thread, NULL) == 0, "no end");
}

/* Makes operations until it is removed, or waits for that: the others then wait in an
 * operation that is made without it. */
static void passer(bool idle)
{
    enum hdl_status status = HDL_OK;
    member_found(2, 3, true);
    CHECK_OK(hdl_group_join(self.group, CHANGE_US, NULL));
    CHECK(member_sum_ok() == 7, "three");
    do
        (void)(idle ? 0 : member_sum(&status));
    while (status == HDL_OK && member_active() & 4);
    CHECK(status == HDL_OK || status == HDL_ENOTMEMBER, "%s", hdl_status_name(status));
    if (idle)
        exit(0); /* by way of the exit hook */
    _exit(0);
}

/* Who is removed owes nothing, so its end is no failure. */
static void gone(int times)
{
    member_found(2, 3, false);
    for (int i = 0; i < times; i++) {
        bool idle = i % 2;
        pid_t next = 0;
        if (self.rank == 0 && i > 0)
            next = member_spawn(2, idle ? "passer_idle" : "passer");
        go_on_to(7, idle ? 0 : i, false);
        go_on_to(3, 10 * AFTER, true);
        if (next)
            member_reap(next);
    }
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "grow";
    /* A replacement may be faster than the end of its predecessor. */
    rank_await_cont(false);
    member_begin(NULL, strncmp(mode, "replacement", 11) == 0 ||
                           strncmp(mode, "passer", 6) == 0);
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
    else if (strncmp(mode, "passer", 6) == 0 ||
             (strcmp(mode, "gone") == 0 && self.rank == 2))
        passer(strcmp(mode, "passer_idle") == 0);
    else if (strcmp(mode, "gone") == 0)
        gone(argc > 2 ? atoi(argv[2]) : 5);
    else
        cycles();
    member_end();
    return 0;
}
