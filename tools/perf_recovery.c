/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf recovery`: how long a loss, a removal and an admission hold ranks up. */
#include "tools/perf_recovery.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "tools/crew.h"
#include "tools/options.h"

enum { REPEATS_MAX = 1000 };

enum what { FIRST_TOLD, ALL_RIGHT, REMOVAL, ADMISSION, WHATS };
static const struct {
    const char *name;
    double median_ms, worst_ms; /* targets */
} whats[] = {[FIRST_TOLD] = {"kill: first survivor told", 100, 500},
             [ALL_RIGHT] = {"kill: all survivors right", 200, 1000},
             [REMOVAL] = {"removal: longest stall", 20, 100},
             [ADMISSION] = {"admission: longest stall", 20, 100}};

struct recovery {
    struct crew crew;
    uint64_t victim; /* mask */
    int64_t from_ns, told_ns, longest_ns;
    double ms[WHATS][REPEATS_MAX];
    int count;
};

static void on_record(struct crew *crew, const struct crew_record *r)
{
    struct recovery *v = crew->user;
    if (r->what != CREW_OP || r->time_ns < v->from_ns || (v->victim >> r->rank & 1))
        return;
    if (r->op.gap_ns > v->longest_ns)
        v->longest_ns = r->op.gap_ns;
    if (!v->told_ns && !(crew_ranks(r) & v->victim))
        v->told_ns = r->time_ns;
}

static bool lack_victim(struct crew *crew, void *argument)
{
    struct recovery *v = argument;
    uint64_t members = crew_members(crew) & ~v->victim;
    for (int i = 0; i < crew->opts.ranks; i++)
        if ((members >> i & 1) && (crew->rank[i].sees & v->victim))
            return false;
    return true;
}

static bool is_ready(struct crew *crew, void *argument)
{
    struct recovery *v = argument;
    return crew->rank[__builtin_ctzll(v->victim)].ready;
}

static bool is_gone(struct crew *crew, void *argument)
{
    struct recovery *v = argument;
    return crew->rank[__builtin_ctzll(v->victim)].pid == 0;
}

static bool is_whole(struct crew *crew, void *argument)
{
    (void)argument;
    uint64_t all = (UINT64_C(1) << crew->opts.ranks) - 1;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (crew->rank[i].sees != all || !crew->rank[i].member)
            return false;
    return true;
}

static bool until(struct recovery *v, bool (*test)(struct crew *, void *))
{
    if (crew_until(&v->crew, test, v, 20 * BASE_NS_PER_S))
        return true;
    crew_problem(&v->crew, "an event took longer than 20 s");
    return false;
}

static void begin(struct recovery *v)
{
    v->from_ns = base_now_ns();
    v->told_ns = v->longest_ns = 0;
}

static bool admit(struct recovery *v, int rank)
{
    char line[32];
    snprintf(line, sizeof(line), "admit %d", rank);
    if (!until(v, is_ready))
        return false;
    begin(v);
    crew_command(&v->crew, crew_speaker(&v->crew, rank), line);
    return until(v, is_whole);
}

static int64_t newest(const struct recovery *v)
{
    int64_t last = v->told_ns;
    for (int i = 0; i < v->crew.opts.ranks; i++)
        if (!(v->victim >> i & 1) && v->crew.rank[i].last_ns > last)
            last = v->crew.rank[i].last_ns;
    return last;
}

static bool repeat(struct recovery *v, int k)
{
    struct crew *crew = &v->crew;
    int rank = 1 + k % (crew->opts.ranks - 1);
    char line[32];
    v->victim = UINT64_C(1) << rank;
    begin(v);
    crew_kill(crew, rank, SIGKILL);
    if (!until(v, lack_victim))
        return false;
    v->ms[FIRST_TOLD][k] = (double)(v->told_ns - v->from_ns) / 1e6;
    v->ms[ALL_RIGHT][k] = (double)(newest(v) - v->from_ns) / 1e6;
    if (!until(v, is_gone) || !crew_spawn(crew, rank, true) || !admit(v, rank))
        return false;
    v->ms[ADMISSION][k] = (double)v->longest_ns / 1e6;
    snprintf(line, sizeof(line), "evict %d", rank);
    begin(v);
    crew_command(crew, 0, line);
    if (!until(v, lack_victim))
        return false;
    v->ms[REMOVAL][k] = (double)v->longest_ns / 1e6;
    v->count++;
    return admit(v, rank);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static bool show(struct recovery *v, bool json)
{
    bool all = true;
    for (int w = 0; w < WHATS; w++) {
        size_t n = (size_t)v->count;
        qsort(v->ms[w], n, sizeof(double), by_value);
        double median = v->ms[w][n / 2], worst = v->ms[w][n - 1];
        bool ok = median <= whats[w].median_ms && worst <= whats[w].worst_ms;
        all &= ok;
        printf(
            json ? "{\"event\":\"%s\",\"n\":%zu,\"median_ms\":%.3f,\"worst_ms\":%.3f,"
                   "\"target_ms\":%.0f,\"ok\":%s}\n"
                 : "%-28s n %4zu  median %8.3f ms  worst %8.3f ms  target %4.0f ms  %s\n",
            whats[w].name, n, median, worst, whats[w].median_ms, ok ? "true" : "false");
    }
    return all;
}

int perf_recovery(int argc, char **argv)
{
    int64_t ranks = 4, repeats = 50;
    const char *transport = "auto";
    bool json = false;
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &ranks, 3, "N", "ranks, 3 to 15 (default 4)"},
        {0, "repeats", TOOL_INT, &repeats, 1, "N", "of each event (default 50)"},
        {0, "transport", TOOL_TEXT, &transport, 0, "T", "auto, shm, fabric or mixed"},
        {0, "json", TOOL_FLAG, &json, 0, NULL, "one object per event"},
    };
    const struct tool_usage usage = {
        "heddle perf recovery [options]",
        "Measures losses, removals and admissions in a loop of 4 KiB all_reduces.",
        options, sizeof(options) / sizeof(options[0]),
        "Exit code 1 if a target is missed."};
    int first;
    enum tool_parsed parsed = tool_parse(&usage, true, argc, argv, &first);
    if (parsed != TOOL_PARSED)
        return parsed == TOOL_PARSED_HELP ? TOOL_OK : TOOL_USAGE;
    if (ranks > CREW_RANKS_MAX || repeats > REPEATS_MAX || first < argc)
        return tool_usage_error("perf recovery takes 3 to %d ranks and 1 to %d repeats",
                                CREW_RANKS_MAX, REPEATS_MAX);
    struct recovery *v = calloc(1, sizeof(*v));
    if (!v)
        return tool_failed("no memory");
    v->crew.on_record = on_record;
    v->crew.user = v;
    v->crew.opts = (struct crew_opts){.ranks = (int)ranks,
                                      .transport = transport,
                                      .mode = "4k",
                                      .pause_us = 200,
                                      .dead_after_us = 5000000};
    bool good = crew_start(&v->crew);
    for (int k = 0; good && k < (int)repeats; k++)
        good = repeat(v, k);
    good = crew_stop(&v->crew) && good;
    if (!good)
        (void)tool_failed("recovery: %s", v->crew.problem);
    good = v->count > 0 && show(v, json) && good;
    free(v);
    return good ? TOOL_OK : TOOL_FAILED;
}
