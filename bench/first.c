/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a rank costs: when its first all_reduce is done, its private memory then, and the
 * processor time that it uses in `seconds` of idleness. Also what the machine gives: the
 * rate at which one core copies, and the time of a word's way from one core to another
 * and back.
 *
 *     first [IDLE_SECONDS]
 *     first copy
 *     first cores
 */
#define _GNU_SOURCE
#include <heddle.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "measure.h"

enum { COPY_BYTES = 64 << 20, TURNS = 100, SERIES = 40 };

static double cpu_us(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e6 +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static int copy_rate(void)
{
    char *a = malloc(COPY_BYTES), *b = malloc(COPY_BYTES);
    double best = 1e18;
    if (!a || !b)
        return 1;
    memset(a, 1, COPY_BYTES);
    memset(b, 2, COPY_BYTES);
    for (int i = 0; i < 10; i++) {
        double start = now_us(CLOCK_MONOTONIC);
        memcpy(i % 2 ? a : b, i % 2 ? b : a, COPY_BYTES);
        double us = now_us(CLOCK_MONOTONIC) - start;
        best = us < best ? us : best;
    }
    printf("{\"copy_GBps\": %.2f, \"check\": %d}\n", COPY_BYTES / best / 1e3,
           a[77] + b[99]);
    free(a);
    free(b);
    return 0;
}

static _Alignas(128) _Atomic int word;

static void pause_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits for `turn`, `turn + 2` ... and answers each. */
static void *answer(int turn, int turns)
{
    for (int end = turn + 2 * turns; turn < end; turn += 2) {
        while (atomic_load_explicit(&word, memory_order_acquire) != turn)
            pause_core();
        atomic_store_explicit(&word, turn + 1, memory_order_release);
    }
    return NULL;
}

static cpu_set_t usable;

/* Moves the thread to the n-th core that the process may use. */
static void use_core(int n)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET((size_t)core, &usable) && n-- == 0)
            CPU_SET((size_t)core, &one);
    pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
}

static void *other_core(void *argument)
{
    (void)argument;
    use_core(1);
    return answer(1, TURNS * SERIES);
}

static int core_distance(void)
{
    pthread_t thread;
    double best = 1e18;
    if (sched_getaffinity(0, sizeof(usable), &usable) || CPU_COUNT(&usable) < 2 ||
        pthread_create(&thread, NULL, other_core, NULL))
        return 1;
    use_core(0);
    for (int i = 0; i < SERIES; i++) {
        double start = now_us(CLOCK_MONOTONIC);
        (void)answer(2 * TURNS * i, TURNS);
        double us = (now_us(CLOCK_MONOTONIC) - start) / TURNS;
        best = us < best ? us : best;
    }
    pthread_join(thread, NULL);
    printf("{\"cores_ns\": %.0f}\n", best * 1e3);
    return 0;
}

int main(int argc, char **argv)
{
    struct hdl_context *context;
    struct hdl_group *group;
    float value = 1;
    double idle = argc > 1 ? atof(argv[1]) : 0;
    if (argc > 1 && strcmp(argv[1], "copy") == 0)
        return copy_rate();
    if (argc > 1 && strcmp(argv[1], "cores") == 0)
        return core_distance();
    if (hdl_context_create(NULL, &context) != HDL_OK ||
        hdl_group_create(context, NULL, &group) != HDL_OK ||
        hdl_allreduce(group, &value, &value, 1, HDL_F32, HDL_SUM, NULL, NULL) != HDL_OK) {
        fprintf(stderr, "%s\n", hdl_error_detail());
        return 1;
    }
    double done = now_us(CLOCK_REALTIME);
    long kib = private_kib();
    double cpu = cpu_us(), start = now_us(CLOCK_MONOTONIC);
    usleep((useconds_t)(idle * 1e6));
    double share =
        idle > 0 ? (cpu_us() - cpu) / (now_us(CLOCK_MONOTONIC) - start) * 100 : 0;
    printf("{\"rank\": %d, \"done_us\": %.0f, \"private_kib\": %ld, \"idle_percent\": "
           "%.3f}\n",
           hdl_group_rank(group), done, kib, share);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return 0;
}
