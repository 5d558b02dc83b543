/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of real processes: joining, groups, deaths, strangers, descriptors, forks, exits.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/parse.h"
#include "ctl/msg.h"
#include "host/channel.h"
#include "jobs.h"

/* ------------------------------------------------------------------------- joining */

static void run_group(struct job *job, int number)
{
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    JOB_CHECK(host_rank(rank.host) == number);
    JOB_CHECK(host_num_ranks(rank.host) == job->num_ranks);
    job_rank_group(&rank, "world");
    for (uint32_t i = 0; i < rank.view->capacity; i++) {
        char blob[32];
        snprintf(blob, sizeof(blob), "blob of rank %u", i);
        const struct ctl_bytes *endpoint = rank.view->slots[i].endpoint;
        JOB_CHECK(endpoint && endpoint->size == strlen(blob) + 1);
        JOB_CHECK(memcmp(endpoint->data, blob, endpoint->size) == 0);
        JOB_CHECK(ctl_rank_epoch_rank(rank.view->slots[i].rank_epoch) == i);
    }
    job_rank_leave(&rank);
}

static void ranks_find_each_other(void **state)
{
    (void)state;
    for (int size = 1; size <= 8; size *= 2) {
        struct job job = {.num_ranks = size, .token = JOB_TOKEN_A, .run = run_group};
        job_start(&job);
        job_finish(&job);
    }
}

static void token_is_derived_if_there_is_none(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .run = run_group};
    job_start(&job);
    job_finish(&job);
}

/* Same port, other token: the second job's coordinator moves on, its ranks find it. */
static void two_jobs_share_a_port(void **state)
{
    (void)state;
    struct job a = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_group};
    struct job b = {.num_ranks = 3, .token = JOB_TOKEN_B, .run = run_group};
    job_start(&a);
    b.port = a.port;
    job_start(&b);
    job_finish(&a);
    job_finish(&b);
}

/* A silent foreign server on the port, as torch's store is. */
static void foreign_server_on_the_port(void **state)
{
    (void)state;
    struct sockaddr_in addr = {.sin_family = AF_INET};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(addr);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr, size), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &size), 0);
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_group};
    job.port = ntohs(addr.sin_port);
    job_start(&job);
    job_finish(&job);
    close(fd);
}

static void run_until_killed(struct job *job, int number)
{
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    job_ready(job);
    pause();
}

static void job_restarts_on_its_port(void **state)
{
    (void)state;
    struct job first = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_until_killed};
    job_start(&first);
    job_await_ready(&first, 3);
    for (int i = 0; i < 3; i++)
        kill(first.pids[i], SIGKILL);
    struct job second = {
        .num_ranks = 3, .token = JOB_TOKEN_A, .run = run_group, .port = first.port};
    job_start(&second);
    job_finish(&second);
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait(&first, i), 128 + SIGKILL);
}

static void run_many_contexts(struct job *job, int number)
{
    for (int i = 0; i < 10; i++)
        run_group(job, number);
}

static void contexts_one_after_the_other(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_many_contexts};
    job_start(&job);
    job_finish(&job);
}

static void run_two_contexts(struct job *job, int number)
{
    struct job_rank a, b;
    job_rank_join(job, number, &a);
    job_rank_join(job, number, &b);
    job_rank_group(&b, "world");
    job_rank_group(&a, "world");
    job_rank_leave(&a);
    job_rank_leave(&b);
}

static void contexts_side_by_side(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_two_contexts};
    job_start(&job);
    job_finish(&job);
}

/* -------------------------------------------------------------- refused at joining */

static void run_refused(struct job *job, int number)
{
    struct job_rank rank;
    char place[32];
    if (number == 0) {
        snprintf(place, sizeof(place), "127.0.0.1:%d", job->port);
        JOB_CHECK(setenv("HEDDLE_COORDINATOR", place, 1) == 0);
        struct host_opts opts = {.timeout_ns = 6 * BASE_NS_PER_S};
        job_rank_env(job, number, &rank);
        JOB_CHECK(host_create(&rank.env, &opts, &rank.host) == HDL_OK);
        job_await_go(job);
        host_destroy(rank.host);
        return;
    }
    snprintf(place, sizeof(place), "127.0.0.1:%d", job->port);
    JOB_CHECK(setenv("HEDDLE_COORDINATOR", place, 1) == 0);
    JOB_CHECK(setenv("HEDDLE_TOKEN", JOB_TOKEN_B, 1) == 0);
    job_rank_env(job, number, &rank);
    struct host_opts opts = {.timeout_ns = 10 * BASE_NS_PER_S};
    int64_t start = base_now_ns();
    JOB_CHECK(host_create(&rank.env, &opts, &rank.host) == HDL_ECONFIG);
    JOB_CHECK(strstr(base_detail(), "token") != NULL);
    JOB_CHECK(base_now_ns() - start < 8 * BASE_NS_PER_S);
    __atomic_store_n(&job->board->go, 1, __ATOMIC_RELEASE);
}

