/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `heddle demo`: the main job on real input. N ranks run a mixture-of-experts layer over
 * the words of a text, with the experts spread over them.
 *
 *     each rank   words -> vectors -> top-k gate
 *     all         --dispatch--> each expert has the rows that chose it
 *     each rank   runs its experts
 *     all         --combine--> weighted sums, back where the tokens are
 *                 --all_reduce--> tokens of each expert, bytes, times
 *
 * Every output is compared, in all bits, with the same layer in one process.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "heddle.h"
#include "tools/commands.h"
#include "tools/demo/layer.h"
#include "tools/demo/text.h"
#include "tools/launch.h"
#include "tools/options.h"

enum {
    TOP_K = 3,
    HIDDEN = 128,
    INNER = 64,
    EXPERTS_PER_RANK = 4,
    TOKENS = 64, /* of a rank in a step, at most */
    STEPS = 6,
    BARS_MOST = 64,
    BARS_TEXT = 9, /* width of their heading */
    ROW = HIDDEN * 2
};

/* Sums and maxima over the ranks, for the line of a step. */
enum { SENT, LEAST, WRONG, ALL_TOKENS, NUM_SUMS };
enum { DISPATCH_NS, EXPERTS_NS, COMBINE_NS, NUM_TIMES };

#ifndef HEDDLE_DEMO_TEXT
#define HEDDLE_DEMO_TEXT "README.md"
#endif

struct demo_moe {
    const char *path;
    struct hdl_context *context;
    struct hdl_group *group;
    struct hdl_moe *moe;
    int rank, ranks, experts;
    struct layer layer;
    struct demo_text text;
    /* a step's */
    int tokens;
    uint16_t rows[TOKENS * HIDDEN], results[TOKENS * HIDDEN];
    int32_t ids[TOKENS * TOP_K];
    float weights[TOKENS * TOP_K];
    uint16_t *received, *outputs;
    int32_t counts[EXPERTS_PER_RANK];
    int64_t *per_expert, *total; /* [experts] of the step, of all steps */
    int *owner;                  /* [experts] */
    int64_t all[NUM_SUMS];       /* of all steps */
};

static int broken(const struct demo_moe *d, const char *what, enum hdl_status status)
{
    return tool_failed("rank %d: %s: %s: %s", d->rank, what, hdl_status_name(status),
                       hdl_error_detail());
}

/* -------------------------------------------------------------------------- tokens */

/* The rank that has no tokens in a step, -1 if there is only one rank. */
static int idle_rank(const struct demo_moe *d, int step)
{
    return d->ranks > 1 ? step % d->ranks : -1;
}

/* The words of this rank in a step. */
static int tokens_of(const struct demo_moe *d, int step)
{
    if (d->rank == idle_rank(d, step))
        return 0;
    return TOKENS - 8 * ((d->rank + step) % 3);
}

static void make_tokens(struct demo_moe *d, int step)
{
    size_t first = (size_t)((step * d->ranks + d->rank) * TOKENS);
    d->tokens = tokens_of(d, step);
    for (int t = 0; t < d->tokens; t++) {
        size_t at = (first + (size_t)t) % d->text.num_words;
        layer_embed(&d->layer, d->text.word[at], at > 0 ? d->text.word[at - 1] : NULL,
                    d->rows + t * HIDDEN);
        layer_route(&d->layer, d->rows + t * HIDDEN, d->ids + t * TOP_K,
                    d->weights + t * TOP_K);
    }
}

/* ---------------------------------------------------------------------------- step */

/* Bytes that must leave this rank: a row for each other rank that needs it, and a sum
 * back. */
static int64_t least_bytes(const struct demo_moe *d)
{
    int64_t rows = 0;
    for (int t = 0; t < d->tokens; t++) {
        uint64_t seen[LAUNCH_RANKS_MAX / 64] = {0};
        for (int k = 0; k < TOP_K; k++) {
            int to = d->ids[t * TOP_K + k] / EXPERTS_PER_RANK;
            rows += to != d->rank && !(seen[to / 64] >> (to % 64) & 1);
            seen[to / 64] |= UINT64_C(1) << (to % 64);
        }
    }
    return 2 * rows * ROW;
}

static int64_t sent_bytes(const struct demo_moe *d)
{
    uint64_t sent[LAUNCH_RANKS_MAX] = {0};
    struct hdl_moe_state state = {.size = sizeof(state), .bytes_sent = sent};
    int64_t sum = 0;
    if (hdl_moe_status(d->moe, &state) != HDL_OK)
        return 0;
    for (int r = 0; r < d->ranks; r++)
        sum += r == d->rank ? 0 : (int64_t)sent[r];
    return sum;
}

