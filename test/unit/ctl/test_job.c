/* SPDX-License-Identifier: Apache-2.0 */
/* Founding a group, without a simulator: agents and coordinator, messages at once. */
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/env.h"
#include "ctl/agent.h"
#include "ctl/coordinator.h"
#include "ctl/msg.h"
#include "faults.h"

enum { RANKS = 3, QUEUE = 512 };
#define SECOND INT64_C(1000000000)

struct item {
    int to; /* -1 = coordinator */
    uint64_t conn;
    struct ctl_bytes *bytes;
};

struct job {
    struct base_env env;
    int64_t now;
    struct ctl_coordinator *coordinator;
    struct ctl_agent *agents[RANKS];
    uint64_t conns[RANKS];
    uint64_t next_conn;
    uint32_t restarts;
    enum hdl_status status[RANKS]; /* of the group; HDL_PENDING = nothing yet */
    char text[RANKS][256];
    bool started[RANKS], refused[RANKS], closed[RANKS];
    bool dead;    /* out of memory somewhere */
    int num_told; /* lines of the agents' logs about who is awaited */
    struct item queue[QUEUE];
    size_t head, tail;
};

static void push(struct job *job, int to, uint64_t conn, struct ctl_bytes *bytes)
{
    assert_true(job->tail < QUEUE);
    job->queue[job->tail++] = (struct item){to, conn, ctl_bytes_ref(bytes)};
}

static void agent(struct job *job, int i, const struct ctl_agent_event *event);

static void coordinator(struct job *job, const struct ctl_coordinator_event *event)
{
    struct ctl_actions actions = {.env = &job->env};
    if (!job->coordinator)
        return;
    if (ctl_coordinator_step(job->coordinator, event, job->now, &actions) != HDL_OK)
        job->dead = true;
    for (size_t k = 0; k < actions.count; k++) {
        const struct ctl_action *action = &actions.items[k];
        for (int i = 0; i < RANKS; i++) {
            if (job->conns[i] != action->conn || action->conn == 0)
                continue;
            if (action->kind == CTL_DO_SEND)
                push(job, i, action->conn, action->bytes);
            job->closed[i] |= action->kind == CTL_DO_CLOSE;
        }
    }
    ctl_actions_free(&actions);
}

static void carry_out(struct job *job, int i, const struct ctl_action *action)
{
    switch (action->kind) {
    case CTL_DO_CONNECT:
        job->conns[i] = ++job->next_conn;
        coordinator(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_OPENED,
                                                         .conn = job->conns[i]});
        agent(job, i, &(struct ctl_agent_event){.kind = CTL_AGENT_CONNECTED});
        break;
    case CTL_DO_SEND:
        push(job, -1, job->conns[i], action->bytes);
        break;
    case CTL_DO_ATTACH:
        agent(job, i,
              &(struct ctl_agent_event){.kind = CTL_AGENT_ATTACHED,
                                        .key = action->key,
                                        .epoch = action->view->epoch,
                                        .text = ""});
        break;
    case CTL_DO_START:
        job->started[i] = true;
        job->status[i] = HDL_OK;
        break;
    case CTL_DO_LOG:
        job->num_told += !strcmp(action->text,
                                 "group world has waited 5 s for ranks 0, 2 to register");
        break;
    case CTL_DO_REFUSED:
        job->refused[i] = true;
        /* fall through */
    case CTL_DO_FAIL:
        job->status[i] = action->status;
        (void)snprintf(job->text[i], sizeof(job->text[i]), "%s", action->text);
        break;
    default:
        break;
    }
}

static void agent(struct job *job, int i, const struct ctl_agent_event *event)
{
    struct ctl_actions actions = {.env = &job->env};
    if (ctl_agent_step(job->agents[i], event, job->now, &actions) != HDL_OK)
        job->dead = true;
    for (size_t k = 0; k < actions.count && !actions.failed; k++)
        carry_out(job, i, &actions.items[k]);
    ctl_actions_free(&actions);
}

static void deliver(struct job *job)
{
    while (job->head < job->tail) {
        struct item item = job->queue[job->head++];
        if (job->head == job->tail)
            job->head = job->tail = 0;
        if (item.to < 0)
            coordinator(job,
                        &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                                        .conn = item.conn,
                                                        .data = item.bytes->data,
                                                        .size = item.bytes->size});
        else if (job->agents[item.to])
            agent(job, item.to,
                  &(struct ctl_agent_event){.kind = CTL_AGENT_MESSAGE,
                                            .data = item.bytes->data,
                                            .size = item.bytes->size});
        ctl_bytes_unref(item.bytes);
    }
}

