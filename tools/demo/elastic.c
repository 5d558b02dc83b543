/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `heddle demo --elastic`: the layer of the demo goes on while a rank is killed and a new
 * process takes its place.
 *
 *     all ranks     step, step, ... X last rank killed      joiner ready
 *     survivors     the others take over its experts: update      admit, update
 *     each step     dispatch, experts, combine, one all_reduce that tells all the same
 *
 * Every rank is a small parent, which watches, and a child, which works: the last parent
 * kills its child and makes another. Every output is compared, in all bits, with the
 * layer in one process; while experts are lost, the tokens that lack them are counted.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "heddle.h"
#include "tools/commands.h"
#include "tools/demo/layer.h"
#include "tools/demo/text.h"
#include "tools/options.h"

enum {
    TOP_K = 3,
    HIDDEN = 128,
    INNER = 64,
    EXPERTS_PER_RANK = 4,
    TOKENS = 16, /* of a rank in a step */
    MOST_RANKS = 64,
    MOST_EXPERTS = MOST_RANKS * EXPERTS_PER_RANK,
    ROW = HIDDEN * 2,
    STEPS_BEFORE = 20, /* at least, before the kill */
    BEFORE_MS = 1000,
    AFTER_MS = 1000
};

#define LINE_NS (250 * BASE_NS_PER_MS)

/* What all ranks add up after each step. */
enum { ALL_TOKENS, WRONG, MISSING, READY, STOP, RANKS, NUM_SUMS };

struct elastic {
    struct hdl_context *context;
    struct hdl_group *group;
    struct hdl_moe *moe;
    struct layer layer;
    struct demo_text text;
    int rank, ranks, experts;
    uint64_t members; /* that hold experts */
    int owner[MOST_EXPERTS];
    int32_t counts[MOST_RANKS], ids[MOST_EXPERTS]; /* the map */
    int32_t held[MOST_EXPERTS];                    /* own experts */
    uint16_t rows[TOKENS * HIDDEN], results[TOKENS * HIDDEN];
    int32_t topk[TOKENS * TOP_K], received_counts[MOST_EXPERTS];
    float weights[TOKENS * TOP_K];
    uint8_t missing[TOKENS];
    uint16_t *received, *outputs;
    uint64_t step;
    /* rank 0's account */
    int64_t start_ns, line_ns, whole_ns, lost_ns, ready_ns, joined_ns;
    int64_t line_steps, line_tokens, line_missing, wrong;
};

static int broken(const struct elastic *d, const char *what, enum hdl_status status)
{
    return tool_failed("rank %d: %s: %s: %s", d->rank, what, hdl_status_name(status),
                       hdl_error_detail());
}

/* ------------------------------------------------------------------------- experts */

/* Each expert lives at home, or in turn on those that are there. */
static void make_map(struct elastic *d, uint64_t members)
{
    int there[MOST_RANKS], count = 0, turn = 0, at = 0;
    for (int r = 0; r < d->ranks; r++)
        if (members >> r & 1)
            there[count++] = r;
    for (int e = 0; e < d->experts; e++) {
        int home = e / EXPERTS_PER_RANK;
        d->owner[e] = members >> home & 1 ? home : there[turn++ % count];
    }
    for (int r = 0; r < d->ranks; r++) {
        d->counts[r] = 0;
        for (int e = 0; e < d->experts; e++) {
            if (d->owner[e] != r)
                continue;
            if (r == d->rank)
                d->held[d->counts[r]] = e;
            d->ids[at++] = e;
            d->counts[r]++;
        }
    }
    d->members = members;
}

static enum hdl_status make_exchange(struct elastic *d)
{
    const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                      .num_experts = d->experts,
                                      .top_k = TOP_K,
                                      .hidden = HIDDEN,
                                      .max_tokens = TOKENS,
                                      .dtype = HDL_BF16,
                                      .expert_counts = d->counts,
                                      .expert_ids = d->ids};
    return hdl_moe_create(d->group, &opts, &d->moe);
}

