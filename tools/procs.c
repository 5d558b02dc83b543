/* SPDX-License-Identifier: Apache-2.0 */
/* Starts and watches a tree of rank processes.
 *
 *     caller (subreaper)
 *       +- rank 0 (own process group) --- pipes: stdout, stderr
 *       |    +- whatever it starts
 *       +- rank 1 ...
 *
 * A rank's group is killed when the rank has ended but is not yet reaped, so its number
 * cannot have been given to someone else.
 */
#include "tools/procs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/parse.h"
#include "base/random.h"
#include "base/status.h"
#include "tools/procs_state.h"

enum { MAX_RANKS = 4096, LINE_BYTES = 4096, KEPT_LINES = 8, KEPT_BYTES = 200 };

struct stream {
    int fd; /* -1 once it ended */
    size_t used;
    char buffer[LINE_BYTES];
};

struct rank {
    pid_t pid;
    bool running;
    int exit_code;
    struct stream streams[2];
    unsigned num_lines;
    char lines[KEPT_LINES][KEPT_BYTES];
};

struct procs {
    struct procs_spec spec;
    char token[65];
    struct procs_address master;
    sigset_t old_mask;
    int signal_fd;
    int first_failure;
    int stop_signal;
    int num_left;    /* killed after their rank had ended */
    int64_t term_at; /* when the survivors of a failure get SIGTERM, then SIGKILL */
    int64_t kill_at;
    struct pollfd *polls;
    struct rank ranks[];
};

static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
enum { NUM_FORWARDED = sizeof(forwarded) / sizeof(forwarded[0]) };

static void print_line(const struct procs *procs, int rank, int stream, const char *line)
{
    FILE *out = stream == 1 ? stdout : stderr;
    int width = procs->spec.num_ranks > 100 ? 3 : procs->spec.num_ranks > 10 ? 2 : 1;
    fprintf(out, "[%*d] %s\n", width, rank, line);
    fflush(out);
}

static void give_line(struct procs *procs, int r, int stream, const char *line)
{
    struct rank *rank = &procs->ranks[r];
    char *kept = rank->lines[rank->num_lines++ % KEPT_LINES];
    size_t length = strnlen(line, KEPT_BYTES - 1);
    memcpy(kept, line, length);
    kept[length] = '\0';
    if (procs->spec.on_line)
        procs->spec.on_line(procs->spec.user, procs, r, stream, line);
    else
        print_line(procs, r, stream, line);
}

/* Hands out the whole lines in the buffer; `all`: the rest too. A line that fills the
 * buffer is handed out in pieces. */
static void split_lines(struct procs *procs, int r, int stream, bool all)
{
    struct stream *s = &procs->ranks[r].streams[stream - 1];
    size_t begin = 0;
    while (begin < s->used) {
        char *end = memchr(s->buffer + begin, '\n', s->used - begin);
        bool cut = !end && begin == 0 && s->used == LINE_BYTES - 1;
        if (!end && !cut && !all)
            break;
        size_t stop = end ? (size_t)(end - s->buffer) : s->used;
        s->buffer[stop] = '\0';
        give_line(procs, r, stream, s->buffer + begin);
        begin = end ? stop + 1 : stop;
    }
    memmove(s->buffer, s->buffer + begin, s->used - begin);
    s->used -= begin;
}

static void read_stream(struct procs *procs, int r, int stream)
{
    struct stream *s = &procs->ranks[r].streams[stream - 1];
    while (s->fd >= 0) {
        ssize_t got = read(s->fd, s->buffer + s->used, LINE_BYTES - 1 - s->used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) {
            split_lines(procs, r, stream, true);
            close(s->fd);
            s->fd = -1;
            return;
        }
        s->used += (size_t)got;
        split_lines(procs, r, stream, false);
    }
}