static void wrong_token_is_told(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 2, .token = JOB_TOKEN_A, .run = run_refused};
    job_start(&job);
    job_finish(&job);
}

static void run_alone_of_two(struct job *job, int number)
{
    struct job_rank rank;
    job_rank_env(job, number, &rank);
    struct host_opts opts = {.timeout_ns = 300 * BASE_NS_PER_MS};
    JOB_CHECK(host_create(&rank.env, &opts, &rank.host) == HDL_ETIMEDOUT);
    JOB_CHECK(strstr(base_detail(), "found no coordinator at 127.0.0.1") != NULL);
}

static void missing_coordinator_is_told(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 2, .token = JOB_TOKEN_A, .run = run_alone_of_two};
    job.board = mmap(NULL, sizeof(*job.board), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    job.port = job_free_port();
    job_start_rank(&job, 1);
    assert_int_equal(job_wait(&job, 1), 0);
}

/* A coordinator of another wire version. */
static void serve_other_version(int listener)
{
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0)
            _exit(1);
        uint8_t key[HOST_KEY_BYTES] = {0}, nonce[HOST_NONCE_BYTES] = {0};
        struct host_channel_opts opts = {.server = true,
                                         .purpose = 1u << HOST_PURPOSE_AGENT,
                                         .version = CTL_WIRE_VERSION + 1,
                                         .max_frame = 16,
                                         .key = key,
                                         .nonce = nonce};
        struct host_channel channel;
        struct host_channel_out out;
        uint8_t data[HOST_HELLO_BYTES];
        host_channel_init(&channel, &opts);
        ssize_t got = recv(fd, data, sizeof(data), MSG_WAITALL);
        (void)host_channel_input(&channel, data, got > 0 ? (size_t)got : 0, &out);
        (void)!write(fd, out.reply, out.reply_size);
        close(fd);
    }
}

static void run_other_version(struct job *job, int number)
{
    struct job_rank rank;
    char place[32], want[64];
    struct host_opts opts = {.timeout_ns = 10 * BASE_NS_PER_S};
    snprintf(place, sizeof(place), "127.0.0.1:%d", job->port);
    if (job->user) /* of a range: it may be another job's, so the time is waited for */
        opts.timeout_ns = BASE_NS_PER_S;
    else
        JOB_CHECK(setenv("HEDDLE_COORDINATOR", place, 1) == 0);
    job_rank_env(job, number, &rank);
    JOB_CHECK(host_create(&rank.env, &opts, &rank.host) == HDL_ECONFIG);
    snprintf(want, sizeof(want), "wire version %d, this process %d", CTL_WIRE_VERSION + 1,
             CTL_WIRE_VERSION);
    JOB_CHECK(strstr(base_detail(), want) != NULL);
}

static void check_other_version(bool in_range)
{
    struct sockaddr_in addr = {.sin_family = AF_INET};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(addr);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&addr, size), 0);
    assert_int_equal(listen(listener, 16), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&addr, &size), 0);
    pid_t server = fork();
    if (server == 0)
        serve_other_version(listener);
    struct job job = {.num_ranks = 2,
                      .token = JOB_TOKEN_A,
                      .run = run_other_version,
                      .user = in_range ? &job : NULL};
    job.port = ntohs(addr.sin_port);
    job_start_rank(&job, 1);
    int code = job_wait(&job, 1);
    kill(server, SIGKILL);
    (void)waitpid(server, NULL, 0);
    close(listener);
    assert_int_equal(code, 0);
}

static void both_versions_are_told(void **state)
{
    (void)state;
    check_other_version(false);
    check_other_version(true);
}

/* -------------------------------------------------------------------------- deaths */