static enum hdl_status move_experts(struct elastic *d, uint64_t members)
{
    make_map(d, members);
    return hdl_moe_update(d->moe, d->counts, d->ids);
}

/* ---------------------------------------------------------------------------- step */

static void make_tokens(struct elastic *d)
{
    size_t first = (size_t)(d->step++ * (uint64_t)d->ranks + (uint64_t)d->rank) * TOKENS;
    for (int t = 0; t < TOKENS; t++) {
        size_t at = (first + (size_t)t) % d->text.num_words;
        layer_embed(&d->layer, d->text.word[at], at > 0 ? d->text.word[at - 1] : NULL,
                    d->rows + t * HIDDEN);
        layer_route(&d->layer, d->rows + t * HIDDEN, d->topk + t * TOP_K,
                    d->weights + t * TOP_K);
    }
}

static enum hdl_status exchange(struct elastic *d)
{
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = d->rows,
                                          .topk_ids = d->topk,
                                          .weights = d->weights,
                                          .num_tokens = TOKENS};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = d->received, .counts = d->received_counts};
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = d->outputs};
    const struct hdl_moe_result result = {
        .size = sizeof(result), .rows = d->results, .missing = d->missing};
    struct hdl_moe_handle handle;
    enum hdl_status status = hdl_moe_dispatch(d->moe, &tokens, &received, NULL, &handle);
    if (status < 0)
        return status;
    for (int i = 0; i < d->counts[d->rank]; i++) {
        size_t begin = (size_t)(i * d->ranks * TOKENS);
        for (size_t k = begin; k < begin + (size_t)d->received_counts[i]; k++)
            layer_expert(&d->layer, d->held[i], d->received + k * HIDDEN,
                         d->outputs + k * HIDDEN);
    }
    return hdl_moe_combine(d->moe, &handle, &outputs, &result, NULL);
}

static void check_tokens(const struct elastic *d, int64_t *sums)
{
    uint16_t wanted[HIDDEN];
    sums[ALL_TOKENS] = TOKENS;
    for (int t = 0; t < TOKENS; t++) {
        if (d->missing[t]) {
            sums[MISSING]++;
            continue;
        }
        layer_token(&d->layer, d->rows + t * HIDDEN, d->ranks, d->owner, wanted);
        sums[WRONG] += memcmp(wanted, d->results + t * HIDDEN, ROW) != 0;
    }
}

static void print_line(struct elastic *d, int64_t now, const char *event)
{
    struct hdl_view view = {0};
    char ranks[MOST_RANKS + 1];
    double seconds = (double)(now - d->line_ns) * 1e-9;
    if (hdl_group_view(d->group, &view) != HDL_OK)
        view.epoch = 0;
    for (int r = 0; r < d->ranks; r++)
        ranks[r] = d->members >> r & 1 ? (char)('0' + r % 10) : '-';
    ranks[d->ranks] = 0;
    printf("%6.2f s  view %3" PRIu64 "  ranks %s  %7.0f steps/s  %8.0f tokens/s  "
           "%5" PRId64 " lack experts  %s%s%s\n",
           (double)(now - d->start_ns) * 1e-9, view.epoch & UINT32_MAX, ranks,
           (double)d->line_steps / seconds, (double)d->line_tokens / seconds,
           d->line_missing, d->wrong ? "WRONG" : "right", event[0] ? "  " : "", event);
    (void)fflush(stdout);
    d->line_ns = now;
    d->line_steps = d->line_tokens = d->line_missing = 0;
}

/* Rank 0: times and the table. */
static void account(struct elastic *d, const int64_t *sums)
{
    char text[96] = "";
    int64_t now = base_now_ns();
    bool all_there = sums[RANKS] == d->ranks;
    d->line_steps++;
    d->line_tokens += sums[ALL_TOKENS];
    d->line_missing += sums[MISSING];
    d->wrong += sums[WRONG];
    bool whole = sums[MISSING] == 0;
    bool moved = !(d->members >> (d->ranks - 1) & 1);
    if (whole && moved && !d->lost_ns) {
        d->lost_ns = now - d->whole_ns;
        (void)snprintf(text, sizeof(text), "outputs whole again %.1f ms after the loss",
                       (double)d->lost_ns * 1e-6);
    } else if (whole && all_there && d->ready_ns && !d->joined_ns) {
        d->joined_ns = now - d->ready_ns;
        (void)snprintf(text, sizeof(text), "replacement at work %.1f ms after it came",
                       (double)d->joined_ns * 1e-6);
    }
    if (whole && (all_there || d->lost_ns))
        d->whole_ns = now;
    if (text[0] || now - d->line_ns >= LINE_NS)
        print_line(d, now, text);
}

