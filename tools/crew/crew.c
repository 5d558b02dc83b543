/* SPDX-License-Identifier: Apache-2.0 */
/* The supervisor's side: processes, records, commands. */
#include "tools/crew/crew.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/parse.h"
#include "base/random.h"
#include "tools/procs.h"

void crew_problem(struct crew *crew, const char *format, ...)
{
    va_list args;
    if (crew->wrong++ == 0) {
        va_start(args, format);
        vsnprintf(crew->problem, sizeof(crew->problem), format, args);
        va_end(args);
    }
}

static bool make_token(struct crew *crew)
{
    uint8_t bytes[32];
    if (base_random_bytes(bytes, sizeof(bytes)) != HDL_OK)
        return false;
    base_format_hex(bytes, sizeof(bytes), crew->token);
    return true;
}

/* In the child: dies with the supervisor. */
static void become(char *const argv[])
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t none;
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    execv("/proc/self/exe", argv);
    _exit(127);
}

static bool start_coordinator(struct crew *crew)
{
    char seconds[32];
    snprintf(seconds, sizeof(seconds), "%.3f", (double)crew->opts.dead_after_us / 1e6);
    static char name[] = "heddle", command[] = "coordinator", listen[] = "--listen",
                dead[] = "--dead-after";
    char *argv[] = {name, command, listen, crew->address, dead, seconds, NULL};
    crew->coordinator = fork();
    if (crew->coordinator == 0) {
        int null = open("/dev/null", O_RDWR);
        (void)dup2(null, STDOUT_FILENO);
        (void)setenv("HEDDLE_TOKEN", crew->token, 1);
        become(argv);
    }
    if (crew->coordinator < 0)
        crew_problem(crew, "no process for the coordinator: %s", strerror(errno));
    return crew->coordinator > 0;
}

static void set_number(const char *name, int64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%lld", (long long)value);
    (void)setenv(name, text, 1);
}

static void set_environment(const struct crew *crew, int rank, bool join)
{
    const struct crew_opts *opts = &crew->opts;
    bool mixed = strcmp(opts->transport, "mixed") == 0;
    set_number("RANK", rank);
    set_number("WORLD_SIZE", opts->ranks);
    set_number("CREW_SERIAL", crew->next_serial);
    set_number("CREW_SEED", (int64_t)(opts->seed & INT64_MAX));
    set_number("CREW_PAUSE", opts->pause_us);
    set_number("CREW_DEAD_AFTER", opts->dead_after_us);
    set_number("CREW_JOIN", join);
    (void)setenv("CREW_MODE", opts->mode, 1);
    (void)setenv("HEDDLE_COORDINATOR", crew->address, 1);
    (void)setenv("HEDDLE_STANDALONE", opts->coordinator_in_rank0 ? "0" : "1", 1);
    (void)setenv("HEDDLE_TOKEN", crew->token, 1);
    (void)setenv("HEDDLE_TRANSPORT", mixed ? "auto" : opts->transport, 1);
    if (mixed)
        (void)setenv("HEDDLE_HOST", rank < opts->ranks / 2 ? "left" : "right", 1);
    if (opts->defect)
        (void)setenv("CREW_DEFECT", opts->defect, 1);
    else
        (void)unsetenv("CREW_DEFECT");
}

bool crew_spawn(struct crew *crew, int rank, bool join)
{
    struct crew_rank *r = &crew->rank[rank];
    int commands[2], records[2];
    if (pipe2(commands, O_CLOEXEC) != 0 || pipe2(records, O_CLOEXEC) != 0) {
        crew_problem(crew, "no pipe: %s", strerror(errno));
        return false;
    }
    memset(r, 0, sizeof(*r));
    r->serial = ++crew->next_serial;
    r->pid = fork();
    if (r->pid == 0) {
        static char name[] = "heddle", command[] = "chaos", part[] = "--rank";
        char *argv[] = {name, command, part, NULL};
        set_environment(crew, rank, join);
        (void)dup2(commands[0], STDIN_FILENO);
        (void)dup2(records[1], 3);
        become(argv);
    }
    (void)close(commands[0]);
    (void)close(records[1]);
    r->command_fd = commands[1];
    r->record_fd = records[0];
    r->exit_code = -1;
    (void)fcntl(r->record_fd, F_SETFL, O_NONBLOCK);
    if (r->pid < 0)
        crew_problem(crew, "no process for rank %d: %s", rank, strerror(errno));
    return r->pid > 0;
}