static void note_exit(struct procs *procs, int r, const siginfo_t *info)
{
    struct rank *rank = &procs->ranks[r];
    kill(-rank->pid, SIGKILL);
    waitpid(rank->pid, NULL, 0);
    rank->running = false;
    rank->exit_code =
        info->si_code == CLD_EXITED ? info->si_status : 128 + info->si_status;
    read_stream(procs, r, 1);
    read_stream(procs, r, 2);
    if (rank->exit_code == 0 || procs->first_failure >= 0)
        return;
    procs->first_failure = r;
    if (procs->spec.grace_ns > 0) {
        procs->term_at = base_now_ns() + procs->spec.grace_ns;
        procs->kill_at = procs->term_at + procs->spec.grace_ns;
    }
}

/* Looks at every running rank, since one SIGCHLD may stand for several. */
static void collect_exits(struct procs *procs)
{
    for (int r = 0; r < procs->spec.num_ranks; r++) {
        siginfo_t info = {0};
        if (!procs->ranks[r].running)
            continue;
        int rc =
            waitid(P_PID, (id_t)procs->ranks[r].pid, &info, WEXITED | WNOHANG | WNOWAIT);
        if (rc == 0 && info.si_pid != 0)
            note_exit(procs, r, &info);
    }
}

/* By us: the end of its rank was that of the group. */
static bool was_killed(const struct procs *procs, const siginfo_t *info)
{
    pid_t group = getpgid(info->si_pid);
    bool killed = info->si_code == CLD_KILLED && info->si_status == SIGKILL;
    for (int r = 0; killed && r < procs->spec.num_ranks; r++)
        if (procs->ranks[r].pid == group)
            return !procs->ranks[r].running;
    return false;
}

/* Descendants whose parent has gone are our children now: reap those that ended. */
static void reap_orphans(struct procs *procs)
{
    siginfo_t info = {0};
    while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid != 0) {
        for (int r = 0; r < procs->spec.num_ranks; r++) {
            if (procs->ranks[r].running && procs->ranks[r].pid == info.si_pid) {
                note_exit(procs, r, &info);
                info.si_pid = 0;
                break;
            }
        }
        if (info.si_pid != 0) {
            procs->num_left += was_killed(procs, &info);
            waitpid(info.si_pid, NULL, 0);
        }
        memset(&info, 0, sizeof(info));
    }
}

void procs_signal(struct procs *procs, int rank, int signal, bool whole_group)
{
    if (rank < 0 || rank >= procs->spec.num_ranks || !procs->ranks[rank].running)
        return;
    pid_t pid = procs->ranks[rank].pid;
    kill(whole_group ? -pid : pid, signal);
}

static void signal_all(struct procs *procs, int signal)
{
    for (int r = 0; r < procs->spec.num_ranks; r++)
        procs_signal(procs, r, signal, true);
}

