/* SPDX-License-Identifier: Apache-2.0 */
/* Stopped processes, broken connections, late observers: what is evidence and what is
 * not. */
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
#include <unistd.h>

#include <cmocka.h>

#include "jobs.h"

static void start_impatient(struct job *job, int number, struct job_rank *rank)
{
    JOB_CHECK(setenv("HEDDLE_DEAD_AFTER", "300ms", 1) == 0);
    job_rank_join(job, number, rank);
    job_rank_group(rank, "world");
    job_ready(job);
}

static void stop_for(struct job *job, unsigned mask, useconds_t time)
{
    for (int i = 0; i < job->num_ranks; i++)
        if (mask >> i & 1)
            kill(job->pids[i], SIGSTOP);
    usleep(time);
    for (int i = 0; i < job->num_ranks; i++)
        if (mask >> i & 1)
            kill(job->pids[i], SIGCONT);
}

static void run_stopped(struct job *job, int number)
{
    struct job_rank rank;
    start_impatient(job, number, &rank);
    job_await(&rank.commits, 1);
    if (number == 2)
        JOB_CHECK(rank.fail_status == HDL_EFENCED);
    else
        JOB_CHECK(rank.fail_status == HDL_OK && rank.absent == 4);
    if (number == 0) { /* the one with the coordinator */
        struct host_group_stats stats;
        host_group_stats(rank.group, &stats);
        JOB_CHECK(stats.evidence_silence == 1 && stats.evidence_exit == 0);
    }
    /* The coordinator's rank stays until the other has been told. */
    job_ready(job);
    job_await(&job->board->ready, 2 * (uint32_t)job->num_ranks);
    job_rank_leave(&rank);
}

static void stopped_rank_is_fenced(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_stopped};
    job_start(&job);
    job_await_ready(&job, 3);
    stop_for(&job, 4, 1500000);
    job_finish(&job);
}

static void run_undisturbed(struct job *job, int number)
{
    struct job_rank rank;
    start_impatient(job, number, &rank);
    job_await_go(job);
    JOB_CHECK(rank.commits == 0);
    job_ready(job);
    job_await(&job->board->ready, 2 * (uint32_t)job->num_ranks);
    job_rank_leave(&rank);
}

/* As when a virtual machine is paused: everybody's clock went on, nobody was silent. */
static void all_stopped_is_no_silence(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_undisturbed};
    job_start(&job);
    job_await_ready(&job, 3);
    for (int i = 0; i < 3; i++) {
        stop_for(&job, 7, 700000);
        usleep(200000);
    }
    __atomic_store_n(&job.board->go, 1, __ATOMIC_RELEASE);
    job_finish(&job);
}

static void short_stop_is_no_death(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_undisturbed};
    job_start(&job);
    job_await_ready(&job, 3);
    for (int i = 0; i < 3; i++) {
        stop_for(&job, 1u << i, 100000);
        usleep(200000);
    }
    __atomic_store_n(&job.board->go, 1, __ATOMIC_RELEASE);
    job_finish(&job);
}

/* Ends this process's connection to the coordinator, as a network would. */
static int break_connections(int port)
{
    int broken = 0;
    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_in peer;
        socklen_t size = sizeof(peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &size) != 0 ||
            peer.sin_family != AF_INET || ntohs(peer.sin_port) != port)
            continue;
        (void)shutdown(fd, SHUT_RDWR);
        broken++;
    }
    return broken;
}

static void run_broken(struct job *job, int number)
{
    struct job_rank rank;
    if (number == 2)
        JOB_CHECK(setenv("HEDDLE_HOST", "another", 1) == 0);
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    for (int turn = 0; number == 2 && turn < 3; turn++) {
        struct host_group_stats stats;
        JOB_CHECK(break_connections(job->port) == 1);
        for (int i = 0; i < 5000; i++) {
            host_group_stats(rank.group, &stats);
            if (stats.reconnects == (uint64_t)turn + 1)
                break;
            usleep(1000);
        }
        JOB_CHECK(stats.reconnects == (uint64_t)turn + 1);
        usleep(20000);
    }
    job_ready(job);
    job_await(&job->board->ready, (uint32_t)job->num_ranks);
    JOB_CHECK(rank.commits == 0);
    /* The connection is good for more. */
    struct job_rank other = rank;
    job_rank_group(&other, "second");
    host_group_leave(other.group, BASE_NS_PER_S);
    host_group_close(other.group);
    job_rank_leave(&rank);
}

static void broken_connection_is_made_again(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 3, .token = JOB_TOKEN_A, .run = run_broken};
    job_start(&job);
    job_finish(&job);
}

static void run_on_two_hosts(struct job *job, int number)
{
    struct job_rank rank;
    if (number >= 2)
        JOB_CHECK(setenv("HEDDLE_HOST", "another", 1) == 0);
    job_rank_join(job, number, &rank);
    job_rank_group(&rank, "world");
    JOB_CHECK(number < 2 || !host_single_host(rank.host));
    job_ready(job);
    job_await_go(job);
    if (number == 2) {
        job->board->killed_at = base_now_ns();
        kill(getpid(), SIGKILL);
    }
    job_await(&rank.commits, 1);
    JOB_CHECK(rank.absent == 4);
    job_rank_leave(&rank);
}

/* An exit report from the victim's host ends the grace. */
static void neighbour_ends_the_grace(void **state)
{
    (void)state;
    struct job job = {.num_ranks = 4, .token = JOB_TOKEN_A, .run = run_on_two_hosts};
    job_start(&job);
    job_await_ready(&job, 4);
    __atomic_store_n(&job.board->go, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 4; i++)
        assert_int_equal(job_wait(&job, i), i == 2 ? 128 + SIGKILL : 0);
    print_message("told after %.2f ms\n",
                  (double)(job.board->told_at[0] - job.board->killed_at) / 1e6);
    munmap(job.board, sizeof(*job.board));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stopped_rank_is_fenced),
        cmocka_unit_test(all_stopped_is_no_silence),
        cmocka_unit_test(short_stop_is_no_death),
        cmocka_unit_test(broken_connection_is_made_again),
        cmocka_unit_test(neighbour_ends_the_grace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
