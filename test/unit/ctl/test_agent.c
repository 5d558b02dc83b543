/* SPDX-License-Identifier: Apache-2.0 */
/* The agent of rank 1 alone, spoken to message by message: what it says again after a
 * connection was lost, and which groups go on without the coordinator. */
#include "unit.h"

#include "base/env.h"
#include "ctl/agent.h"
#include "ctl/msg.h"

enum { RANKS = 4, DONE = 128, KEY = 5, GROUP = 77 };
#define SECOND INT64_C(1000000000)

struct done {
    enum ctl_action_kind kind;
    enum ctl_msg_type said; /* of CTL_DO_SEND */
    enum hdl_status status;
    uint64_t rank_epoch, term;
    bool flag;
};

struct scene {
    struct base_env env;
    struct ctl_agent *agent;
    int64_t now;
    uint64_t epoch;
    struct done done[DONE];
    int num_done;
};

static uint64_t rank_epoch(uint32_t rank)
{
    return ctl_rank_epoch(rank, 1);
}

static void note(struct scene *s, const struct ctl_action *action)
{
    struct done *done = &s->done[s->num_done++];
    assert_true(s->num_done < DONE);
    *done = (struct done){.kind = action->kind, .status = action->status};
    if (action->kind != CTL_DO_SEND)
        return;
    struct ctl_msg msg;
    assert_ok(ctl_msg_decode(&s->env, action->bytes->data, action->bytes->size, &msg));
    done->said = msg.type;
    done->rank_epoch = msg.rank_epoch;
    done->flag = msg.flag;
    done->term = msg.hello.term;
    ctl_msg_release(&s->env, &msg);
}

static void feed(struct scene *s, const struct ctl_agent_event *event)
{
    struct ctl_actions actions = {.env = &s->env};
    assert_ok(ctl_agent_step(s->agent, event, s->now, &actions));
    for (size_t k = 0; k < actions.count; k++)
        note(s, &actions.items[k]);
    ctl_actions_free(&actions);
}

static void feed_kind(struct scene *s, enum ctl_agent_event_kind kind)
{
    feed(s, &(struct ctl_agent_event){.kind = kind, .key = KEY, .text = ""});
}

static void hear(struct scene *s, struct ctl_msg msg)
{
    msg.group = GROUP;
    msg.key = KEY;
    struct ctl_bytes *bytes = ctl_msg_encode(&s->env, &msg);
    assert_non_null(bytes);
    feed(s, &(struct ctl_agent_event){
                .kind = CTL_AGENT_MESSAGE, .data = bytes->data, .size = bytes->size});
    ctl_bytes_unref(bytes);
}

static const struct done *last(const struct scene *s, enum ctl_action_kind kind,
                               enum ctl_msg_type said)
{
    for (int i = s->num_done; i > 0; i--) {
        if (s->done[i - 1].kind == kind && s->done[i - 1].said == said)
            return &s->done[i - 1];
    }
    return NULL;
}

static int count(const struct scene *s, enum ctl_action_kind kind)
{
    int n = 0;
    for (int i = 0; i < s->num_done; i++)
        n += s->done[i].kind == kind;
    return n;
}

static void welcome(struct scene *s, bool standalone, bool collecting, uint64_t term)
{
    feed_kind(s, CTL_AGENT_CONNECTED);
    hear(s, (struct ctl_msg){
                .type = CTL_MSG_WELCOME,
                .rank_epoch = rank_epoch(1),
                .epoch = ctl_epoch(term, 0),
                .settings = {.standalone = standalone, .collecting = collecting}});
}

static void pass(struct scene *s, int64_t ns)
{
    for (int64_t end = s->now + ns; s->now < end; s->now += SECOND / 100)
        feed_kind(s, CTL_AGENT_TICK);
}

/* Loses the connection and makes it again; s->done is what followed the WELCOME. */
static void reconnect(struct scene *s, bool collecting, uint64_t term)
{
    feed_kind(s, CTL_AGENT_DISCONNECTED);
    s->num_done = 0;
    while (count(s, CTL_DO_CONNECT) == 0)
        pass(s, SECOND / 100);
    s->num_done = 0;
    welcome(s, true, collecting, term);
}

