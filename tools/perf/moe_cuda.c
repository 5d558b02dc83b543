/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf dispatch|combine|moe --device cuda`: replays of a graph on each rank's
 * GPU, the kernels' own times beside what a step takes from end to end. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "moe/gpu_link.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/perf/moe.h"
#include "tools/perf/moe_cuda.h"
#include "tools/perf/nccl.h"

/*
 * A graph holds PAIRS times dispatch and combine. Every block notes when it began and
 * ended; a kernel's time is from its first block's begin to its last block's end. The
 * first pairs are left out: there the GPUs wait for each other's launch. A row's number
 * is that of its slowest rank. What a pair takes from end to end is compared with two
 * graphs, of one kernel each, launched in turn.
 */
enum { PAIRS = 20, SKIPPED = 3 };
enum { DISPATCH, COMBINE, PAIR, APART, ROWS };

static const size_t trace_words = MOE_GPU_TRACE_POINTS * MOE_GPU_MAX_CTAS;

struct bench {
    const struct moe_cuda_opts *o;
    struct hdl_moe *moe;
    struct moe_gpu *gpu;
    const struct gpu_driver *cu;
    struct gpu_stream *stream;
    struct gpu_event *begin, *end;
    struct gpu_graph_exec *exec, *alone[2];
    int64_t tokens;
    int64_t most;   /* rows that a rank sends to others, or gets of them, at most */
    int64_t remote; /* rows that this rank sends to others */
    int64_t wire[ROWS], least[ROWS]; /* bytes of all ranks */
    uint64_t rows, ids, weights, out, scales, outputs, result, trace;
    float *want; /* [T] sum of the weights */
    uint64_t *words;
    double *samples[ROWS];
    int64_t count[ROWS];
};

/* ------------------------------------------------------------------------------ data */

static enum hdl_status put(struct bench *b, size_t bytes, const void *from, uint64_t *at)
{
    enum hdl_status s = gpu_alloc(&b->gpu->device, bytes, at);
    if (s == HDL_OK && from)
        s = gpu_check(b->cu->copy_in(*at, from, bytes), "cuMemcpyHtoD");
    return s;
}

/* Rows that cross a link to or from the rank where these are most. */
static enum hdl_status count_rows(struct bench *b, int64_t remote, int64_t *for_rank)
{
    const struct perf_job *job = b->o->job;
    enum hdl_status s = HDL_OK;
    b->most = b->remote = remote;
    for_rank[job->rank] = 0;
    for (int r = 0; s == HDL_OK && r < job->num_ranks; r++) {
        s = perf_agree(job, &for_rank[r], HDL_SUM);
        b->most = for_rank[r] > b->most ? for_rank[r] : b->most;
    }
    return s == HDL_OK ? perf_agree(job, &b->most, HDL_MAX) : s;
}

/* Routing as for hosts; random bf16 rows below 2. */
static enum hdl_status fill(struct bench *b, uint16_t *rows, int32_t *ids, float *weights)
{
    const struct moe_cuda_opts *o = b->o;
    uint64_t random = (uint64_t)o->job->rank + 1;
    int64_t k = o->topk;
    for (int64_t i = 0; i < b->tokens * o->hidden; i++)
        rows[i] = (uint16_t)(0x3f80 | (base_splitmix_next(&random) & 0x807f));
    int64_t for_rank[MOE_GPU_MAX_RANKS] = {0};
    struct moe_bench routes = {.rank = o->job->rank,
                               .tokens = b->tokens,
                               .topk = k,
                               .experts = o->experts,
                               .local = o->experts / o->job->num_ranks,
                               .routing = o->routing,
                               .ids = ids,
                               .weights = weights,
                               .for_rank = for_rank};
    moe_bench_route(&routes);
    for (int64_t i = 0; i < b->tokens * k; i++)
        b->want[i / k] += weights[i];
    enum hdl_status s = put(b, (size_t)(b->tokens * o->hidden) * 2, rows, &b->rows);
    if (s == HDL_OK)
        s = put(b, (size_t)(b->tokens * k) * sizeof(*ids), ids, &b->ids);
    if (s == HDL_OK)
        s = put(b, (size_t)(b->tokens * k) * sizeof(*weights), weights, &b->weights);
    return s == HDL_OK ? count_rows(b, routes.remote, for_rank) : s;
}

static enum hdl_status make_inputs(struct bench *b)
{
    size_t entries = (size_t)(b->tokens * b->o->topk);
    uint16_t *rows = calloc((size_t)(b->tokens * b->o->hidden), sizeof(*rows));
    int32_t *ids = calloc(entries, sizeof(*ids));
    float *weights = calloc(entries, sizeof(*weights));
    b->want = calloc((size_t)b->tokens, sizeof(float));
    enum hdl_status s =
        rows && ids && weights && b->want
            ? fill(b, rows, ids, weights)
            : base_fail(HDL_ENOMEM, "rows of %lld tokens", (long long)b->tokens);
    free(rows);
    free(ids);
    free(weights);
    return s;
}

/* Expert outputs are 1 in all elements: a sum is that of the weights. */
static enum hdl_status make_buffers(struct bench *b)
{
    struct hdl_moe_sizes sizes = {.size = sizeof(sizes)};
    enum hdl_status s = hdl_moe_size_hint(&b->moe->opts, b->o->job->num_ranks, &sizes);
    size_t elements = sizes.combine_buffer_elements;
    if (s == HDL_OK)
        s = put(b, sizes.out_rows * sizes.row_bytes, NULL, &b->out);
    if (s == HDL_OK)
        s = put(b, sizes.out_rows * sizes.scale_bytes, NULL, &b->scales);
    if (s == HDL_OK)
        s = put(b, elements * 2, NULL, &b->outputs);
    if (s == HDL_OK)
        s = gpu_check(b->cu->fill16(b->outputs, 0x3f80, elements, b->stream),
                      "cuMemsetD16");
    if (s == HDL_OK)
        s = put(b, (size_t)(b->tokens * b->o->hidden) * 2, NULL, &b->result);
    if (s == HDL_OK)
        s = put(b, PAIRS * 2 * trace_words * 8, NULL, &b->trace);
    return s ? s : make_inputs(b);
}

static enum hdl_status check_results(struct bench *b, bool *good)
{
    size_t count = (size_t)(b->tokens * b->o->hidden);
    uint16_t *got = calloc(count, sizeof(*got));
    if (!got)
        return base_fail(HDL_ENOMEM, "%zu sums", count);
    enum hdl_status s =
        gpu_check(b->cu->copy_out(got, b->result, count * 2), "cuMemcpyDtoH");
    for (size_t i = 0; s == HDL_OK && i < count; i++) {
        float want = b->want[i / (size_t)b->o->hidden], x;
        uint32_t bits = (uint32_t)got[i] << 16;
        memcpy(&x, &bits, sizeof(x));
        *good = *good && fabsf(x - want) <= want / 64;
    }
    free(got);
    return s;
}

/* Bytes of a row of dispatch, of combine. */
static double row_bytes(const struct bench *b, int op)
{
    const struct moe_shape *shape = &b->moe->config.shape;
    return op ? (double)b->o->hidden * 2
              : (double)shape->row_elem * (double)b->o->hidden + shape->row_scales;
}

/* ----------------------------------------------------------------------------- graphs */

static enum hdl_status launch(struct bench *b, bool combine, uint64_t trace)
{
    const struct moe_gpu_tokens tokens = {.rows = (void *)b->rows,
                                          .ids = (void *)b->ids,
                                          .weights = (float *)b->weights,
                                          .num_tokens = (uint32_t)b->tokens};
    const struct moe_gpu_received received = {.rows = (void *)b->out,
                                              .scales = (void *)b->scales};
    const struct moe_gpu_result result = {.expert_out = (void *)b->outputs,
                                          .rows = (void *)b->result};
    const struct moe_gpu_call call = {.phase = MOE_GPU_SEND | MOE_GPU_RECV,
                                      .timeout_ns = UINT64_C(10000000000),
                                      .trace = trace,
                                      .stream = b->stream};
    return combine ? moe_gpu_combine(b->gpu, &call, &result)
                   : moe_gpu_dispatch(b->gpu, &call, &tokens, &received);
}

/* A graph of some launches, dispatch and combine in turn from number `first` on. */
static enum hdl_status capture(struct bench *b, uint64_t first, uint64_t count,
                               struct gpu_graph_exec **exec)
{
    struct gpu_graph *graph;
    enum hdl_status s =
        gpu_check(b->cu->capture_begin(b->stream, GPU_CAPTURE_THREAD), "capture");
    for (uint64_t n = first; s == HDL_OK && n < first + count; n++)
        s = launch(b, n & 1, b->trace + n * trace_words * 8);
    if (s == HDL_OK)
        s = gpu_check(b->cu->capture_end(b->stream, &graph), "capture");
    if (s == HDL_OK)
        s = gpu_check(b->cu->graph_instantiate(exec, graph, 0), "cuGraphInstantiate");
    if (s == HDL_OK)
        b->cu->graph_destroy(graph);
    return s;
}

/* Bytes that this rank sent to others so far, as its device counted them. */
static enum hdl_status count_sent(struct bench *b, int64_t *bytes)
{
    uint64_t sent[MOE_GPU_MAX_RANKS] = {0};
    struct hdl_moe_state state = {.size = sizeof(state), .bytes_sent = sent};
    enum hdl_status s = gpu_check(b->cu->stream_sync(b->stream), "a step");
    if (s == HDL_OK)
        s = hdl_moe_status(b->moe, &state);
    *bytes = 0;
    for (int r = 0; r < b->o->job->num_ranks; r++)
        *bytes += r != b->o->job->rank ? (int64_t)sent[r] : 0;
    return s;
}

/* One step's bytes of all ranks beside the least; what came must hold what had to. */
static enum hdl_status count_bytes(struct bench *b, bool *good)
{
    enum hdl_status s = HDL_OK;
    for (int i = 0; s == HDL_OK && i < 2; i++) {
        int64_t before = 0, after = 0;
        s = count_sent(b, &before);
        if (s == HDL_OK)
            s = launch(b, i, 0);
        if (s == HDL_OK)
            s = count_sent(b, &after);
        b->wire[i] = after - before;
        b->least[i] = (int64_t)((double)b->remote * row_bytes(b, i));
        if (s == HDL_OK)
            s = perf_agree(b->o->job, &b->wire[i], HDL_SUM);
        if (s == HDL_OK)
            s = perf_agree(b->o->job, &b->least[i], HDL_SUM);
        *good = *good && b->wire[i] >= b->least[i];
        b->wire[PAIR] = b->wire[APART] += b->wire[i];
        b->least[PAIR] = b->least[APART] += b->least[i];
    }
    return s;
}

static void add_times(struct bench *b)
{
    for (int n = 2 * SKIPPED; n < 2 * PAIRS; n++) {
        const uint64_t *t = b->words + (size_t)n * trace_words;
        uint64_t first = UINT64_MAX, last = 0;
        for (uint32_t i = 0; i < MOE_GPU_MAX_CTAS; i++) {
            const uint64_t *at = t + i * MOE_GPU_TRACE_POINTS;
            if (!at[0]) /* the launch had fewer blocks */
                continue;
            first = at[0] < first ? at[0] : first;
            last = at[1] > last ? at[1] : last;
        }
        b->samples[n & 1][b->count[n & 1]++] = (double)(last - first) * 1e-3;
    }
}

/* Graphs one after the other, from end to end; us. */
static enum hdl_status time_graphs(struct bench *b, struct gpu_graph_exec *const *graphs,
                                   int count, double *us)
{
    float ms = 0;
    enum hdl_status s = hdl_barrier(b->o->job->group, NULL, NULL);
    if (s == HDL_OK)
        s = gpu_check(b->cu->event_record(b->begin, b->stream), "event");
    for (int i = 0; s == HDL_OK && i < count; i++)
        s = gpu_check(b->cu->graph_launch(graphs[i & 1], b->stream), "cuGraphLaunch");
    if (s == HDL_OK)
        s = gpu_check(b->cu->event_record(b->end, b->stream), "event");
    if (s == HDL_OK)
        s = gpu_check(b->cu->stream_sync(b->stream), "replay");
    if (s == HDL_OK)
        s = gpu_check(b->cu->event_elapsed(&ms, b->begin, b->end), "event");
    *us = (double)ms * 1e3;
    return s;
}

static enum hdl_status replay(struct bench *b)
{
    double apart, both;
    enum hdl_status s = time_graphs(b, b->alone, 2 * PAIRS, &apart);
    if (s == HDL_OK)
        s = time_graphs(b, &b->exec, 1, &both);
    if (s == HDL_OK)
        s = gpu_check(b->cu->copy_out(b->words, b->trace, PAIRS * 2 * trace_words * 8),
                      "times");
    if (s != HDL_OK)
        return s;
    add_times(b);
    b->samples[PAIR][b->count[PAIR]++] = both / PAIRS;
    b->samples[APART][b->count[APART]++] = apart / PAIRS;
    return HDL_OK;
}

/* ------------------------------------------------------------------------------ a row */

static enum hdl_status open_bench(struct bench *b)
{
    const struct moe_cuda_opts *o = b->o;
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = (int32_t)o->experts,
                                      .top_k = (int32_t)o->topk,
                                      .hidden = (int32_t)o->hidden,
                                      .max_tokens = (int32_t)b->tokens,
                                      .format = o->fp8 ? HDL_MOE_FP8 : HDL_MOE_PLAIN,
                                      .layout = o->layout,
                                      .lanes = 1,
                                      .memory = HDL_MOE_CUDA,
                                      .cuda_device = o->job->rank % gpu_count(),
                                      .cuda_blocks = (int32_t)o->blocks,
                                      .protocol = o->protocol};
    enum hdl_status s = hdl_moe_create(o->job->group, &opts, &b->moe);
    if (s != HDL_OK)
        return s;
    b->gpu = b->moe->link->gpu;
    b->cu = b->gpu->device.driver;
    s = gpu_enter(&b->gpu->device);
    if (s == HDL_OK)
        s = gpu_check(b->cu->stream_create(&b->stream, GPU_STREAM_NON_BLOCKING, 0),
                      "stream");
    if (s == HDL_OK)
        s = gpu_check(b->cu->event_create(&b->begin, GPU_EVENT_TIMED), "event");
    if (s == HDL_OK)
        s = gpu_check(b->cu->event_create(&b->end, GPU_EVENT_TIMED), "event");
    b->words = calloc(PAIRS * 2 * trace_words, sizeof(uint64_t));
    bool room = b->words != NULL;
    for (int i = 0; i < ROWS; i++) {
        b->samples[i] = calloc((size_t)o->replays * PAIRS, sizeof(double));
        room = room && b->samples[i];
    }
    if (s == HDL_OK && !room)
        s = base_fail(HDL_ENOMEM, "times of %lld replays", (long long)o->replays);
    return s ? s : make_buffers(b);
}

static void close_bench(struct bench *b)
{
    if (b->gpu) {
        uint64_t memory[] = {b->rows,   b->ids,     b->weights, b->out,
                             b->scales, b->outputs, b->result,  b->trace};
        (void)moe_gpu_quiesce(b->gpu);
        for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
            gpu_free(&b->gpu->device, memory[i]);
        struct gpu_graph_exec *graphs[] = {b->exec, b->alone[0], b->alone[1]};
        for (int i = 0; i < 3; i++)
            if (graphs[i])
                b->cu->graph_exec_destroy(graphs[i]);
        if (b->begin)
            b->cu->event_destroy(b->begin);
        if (b->end)
            b->cu->event_destroy(b->end);
        if (b->stream)
            b->cu->stream_destroy(b->stream);
        gpu_leave(&b->gpu->device);
    }
    hdl_moe_destroy(b->moe);
    for (int i = 0; i < ROWS; i++)
        free(b->samples[i]);
    free(b->words);
    free(b->want);
}

/* "LL"; "LL+BULK" of a pair whose halves differ. */
static const char *protocol_text(const struct bench *b, int op)
{
    static char both[32];
    const char *of[2];
    for (int i = 0; i < 2; i++)
        of[i] = moe_protocol_name(moe_gpu_protocol(b->gpu, i));
    if (op < PAIR || of[0] == of[1])
        return of[op & 1];
    (void)snprintf(both, sizeof(both), "%s+%s", of[0], of[1]);
    return both;
}

/* What a row of the table says of bytes. */
struct bytes {
    int64_t wire, least; /* of all ranks */
    double busiest;      /* least of the rank that sends or gets most */
};

static void print_row(const struct bench *b, const char *op, const struct perf_times *t,
                      const struct bytes *bytes, const char *protocol,
                      const char *checked)
{
    double gbps = bytes->busiest / t->p50_us * 1e-3;
    if (b->o->job->rank != 0)
        return;
    if (b->o->job->json)
        printf("{\"op\": \"%s\", \"ranks\": %d, \"transport\": \"cuda\", \"protocol\": "
               "\"%s\", \"tokens\": %lld, \"p50_us\": %.2f, \"p99_us\": %.2f, "
               "\"wire_bytes\": %lld, \"min_bytes\": %lld, \"GBps\": %.1f, "
               "\"checked\": %s}\n",
               op, b->o->job->num_ranks, protocol, (long long)b->tokens, t->p50_us,
               t->p99_us, (long long)bytes->wire, (long long)bytes->least, gbps,
               strcmp(checked, "yes") == 0 ? "true" : "false");
    else
        printf("%-15s %-8s %7lld %9.2f %9.2f %12lld %12lld %8.1f %s\n", op, protocol,
               (long long)b->tokens, t->p50_us, t->p99_us, (long long)bytes->wire,
               (long long)bytes->least, gbps, checked);
    (void)fflush(stdout);
}

/* NCCL moves as many bytes to each rank as we do, then every expert's share padded to all
 * tokens, unless that is too much. */
static enum hdl_status measure_nccl(struct bench *b, struct perf_nccl *nccl)
{
    static const char *const names[] = {"dispatch nccl", "combine nccl",
                                        "dispatch padded", "combine padded"};
    enum { FEW = 20 };
    const int ranks = b->o->job->num_ranks;
    const double most = 1 << 30;
    enum hdl_status s = HDL_OK;
    for (int i = 0; s == HDL_OK && i < 4; i++) {
        double rows = i < 2 ? (double)b->most / (ranks > 1 ? ranks - 1 : 1)
                            : (double)(b->tokens * b->o->experts / ranks);
        double bytes = ceil(rows * row_bytes(b, i & 1));
        const double sent = bytes * (ranks - 1);
        const struct bytes moved = {(int64_t)(sent * ranks), b->least[i & 1], sent};
        struct perf_times t;
        if (bytes * ranks > most || bytes < 1)
            continue;
        s = perf_nccl_measure(nccl, (size_t)bytes,
                              b->o->replays < FEW ? b->o->replays : FEW, &t);
        if (s == HDL_OK)
            print_row(b, names[i], &t, &moved, "NCCL", "no");
    }
    return s;
}

static enum hdl_status compare_nccl(struct bench *b)
{
    struct perf_nccl *nccl = NULL;
    enum hdl_status s = perf_nccl_open(b->o->job, &b->gpu->device, b->stream, &nccl);
    if (s == HDL_ENOTSUP && b->o->job->rank == 0)
        (void)fprintf(stderr, "# nothing to compare with: %s\n", base_detail());
    if (s != HDL_OK)
        return s == HDL_ENOTSUP ? HDL_OK : s;
    s = measure_nccl(b, nccl);
    perf_nccl_close(nccl);
    return s;
}

static enum hdl_status measure(struct bench *b, bool *good)
{
    static const char *const names[] = {"dispatch", "combine", "pair", "apart"};
    struct perf_times times[ROWS];
    int64_t wrong;
    enum hdl_status s = capture(b, 0, (uint64_t)2 * PAIRS, &b->exec);
    for (uint64_t i = 0; s == HDL_OK && i < 2; i++)
        s = capture(b, i, 1, &b->alone[i]);
    for (int64_t i = 0; s == HDL_OK && i < b->o->replays + 2; i++) {
        if (i == 2) /* the first two warm up */
            memset(b->count, 0, sizeof(b->count));
        s = replay(b);
    }
    if (s == HDL_OK)
        s = count_bytes(b, good);
    if (s == HDL_OK)
        s = check_results(b, good);
    for (int i = 0; s == HDL_OK && i < ROWS; i++)
        s = perf_agree_times(b->o->job, b->samples[i], b->count[i], &times[i]);
    wrong = !*good;
    if (s == HDL_OK)
        s = perf_agree(b->o->job, &wrong, HDL_MAX);
    *good = wrong == 0;
    for (int i = 0; s == HDL_OK && i < ROWS; i++) {
        const struct bytes bytes = {b->wire[i], b->least[i],
                                    i < PAIR ? (double)b->most * row_bytes(b, i) : 0};
        print_row(b, names[i], &times[i], &bytes, protocol_text(b, i),
                  *good ? "yes" : "WRONG");
    }
    return s == HDL_OK && b->o->nccl ? compare_nccl(b) : s;
}

int moe_cuda_run(const struct moe_cuda_opts *o)
{
    bool good = true;
    if (gpu_count() == 0)
        return tool_failed("%s", base_detail());
    if (o->job->rank == 0 && !o->job->json)
        printf("# %d ranks on %d GPUs, hidden %lld, top-k %lld, experts %lld, %s; %lld "
               "replays of %d steps, kernel times; pair: both in one graph from end to "
               "end; apart: each in its own; bytes of all ranks between them\n%-15s %-8s "
               "%7s %9s %9s %12s %12s %8s %s\n",
               o->job->num_ranks, gpu_count(), (long long)o->hidden, (long long)o->topk,
               (long long)o->experts, o->fp8 ? "fp8" : "bf16", (long long)o->replays,
               PAIRS, "op", "protocol", "tokens", "p50_us", "p99_us", "wire_bytes",
               "min_bytes", "GBps", "checked");
    for (int64_t i = 0; i < o->num_tokens; i++) {
        struct bench b = {.o = o, .tokens = o->tokens[i]};
        enum hdl_status s = open_bench(&b);
        if (s == HDL_OK)
            s = measure(&b, &good);
        if (s != HDL_OK)
            tool_failed("%s", base_detail());
        close_bench(&b);
        if (s != HDL_OK)
            return TOOL_FAILED;
    }
    return good ? TOOL_OK : TOOL_FAILED;
}
