/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle sim`: seeded schedules of the control plane under virtual time. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/parse.h"
#include "tools/commands.h"
#include "tools/options.h"
#include "tools/sim/sim.h"

static const struct {
    const char *name;
    unsigned fault;
} fault_names[] = {
    {"kill", SIM_KILL},       {"stop", SIM_STOP},
    {"cut", SIM_CUT},         {"delay", SIM_DELAY},
    {"reorder", SIM_REORDER}, {"join", SIM_JOIN},
    {"leave", SIM_LEAVE},     {"link", SIM_LINK},
    {"suspect", SIM_SUSPECT}, {"restart-coordinator", SIM_RESTART},
};

struct totals {
    uint64_t seeds, broken;
    uint64_t events, messages, views, redone, deaths, joins, removals, restarts,
        overtaken;
    int64_t slowest_commit_ns;
    double seconds;
};

static bool read_faults(const char *list, unsigned *faults)
{
    *faults = 0;
    while (*list) {
        size_t length = strcspn(list, ",");
        unsigned fault = 0;
        for (size_t i = 0; i < sizeof(fault_names) / sizeof(fault_names[0]); i++) {
            if (strlen(fault_names[i].name) == length &&
                strncmp(list, fault_names[i].name, length) == 0)
                fault = fault_names[i].fault;
        }
        if (fault == 0)
            return false;
        *faults |= fault;
        list += length + (list[length] == ',');
    }
    return *faults != 0;
}

/* "7" or "1..1000"; the last is below UINT64_MAX, so that a loop up to it ends. */
static bool read_seeds(const char *text, uint64_t *first, uint64_t *last)
{
    char room[32];
    const char *dots = strstr(text, "..");
    if (!dots)
        return base_parse_u64(text, first) == HDL_OK &&
               base_parse_u64(text, last) == HDL_OK && *last < UINT64_MAX;
    size_t length = (size_t)(dots - text);
    if (length >= sizeof(room))
        return false;
    memcpy(room, text, length);
    room[length] = 0;
    return base_parse_u64(room, first) == HDL_OK &&
           base_parse_u64(dots + 2, last) == HDL_OK && *first <= *last &&
           *last < UINT64_MAX;
}

static double seconds_now(void)
{
    return (double)base_now_ns() / 1e9;
}

static void add(struct totals *totals, const struct sim_result *result)
{
    totals->seeds++;
    totals->broken += !result->ok;
    totals->events += result->events;
    totals->messages += result->messages;
    totals->views += result->views;
    totals->redone += result->redone;
    totals->deaths += result->deaths;
    totals->joins += result->joins;
    totals->removals += result->removals;
    totals->restarts += result->restarts;
    totals->overtaken += result->overtaken;
    if (result->slowest_commit_ns > totals->slowest_commit_ns)
        totals->slowest_commit_ns = result->slowest_commit_ns;
}

/*
 * The smallest schedule that still breaks: fewer faults, fewer operations, fewer ranks,
 * one at a time. What is left is run again with its trace.
 */
static void minimise(struct sim_options *options)
{
    struct sim_result result;
    uint32_t *const fields[] = {&options->num_faults, &options->ops, &options->ranks,
                                &options->max_chunks};
    bool smaller = true;
    while (smaller) {
        smaller = false;
        for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            uint32_t least = fields[i] == &options->ranks ? 2 : 1;
            if (*fields[i] <= least)
                continue;
            --*fields[i];
            if (sim_run(options, &result))
                ++*fields[i];
            else
                smaller = true;
        }
    }
}

static void report_broken(struct sim_options options, const struct sim_result *result)
{
    printf("seed %" PRIu64 ": %s\n", options.seed, result->text);
    minimise(&options);
    printf("smallest schedule that breaks: seed %" PRIu64
           ", %u ranks, %u operations of at most %u chunks, %u faults\n",
           options.seed, options.ranks, options.ops, options.max_chunks,
           options.num_faults);
    options.trace = stdout;
    struct sim_result again;
    (void)sim_run(&options, &again);
    printf("%s\n", again.text);
}

static void print_totals(const struct totals *t, bool json)
{
    double rate = t->seconds > 0 ? (double)t->seeds / t->seconds : 0;
    if (json) {
        printf("{\"seeds\":%" PRIu64 ",\"broken\":%" PRIu64
               ",\"seeds_per_second\":%.1f,\"seconds\":%.2f,\"events\":%" PRIu64
               ",\"messages\":%" PRIu64 ",\"views\":%" PRIu64 ",\"deaths\":%" PRIu64
               ",\"joins\":%" PRIu64 ",\"removals\":%" PRIu64 ",\"restarts\":%" PRIu64
               ",\"overtaken\":%" PRIu64 ",\"redone_chunks\":%" PRIu64
               ",\"slowest_commit_ms\":%.3f}\n",
               t->seeds, t->broken, rate, t->seconds, t->events, t->messages, t->views,
               t->deaths, t->joins, t->removals, t->restarts, t->overtaken, t->redone,
               (double)t->slowest_commit_ns / 1e6);
        return;
    }
    printf("%" PRIu64 " schedules, %" PRIu64 " broken, %.0f a second\n", t->seeds,
           t->broken, rate);
    printf("%" PRIu64 " events, %" PRIu64 " control messages, %" PRIu64 " views, %" PRIu64
           " deaths, %" PRIu64 " joins, %" PRIu64 " removals, %" PRIu64
           " chunks redone, %" PRIu64 " restarts of the coordinator, %" PRIu64
           " ranks overtaken\n",
           t->events, t->messages, t->views, t->deaths, t->joins, t->removals, t->redone,
           t->restarts, t->overtaken);
    printf("slowest from a death to its commit: %.3f ms of virtual time\n",
           (double)t->slowest_commit_ns / 1e6);
}

static int run_seeds(struct sim_options *options, uint64_t first, uint64_t last,
                     bool json, bool both)
{
    struct totals totals = {0};
    double begin = seconds_now(), shown = begin;
    for (uint64_t seed = first; seed <= last && totals.broken == 0; seed++) {
        struct sim_result result;
        options->seed = seed;
        if (both)
            options->messaged = seed % 2 == 0;
        bool ok = sim_run(options, &result);
        add(&totals, &result);
        if (!ok && !json)
            report_broken(*options, &result);
        if (!json && seconds_now() - shown > 5) {
            shown = seconds_now();
            (void)fprintf(stderr, "seed %" PRIu64 " of %" PRIu64 "\n", seed, last);
        }
    }
    totals.seconds = seconds_now() - begin;
    print_totals(&totals, json);
    return totals.broken == 0 ? TOOL_OK : TOOL_FAILED;
}

static void report_search(const struct sim_search *search)
{
    struct sim_options broken = search->broken;
    struct sim_result result;
    broken.trace = stdout;
    (void)sim_run(&broken, &result);
    printf("seed %" PRIu64, broken.seed);
    if (broken.fault_at_event)
        printf(", rank %u after event %" PRIu64, broken.fault_rank,
               broken.fault_at_event);
    if (broken.second_at_event)
        printf(", rank %u after event %" PRIu64, broken.second_rank,
               broken.second_at_event);
    if (broken.kill_at_message)
        printf(", the sender %s message %" PRIu64,
               broken.kill_after_message ? "after" : "before", broken.kill_at_message);
    printf(": %s\n", result.text);
}

/* The stride 0 stands for the fault points of messages. */
static int run_search(struct sim_options *options, uint64_t first, uint64_t last,
                      uint64_t stride, bool both)
{
    struct sim_search search = {0};
    struct sim_result result;
    double begin = seconds_now();
    for (uint64_t seed = first; seed <= last; seed++) {
        options->seed = seed;
        for (int pass = 0; pass < (both ? 2 : 1); pass++) {
            if (both)
                options->messaged = pass != 0;
            bool good = stride ? sim_search(options, stride, &search, &result)
                               : sim_search_messages(options, &search, &result);
            if (good)
                continue;
            report_search(&search);
            return TOOL_FAILED;
        }
    }
    printf("%" PRIu64 " schedules, none broken, %.1f s\n", search.runs,
           seconds_now() - begin);
    return TOOL_OK;
}

/* What the command line says, before it is checked. */
struct wish {
    int64_t ranks, capacity, ops, faults, link_us, dead_us;
    const char *seeds, *kinds, *plane, *defect;
    const char *second;
    int64_t stride, groups;
    bool json, trace, manual, apart, rank0, exhaustive, messages;
};

static bool find_defect(const char *name, enum sim_defect *defect)
{
    for (int d = 0; d < SIM_DEFECTS; d++) {
        if (strcmp(sim_defect_name((enum sim_defect)d), name) == 0) {
            *defect = (enum sim_defect)d;
            return true;
        }
    }
    return false;
}

static int refuse_defect(const char *name)
{
    char known[512] = "";
    size_t used = 0;
    for (int d = 0; d < SIM_DEFECTS; d++)
        used += (size_t)snprintf(known + used, sizeof(known) - used, " %s",
                                 sim_defect_name((enum sim_defect)d));
    return tool_usage_error("--defect: '%s' is none of%s", name, known);
}

/* False, with a sentence, if numbers are beyond what schedules bear or options do not go
 * together. */
static bool in_bounds(const struct wish *wish)
{
    const char *wrong = NULL;
    if (wish->ranks > 65536 || wish->capacity > 65536 || wish->ops > 10000 ||
        wish->faults > 10000)
        wrong = "at most 65536 ranks, 10000 operations, 10000 faults";
    else if (wish->capacity > 0 && wish->capacity < wish->ranks)
        wrong = "--capacity is less than the founders";
    else if (wish->link_us > 1000000 || wish->dead_us > 1000000000)
        wrong = "--link is at most 1 s, --dead-after 1000 s";
    else if (wish->groups > 3)
        wrong = "at most 3 groups";
    else if (wish->second && !wish->exhaustive)
        wrong = "--second goes with --exhaustive";
    else if (wish->json && (wish->exhaustive || wish->messages))
        wrong = "--json does not go with --exhaustive or --messages";
    if (wrong)
        tool_usage_error("%s", wrong);
    return !wrong;
}

static int run_wish(const struct wish *wish)
{
    struct sim_options options;
    uint64_t first, last;
    sim_defaults(&options);
    const char *plane = wish->plane ? wish->plane : wish->ranks > 64 ? "mapped" : "both";
    if (!read_seeds(wish->seeds, &first, &last))
        return tool_usage_error("--seeds needs a number or A..B, got '%s'", wish->seeds);
    if (!read_faults(wish->kinds, &options.faults))
        return tool_usage_error("--faults: unknown fault in '%s' (see --help)",
                                wish->kinds);
    if (!in_bounds(wish))
        return TOOL_USAGE;
    if (wish->defect && !find_defect(wish->defect, &options.defect))
        return refuse_defect(wish->defect);
    options.ranks = (uint32_t)wish->ranks;
    options.capacity = (uint32_t)wish->capacity;
    options.ops = (uint32_t)wish->ops;
    options.num_faults = (uint32_t)wish->faults;
    options.link_ns = wish->link_us * 1000;
    options.dead_after_ns = wish->dead_us * 1000;
    options.groups = (uint32_t)wish->groups;
    options.manual = wish->manual;
    options.apart = wish->apart;
    options.standalone = !wish->rank0;
    options.messaged = strcmp(plane, "messaged") == 0;
    options.trace = wish->trace ? stdout : NULL;
    if (options.ranks > 64)
        options.ranks_per_host = 8;
    if (wish->second && !read_faults(wish->second, &options.second_faults))
        return tool_usage_error("--second: unknown fault in '%s'", wish->second);
    bool both = strcmp(plane, "both") == 0;
    if (wish->messages)
        return run_search(&options, first, last, 0, both);
    if (wish->exhaustive)
        return run_search(&options, first, last, (uint64_t)wish->stride, both);
    return run_seeds(&options, first, last, wish->json, both);
}

static const char *const more =
    "Of a schedule that breaks an invariant, the smallest that does is printed with its\n"
    "trace.\n"
    "\n"
    "  heddle sim --faults kill,join,delay --seeds 1..10000\n"
    "  heddle sim -n 3 --ops 3 --exhaustive           the fault after every event";

int command_sim(int argc, char **argv)
{
    struct wish wish = {.ranks = 5,
                        .ops = 6,
                        .faults = 2,
                        .link_us = 50,
                        .dead_us = 200000,
                        .seeds = "1..1000",
                        .kinds = "kill",
                        .groups = 1,
                        .stride = 5};
    const struct tool_option table[] = {
        {'n', "ranks", TOOL_INT, &wish.ranks, 2, "N", "founders (default 5)"},
        {0, "capacity", TOOL_INT, &wish.capacity, 0, "N", "slots (default: founders)"},
        {0, "seeds", TOOL_TEXT, &wish.seeds, 0, "A..B", "schedules (default 1..1000)"},
        {0, "faults", TOOL_TEXT, &wish.kinds, 0, "LIST",
         "of kill,stop,cut,delay,reorder,join,leave,link,suspect,restart-coordinator "
         "(default "
         "kill)"},
        {0, "num-faults", TOOL_INT, &wish.faults, 0, "N", "in a schedule (default 2)"},
        {0, "ops", TOOL_INT, &wish.ops, 1, "N", "collectives (default 6)"},
        {0, "plane", TOOL_CHOICE, &wish.plane, 0, "mapped|messaged|both",
         "how data moves (default both; mapped above 64 ranks)"},
        {0, "link", TOOL_SECONDS, &wish.link_us, 1, "S",
         "delay of a message (default 50e-6)"},
        {0, "dead-after", TOOL_SECONDS, &wish.dead_us, 1, "S",
         "silence after which a rank is dead (default 0.2)"},
        {0, "manual", TOOL_FLAG, &wish.manual, 0, NULL, "lost ranks stay active"},
        {0, "apart", TOOL_FLAG, &wish.apart, 0, NULL,
         "every rank looks for itself at mapped chunks (slower)"},
        {0, "exhaustive", TOOL_FLAG, &wish.exhaustive, 0, NULL,
         "the fault after every event, for every rank (try -n 3 --ops 3)"},
        {0, "second", TOOL_TEXT, &wish.second, 0, "LIST",
         "with --exhaustive: a second fault after every --stride-th event"},
        {0, "messages", TOOL_FLAG, &wish.messages, 0, NULL,
         "the sender dies before and after every control message"},
        {0, "groups", TOOL_INT, &wish.groups, 1, "N",
         "1 to 3 that share ranks (default 1)"},
        {0, "stride", TOOL_INT, &wish.stride, 1, "N", "see --second (default 5)"},
        {0, "rank0", TOOL_FLAG, &wish.rank0, 0, NULL, "coordinator lives in rank 0"},
        {0, "defect", TOOL_TEXT, &wish.defect, 0, "NAME", "plant a mistake"},
        {0, "trace", TOOL_FLAG, &wish.trace, 0, NULL, "print every event of note"},
        {0, "json", TOOL_FLAG, &wish.json, 0, NULL, "JSON, one object"},
    };
    const struct tool_usage usage = {
        "heddle sim [options]",
        "Runs the real coordinator and agents under virtual time with seeded faults and\n"
        "checks the invariants after every event.",
        table, sizeof(table) / sizeof(table[0]), more};
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (first < argc)
        return tool_usage_error("sim takes no argument '%s'", argv[first]);
    return run_wish(&wish);
}