/* A view of ranks `first` to 2; attach: to be reached before it holds. */
static void hear_view(struct scene *s, uint32_t first, bool attach)
{
    struct ctl_slot_change slots[RANKS];
    struct ctl_view *view = ctl_view_new(&s->env, RANKS, 0);
    assert_non_null(view);
    view->epoch = s->epoch;
    for (uint32_t r = first; r < 3; r++)
        view->slots[r] = (struct ctl_slot){
            .rank_epoch = rank_epoch(r), .last = CTL_X_FOREVER, .active = true};
    struct ctl_msg msg = {.type = CTL_MSG_VIEW, .epoch = view->epoch, .flag = attach};
    msg.change = ctl_view_whole(view, slots);
    hear(s, msg);
    ctl_view_unref(view);
}

static void attached(struct scene *s)
{
    feed(s, &(struct ctl_agent_event){
                .kind = CTL_AGENT_ATTACHED, .key = KEY, .epoch = s->epoch, .text = ""});
}

/* An agent that is in the job and has registered with a group. */
static void open_scene(struct scene *s, bool standalone, bool join)
{
    static const uint32_t ranks[RANKS] = {0, 1, 2, 3};
    const struct ctl_agent_options options = {
        .job_rank = 1, .incarnation = 3, .host_id = 7, .pid = 100, .socket_name = "here"};
    const struct ctl_registration registration = {.name = "world",
                                                  .capacity = RANKS,
                                                  .slot = 1,
                                                  .num_founders = 3,
                                                  .ranks = ranks,
                                                  .num_ranks = RANKS,
                                                  .join = join,
                                                  .timeout_ns = 100 * SECOND,
                                                  .endpoint = "blob",
                                                  .endpoint_size = 4};
    memset(s, 0, sizeof(*s));
    base_env_init(&s->env);
    s->env.log_level = -1;
    s->now = SECOND;
    s->epoch = ctl_epoch(1, 1);
    assert_ok(ctl_agent_create(&s->env, &options, s->now, &s->agent));
    feed_kind(s, CTL_AGENT_TICK);
    welcome(s, standalone, false, 1);
    feed(s, &(struct ctl_agent_event){
                .kind = CTL_AGENT_REGISTER, .key = KEY, .registration = &registration});
    hear(s, (struct ctl_msg){
                .type = CTL_MSG_REGISTERED, .slot = 1, .rank_epoch = rank_epoch(1)});
}

/* The group of ranks `first` to 2 runs. */
static void open_group(struct scene *s, bool standalone, uint32_t first)
{
    open_scene(s, standalone, false);
    hear_view(s, first, true);
    attached(s);
    hear(s, (struct ctl_msg){.type = CTL_MSG_START, .epoch = s->epoch});
    assert_int_equal(count(s, CTL_DO_START), 1);
}

static void link_is(struct scene *s, uint32_t rank, bool up)
{
    feed(s, &(struct ctl_agent_event){.kind = CTL_AGENT_LINK,
                                      .key = KEY,
                                      .rank_epoch = rank_epoch(rank),
                                      .up = up});
}

/* Joiners are attached to one after the other; one that has gone meanwhile is not. */
static void test_joiners_one_by_one(void **state)
{
    struct scene s;
    open_group(&s, true, 0);
    s.num_done = 0;
    for (uint32_t registration = 1; registration < 4; registration++)
        hear(&s, (struct ctl_msg){.type = CTL_MSG_ENDPOINT,
                                  .slot = 3,
                                  .rank_epoch = ctl_rank_epoch(3, registration),
                                  .endpoint = "blob",
                                  .endpoint_size = 4});
    assert_int_equal(count(&s, CTL_DO_ATTACH), 1);
    hear(&s, (struct ctl_msg){
                 .type = CTL_MSG_CLOSED, .slot = 3, .rank_epoch = ctl_rank_epoch(3, 2)});
    attached(&s);
    assert_true(last(&s, CTL_DO_SEND, CTL_MSG_ATTACHED)->rank_epoch ==
                ctl_rank_epoch(3, 1));
    assert_int_equal(count(&s, CTL_DO_ATTACH), 2);
    attached(&s);
    assert_true(last(&s, CTL_DO_SEND, CTL_MSG_ATTACHED)->rank_epoch ==
                ctl_rank_epoch(3, 3));
    assert_int_equal(count(&s, CTL_DO_ATTACH), 2);
    ctl_agent_destroy(s.agent);
}

