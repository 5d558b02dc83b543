/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four threads of each survivor read the view while ranks are lost, one after the other:
 * every (epoch, absent) pair is one that was committed, epochs never fall, absence grows.
 *
 *     views changes    the last rank leaves and joins again and again, 1000 views in all:
 *                      every epoch has one set of active ranks
 */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

enum { THREADS = 4, VIEWS = 64 };

static struct rank self;
static atomic_int stop;

struct seen {
    uint64_t epoch[VIEWS], absent[VIEWS];
    int count;
    long reads;
};

static struct seen seen[THREADS];

enum { CHANGES = 1000 };

/* Sets of active ranks by epoch, as this process first saw them. */
static _Atomic uint64_t known[1 << 16];

static void *watch_changes(void *argument)
{
    uint64_t epoch = 0;
    for (int i = 0; !stop; i++) {
        uint64_t active = 0, absent = 0;
        struct hdl_view view = {.mask_words = 1, .active = &active, .absent = &absent};
        if (i % 1000 == 0)
            usleep(100); /* there are few cores, and others must change the view */
        CHECK_OK(hdl_group_view(self.group, &view));
        CHECK(view.epoch >= epoch, "the epoch fell");
        epoch = view.epoch;
        CHECK(absent == 0 && view.num_active == __builtin_popcountll(active),
              "active %#lx absent %#lx", (unsigned long)active, (unsigned long)absent);
        uint64_t before = 0, number = epoch & UINT32_MAX;
        CHECK(number < 1 << 16, "epoch %#lx", (unsigned long)epoch);
        CHECK(atomic_compare_exchange_strong(&known[number], &before, active) ||
                  before == active,
              "epoch %#lx has %#lx and %#lx", (unsigned long)epoch, (unsigned long)before,
              (unsigned long)active);
    }
    return argument;
}

/* Rank r of each epoch that two ranks saw: the same set. */
static void compare_known(void)
{
    static uint64_t most[1 << 16], least[1 << 16], mine[1 << 16];
    for (int i = 0; i < 1 << 16; i++)
        mine[i] = known[i];
    CHECK_OK(
        hdl_allreduce(self.group, mine, most, 1 << 16, HDL_U64, HDL_MAX, NULL, NULL));
    for (int i = 0; i < 1 << 16; i++)
        mine[i] = known[i] ? known[i] : UINT64_MAX;
    CHECK_OK(
        hdl_allreduce(self.group, mine, least, 1 << 16, HDL_U64, HDL_MIN, NULL, NULL));
    for (int i = 0; i < 1 << 16; i++)
        CHECK(most[i] == 0 || most[i] == least[i], "counter %d: %#lx and %#lx", i,
              (unsigned long)most[i], (unsigned long)least[i]);
}

static void change(void)
{
    int32_t last = self.size - 1;
    uint64_t first = 1;
    for (int i = 0; i < CHANGES / 2; i++) {
        if (self.rank == last) {
            CHECK_OK(hdl_group_leave(self.group, 0));
            CHECK_OK(hdl_group_join(self.group, 0, NULL));
        } else {
            struct hdl_member member = {.size = sizeof(member)};
            do
                CHECK_OK(hdl_group_member(self.group, last, &member));
            while (member.member == HDL_MEMBER_ACTIVE && member.first == first);
            CHECK_OK(hdl_group_admit(self.group, &last, 1, 0, &first));
        }
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    }
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK(stats.views >= CHANGES || self.rank == last, "%lu views",
          (unsigned long)stats.views);
}

static void *watch(void *argument)
{
    struct seen *mine = argument;
    uint64_t epoch = 0, before = 0;
    while (!stop) {
        uint64_t active = 0, absent = 0;
        struct hdl_view view = {.mask_words = 1, .active = &active, .absent = &absent};
        CHECK_OK(hdl_group_view(self.group, &view));
        mine->reads++;
        CHECK(view.epoch >= epoch, "the epoch fell");
        CHECK((before & ~(absent | ~active)) == 0, "absence was taken back");
        CHECK(view.num_absent == __builtin_popcountll(absent & active) &&
                  view.num_active == __builtin_popcountll(active),
              "counts and masks differ");
        if (mine->count == 0 || view.epoch != epoch) {
            CHECK(mine->count < VIEWS, "more views than losses");
            mine->epoch[mine->count] = view.epoch;
            mine->absent[mine->count++] = absent;
        } else {
            CHECK(absent == mine->absent[mine->count - 1], "two views of one epoch");
        }
        epoch = view.epoch;
        before = absent;
    }
    return NULL;
}

/* Pairs of different ranks and threads with one epoch have one mask. */
static void compare(const struct seen *a, const struct seen *b)
{
    for (int i = 0; i < a->count; i++)
        for (int k = 0; k < b->count; k++)
            CHECK(a->epoch[i] != b->epoch[k] || a->absent[i] == b->absent[k],
                  "epoch %llu has two masks", (unsigned long long)a->epoch[i]);
}

static void compare_ranks(void)
{
    static struct seen all[64];
    enum hdl_status status =
        hdl_allgather(self.group, &seen[0], all, sizeof(struct seen), HDL_U8, NULL, NULL);
    CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    for (int t = 0; t < THREADS; t++)
        for (int r = 0; r < self.size; r++)
            if (all[r].count > 0 && all[r].count < VIEWS)
                compare(&seen[t], &all[r]);
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS];
    rank_join(&self);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    bool changes = argc > 1 && strcmp(argv[1], "changes") == 0;
    for (int t = 0; t < THREADS; t++)
        CHECK(pthread_create(&threads[t], NULL, changes ? watch_changes : watch,
                             &seen[t]) == 0,
              "no thread");
    if (changes)
        change();
    for (int lost = self.size - 1; lost >= 2 && !changes; lost--) {
        for (int i = 0; i < 20; i++) {
            enum hdl_status status = hdl_barrier(self.group, NULL, NULL);
            CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
                  hdl_status_name(status), hdl_error_detail());
        }
        if (self.rank == lost)
            _exit(0);
        uint64_t mask = 0;
        while (!(mask >> lost & 1)) {
            enum hdl_status status = hdl_barrier(self.group, NULL, NULL);
            CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s: %s",
                  hdl_status_name(status), hdl_error_detail());
            hdl_last_failed(&mask, 1);
        }
    }
    stop = 1;
    for (int t = 0; t < THREADS; t++)
        CHECK(pthread_join(threads[t], NULL) == 0, "no join");
    if (changes)
        compare_known();
    else
        compare_ranks();
    printf("%ld reads, %d views\n", seen[0].reads, seen[0].count);
    rank_leave(&self);
    return 0;
}