static enum hdl_status start_agent(struct job *job, int i)
{
    struct ctl_agent_options options = {.job_rank = (uint32_t)i,
                                        .incarnation = 100 + ++job->next_conn,
                                        .host_id = (uint64_t)i + 1,
                                        .pid = 1000 + i,
                                        .socket_name = "here"};
    job->status[i] = HDL_PENDING;
    enum hdl_status status =
        ctl_agent_create(&job->env, &options, job->now, &job->agents[i]);
    if (status == HDL_OK)
        agent(job, i, &(struct ctl_agent_event){.kind = CTL_AGENT_TICK});
    deliver(job);
    return status;
}

static enum hdl_status job_start(struct job *job)
{
    struct ctl_coordinator_options options = {.num_ranks = RANKS, .host_id = 1};
    job->now = SECOND;
    enum hdl_status status =
        ctl_coordinator_create(&job->env, &options, job->now, &job->coordinator);
    for (int i = 0; i < RANKS && status == HDL_OK; i++)
        status = start_agent(job, i);
    return status;
}

static void job_open(struct job *job)
{
    base_env_init(&job->env);
    job->env.log_level = -1;
    assert_ok(job_start(job));
}

static void job_close(struct job *job)
{
    for (; job->head < job->tail; job->head++)
        ctl_bytes_unref(job->queue[job->head].bytes);
    for (int i = 0; i < RANKS; i++)
        ctl_agent_destroy(job->agents[i]);
    ctl_coordinator_destroy(job->coordinator);
}

static struct ctl_registration registration_of(int i, const char *value)
{
    static const uint32_t ranks[RANKS] = {0, 1, 2};
    static struct ctl_param params[RANKS];
    params[i] = (struct ctl_param){"chunk_bytes", value};
    return (struct ctl_registration){.name = "world",
                                     .capacity = RANKS,
                                     .slot = (uint32_t)i,
                                     .num_founders = RANKS,
                                     .ranks = ranks,
                                     .num_ranks = RANKS,
                                     .auto_deactivate = true,
                                     .auto_sync = true,
                                     .timeout_ns = 10 * SECOND,
                                     .params = &params[i],
                                     .num_params = 1,
                                     .endpoint = "blob",
                                     .endpoint_size = 4};
}

static void enter_as(struct job *job, int i, const char *value, uint64_t key)
{
    struct ctl_registration registration = registration_of(i, value);
    agent(job, i,
          &(struct ctl_agent_event){
              .kind = CTL_AGENT_REGISTER, .key = key, .registration = &registration});
    deliver(job);
}

static void enter(struct job *job, int i, const char *value)
{
    enter_as(job, i, value, 1);
}

static void pass(struct job *job, int64_t ns)
{
    for (int64_t end = job->now + ns; job->now < end; job->now += SECOND / 10) {
        coordinator(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_TICK});
        deliver(job);
        for (int i = 0; i < RANKS; i++) {
            if (job->agents[i])
                agent(job, i, &(struct ctl_agent_event){.kind = CTL_AGENT_TICK});
        }
        deliver(job);
    }
}

static void kill_agent(struct job *job, int i)
{
    uint64_t conn = job->conns[i];
    ctl_agent_destroy(job->agents[i]);
    job->agents[i] = NULL;
    job->conns[i] = 0;
    coordinator(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_CLOSED,
                                                     .conn = conn});
    deliver(job);
}

static void test_all_start(void **state)
{
    struct job job = {0};
    job_open(&job);
    for (int i = 0; i < RANKS; i++) {
        enter(&job, i, "64");
        assert_int_equal(job.started[0], i == RANKS - 1);
    }
    for (int i = 0; i < RANKS; i++) {
        assert_true(job.started[i]);
        const struct ctl_view *view = ctl_agent_view(job.agents[i], 1);
        assert_non_null(view);
        assert_int_equal(view->num_active, RANKS);
        assert_memory_equal(view->slots[2].endpoint->data, "blob", 4);
    }
    assert_int_equal(ctl_coordinator_num_live(job.coordinator), RANKS);
    job_close(&job);
}

/* Also on the rank that comes when it is already known. */
static void test_a_difference_fails_all(void **state)
{
    for (int odd = 1; odd < RANKS; odd++) {
        struct job job = {0};
        job_open(&job);
        for (int i = 0; i < RANKS; i++)
            enter(&job, i, i == odd ? "128" : "64");
        for (int i = 0; i < RANKS; i++) {
            assert_int_equal(job.status[i], HDL_ECONFIG);
            assert_non_null(strstr(job.text[i], "chunk_bytes"));
            assert_non_null(strstr(job.text[i], "64 on rank 0"));
            assert_non_null(
                strstr(job.text[i], odd == 1 ? "128 on rank 1" : "128 on rank 2"));
        }
        job_close(&job);
    }
}