/* A coordinator may not know what it was told: links that are down are told again. */
static void test_links_are_told_again(void **state)
{
    struct scene s;
    open_group(&s, true, 0);
    link_is(&s, 0, false);
    link_is(&s, 2, false);
    link_is(&s, 0, true);
    reconnect(&s, false, 1);
    const struct done *link = last(&s, CTL_DO_SEND, CTL_MSG_LINK);
    assert_non_null(link);
    assert_true(link->rank_epoch == rank_epoch(2) && !link->flag);
    s.num_done = 0;
    link_is(&s, 2, true);
    reconnect(&s, false, 1);
    assert_null(last(&s, CTL_DO_SEND, CTL_MSG_LINK));
    ctl_agent_destroy(s.agent);
}

/* So is an abort that could not be told. */
static void test_an_abort_is_told_later(void **state)
{
    struct scene s;
    open_group(&s, true, 0);
    feed_kind(&s, CTL_AGENT_DISCONNECTED);
    feed_kind(&s, CTL_AGENT_ABORT);
    assert_int_equal(count(&s, CTL_DO_LEFT), 1);
    assert_null(last(&s, CTL_DO_SEND, CTL_MSG_ABORT));
    reconnect(&s, false, 1);
    assert_non_null(last(&s, CTL_DO_SEND, CTL_MSG_ABORT));
    ctl_agent_destroy(s.agent);
}

/* To a coordinator that was started again: the own term, also if only a view has shown
 * it, and the state of the group, also of a joiner that may be a member already. */
static void test_a_restart(void **state)
{
    for (int join = 0; join < 2; join++) {
        struct scene s;
        open_scene(&s, true, join);
        s.epoch = ctl_epoch(4, 1);
        hear_view(&s, 0, true);
        assert_int_equal(count(&s, CTL_DO_ATTACH), 1);
        reconnect(&s, true, 5);
        assert_int_equal(last(&s, CTL_DO_SEND, CTL_MSG_STATE) != NULL, join);
        hear_view(&s, 0, false);
        assert_int_equal(count(&s, CTL_DO_START), 1);
        s.epoch = ctl_epoch(9, 1);
        hear_view(&s, 0, false);
        reconnect(&s, true, 9);
        assert_true(last(&s, CTL_DO_SEND, CTL_MSG_HELLO)->term == 9);
        assert_non_null(last(&s, CTL_DO_SEND, CTL_MSG_STATE));
        ctl_agent_destroy(s.agent);
    }
}

/* Does a group of ranks `first` to 2 end when the coordinator is lost? All ranks are of
 * this host. */
static bool ends_without_coordinator(bool standalone, uint32_t first, bool link_down)
{
    struct scene s;
    open_group(&s, standalone, first);
    for (uint32_t r = 0; r < 3; r++)
        if (r != 1)
            hear(&s, (struct ctl_msg){.type = CTL_MSG_NEIGHBOUR,
                                      .rank_epoch = rank_epoch(r),
                                      .flag = true,
                                      .pid = 100,
                                      .text = "there"});
    if (link_down)
        link_is(&s, 2, false);
    feed_kind(&s, CTL_AGENT_DISCONNECTED);
    pass(&s, 3 * SECOND);
    assert_int_equal(count(&s, CTL_DO_COORDINATOR_LOST), 1);
    const struct done *fail = last(&s, CTL_DO_FAIL, 0);
    assert_true(!fail || fail->status == HDL_ECOORD);
    ctl_agent_destroy(s.agent);
    return fail;
}

/* It goes on if the end of every member would be noticed, and nothing is to be decided.
 */
static void test_which_groups_go_on(void **state)
{
    assert_false(ends_without_coordinator(true, 0, false));
    assert_true(ends_without_coordinator(true, 0, true));
    assert_false(ends_without_coordinator(false, 1, false));
    assert_true(ends_without_coordinator(false, 1, true));
    assert_true(ends_without_coordinator(false, 0, false));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_joiners_one_by_one),
        cmocka_unit_test(test_links_are_told_again),
        cmocka_unit_test(test_an_abort_is_told_later),
        cmocka_unit_test(test_a_restart),
        cmocka_unit_test(test_which_groups_go_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