static void run_experts(struct demo_moe *d)
{
    for (int e = 0; e < EXPERTS_PER_RANK; e++) {
        size_t begin = (size_t)(e * d->ranks * TOKENS);
        int expert = d->rank * EXPERTS_PER_RANK + e;
        d->per_expert[expert] = d->counts[e];
        for (size_t i = begin; i < begin + (size_t)d->counts[e]; i++)
            layer_expert(&d->layer, expert, d->received + i * HIDDEN,
                         d->outputs + i * HIDDEN);
    }
}

static enum hdl_status exchange(struct demo_moe *d, int64_t times[NUM_TIMES])
{
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = d->rows,
                                          .topk_ids = d->ids,
                                          .weights = d->weights,
                                          .num_tokens = d->tokens};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = d->received, .counts = d->counts};
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = d->outputs};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = d->results};
    struct hdl_moe_handle handle;
    int64_t start = base_now_ns();
    enum hdl_status status = hdl_moe_dispatch(d->moe, &tokens, &received, NULL, &handle);
    times[DISPATCH_NS] = base_now_ns() - start;
    if (status != HDL_OK)
        return status;
    run_experts(d);
    times[EXPERTS_NS] = base_now_ns() - start - times[DISPATCH_NS];
    status = hdl_barrier(d->group, NULL, NULL); /* so that combine's time is its own */
    start = base_now_ns();
    if (status == HDL_OK)
        status = hdl_moe_combine(d->moe, &handle, &outputs, &result, NULL);
    times[COMBINE_NS] = base_now_ns() - start;
    return status;
}

static int64_t count_wrong(const struct demo_moe *d)
{
    uint16_t wanted[HIDDEN];
    int64_t wrong = 0;
    for (int t = 0; t < d->tokens; t++) {
        layer_token(&d->layer, d->rows + t * HIDDEN, d->ranks, d->owner, wanted);
        if (memcmp(wanted, d->results + t * HIDDEN, ROW) == 0)
            continue;
        if (wrong++ == 0)
            tool_failed("rank %d: the output of token %d differs from one process",
                        d->rank, t);
    }
    return wrong;
}

