/* SPDX-License-Identifier: Apache-2.0 */
/* The benchmarks of `heddle perf --micro`: stores, scan of the routing, polling,
 * launches. */
#include "tools/perf/micro_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"

const char *micro_path(const struct micro *m)
{
    return m->gpus > 1 ? "peers" : "the same GPU";
}

static const char *verdict(struct micro *m, bool good)
{
    m->good = m->good && good;
    return m->json ? (good ? "true" : "false") : good ? "yes" : "NO";
}

static uint32_t multiprocessors(const struct micro *m)
{
    return (uint32_t)m->device[0].info.multiprocessors;
}

static enum hdl_status launch(struct micro *m, int rank, const char *kernel,
                              uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                              const void *args)
{
    struct gpu_function *function;
    void *params[] = {(void *)(uintptr_t)args};
    enum hdl_status s = micro_kernel(m, rank, kernel, shared_bytes, &function);
    return s ? s
             : gpu_check(m->cu->launch(function, blocks, 1, 1, threads, 1, 1,
                                       shared_bytes, m->rank[rank].stream, params, NULL),
                         kernel);
}

/* --------------------------------------------------------------------------- stores */

struct store_line {
    enum micro_store_way way;
    uint32_t row_bytes;
    int destinations; /* 0 = all ranks store to rank 0 */
};

/* Where rank `rank` stores its rows: a region of its own in each destination. */
static struct micro_store store_args(const struct micro *m, int rank,
                                     const struct store_line *l)
{
    struct micro_store a = {.way = l->way,
                            .rows = (uint32_t)(MICRO_REGION / l->row_bytes),
                            .vectors = l->row_bytes / 16};
    if (l->destinations == 0 && rank > 0)
        a.to[a.num_to++] = m->rank[rank].at[0] + (uint64_t)rank * MICRO_REGION;
    for (int d = 0; d < l->destinations; d++) {
        const int to = m->gpus > 1 ? (rank + 1 + d) % m->ranks : rank;
        const int region = m->gpus > 1 ? rank : d;
        a.to[a.num_to++] = m->rank[rank].at[to] + (uint64_t)region * MICRO_REGION;
    }
    return a;
}

static enum hdl_status launch_store(struct micro *m, int rank,
                                    const struct micro_work *work)
{
    const struct micro_store a = store_args(m, rank, work->args);
    return a.num_to ? launch(m, rank, "micro_store", work->blocks, MICRO_THREADS,
                             a.vectors * 16, &a)
                    : HDL_OK;
}

/* The first and the last row of each place that the last storing rank wrote to. */
static enum hdl_status check_store(struct micro *m, int rank, const struct store_line *l,
                                   bool *good)
{
    static uint32_t row[MICRO_MAX_RANKS << 11];
    const struct micro_store a = store_args(m, rank, l);
    enum hdl_status s = gpu_enter(m->rank[rank].device);
    for (uint32_t i = 0; s == HDL_OK && i < a.num_to * 2; i++) {
        const uint64_t at = i & 1 ? (uint64_t)(a.rows - 1) * l->row_bytes : 0;
        s = gpu_check(m->cu->copy_out(row, a.to[i / 2] + at, l->row_bytes),
                      "cuMemcpyDtoH");
        for (uint32_t v = 0; s == HDL_OK && v < a.vectors; v++)
            *good = *good && row[v * 4] == v && row[v * 4 + 1] == 1 &&
                    row[v * 4 + 2] == 2 && row[v * 4 + 3] == 3;
        if (s == HDL_OK)
            s = gpu_check(m->cu->fill(a.to[i / 2] + at, 0, l->row_bytes, NULL),
                          "cuMemsetD8Async");
    }
    if (s == HDL_OK)
        s = gpu_check(m->cu->ctx_sync(), "cuCtxSynchronize");
    gpu_leave(m->rank[rank].device);
    return s;
}