static void read_signals(struct procs *procs)
{
    struct signalfd_siginfo info;
    while (read(procs->signal_fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        int signal = (int)info.ssi_signo;
        if (signal == SIGCHLD)
            continue;
        signal_all(procs, signal);
        if (signal == SIGUSR1 || signal == SIGUSR2)
            continue;
        procs->stop_signal = signal;
        int64_t grace =
            procs->spec.grace_ns > 0 ? procs->spec.grace_ns : 2 * BASE_NS_PER_S;
        procs->kill_at = base_now_ns() + grace;
    }
    collect_exits(procs);
    reap_orphans(procs);
}

static int num_running(const struct procs *procs)
{
    int count = 0;
    for (int r = 0; r < procs->spec.num_ranks; r++)
        count += procs->ranks[r].running;
    return count;
}

static int poll_timeout_ms(const struct procs *procs, int64_t deadline)
{
    int64_t next = deadline;
    if (procs->term_at < next)
        next = procs->term_at;
    if (procs->kill_at < next)
        next = procs->kill_at;
    if (next == BASE_FOREVER)
        return -1;
    int64_t left = (next - base_now_ns()) / BASE_NS_PER_MS + 1;
    return left < 0 ? 0 : left > INT_MAX ? INT_MAX : (int)left;
}

static void wait_events(struct procs *procs, int64_t deadline)
{
    int num_polls = 1 + 2 * procs->spec.num_ranks;
    procs->polls[0] = (struct pollfd){.fd = procs->signal_fd, .events = POLLIN};
    for (int i = 1; i < num_polls; i++) {
        int fd = procs->ranks[(i - 1) / 2].streams[(i - 1) % 2].fd;
        procs->polls[i] = (struct pollfd){.fd = fd, .events = POLLIN};
    }
    if (poll(procs->polls, (nfds_t)num_polls, poll_timeout_ms(procs, deadline)) <= 0)
        return;
    for (int i = 1; i < num_polls; i++) {
        if (procs->polls[i].revents)
            read_stream(procs, (i - 1) / 2, (i - 1) % 2 + 1);
    }
    if (procs->polls[0].revents)
        read_signals(procs);
}

static void stop_late(struct procs *procs, int64_t now)
{
    if (now >= procs->term_at) {
        signal_all(procs, SIGTERM);
        procs->term_at = BASE_FOREVER;
    }
    if (now >= procs->kill_at) {
        signal_all(procs, SIGKILL);
        procs->kill_at = BASE_FOREVER;
    }
}

enum hdl_status procs_run(struct procs *procs)
{
    int64_t start = base_now_ns();
    int64_t limit = procs->spec.timeout_ns > 0 ? procs->spec.timeout_ns : BASE_FOREVER;
    int64_t deadline = base_deadline_ns(start, limit);
    enum hdl_status status = HDL_OK;
    collect_exits(procs);
    while (num_running(procs) > 0) {
        wait_events(procs, deadline);
        int64_t now = base_now_ns();
        if (now >= deadline && status == HDL_OK && num_running(procs) > 0) {
            status =
                base_fail(HDL_ETIMEDOUT, "%d of %d ranks still run after %" PRId64 " ms",
                          num_running(procs), procs->spec.num_ranks,
                          (now - start) / BASE_NS_PER_MS);
            procs_dump(procs, stderr);
            deadline = BASE_FOREVER;
            signal_all(procs, SIGKILL);
        }
        stop_late(procs, now);
    }
    return status;
}

/* Ranks of one host share a namespace; their place among them, and how many they are. */
static void place_on_host(const struct procs_spec *spec, int rank, int *place, int *count)
{
    *place = 0;
    *count = 0;
    for (int r = 0; r < spec->num_ranks; r++) {
        bool same = !spec->netns_fds || spec->netns_fds[r] == spec->netns_fds[rank];
        *place += same && r < rank;
        *count += same;
    }
}

static bool set_rank_env(const struct procs *procs, int rank)
{
    char number[16];
    char count[16];
    char local_number[16];
    char local_count[16];
    int place;
    int neighbours;
    const struct procs_spec *spec = &procs->spec;
    snprintf(number, sizeof(number), "%d", rank);
    snprintf(count, sizeof(count), "%d", spec->num_ranks);
    place_on_host(spec, rank, &place, &neighbours);
    snprintf(local_number, sizeof(local_number), "%d", place);
    snprintf(local_count, sizeof(local_count), "%d", neighbours);
    int rc = setenv("RANK", number, 1) | setenv("WORLD_SIZE", count, 1) |
             setenv("LOCAL_RANK", local_number, 1) |
             setenv("LOCAL_WORLD_SIZE", local_count, 1) |
             setenv("MASTER_ADDR", procs->master.host, 1) |
             setenv("MASTER_PORT", procs->master.port, 1);
    if (procs->token[0])
        rc |= setenv("HEDDLE_TOKEN", procs->token, 1);
    if (spec->addrs)
        rc |= setenv("HEDDLE_INTERFACE", spec->addrs[rank], 1);
    for (size_t i = 0; spec->env && spec->env[i]; i++) {
        char *copy = strdup(spec->env[i]);
        rc |= copy ? putenv(copy) : -1;
    }
    return rc == 0;
}

_Noreturn static void run_child(const struct procs *procs, int rank, pid_t parent,
                                const int fds[2])
{
    const struct procs_spec *spec = &procs->spec;
    int null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(127);
    sigprocmask(SIG_SETMASK, &procs->old_mask, NULL);
    if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(fds[0], 1) < 0 || dup2(fds[1], 2) < 0)
        _exit(127);
    if (spec->netns_fds && spec->netns_fds[rank] >= 0 &&
        setns(spec->netns_fds[rank], CLONE_NEWNET) != 0) {
        dprintf(2, "cannot enter the network namespace: %s\n", strerror(errno));
        _exit(127);
    }
    if (!set_rank_env(procs, rank)) {
        dprintf(2, "cannot set the environment: out of memory\n");
        _exit(127);
    }
    execvp(spec->argv[0], spec->argv);
    dprintf(2, "cannot run %s: %s\n", spec->argv[0], strerror(errno));
    _exit(127);
}