void crew_command(struct crew *crew, int rank, const char *line)
{
    if (rank >= 0 && crew->rank[rank].pid)
        (void)dprintf(crew->rank[rank].command_fd, "%s\n", line);
}

void crew_kill(struct crew *crew, int rank, int signal)
{
    struct crew_rank *r = &crew->rank[rank];
    if (r->pid <= 0)
        return;
    if (signal != SIGCONT) {
        r->doomed = true;
        r->member = false;
    }
    (void)kill(r->pid, signal);
}

/* --------------------------------------------------------------------------- records */

static void hear(struct crew *crew, struct crew_rank *r, const struct crew_record *record)
{
    const char *text = record->text;
    unsigned long steps, incomplete;
    char status[32];
    int other;
    if (strcmp(text, "ready") == 0) {
        r->ready = true;
        r->member = r->admitting = false;
    } else if (strncmp(text, "joined", 6) == 0) {
        r->member = true;
        r->ready = r->doomed = r->admitting = false;
    } else if (strcmp(text, "orphan") == 0) {
        r->orphan = true;
        r->member = false;
    } else if (strcmp(text, "end") == 0) {
        r->ended = true;
        r->member = false;
    } else if (sscanf(text, "steps %lu %lu", &steps, &incomplete) == 2) {
        crew->steps += steps;
        crew->incomplete += incomplete;
    } else if (sscanf(text, "done admit %d %31s", &other, status) == 2 && other >= 0 &&
               other < crew->opts.ranks && strcmp(status, "HDL_OK") != 0) {
        crew->rank[other].admitting = false;
    }
}

static void take(struct crew *crew, struct crew_rank *r, const struct crew_record *record)
{
    crew->records++;
    if (record->what == CREW_WRONG)
        crew_problem(crew, "rank %u: %s", record->rank, record->text);
    else if (record->what == CREW_SAY)
        hear(crew, r, record);
    else if (!r->doomed) {
        r->last_op = record->op.number;
        r->last_ns = record->time_ns;
        if (crew_ranks(record))
            r->sees = crew_ranks(record);
    }
    if (crew->on_record)
        crew->on_record(crew, record);
}

static void read_rank(struct crew *crew, struct crew_rank *r)
{
    struct crew_record records[64];
    ssize_t n = read(r->record_fd, records, sizeof(records));
    /* Records are whole: the writer's are smaller than a pipe's atomic write. */
    for (size_t i = 0; n > 0 && i < (size_t)n / sizeof(records[0]); i++)
        take(crew, r, &records[i]);
    if (n != 0)
        return;
    int status = 0;
    (void)waitpid(r->pid, &status, 0);
    r->exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    (void)close(r->record_fd);
    (void)close(r->command_fd);
    r->pid = 0;
    r->member = false;
    if (!r->doomed && !r->ended)
        crew_problem(crew, "rank %d ended with %d", (int)(r - crew->rank), r->exit_code);
}

static void read_all(struct crew *crew, int timeout_ms)
{
    struct pollfd fds[CREW_RANKS_MAX];
    int index[CREW_RANKS_MAX], n = 0;
    for (int i = 0; i < crew->opts.ranks; i++) {
        if (!crew->rank[i].pid)
            continue;
        fds[n] = (struct pollfd){.fd = crew->rank[i].record_fd, .events = POLLIN};
        index[n++] = i;
    }
    if (poll(fds, (nfds_t)n, timeout_ms) <= 0)
        return;
    for (int i = 0; i < n; i++)
        if (fds[i].revents)
            read_rank(crew, &crew->rank[index[i]]);
}