static void run_with_death(struct job *job, int number)
{
    int victim = (int)(intptr_t)job->user;
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    job_ready(job);
    job_await_go(job);
    if (number == victim) {
        job->board->killed_at = base_now_ns();
        kill(getpid(), SIGKILL);
    }
    job_await(&rank.commits, 1);
    if (victim == 0) {
        JOB_CHECK(rank.fail_status == HDL_ECOORD);
    } else {
        JOB_CHECK(rank.absent == UINT64_C(1) << victim);
        struct host_group_stats stats;
        host_group_stats(rank.group, &stats);
        /* The others may have been quicker, and the commit came first. */
        job->board->values[number] = stats.evidence_exit + stats.evidence_closed;
        JOB_CHECK(job->board->values[number] <= 1);
    }
    job_rank_leave(&rank);
}

static void check_death(int victim)
{
    struct job job = {.num_ranks = 4,
                      .token = JOB_TOKEN_A,
                      .run = run_with_death,
                      .user = (void *)(intptr_t)victim};
    job_start(&job);
    job_await_ready(&job, 4);
    __atomic_store_n(&job.board->go, 1, __ATOMIC_RELEASE);
    int64_t last = 0;
    for (int i = 0; i < 4; i++)
        assert_int_equal(job_wait(&job, i), i == victim ? 128 + SIGKILL : 0);
    for (int i = 0; i < 4; i++)
        if (i != victim && job.board->told_at[i] > last)
            last = job.board->told_at[i];
    uint64_t seen = 0;
    for (int i = 0; i < 4; i++)
        seen += job.board->values[i];
    assert_true(victim == 0 || seen >= 1);
    int64_t took = last - job.board->killed_at;
    print_message("rank %d killed, all survivors told after %.2f ms\n", victim,
                  (double)took / 1e6);
    assert_true(took < 2 * BASE_NS_PER_S);
    munmap(job.board, sizeof(*job.board));
}

static void killed_rank_becomes_absent(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        check_death(2);
}

static void killed_coordinator_is_told(void **state)
{
    (void)state;
    check_death(0);
}

/* ----------------------------------------------------------------------- strangers */

static int connect_port(int port)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    JOB_CHECK(connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0);
    return fd;
}

static int connect_unix(const char *name)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    size_t length = strlen(name);
    memcpy(addr.sun_path + 1, name, length);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    JOB_CHECK(connect(fd, (struct sockaddr *)&addr,
                      (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)) ==
              0);
    return fd;
}

/* Sends bytes and expects the other side to hang up, saying at most a challenge. */
static void annoy(int fd, const void *data, size_t size, bool end)
{
    uint8_t answer[HOST_CHALLENGE_BYTES + 1];
    struct timeval limit = {.tv_sec = 8};
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    (void)!send(fd, data, size, MSG_NOSIGNAL);
    if (end)
        (void)shutdown(fd, SHUT_WR);
    ssize_t got = recv(fd, answer, sizeof(answer), MSG_WAITALL);
    JOB_CHECK(got <= HOST_CHALLENGE_BYTES && (got >= 0 || errno == ECONNRESET));
    close(fd);
}

/* An authentic client that then breaks the rules of frames. */
static int impostor(int port, struct host_channel *channel)
{
    uint8_t token[32], key[HOST_KEY_BYTES], nonce[HOST_NONCE_BYTES] = {9};
    JOB_CHECK(base_parse_hex(JOB_TOKEN_A, token, sizeof(token)) == HDL_OK);
    host_channel_job_key(token, 0, key);
    struct host_channel_opts opts = {
        .purpose = HOST_PURPOSE_AGENT, .max_frame = 4096, .key = key, .nonce = nonce};
    struct host_channel_out out;
    uint8_t data[HOST_CHALLENGE_BYTES];
    int fd = connect_port(port);
    host_channel_init(channel, &opts);
    host_channel_start(channel, &out);
    JOB_CHECK(write(fd, out.reply, out.reply_size) == (ssize_t)out.reply_size);
    JOB_CHECK(recv(fd, data, sizeof(data), MSG_WAITALL) == (ssize_t)sizeof(data));
    JOB_CHECK(host_channel_input(channel, data, sizeof(data), &out) ==
              HOST_CHANNEL_OPENED);
    JOB_CHECK(write(fd, out.reply, out.reply_size) == (ssize_t)out.reply_size);
    return fd;
}