/* One character for a value: eighths of a full block. */
static const char *block(int64_t value, int64_t most)
{
    static const char *const blocks[] = {"·", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
    return blocks[value == 0 || most == 0 ? 0 : 1 + (value * 7 + most / 2) / most];
}

/* Bars of the experts; of the ranks if there are too many experts for a line. */
static int num_bars(const struct demo_moe *d)
{
    return d->experts <= BARS_MOST ? d->experts : d->ranks;
}

static int64_t bar_of(const struct demo_moe *d, const int64_t *per_expert, int bar)
{
    int each = d->experts / num_bars(d);
    int64_t sum = 0;
    for (int e = bar * each; e < (bar + 1) * each; e++)
        sum += per_expert[e];
    return sum;
}

static int64_t largest_bar(const struct demo_moe *d, const int64_t *per_expert)
{
    int64_t most = 0;
    for (int i = 0; i < num_bars(d); i++) {
        int64_t value = bar_of(d, per_expert, i);
        most = value > most ? value : most;
    }
    return most;
}

static void print_step(const struct demo_moe *d, int step, const int64_t *sums,
                       const int64_t *times)
{
    char text[5][32], idle[16] = "-";
    int64_t most = largest_bar(d, d->per_expert);
    if (idle_rank(d, step) >= 0)
        snprintf(idle, sizeof(idle), "%d", idle_rank(d, step));
    printf("%4d  %6" PRId64 "  %4s  ", step + 1, sums[ALL_TOKENS], idle);
    for (int i = 0; i < num_bars(d); i++)
        fputs(block(bar_of(d, d->per_expert, i), most), stdout);
    printf("%*s  %9s  %9s  %9s %9s %9s  %s\n",
           num_bars(d) < BARS_TEXT ? BARS_TEXT - num_bars(d) : 0, "",
           tool_bytes_text(text[0], 32, (uint64_t)sums[SENT]),
           tool_bytes_text(text[1], 32, (uint64_t)sums[LEAST]),
           tool_time_text(text[2], 32, (double)times[DISPATCH_NS] / 1e3),
           tool_time_text(text[3], 32, (double)times[EXPERTS_NS] / 1e3),
           tool_time_text(text[4], 32, (double)times[COMBINE_NS] / 1e3),
           sums[WRONG] ? "NO" : "yes");
}

static int run_step(struct demo_moe *d, int step)
{
    int64_t sums[NUM_SUMS] = {0}, times[NUM_TIMES] = {0};
    make_tokens(d, step);
    memset(d->results, 0xff, sizeof(d->results));
    memset(d->per_expert, 0, (size_t)d->experts * sizeof(int64_t));
    int64_t before = sent_bytes(d);
    enum hdl_status status = exchange(d, times);
    if (status != HDL_OK)
        return broken(d, "a step", status);
    sums[SENT] = sent_bytes(d) - before;
    sums[LEAST] = least_bytes(d);
    sums[WRONG] = count_wrong(d);
    sums[ALL_TOKENS] = d->tokens;
    status = hdl_allreduce(d->group, d->per_expert, d->per_expert, (size_t)d->experts,
                           HDL_I64, HDL_SUM, NULL, NULL);
    if (status == HDL_OK)
        status =
            hdl_allreduce(d->group, sums, sums, NUM_SUMS, HDL_I64, HDL_SUM, NULL, NULL);
    if (status == HDL_OK)
        status = hdl_allreduce(d->group, times, times, NUM_TIMES, HDL_I64, HDL_MAX, NULL,
                               NULL);
    if (status != HDL_OK)
        return broken(d, "all_reduce", status);
    int64_t rows = 0;
    for (int e = 0; e < d->experts; e++) {
        d->total[e] += d->per_expert[e];
        rows += d->per_expert[e];
    }
    if (rows != sums[ALL_TOKENS] * TOP_K)
        sums[WRONG]++;
    for (int i = 0; i < NUM_SUMS; i++)
        d->all[i] += sums[i];
    if (d->rank == 0)
        print_step(d, step, sums, times);
    return TOOL_OK;
}

/* ---------------------------------------------------------------------------- rank */

static void print_head(const struct demo_moe *d)
{
    const char *bars = num_bars(d) == d->experts ? "by expert" : "by rank";
    printf(
        "Tokens are the words of %s (%zu). A mixture-of-experts layer with %d experts, "
        "%d\non each of %d rank%s, sends each to its best %d and sums what comes back; "
        "rows of %d bf16.%s\n\n",
        d->path, d->text.num_words, d->experts, EXPERTS_PER_RANK, d->ranks,
        d->ranks == 1 ? "" : "s", TOP_K, HIDDEN,
        d->ranks > 1 ? "\nEach step one rank, idle, has no tokens." : "");
    printf("step  tokens  idle  %-*s  %9s  %9s  %9s %9s %9s  %s\n",
           num_bars(d) > BARS_TEXT ? num_bars(d) : BARS_TEXT, bars, "moved", "least",
           "dispatch", "experts", "combine", "checked");
}

static void print_end(const struct demo_moe *d)
{
    char text[2][32];
    int64_t most = largest_bar(d, d->total);
    int each = d->experts / num_bars(d);
    printf("\ntokens of each %s, all steps\n", each == 1 ? "expert" : "rank");
    for (int i = 0; i < num_bars(d); i++) {
        int64_t value = bar_of(d, d->total, i);
        if (each == 1)
            printf("%4d on rank %-3d", i, i / EXPERTS_PER_RANK);
        else
            printf("%4d", i);
        printf(" %6" PRId64 "  ", value);
        for (int64_t c = 0; most > 0 && c < (value * 40 + most - 1) / most; c++)
            putchar('#');
        putchar('\n');
    }
    printf("\nmoved between ranks %s, the least that is possible %s: a row for each rank "
           "that needs\nit, and a sum back. Times are of the slowest rank. %" PRId64
           " of %" PRId64 " outputs equal in all bits those\nof the same layer in one "
           "process.\n",
           tool_bytes_text(text[0], 32, (uint64_t)d->all[SENT]),
           tool_bytes_text(text[1], 32, (uint64_t)d->all[LEAST]),
           d->all[ALL_TOKENS] - d->all[WRONG], d->all[ALL_TOKENS]);
}

static int run_steps(struct demo_moe *d)
{
    int code = TOOL_OK;
    if (d->rank == 0)
        print_head(d);
    for (int step = 0; step < STEPS && code == TOOL_OK; step++)
        code = run_step(d, step);
    if (code != TOOL_OK || d->rank != 0)
        return code != TOOL_OK || d->all[WRONG] ? TOOL_FAILED : TOOL_OK;
    print_end(d);
    if (d->all[WRONG])
        return tool_failed("%" PRId64 " outputs differ from the layer in one process",
                           d->all[WRONG]);
    printf("\ndemo ok\n");
    return TOOL_OK;
}

static int make_layer(struct demo_moe *d)
{
    d->rank = hdl_group_rank(d->group);
    d->ranks = hdl_group_size(d->group);
    d->experts = d->ranks * EXPERTS_PER_RANK;
    size_t rows = (size_t)(EXPERTS_PER_RANK * d->ranks * TOKENS);
    d->received = malloc(rows * ROW);
    d->outputs = malloc(rows * ROW);
    d->per_expert = calloc((size_t)d->experts, sizeof(int64_t));
    d->total = calloc((size_t)d->experts, sizeof(int64_t));
    d->owner = calloc((size_t)d->experts, sizeof(int));
    if (!d->received || !d->outputs || !d->per_expert || !d->total || !d->owner ||
        !layer_open(&d->layer, d->experts, TOP_K, HIDDEN, INNER))
        return tool_failed("out of memory");
    for (int e = 0; e < d->experts; e++)
        d->owner[e] = e / EXPERTS_PER_RANK;
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = d->experts,
                                      .top_k = TOP_K,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_BF16};
    enum hdl_status status = hdl_moe_create(d->group, &opts, &d->moe);
    return status == HDL_OK ? TOOL_OK : broken(d, "creation of the exchange", status);
}

