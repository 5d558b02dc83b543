/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator alone, spoken to message by message: who must know whom before a joiner
 * is let in, and who is told what when somebody goes or comes back. */
#include "unit.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/env.h"
#include "ctl/coordinator.h"
#include "ctl/msg.h"

enum { RANKS = 5, HEARD = 128, GROUP_KEY = 9 };
#define SECOND INT64_C(1000000000)

/* What a rank was sent; the fields that these tests look at. */
struct heard {
    enum ctl_msg_type type;
    uint32_t slot, num_slots;
    uint64_t rank_epoch, epoch, id, link_from, link_to;
    enum hdl_status status;
    bool flag;
};

struct job {
    struct base_env env;
    int64_t now;
    struct ctl_coordinator *coordinator;
    uint64_t next_conn, conns[RANKS];
    uint64_t process[RANKS], member[RANKS]; /* rank epochs, in the job and in the group */
    uint64_t host[RANKS];
    bool manual;               /* lost ranks stay */
    uint64_t group, epoch;     /* of the newest committed view */
    uint64_t issued, finished; /* operations, by every rank */
    struct heard heard[RANKS][HEARD];
    int num_heard[RANKS];
};

static void hear(struct job *job, int rank, const struct ctl_bytes *bytes)
{
    struct ctl_msg msg;
    assert_ok(ctl_msg_decode(&job->env, bytes->data, bytes->size, &msg));
    assert_true(job->num_heard[rank] < HEARD);
    job->heard[rank][job->num_heard[rank]++] =
        (struct heard){.type = msg.type,
                       .slot = msg.slot,
                       .num_slots = msg.num_slots,
                       .rank_epoch = msg.rank_epoch,
                       .epoch = msg.epoch,
                       .id = msg.id,
                       .status = msg.status,
                       .link_from = msg.change.link_from,
                       .link_to = msg.change.link_to,
                       .flag = msg.flag};
    if (msg.type == CTL_MSG_WELCOME)
        job->process[rank] = msg.rank_epoch;
    if (msg.type == CTL_MSG_REGISTERED) {
        job->member[rank] = msg.rank_epoch;
        job->group = msg.group;
    }
    if (msg.type == CTL_MSG_START || msg.type == CTL_MSG_COMMIT)
        job->epoch = msg.epoch;
    ctl_msg_release(&job->env, &msg);
}

static void step(struct job *job, const struct ctl_coordinator_event *event)
{
    struct ctl_actions actions = {.env = &job->env};
    assert_ok(ctl_coordinator_step(job->coordinator, event, job->now, &actions));
    for (size_t k = 0; k < actions.count; k++) {
        const struct ctl_action *action = &actions.items[k];
        for (int i = 0; i < RANKS; i++) {
            if (action->kind == CTL_DO_SEND && job->conns[i] == action->conn)
                hear(job, i, action->bytes);
        }
    }
    ctl_actions_free(&actions);
}

static void say(struct job *job, int rank, struct ctl_msg msg)
{
    msg.group = msg.group ? msg.group : job->group;
    struct ctl_bytes *bytes = ctl_msg_encode(&job->env, &msg);
    assert_non_null(bytes);
    step(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_MESSAGE,
                                              .conn = job->conns[rank],
                                              .data = bytes->data,
                                              .size = bytes->size});
    ctl_bytes_unref(bytes);
}

static void forget(struct job *job)
{
    memset(job->num_heard, 0, sizeof(job->num_heard));
}

/* The newest of a type since `forget`, or NULL. */
static const struct heard *last(const struct job *job, int rank, enum ctl_msg_type type)
{
    for (int i = job->num_heard[rank]; i > 0; i--) {
        if (job->heard[rank][i - 1].type == type)
            return &job->heard[rank][i - 1];
    }
    return NULL;
}

/* `incarnation` tells one process of a rank from the next. */
static void hello(struct job *job, int rank, uint64_t incarnation, uint64_t rank_epoch,
                  struct ctl_group_state *state)
{
    job->conns[rank] = ++job->next_conn;
    step(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_OPENED,
                                              .conn = job->conns[rank]});
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_HELLO,
                         .hello = {.magic = CTL_WIRE_MAGIC,
                                   .version = CTL_WIRE_VERSION,
                                   .rank = (uint32_t)rank,
                                   .incarnation = incarnation,
                                   .rank_epoch = rank_epoch,
                                   .host_id = job->host[rank],
                                   .pid = 100,
                                   .socket_name = "here",
                                   .num_groups = state ? 1 : 0,
                                   .groups = state}});
}

