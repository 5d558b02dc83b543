/* SPDX-License-Identifier: Apache-2.0 */
/* Times the MoE kernels in graphs: moe_perf [gpus] [tokens,...] [replays] [blocks]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

/*
 * A graph of each GPU holds PAIRS times dispatch and combine. Every block notes when it
 * began and ended; a kernel's time is from its first block's begin to its last block's
 * end. The first pairs of a graph are left out: there the GPUs wait for each other's
 * launch. What a pair takes from end to end is compared with graphs of one of the two
 * alone, also from end to end; combines alone repeat the last step's, so they wait for
 * nothing. MOE_PERF_LATE: weights come with combine alone, 1 = in one call, 2 = in two,
 * of which both are timed as one.
 */
enum { PAIRS = 20, KERNELS = 3 /* of a pair */, SKIPPED = 3, MAX_SAMPLES = 1 << 20 };
enum { BOTH, DISPATCHES, COMBINES, GRAPHS }; /* what a graph has */

struct perf {
    struct gpu_world *w;
    struct gpu_case *c;
    uint64_t trace[MOE_GPU_MAX_RANKS];
    struct gpu_graph_exec *exec[GRAPHS][MOE_GPU_MAX_RANKS];
    struct gpu_event *begin[MOE_GPU_MAX_RANKS], *end[MOE_GPU_MAX_RANKS];
    double *samples[2 + GRAPHS]; /* dispatch, combine, then graphs from end to end */
    size_t count[2 + GRAPHS];
    double phase_mean[2][MOE_GPU_TRACE_POINTS], phase_last[2][MOE_GPU_TRACE_POINTS];
    uint32_t phase_count[2][MOE_GPU_TRACE_POINTS];
    int late;
};

static const size_t trace_words = MOE_GPU_TRACE_POINTS * MOE_GPU_MAX_CTAS;

static void must(int error, const char *what)
{
    if (error) {
        fprintf(stderr, "%s: %s\n", what, base_detail());
        exit(1);
    }
}

static void enter(const struct gpu_rank *r)
{
    must(gpu_enter(&r->gpu->device), "enter");
}

static void capture_combine(const struct perf *p, const struct gpu_rank *r,
                            struct moe_gpu_call *call,
                            const struct moe_gpu_result *result)
{
    if (p->late == 2) {
        call->phase = MOE_GPU_SEND;
        must(moe_gpu_combine(r->gpu, call, result), "combine");
        call->trace += trace_words * 8;
        call->phase = MOE_GPU_RECV;
    }
    must(moe_gpu_combine(r->gpu, call, result), "combine");
}

static void prepare(struct perf *p, uint32_t i)
{
    struct gpu_rank *r = &p->w->rank[i];
    const struct gpu_driver *cu = r->gpu->device.driver;
    enter(r);
    must(gpu_alloc(&r->gpu->device, PAIRS * KERNELS * trace_words * 8, &p->trace[i]),
         "trace");
    must(gpu_check(cu->event_create(&p->begin[i], GPU_EVENT_TIMED), "event"), "event");
    must(gpu_check(cu->event_create(&p->end[i], GPU_EVENT_TIMED), "event"), "event");
    gpu_leave(&r->gpu->device);
}

static void capture(struct perf *p, uint32_t i, int what)
{
    struct gpu_rank *r = &p->w->rank[i];
    const struct gpu_driver *cu = r->gpu->device.driver;
    struct gpu_graph *graph;
    enter(r);
    must(gpu_check(cu->capture_begin(r->stream, GPU_CAPTURE_THREAD), "capture"),
         "capture");
    for (int n = 0; n < PAIRS; n++) {
        struct moe_gpu_call call = {.phase = MOE_GPU_SEND | MOE_GPU_RECV,
                                    .timeout_ns = 1000000000,
                                    .trace = p->trace[i] +
                                             (uint64_t)n * KERNELS * trace_words * 8,
                                    .stream = r->stream};
        struct moe_gpu_tokens tokens = gpu_tokens_of(r, p->c, i);
        struct moe_gpu_received received = gpu_received_of(p->w, r);
        struct moe_gpu_result result = gpu_result_of(p->w, r, p->c);
        if (what != COMBINES)
            must(moe_gpu_dispatch(r->gpu, &call, &tokens, &received), "dispatch");
        call.trace += trace_words * 8;
        if (what != DISPATCHES)
            capture_combine(p, r, &call, &result);
    }
    must(gpu_check(cu->capture_end(r->stream, &graph), "capture"), "capture");
    must(gpu_check(cu->graph_instantiate(&p->exec[what][i], graph, 0), "graph"), "graph");
    cu->graph_destroy(graph);
    gpu_leave(&r->gpu->device);
}