static void close_pair(const int fds[2])
{
    if (fds[0] >= 0)
        close(fds[0]);
    if (fds[1] >= 0)
        close(fds[1]);
}

static enum hdl_status start_rank(struct procs *procs, int r)
{
    struct rank *rank = &procs->ranks[r];
    int out[2] = {-1, -1};
    int err[2] = {-1, -1};
    pid_t parent = getpid();
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0)
        goto close_pipes;
    rank->pid = fork();
    if (rank->pid < 0)
        goto close_pipes;
    if (rank->pid == 0)
        run_child(procs, r, parent, (const int[2]){out[1], err[1]});
    setpgid(rank->pid, rank->pid); /* the child does it too: whoever is first */
    rank->running = true;
    close(out[1]);
    close(err[1]);
    fcntl(out[0], F_SETFL, O_NONBLOCK);
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    rank->streams[0].fd = out[0];
    rank->streams[1].fd = err[0];
    return HDL_OK;

close_pipes:
    base_fail_errno(HDL_ESYSTEM, errno, "start of rank %d", r);
    close_pair(out);
    close_pair(err);
    return HDL_ESYSTEM;
}

/* A port of the address that was free a moment ago; false if this machine lacks it. */
static bool free_port(struct sockaddr *addr, socklen_t length,
                      struct procs_address *found)
{
    int fd = socket(addr->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = fd >= 0 && bind(fd, addr, length) == 0 &&
                getsockname(fd, addr, &length) == 0 &&
                getnameinfo(addr, length, found->host, sizeof(found->host), found->port,
                            sizeof(found->port), NI_NUMERICHOST | NI_NUMERICSERV) == 0;
    int error = errno;
    if (fd >= 0)
        close(fd);
    errno = error;
    return good;
}

enum hdl_status procs_free_address(struct procs_address *found)
{
    struct sockaddr_in v4 = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6,
                              .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (!free_port((struct sockaddr *)&v4, sizeof(v4), found) &&
        !free_port((struct sockaddr *)&v6, sizeof(v6), found))
        return base_fail_errno(HDL_ESYSTEM, errno, "search of a free port");
    return HDL_OK;
}

/* What the caller says, else a free one. */
static enum hdl_status choose_address(struct procs *procs)
{
    const struct procs_spec *spec = &procs->spec;
    enum hdl_status status = procs_free_address(&procs->master);
    if (spec->master_addr)
        snprintf(procs->master.host, sizeof(procs->master.host), "%s", spec->master_addr);
    if (spec->master_port != 0)
        snprintf(procs->master.port, sizeof(procs->master.port), "%u", spec->master_port);
    return status;
}

static enum hdl_status make_token(struct procs *procs)
{
    if (getenv("HEDDLE_TOKEN") || getenv("HEDDLE_TOKEN_FILE"))
        return HDL_OK;
    uint8_t bytes[32];
    enum hdl_status status = base_random_bytes(bytes, sizeof(bytes));
    if (status == HDL_OK)
        base_format_hex(bytes, sizeof(bytes), procs->token);
    return status;
}

static enum hdl_status take_signals(struct procs *procs)
{
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    for (size_t i = 0; procs->spec.forward_signals && i < NUM_FORWARDED; i++)
        sigaddset(&mask, forwarded[i]);
    sigprocmask(SIG_BLOCK, &mask, &procs->old_mask);
    procs->signal_fd = signalfd(-1, &mask, SFD_NONBLOCK | SFD_CLOEXEC);
    if (procs->signal_fd < 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "signalfd");
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    return HDL_OK;
}

enum hdl_status procs_start(const struct procs_spec *spec, struct procs **out)
{
    if (spec->num_ranks < 1 || spec->num_ranks > MAX_RANKS)
        return base_fail(HDL_EINVAL, "%d ranks, not 1 to %d", spec->num_ranks, MAX_RANKS);
    size_t num_ranks = (size_t)spec->num_ranks;
    struct procs *procs = calloc(1, sizeof(*procs) + num_ranks * sizeof(procs->ranks[0]));
    if (!procs)
        return base_fail(HDL_ENOMEM, "no memory for %zu ranks", num_ranks);
    procs->spec = *spec;
    procs->signal_fd = -1;
    procs->first_failure = -1;
    procs->term_at = BASE_FOREVER;
    procs->kill_at = BASE_FOREVER;
    sigprocmask(SIG_SETMASK, NULL, &procs->old_mask);
    for (size_t r = 0; r < num_ranks; r++) {
        procs->ranks[r].exit_code = -1;
        procs->ranks[r].streams[0].fd = -1;
        procs->ranks[r].streams[1].fd = -1;
    }
    enum hdl_status status = HDL_ENOMEM;
    procs->polls = calloc(1 + 2 * num_ranks, sizeof(procs->polls[0]));
    if (!procs->polls)
        base_fail(HDL_ENOMEM, "no memory for %zu ranks", num_ranks);
    else
        status = make_token(procs);
    if (status == HDL_OK)
        status = choose_address(procs);
    if (status == HDL_OK)
        status = take_signals(procs);
    for (int r = 0; status == HDL_OK && r < spec->num_ranks; r++)
        status = start_rank(procs, r);
    if (status != HDL_OK) {
        procs_destroy(procs);
        return status;
    }
    *out = procs;
    return HDL_OK;
}

int procs_exit_code(const struct procs *procs, int rank)
{
    return procs->ranks[rank].exit_code;
}

int procs_first_failure(const struct procs *procs)
{
    return procs->first_failure;
}

int procs_stop_signal(const struct procs *procs)
{
    return procs->stop_signal;
}

void procs_dump(const struct procs *procs, FILE *out)
{
    for (int r = 0; r < procs->spec.num_ranks; r++) {
        const struct rank *rank = &procs->ranks[r];
        if (rank->running)
            procs_print_state(rank->pid, r, out);
        else
            fprintf(out, "rank %d ended with code %d\n", r, rank->exit_code);
        unsigned first = rank->num_lines > KEPT_LINES ? rank->num_lines - KEPT_LINES : 0;
        for (unsigned i = first; i < rank->num_lines; i++)
            fprintf(out, "    | %s\n", rank->lines[i % KEPT_LINES]);
    }
    fflush(out);
}

int procs_destroy(struct procs *procs)
{
    if (!procs)
        return 0;
    signal_all(procs, SIGKILL);
    for (int r = 0; r < procs->spec.num_ranks; r++) {
        siginfo_t info = {0};
        if (procs->ranks[r].running &&
            waitid(P_PID, (id_t)procs->ranks[r].pid, &info, WEXITED | WNOWAIT) == 0)
            note_exit(procs, r, &info);
        for (int s = 0; s < 2; s++) {
            if (procs->ranks[r].streams[s].fd >= 0)
                close(procs->ranks[r].streams[s].fd);
        }
    }
    if (procs->signal_fd >= 0) {
        procs->num_left += procs_kill_children();
        close(procs->signal_fd);
    }
    int num_left = procs->num_left;
    sigprocmask(SIG_SETMASK, &procs->old_mask, NULL);
    free(procs->polls);
    free(procs);
    return num_left;
}