static enum hdl_status store_line(struct micro *m, const struct store_line *l,
                                  uint32_t blocks)
{
    static const char *const ways[] = {"weak", "system", "bulk"};
    const bool incast = l->destinations == 0;
    const int ranks = m->gpus > 1 ? m->ranks : 1;
    const struct micro_work work = {launch_store, l, ranks, blocks};
    const struct micro_store last = store_args(m, ranks - 1, l);
    bool good = true;
    double us;
    enum hdl_status s = micro_time(m, &work, &us);
    if (s == HDL_OK)
        s = check_store(m, ranks - 1, l, &good);
    if (s != HDL_OK)
        return s;
    char to[16] = "all to one";
    if (!incast)
        (void)snprintf(to, sizeof(to), "%d", l->destinations);
    /* What one GPU stores; for all to one, what that one gets. */
    const double GBps = (double)last.rows * l->row_bytes *
                        (incast ? ranks - 1 : l->destinations) / us * 1e-3;
    if (m->json)
        printf("{\"micro\": \"store\", \"path\": \"%s\", \"gpus\": %d, \"way\": \"%s\", "
               "\"pattern\": \"%s\", \"destinations\": %d, \"row_bytes\": %u, "
               "\"blocks\": %u, \"GBps\": %.1f, \"checked\": %s}\n",
               micro_path(m), m->gpus, ways[l->way], incast ? "all to one" : "each",
               incast ? 1 : l->destinations, l->row_bytes, blocks, GBps,
               verdict(m, good));
    else
        printf("store    %-7s %12s %9u %7u %9.1f  %s\n", ways[l->way], to, l->row_bytes,
               blocks, GBps, verdict(m, good));
    return HDL_OK;
}

/* For each number of blocks: few, as much as a budget allows, all. */
static enum hdl_status store_blocks(struct micro *m, const struct store_line *l)
{
    static const uint32_t blocks[] = {1, 8, 16, 32, 64};
    enum hdl_status s = HDL_OK;
    for (size_t i = 0; s == HDL_OK && i < sizeof(blocks) / sizeof(*blocks); i++)
        if (blocks[i] < multiprocessors(m))
            s = store_line(m, l, blocks[i]);
    return s ? s : store_line(m, l, multiprocessors(m));
}

enum hdl_status micro_bench_store(struct micro *m)
{
    static const uint32_t bytes[] = {7392, 8192, 14336};
    const int most = m->gpus == 1 ? 3 : m->gpus - 1;
    enum hdl_status s = HDL_OK;
    if (!m->json)
        printf("store    %-7s %12s %9s %7s %9s  %s\n", "way", "destinations", "row_bytes",
               "blocks", "GBps", "checked");
    for (int way = MICRO_WEAK; way <= MICRO_BULK; way++)
        for (size_t i = 0; i < sizeof(bytes) / sizeof(*bytes); i++) {
            struct store_line l = {(enum micro_store_way)way, bytes[i], 1};
            s = s ? s : store_blocks(m, &l);
            l.destinations = most;
            s = s || most == 1 ? s : store_blocks(m, &l);
            l.destinations = 0;
            s = s || m->gpus < 3 ? s : store_blocks(m, &l);
        }
    return s;
}

/* ------------------------------------------------------------------------------ scan */

enum { SCANS = 20 }; /* launches of a run, one after the other */

struct scan_data {
    struct micro_scan args;
    uint16_t *ids;
    uint32_t want[MICRO_EXPERTS];
    uint32_t most; /* tokens */
};

static enum hdl_status launch_scan(struct micro *m, int rank,
                                   const struct micro_work *work)
{
    const struct micro_scan *a = work->args;
    const uint32_t shared = (a->tokens + 31) / 32 * MICRO_EXPERTS * 4;
    enum hdl_status s = HDL_OK;
    for (int i = 0; s == HDL_OK && i < SCANS; i++)
        s = launch(m, rank, "micro_scan", work->blocks, MICRO_SCAN_THREADS, shared, a);
    return s;
}

