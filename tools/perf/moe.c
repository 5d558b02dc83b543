/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf dispatch|combine|moe`: measures steps of an exchange, beside the machine's
 * copy rate and, if asked, beside the same exchange by collectives. */
#include "tools/perf/moe.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/commands.h"
#include "tools/launch.h"
#include "tools/options.h"
#include "tools/perf/job.h"
#include "tools/perf/moe_cuda.h"

enum { WARM = 3 };

struct perf_moe {
    struct perf_job job;
    const char *op;
    int64_t hidden, topk, experts;
    struct tool_sizes tokens;
    const char *dtype, *layout, *routing, *phases, *compare, *device, *protocol;
    int64_t blocks;   /* of a kernel, 0 = all multiprocessors */
    double copy_GBps; /* of all ranks together, read and written */
    double small_us;  /* all_reduce of 8 B, p50 */
    bool good;
};

/* A pair of calls that is timed: ours, or a usual way. */
struct way {
    const char *name;
    struct moe_bench *bench;
    struct moe_usual *usual;
};

/* ----------------------------------------------------------------------------- timing */

static enum hdl_status call_dispatch(const struct way *way)
{
    return way->usual ? moe_usual_dispatch(way->usual, way->bench)
                      : moe_bench_dispatch(way->bench);
}

static enum hdl_status call_combine(const struct way *way)
{
    return way->usual ? moe_usual_combine(way->usual, way->bench)
                      : moe_bench_combine(way->bench);
}

/* One step; *us is the time of what `op` names. */
static enum hdl_status time_step(struct perf_moe *p, const struct way *way, double *us)
{
    bool both = strcmp(p->op, "moe") == 0, dispatch = strcmp(p->op, "dispatch") == 0;
    enum hdl_status status = both ? HDL_OK : hdl_barrier(p->job.group, NULL, NULL);
    int64_t begin = base_now_ns();
    if (status == HDL_OK)
        status = call_dispatch(way);
    int64_t middle = base_now_ns();
    if (status == HDL_OK && !both && !dispatch)
        status = hdl_barrier(p->job.group, NULL, NULL);
    int64_t second = base_now_ns();
    if (status == HDL_OK)
        status = call_combine(way);
    int64_t end = base_now_ns();
    *us = (double)(both ? end - begin : dispatch ? middle - begin : end - second) / 1e3;
    return status;
}

static enum hdl_status choose_iters(struct perf_moe *p, const struct way *way,
                                    int64_t *iters)
{
    double us, slowest = 0.5;
    enum hdl_status status = HDL_OK;
    for (int i = 0; i < WARM && status == HDL_OK; i++) {
        status = time_step(p, way, &us);
        slowest = i > 0 && us > slowest ? us : slowest;
    }
    return status == HDL_OK ? perf_agree_iters(&p->job, slowest, iters) : status;
}

static enum hdl_status measure(struct perf_moe *p, const struct way *way,
                               struct perf_times *times)
{
    int64_t iters = 0;
    enum hdl_status status = choose_iters(p, way, &iters);
    if (status != HDL_OK)
        return status;
    double *us = calloc((size_t)iters, sizeof(*us));
    if (!us)
        return HDL_ENOMEM;
    status = hdl_barrier(p->job.group, NULL, NULL);
    for (int64_t i = 0; i < iters && status == HDL_OK; i++)
        status = time_step(p, way, &us[i]);
    if (status == HDL_OK)
        status = perf_agree_times(&p->job, us, iters, times);
    free(us);
    return status;
}

/* What all ranks copy at the same time: bytes read and written a second, from the moment
 * the first begins until the last is done, the best round. (Each rank's own rate would
 * not do: where ranks outnumber cores one may copy while others wait for a core.) */
static enum hdl_status measure_copy(struct perf_moe *p)
{
    size_t bytes = 32 << 20;
    unsigned char *a = malloc(bytes), *b = malloc(bytes);
    enum hdl_status status = a && b ? HDL_OK : HDL_ENOMEM;
    for (int i = 0; i < 4 && status == HDL_OK; i++) { /* the first finds no pages */
        status = hdl_barrier(p->job.group, NULL, NULL);
        int64_t span[2] = {-base_now_ns()}; /* the same clock on all ranks here */
        memset(a, i, 1);
        memcpy(b, a, bytes);
        memcpy(a, b, bytes);
        span[1] = base_now_ns();
        if (status == HDL_OK)
            status =
                hdl_allreduce(p->job.group, span, span, 2, HDL_I64, HDL_MAX, NULL, NULL);
        double rate = 4 * (double)bytes * p->job.num_ranks / (double)(span[0] + span[1]);
        p->copy_GBps = rate > p->copy_GBps ? rate : p->copy_GBps;
    }
    free(a);
    free(b);
    return status;
}

static enum hdl_status measure_small(struct perf_moe *p)
{
    enum { N = 2001 };
    static double us[N];
    struct perf_times times = {0};
    enum hdl_status status = HDL_OK;
    for (int i = 0; i < N && status == HDL_OK; i++) {
        int64_t sum = 1, start = base_now_ns();
        status = perf_agree(&p->job, &sum, HDL_SUM);
        us[i] = (double)(base_now_ns() - start) / 1e3;
    }
    if (status == HDL_OK)
        status = perf_agree_times(&p->job, us, N, &times);
    p->small_us = times.p50_us;
    return status;
}

/* -------------------------------------------------------------------------- output */

static void print_head(const struct perf_moe *p)
{
    if (p->job.json || p->job.rank != 0)
        return;
    printf(
        "%lld experts, top %lld, hidden %lld, %s, %s, %s, %s; all ranks copy %.1f GBps; "
        "all_reduce of 8 B %.2f us\n",
        (long long)p->experts, (long long)p->topk, (long long)p->hidden, p->dtype,
        p->layout, p->routing, p->phases, p->copy_GBps, p->small_us);
    printf("%-10s%6s%8s  %-20s%-12s%11s%11s%11s%11s%11s%10s%10s  %s\n", "op", "ranks",
           "tokens", "transport", "way", "min_us", "p50_us", "p99_us", "wire", "least",
           "algbw", "membw", "checked");
}

struct row {
    struct perf_times times;
    int64_t wire, least, memory; /* bytes: between ranks, at least so; in memory */
    bool checked;
};

static void print_row(const struct perf_moe *p, int64_t tokens, const char *way,
                      const struct row *r)
{
    char wire[32], least[32];
    double algbw = (double)r->least / r->times.p50_us / 1e3;
    double membw = (double)r->memory / r->times.p50_us / 1e3;
    if (p->job.rank != 0)
        return;
    if (p->job.json)
        printf("{\"op\": \"%s\", \"ranks\": %d, \"bytes\": %" PRId64
               ", \"transport\": \"%s\", \"algorithm\": \"%s\", \"min_us\": %.3f, "
               "\"p50_us\": "
               "%.3f, \"p99_us\": %.3f, \"algbw_GBps\": %.4f, \"busbw_GBps\": %.4f, "
               "\"checked\": %s, \"tokens\": %" PRId64 ", \"hidden\": %" PRId64
               ", \"topk\": %" PRId64 ", \"experts\": %" PRId64
               ", \"dtype\": \"%s\", \"layout\": \"%s\", \"wire_bytes\": %" PRId64
               ", \"min_bytes\": %" PRId64
               ", \"memory_GBps\": %.4f, \"copy_GBps\": %.4f, \"allreduce8_us\": %.3f}\n",
               p->op, p->job.num_ranks, r->least, p->job.path, way, r->times.min_us,
               r->times.p50_us, r->times.p99_us, algbw, algbw,
               r->checked ? "true" : "false", tokens, p->hidden, p->topk, p->experts,
               p->dtype, p->layout, r->wire, r->least, membw, p->copy_GBps, p->small_us);
    else
        printf("%-10s%6d%8" PRId64
               "  %-20s%-12s%11.2f%11.2f%11.2f%11s%11s%10.3f%10.3f  %s\n",
               p->op, p->job.num_ranks, tokens, p->job.path, way, r->times.min_us,
               r->times.p50_us, r->times.p99_us,
               tool_bytes_text(wire, sizeof(wire), (uint64_t)r->wire),
               tool_bytes_text(least, sizeof(least), (uint64_t)r->least), algbw, membw,
               r->checked ? "yes" : "NO");
    fflush(stdout);
}

/* -------------------------------------------------------------------------- a rank */

/* Bytes that this rank's counters say it sent. */
static int64_t bytes_sent(const struct moe_bench *b)
{
    uint64_t sent[LAUNCH_RANKS_MAX] = {0}, sum = 0;
    struct hdl_moe_state state = {.size = sizeof(state), .bytes_sent = sent};
    if (hdl_moe_status(b->moe, &state) != HDL_OK)
        return 0;
    for (int r = 0; r < b->ranks; r++)
        sum += r != b->rank ? sent[r] : 0;
    return (int64_t)sum;
}

/* Bytes of the least that one step moves: between ranks, and in memory (read and
 * written). */
static enum hdl_status count_least(struct perf_moe *p, const struct moe_bench *b,
                                   struct row *row)
{
    bool dispatch = strcmp(p->op, "combine") != 0,
         combine = strcmp(p->op, "dispatch") != 0;
    int64_t out = (int64_t)(b->sizes.row_bytes + b->sizes.scale_bytes);
    int64_t back = (int64_t)b->row_bytes, rows = b->tokens * b->topk;
    row->least = row->memory = 0;
    if (dispatch) {
        row->least += b->remote * out;
        row->memory += (b->pairs + rows) * out;
    }
    if (combine) {
        row->least += b->remote * back;
        row->memory += (rows + 2 * b->pairs + b->tokens) * back;
    }
    enum hdl_status status = perf_agree(&p->job, &row->least, HDL_SUM);
    return status == HDL_OK ? perf_agree(&p->job, &row->memory, HDL_SUM) : status;
}

static enum hdl_status check(struct perf_moe *p, struct moe_bench *b, bool *good)
{
    enum hdl_status status = moe_bench_dispatch(b);
    int64_t wrong = status == HDL_OK ? moe_bench_check_rows(b) : 1;
    if (status == HDL_OK)
        moe_bench_fill_outputs(b);
    memset(b->results, 0xff, (size_t)b->tokens * b->row_bytes);
    if (status == HDL_OK)
        status = moe_bench_combine(b);
    wrong += status == HDL_OK
                 ? moe_bench_check_results(b, b->layout != HDL_MOE_RANK_MAJOR)
                 : 1;
    if (status == HDL_OK)
        status = perf_agree(&p->job, &wrong, HDL_SUM);
    if (wrong != 0)
        *good = false;
    return status;
}

static enum hdl_status run_own(struct perf_moe *p, struct moe_bench *b, struct row *row)
{
    struct way way = {"heddle", b, NULL};
    row->checked = true;
    enum hdl_status status = moe_bench_create(b);
    if (status == HDL_OK)
        status = check(p, b, &row->checked);
    int64_t begin = bytes_sent(b);
    if (status == HDL_OK)
        status = moe_bench_dispatch(b);
    int64_t middle = bytes_sent(b);
    if (status == HDL_OK)
        status = moe_bench_combine(b);
    row->wire = (strcmp(p->op, "dispatch") == 0 ? middle : bytes_sent(b)) -
                (strcmp(p->op, "combine") == 0 ? middle : begin);
    if (status == HDL_OK)
        status = perf_agree(&p->job, &row->wire, HDL_SUM);
    if (status == HDL_OK)
        status = count_least(p, b, row);
    if (status == HDL_OK)
        status = measure(p, &way, &row->times);
    if (status == HDL_OK)
        status = check(p, b, &row->checked);
    return status;
}

static enum hdl_status check_usual(struct perf_moe *p, struct moe_usual *u,
                                   struct moe_bench *b, bool *good)
{
    enum hdl_status status = moe_usual_dispatch(u, b);
    moe_usual_fill(u, b);
    memset(b->results, 0xff, (size_t)b->tokens * b->row_bytes);
    if (status == HDL_OK)
        status = moe_usual_combine(u, b);
    int64_t wrong = moe_bench_check_results(b, true);
    if (status == HDL_OK)
        status = perf_agree(&p->job, &wrong, HDL_SUM);
    *good = wrong == 0;
    return status;
}

static enum hdl_status run_usual(struct perf_moe *p, struct moe_bench *b, bool dense,
                                 const struct row *own)
{
    struct moe_usual usual;
    struct row row = *own;
    bool opened = moe_usual_open(&usual, b, dense);
    struct way way = {dense ? "dense" : "counts+a2av", b, &usual};
    enum hdl_status status = opened ? measure(p, &way, &row.times) : HDL_ENOMEM;
    if (status == HDL_OK)
        status = check_usual(p, &usual, b, &row.checked);
    int64_t rows = dense ? b->experts * b->tokens : b->tokens * b->topk;
    int64_t bytes = (strcmp(p->op, "combine") == 0 ? 0 : (int64_t)usual.out_bytes) +
                    (strcmp(p->op, "dispatch") == 0 ? 0 : (int64_t)b->row_bytes);
    row.wire = rows * bytes * (p->job.num_ranks - 1) / p->job.num_ranks;
    if (status == HDL_OK)
        status = perf_agree(&p->job, &row.wire, HDL_SUM);
    if (status == HDL_OK)
        print_row(p, b->tokens, way.name, &row);
    p->good = p->good && row.checked;
    moe_usual_close(&usual);
    return status;
}

#define DTYPES "bf16|f32|fp8"
#define LAYOUTS "3d|flat|rank|indexed"
#define PROTOCOLS "auto|ll|chunk|bulk"

static int run_tokens(struct perf_moe *p, int64_t tokens)
{
    int dtype = tool_choice(DTYPES, p->dtype);
    struct row row = {.wire = 0};
    struct moe_bench b = {
        .group = p->job.group,
        .rank = p->job.rank,
        .ranks = p->job.num_ranks,
        .tokens = tokens,
        .hidden = p->hidden,
        .topk = p->topk,
        .experts = p->experts,
        .dtype = dtype == 1 ? HDL_F32 : HDL_BF16,
        .format = dtype == 2 ? HDL_MOE_FP8 : HDL_MOE_PLAIN,
        .layout = (enum hdl_moe_layout)tool_choice(LAYOUTS, p->layout),
        .split = strcmp(p->phases, "split") == 0,
        .routing = p->routing,
    };
    enum hdl_status status = moe_bench_open(&b) ? run_own(p, &b, &row) : HDL_ENOMEM;
    if (status == HDL_OK)
        print_row(p, tokens, "heddle", &row);
    if (status == HDL_OK && p->compare)
        status = run_usual(p, &b, false, &row);
    if (status == HDL_OK && p->compare)
        status = run_usual(p, &b, true, &row);
    const char *detail = hdl_error_detail(); /* none of memory of the command's own */
    if (status != HDL_OK)
        tool_failed("rank %d: %s of %" PRId64 " tokens: %s: %s", p->job.rank, p->op,
                    tokens, hdl_status_name(status),
                    *detail ? detail : hdl_status_text(status));
    moe_bench_close(&b);
    p->good = p->good && row.checked;
    return status == HDL_OK ? TOOL_OK : TOOL_FAILED;
}

enum { REPLAYS = 200 };

static int run_cuda(struct perf_moe *p)
{
    int64_t tokens[TOOL_SIZES_MAX];
    int dtype = tool_choice(DTYPES, p->dtype);
    const struct moe_cuda_opts o = {
        .job = &p->job,
        .hidden = p->hidden,
        .topk = p->topk,
        .experts = p->experts,
        .replays = p->job.iters ? p->job.iters : REPLAYS,
        .blocks = p->blocks,
        .routing = p->routing,
        .nccl = p->compare != NULL,
        .fp8 = dtype == 2,
        .layout = (enum hdl_moe_layout)tool_choice(LAYOUTS, p->layout),
        .protocol = (enum hdl_moe_protocol)tool_choice(PROTOCOLS, p->protocol),
        .tokens = tokens,
        .num_tokens = (int64_t)p->tokens.count,
    };
    if (dtype == 1 || strcmp(p->phases, "fused") != 0)
        return tool_usage_error("with --device cuda rows are bf16 or fp8, phases fused");
    for (size_t i = 0; i < p->tokens.count; i++)
        tokens[i] = (int64_t)p->tokens.size[i];
    return moe_cuda_run(&o);
}

static bool fits(const struct perf_moe *p, int64_t ranks)
{
    bool good = p->experts % ranks == 0 && p->topk <= p->experts && p->topk <= 64;
    if (!good)
        tool_usage_error("%" PRId64 " experts, top %" PRId64 ", %" PRId64
                         " ranks do not fit",
                         p->experts, p->topk, ranks);
    for (size_t i = 0; good && i < p->tokens.count; i++) {
        good = p->tokens.size[i] <= INT32_MAX;
        if (!good)
            tool_usage_error("at most %d tokens, got %" PRIu64, INT32_MAX,
                             p->tokens.size[i]);
    }
    return good;
}

static int run_all(void *user)
{
    struct perf_moe *p = user;
    int code = TOOL_OK;
    p->good = true;
    if (!fits(p, p->job.num_ranks))
        return TOOL_USAGE;
    if (strcmp(p->device, "cuda") == 0)
        return run_cuda(p);
    if (measure_copy(p) != HDL_OK || measure_small(p) != HDL_OK)
        return tool_failed("the copy rate: %s", hdl_error_detail());
    print_head(p);
    for (size_t i = 0; i < p->tokens.count && code == TOOL_OK; i++)
        code = run_tokens(p, (int64_t)p->tokens.size[i]);
    return code == TOOL_OK && !p->good ? TOOL_FAILED : code;
}

/* ------------------------------------------------------------------------- command */

#define OPERATIONS "dispatch|combine|moe"

static int start(struct perf_moe *p, int argc, char **argv, int first)
{
    if (first + 1 != argc || tool_choice(OPERATIONS, argv[first]) < 0)
        return tool_usage_error("perf takes one operation: " OPERATIONS);
    p->op = argv[first];
    if (!launch_is_rank() && !fits(p, perf_job_ranks(&p->job)))
        return TOOL_USAGE;
    return perf_job_run(&p->job, argc, argv, run_all, p);
}

bool command_perf_is_moe(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (tool_choice(OPERATIONS, argv[i]) >= 0)
            return true;
    }
    return false;
}

static const struct perf_moe defaults = {
    .job = {.time_us = 500000},
    .hidden = 4096,
    .topk = 8,
    .experts = 32,
    .dtype = "bf16",
    .layout = "3d",
    .routing = "uniform",
    .phases = "fused",
    .device = "cpu",
    .protocol = "auto",
    .tokens = {4, {1, 16, 128, 1024}},
};

int command_perf_moe(int argc, char **argv)
{
    struct perf_moe p = defaults;
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &p.job.ranks, 1, "N", "ranks to start (default 2)"},
        {0, "hosts", TOOL_INT, &p.job.hosts, 1, "H",
         "spread them over H network namespaces that act as hosts"},
        {0, "transport", TOOL_CHOICE, &p.job.transport, 0, "auto|shm|fabric",
         "the way to the others (default HEDDLE_TRANSPORT, auto)"},
        {'t', "tokens", TOOL_SIZES, &p.tokens, 0, "LIST",
         "tokens of a rank (default 1,16,128,1K)"},
        {0, "hidden", TOOL_INT, &p.hidden, 1, "H", "elements of a row (default 4096)"},
        {0, "topk", TOOL_INT, &p.topk, 1, "K", "experts of a token (default 8)"},
        {0, "experts", TOOL_INT, &p.experts, 1, "E", "of all ranks (default 32)"},
        {0, "dtype", TOOL_CHOICE, &p.dtype, 0, DTYPES,
         "of the rows; fp8 = bf16 quantised on the way (default bf16)"},
        {0, "layout", TOOL_CHOICE, &p.layout, 0, LAYOUTS,
         "of delivered rows (default 3d)"},
        {0, "routing", TOOL_CHOICE, &p.routing, 0, "uniform|zipf|hot|local",
         "how tokens choose experts (default uniform)"},
        {0, "phases", TOOL_CHOICE, &p.phases, 0, "fused|split",
         "one call, or send and recv apart (default fused)"},
        {0, "device", TOOL_CHOICE, &p.device, 0, "cpu|cuda",
         "where rows lie; cuda = a GPU for each rank, steps in graphs (default cpu)"},
        {0, "blocks", TOOL_INT, &p.blocks, 1, "B",
         "multiprocessors that a kernel may take (default all)"},
        {0, "protocol", TOOL_CHOICE, &p.protocol, 0, PROTOCOLS,
         "how rows cross between GPUs (default auto, by size)"},
        {0, "compare", TOOL_CHOICE, &p.compare, 0, "alltoall",
         "also by counts and all_to_all_v, and by a dense all_to_all; on GPUs by NCCL's "
         "all_to_all"},
        {0, "iters", TOOL_INT, &p.job.iters, 1, "I",
         "measured steps (default: what fits into half a second)"},
        {0, "time", TOOL_SECONDS, &p.job.time_us, 0, "S",
         "or measure for S seconds a size"},
        {0, "timeout", TOOL_SECONDS, &p.job.timeout_us, 0, "S",
         "stop all after S seconds"},
        {0, "json", TOOL_FLAG, &p.job.json, 0, NULL, "one JSON object a line"},
    };
    const struct tool_usage usage = {
        "heddle perf " OPERATIONS " [options]",
        "Measures steps of a mixture-of-experts exchange, and checks their data.",
        options,
        sizeof(options) / sizeof(options[0]),
        "moe = dispatch and combine of one step. A step takes as long as on its slowest "
        "rank.\n"
        "wire = bytes that went between ranks, least = those that any way must move: "
        "each row\n"
        "once for each other rank that needs it. algbw = least / p50; membw = bytes that "
        "any "
        "way\n"
        "must read and write in memory / p50, to compare with the copy rate in the first "
        "line.",
    };
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    return start(&p, argc, argv, first);
}