static void test_timeout_lists_the_missing(void **state)
{
    struct job job = {0};
    job_open(&job);
    job.env.log_level = BASE_LOG_WARN;
    enter(&job, 1, "64");
    pass(&job, 4 * SECOND);
    assert_int_equal(job.num_told, 0);
    pass(&job, 7 * SECOND);
    assert_int_equal(job.num_told, 1);
    assert_int_equal(job.status[1], HDL_ETIMEDOUT);
    assert_string_equal(job.text[1], "group world: not seen within 10000 ms: ranks 0, 2");
    job_close(&job);
}

/* The others hear at once that a founder is lost, registered or not; those who come later
 * hear it too, and the next start is not blocked by what is left of the first. */
static void test_a_killed_founder_fails_the_others(void **state)
{
    for (int early = 0; early < 2; early++) {
        struct job job = {0};
        job_open(&job);
        enter(&job, 0, "64");
        if (early)
            enter(&job, 2, "64");
        kill_agent(&job, 2);
        pass(&job, SECOND); /* its grace ends */
        assert_int_equal(job.status[0], HDL_EPEER);
        assert_non_null(strstr(job.text[0], "rank 2 was lost"));
        enter(&job, 1, "64");
        assert_int_equal(job.status[1], HDL_EPEER);
        assert_non_null(strstr(job.text[1], "rank 2 was lost"));
        assert_ok(start_agent(&job, 2));
        for (int i = 0; i < RANKS; i++)
            enter_as(&job, i, "64", 2);
        for (int i = 0; i < RANKS; i++)
            assert_true(job.started[i]);
        const struct ctl_view *view = ctl_agent_view(job.agents[0], 2);
        assert_true(view->slots[2].rank_epoch == ctl_rank_epoch(2, 2));
        job_close(&job);
    }
}

/* All are started again, the killed one first: nobody is told of the failure before. */
static void test_a_second_start_is_not_blocked(void **state)
{
    struct job job = {0};
    job_open(&job);
    enter(&job, 0, "64");
    kill_agent(&job, 2);
    pass(&job, SECOND);
    assert_int_equal(job.status[0], HDL_EPEER);
    for (int i = 0; i < 2; i++)
        kill_agent(&job, i);
    pass(&job, SECOND);
    for (int i = RANKS - 1; i >= 0; i--) {
        assert_ok(start_agent(&job, i));
        enter(&job, i, "64");
    }
    for (int i = 0; i < RANKS; i++)
        assert_true(job.started[i]);
    job_close(&job);
}

/* The holder is asked at once; as it lives, the newcomer is refused with the reason. */
static void test_an_occupied_rank(void **state)
{
    struct job job = {0};
    job_open(&job);
    struct ctl_agent *holder = job.agents[2];
    uint64_t conn = job.conns[2];
    assert_ok(start_agent(&job, 2));
    struct ctl_agent *newcomer = job.agents[2];
    assert_int_equal(job.status[2], HDL_PENDING);
    job.agents[2] = holder;
    uint64_t newcomer_conn = job.conns[2];
    struct ctl_bytes *beat =
        ctl_msg_encode(&job.env, &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT, .id = 1});
    job.agents[2] = newcomer;
    job.conns[2] = newcomer_conn;
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                                      .conn = conn,
                                                      .data = beat->data,
                                                      .size = beat->size});
    deliver(&job);
    assert_int_equal(job.status[2], HDL_EINVAL);
    assert_non_null(strstr(job.text[2], "in use"));
    ctl_bytes_unref(beat);
    ctl_agent_destroy(holder);
    job_close(&job);
}

static uint64_t reconnects_of(const struct ctl_agent *a)
{
    struct ctl_agent_stats stats;
    ctl_agent_stats(a, &stats);
    return stats.reconnects;
}

static void restart_at(struct job *job, uint32_t turn)
{
    struct ctl_coordinator_options options = {.num_ranks = RANKS,
                                              .host_id = 1,
                                              .standalone = true,
                                              .restarted = true,
                                              .instance = job->next_conn,
                                              .turn = turn};
    ctl_coordinator_destroy(job->coordinator);
    assert_ok(ctl_coordinator_create(&job->env, &options, job->now, &job->coordinator));
}

