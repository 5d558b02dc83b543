/* SPDX-License-Identifier: Apache-2.0 */
/* What the measuring commands share: ranks and their group, how often, the times. */
#include "tools/perf/job.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tools/launch.h"
#include "tools/options.h"

enum { ITERS_MIN = 5, ITERS_MAX = 20000 };

static const char *group_path(const struct perf_job *job)
{
    const char *first = NULL;
    for (int rank = 0; rank < job->num_ranks; rank++) {
        const char *path = hdl_group_transport(job->group, rank);
        if (rank == job->rank || !path)
            continue;
        if (first && strcmp(first, path) != 0)
            return "mixed";
        first = path;
    }
    return first ? first : "self";
}

static int run_in_group(struct perf_job *job, int (*run)(void *user), void *user)
{
    job->rank = hdl_group_rank(job->group);
    job->num_ranks = hdl_group_size(job->group);
    job->path = group_path(job);
    if (job->ranks > 0 && job->ranks != job->num_ranks)
        return tool_usage_error("-n %" PRId64 " but the launcher started %d ranks",
                                job->ranks, job->num_ranks);
    return run(user);
}

static int run_rank(struct perf_job *job, int (*run)(void *user), void *user)
{
    const struct hdl_context_opts opts = {.size = sizeof(opts),
                                          .transport = job->transport};
    const struct hdl_group_opts group_opts = {.size = sizeof(group_opts), .name = "perf"};
    int code;
    if (hdl_context_create(&opts, &job->context) != HDL_OK)
        return tool_failed("could not join the job: %s", hdl_error_detail());
    if (hdl_group_create(job->context, &group_opts, &job->group) != HDL_OK)
        code = tool_failed("could not create the group: %s", hdl_error_detail());
    else
        code = run_in_group(job, run, user);
    hdl_group_destroy(job->group);
    hdl_context_destroy(job->context);
    return code;
}

int64_t perf_job_ranks(const struct perf_job *job)
{
    return job->ranks > 0 ? job->ranks : 2;
}

int perf_job_run(struct perf_job *job, int argc, char **argv, int (*run)(void *user),
                 void *user)
{
    if (launch_is_rank())
        return run_rank(job, run, user);
    struct launch launch = {
        .ranks = perf_job_ranks(job),
        .hosts = job->hosts,
        .timeout_us = job->timeout_us,
        .grace_us = 5000000,
    };
    return launch_self(argc, argv, launch);
}

enum hdl_status perf_agree(const struct perf_job *job, int64_t *value,
                           enum hdl_redop redop)
{
    return hdl_allreduce(job->group, value, value, 1, HDL_I64, redop, NULL, NULL);
}

enum hdl_status perf_agree_iters(const struct perf_job *job, double us, int64_t *iters)
{
    double wanted = (double)job->time_us / (us > 0.01 ? us : 0.01);
    *iters = job->iters > 0       ? job->iters
             : wanted > ITERS_MAX ? ITERS_MAX
             : wanted < ITERS_MIN ? ITERS_MIN
                                  : (int64_t)wanted;
    return perf_agree(job, iters, HDL_MIN);
}

static double quantile(const double *sorted, int64_t count, double part)
{
    int64_t at = (int64_t)ceil(part * (double)count) - 1;
    return sorted[at < 0 ? 0 : at];
}

enum hdl_status perf_agree_times(const struct perf_job *job, double *us, int64_t iters,
                                 struct perf_times *times)
{
    enum hdl_status status =
        hdl_allreduce(job->group, us, us, (size_t)iters, HDL_F64, HDL_MAX, NULL, NULL);
    if (status != HDL_OK)
        return status;
    tool_sort(us, (size_t)iters);
    *times =
        (struct perf_times){us[0], quantile(us, iters, 0.5), quantile(us, iters, 0.99)};
    return HDL_OK;
}