static void replay(struct perf *p, int what)
{
    for (uint32_t i = 0; i < p->w->ranks; i++) {
        struct gpu_rank *r = &p->w->rank[i];
        const struct gpu_driver *cu = r->gpu->device.driver;
        enter(r);
        must(gpu_check(cu->event_record(p->begin[i], r->stream), "event"), "event");
        must(gpu_check(cu->graph_launch(p->exec[what][i], r->stream), "graph"), "graph");
        must(gpu_check(cu->event_record(p->end[i], r->stream), "event"), "event");
        gpu_leave(&r->gpu->device);
    }
}

static void add(struct perf *p, int kind, double value)
{
    if (p->count[kind] < MAX_SAMPLES)
        p->samples[kind][p->count[kind]++] = value;
}

/* Where blocks are at which time after the kernel's first block began: mean and latest.
 */
static void add_phases(struct perf *p, int kind, const uint64_t *t, uint32_t blocks,
                       uint64_t first)
{
    for (int i = 0; i < MOE_GPU_TRACE_POINTS; i++) {
        uint64_t latest = 0;
        double sum = 0;
        uint32_t n = 0;
        for (uint32_t b = 0; b < blocks; b++) {
            uint64_t at = t[b * MOE_GPU_TRACE_POINTS + (uint32_t)i];
            if (at < first)
                continue;
            sum += (double)(at - first);
            latest = at > latest ? at : latest;
            n++;
        }
        if (!n)
            continue;
        p->phase_mean[kind][i] += sum / n * 1e-3;
        p->phase_last[kind][i] += (double)(latest - first) * 1e-3;
        p->phase_count[kind][i]++;
    }
}

static void print_phases(const struct perf *p)
{
    for (int kind = 0; kind < 2; kind++) {
        printf("  %s:", kind ? "combine " : "dispatch");
        for (int i = 0; i < MOE_GPU_TRACE_POINTS; i++)
            if (p->phase_count[kind][i])
                printf(" %d=%.2f/%.2f", i,
                       p->phase_mean[kind][i] / p->phase_count[kind][i],
                       p->phase_last[kind][i] / p->phase_count[kind][i]);
        printf("\n");
    }
}

/* Waits for a replay; what one of its steps took on the slowest rank. */
static void await_replay(struct perf *p, int what)
{
    double worst = 0;
    for (uint32_t i = 0; i < p->w->ranks; i++) {
        struct gpu_rank *r = &p->w->rank[i];
        const struct gpu_driver *cu = r->gpu->device.driver;
        float ms = 0;
        enter(r);
        must(gpu_check(cu->stream_sync(r->stream), "replay"), "replay");
        must(gpu_check(cu->event_elapsed(&ms, p->begin[i], p->end[i]), "time"), "time");
        gpu_leave(&r->gpu->device);
        worst = ms > worst ? ms : worst;
    }
    add(p, 2 + what, worst * 1e3 / PAIRS);
}

/* The kernels' own times in a replay of both. */
static void collect(struct perf *p, uint64_t *words)
{
    for (uint32_t i = 0; i < p->w->ranks; i++) {
        struct gpu_rank *r = &p->w->rank[i];
        const uint32_t blocks = MOE_GPU_MAX_CTAS;
        enter(r);
        must(gpu_check(r->gpu->device.driver->copy_out(words, p->trace[i],
                                                       PAIRS * KERNELS * trace_words * 8),
                       "trace"),
             "trace");
        gpu_leave(&r->gpu->device);
        for (int n = 2 * SKIPPED; n < 2 * PAIRS; n++) {
            const uint64_t *t = words + (size_t)(n / 2 * KERNELS + n % 2) * trace_words;
            const uint32_t kernels = n % 2 && p->late == 2 ? 2 : 1;
            uint64_t first = UINT64_MAX, last = 0;
            for (uint32_t b = 0; b < blocks * kernels; b++) {
                const uint64_t *at = t + b * MOE_GPU_TRACE_POINTS;
                if (!at[0]) /* the launch had fewer blocks */
                    continue;
                first = at[0] < first ? at[0] : first;
                last = at[1] > last ? at[1] : last;
            }
            add_phases(p, n & 1, t, blocks, first);
            add(p, n & 1, (double)(last - first) * 1e-3);
        }
    }
}