static void restart(struct job *job)
{
    restart_at(job, ++job->restarts);
}

static void reconnect(struct job *job, struct ctl_agent *a)
{
    job->agents[1] = a;
    agent(job, 1, &(struct ctl_agent_event){.kind = CTL_AGENT_DISCONNECTED});
    pass(job, SECOND / 2);
}

/* A restarted coordinator knows no holder yet; one that comes back has its rank. */
static void test_a_newcomer_was_first(void **state)
{
    struct job job = {0};
    job_open(&job);
    struct ctl_agent *holder = job.agents[1];
    restart(&job);
    assert_ok(start_agent(&job, 1));
    struct ctl_agent *newcomer = job.agents[1];
    reconnect(&job, holder);
    assert_int_equal(reconnects_of(holder), 1);
    assert_false(job.refused[1]);
    ctl_agent_destroy(newcomer);
    job_close(&job);
}

/* A process that was taken for dead is back before its successor: the later one has the
 * rank, whichever comes first, and also if the other is gone again. */
static void test_a_fenced_one_was_first(void **state)
{
    for (int order = 0; order < 3; order++) {
        struct job job = {0};
        job_open(&job);
        struct ctl_agent *fenced = job.agents[1];
        coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_CLOSED,
                                                          .conn = job.conns[1]});
        job.agents[1] = NULL;
        pass(&job, SECOND);
        assert_ok(start_agent(&job, 1));
        struct ctl_agent *successor = job.agents[1];
        assert_false(job.refused[1]);
        restart(&job);
        if (order > 0)
            reconnect(&job, fenced);
        if (order == 2) {
            coordinator(&job, &(struct ctl_coordinator_event){
                                  .kind = CTL_COORDINATOR_CLOSED, .conn = job.conns[1]});
            job.agents[1] = NULL;
            pass(&job, SECOND);
        }
        reconnect(&job, successor);
        assert_int_equal(reconnects_of(successor), 1);
        assert_false(job.refused[1]);
        if (order == 0)
            reconnect(&job, fenced);
        assert_int_equal(reconnects_of(fenced), order > 0);
        ctl_agent_destroy(order == 0 ? successor : fenced);
        job_close(&job);
    }
}

/* Each came while a coordinator still collected, or the second one after that, which did
 * not hear of the first: it is in no group, and was fenced by nobody who still lives. */
static void test_two_came_in_between(void **state)
{
    for (int late = 0; late < 2; late++) {
        struct job job = {0};
        job_open(&job);
        ctl_agent_destroy(job.agents[1]);
        struct ctl_agent *came[2];
        for (int i = 0; i < 2; i++) {
            restart(&job);
            job.agents[1] = NULL;
            if (i == 1 && late)
                pass(&job, 10 * SECOND);
            assert_ok(start_agent(&job, 1));
            came[i] = job.agents[1];
        }
        restart(&job);
        reconnect(&job, came[1]);
        reconnect(&job, came[0]);
        assert_int_equal(reconnects_of(came[0]), 0);
        assert_int_equal(reconnects_of(came[1]), 1);
        ctl_agent_destroy(came[1]);
        job_close(&job);
    }
}

/* The clock on the wall goes back between two starts: a rank that was there before says
 * so, and the later process still has the rank. */
static void test_the_clock_was_set_back(void **state)
{
    struct job job = {0};
    job_open(&job);
    struct ctl_agent *came[2];
    for (int i = 0; i < 2; i++) {
        ctl_agent_destroy(i == 0 ? job.agents[1] : NULL);
        job.agents[1] = NULL;
        restart_at(&job, i == 0 ? 900 : 100);
        agent(&job, 0, &(struct ctl_agent_event){.kind = CTL_AGENT_DISCONNECTED});
        pass(&job, SECOND / 2);
        assert_ok(start_agent(&job, 1));
        came[i] = job.agents[1];
    }
    restart_at(&job, 200);
    reconnect(&job, came[0]);
    reconnect(&job, came[1]);
    assert_int_equal(reconnects_of(came[1]), 1);
    reconnect(&job, came[0]);
    assert_false(job.refused[1]);
    assert_int_equal(reconnects_of(came[0]), 1);
    ctl_agent_destroy(came[1]);
    job_close(&job);
}

/* Stopped while it collects, a coordinator has not waited for anybody. */
static void test_stopped_while_it_collects(void **state)
{
    struct job job = {0};
    job_open(&job);
    restart(&job);
    job.now += 20 * SECOND;
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_TICK});
    reconnect(&job, job.agents[1]);
    assert_int_equal(reconnects_of(job.agents[1]), 1);
    job_close(&job);
}

