/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a test as a tree of ranks with a time limit, kills or stops ranks at a line they
 * print, and checks every rank's exit code.
 *
 *   runner -n N [--timeout S] [--kill R:TEXT] [--stop R:TEXT] [--cont R:TEXT]
 *          [--expect R:CODE] [--env NAME=VALUE] [--hosts H] [--until TEXT]
 *          [--sweep R:FUNCTION:MAX[:STRIDE] --preload FILE] [--] program args
 *
 * --kill R:TEXT   SIGKILL rank R when any rank prints a line that begins with TEXT;
 *                 R:Q:TEXT: when rank Q prints it
 * --expect R:C    rank R must end with code C (137 = killed); default 0, and 137 for a
 *                 rank of --kill
 * --hosts H       the ranks are spread in blocks over H network namespaces
 * --until TEXT    runs the tree again until a rank has printed a line that begins with
 *                 TEXT, for every TEXT given: the branches that a test must have taken.
 *                 At most 50 times; as often in any case if HEDDLE_SOAK is set
 * --sweep R:F:M   runs the tree again and again with fault_preload.c in it: the n-th call
 *                 of function F on rank R fails, n = 1 to M or until there are no more
 *                 calls: no "[fault]" was printed, and "[life]" was. If F begins with
 *                 "kill_" the rank is killed there. With a stride n grows by that from a
 *                 random start, unless HEDDLE_SOAK is set
 *
 * Ends with 0 if all codes are as expected, 77 if all ranks ended with 77 (skipped),
 * else 1.
 */
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/parse.h"
#include "base/status.h"
#include "tools/netns.h"
#include "tools/procs.h"

enum { MAX_HOOKS = 64, MAX_ENV = 64, MAX_UNTIL = 8, MAX_RUNS = 50, SKIPPED = 77 };

struct hook {
    int signal;
    int rank;
    int printer; /* -1 = any */
    const char *text;
    bool done;
};

struct expectation {
    int rank;
    int code;
};

struct runner {
    int num_ranks;
    int num_hosts;
    int64_t timeout_ns;
    struct hook hooks[MAX_HOOKS];
    int num_hooks;
    struct expectation expectations[MAX_HOOKS];
    int num_expectations;
    const char *env[MAX_ENV + 3]; /* two for the sweep */
    int num_env;
    const char *until[MAX_UNTIL];
    bool seen[MAX_UNTIL];
    int num_until;
    const char *preload;
    const char *sweep; /* R:FUNCTION */
    int sweep_max, sweep_stride;
    bool soak;
    bool fault_seen;
    bool life_seen; /* the program came to its end, so there are no more calls to fail */
};

_Noreturn static void usage(const char *problem)
{
    fprintf(stderr,
            "runner: %s\nusage: runner -n N [--timeout S] [--kill R:TEXT] "
            "[--stop R:TEXT] [--cont R:TEXT] [--expect R:CODE] [--env NAME=VALUE] "
            "[--hosts H] [--until TEXT] [--] program args\n",
            problem);
    exit(2);
}

/* "R:" at the front of a text; returns what follows. */
static const char *take_rank(const char *text, int *rank)
{
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end != ':' || value < 0 || value > 4096)
        return NULL;
    *rank = (int)value;
    return end + 1;
}

static void add_hook(struct runner *runner, int signal, const char *text)
{
    if (runner->num_hooks == MAX_HOOKS)
        usage("too many hooks");
    struct hook *hook = &runner->hooks[runner->num_hooks++];
    *hook = (struct hook){.signal = signal, .printer = -1};
    hook->text = take_rank(text, &hook->rank);
    if (!hook->text)
        usage("a hook is RANK:TEXT");
    const char *rest = take_rank(hook->text, &hook->printer);
    if (rest)
        hook->text = rest;
}

static void add_expectation(struct runner *runner, const char *text)
{
    if (runner->num_expectations == MAX_HOOKS)
        usage("too many expectations");
    struct expectation *e = &runner->expectations[runner->num_expectations++];
    const char *code = take_rank(text, &e->rank);
    if (!code)
        usage("an expectation is RANK:CODE");
    e->code = atoi(code);
}

/* Cuts ":MAX:STRIDE" off "R:FUNCTION:MAX:STRIDE". */
static void set_sweep(struct runner *runner, char *text)
{
    char *function = strchr(text, ':');
    char *max = function ? strchr(function + 1, ':') : NULL;
    if (!max || sscanf(max, ":%d:%d", &runner->sweep_max, &runner->sweep_stride) < 1 ||
        runner->sweep_max < 1 || runner->sweep_stride < 1)
        usage("a sweep is RANK:FUNCTION:MAX[:STRIDE]");
    *max = '\0';
    runner->sweep = text;
}

