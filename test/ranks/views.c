/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Four threads of each survivor read the view while ranks are lost, one after the other:
 * every (epoch, absent) pair is one that was committed, epochs never fall, absence grows.
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

int main(void)
{
    pthread_t threads[THREADS];
    rank_join(&self);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    for (int t = 0; t < THREADS; t++)
        CHECK(pthread_create(&threads[t], NULL, watch, &seen[t]) == 0, "no thread");
    for (int lost = self.size - 1; lost >= 2; lost--) {
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
    compare_ranks();
    printf("%ld reads, %d views\n", seen[0].reads, seen[0].count);
    rank_leave(&self);
    return 0;
}