bool crew_until(struct crew *crew, bool (*test)(struct crew *crew, void *argument),
                void *argument, int64_t timeout_ns)
{
    int64_t until = base_now_ns() + timeout_ns;
    for (;;) {
        if (crew->wrong)
            return false;
        if (test && test(crew, argument))
            return true;
        int64_t left = until - base_now_ns();
        if (left <= 0)
            return !test;
        read_all(crew,
                 left < 20 * BASE_NS_PER_MS ? (int)(left / BASE_NS_PER_MS) + 1 : 20);
    }
}

uint64_t crew_members(const struct crew *crew)
{
    uint64_t mask = 0;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (crew->rank[i].pid && crew->rank[i].member && !crew->rank[i].doomed)
            mask |= UINT64_C(1) << i;
    return mask;
}

int crew_speaker(const struct crew *crew, int not_this)
{
    uint64_t mask = crew_members(crew);
    if (not_this >= 0)
        mask &= ~(UINT64_C(1) << not_this);
    return mask ? __builtin_ctzll(mask) : -1;
}

/* ----------------------------------------------------------------------- start, stop */

static bool all_run(struct crew *crew, void *argument)
{
    (void)argument;
    uint64_t all = (UINT64_C(1) << crew->opts.ranks) - 1;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (crew->rank[i].sees != all)
            return false;
    return crew_members(crew) == all;
}

static int num_running; /* crews */

bool crew_start(struct crew *crew)
{
    num_running++;
    struct procs_address at;
    if (procs_free_address(&at) != HDL_OK || !make_token(crew)) {
        crew_problem(crew, "%s", hdl_error_detail());
        return false;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    snprintf(crew->address, sizeof(crew->address),
             strchr(at.host, ':') ? "[%s]:%s" : "%s:%s", at.host, at.port);
    if (!crew->opts.coordinator_in_rank0 && !start_coordinator(crew))
        return false;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (!crew_spawn(crew, i, false))
            return false;
    if (crew_until(crew, all_run, NULL, 30 * BASE_NS_PER_S))
        return true;
    crew_problem(crew, "the ranks did not start");
    return false;
}

static void end_coordinator(struct crew *crew, int signal)
{
    if (crew->coordinator <= 0)
        return;
    (void)kill(crew->coordinator, signal);
    (void)waitpid(crew->coordinator, NULL, 0);
    crew->coordinator = 0;
}

bool crew_restart_coordinator(struct crew *crew)
{
    end_coordinator(crew, SIGKILL);
    return start_coordinator(crew);
}

static bool none_left(struct crew *crew, void *argument)
{
    (void)argument;
    for (int i = 0; i < crew->opts.ranks; i++)
        if (crew->rank[i].pid)
            return false;
    return true;
}

bool crew_stop(struct crew *crew)
{
    for (int i = 0; i < crew->opts.ranks; i++)
        crew_command(crew, i, "stop");
    bool good = crew_until(crew, none_left, NULL, 8 * BASE_NS_PER_S);
    for (int i = 0; i < crew->opts.ranks; i++) {
        struct crew_rank *r = &crew->rank[i];
        if (!good && r->pid)
            crew_problem(crew, "rank %d did not leave", i);
        if (good && !r->doomed && r->exit_code != 0)
            crew_problem(crew, "rank %d ended with %d", i, r->exit_code);
        if (r->pid) {
            (void)kill(r->pid, SIGKILL);
            (void)waitpid(r->pid, NULL, 0);
            r->pid = 0;
        }
    }
    end_coordinator(crew, SIGTERM);
    if (--num_running == 0 && (waitpid(-1, NULL, WNOHANG) != -1 || errno != ECHILD))
        crew_problem(crew, "a process is left over");
    return good && crew->wrong == 0;
}