static void replay_all(struct perf *p, int replays, uint64_t *words)
{
    enum { WARM = 10 };
    for (int what = 0; what < GRAPHS; what++) {
        for (uint32_t i = 0; i < p->w->ranks; i++)
            capture(p, i, what);
        for (int i = 0; i < replays + WARM; i++) {
            replay(p, what);
            await_replay(p, what);
            if (what == BOTH)
                collect(p, words);
            if (i == WARM - 1)
                p->count[2 + what] = 0;
            if (i == WARM - 1 && what == BOTH)
                p->count[0] = p->count[1] = 0;
        }
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(struct perf *p, int kind, double q)
{
    qsort(p->samples[kind], p->count[kind], sizeof(double), by_value);
    return p->samples[kind][(size_t)(q * (double)(p->count[kind] - 1))];
}

/* Rows that cross a link from rank 0, for the bytes that must move. */
static double remote_rows(const struct gpu_world *w, const struct gpu_case *c)
{
    uint32_t k = w->config.shape.top_k, n = 0;
    for (uint32_t t = 0; t < c->tokens[0]; t++) {
        uint32_t ranks = 0;
        for (uint32_t j = 0; j < k; j++) {
            int64_t id = w->rank[0].ids64[t * k + j];
            if (id >= 0)
                ranks |= 1u << w->config.map.holder[w->config.map.begin[id]];
        }
        n += (uint32_t)__builtin_popcount(ranks & ~1u);
    }
    return n;
}

static void tell_lost(const struct gpu_world *w)
{
    struct moe_gpu_state state;
    for (uint32_t i = 0; i < w->ranks; i++) {
        must(moe_gpu_read_state(w->rank[i].gpu, 0, &state), "state");
        for (uint32_t r = 0; r < w->ranks; r++)
            if (state.dropped[r] || state.late[r])
                printf("rank %u lost rank %u: step %u, dropped %u, late %u\n", i, r,
                       state.step[0], state.dropped[r], state.late[r]);
    }
}

/* Of an environment variable, 0 if it is not set. */
static int number_of(const char *variable)
{
    const char *text = getenv(variable);
    return text ? atoi(text) : 0;
}

static void measure(uint32_t gpus, uint32_t tokens, int replays, uint32_t blocks,
                    bool check)
{
    struct gpu_case c;
    struct perf p = {0};
    struct gpu_world *w = calloc(1, sizeof(*w));
    uint64_t *words = malloc(PAIRS * KERNELS * trace_words * 8);
    gpu_case_defaults(&c);
    c.ranks = gpus;
    c.opts.max_tokens = (int32_t)tokens;
    c.opts.combine_wire = (enum hdl_moe_wire)number_of("MOE_PERF_WIRE");
    c.opts.protocol = (enum hdl_moe_protocol)number_of("MOE_PERF_PROTOCOL");
    c.seed = 2;
    p.late = number_of("MOE_PERF_LATE");
    c.opts.late_weights = p.late != 0;
    c.late = p.late ? (1u << gpus) - 1 : 0;
    for (uint32_t i = 0; i < gpus; i++)
        c.tokens[i] = tokens;
    for (int k = 0; k < 2 + GRAPHS; k++)
        p.samples[k] = malloc(MAX_SAMPLES * sizeof(double));
    p.w = w;
    p.c = &c;
    w->bench = !check;
    if (!gpu_world_open(w, &c.opts, gpus, (int)gpus, blocks) || !gpu_world_fill(w, &c))
        exit(1);
    for (int i = 0; i < 3; i++)
        if (!gpu_world_step(w, &c, 0))
            exit(1);
    if (check && gpu_world_compare(w, &c, OF_BOTH))
        printf("T %u differs from the oracle\n", tokens);
    for (uint32_t i = 0; i < gpus; i++)
        prepare(&p, i);
    replay_all(&p, replays, words);
    double rows = remote_rows(w, &c);
    printf("gpus %u T %4u blocks %3u: dispatch median %7.2f p99 %7.2f us (%5.1f GB/s) | "
           "combine "
           "median %7.2f p99 %7.2f us (%5.1f GB/s) | from end to end: pair %7.2f us, "
           "alone %7.2f + %7.2f\n",
           gpus, tokens, w->rank[0].gpu->blocks, quantile(&p, 0, 0.5),
           quantile(&p, 0, 0.99), rows * 7392e-3 / quantile(&p, 0, 0.5),
           quantile(&p, 1, 0.5), quantile(&p, 1, 0.99),
           rows * 14336e-3 / quantile(&p, 1, 0.5), quantile(&p, 2 + BOTH, 0.5),
           quantile(&p, 2 + DISPATCHES, 0.5), quantile(&p, 2 + COMBINES, 0.5));
    if (getenv("MOE_PERF_PHASES"))
        print_phases(&p);
    fflush(stdout);
    tell_lost(w);
    for (uint32_t i = 0; i < gpus; i++)
        gpu_free(&w->rank[i].gpu->device, p.trace[i]);
    gpu_world_close(w);
    for (int k = 0; k < 2 + GRAPHS; k++)
        free(p.samples[k]);
    free(words);
    free(w);
}

int main(int argc, char **argv)
{
    int gpus = gpu_count();
    if (gpus == 0) {
        printf("skipped: %s\n", base_detail());
        return 77;
    }
    if (argc > 1 && atoi(argv[1]) > 0)
        gpus = atoi(argv[1]);
    char *list = strdup(argc > 2 ? argv[2] : "1,8,32,128,256"), *rest = list;
    int replays = argc > 3 ? atoi(argv[3]) : 200;
    uint32_t blocks = argc > 4 ? (uint32_t)atoi(argv[4]) : 0;
    bool check = getenv("MOE_PERF_CHECK") != NULL;
    for (char *word = strsep(&rest, ","); word; word = strsep(&rest, ","))
        measure((uint32_t)gpus, (uint32_t)atoi(word), replays, blocks, check);
    free(list);
    return 0;
}
