/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's entry: connections, dispatch of messages, timers. */
#include "ctl/coordinator.h"

#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

enum hdl_status ctl_coordinator_create(struct base_env *env,
                                       const struct ctl_coordinator_options *options,
                                       int64_t now, struct ctl_coordinator **coordinator)
{
    struct ctl_coordinator *c = base_alloc(env, 1, sizeof(*c));
    if (!c)
        return HDL_ENOMEM;
    c->env = env;
    c->options = *options;
    if (c->options.dead_after_ns <= 0)
        c->options.dead_after_ns = 5 * SECOND;
    if (c->options.grace_ns <= 0)
        c->options.grace_ns = SECOND / 2;
    if (c->options.link_timeout_ns <= 0)
        c->options.link_timeout_ns = 5 * SECOND;
    ctl_detector_set(&c->detector, c->options.dead_after_ns, now);
    c->term = 1;
    c->collecting = options->standalone && options->restarted;
    c->collect_until = now + c->options.dead_after_ns;
    c->next_beat = now + c->detector.interval;
    c->wake = c->next_beat;
    base_list_init(&c->conn_list);
    base_list_init(&c->group_list);
    *coordinator = c;
    return HDL_OK;
}

void ctl_coordinator_destroy(struct ctl_coordinator *c)
{
    if (!c)
        return;
    base_list_each(node, after, &c->group_list)
        coord_group_free(c, base_container_of(node, struct coord_group, node));
    base_list_each(node, after, &c->conn_list)
        base_free(c->env, base_container_of(node, struct coord_conn, node));
    for (uint32_t i = 0; i < c->num_ranks; i++)
        coord_rank_free(c, c->ranks[i]);
    base_free(c->env, c->ranks);
    ctl_map_free(c->env, &c->conns);
    ctl_map_free(c->env, &c->groups);
    base_free(c->env, c);
}

void coord_wake_at(struct ctl_coordinator *c, int64_t when)
{
    if (when < c->wake)
        c->wake = when;
}

void coord_out_of_memory(struct ctl_coordinator *c)
{
    c->out->failed = true;
}

void coord_send(struct ctl_coordinator *c, const struct coord_rank *rank,
                const struct ctl_msg *msg)
{
    if (rank->conn != 0)
        ctl_do_send(c->out, rank->conn, msg);
}

static void opened(struct ctl_coordinator *c, uint64_t id)
{
    struct coord_conn *conn = base_alloc(c->env, 1, sizeof(*conn));
    if (!conn || !ctl_map_put(c->env, &c->conns, id, conn)) {
        base_free(c->env, conn);
        coord_out_of_memory(c);
        return;
    }
    conn->id = id;
    base_list_push_back(&c->conn_list, &conn->node);
}

static void closed(struct ctl_coordinator *c, uint64_t id)
{
    struct coord_conn *conn = ctl_map_get(&c->conns, id);
    if (!conn)
        return;
    ctl_map_remove(&c->conns, id);
    base_list_remove(&conn->node);
    coord_conn_closed(c, conn);
    base_free(c->env, conn);
}

/* Messages about one group of the sender. */
static void group_message(struct ctl_coordinator *c, struct coord_rank *rank,
                          const struct ctl_msg *msg)
{
    struct coord_member *member = coord_member_of(rank, msg->group);
    if (!member || member->dead)
        return; /* it was told FAILED, LEFT or FENCED; this crossed it */
    switch (msg->type) {
    case CTL_MSG_ATTACHED:
        coord_attached(c, member, msg);
        break;
    case CTL_MSG_ANSWER:
        coord_answer(c, member, &msg->answer);
        break;
    case CTL_MSG_FINISHED:
        coord_finished(c, member, msg->x);
        break;
    case CTL_MSG_LINK:
        coord_link(c, member, msg->rank_epoch, msg->flag);
        break;
    case CTL_MSG_PROPOSE:
        coord_propose(c, member, msg);
        break;
    default:
        break;
    }
}

static void rank_message(struct ctl_coordinator *c, struct coord_rank *rank,
                         const struct ctl_msg *msg)
{
    rank->last_heard = c->now;
    switch (msg->type) {
    case CTL_MSG_HEARTBEAT:
        if (msg->flag)
            coord_send(c, rank,
                       &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT, .id = msg->id});
        else if (msg->id != 0)
            coord_probed(c, rank, msg->id);
        break;
    case CTL_MSG_REGISTER:
        coord_register(c, rank, msg->key, &msg->registration);
        break;
    case CTL_MSG_STATE:
        coord_state(c, rank, msg);
        break;
    case CTL_MSG_EXITED:
        coord_exited(c, msg->rank_epoch);
        break;
    case CTL_MSG_LEAVE:
        coord_leave(c, rank, msg->key);
        break;
    case CTL_MSG_ABORT:
        coord_abort(c, rank, msg->key, msg->group);
        break;
    case CTL_MSG_GOODBYE:
        coord_goodbye(c, rank);
        break;
    default:
        group_message(c, rank, msg);
        break;
    }
}

