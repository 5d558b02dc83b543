/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf recovery`: how long losses, removals and admissions hold ranks up, and
 * what being able to bear them costs. */
#include "tools/perf/recovery.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "tools/crew/crew.h"
#include "tools/options.h"

enum {
    REPEATS_MAX = 1000,
    CYCLES_MAX = 100000,
    QUIET_RUNS = 5,
    QUIET_RANKS = 2,
    TURNS = 200
};

enum what {
    FIRST_TOLD,
    ALL_RIGHT,
    FORKED,
    REMOVAL,
    ADMISSION,
    STOPPED,
    CONTINUED,
    VIEW,
    COST,
    IDLE,
    CONTROL,
    CYCLE,
    MEMORY,
    KEPT,
    WHATS
};
static const struct {
    const char *name;
    double median, worst; /* targets */
    const char *unit;
} whats[] = {
    [FIRST_TOLD] = {"kill: first survivor told", 100, 500, "ms"},
    [ALL_RIGHT] = {"kill: all survivors right", 200, 1000, "ms"},
    [FORKED] = {"kill with forked children: first survivor told", 100, 500, "ms"},
    [REMOVAL] = {"removal: longest stall", 20, 100, "ms"},
    [ADMISSION] = {"admission: longest stall", 20, 100, "ms"},
    [STOPPED] = {"stop: all survivors right", 1500, 1500, "ms"},
    [CONTINUED] = {"stop: told HDL_EFENCED once continued", 500, 1000, "ms"},
    [VIEW] = {"hdl_group_view", 50e-6, 50e-6, "ms"},
    [COST] = {"8 B all_reduce: slower than without detection", 50e-6, 1e-3, "ms"},
    [IDLE] = {"idle rank: processor time in a second", 2, 2, "ms"},
    [CONTROL] = {"idle rank: control payload in a second", 1, 1, "KB"},
    [CYCLE] = {"kill and replacement: until all are together again", 1000, 5000, "ms"},
    [MEMORY] = {"kills, second half: memory of a survivor grows by", 1, 1, "MB"},
    [KEPT] = {"kills, second half: more descriptors and mappings", 4, 4, ""},
};

struct recovery {
    struct crew crew;
    uint64_t victim; /* mask */
    int64_t from_ns, told_ns, longest_ns;
    bool fenced; /* the victim says that it was told so */
    double values[WHATS][REPEATS_MAX];
    size_t counts[WHATS];
    bool shown[WHATS];
    /* of the output */
    bool json, missed;
    double margin; /* by how much times may miss targets, on a machine that is not idle */
    /* of a quiet run */
    double batch_ms, without_ms; /* of an operation */
    int num_batches, num_quiet;
};

static void note(struct recovery *v, enum what what, double value)
{
    if (v->counts[what] < REPEATS_MAX)
        v->values[what][v->counts[what]++] = value;
}

static void note_since(struct recovery *v, enum what what, int64_t ns)
{
    note(v, what, (double)(ns - v->from_ns) / 1e6);
}

static void on_record(struct crew *crew, const struct crew_record *r)
{
    struct recovery *v = crew->user;
    v->fenced |= r->what == CREW_SAY && strcmp(r->text, "fenced") == 0;
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
    v->fenced = false;
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

static bool kill_rank(struct recovery *v, int rank)
{
    begin(v);
    crew_kill(&v->crew, rank, SIGKILL);
    return until(v, lack_victim);
}

static bool replace(struct recovery *v, int rank)
{
    return until(v, is_gone) && crew_spawn(&v->crew, rank, true) && admit(v, rank);
}

static bool kill_and_replace(struct recovery *v, int rank, bool forked)
{
    if (forked) {
        crew_command(&v->crew, rank, "fork");
        if (!crew_until(&v->crew, NULL, NULL, 50 * BASE_NS_PER_MS))
            return false;
    }
    if (!kill_rank(v, rank))
        return false;
    note_since(v, forked ? FORKED : FIRST_TOLD, v->told_ns);
    if (!forked)
        note_since(v, ALL_RIGHT, newest(v));
    if (!replace(v, rank))
        return false;
    note(v, ADMISSION, (double)v->longest_ns / 1e6);
    return true;
}

static bool repeat(struct recovery *v, int k)
{
    struct crew *crew = &v->crew;
    int rank = 1 + k % (crew->opts.ranks - 1);
    char line[32];
    v->victim = UINT64_C(1) << rank;
    if (!kill_and_replace(v, rank, false) || !kill_and_replace(v, rank, true))
        return false;
    snprintf(line, sizeof(line), "evict %d", rank);
    begin(v);
    crew_command(crew, 0, line);
    if (!until(v, lack_victim))
        return false;
    note(v, REMOVAL, (double)v->longest_ns / 1e6);
    return admit(v, rank);
}

/* What rank 0 holds between events: a connection that is being closed is not kept. */
static struct crew_usage settled_usage(struct recovery *v)
{
    enum { SAMPLES = 20, PAUSE_US = 10000 };
    struct crew_usage least = crew_usage(&v->crew, 0);
    for (int i = 1; i < SAMPLES; i++) {
        (void)usleep(PAUSE_US);
        struct crew_usage now = crew_usage(&v->crew, 0);
        if (now.descriptors + now.mappings < least.descriptors + least.mappings)
            least = now;
    }
    return least;
}

static bool run_events(struct recovery *v, int repeats)
{
    bool good = crew_start(&v->crew);
    for (int k = 0; good && k < repeats; k++)
        good = repeat(v, k);
    return crew_stop(&v->crew) && good;
}

/* What a survivor of so many holds is flat once the buffers of a transport were all used:
 * after the first half. A connection more or less is none that is lost. */
static bool run_cycles(struct recovery *v, int cycles)
{
    bool good = crew_start(&v->crew);
    struct crew_usage half = {0}, last = {0};
    for (int k = 0; good && k < cycles; k++) {
        int rank = 1 + k % (v->crew.opts.ranks - 1);
        int64_t from_ns = base_now_ns();
        v->victim = UINT64_C(1) << rank;
        if (k == cycles / 2)
            half = settled_usage(v);
        good = kill_rank(v, rank) && replace(v, rank);
        note(v, CYCLE, (double)(base_now_ns() - from_ns) / 1e6);
    }
    if (good && cycles > 1) {
        last = settled_usage(v);
        note(v, MEMORY, (double)(last.memory_kb - half.memory_kb) / 1024);
        note(v, KEPT,
             (double)(last.descriptors + last.mappings - half.descriptors -
                      half.mappings));
    }
    return crew_stop(&v->crew) && good;
}

static bool is_fenced(struct crew *crew, void *argument)
{
    const struct recovery *v = argument;
    (void)crew;
    return v->fenced;
}

static bool run_stops(struct recovery *v, int repeats)
{
    struct crew *crew = &v->crew;
    bool good = crew_start(crew);
    for (int k = 0; good && k < repeats; k++) {
        int rank = 1 + k % (crew->opts.ranks - 1);
        v->victim = UINT64_C(1) << rank;
        begin(v);
        crew_kill(crew, rank, SIGSTOP);
        good = until(v, lack_victim);
        note_since(v, STOPPED, newest(v));
        begin(v);
        crew_kill(crew, rank, SIGCONT);
        good = good && until(v, is_fenced);
        note_since(v, CONTINUED, base_now_ns());
        good = good && admit(v, rank);
    }
    return crew_stop(crew) && good;
}

static void on_quiet(struct crew *crew, const struct crew_record *r)
{
    struct recovery *v = crew->user;
    struct crew_quiet quiet;
    if (r->what == CREW_OP && r->rank == 0) {
        v->batch_ms = (double)r->op.gap_ns / 1e6;
        v->num_batches++;
    }
    if (r->what != CREW_SAY || sscanf(r->text, "quiet %lf %lf %lf", &quiet.view_ns,
                                      &quiet.cpu_ms, &quiet.control_kb) != 3)
        return;
    v->num_quiet++;
    if (crew->opts.dead_after_us > 60000000)
        return; /* without detection */
    note(v, VIEW, quiet.view_ns / 1e6);
    note(v, IDLE, quiet.cpu_ms);
    note(v, CONTROL, quiet.control_kb);
}

static bool is_measured(struct crew *crew, void *argument)
{
    const struct recovery *v = argument;
    return v->num_quiet == crew->opts.ranks;
}

static bool has_batch(struct crew *crew, void *argument)
{
    const struct recovery *v = argument;
    (void)crew;
    return v->num_batches > 0;
}

static bool run_batch(struct recovery *v)
{
    v->num_batches = 0;
    for (int i = 0; i < v->crew.opts.ranks; i++)
        crew_command(&v->crew, i, "batch");
    return until(v, has_batch);
}

/* Two pairs of processes in turns of some milliseconds: what the machine does to one it
 * does to the other. */
static bool compare(struct recovery *with, struct recovery *without)
{
    static double more[TURNS], base[TURNS];
    for (int k = 0; k < TURNS; k++) {
        struct recovery *first = k & 1 ? with : without;
        if (!run_batch(first) || !run_batch(k & 1 ? without : with))
            return false;
        base[k] = without->batch_ms;
        more[k] = with->batch_ms - without->batch_ms;
    }
    tool_sort(more, TURNS);
    tool_sort(base, TURNS);
    with->without_ms = base[TURNS / 2];
    note(with, COST, more[TURNS / 2]);
    return true;
}

static bool run_costs(struct recovery *v)
{
    static struct recovery other;
    bool good = true;
    for (int k = 0; k < QUIET_RUNS && good; k++) {
        v->num_quiet = other.num_quiet = 0;
        other.crew = v->crew;
        other.crew.user = &other;
        v->crew.opts.dead_after_us = 5000000;
        other.crew.opts.dead_after_us = INT64_C(3600000000);
        /* Where a pair lies in memory tells in its times, too. */
        struct recovery *first = k & 1 ? v : &other, *second = k & 1 ? &other : v;
        good = crew_start(&first->crew) && until(first, is_measured) &&
               crew_start(&second->crew) && until(second, is_measured) &&
               compare(v, &other);
        good = crew_stop(&other.crew) && good;
        good = crew_stop(&v->crew) && good;
    }
    return good;
}

/* What is measured by now. */
static void show(struct recovery *v)
{
    for (int w = 0; w < WHATS; w++) {
        size_t n = v->counts[w];
        if (n == 0 || v->shown[w])
            continue;
        v->shown[w] = true;
        tool_sort(v->values[w], n);
        double median = v->values[w][n / 2], worst = v->values[w][n - 1];
        /* 50 ns, or 5 %. */
        double share = w == COST ? 0.05 * v->without_ms : 0;
        double target = share > whats[w].median ? share : whats[w].median;
        double limit = whats[w].worst * (target / whats[w].median);
        double more = strcmp(whats[w].unit, "ms") == 0 ? v->margin : 1;
        bool ok = median <= target * more && worst <= limit * more;
        v->missed |= !ok;
        printf(v->json
                   ? "{\"event\":\"%s\",\"n\":%zu,\"median_ms\":%.6f,\"worst_ms\":%.6f,"
                     "\"target_ms\":%.4g,\"unit\":\"%s\",\"ok\":%s}\n"
                   : "%-53s n %4zu  median %10.4g  worst %10.4g  target %5.4g %-2s  %s\n",
               whats[w].name, n, median, worst, target, whats[w].unit,
               ok ? "true" : "false");
    }
}

static bool run_all(struct recovery *v, int repeats, int cycles, bool events_only)
{
    struct crew_opts opts = v->crew.opts;
    opts.mode = "4k";
    opts.pause_us = 200;
    opts.dead_after_us = 5000000;
    v->crew = (struct crew){.on_record = on_record, .user = v, .opts = opts};
    if (!run_events(v, repeats))
        return false;
    show(v);
    if (cycles && !run_cycles(v, cycles))
        return false;
    show(v);
    opts.dead_after_us = 1000000;
    v->crew = (struct crew){.on_record = on_record, .user = v, .opts = opts};
    if (!run_stops(v, repeats))
        return false;
    show(v);
    if (events_only)
        return true;
    opts.mode = "quiet";
    opts.ranks = QUIET_RANKS;
    v->crew = (struct crew){.on_record = on_quiet, .user = v, .opts = opts};
    return run_costs(v);
}

int perf_recovery(int argc, char **argv)
{
    int64_t ranks = 4, repeats = 50, cycles = 1000, margin = 1;
    const char *transport = "auto";
    bool json = false, events_only = false;
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &ranks, 3, "N", "ranks, 3 to 15 (default 4)"},
        {0, "repeats", TOOL_INT, &repeats, 1, "N", "of each event (default 50)"},
        {0, "cycles", TOOL_INT, &cycles, 0, "N",
         "kills and replacements while memory is watched (default 1000)"},
        {0, "transport", TOOL_CHOICE, &transport, 0, "auto|shm|fabric|mixed",
         "the way to the others; mixed = two hosts (default auto)"},
        {0, "events-only", TOOL_FLAG, &events_only, 0, NULL,
         "not what it costs while nothing happens"},
        {0, "margin", TOOL_INT, &margin, 1, "N",
         "times may be N times their targets, on a machine that is busy (default 1)"},
        {0, "json", TOOL_FLAG, &json, 0, NULL, "one object per event"},
    };
    const struct tool_usage usage = {
        "heddle perf recovery [options]",
        "Measures losses, removals, admissions and stopped ranks in a loop of 4 KiB\n"
        "all_reduces, and what being able to bear them costs while nothing happens.",
        options, sizeof(options) / sizeof(options[0]),
        "One line (or object) per event: how often, median, worst, target of the "
        "median.\n"
        "Exit code 1 if a target is missed."};
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (ranks > CREW_RANKS_MAX || repeats > REPEATS_MAX || cycles > CYCLES_MAX ||
        first < argc)
        return tool_usage_error("perf recovery takes 3 to %d ranks, 1 to %d repeats and "
                                "up to %d cycles",
                                CREW_RANKS_MAX, REPEATS_MAX, CYCLES_MAX);
    struct recovery *v = calloc(1, sizeof(*v));
    if (!v)
        return tool_failed("no memory");
    v->crew.opts = (struct crew_opts){.ranks = (int)ranks, .transport = transport};
    v->json = json;
    v->margin = (double)margin;
    bool good = run_all(v, (int)repeats, (int)cycles, events_only);
    if (!good)
        (void)tool_failed("recovery: %s", v->crew.problem);
    show(v);
    good &= !v->missed;
    free(v);
    return good ? TOOL_OK : TOOL_FAILED;
}