static enum hdl_status check_scan(struct micro *m, struct scan_data *d, uint32_t blocks,
                                  bool *good)
{
    uint32_t got[MICRO_EXPERTS];
    memset(d->want, 0, sizeof(d->want));
    for (uint32_t i = 0; i < d->args.tokens * MICRO_TOP_K; i++)
        if (d->ids[i] - d->args.first < MICRO_EXPERTS && d->ids[i] >= d->args.first)
            d->want[d->ids[i] - d->args.first]++;
    enum hdl_status s = gpu_enter(&m->device[0]);
    const uint64_t last = (uint64_t)(blocks - 1) * sizeof(got);
    if (s == HDL_OK)
        s = gpu_check(m->cu->copy_out(got, d->args.counts + last, sizeof(got)),
                      "cuMemcpyDtoH");
    gpu_leave(&m->device[0]);
    *good = memcmp(got, d->want, sizeof(got)) == 0;
    return s;
}

static enum hdl_status scan_line(struct micro *m, struct scan_data *d, uint32_t entries)
{
    const uint32_t blocks = multiprocessors(m);
    const struct micro_work work = {launch_scan, &d->args, 1, blocks};
    bool good;
    double us;
    d->args.tokens = entries / MICRO_TOP_K;
    enum hdl_status s = micro_time(m, &work, &us);
    if (s == HDL_OK)
        s = check_scan(m, d, blocks, &good);
    if (s != HDL_OK)
        return s;
    if (m->json)
        printf("{\"micro\": \"scan\", \"gpus\": %d, \"entries\": %u, \"blocks\": %u, "
               "\"us\": %.2f, \"checked\": %s}\n",
               m->gpus, entries, blocks, us / SCANS, verdict(m, good));
    else
        printf("scan     %7u %7u %9.2f  %s\n", entries, blocks, us / SCANS,
               verdict(m, good));
    return HDL_OK;
}

/* Distinct experts of 8 ranks for each token. */
static enum hdl_status fill_scan(struct micro *m, struct scan_data *d)
{
    uint64_t random = 1;
    const size_t bytes = (size_t)d->most * MICRO_TOP_K * sizeof(*d->ids);
    d->ids = calloc(1, bytes);
    if (!d->ids)
        return base_fail(HDL_ENOMEM, "entries of %u tokens", d->most);
    for (uint32_t t = 0; t < d->most; t++)
        for (uint32_t i = 0; i < MICRO_TOP_K; i++)
            d->ids[t * MICRO_TOP_K + i] =
                (uint16_t)(i * MICRO_EXPERTS +
                           base_splitmix_next(&random) % MICRO_EXPERTS);
    d->args.first = MICRO_EXPERTS;
    d->args.ids = m->rank[0].at[0];
    d->args.counts = d->args.ids + bytes;
    enum hdl_status s = gpu_enter(&m->device[0]);
    if (s)
        return s;
    s = gpu_check(m->cu->copy_in(d->args.ids, d->ids, bytes), "cuMemcpyHtoD");
    gpu_leave(&m->device[0]);
    return s;
}

enum hdl_status micro_bench_scan(struct micro *m)
{
    static const uint32_t entries[] = {0,        1 << 10,   4 << 10,  16 << 10,
                                       64 << 10, 128 << 10, 256 << 10};
    struct scan_data d = {.most = (256 << 10) / MICRO_TOP_K};
    enum hdl_status s = fill_scan(m, &d);
    if (!m->json)
        printf("scan     %7s %7s %9s  %s\n", "entries", "blocks", "us", "checked");
    for (size_t i = 0; s == HDL_OK && i < sizeof(entries) / sizeof(*entries); i++)
        s = scan_line(m, &d, entries[i]);
    free(d.ids);
    return s;
}

/* --------------------------------------------------------------------------- receive */

enum { ROUNDS = 100, ROW_PACKETS = 512, WAYS = 4 };

/* Who looks at what comes. */
enum pollers { NOBODY, SENDERS, OTHERS };

struct receive_line {
    int way;
    uint32_t rows, backoff, senders;
    enum pollers pollers;
};