static struct ctl_registration registration_of(const struct job *job, int rank,
                                               int founders, bool join)
{
    static const uint32_t ranks[RANKS] = {0, 1, 2, 3, 4};
    return (struct ctl_registration){.name = "world",
                                     .capacity = RANKS,
                                     .slot = (uint32_t)rank,
                                     .num_founders = (uint32_t)founders,
                                     .ranks = ranks,
                                     .num_ranks = RANKS,
                                     .join = join,
                                     .auto_deactivate = !job->manual,
                                     .auto_sync = !job->manual,
                                     .timeout_ns = 10 * SECOND,
                                     .endpoint = "blob",
                                     .endpoint_size = 4};
}

static void enter_as(struct job *job, int rank, int founders, bool join)
{
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_REGISTER,
                         .key = GROUP_KEY,
                         .registration = registration_of(job, rank, founders, join)});
}

static void enter(struct job *job, int rank, int founders)
{
    enter_as(job, rank, founders, rank >= founders);
}

/* 0 = all of the newest view that it was sent. */
static void attached(struct job *job, int rank, uint64_t to)
{
    const struct heard *view = last(job, rank, CTL_MSG_VIEW);
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_ATTACHED,
                         .epoch = view ? view->epoch : 0,
                         .rank_epoch = to,
                         .text = ""});
}

/* epoch: of the view that the proposer has. */
static void propose_seen(struct job *job, int rank, enum ctl_proposal_kind kind,
                         uint32_t num_slots, uint32_t *slots, uint64_t epoch)
{
    static uint64_t id;
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_PROPOSE,
                         .id = ++id,
                         .kind = kind,
                         .epoch = epoch,
                         .num_slots = num_slots,
                         .slots = slots,
                         .timeout_ns = SECOND});
}

static void propose(struct job *job, int rank, enum ctl_proposal_kind kind, uint32_t slot)
{
    propose_seen(job, rank, kind, kind == CTL_PROPOSE_JOIN ? 0 : 1, &slot, job->epoch);
}

/* The sign of life that it was asked for. */
static void answer_probe(struct job *job, int rank)
{
    const struct heard *probe = last(job, rank, CTL_MSG_HEARTBEAT);
    assert_true(probe && probe->flag);
    say(job, rank, (struct ctl_msg){.type = CTL_MSG_HEARTBEAT, .id = probe->id});
}

/* The rank has issued and finished as many operations as `job` says. */
static void answer(struct job *job, int rank)
{
    const struct heard *prepare = last(job, rank, CTL_MSG_PREPARE);
    uint64_t x = ctl_x_end(job->finished), published[RANKS] = {x, x, x, x, x};
    assert_non_null(prepare);
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_ANSWER,
                         .answer = {.ballot = prepare->epoch,
                                    .ready = x,
                                    .done = x,
                                    .next = 1 + job->issued,
                                    .num_dead = prepare->num_slots,
                                    .published = published}});
}

static void found(struct job *job, int founders)
{
    for (int i = 0; i < founders; i++)
        enter(job, i, founders);
    for (int i = 0; i < founders; i++)
        attached(job, i, 0);
    assert_non_null(last(job, 0, CTL_MSG_START));
}

/* `far`: ranks (bits) that are not on the coordinator's host. */
static void open_job_on(struct job *job, int founders, unsigned far)
{
    const struct ctl_coordinator_options options = {
        .num_ranks = RANKS, .host_id = 7, .link_timeout_ns = SECOND};
    memset(job, 0, sizeof(*job));
    base_env_init(&job->env);
    job->env.log_level = -1;
    job->now = SECOND;
    assert_ok(ctl_coordinator_create(&job->env, &options, job->now, &job->coordinator));
    for (int i = 0; i < RANKS; i++) {
        job->host[i] = far >> i & 1 ? 8 : 7;
        hello(job, i, 100 + (uint64_t)i, 0, NULL);
    }
    if (founders > 0)
        found(job, founders);
}

static void open_job(struct job *job, int founders)
{
    open_job_on(job, founders, 0);
}