static bool is_ready(const struct elastic *d)
{
    struct hdl_member member = {.size = sizeof(member)};
    return hdl_group_member(d->group, d->ranks - 1, &member) == HDL_OK &&
           member.member == HDL_MEMBER_READY;
}

/* What all have heard in the same operation, all do now. */
static enum hdl_status react(struct elastic *d, const int64_t *sums, uint64_t failed)
{
    const int32_t last = d->ranks - 1;
    uint64_t bit = UINT64_C(1) << last;
    if (failed & d->members)
        return move_experts(d, d->members & ~failed);
    if (sums[READY] == 0 || (d->members & bit))
        return HDL_OK;
    d->ready_ns = base_now_ns();
    enum hdl_status status = hdl_group_admit(d->group, &last, 1, 0, NULL);
    return status == HDL_OK ? move_experts(d, d->members | bit) : status;
}

static int run_step(struct elastic *d, bool *stop)
{
    int64_t sums[NUM_SUMS] = {0};
    uint64_t failed = 0;
    int64_t at_work = d->joined_ns ? base_now_ns() - d->ready_ns : 0;
    make_tokens(d);
    enum hdl_status status = exchange(d);
    if (status < 0)
        return broken(d, "a step", status);
    check_tokens(d, sums);
    sums[RANKS] = 1;
    sums[READY] = d->rank == 0 && !(d->members >> (d->ranks - 1) & 1) && is_ready(d);
    sums[STOP] = d->rank == 0 && at_work > AFTER_MS * BASE_NS_PER_MS;
    status = hdl_allreduce(d->group, sums, sums, NUM_SUMS, HDL_I64, HDL_SUM, NULL, NULL);
    if (status < 0)
        return broken(d, "all_reduce", status);
    if (status == HDL_INCOMPLETE)
        (void)hdl_last_failed(&failed, 1);
    if (d->rank == 0)
        account(d, sums);
    d->wrong += d->rank ? sums[WRONG] : 0;
    status = react(d, sums, failed);
    if (status != HDL_OK)
        return broken(d, "a change of membership", status);
    *stop = sums[STOP] > 0;
    return TOOL_OK;
}

/* ---------------------------------------------------------------------------- rank */

static int enter(struct elastic *d, bool replacement)
{
    const struct hdl_group_opts opts = {
        .size = sizeof(opts), .name = "demo", .join = replacement};
    enum hdl_status status;
    int64_t deadline = base_now_ns() + 10 * BASE_NS_PER_S;
    do /* the predecessor's end may not be known yet */
        status = hdl_context_create(NULL, &d->context);
    while (status == HDL_EINVAL && replacement && base_now_ns() < deadline);
    if (status != HDL_OK)
        return broken(d, "joining the job", status);
    status = hdl_group_create(d->context, &opts, &d->group);
    if (status != HDL_OK)
        return broken(d, "the group", status);
    d->rank = hdl_group_rank(d->group);
    struct hdl_view view = {0};
    status = hdl_group_view(d->group, &view);
    d->ranks = view.capacity;
    d->experts = d->ranks * EXPERTS_PER_RANK;
    make_map(d, d->ranks == 64 ? UINT64_MAX : (UINT64_C(1) << d->ranks) - 1);
    size_t rows = (size_t)(d->experts * d->ranks * TOKENS);
    d->received = malloc(rows * ROW);
    d->outputs = malloc(rows * ROW);
    if (!d->received || !d->outputs ||
        !layer_open(&d->layer, d->experts, TOP_K, HIDDEN, INNER))
        return tool_failed("out of memory");
    if (status == HDL_OK && replacement)
        status = hdl_group_join(d->group, 0, NULL);
    if (status == HDL_OK)
        status = make_exchange(d);
    return status == HDL_OK ? TOOL_OK : broken(d, "coming in", status);
}

