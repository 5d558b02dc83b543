/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a rank costs: when its first all_reduce is done, its private memory then, and the
 * processor time that it uses in `seconds` of idleness. Also the machine's copy rate.
 *
 *     first [IDLE_SECONDS]
 *     first copy
 */
#include <heddle.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

enum { COPY_BYTES = 64 << 20 };

static double now(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static long private_kib(void)
{
    char line[256];
    long value, sum = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "Private_Clean: %ld", &value) == 1 ||
            sscanf(line, "Private_Dirty: %ld", &value) == 1)
            sum += value;
    if (file)
        fclose(file);
    return sum;
}

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
        double start = now(CLOCK_MONOTONIC);
        memcpy(i % 2 ? a : b, i % 2 ? b : a, COPY_BYTES);
        double us = now(CLOCK_MONOTONIC) - start;
        best = us < best ? us : best;
    }
    printf("{\"copy_GBps\": %.2f, \"check\": %d}\n", COPY_BYTES / best / 1e3,
           a[77] + b[99]);
    free(a);
    free(b);
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
    if (hdl_context_create(NULL, &context) != HDL_OK ||
        hdl_group_create(context, NULL, &group) != HDL_OK ||
        hdl_allreduce(group, &value, &value, 1, HDL_F32, HDL_SUM, NULL, NULL) != HDL_OK) {
        fprintf(stderr, "%s\n", hdl_error_detail());
        return 1;
    }
    double done = now(CLOCK_REALTIME);
    long kib = private_kib();
    double cpu = cpu_us(), start = now(CLOCK_MONOTONIC);
    usleep((useconds_t)(idle * 1e6));
    double share = idle > 0 ? (cpu_us() - cpu) / (now(CLOCK_MONOTONIC) - start) * 100 : 0;
    printf("{\"rank\": %d, \"done_us\": %.0f, \"private_kib\": %ld, \"idle_percent\": "
           "%.3f}\n",
           hdl_group_rank(group), done, kib, share);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return 0;
}