static void pass(struct job *job, int64_t ns)
{
    for (int64_t end = job->now + ns; job->now < end;) {
        job->now += SECOND / 100;
        step(job, &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_TICK});
    }
}

static void exited(struct job *job, int rank)
{
    say(job, 0,
        (struct ctl_msg){.type = CTL_MSG_EXITED, .rank_epoch = job->process[rank]});
}

static void link_down(struct job *job, int rank, int peer)
{
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_LINK, .rank_epoch = job->member[peer]});
}

/* Asks to join; reaches `members` of the founders, and they reach it. */
static void join(struct job *job, int rank, int founders, int members)
{
    enter(job, rank, founders);
    propose(job, rank, CTL_PROPOSE_JOIN, 0);
    attached(job, rank, 0);
    for (int i = 0; i < members; i++)
        attached(job, i, job->member[rank]);
}

static void know_each_other(struct job *job, int a, int b)
{
    attached(job, a, job->member[b]);
    attached(job, b, job->member[a]);
}

/* A joiner that is let in is sent the view as committed. */
static bool is_in(const struct job *job, int rank)
{
    const struct heard *view = last(job, rank, CTL_MSG_VIEW);
    return view && !view->flag;
}

/* Two members let in one joiner each, during a ballot: the next commit could take both,
 * but they do not reach each other yet. */
static void test_joiners_of_two_proposals(void **state)
{
    struct job job;
    open_job(&job, 3);
    exited(&job, 2);
    join(&job, 3, 3, 2);
    join(&job, 4, 3, 2);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    propose(&job, 1, CTL_PROPOSE_ACTIVATE, 4);
    for (int ballot = 0; ballot < 2; ballot++)
        for (int i = 0; i < 2; i++)
            answer(&job, i);
    assert_true(is_in(&job, 3));
    assert_false(is_in(&job, 4));
    know_each_other(&job, 3, 4);
    answer(&job, 0);
    answer(&job, 1);
    answer(&job, 3);
    assert_true(is_in(&job, 4));
    ctl_coordinator_destroy(job.coordinator);
}

/* Ranks that one call names come in together, or not yet. */
static void test_joiners_of_one_proposal(void **state)
{
    struct job job;
    uint32_t both[2] = {3, 4};
    open_job(&job, 2);
    join(&job, 3, 2, 2);
    join(&job, 4, 2, 2);
    propose_seen(&job, 0, CTL_PROPOSE_ACTIVATE, 2, both, job.epoch);
    attached(&job, 3, job.member[4]);
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    attached(&job, 4, job.member[3]);
    answer(&job, 0);
    answer(&job, 1);
    assert_true(is_in(&job, 3) && is_in(&job, 4));
    ctl_coordinator_destroy(job.coordinator);
}