static void print_head(const struct elastic *d)
{
    printf("%d experts on %d ranks serve tokens. Rank %d will be killed, and a new "
           "process will take its place.\n\n",
           d->experts, d->ranks, d->ranks - 1);
}

static int verdict(const struct elastic *d)
{
    if (d->wrong)
        return tool_failed("%" PRId64 " outputs differ from the layer in one process",
                           d->wrong);
    if (d->rank != 0)
        return TOOL_OK;
    printf("\nloss: outputs whole again after %.1f ms; replacement: at work after "
           "%.1f ms\ndemo ok\n",
           (double)d->lost_ns * 1e-6, (double)d->joined_ns * 1e-6);
    return TOOL_OK;
}

/* Says through `ready` when it is well under way. */
static int work(const char *path, bool replacement, int ready)
{
    static struct elastic elastic;
    struct elastic *d = &elastic;
    bool stop = false;
    int code = demo_text_open(&d->text, path);
    if (code == TOOL_OK)
        code = enter(d, replacement);
    d->start_ns = d->line_ns = base_now_ns();
    if (code == TOOL_OK && d->rank == 0)
        print_head(d);
    while (code == TOOL_OK && !stop) {
        code = run_step(d, &stop);
        if (d->step == STEPS_BEFORE && write(ready, "r", 1) != 1)
            code = tool_failed("rank %d: nobody watches", d->rank);
    }
    if (code == TOOL_OK)
        code = verdict(d);
    hdl_moe_destroy(d->moe);
    hdl_group_destroy(d->group);
    hdl_context_destroy(d->context);
    layer_close(&d->layer);
    demo_text_close(&d->text);
    free(d->received);
    free(d->outputs);
    return code;
}

/* The child's end must not outlive this process. */
static pid_t start(const char *path, bool replacement, int *ready)
{
    int ends[2];
    if (pipe(ends) != 0)
        return -1;
    (void)fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)signal(SIGPIPE, SIG_IGN);
        (void)close(ends[0]);
        int code = work(path, replacement, ends[1]);
        (void)fflush(stdout);
        _exit(code);
    }
    (void)close(ends[1]);
    *ready = ends[0];
    return child;
}

/* Until the child is at work, and then a while; false if it has ended. */
static bool watch(int ready)
{
    char byte;
    struct timespec pause = {.tv_sec = BEFORE_MS / 1000,
                             .tv_nsec = BEFORE_MS % 1000 * 1000000};
    ssize_t got;
    while ((got = read(ready, &byte, 1)) < 0 && errno == EINTR)
        ;
    if (got != 1)
        return false;
    (void)nanosleep(&pause, NULL);
    return true;
}

int command_demo_elastic(const char *path)
{
    const char *rank = getenv("RANK"), *ranks = getenv("WORLD_SIZE");
    int last = ranks ? atoi(ranks) - 1 : 0;
    if (last < 1 || last >= MOST_RANKS)
        return tool_usage_error("demo --elastic is the layer on 2 to %d ranks",
                                MOST_RANKS);
    bool doomed = rank && atoi(rank) == last;
    int ready = -1, code = 0;
    pid_t child = start(path, false, &ready);
    if (doomed && child > 0 && watch(ready)) {
        (void)kill(child, SIGKILL);
        (void)waitpid(child, &code, 0);
        (void)close(ready);
        struct timespec pause = {.tv_nsec = 500000000};
        (void)nanosleep(&pause, NULL);
        child = start(path, true, &ready);
    }
    if (child <= 0)
        return tool_failed("no process: %s", strerror(errno));
    (void)waitpid(child, &code, 0);
    (void)close(ready);
    return WIFEXITED(code) ? WEXITSTATUS(code) : TOOL_FAILED;
}
