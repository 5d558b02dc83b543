/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf`: measures one operation at several sizes, and checks its data. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/commands.h"
#include "heddle.h"
#include "tools/options.h"
#include "tools/perf/algorithm.h"
#include "tools/perf/job.h"
#include "tools/perf/micro_bench.h"
#include "tools/perf/ops.h"
#include "tools/perf/recovery.h"

enum { WARM_SMALL = 100, WARM_LARGE = 3, BARRIER_MS = 50 };

struct perf {
    struct perf_job job;
    const struct perf_op *op;
    struct tool_sizes sizes;
    bool in_place, corrupt;
    bool checked; /* of all sizes so far */
};

struct perf_result {
    struct perf_times times;
    bool checked;
};

static const char *const more =
    "OP: allreduce broadcast reduce allgather reducescatter alltoall gather scatter "
    "barrier\n"
    "sendrecv (each rank to the next) pingpong (ranks 0 and 1; half a round trip)\n"
    "recovery (losses and admissions: see heddle perf recovery --help)\n"
    "dispatch combine moe (mixture of experts: see heddle perf moe --help)\n"
    "--micro (what GPU kernels stand on: see heddle perf --micro --help)\n"
    "\n"
    "Started by a launcher (RANK and WORLD_SIZE are set) it takes part as that rank.\n"
    "An iteration takes as long as on its slowest rank. bytes and busbw follow "
    "nccl-tests:\n"
    "of allgather, reducescatter, alltoall, gather and scatter `bytes` is the sum of "
    "the\n"
    "ranks' blocks. Bandwidths come from the median. GBps = 1e9 bytes a second.\n"
    "A result that is wrong shows as checked false, and the exit code is 1.\n"
    "\n"
    "  heddle perf allreduce -n 4 -b 8,4K,1M\n"
    "  heddle perf alltoall -n 4 --hosts 2 --json     two ranks on each of two hosts";

/* ------------------------------------------------------------------------- checks */

/* A barrier holds everybody until the last rank, which comes late, has entered. */
static enum hdl_status check_barrier(struct perf *perf, int64_t *wrong)
{
    enum hdl_status status = hdl_barrier(perf->job.group, NULL, NULL);
    int64_t start = base_now_ns();
    if (perf->job.rank == perf->job.num_ranks - 1)
        usleep(BARRIER_MS * 1000);
    if (status == HDL_OK)
        status = hdl_barrier(perf->job.group, NULL, NULL);
    /* Half, as a rank may have been slow to leave the first one. */
    *wrong = base_now_ns() - start < BARRIER_MS / 2 * BASE_NS_PER_MS || perf->corrupt;
    return status == HDL_OK ? perf_agree(&perf->job, wrong, HDL_SUM) : status;
}

static enum hdl_status check(struct perf *perf, struct perf_run *run, bool *good)
{
    int64_t wrong = 0;
    enum hdl_status status;
    if (!run->op->has_data) {
        status = check_barrier(perf, &wrong);
    } else {
        perf_run_fill(run);
        status = run->op->call(run);
        if (status != HDL_OK)
            return status;
        if (perf->corrupt && perf->job.rank == 0 && run->dst_bytes > 0)
            run->dst[run->dst_bytes / 2] ^= 1;
        wrong = (int64_t)perf_run_check(run);
        status = perf_agree(&perf->job, &wrong, HDL_SUM);
    }
    if (status == HDL_OK && wrong != 0) {
        *good = false;
        if (perf->job.rank == 0)
            fprintf(stderr, "heddle: %s of %zu bytes: %" PRId64 " wrong elements\n",
                    run->op->name, run->bytes, wrong);
    }
    return status;
}

/* ------------------------------------------------------------------------- timing */

static void show_progress(const struct perf *perf, const struct perf_run *run,
                          int64_t done, int64_t iters)
{
    char size[32];
    fprintf(stderr, "heddle: %s of %s: %" PRId64 " of %" PRId64 " iterations\n",
            perf->op->name, tool_bytes_text(size, sizeof(size), run->bytes), done, iters);
}

/* Times each of `iters` calls, which follow each other at once. */
static enum hdl_status time_calls(struct perf *perf, struct perf_run *run, int64_t iters,
                                  double *us)
{
    int64_t before = base_now_ns();
    int64_t shown = before;
    for (int64_t i = 0; i < iters; i++) {
        enum hdl_status status = run->op->call(run);
        int64_t now = base_now_ns();
        if (status != HDL_OK)
            return status;
        us[i] = (double)(now - before) / 1e3 / run->op->halves;
        before = now;
        if (now - shown > 2 * BASE_NS_PER_S && perf->job.rank == 0 && !perf->job.json) {
            show_progress(perf, run, i + 1, iters);
            shown = before = base_now_ns();
        }
    }
    return HDL_OK;
}

/* Warm-up calls; from their time rank 0 decides how many calls fill the wanted time. */
static enum hdl_status choose_iters(struct perf *perf, struct perf_run *run,
                                    int64_t *iters)
{
    int64_t warm = run->bytes >= 1 << 20 ? WARM_LARGE : WARM_SMALL;
    double us[WARM_SMALL];
    enum hdl_status status = time_calls(perf, run, warm, us);
    double slowest = 0;
    for (int64_t i = warm / 2; status == HDL_OK && i < warm; i++)
        slowest += us[i] * run->op->halves / (double)(warm - warm / 2);
    if (status != HDL_OK)
        return status;
    return perf_agree_iters(&perf->job, slowest, iters);
}

static enum hdl_status measure(struct perf *perf, struct perf_run *run,
                               struct perf_result *result)
{
    int64_t iters = 0;
    result->checked = true;
    enum hdl_status status = check(perf, run, &result->checked);
    if (status != HDL_OK)
        return status;
    perf_run_quiet(run);
    status = choose_iters(perf, run, &iters);
    if (status != HDL_OK)
        return status;
    double *us = calloc((size_t)iters, sizeof(*us));
    if (!us) {
        tool_failed("out of memory for %" PRId64 " iterations", iters);
        return HDL_ENOMEM;
    }
    status = hdl_barrier(perf->job.group, NULL, NULL);
    if (status == HDL_OK)
        status = time_calls(perf, run, iters, us);
    if (status == HDL_OK)
        status = perf_agree_times(&perf->job, us, iters, &result->times);
    if (status == HDL_OK)
        status = check(perf, run, &result->checked);
    free(us);
    return status;
}

/* ------------------------------------------------------------------------- output */

static void print_head(const struct perf *perf)
{
    if (perf->job.json || perf->job.rank != 0)
        return;
    printf("%-14s%6s%10s  %-20s%-18s%11s%11s%11s%9s%9s  %s\n", "op", "ranks", "bytes",
           "transport", "algorithm", "min_us", "p50_us", "p99_us", "algbw", "busbw",
           "checked");
    printf("%88s%11s%9s%9s\n", "", "", "GBps", "GBps");
}

static void print_row(const struct perf *perf, const struct perf_run *run,
                      const struct perf_result *result)
{
    char size[32];
    double algbw =
        result->times.p50_us > 0 ? (double)run->bytes / result->times.p50_us / 1e3 : 0;
    double busbw = algbw * run->op->factor(run->ranks);
    const char *algorithm = perf_algorithm(perf->job.group, run);
    if (perf->job.rank != 0)
        return;
    if (perf->job.json)
        printf("{\"op\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"transport\": \"%s\", "
               "\"algorithm\": \"%s\", \"min_us\": %.3f, \"p50_us\": %.3f, \"p99_us\": "
               "%.3f, "
               "\"algbw_GBps\": %.4f, \"busbw_GBps\": %.4f, \"checked\": %s}\n",
               run->op->name, run->ranks, run->bytes, perf->job.path, algorithm,
               result->times.min_us, result->times.p50_us, result->times.p99_us, algbw,
               busbw, result->checked ? "true" : "false");
    else
        printf("%-14s%6d%10s  %-20s%-18s%11.2f%11.2f%11.2f%9.3f%9.3f  %s\n",
               run->op->name, run->ranks, tool_bytes_text(size, sizeof(size), run->bytes),
               perf->job.path, algorithm, result->times.min_us, result->times.p50_us,
               result->times.p99_us, algbw, busbw, result->checked ? "yes" : "NO");
    fflush(stdout);
}

/* -------------------------------------------------------------------------- a rank */

static int run_size(struct perf *perf, size_t bytes)
{
    struct perf_run run = {
        .op = perf->op,
        .group = perf->job.group,
        .rank = perf->job.rank,
        .ranks = perf->job.num_ranks,
        .in_place = perf->in_place,
    };
    struct perf_result result = {0};
    int64_t opened = perf_run_open(&run, bytes);
    enum hdl_status status = perf_agree(&perf->job, &opened, HDL_MIN);
    if (status == HDL_OK && !opened) {
        perf_run_close(&run);
        return tool_failed("not enough memory for %s of %zu bytes", perf->op->name,
                           bytes);
    }
    if (status == HDL_OK)
        status = measure(perf, &run, &result);
    if (status == HDL_OK)
        print_row(perf, &run, &result);
    else
        tool_failed("rank %d: %s of %zu bytes: %s: %s", perf->job.rank, perf->op->name,
                    bytes, hdl_status_name(status), hdl_error_detail());
    perf_run_close(&run);
    perf->checked = perf->checked && result.checked;
    return status == HDL_OK ? TOOL_OK : TOOL_FAILED;
}

static int run_sizes(void *user)
{
    struct perf *perf = user;
    int code = TOOL_OK;
    perf->checked = true;
    print_head(perf);
    size_t count = perf->op->has_data ? perf->sizes.count : 1;
    for (size_t i = 0; i < count && code == TOOL_OK; i++)
        code = run_size(perf, perf->op->has_data ? perf->sizes.size[i] : 0);
    return code == TOOL_OK && !perf->checked ? TOOL_FAILED : code;
}

/* ------------------------------------------------------------------------- command */

static int start(struct perf *perf, int argc, char **argv, int first)
{
    char names[160];
    perf_op_names(names, sizeof(names));
    if (first >= argc)
        return tool_usage_error(
            "perf needs an operation: %s, recovery, dispatch, combine, moe", names);
    if (first + 1 < argc)
        return tool_usage_error("perf takes one operation, got also '%s'",
                                argv[first + 1]);
    perf->op = perf_op_find(argv[first]);
    if (!perf->op)
        return tool_usage_error(
            "unknown operation '%s': one of %s, recovery, dispatch, combine, moe",
            argv[first], names);
    return perf_job_run(&perf->job, argc, argv, run_sizes, perf);
}

int command_perf(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--micro") == 0)
            return perf_micro(argc, argv);
    if (command_perf_is_moe(argc, argv))
        return command_perf_moe(argc, argv);
    if (argc > 1 && strcmp(argv[1], "recovery") == 0)
        return perf_recovery(argc - 1, argv + 1);
    struct perf perf = {
        .job = {.time_us = 500000},
        .sizes = {8, {8, 64, 1024, 4096, 65536, 1 << 20, 16 << 20, 64 << 20}},
    };
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &perf.job.ranks, 1, "N", "ranks to start (default 2)"},
        {0, "hosts", TOOL_INT, &perf.job.hosts, 1, "H",
         "spread them over H network namespaces that act as hosts"},
        {0, "transport", TOOL_CHOICE, &perf.job.transport, 0, "auto|shm|fabric",
         "the way to the others (default HEDDLE_TRANSPORT, auto)"},
        {'b', "bytes", TOOL_SIZES, &perf.sizes, 0, "LIST",
         "sizes (default 8,64,1K,4K,64K,1M,16M,64M; powers of 1024)"},
        {0, "iters", TOOL_INT, &perf.job.iters, 1, "I",
         "measured iterations (default: what fits into half a second)"},
        {0, "time", TOOL_SECONDS, &perf.job.time_us, 0, "S",
         "or measure for S seconds a size"},
        {0, "in-place", TOOL_FLAG, &perf.in_place, 0, NULL,
         "source and destination are one"},
        {0, "corrupt", TOOL_FLAG, &perf.corrupt, 0, NULL,
         "spoil a byte of each checked result, to see the check fail"},
        {0, "timeout", TOOL_SECONDS, &perf.job.timeout_us, 0, "S",
         "stop all after S seconds"},
        {0, "json", TOOL_FLAG, &perf.job.json, 0, NULL, "one JSON object a line"},
    };
    const struct tool_usage usage = {
        "heddle perf OP [options]",
        "Measures an operation among N ranks, and checks the data it moves.",
        options,
        sizeof(options) / sizeof(options[0]),
        more,
    };
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    return start(&perf, argc, argv, first);
}
