/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank is lost in the middle of an all_reduce: killed, or by a clean exit. The
 * survivors agree on the operation, its status, its failed set and every byte; later
 * operations work.
 *
 *     loss kill|exit [log2 of the elements, default 20] [iterations before, default 10]
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

enum { LOST = 1, AFTER = 5 };

struct outcome {
    int64_t iteration, status, failed, prefix; /* elements with the lost rank's part */
};

static struct rank self;
static size_t count;
static float *src, *dst;
static double loop_time = 0.02;

static void *die(void *mode)
{
    /* Anywhere within one operation. */
    unsigned seed = (unsigned)getpid() ^ (unsigned)(rank_now() * 1e6);
    usleep((useconds_t)(rand_r(&seed) % (int)(loop_time * 1e6 + 1)));
    if (strcmp(mode, "kill") == 0)
        raise(SIGKILL);
    _exit(0);
}

static float sum_of(bool with_lost)
{
    float all = (float)(self.size * (self.size + 1) / 2);
    return with_lost ? all : all - (LOST + 1);
}

/* The result is all = with the lost rank up to some chunk, and without it from there on.
 */
static struct outcome look(int64_t iteration, enum hdl_status status)
{
    uint64_t mask = 0;
    struct outcome outcome = {.iteration = iteration, .status = status};
    hdl_last_failed(&mask, 1);
    outcome.failed = (int64_t)mask;
    size_t i = 0;
    while (i < count && dst[i] == sum_of(true))
        i++;
    outcome.prefix = (int64_t)i;
    while (i < count && dst[i] == sum_of(false))
        i++;
    CHECK(i == count, "element %zu is %g", i, (double)dst[i]);
    return outcome;
}

static enum hdl_status reduce(void)
{
    memset(dst, 0xff, count * sizeof(*dst));
    return hdl_allreduce(self.group, src, dst, count, HDL_F32, HDL_SUM, NULL, NULL);
}

/* Whether the view still counts the lost rank as active. */
static bool lost_is_active(void)
{
    uint64_t active = 0, absent = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active, .absent = &absent};
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(!(active & 1 << LOST) || absent == 1 << LOST, "active %#lx absent %#lx",
          (unsigned long)active, (unsigned long)absent);
    return active & 1 << LOST;
}

static void check_after(void)
{
    for (int i = 0; i < AFTER; i++) {
        enum hdl_status status = reduce();
        bool active = lost_is_active();
        CHECK(status == (active ? HDL_INCOMPLETE : HDL_OK), "%s after the loss: %s",
              hdl_status_name(status), hdl_error_detail());
        rank_check_failed(active ? LOST : -1);
        for (size_t at = 0; at < count; at++)
            CHECK(dst[at] == sum_of(false), "element %zu is %g after the loss", at,
                  (double)dst[at]);
    }
}

static void check_uniform(const struct outcome *own)
{
    struct outcome all[64];
    memset(all, 0xff, sizeof(all));
    enum hdl_status status = hdl_allgather(self.group, own, all, 4, HDL_I64, NULL, NULL);
    CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_status_name(status));
    for (int r = 0; r < self.size; r++) {
        if (r == LOST)
            continue;
        CHECK(memcmp(&all[r], own, sizeof(*own)) == 0,
              "rank %d: operation %ld status %ld failed %#lx prefix %ld; "
              "here: %ld %ld %#lx %ld",
              r, (long)all[r].iteration, (long)all[r].status, (long)all[r].failed,
              (long)all[r].prefix, (long)own->iteration, (long)own->status,
              (long)own->failed, (long)own->prefix);
    }
}

int main(int argc, char **argv)
{
    static char standard[] = "kill";
    char *mode = argc > 1 ? argv[1] : standard;
    int before = argc > 3 ? atoi(argv[3]) : 10;
    count = (size_t)1 << (argc > 2 ? atoi(argv[2]) : 20);
    rank_join(&self);
    src = malloc(count * sizeof(*src));
    dst = malloc(count * sizeof(*dst));
    CHECK(src && dst, "no memory");
    for (size_t i = 0; i < count; i++)
        src[i] = (float)(self.rank + 1);
    double start = rank_now(), began = start;
    for (int i = 0; i < before; i++) {
        CHECK_OK(reduce());
        CHECK(dst[0] == sum_of(true) && dst[count - 1] == sum_of(true), "sum %g",
              (double)dst[0]);
    }
    loop_time = (rank_now() - start) / (before > 0 ? before : 1);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    pthread_t thread;
    if (self.rank == LOST)
        CHECK(pthread_create(&thread, NULL, die, mode) == 0, "no thread");
    enum hdl_status status = HDL_OK;
    int64_t i = 0;
    for (; status == HDL_OK && i < 100000; i++) {
        began = rank_now();
        status = reduce();
    }
    double seconds = rank_now() - began;
    CHECK(status == HDL_INCOMPLETE, "operation %ld after the loss: %s: %s", (long)i,
          hdl_status_name(status), hdl_error_detail());
    rank_check_text(hdl_error_detail(), "allreduce count ", ": without ranks 1", NULL);
    struct outcome outcome = look(i, status);
    CHECK(outcome.failed == 1 << LOST, "failed set %#lx", (long)outcome.failed);
    CHECK(seconds < 1.0 * RANK_SLOW + 5 * loop_time,
          "the operation took %.3f s, usually %.3f", seconds, loop_time);
    if (outcome.prefix > 0)
        rank_say("cut in the middle");
    check_uniform(&outcome);
    check_after();
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    printf("operation %ld prefix %ld of %zu: %.3f s, evidence to commit %ld us, %lu "
           "redone\n",
           (long)i, (long)outcome.prefix, count, seconds,
           (long)stats.evidence_to_commit_us, (unsigned long)stats.redone_chunks);
    rank_leave(&self);
    return 0;
}