static enum hdl_status launch_receive(struct micro *m, int rank,
                                      const struct micro_work *work)
{
    static const char *const kernels[WAYS] = {
        "micro_exchange_ll16", "micro_exchange_ll128", "micro_exchange_ll16_bulk",
        "micro_exchange_ll128_bulk"};
    const struct receive_line *l = work->args;
    struct micro_exchange a = {.counters = m->rank[rank].counters,
                               .deadline_ns = UINT64_C(2000000000),
                               .me = (uint32_t)rank,
                               .ranks = (uint32_t)m->ranks,
                               .rows = l->rows,
                               .packets = ROW_PACKETS,
                               .iterations = ROUNDS,
                               .first_tag = m->runs * (ROUNDS + 2),
                               .backoff = l->backoff,
                               .senders = l->senders,
                               .waits = l->pollers == SENDERS};
    memcpy(a.base, m->rank[rank].at, sizeof(a.base));
    return launch(m, rank, kernels[l->way], work->blocks, MICRO_THREADS, ROW_PACKETS * 16,
                  &a);
}

/* What all ranks have counted, which is forgotten then. */
static enum hdl_status take_counters(struct micro *m, struct micro_counters *sum)
{
    enum hdl_status s = HDL_OK;
    memset(sum, 0, sizeof(*sum));
    for (int r = 0; s == HDL_OK && r < m->ranks; r++) {
        struct micro_counters c, none = {0, 0, 0};
        s = gpu_enter(m->rank[r].device);
        if (s)
            break;
        s = gpu_check(m->cu->copy_out(&c, m->rank[r].counters, sizeof(c)),
                      "cuMemcpyDtoH");
        if (!s)
            s = gpu_check(m->cu->copy_in(m->rank[r].counters, &none, sizeof(none)),
                          "cuMemcpyHtoD");
        gpu_leave(m->rank[r].device);
        sum->torn += c.torn;
        sum->late += c.late;
        sum->polls += c.polls;
    }
    return s;
}

static void print_receive(struct micro *m, const struct receive_line *l, double us,
                          const struct micro_counters *c)
{
    static const char *const ways[WAYS] = {"ll16", "ll128", "ll16 bulk", "ll128 bulk"};
    static const char *const who[] = {"nobody", "senders", "others"};
    const uint32_t packets = l->rows * ROW_PACKETS * (uint32_t)(m->ranks - 1);
    const double GBps = (double)packets * 16 / us * 1e-3;
    const double polls = (double)c->polls /
                         ((double)packets * ROUNDS * m->ranks * (double)(m->repeats + 1));
    const char *good = verdict(m, c->torn == 0 && c->late == 0);
    if (m->json)
        printf(
            "{\"micro\": \"receive\", \"path\": \"%s\", \"gpus\": %d, \"way\": \"%s\", "
            "\"rows\": %u, \"pollers\": \"%s\", \"backoff_ns\": %u, \"us\": %.2f, "
            "\"GBps\": %.1f, \"polls\": %.2f, \"torn\": %llu, \"late\": %llu, "
            "\"checked\": %s}\n",
            micro_path(m), m->gpus, ways[l->way], l->rows, who[l->pollers], l->backoff,
            us, GBps, polls, (unsigned long long)c->torn, (unsigned long long)c->late,
            good);
    else
        printf("receive  %-10s %5u %8s %10u %9.2f %9.1f %7.2f %6llu %6llu  %s\n",
               ways[l->way], l->rows, who[l->pollers], l->backoff, us, GBps, polls,
               (unsigned long long)c->torn, (unsigned long long)c->late, good);
}

static enum hdl_status receive_line(struct micro *m, struct receive_line *l)
{
    uint32_t room = multiprocessors(m) * (uint32_t)m->gpus / (uint32_t)m->ranks;
    if (l->pollers != SENDERS)
        room /= 2;
    l->senders = l->rows < room ? l->rows : room;
    const struct micro_work work = {launch_receive, l, m->ranks,
                                    l->pollers == OTHERS ? l->senders * 2 : l->senders};
    struct micro_counters counters;
    double us;
    enum hdl_status s = micro_time(m, &work, &us);
    if (s == HDL_OK)
        s = take_counters(m, &counters);
    if (s == HDL_OK)
        print_receive(m, l, us / ROUNDS, &counters);
    return s;
}

