/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle chaos`: real processes under random losses, stops, removals and replacements.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/random.h"
#include "tools/commands.h"
#include "tools/crew/crew.h"
#include "tools/crew/history.h"
#include "tools/options.h"

enum { OPS = 1 << 16, TIMES_MAX = 4096 };

enum event { KILL, EXIT, EVICT, LEAVE, STOP, KILL_TWO, RESTART, EVENTS };
static const char *const event_names[] = {[KILL] = "kill",
                                          [EXIT] = "exit",
                                          [EVICT] = "remove",
                                          [LEAVE] = "leave, add",
                                          [STOP] = "stop",
                                          [KILL_TWO] = "kill two",
                                          [RESTART] = "restart coordinator"};

struct times {
    double ms[TIMES_MAX];
    size_t count;
};

/* An operation's result, and how many ranks had the same. */
struct seen {
    struct crew_record record;
    uint32_t ranks;
};

/* What a process held after its first events, and how many it has seen. */
struct life {
    uint32_t serial, events;
    struct crew_usage begin;
};

struct chaos {
    struct crew crew;
    uint64_t rng, compared;
    struct seen *ops; /* [OPS] by number */
    struct crew_history history;
    uint64_t newest, checked; /* operations; up to `checked` they fit the history */
    uint64_t fitted;
    uint64_t victims; /* of the running event */
    int64_t begun_ns, event_ns, noticed_ns;
    int64_t end_ns; /* a run that lasts longer hangs */
    struct times noticed[EVENTS], agreed[EVENTS], whole[EVENTS];
    struct life life[CREW_RANKS_MAX];
};

static bool is_doomed(const struct crew *crew, const struct crew_record *r)
{
    const struct crew_rank *rank = &crew->rank[r->rank];
    return rank->serial != r->serial || rank->doomed;
}

static const char *describe(const struct crew_record *r, char *text, size_t room)
{
    int n = snprintf(text, room, "rank %u has %s, failed %s, data", r->rank,
                     hdl_status_name((enum hdl_status)r->status),
                     crew_list(r->op.failed).text);
    for (uint32_t i = 0; i < r->op.runs && n < (int)room; i++)
        n += snprintf(text + n, room - (size_t)n, " of %s up to element %u",
                      crew_list(r->op.run[i].ranks).text, r->op.run[i].end);
    return text;
}

/* All ranks whose results count have the same result of an operation. */
static void compare(struct chaos *chaos, const struct crew_record *r)
{
    struct seen *seen = &chaos->ops[r->op.number % OPS];
    const struct crew_record *first = &seen->record;
    if (is_doomed(&chaos->crew, r))
        return;
    if (seen->ranks == 0 || first->op.number != r->op.number ||
        is_doomed(&chaos->crew, first)) {
        *seen = (struct seen){*r, 1};
        return;
    }
    chaos->compared++;
    seen->ranks++;
    /* In a mapped operation with a root a rank may have returned before the death of one
     * that owed it nothing: the bytes agree, the failed set may not. */
    bool rooted = r->op.kind == CREW_BROADCAST && r->status >= 0 && first->status >= 0;
    bool same = first->status == r->status && first->op.failed == r->op.failed;
    /* Who called before it could know of an admission has room for fewer blocks. */
    uint64_t fewer = crew_ranks(first) & crew_ranks(r);
    if (r->op.kind == CREW_ALLGATHER && same &&
        (fewer == crew_ranks(first) || fewer == crew_ranks(r)) &&
        crew_ranks(first) != crew_ranks(r))
        return;
    if (!(same || rooted) || first->op.kind != r->op.kind ||
        first->op.runs != r->op.runs || first->op.hash != r->op.hash ||
        memcmp(first->op.run, r->op.run, sizeof(r->op.run)) != 0) {
        char a[160], b[160];
        crew_problem(&chaos->crew, "operation %lu, %s: %s; %s",
                     (unsigned long)r->op.number,
                     crew_kind_name((enum crew_kind)r->op.kind),
                     describe(first, a, sizeof(a)), describe(r, b, sizeof(b)));
    }
}

/* Compares results with the history of views, up to the last operation that all members
 * have behind them; `all`: up to the last one. */
static void check_history(struct chaos *chaos, bool all)
{
    uint64_t until = all ? chaos->newest : UINT64_MAX;
    for (int i = 0; !all && i < chaos->crew.opts.ranks; i++)
        if (chaos->crew.rank[i].last_op < until)
            until = chaos->crew.rank[i].last_op;
    for (; chaos->checked < until; chaos->checked++) {
        const struct seen *seen = &chaos->ops[(chaos->checked + 1) % OPS];
        char text[320];
        /* One that is to be removed may have gone on without the others. */
        if (seen->record.op.number != chaos->checked + 1 ||
            (seen->ranks < 2 && is_doomed(&chaos->crew, &seen->record)))
            continue;
        chaos->fitted++;
        if (!crew_history_fits(&chaos->history, &seen->record, text, sizeof(text)))
            crew_problem(&chaos->crew, "%s", text);
    }
}

static void on_record(struct crew *crew, const struct crew_record *r)
{
    struct chaos *chaos = crew->user;
    char text[160];
    if (r->what == CREW_SLOT && !crew_history_add(&chaos->history, r, text, sizeof(text)))
        crew_problem(crew, "rank %u: %s", r->rank, text);
    if (r->what != CREW_OP)
        return;
    if (r->op.number > chaos->newest)
        chaos->newest = r->op.number;
    compare(chaos, r);
    bool lacks = crew_ranks(r) && !(crew_ranks(r) & chaos->victims);
    if (chaos->victims && !chaos->noticed_ns && !is_doomed(crew, r) &&
        (lacks || (r->op.failed & chaos->victims)))
        chaos->noticed_ns = r->time_ns;
}

static bool lack_victims(struct crew *crew, void *argument)
{
    struct chaos *chaos = argument;
    uint64_t members = crew_members(crew);
    for (int i = 0; i < crew->opts.ranks; i++)
        if ((members >> i & 1) && (crew->rank[i].sees & chaos->victims))
            return false;
    return members != 0;
}

static bool are_ready(struct crew *crew, void *argument)
{
    struct chaos *chaos = argument;
    for (int i = 0; i < crew->opts.ranks; i++)
        if ((chaos->victims >> i & 1) && !crew->rank[i].ready)
            return false;
    return true;
}

/* Also a rank that was taken for dead although nobody struck it comes in again. */
static void admit_ready(struct crew *crew)
{
    char line[32];
    for (int i = 0; i < crew->opts.ranks; i++) {
        struct crew_rank *rank = &crew->rank[i];
        int speaker = crew_speaker(crew, i);
        if (!rank->ready || rank->admitting || speaker < 0)
            continue;
        snprintf(line, sizeof(line), "admit %d", i);
        crew_command(crew, speaker, line);
        rank->admitting = true;
    }
}

static bool is_whole(struct crew *crew, void *argument)
{
    (void)argument;
    admit_ready(crew);
    uint64_t all = (UINT64_C(1) << crew->opts.ranks) - 1;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (crew->rank[i].sees != all || !crew->rank[i].member || crew->rank[i].doomed)
            return false;
    return true;
}

static bool have_gone(struct crew *crew, void *argument)
{
    struct chaos *chaos = argument;
    for (int i = 0; i < crew->opts.ranks; i++)
        if ((chaos->victims >> i & 1) && crew->rank[i].pid)
            return false;
    return true;
}

static uint64_t draw(struct chaos *chaos, uint64_t n)
{
    return base_splitmix_below(&chaos->rng, n);
}

static void note(struct times *times, int64_t from_ns, int64_t to_ns)
{
    if (times->count < TIMES_MAX)
        times->ms[times->count++] = (double)(to_ns - from_ns) / 1e6;
}

static bool wait_for(struct chaos *chaos, const char *what,
                     bool (*test)(struct crew *, void *), int64_t timeout_ns)
{
    int64_t left = chaos->end_ns - base_now_ns();
    timeout_ns = left < timeout_ns ? left : timeout_ns;
    if (crew_until(&chaos->crew, test, chaos, timeout_ns))
        return true;
    for (int i = 0; i < chaos->crew.opts.ranks; i++)
        crew_command(&chaos->crew, i, "dump");
    (void)crew_until(&chaos->crew, NULL, NULL, 300 * BASE_NS_PER_MS);
    crew_problem(&chaos->crew, "%s did not come about in %lld ms", what,
                 (long long)(timeout_ns / BASE_NS_PER_MS));
    return false;
}

static void strike(struct chaos *chaos, enum event event, int victim)
{
    struct crew *crew = &chaos->crew;
    char line[32];
    snprintf(line, sizeof(line), "evict %d", victim);
    switch (event) {
    case EXIT:
        crew_command(crew, victim, "exit");
        crew->rank[victim].doomed = true;
        crew->rank[victim].member = false;
        break;
    case EVICT:
        crew_command(crew, crew_speaker(crew, draw(chaos, 2) ? victim : -1), line);
        break;
    case LEAVE:
        crew_command(crew, victim, "stop");
        break;
    case STOP:
        crew_kill(crew, victim, SIGSTOP);
        break;
    default:
        crew_kill(crew, victim, SIGKILL);
    }
}

static int victim_of(struct chaos *chaos, uint64_t except)
{
    int low = chaos->crew.opts.coordinator_in_rank0 ? 1 : 0;
    for (;;) {
        int r = low + (int)draw(chaos, (uint64_t)(chaos->crew.opts.ranks - low));
        if (!(except >> r & 1))
            return r;
    }
}

/* New processes, or the old ones, come back, and everybody takes part again. */
static bool make_whole(struct chaos *chaos, enum event event)
{
    struct crew *crew = &chaos->crew;
    if (event == STOP)
        crew_kill(crew, __builtin_ctzll(chaos->victims), SIGCONT);
    else if (event != EVICT) {
        if (!wait_for(chaos, "the end of the killed", have_gone, 5 * BASE_NS_PER_S))
            return false;
        for (int i = 0; i < crew->opts.ranks; i++)
            if ((chaos->victims >> i & 1) && !crew_spawn(crew, i, true))
                return false;
    }
    return wait_for(chaos, "readiness to join", are_ready, 15 * BASE_NS_PER_S) &&
           wait_for(chaos, "the whole group", is_whole, 15 * BASE_NS_PER_S);
}

/* Processes that live on hold as much as after their first events; all parts of a rank
 * have been used by then. */
static void check_usage(struct chaos *chaos)
{
    enum { SETTLED = 6, DESCRIPTORS = 8, MAPPINGS = 40, MEMORY_KB = 24 * 1024 };
    for (int i = 0; i < chaos->crew.opts.ranks; i++) {
        struct life *life = &chaos->life[i];
        struct crew_usage now = crew_usage(&chaos->crew, i);
        if (life->serial != chaos->crew.rank[i].serial)
            *life = (struct life){.serial = chaos->crew.rank[i].serial};
        if (++life->events <= SETTLED)
            life->begin = now;
        if (now.descriptors > life->begin.descriptors + DESCRIPTORS ||
            now.mappings > life->begin.mappings + MAPPINGS ||
            now.memory_kb > life->begin.memory_kb + MEMORY_KB)
            crew_problem(&chaos->crew,
                         "rank %d has %ld descriptors, %ld mappings, %ld KiB after %u "
                         "events, and had %ld, %ld, %ld",
                         i, now.descriptors, now.mappings, now.memory_kb, life->events,
                         life->begin.descriptors, life->begin.mappings,
                         life->begin.memory_kb);
    }
}

static bool run_event(struct chaos *chaos, enum event event)
{
    struct crew *crew = &chaos->crew;
    int64_t dead_after_ns = crew->opts.dead_after_us * 1000;
    chaos->noticed_ns = 0;
    chaos->event_ns = base_now_ns();
    if (event == RESTART) {
        if (!crew_restart_coordinator(crew))
            return false;
        printf("%8.2f s  %s\n", (double)(chaos->event_ns - chaos->begun_ns) / 1e9,
               event_names[event]);
        return crew_until(crew, NULL, NULL, dead_after_ns + 500 * BASE_NS_PER_MS);
    }
    int victim = victim_of(chaos, 0);
    uint64_t victims = UINT64_C(1) << victim;
    if (event == KILL_TWO)
        victims |= UINT64_C(1) << victim_of(chaos, victims);
    chaos->victims = victims;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (victims >> i & 1)
            strike(chaos, event, i);
    int64_t limit = 6 * BASE_NS_PER_S + (event == STOP ? dead_after_ns : 0);
    if (!wait_for(chaos, "operations without the lost", lack_victims, limit))
        return false;
    int64_t agreed = base_now_ns();
    note(&chaos->noticed[event], chaos->event_ns,
         chaos->noticed_ns ? chaos->noticed_ns : agreed);
    note(&chaos->agreed[event], chaos->event_ns, agreed);
    if (!make_whole(chaos, event))
        return false;
    int64_t whole = base_now_ns();
    note(&chaos->whole[event], agreed, whole);
    printf("%8.2f s  %-10s rank %-5s noticed %7.1f ms  all without %7.1f ms  whole again "
           "%7.1f ms\n",
           (double)(chaos->event_ns - chaos->begun_ns) / 1e9, event_names[event],
           crew_list(victims).text,
           (double)((chaos->noticed_ns ? chaos->noticed_ns : agreed) - chaos->event_ns) /
               1e6,
           (double)(agreed - chaos->event_ns) / 1e6,
           (double)(whole - chaos->event_ns) / 1e6);
    (void)fflush(stdout);
    chaos->victims = 0;
    check_history(chaos, false);
    check_usage(chaos);
    return crew->wrong == 0;
}

static enum event draw_event(struct chaos *chaos)
{
    static const enum event often[] = {KILL,  KILL,  KILL, EXIT,     EVICT,
                                       EVICT, LEAVE, STOP, KILL_TWO, RESTART};
    for (;;) {
        enum event event = often[draw(chaos, sizeof(often) / sizeof(often[0]))];
        if (event == KILL_TWO && chaos->crew.opts.ranks < 4)
            continue;
        if (event == RESTART && chaos->crew.opts.coordinator_in_rank0)
            continue;
        return event;
    }
}

static bool are_orphans(struct crew *crew, void *argument)
{
    (void)argument;
    for (int i = 1; i < crew->opts.ranks; i++)
        if (!crew->rank[i].orphan)
            return false;
    return true;
}

/* Rank 0 dies, and the coordinator with it: every other rank is told so. */
static bool kill_coordinator(struct chaos *chaos)
{
    int64_t begin = base_now_ns();
    crew_kill(&chaos->crew, 0, SIGKILL);
    if (!wait_for(chaos, "HDL_ECOORD on all", are_orphans, 2 * BASE_NS_PER_S))
        return false;
    printf("%8.2f s  kill the coordinator's rank  HDL_ECOORD on all %7.1f ms\n",
           (double)(begin - chaos->begun_ns) / 1e9,
           (double)(base_now_ns() - begin) / 1e6);
    return true;
}

static void show(const char *what, const char *event, struct times *times)
{
    if (times->count == 0)
        return;
    tool_sort(times->ms, times->count);
    printf("%-10s %-12s n %4zu  median %8.1f ms  p90 %8.1f ms  worst %8.1f ms\n", event,
           what, times->count, times->ms[times->count / 2],
           times->ms[times->count * 9 / 10], times->ms[times->count - 1]);
}

static int run_chaos(struct chaos *chaos, int64_t seconds_us)
{
    struct crew *crew = &chaos->crew;
    int64_t until = base_now_ns() + seconds_us * 1000;
    chaos->begun_ns = base_now_ns();
    chaos->end_ns = until + 9 * BASE_NS_PER_S;
    bool good = crew_start(crew);
    while (good && base_now_ns() < until) {
        int64_t pause = (int64_t)(20 + draw(chaos, 300)) * BASE_NS_PER_MS;
        good = crew_until(crew, NULL, NULL, pause) && run_event(chaos, draw_event(chaos));
    }
    if (good && crew->opts.coordinator_in_rank0)
        good = kill_coordinator(chaos);
    good = crew_stop(crew) && good;
    if (good)
        check_history(chaos, true);
    good &= crew->wrong == 0;
    for (int e = 0; e < EVENTS; e++) {
        show("noticed", event_names[e], &chaos->noticed[e]);
        show("all without", event_names[e], &chaos->agreed[e]);
        show("whole after", event_names[e], &chaos->whole[e]);
    }
    printf("exchange: %lu steps, %lu without somebody\n", (unsigned long)crew->steps,
           (unsigned long)crew->incomplete);
    printf(
        "seed %lu: %lu records, %lu results compared between ranks, %lu with the views: "
        "%s\n",
        (unsigned long)crew->opts.seed, (unsigned long)crew->records,
        (unsigned long)chaos->compared, (unsigned long)chaos->fitted,
        good ? "all right" : crew->problem);
    return good ? TOOL_OK : TOOL_FAILED;
}

int command_chaos(int argc, char **argv)
{
    int64_t ranks = 4, seconds_us = 10000000, seed = 1, dead_after_us = 1000000;
    const char *transport = "auto", *coordinator = "own", *defect = NULL;
    bool as_rank = false;
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &ranks, 2, "N", "ranks, 2 to 15 (default 4)"},
        {0, "seconds", TOOL_SECONDS, &seconds_us, 0, "S", "how long (default 10)"},
        {0, "seed", TOOL_INT, &seed, 0, "X", "of the events and operations (default 1)"},
        {0, "transport", TOOL_CHOICE, &transport, 0, "auto|shm|fabric|mixed",
         "the way to the others; mixed = two hosts (default auto)"},
        {0, "dead-after", TOOL_SECONDS, &dead_after_us, 200000, "S",
         "silence after which a stopped rank is removed (default 1)"},
        {0, "coordinator", TOOL_CHOICE, &coordinator, 0, "own|rank0",
         "a process of its own (default), or rank 0, which is then spared until the end"},
        {0, "defect", TOOL_CHOICE, &defect, 0, "byte",
         "plant a wrong byte, to see the check fail"},
        {0, "rank", TOOL_FLAG, &as_rank, 0, NULL, NULL},
    };
    const struct tool_usage usage = {
        "heddle chaos [options]",
        "Kills, stops, removes and replaces ranks that check every result.", options,
        sizeof(options) / sizeof(options[0]),
        "Every operation's result is compared between all ranks that live on, and with "
        "what\n"
        "the committed views allow. Exit code 1 on a wrong byte, a hang or a bad end.\n"
        "\n"
        "  heddle chaos --seconds 60 --seed 7             four ranks\n"
        "  heddle chaos -n 6 --transport mixed            on two hosts"};
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (as_rank)
        return crew_rank_main();
    if (ranks > CREW_RANKS_MAX || first < argc)
        return tool_usage_error("chaos takes 2 to %d ranks and no other arguments",
                                CREW_RANKS_MAX);
    struct chaos *chaos = calloc(1, sizeof(*chaos));
    struct seen *ops = calloc(OPS, sizeof(*ops));
    code = TOOL_FAILED;
    if (chaos && ops) {
        chaos->ops = ops;
        chaos->history.ranks = (int)ranks;
        chaos->rng = (uint64_t)seed;
        chaos->crew.on_record = on_record;
        chaos->crew.user = chaos;
        chaos->crew.opts =
            (struct crew_opts){.ranks = (int)ranks,
                               .transport = transport,
                               .mode = "mix",
                               .pause_us = 200,
                               .dead_after_us = dead_after_us,
                               .seed = (uint64_t)seed,
                               .coordinator_in_rank0 = strcmp(coordinator, "rank0") == 0,
                               .defect = defect};
        code = run_chaos(chaos, seconds_us);
    }
    free(chaos);
    free(ops);
    return code;
}
