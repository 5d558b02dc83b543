/* SPDX-License-Identifier: Apache-2.0 */
/* Starting, watching and ending the processes of a test's job. */
#include "jobs.h"

#include <arpa/inet.h>
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
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

void job_check_failed(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, condition, base_detail());
    _exit(1);
}

/* Below the ports that the kernel gives to connections, of which one might take it before
 * the job does; 16 for each job, since some look through so many. */
int job_free_port(void)
{
    static unsigned turn;
    struct sockaddr_in addr = {.sin_family = AF_INET};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (bool taken = true; taken;) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        unsigned place = ((unsigned)getpid() * 7919 + turn++) % 1000;
        addr.sin_port = htons((uint16_t)(16000 + 16 * place));
        taken = bind(fd, (struct sockaddr *)&addr, sizeof(addr)) != 0;
        close(fd);
    }
    return ntohs(addr.sin_port);
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof(text), "%d", value);
    JOB_CHECK(setenv(name, text, 1) == 0);
}

static void set_environment(const struct job *job, int rank)
{
    set_number("RANK", rank);
    set_number("WORLD_SIZE", job->num_ranks);
    set_number("MASTER_PORT", job->port);
    JOB_CHECK(setenv("MASTER_ADDR", "127.0.0.1", 1) == 0);
    if (job->token)
        JOB_CHECK(setenv("HEDDLE_TOKEN", job->token, 1) == 0);
    else
        unsetenv("HEDDLE_TOKEN");
}

void job_start_rank(struct job *job, int rank)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        set_environment(job, rank);
        job->run(job, rank);
        fflush(NULL);
        exit(0);
    }
    job->pids[rank] = pid;
}

void job_start(struct job *job)
{
    job->board = mmap(NULL, sizeof(*job->board), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(job->board, MAP_FAILED);
    if (job->port == 0)
        job->port = job_free_port();
    for (int rank = 0; rank < job->num_ranks; rank++)
        job_start_rank(job, rank);
}

int job_wait(struct job *job, int rank)
{
    for (int turn = 0; turn < 20000; turn++) {
        int status;
        if (waitpid(job->pids[rank], &status, WNOHANG) == job->pids[rank])
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        usleep(1000);
    }
    kill(job->pids[rank], SIGKILL);
    (void)waitpid(job->pids[rank], NULL, 0);
    return -1;
}

void job_finish(struct job *job)
{
    int codes[JOB_RANKS_MAX];
    for (int rank = 0; rank < job->num_ranks; rank++)
        codes[rank] = job_wait(job, rank);
    for (int rank = 0; rank < job->num_ranks; rank++)
        assert_int_equal(codes[rank], 0);
    munmap(job->board, sizeof(*job->board));
}

void job_await(const uint32_t *word, uint32_t value)
{
    for (int turn = 0; __atomic_load_n(word, __ATOMIC_ACQUIRE) < value; turn++) {
        JOB_CHECK(turn < 50000);
        usleep(200);
    }
}

void job_await_ready(struct job *job, uint32_t count)
{
    for (int turn = 0; __atomic_load_n(&job->board->ready, __ATOMIC_ACQUIRE) < count;
         turn++) {
        assert_true(turn < 50000);
        usleep(200);
    }
}

void job_ready(struct job *job)
{
    __atomic_add_fetch(&job->board->ready, 1, __ATOMIC_RELEASE);
}

void job_await_go(struct job *job)
{
    job_await(&job->board->go, 1);
}

/* --------------------------------------------------------------------------- ranks */

void job_rank_env(struct job *job, int rank, struct job_rank *out)
{
    memset(out, 0, sizeof(*out));
    out->job = job;
    out->rank = rank;
    base_env_init(&out->env);
    JOB_CHECK(base_config_load(&out->env.config) == HDL_OK);
    out->env.log_level = out->env.config.log;
    out->env.log_rank = rank;
}

void job_rank_join(struct job *job, int rank, struct job_rank *out)
{
    job_rank_env(job, rank, out);
    struct host_opts opts = {.timeout_ns = 10 * BASE_NS_PER_S};
    JOB_CHECK(host_create(&out->env, &opts, &out->host) == HDL_OK);
}

static void freeze(void *user, const struct ctl_prepare *prepare,
                   struct ctl_answer *answer)
{
    (void)user;
    answer->ready = answer->done = ctl_x_end(0);
    answer->next = 1;
    answer->num_open = 0;
    for (uint32_t i = 0; i < prepare->num_dead; i++)
        answer->published[i] = ctl_x_end(0);
}

/* Contexts side by side have one number. */
static void note_told(struct job_rank *rank)
{
    __atomic_store_n(&rank->job->board->told_at[rank->rank], base_now_ns(),
                     __ATOMIC_RELAXED);
}

static void commit(void *user, struct ctl_view *view)
{
    struct job_rank *rank = user;
    uint64_t absent = 0;
    for (uint32_t i = 0; i < view->capacity && i < 64; i++)
        if (view->slots[i].absent)
            absent |= UINT64_C(1) << i;
    rank->absent = absent;
    rank->num_absent = view->num_absent;
    note_told(rank);
    __atomic_add_fetch(&rank->commits, 1, __ATOMIC_RELEASE);
}

static void watch_done(void *user, uint64_t x)
{
    struct job_rank *rank = user;
    host_group_finished(rank->group, x);
}

static void on_fail(void *user, enum hdl_status status, const char *text)
{
    (void)text;
    struct job_rank *rank = user;
    rank->fail_status = status;
    note_told(rank);
    __atomic_add_fetch(&rank->commits, 1, __ATOMIC_RELEASE);
}

void job_rank_group(struct job_rank *rank, const char *name)
{
    char blob[32];
    snprintf(blob, sizeof(blob), "blob of rank %d", rank->rank);
    uint32_t size = (uint32_t)host_num_ranks(rank->host);
    struct host_group_opts opts = {.name = name,
                                   .rank = (uint32_t)rank->rank,
                                   .num_founders = size,
                                   .capacity = size,
                                   .blob = blob,
                                   .blob_bytes = strlen(blob) + 1,
                                   .timeout_ns = 10 * BASE_NS_PER_S,
                                   .hooks = {.user = rank,
                                             .freeze = freeze,
                                             .commit = commit,
                                             .watch_done = watch_done,
                                             .fail = on_fail}};
    JOB_CHECK(host_group_register(rank->host, &opts, &rank->group, &rank->view) ==
              HDL_OK);
    JOB_CHECK(host_group_connected(rank->group, HDL_OK, NULL) == HDL_OK);
}

void job_rank_leave(struct job_rank *rank)
{
    if (rank->group)
        host_group_leave(rank->group, 2 * BASE_NS_PER_S);
    host_group_close(rank->group);
    host_destroy(rank->host);
}