/* Old contents of memory must be no tags that are waited for. */
static enum hdl_status clear_memory(struct micro *m)
{
    enum hdl_status s = HDL_OK;
    for (int r = 0; s == HDL_OK && r < m->ranks; r++) {
        s = gpu_enter(m->rank[r].device);
        if (s)
            break;
        s = gpu_check(m->cu->fill(m->rank[r].at[r], 0, MICRO_REGION * MICRO_MAX_RANKS,
                                  m->rank[r].stream),
                      "cuMemsetD8Async");
        if (!s)
            s = gpu_check(m->cu->stream_sync(m->rank[r].stream), "cuStreamSynchronize");
        gpu_leave(m->rank[r].device);
    }
    return s;
}

static enum hdl_status receive_rows(struct micro *m, int way, uint32_t rows)
{
    static const uint32_t backoff[] = {0, 20, 50};
    enum hdl_status s = HDL_OK;
    for (int pollers = NOBODY; pollers <= OTHERS; pollers++)
        for (size_t i = 0; s == HDL_OK && i < (pollers == NOBODY ? 1 : 3); i++) {
            struct receive_line l = {.way = way,
                                     .rows = rows,
                                     .backoff = backoff[i],
                                     .pollers = (enum pollers)pollers};
            s = receive_line(m, &l);
        }
    return s;
}

enum hdl_status micro_bench_receive(struct micro *m)
{
    static const uint32_t rows[] = {1, 8, 32, 128, 230};
    enum hdl_status s = clear_memory(m);
    if (!m->json)
        printf("receive  %-10s %5s %8s %10s %9s %9s %7s %6s %6s  %s\n", "way", "rows",
               "pollers", "backoff_ns", "us", "GBps", "polls", "torn", "late", "checked");
    for (int way = 0; way < WAYS; way++)
        for (size_t i = 0; s == HDL_OK && i < sizeof(rows) / sizeof(*rows); i++)
            s = receive_rows(m, way, rows[i]);
    return s;
}

/* ---------------------------------------------------------------------------- launch */

enum { LAUNCHES = 100 };

enum launch_way { PLAIN, EARLY, TOGETHER, GRAPH, GRAPH_EARLY };

struct launch_line {
    enum launch_way way;
    struct gpu_graph_exec *exec; /* of the graphs */
    double host_us;              /* of one launch */
};

static enum hdl_status launch_empty(struct micro *m, int id, uint32_t blocks)
{
    struct gpu_launch_attribute attribute = {.id = id, .value = {1}};
    const struct gpu_launch l = {.grid = {blocks, 1, 1},
                                 .block = {MICRO_SCAN_THREADS, 1, 1},
                                 .stream = m->rank[0].stream,
                                 .attributes = &attribute,
                                 .count = id != 0};
    struct gpu_function *function;
    enum hdl_status s = micro_kernel(m, 0, "micro_empty", 0, &function);
    for (int i = 0; s == HDL_OK && i < LAUNCHES; i++)
        s = gpu_check(m->cu->launch_ex(&l, function, NULL, NULL), "micro_empty");
    return s;
}

static int attribute_of(enum launch_way way)
{
    return way == EARLY || way == GRAPH_EARLY ? GPU_LAUNCH_EARLY
           : way == TOGETHER                  ? GPU_LAUNCH_TOGETHER
                                              : 0;
}

static enum hdl_status launch_way(struct micro *m, int rank,
                                  const struct micro_work *work)
{
    struct launch_line *l = (struct launch_line *)(uintptr_t)work->args;
    const int64_t begin = base_now_ns();
    enum hdl_status s =
        l->exec ? gpu_check(m->cu->graph_launch(l->exec, m->rank[rank].stream),
                            "cuGraphLaunch")
                : launch_empty(m, attribute_of(l->way), work->blocks);
    l->host_us = (double)(base_now_ns() - begin) * 1e-3 / LAUNCHES;
    return s;
}

