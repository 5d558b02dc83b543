/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs of this folder measure alike: time, and memory that only this process
 * has. */
#ifndef BENCH_MEASURE_H
#define BENCH_MEASURE_H

#include <stdio.h>
#include <time.h>

static inline double now_us(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static inline long private_kib(void)
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

#endif
