/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads of one process: so a race detector sees all sides. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "jobs.h"

enum { THREADS = 4 };

static struct job job = {.num_ranks = THREADS};
static struct job_board board;
static char place[32];

static void open_rank(struct job_rank *rank, int number)
{
    memset(rank, 0, sizeof(*rank));
    rank->job = &job;
    rank->rank = number;
    base_env_init(&rank->env);
    struct host_opts opts = {.rank = number,
                             .num_ranks = THREADS,
                             .coordinator = place,
                             .token = JOB_TOKEN_A,
                             .timeout_ns = 20 * BASE_NS_PER_S};
    JOB_CHECK(host_create(&rank->env, &opts, &rank->host) == HDL_OK);
}

static void *live(void *argument)
{
    int number = (int)(intptr_t)argument;
    struct job_rank rank;
    open_rank(&rank, number);
    for (int turn = 0; turn < 5; turn++) {
        char name[16];
        snprintf(name, sizeof(name), "group %d", turn);
        job_rank_group(&rank, name);
        struct host_group_stats stats;
        host_group_stats(rank.group, &stats);
        if (turn == 3 && number == 2)
            host_group_abort(rank.group);
        else if (turn == 3)
            job_await(&rank.commits, 1);
        else
            host_group_leave(rank.group, 5 * BASE_NS_PER_S);
        host_group_close(rank.group);
        __atomic_store_n(&rank.commits, 0, __ATOMIC_RELEASE);
    }
    char text[1024];
    JOB_CHECK(host_describe(rank.host, text, sizeof(text)) == strlen(text));
    JOB_CHECK(strstr(text, "joined") && strstr(text, "neighbour") && strstr(text, "pid"));
    JOB_CHECK(host_describe(rank.host, text, 8) == 7);
    rank.group = NULL;
    job_rank_leave(&rank);
    return NULL;
}

static void run_threads(void *(*rank_main)(void *))
{
    pthread_t threads[THREADS];
    memset(&board, 0, sizeof(board));
    job.board = &board;
    snprintf(place, sizeof(place), "127.0.0.1:%d", job_free_port());
    for (intptr_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, rank_main, (void *)i), 0);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_join(threads[i], NULL), 0);
}

static void groups_come_and_go(void **state)
{
    (void)state;
    run_threads(live);
}

/* ------------------------------------------------------------------------ mismatch */

static void *differ(void *argument)
{
    int number = (int)(intptr_t)argument;
    struct job_rank rank;
    open_rank(&rank, number);
    struct ctl_param param = {"chunk_bytes", number == 2 ? "4096" : "8192"};
    struct host_group_opts opts = {.name = "world",
                                   .rank = (uint32_t)number,
                                   .num_founders = THREADS,
                                   .capacity = THREADS,
                                   .params = &param,
                                   .num_params = 1,
                                   .timeout_ns = 10 * BASE_NS_PER_S};
    JOB_CHECK(host_group_register(rank.host, &opts, &rank.group, &rank.view) ==
              HDL_ECONFIG);
    JOB_CHECK(strstr(base_detail(), "chunk_bytes") && strstr(base_detail(), "4096") &&
              strstr(base_detail(), "8192"));
    /* The coordinator must not leave before the last one has come. */
    job_ready(&job);
    job_await(&board.ready, THREADS);
    host_destroy(rank.host);
    return NULL;
}

static void different_parameters_fail_on_all(void **state)
{
    (void)state;
    run_threads(differ);
}

static void *wait_in_vain(void *argument)
{
    int number = (int)(intptr_t)argument;
    struct job_rank rank;
    open_rank(&rank, number);
    struct host_group_opts opts = {.name = "world",
                                   .rank = (uint32_t)number,
                                   .num_founders = THREADS,
                                   .capacity = THREADS,
                                   .timeout_ns = 300 * BASE_NS_PER_MS};
    if (number != 3) {
        enum hdl_status status =
            host_group_register(rank.host, &opts, &rank.group, &rank.view);
        JOB_CHECK(status == HDL_ETIMEDOUT);
        JOB_CHECK(strstr(base_detail(), "3") != NULL);
    }
    job_ready(&job);
    job_await(&board.ready, THREADS);
    host_destroy(rank.host);
    return NULL;
}

static void missing_founder_is_named(void **state)
{
    (void)state;
    run_threads(wait_in_vain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_come_and_go),
        cmocka_unit_test(different_parameters_fail_on_all),
        cmocka_unit_test(missing_founder_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