static enum hdl_status make_graph(struct micro *m, struct launch_line *l, uint32_t blocks)
{
    struct gpu_graph *graph;
    enum hdl_status s = gpu_enter(&m->device[0]);
    if (s)
        return s;
    s = gpu_check(m->cu->capture_begin(m->rank[0].stream, GPU_CAPTURE_THREAD), "capture");
    if (!s)
        s = launch_empty(m, attribute_of(l->way), blocks);
    if (!s)
        s = gpu_check(m->cu->capture_end(m->rank[0].stream, &graph), "capture");
    if (!s) {
        s = gpu_check(m->cu->graph_instantiate(&l->exec, graph, 0), "cuGraphInstantiate");
        m->cu->graph_destroy(graph);
    }
    gpu_leave(&m->device[0]);
    return s;
}

static void print_launch(const struct micro *m, const char *way, uint32_t blocks,
                         double us, double host_us)
{
    if (m->json)
        printf("{\"micro\": \"launch\", \"gpus\": %d, \"way\": \"%s\", \"blocks\": %u, "
               "\"us\": %.3f, \"host_us\": %.3f}\n",
               m->gpus, way, blocks, us, host_us);
    else
        printf("launch   %-18s %7u %9.3f %9.3f\n", way, blocks, us, host_us);
}

static enum hdl_status launch_line(struct micro *m, enum launch_way way, uint32_t blocks)
{
    static const char *const names[] = {"stream", "stream early", "stream cooperative",
                                        "graph", "graph early"};
    struct launch_line l = {.way = way};
    const struct micro_work work = {launch_way, &l, 1, blocks};
    double us;
    enum hdl_status s = way >= GRAPH ? make_graph(m, &l, blocks) : HDL_OK;
    if (s == HDL_OK)
        s = micro_time(m, &work, &us);
    if (s == HDL_OK)
        print_launch(m, names[way], blocks, us / LAUNCHES, l.host_us);
    if (l.exec && gpu_enter(&m->device[0]) == HDL_OK) {
        m->cu->graph_exec_destroy(l.exec);
        gpu_leave(&m->device[0]);
    }
    return s;
}

static enum hdl_status launch_sync(struct micro *m, int rank,
                                   const struct micro_work *work)
{
    uint32_t rounds = *(const uint32_t *)work->args;
    struct gpu_launch_attribute together = {.id = GPU_LAUNCH_TOGETHER, .value = {1}};
    const struct gpu_launch l = {.grid = {work->blocks, 1, 1},
                                 .block = {MICRO_SCAN_THREADS, 1, 1},
                                 .stream = m->rank[rank].stream,
                                 .attributes = &together,
                                 .count = 1};
    void *params[] = {&rounds};
    struct gpu_function *function;
    enum hdl_status s = micro_kernel(m, rank, "micro_sync", 0, &function);
    return s ? s : gpu_check(m->cu->launch_ex(&l, function, params, NULL), "micro_sync");
}

/* A barrier over all blocks: what the rounds of one launch take beyond the first. */
static enum hdl_status sync_line(struct micro *m, uint32_t blocks)
{
    const uint32_t rounds[] = {1, MICRO_SYNC_ROUNDS + 1};
    double us[2];
    enum hdl_status s = HDL_OK;
    for (int i = 0; s == HDL_OK && i < 2; i++) {
        const struct micro_work work = {launch_sync, &rounds[i], 1, blocks};
        s = micro_time(m, &work, &us[i]);
    }
    if (s == HDL_OK)
        print_launch(m, "barrier of blocks", blocks, (us[1] - us[0]) / MICRO_SYNC_ROUNDS,
                     0);
    return s;
}

enum hdl_status micro_bench_launch(struct micro *m)
{
    const uint32_t blocks[] = {1, multiprocessors(m)};
    enum hdl_status s = HDL_OK;
    if (!m->json)
        printf("launch   %-18s %7s %9s %9s\n", "way", "blocks", "us", "host_us");
    for (int i = 0; i < 2; i++) {
        for (int way = PLAIN; s == HDL_OK && way <= GRAPH_EARLY; way++)
            s = launch_line(m, (enum launch_way)way, blocks[i]);
        s = s ? s : sync_line(m, blocks[i]);
    }
    return s;
}