/* Nor has an agent tried to reach its coordinator. */
static void test_stopped_without_coordinator(void **state)
{
    struct job job = {0};
    job_open(&job);
    enter(&job, 1, "64");
    restart(&job);
    agent(&job, 1, &(struct ctl_agent_event){.kind = CTL_AGENT_DISCONNECTED});
    job.now += 2 * SECOND;
    agent(&job, 1, &(struct ctl_agent_event){.kind = CTL_AGENT_TICK});
    deliver(&job);
    assert_int_equal(job.status[1], HDL_PENDING);
    assert_int_equal(reconnects_of(job.agents[1]), 1);
    job_close(&job);
}

/* The coordinator ends while a process learns that it was taken for dead: what needs a
 * decision is told within its time, as everywhere, and not at its deadline. */
static void test_fenced_and_no_coordinator(void **state)
{
    struct job job = {0};
    job_open(&job);
    ctl_coordinator_destroy(job.coordinator);
    job.coordinator = NULL;
    struct ctl_bytes *bytes =
        ctl_msg_encode(&job.env, &(struct ctl_msg){.type = CTL_MSG_FENCED});
    push(&job, 1, job.conns[1], bytes);
    ctl_bytes_unref(bytes);
    deliver(&job);
    agent(&job, 1, &(struct ctl_agent_event){.kind = CTL_AGENT_DISCONNECTED});
    enter(&job, 1, "64");
    pass(&job, 2 * SECOND);
    assert_int_equal(job.status[1], HDL_ECOORD);
    job_close(&job);
}

static void test_another_version_is_refused(void **state)
{
    struct job job = {0};
    job_open(&job);
    struct ctl_msg msg = {
        .type = CTL_MSG_HELLO,
        .hello = {.magic = CTL_WIRE_MAGIC, .version = CTL_WIRE_VERSION + 1}};
    struct ctl_bytes *bytes = ctl_msg_encode(&job.env, &msg);
    job.conns[1] = 77; /* a new connection takes the agent's place in this test */
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_OPENED,
                                                      .conn = 77});
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                                      .conn = 77,
                                                      .data = bytes->data,
                                                      .size = bytes->size});
    deliver(&job);
    assert_int_equal(job.status[1], HDL_ECONFIG);
    assert_non_null(strstr(job.text[1], "wire version 5, the coordinator has 4"));
    assert_true(job.closed[1]);
    ctl_bytes_unref(bytes);
    job_close(&job);
}

static void test_garbage_closes_only_its_connection(void **state)
{
    struct job job = {0};
    job_open(&job);
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_OPENED,
                                                      .conn = 99});
    coordinator(&job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                                      .conn = 99,
                                                      .data = "nonsense",
                                                      .size = 8});
    for (int i = 0; i < RANKS; i++) {
        enter(&job, i, "64");
        assert_false(job.closed[i]);
    }
    assert_true(job.started[1]);
    job_close(&job);
}

/* The n-th allocation fails: an error code, nothing leaks, whoever is left can be freed.
 */
static void test_out_of_memory(void **state)
{
    for (long n = 0;; n++) {
        struct job job = {0};
        struct faults faults;
        base_env_init(&job.env);
        faults_init(&faults, &job.env, n);
        job.env.log_level = -1;
        enum hdl_status status = job_start(&job);
        for (int i = 0; i < RANKS && status == HDL_OK && !job.dead; i++)
            enter(&job, i, "64");
        job_close(&job);
        assert_int_equal(faults_live(&faults), 0);
        if (!faults_hit(&faults)) {
            assert_true(job.started[0]);
            break;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_start),
        cmocka_unit_test(test_a_difference_fails_all),
        cmocka_unit_test(test_timeout_lists_the_missing),
        cmocka_unit_test(test_a_killed_founder_fails_the_others),
        cmocka_unit_test(test_a_second_start_is_not_blocked),
        cmocka_unit_test(test_an_occupied_rank),
        cmocka_unit_test(test_a_newcomer_was_first),
        cmocka_unit_test(test_a_fenced_one_was_first),
        cmocka_unit_test(test_fenced_and_no_coordinator),
        cmocka_unit_test(test_two_came_in_between),
        cmocka_unit_test(test_the_clock_was_set_back),
        cmocka_unit_test(test_stopped_while_it_collects),
        cmocka_unit_test(test_stopped_without_coordinator),
        cmocka_unit_test(test_another_version_is_refused),
        cmocka_unit_test(test_garbage_closes_only_its_connection),
        cmocka_unit_test(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