static void break_frames(int port)
{
    struct host_channel channel;
    uint8_t frame[HOST_LENGTH_BYTES + 5 + HOST_TAG_BYTES];
    memcpy(frame + HOST_LENGTH_BYTES, "\1junk", 5);
    /* authentic, but no message */
    int fd = impostor(port, &channel);
    host_channel_seal(&channel, frame + 4, 5, frame, frame + 9);
    annoy(fd, frame, sizeof(frame), false);
    /* forged */
    fd = impostor(port, &channel);
    host_channel_seal(&channel, frame + 4, 5, frame, frame + 9);
    frame[6] ^= 1;
    annoy(fd, frame, sizeof(frame), false);
    /* oversized, truncated */
    annoy(impostor(port, &channel), "\377\377\377\377", 4, false);
    annoy(impostor(port, &channel), "\5\0\0\0\1ju", 7, true);
}

static void run_among_strangers(struct job *job, int number)
{
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    if (number == 1) {
        uint8_t noise[512];
        memset(noise, 0xa5, sizeof(noise));
        const char *name = host_identity(rank.host)->socket_name;
        annoy(connect_port(job->port), noise, sizeof(noise), false);
        annoy(connect_port(job->port), "GET / HTTP/1.0\r\n\r\n", 18, false);
        annoy(connect_port(job->port), "HEDDLE\r\n\1\0\0\0", 12, true);
        annoy(connect_port(job->port), "HEDDLE\r\n\11\0\0\0\1\0\0\0", 16, false);
        annoy(connect_unix(name), noise, sizeof(noise), false);
        annoy(connect_unix(name), "HEDDLE\r\n\1\0\0\0\1\0\0\0", 16, true);
        break_frames(job->port);
        __atomic_store_n(&job->board->go, 1, __ATOMIC_RELEASE);
    }
    job_await_go(job);
    struct host_group_stats stats;
    host_group_stats(rank.group, &stats);
    job->board->values[number] = stats.refused;
    /* The job did not notice: a second group can be made. */
    struct job_rank other = rank;
    job_rank_group(&other, "second");
    JOB_CHECK(rank.commits == 0);
    /* No quicker rank leaves the first one before all have looked. */
    job_ready(job);
    job_await(&job->board->ready, (uint32_t)job->num_ranks);
    host_group_leave(other.group, BASE_NS_PER_S);
    host_group_close(other.group);
    job_rank_leave(&rank);
}

static void strangers_are_refused_and_counted(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_among_strangers};
    job_start(&job);
    struct job_board *board = job.board;
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait(&job, i), 0);
    /* Four by their handshake, three by their frames; the fourth frame was authentic. */
    assert_true(board->values[0] >= 7);
    assert_int_equal(board->values[1], 2);
    assert_int_equal(board->values[2], 0);
    munmap(board, sizeof(*board));
}

/* --------------------------------------------------------------------- descriptors */

static void run_descriptors(struct job *job, int number)
{
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    const struct host_identity *identity = host_identity(rank.host);
    int fd = memfd_create("heddle-test", MFD_CLOEXEC);
    JOB_CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    JOB_CHECK(pwrite(fd, &number, sizeof(number), 0) == sizeof(number));
    JOB_CHECK(host_offer_fd(rank.host, 5, 77, fd) == HDL_OK);
    JOB_CHECK(host_offer_fd(rank.host, 5, 78, fd) == HDL_EBUSY);
    snprintf(job->board->texts[number], sizeof(job->board->texts[number]), "%s",
             identity->socket_name);
    job_ready(job);
    job_await(&job->board->ready, (uint32_t)job->num_ranks);
    for (int i = 0; i < job->num_ranks; i++) {
        const char *name = job->board->texts[i];
        int theirs = -1, value = -1;
        JOB_CHECK(host_fetch_fd(rank.host, name, 5, 77, BASE_NS_PER_S * 5, &theirs) ==
                  HDL_OK);
        JOB_CHECK(pread(theirs, &value, sizeof(value), 0) == sizeof(value) && value == i);
        JOB_CHECK(fcntl(theirs, F_GETFD) == FD_CLOEXEC);
        close(theirs);
        JOB_CHECK(host_fetch_fd(rank.host, name, 5, 78, BASE_NS_PER_S * 5, &theirs) ==
                  HDL_EINVAL);
        JOB_CHECK(host_fetch_fd(rank.host, name, 6, 77, BASE_NS_PER_S * 5, &theirs) ==
                  HDL_EINVAL);
    }
    int none;
    JOB_CHECK(host_fetch_fd(rank.host, "heddle-nobody", 5, 77, BASE_NS_PER_S, &none) ==
              HDL_EPEER);
    job_ready(job);
    job_await(&job->board->ready, 2 * (uint32_t)job->num_ranks);
    host_withdraw_fd(rank.host, 5);
    JOB_CHECK(host_fetch_fd(rank.host, identity->socket_name, 5, 77, 0, &none) ==
              HDL_EINVAL);
    close(fd);
    host_destroy(rank.host);
}