void coord_close(struct ctl_coordinator *c, uint64_t id)
{
    struct coord_conn *conn = ctl_map_get(&c->conns, id);
    struct ctl_action *action = ctl_actions_add(c->out, CTL_DO_CLOSE);
    if (action)
        action->conn = id;
    if (!conn)
        return;
    if (conn->rank && conn->rank->conn == id)
        conn->rank->conn = 0; /* no evidence: silence decides */
    ctl_map_remove(&c->conns, id);
    base_list_remove(&conn->node);
    base_free(c->env, conn);
}

static void close_bad(struct ctl_coordinator *c, uint64_t id, const char *why)
{
    ctl_do_log(c->out, HDL_LOG_WARN, "coordinator closes connection %llu: %s",
               (unsigned long long)id, why);
    coord_close(c, id);
}

static void message(struct ctl_coordinator *c, const struct ctl_coordinator_event *event)
{
    struct coord_conn *conn = ctl_map_get(&c->conns, event->conn);
    if (!conn)
        return; /* closed by us; what was under way is dropped */
    struct ctl_msg msg;
    if (event->size > CTL_FRAME_MAX_UP) {
        close_bad(c, conn->id, "frame too long");
        return;
    }
    enum hdl_status status = ctl_msg_decode(c->env, event->data, event->size, &msg);
    if (status != HDL_OK) {
        close_bad(c, conn->id, base_detail());
        return;
    }
    if (msg.type == CTL_MSG_HELLO && !conn->rank)
        coord_hello(c, conn, &msg.hello);
    else if (conn->rank && msg.type != CTL_MSG_HELLO)
        rank_message(c, conn->rank, &msg);
    else
        close_bad(c, conn->id, "message out of place");
    ctl_msg_release(c->env, &msg);
}

static void beat(struct ctl_coordinator *c)
{
    struct ctl_bytes *bytes =
        ctl_msg_encode(c->env, &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT});
    for (uint32_t i = 0; i < c->num_ranks; i++) {
        if (c->ranks[i] && c->ranks[i]->state == RANK_LIVE && c->ranks[i]->conn != 0)
            ctl_do_send_bytes(c->out, c->ranks[i]->conn, bytes);
    }
    ctl_bytes_unref(bytes);
    c->next_beat = c->now + c->detector.interval;
}

static void tick(struct ctl_coordinator *c)
{
    if (c->now < c->wake)
        return;
    if (c->now >= c->next_beat)
        beat(c);
    c->wake = c->next_beat;
    coord_rank_timers(c);
    coord_collect_timers(c);
    base_list_each(node, after, &c->group_list)
    {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (group->state == GROUP_COLLECTING)
            continue;
        if (group->state == GROUP_RUNNING) {
            coord_proposal_timers(c, group);
            coord_link_timers(c, group);
            coord_ballot_timers(c, group);
        } else {
            coord_creation_timers(c, group);
        }
    }
}

enum hdl_status ctl_coordinator_step(struct ctl_coordinator *c,
                                     const struct ctl_coordinator_event *event,
                                     int64_t now, struct ctl_actions *actions)
{
    c->out = actions;
    c->now = now;
    int64_t gap = ctl_detector_gap(&c->detector, now);
    if (gap > 0)
        coord_excuse_gap(c, gap);
    switch (event->kind) {
    case CTL_COORDINATOR_OPENED:
        opened(c, event->conn);
        break;
    case CTL_COORDINATOR_CLOSED:
        closed(c, event->conn);
        break;
    case CTL_COORDINATOR_MESSAGE:
        message(c, event);
        break;
    case CTL_COORDINATOR_TICK:
        tick(c);
        break;
    }
    return actions->failed ? base_fail(HDL_ENOMEM, "the coordinator is out of memory")
                           : HDL_OK;
}

int64_t ctl_coordinator_deadline(const struct ctl_coordinator *c)
{
    return c->wake;
}

uint64_t ctl_coordinator_num_silent(const struct ctl_coordinator *c)
{
    return c->num_silent;
}

uint32_t ctl_coordinator_num_live(const struct ctl_coordinator *c)
{
    uint32_t live = 0;
    for (uint32_t i = 0; i < c->num_ranks; i++) {
        const struct coord_rank *rank = c->ranks[i];
        if (rank && coord_is_up(rank))
            live++;
    }
    return live;
}