static int64_t parse_seconds(const char *text)
{
    int64_t ns;
    if (base_parse_duration(text, &ns) != HDL_OK)
        usage(base_detail());
    return ns;
}

static void set_option(struct runner *runner, int c)
{
    if (c == 'n')
        runner->num_ranks = atoi(optarg);
    else if (c == 't')
        runner->timeout_ns = parse_seconds(optarg);
    else if (c == 'k')
        add_hook(runner, SIGKILL, optarg);
    else if (c == 's')
        add_hook(runner, SIGSTOP, optarg);
    else if (c == 'c')
        add_hook(runner, SIGCONT, optarg);
    else if (c == 'e')
        add_expectation(runner, optarg);
    else if (c == 'v' && runner->num_env < MAX_ENV)
        runner->env[runner->num_env++] = optarg;
    else if (c == 'h')
        runner->num_hosts = atoi(optarg);
    else if (c == 'w')
        set_sweep(runner, optarg);
    else if (c == 'p')
        runner->preload = optarg;
    else if (c == 'u' && runner->num_until < MAX_UNTIL)
        runner->until[runner->num_until++] = optarg;
    else
        usage("bad option");
}

static void parse_options(struct runner *runner, int argc, char **argv)
{
    static const struct option options[] = {
        {"ranks", required_argument, NULL, 'n'},
        {"timeout", required_argument, NULL, 't'},
        {"kill", required_argument, NULL, 'k'},
        {"stop", required_argument, NULL, 's'},
        {"cont", required_argument, NULL, 'c'},
        {"expect", required_argument, NULL, 'e'},
        {"env", required_argument, NULL, 'v'},
        {"hosts", required_argument, NULL, 'h'},
        {"sweep", required_argument, NULL, 'w'},
        {"preload", required_argument, NULL, 'p'},
        {"until", required_argument, NULL, 'u'},
        {NULL, 0, NULL, 0},
    };
    int c;
    while ((c = getopt_long(argc, argv, "+n:", options, NULL)) != -1)
        set_option(runner, c);
    if (runner->num_ranks < 1 || optind >= argc)
        usage("-n N and a program are needed");
    if (!runner->sweep != !runner->preload)
        usage("--sweep and --preload go together");
}

static void on_line(void *user, struct procs *procs, int rank, int stream,
                    const char *line)
{
    struct runner *runner = user;
    if (strncmp(line, "[fault]", 7) == 0)
        runner->fault_seen = true;
    if (strncmp(line, "[life]", 6) == 0)
        runner->life_seen = true;
    for (int i = 0; i < runner->num_until; i++)
        if (strncmp(line, runner->until[i], strlen(runner->until[i])) == 0)
            runner->seen[i] = true;
    if (runner->sweep && stream == 1)
        return;
    fprintf(stream == 1 ? stdout : stderr, "[%d] %s\n", rank, line);
    fflush(stream == 1 ? stdout : stderr);
    for (int i = 0; i < runner->num_hooks; i++) {
        struct hook *hook = &runner->hooks[i];
        if (hook->done || (hook->printer >= 0 && hook->printer != rank) ||
            strncmp(line, hook->text, strlen(hook->text)) != 0)
            continue;
        hook->done = true;
        printf("[runner] signal %d to rank %d\n", hook->signal, hook->rank);
        procs_signal(procs, hook->rank, hook->signal, false);
    }
}

static int expected_code(const struct runner *runner, int rank)
{
    int code = 0;
    for (int i = 0; i < runner->num_hooks; i++) {
        if (runner->hooks[i].rank == rank && runner->hooks[i].signal == SIGKILL)
            code = 128 + SIGKILL;
    }
    if (runner->sweep && runner->fault_seen && strstr(runner->sweep, ":kill_") &&
        atoi(runner->sweep) == rank)
        code = 128 + SIGKILL;
    for (int i = 0; i < runner->num_expectations; i++) {
        if (runner->expectations[i].rank == rank)
            code = runner->expectations[i].code;
    }
    return code;
}