static void descriptors_travel(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_descriptors};
    job_start(&job);
    job_finish(&job);
}

/* -------------------------------------------------------------------- forks, exits */

static int count_sockets(void)
{
    int count = 0;
    for (int fd = 0; fd < 256; fd++) {
        char path[64], target[64];
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        ssize_t got = readlink(path, target, sizeof(target));
        if (got > 7 && memcmp(target, "socket:", 7) == 0)
            count++;
    }
    return count;
}

static void run_and_fork(struct job *job, int number)
{
    int before = count_sockets();
    struct job_rank rank;
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    JOB_CHECK(count_sockets() > before);
    pid_t child = fork();
    JOB_CHECK(child >= 0);
    if (child == 0) {
        if (count_sockets() != before)
            _exit(2);
        if (host_check(rank.host) != HDL_ENOTSUP || !strstr(base_detail(), "fork"))
            _exit(3);
        host_group_abort(rank.group);
        host_group_close(rank.group);
        host_destroy(rank.host);
        if (number == 1)
            pause(); /* outlives its parent */
        _exit(0);
    }
    job->board->values[number] = (uint64_t)child;
    int status = 0;
    if (number != 1)
        JOB_CHECK(waitpid(child, &status, 0) == child && status == 0);
    job_ready(job);
    job_await(&job->board->ready, (uint32_t)job->num_ranks);
    if (number == 1)
        kill(getpid(), SIGKILL);
    job_await(&rank.commits, 1);
    JOB_CHECK(rank.absent == 2);
    job_rank_leave(&rank);
}

/* A forked child that lives on does not hide its parent's death. */
static void forked_children_hold_nothing(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_and_fork};
    job_start(&job);
    struct job_board *board = job.board;
    for (int i = 0; i < 3; i++)
        assert_int_equal(job_wait(&job, i), i == 1 ? 128 + SIGKILL : 0);
    kill((pid_t)board->values[1], SIGKILL);
    munmap(board, sizeof(*board));
}

static void run_and_exit(struct job *job, int number)
{
    struct job_rank *rank = calloc(1, sizeof(*rank));
    job_rank_join(job, number, rank);
    job_rank_group(rank, "world");
    if (number == 2)
        exit(0); /* without destroying anything */
    if (number == 0) {
        job_await(&rank->commits, 1);
        exit(0); /* the coordinator: waits for rank 1 */
    }
    job_await(&rank->commits, 1);
    JOB_CHECK(rank->absent == 4);
    usleep(300000);
    JOB_CHECK(rank->fail_status == HDL_OK);
    job_rank_leave(rank);
    free(rank);
}

static void exit_without_destroy(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_and_exit};
    job_start(&job);
    job_finish(&job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_find_each_other),
        cmocka_unit_test(token_is_derived_if_there_is_none),
        cmocka_unit_test(two_jobs_share_a_port),
        cmocka_unit_test(foreign_server_on_the_port),
        cmocka_unit_test(job_restarts_on_its_port),
        cmocka_unit_test(contexts_one_after_the_other),
        cmocka_unit_test(contexts_side_by_side),
        cmocka_unit_test(wrong_token_is_told),
        cmocka_unit_test(missing_coordinator_is_told),
        cmocka_unit_test(both_versions_are_told),
        cmocka_unit_test(killed_rank_becomes_absent),
        cmocka_unit_test(killed_coordinator_is_told),
        cmocka_unit_test(strangers_are_refused_and_counted),
        cmocka_unit_test(descriptors_travel),
        cmocka_unit_test(forked_children_hold_nothing),
        cmocka_unit_test(exit_without_destroy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
