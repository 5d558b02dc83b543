/* SPDX-License-Identifier: Apache-2.0 */
/* The n-th allocation fails: an error code, nothing leaked, nothing hangs. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "ctl/view.h"
#include "host/host.h"

struct counter {
    atomic_long left; /* allocations until one fails */
    atomic_long live;
};

static void *count_alloc(void *user, size_t size)
{
    struct counter *counter = user;
    if (atomic_fetch_sub(&counter->left, 1) == 1)
        return NULL;
    void *memory = malloc(size);
    if (memory)
        atomic_fetch_add(&counter->live, 1);
    return memory;
}

static void count_release(void *user, void *memory)
{
    struct counter *counter = user;
    if (memory)
        atomic_fetch_sub(&counter->live, 1);
    free(memory);
}

static void quiet(void *user, enum base_log_level level, const char *line)
{
    (void)user;
    (void)level;
    (void)line;
}

static void freeze(void *user, const struct ctl_prepare *prepare,
                   struct ctl_answer *answer)
{
    (void)user;
    (void)prepare;
    answer->ready = answer->done = ctl_x_end(0);
    answer->next = 1;
}

static void commit(void *user, struct ctl_view *view)
{
    (void)user;
    (void)view;
}

static void watch_done(void *user, uint64_t x)
{
    (void)user;
    (void)x;
}

static void on_fail(void *user, enum hdl_status status, const char *text)
{
    (void)user;
    (void)status;
    (void)text;
}

/* A whole life; returns the first failure. */
static enum hdl_status live(struct base_env *env)
{
    struct host *host;
    struct host_opts opts = {.num_ranks = 1, .timeout_ns = 5 * BASE_NS_PER_S};
    enum hdl_status status = host_create(env, &opts, &host);
    if (status)
        return status;
    struct host_group *group;
    struct ctl_view *view;
    struct host_group_opts group_opts = {.name = "g",
                                         .num_founders = 1,
                                         .capacity = 2,
                                         .timeout_ns = 5 * BASE_NS_PER_S,
                                         .hooks = {.freeze = freeze,
                                                   .commit = commit,
                                                   .watch_done = watch_done,
                                                   .fail = on_fail}};
    status = host_offer_fd(host, 1, 2, 0);
    if (status == HDL_OK)
        status = host_group_register(host, &group_opts, &group, &view);
    if (status == HDL_OK) {
        status = host_group_connected(group, HDL_OK, NULL);
        if (status == HDL_OK)
            host_group_leave(group, 5 * BASE_NS_PER_S);
        host_group_close(group);
    }
    host_withdraw_fd(host, 1);
    host_destroy(host);
    return status;
}

static void every_allocation_may_fail(void **state)
{
    (void)state;
    int failures = 0;
    for (long n = 1; n < 1000; n++) {
        struct counter counter;
        atomic_init(&counter.left, n);
        atomic_init(&counter.live, 0);
        struct base_env env;
        base_env_init(&env);
        env.alloc = count_alloc;
        env.release = count_release;
        env.alloc_user = &counter;
        env.log = quiet;
        int64_t start = base_now_ns();
        enum hdl_status status = live(&env);
        assert_true(base_now_ns() - start < 4 * BASE_NS_PER_S);
        assert_int_equal(atomic_load(&counter.live), 0);
        if (status)
            failures++;
        /* Where the coordinator was hit, this rank is told by other statuses. */
        if (status > 0 || status == HDL_EINTERNAL)
            fail_msg("allocation %ld: %s: %s", n, base_status_name(status),
                     base_detail());
        if (atomic_load(&counter.left) > 0)
            break; /* a life without a failure: all have been tried */
    }
    print_message("%d lives ended with an error\n", failures);
    assert_true(failures > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