/* What it attached to before another one was let in does not hold that one. */
static void test_a_joiner_lacks_who_came_since(void **state)
{
    struct job job;
    open_job(&job, 2);
    enter(&job, 3, 2);
    propose(&job, 3, CTL_PROPOSE_JOIN, 0);
    join(&job, 4, 2, 2);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 4);
    answer(&job, 0);
    answer(&job, 1);
    assert_true(is_in(&job, 4));
    attached(&job, 3, 0);
    for (int i = 0; i < RANKS; i++)
        if (i != 2 && i != 3)
            attached(&job, i, job.member[3]);
    forget(&job);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    attached(&job, 3, job.member[4]);
    assert_non_null(last(&job, 0, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
}

/* The time of its call is over: nobody lets it in any more. */
static void test_a_join_expires(void **state)
{
    struct job job;
    open_job(&job, 2);
    join(&job, 3, 2, 2);
    pass(&job, 2 * SECOND);
    assert_int_equal(last(&job, 3, CTL_MSG_PROPOSED)->status, HDL_ETIMEDOUT);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
}

/* Who names a rank that its own view has means its successor, if the rank has ended; who
 * has not seen it come in means this one. */
static void test_admitting_a_member(void **state)
{
    struct job job;
    uint32_t slot = 3;
    open_job(&job, 2);
    uint64_t before = job.epoch;
    join(&job, 3, 2, 2);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    answer(&job, 0);
    answer(&job, 1);
    forget(&job);
    propose_seen(&job, 1, CTL_PROPOSE_ACTIVATE, 1, &slot, before);
    assert_int_equal(last(&job, 1, CTL_MSG_PROPOSED)->status, HDL_OK);
    assert_null(last(&job, 3, CTL_MSG_HEARTBEAT));
    forget(&job);
    propose_seen(&job, 1, CTL_PROPOSE_ACTIVATE, 1, &slot, job.epoch);
    assert_null(last(&job, 1, CTL_MSG_PROPOSED));
    answer_probe(&job, 3);
    assert_int_equal(last(&job, 1, CTL_MSG_PROPOSED)->status, HDL_OK);
    ctl_coordinator_destroy(job.coordinator);
}

/* Who removes itself hears of it when all others have the view, or when they are even
 * behind its last operation. */
static void test_removing_oneself(void **state)
{
    for (int closed = 0; closed < 2; closed++) {
        struct job job;
        open_job(&job, 3);
        job.issued = 1;
        propose(&job, 0, CTL_PROPOSE_DEACTIVATE, 0);
        for (int i = 0; i < 3; i++)
            answer(&job, i);
        assert_null(last(&job, 0, CTL_MSG_PROPOSED));
        if (closed) {
            for (int i = 0; i < 3; i++)
                say(&job, i, (struct ctl_msg){.type = CTL_MSG_FINISHED, .x = UINT64_MAX});
        } else {
            answer_probe(&job, 1);
            assert_null(last(&job, 0, CTL_MSG_PROPOSED));
            answer_probe(&job, 2);
        }
        assert_int_equal(last(&job, 0, CTL_MSG_PROPOSED)->status, HDL_OK);
        ctl_coordinator_destroy(job.coordinator);
    }
}

static void test_the_last_one_is_not_removed(void **state)
{
    struct job job;
    uint32_t both[2] = {0, 1};
    open_job(&job, 2);
    propose_seen(&job, 0, CTL_PROPOSE_DEACTIVATE, 2, both, job.epoch);
    assert_int_equal(last(&job, 0, CTL_MSG_PROPOSED)->status, HDL_EINVAL);
    ctl_coordinator_destroy(job.coordinator);
}

/* A joiner reaches another one, which ends; its successor is let in first. */
static void test_a_joiner_is_replaced(void **state)
{
    struct job job;
    open_job(&job, 2);
    join(&job, 3, 2, 2);
    join(&job, 4, 2, 2);
    know_each_other(&job, 3, 4);
    forget(&job);
    exited(&job, 4);
    for (int i = 0; i < 2; i++) {
        const struct heard *closed = last(&job, i, CTL_MSG_CLOSED);
        assert_non_null(closed);
        assert_int_equal(closed->slot, 4);
        assert_true(closed->rank_epoch == job.member[4]);
    }
    hello(&job, 4, 200, 0, NULL);
    join(&job, 4, 2, 2);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 4);
    answer(&job, 0);
    answer(&job, 1);
    assert_true(is_in(&job, 4));
    forget(&job);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    know_each_other(&job, 3, 4);
    assert_non_null(last(&job, 0, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
}

static void lose_connection(struct job *job, int rank)
{
    uint64_t conn = job->conns[rank];
    job->conns[rank] = 0;
    step(job,
         &(struct ctl_coordinator_event){.kind = CTL_COORDINATOR_CLOSED, .conn = conn});
}

/* Back after a lost connection a member hears of the joiners that it does not reach. */
static void test_a_member_comes_back(void **state)
{
    struct job job;
    open_job(&job, 2);
    struct ctl_group_state mine = {.group = job.group, .epoch = job.epoch};
    join(&job, 3, 2, 1);
    for (int reaches = 0; reaches < 2; reaches++) {
        lose_connection(&job, 1);
        forget(&job);
        hello(&job, 1, 101, job.process[1], &mine);
        const struct heard *endpoint = last(&job, 1, CTL_MSG_ENDPOINT);
        assert_int_equal(endpoint != NULL, !reaches);
        assert_true(reaches || endpoint->rank_epoch == job.member[3]);
        attached(&job, 1, job.member[3]);
    }
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
}

/* Its word that it aborts was lost with the connection: its agent knows no such group. */
static void test_a_member_comes_back_without_its_group(void **state)
{
    struct job job;
    open_job(&job, 2);
    lose_connection(&job, 1);
    hello(&job, 1, 101, job.process[1], NULL);
    const struct heard *prepare = last(&job, 0, CTL_MSG_PREPARE);
    assert_non_null(prepare);
    assert_int_equal(prepare->num_slots, 1);
    assert_null(last(&job, 1, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
}

/* A process ended; its successor is a member in the same slot. */
static void replace(struct job *job, int rank, int founders)
{
    exited(job, rank);
    for (int i = 0; i < founders; i++)
        if (i != rank)
            answer(job, i);
    for (int i = 0; i < founders; i++)
        if (i != rank && last(job, i, CTL_MSG_WATCH))
            say(job, i, (struct ctl_msg){.type = CTL_MSG_FINISHED, .x = UINT64_MAX});
    hello(job, rank, 300, 0, NULL);
    enter_as(job, rank, founders, true);
    propose(job, rank, CTL_PROPOSE_JOIN, 0);
    attached(job, rank, 0);
    for (int i = 0; i < founders; i++)
        if (i != rank)
            attached(job, i, job->member[rank]);
    propose(job, rank == 0 ? 1 : 0, CTL_PROPOSE_ACTIVATE, (uint32_t)rank);
    for (int i = 0; i < founders; i++)
        if (i != rank)
            answer(job, i);
    assert_true(is_in(job, rank));
    forget(job);
}

/* Of two ranks whose link stays down the one that is farther from the coordinator goes,
 * of equals the one that was admitted later, then the one of the higher number. */
static void test_who_goes_for_a_link(void **state)
{
    static const struct {
        unsigned far;
        int replaced, gone;
    } cases[] = {{0, -1, 1}, {1, -1, 0}, {2, -1, 1}, {0, 0, 0}, {2, 0, 1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct job job;
        open_job_on(&job, 3, cases[i].far);
        if (cases[i].replaced >= 0)
            replace(&job, cases[i].replaced, 3);
        link_down(&job, 0, 1);
        pass(&job, SECOND / 2);
        assert_null(last(&job, 2, CTL_MSG_PREPARE));
        pass(&job, SECOND);
        assert_non_null(last(&job, 2, CTL_MSG_PREPARE));
        for (int r = 0; r < 2; r++)
            assert_int_equal(last(&job, r, CTL_MSG_FENCED) != NULL, r == cases[i].gone);
        ctl_coordinator_destroy(job.coordinator);
    }
}

/* A link that was down to a rank that is replaced says nothing of its successor. */
static void test_a_link_of_a_former_rank(void **state)
{
    struct job job;
    open_job(&job, 3);
    link_down(&job, 0, 1);
    replace(&job, 1, 3);
    pass(&job, 2 * SECOND);
    for (int r = 0; r < 3; r++)
        assert_null(last(&job, r, CTL_MSG_FENCED));
    ctl_coordinator_destroy(job.coordinator);
}

/* Where nobody is removed the open operations fail for the link, which the views say
 * until everybody has ended them. */
static void test_a_link_where_all_stay(void **state)
{
    struct job job;
    open_job(&job, 0);
    job.manual = true;
    found(&job, 4);
    job.issued = 4;
    link_down(&job, 0, 1);
    pass(&job, SECOND * 3 / 2);
    for (int ballot = 0; ballot < 3; ballot++) {
        job.finished = ballot == 2 ? 4 : 0;
        if (ballot > 0)
            propose(&job, 0, CTL_PROPOSE_DEACTIVATE, 4 - (uint32_t)ballot);
        for (int i = 0; i < 4; i++)
            answer(&job, i);
        const struct heard *commit = last(&job, 0, CTL_MSG_COMMIT);
        assert_int_equal(commit->link_from, 1);
        assert_int_equal(commit->link_to, ballot == 2 ? 0 : 4);
    }
    assert_null(last(&job, 1, CTL_MSG_FENCED));
    ctl_coordinator_destroy(job.coordinator);
}

/* A process of the coordinator's host whose connection closed has ended at once, another
 * has time to come back; not the time in which the coordinator itself did not run. */
static void test_grace(void **state)
{
    struct job job;
    open_job_on(&job, 3, 4);
    lose_connection(&job, 2);
    pass(&job, SECOND * 3 / 10);
    assert_null(last(&job, 0, CTL_MSG_PREPARE));
    pass(&job, SECOND * 3 / 10);
    assert_non_null(last(&job, 0, CTL_MSG_PREPARE));
    ctl_coordinator_destroy(job.coordinator);
    for (int64_t stopped = 0; stopped < 2; stopped++) {
        open_job_on(&job, 3, 4);
        lose_connection(&job, 1);
        job.now += stopped * 20 * SECOND;
        pass(&job, SECOND / 100);
        assert_null(last(&job, 0, CTL_MSG_PREPARE));
        pass(&job, SECOND / 10);
        assert_non_null(last(&job, 0, CTL_MSG_PREPARE));
        ctl_coordinator_destroy(job.coordinator);
    }
}

/* To a coordinator that was started again: a group of ranks 0 and 1. */
static void report(struct job *job, int rank, bool joiner)
{
    struct ctl_slot_change slots[RANKS];
    struct ctl_view *view = ctl_view_new(&job->env, RANKS, 0);
    assert_non_null(view);
    view->epoch = job->epoch;
    for (uint32_t r = 0; r < 2; r++)
        view->slots[r] = (struct ctl_slot){
            .rank_epoch = job->member[r], .last = CTL_X_FOREVER, .active = true};
    hello(job, rank, 100 + (uint64_t)rank, job->process[rank], NULL);
    say(job, rank,
        (struct ctl_msg){.type = CTL_MSG_STATE,
                         .key = GROUP_KEY,
                         .slot = (uint32_t)rank,
                         .rank_epoch = job->member[rank],
                         .epoch = view->epoch,
                         .flag = !joiner,
                         .registration = registration_of(job, rank, 2, joiner),
                         .change = ctl_view_whole(view, slots)});
    ctl_view_unref(view);
}

/* A joiner that ends before all others have reported is forgotten, and another process
 * has its place. */
static void test_a_joiner_ends_during_a_restart(void **state)
{
    const struct ctl_coordinator_options options = {
        .num_ranks = RANKS, .host_id = 7, .standalone = true, .restarted = true};
    struct job job;
    open_job(&job, 2);
    join(&job, 3, 2, 2);
    ctl_coordinator_destroy(job.coordinator);
    assert_ok(ctl_coordinator_create(&job.env, &options, job.now, &job.coordinator));
    report(&job, 0, false);
    report(&job, 3, true);
    exited(&job, 3);
    report(&job, 1, false);
    forget(&job);
    hello(&job, 3, 400, 0, NULL);
    join(&job, 3, 2, 2);
    propose(&job, 0, CTL_PROPOSE_ACTIVATE, 3);
    answer(&job, 0);
    answer(&job, 1);
    assert_true(is_in(&job, 3));
    ctl_coordinator_destroy(job.coordinator);
}

static int num_neighbours(const struct job *job, int rank, uint64_t about)
{
    int count = 0;
    for (int i = 0; i < job->num_heard[rank]; i++)
        count += job->heard[rank][i].type == CTL_MSG_NEIGHBOUR &&
                 job->heard[rank][i].rank_epoch == about;
    return count;
}

/* Ranks of a host watch each other, whoever came first. */
static void test_neighbours(void **state)
{
    struct job job;
    open_job_on(&job, 2, 4);
    for (int i = 0; i < RANKS; i++)
        for (int k = 0; k < RANKS; k++)
            assert_int_equal(num_neighbours(&job, i, job.process[k]),
                             i != k && job.host[i] == job.host[k]);
    ctl_coordinator_destroy(job.coordinator);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_joiners_of_two_proposals),
        cmocka_unit_test(test_joiners_of_one_proposal),
        cmocka_unit_test(test_a_joiner_is_replaced),
        cmocka_unit_test(test_a_joiner_lacks_who_came_since),
        cmocka_unit_test(test_a_join_expires),
        cmocka_unit_test(test_admitting_a_member),
        cmocka_unit_test(test_removing_oneself),
        cmocka_unit_test(test_the_last_one_is_not_removed),
        cmocka_unit_test(test_a_member_comes_back),
        cmocka_unit_test(test_a_member_comes_back_without_its_group),
        cmocka_unit_test(test_who_goes_for_a_link),
        cmocka_unit_test(test_a_link_of_a_former_rank),
        cmocka_unit_test(test_a_link_where_all_stay),
        cmocka_unit_test(test_grace),
        cmocka_unit_test(test_a_joiner_ends_during_a_restart),
        cmocka_unit_test(test_neighbours),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