static int run_rank(struct demo_moe *d)
{
    const struct hdl_group_opts opts = {.size = sizeof(opts), .name = "demo"};
    int code = demo_text_open(&d->text, d->path);
    if (code == TOOL_OK && hdl_context_create(NULL, &d->context) != HDL_OK)
        code = tool_failed("could not join the job: %s", hdl_error_detail());
    if (code == TOOL_OK && hdl_group_create(d->context, &opts, &d->group) != HDL_OK)
        code = tool_failed("could not create the group: %s", hdl_error_detail());
    if (code == TOOL_OK)
        code = make_layer(d);
    if (code == TOOL_OK)
        code = run_steps(d);
    hdl_moe_destroy(d->moe);
    hdl_group_destroy(d->group);
    hdl_context_destroy(d->context);
    layer_close(&d->layer);
    free(d->received);
    free(d->outputs);
    free(d->per_expert);
    free(d->total);
    free(d->owner);
    demo_text_close(&d->text);
    return code;
}

static const char *default_path(void)
{
    FILE *file = fopen("README.md", "re");
    if (!file)
        return HEDDLE_DEMO_TEXT;
    fclose(file);
    return "README.md";
}

int command_demo(int argc, char **argv)
{
    static struct demo_moe demo;
    bool words = false, elastic = false;
    struct launch launch = {.ranks = 4, .grace_us = 5000000, .timeout_us = 300000000};
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &launch.ranks, 1, "N", "ranks, 1 to 64 (default 4)"},
        {0, "hosts", TOOL_INT, &launch.hosts, 1, "H",
         "spread them over H network namespaces that act as hosts"},
        {0, "words", TOOL_FLAG, &words, 0, NULL,
         "count the words by collectives instead of running the layer"},
        {0, "elastic", TOOL_FLAG, &elastic, 0, NULL,
         "kill a rank, let a new process take its place, and go on meanwhile"},
    };
    const struct tool_usage usage = {
        "heddle demo [options] [FILE]",
        "Runs a mixture-of-experts layer over a text (default: the README), and checks "
        "it.",
        options,
        sizeof(options) / sizeof(options[0]),
        "  heddle demo -n 4 book.txt\n"
        "  heddle demo --elastic                          a rank dies and is replaced",
    };
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (first + 1 < argc)
        return tool_usage_error("demo takes one file, got also '%s'", argv[first + 1]);
    if (launch.ranks > 64)
        return tool_usage_error("the demo takes 1 to 64 ranks");
    if (elastic && (words || launch.ranks < 2))
        return tool_usage_error("demo --elastic is the layer on 2 to 64 ranks");
    demo.path = first < argc ? argv[first] : default_path();
    if (!launch_is_rank()) { /* a file without words is refused once, not by all ranks */
        int result = demo_text_open(&demo.text, demo.path);
        demo_text_close(&demo.text);
        return result == TOOL_OK ? launch_self(argc, argv, launch) : result;
    }
    if (elastic)
        return command_demo_elastic(demo.path);
    return words ? command_demo_words(demo.path) : run_rank(&demo);
}
