/* SPDX-License-Identifier: Apache-2.0 */
/* What the measuring commands share: ranks and their group, how often, the times. */
#ifndef TOOLS_PERF_JOB_H
#define TOOLS_PERF_JOB_H

#include <stdbool.h>
#include <stdint.h>

#include "heddle.h"

struct perf_job {
    int64_t ranks, hosts, iters, timeout_us,
        time_us;           /* iters 0 = what fits into time_us */
    const char *transport; /* NULL = as the environment says */
    bool json;
    /* a rank's */
    struct hdl_context *context;
    struct hdl_group *group;
    int rank, num_ranks;
    const char *path; /* transport to the others, "mixed" if there are several */
};

struct perf_times {
    double min_us, p50_us, p99_us;
};

/* How many ranks it starts. */
int64_t perf_job_ranks(const struct perf_job *job);
/* As a rank of a launcher: joins, calls run(user), leaves. Else starts the ranks. Returns
 * the exit code. */
int perf_job_run(struct perf_job *job, int argc, char **argv, int (*run)(void *user),
                 void *user);

/* Sum, maximum ... of one number over all ranks. */
enum hdl_status perf_agree(const struct perf_job *job, int64_t *value,
                           enum hdl_redop redop);
/* How many calls of `us` each are to be measured, the same on all ranks. */
enum hdl_status perf_agree_iters(const struct perf_job *job, double us, int64_t *iters);
/* Each call took as long as on its slowest rank. Sorts `us`. */
enum hdl_status perf_agree_times(const struct perf_job *job, double *us, int64_t iters,
                                 struct perf_times *times);

#endif