/* Says what differs from the expected; the exit code of the test. */
static int judge(const struct runner *runner, const struct procs *procs)
{
    int num_wrong = 0;
    int num_skipped = 0;
    for (int r = 0; r < runner->num_ranks; r++) {
        int code = procs_exit_code(procs, r);
        num_skipped += code == SKIPPED;
        if (code == expected_code(runner, r))
            continue;
        num_wrong++;
        if (code != SKIPPED)
            fprintf(stderr, "runner: rank %d ended with code %d, not %d\n", r, code,
                    expected_code(runner, r));
    }
    if (num_skipped == runner->num_ranks)
        return SKIPPED;
    for (int i = 0; i < runner->num_hooks; i++) {
        if (!runner->hooks[i].done) {
            num_wrong++;
            fprintf(stderr, "runner: no rank printed '%s'\n", runner->hooks[i].text);
        }
    }
    return num_wrong > 0;
}

static int run_tree(struct runner *runner, struct procs_spec *spec)
{
    struct procs *procs;
    if (procs_start(spec, &procs) != HDL_OK) {
        fprintf(stderr, "runner: %s\n", base_detail());
        return 1;
    }
    int code;
    if (procs_run(procs) != HDL_OK) {
        fprintf(stderr, "runner: %s\n", base_detail());
        code = 1;
    } else {
        code = judge(runner, procs);
    }
    procs_destroy(procs);
    return code;
}

static int run_once(struct runner *runner, char **argv)
{
    struct procs_spec spec = {
        .num_ranks = runner->num_ranks,
        .argv = argv,
        .env = runner->env,
        .timeout_ns = runner->timeout_ns,
        .forward_signals = true,
        .on_line = on_line,
        .user = runner,
    };
    if (runner->num_hosts <= 1)
        return run_tree(runner, &spec);

    struct netns *netns;
    enum hdl_status status = netns_create(runner->num_hosts, runner->num_ranks, &netns);
    if (status != HDL_OK) {
        fprintf(stderr, "runner: %s\n", base_detail());
        return status == HDL_ENOTSUP ? SKIPPED : 1;
    }
    spec.netns_fds = netns_rank_fds(netns);
    spec.addrs = netns_rank_addrs(netns);
    spec.master_addr = netns_rank_addrs(netns)[0];
    int code = run_tree(runner, &spec);
    netns_destroy(netns);
    return code;
}

static int run_sweep(struct runner *runner, char **argv)
{
    static char preload[4200];
    static char fault[100];
    snprintf(preload, sizeof(preload), "LD_PRELOAD=%s", runner->preload);
    runner->env[runner->num_env] = preload;
    runner->env[runner->num_env + 1] = fault;
    int num_empty = 0, num_faults = 0;
    int stride = runner->soak ? 1 : runner->sweep_stride;
    int first = 1 + (int)(base_now_ns() / 1000 % stride);
    for (int n = first; n <= runner->sweep_max; n += stride) {
        snprintf(fault, sizeof(fault), "HEDDLE_TEST_FAULT=%s:%d", runner->sweep, n);
        runner->fault_seen = false;
        runner->life_seen = false;
        int code = run_once(runner, argv);
        if (code != 0) {
            fprintf(stderr, "runner: failed with %s\n", fault);
            return code;
        }
        num_faults += runner->fault_seen;
        if (runner->fault_seen)
            continue;
        if (runner->life_seen || ++num_empty > 10) {
            printf("[runner] %d calls failed one by one\n", num_faults);
            return num_faults == 0;
        }
        n -= stride; /* a deadline passed before the n-th call: once more */
    }
    printf("[runner] %d calls failed one by one, there are more\n", num_faults);
    return 0;
}

/* Names the first branch that was not taken yet; NULL = all were. */
static const char *not_taken(const struct runner *runner)
{
    for (int i = 0; i < runner->num_until; i++)
        if (!runner->seen[i])
            return runner->until[i];
    return NULL;
}

static int run_until(struct runner *runner, char **argv)
{
    int runs = 0;
    do {
        for (int i = 0; i < runner->num_hooks; i++)
            runner->hooks[i].done = false;
        int code = run_once(runner, argv);
        runs++;
        if (code != 0)
            return code;
    } while (runs < MAX_RUNS && (runner->soak || not_taken(runner)));
    if (not_taken(runner)) {
        fprintf(stderr, "runner: no rank printed '%s' in %d runs\n", not_taken(runner),
                runs);
        return 1;
    }
    printf("[runner] all branches were taken in %d runs\n", runs);
    return 0;
}

int main(int argc, char **argv)
{
    struct runner runner = {.timeout_ns = 60 * BASE_NS_PER_S, .sweep_stride = 1};
    parse_options(&runner, argc, argv);
    runner.soak = getenv("HEDDLE_SOAK") != NULL;
    if (runner.sweep)
        return run_sweep(&runner, argv + optind);
    return runner.num_until > 0 ? run_until(&runner, argv + optind)
                                : run_once(&runner, argv + optind);
}
