/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's entry: its connection to the coordinator, heartbeats, loss, neighbours. */
#include "ctl/agent.h"

#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/agent_state.h"

#define BACKOFF_FIRST (SECOND / 50)
#define BACKOFF_MOST (SECOND / 2)

enum hdl_status ctl_agent_create(struct base_env *env,
                                 const struct ctl_agent_options *options, int64_t now,
                                 struct ctl_agent **out)
{
    struct ctl_agent *agent = base_alloc(env, 1, sizeof(*agent));
    if (!agent)
        return HDL_ENOMEM;
    agent->env = env;
    agent->options = *options;
    agent->socket_name =
        base_strdup(env, options->socket_name ? options->socket_name : "");
    if (!agent->socket_name) {
        base_free(env, agent);
        return HDL_ENOMEM;
    }
    if (agent->options.join_timeout_ns <= 0)
        agent->options.join_timeout_ns = 60 * SECOND;
    if (agent->options.lost_after_ns <= 0)
        agent->options.lost_after_ns = SECOND;
    agent->dead_after = options->dead_after_ns > 0 ? options->dead_after_ns : 5 * SECOND;
    ctl_detector_set(&agent->detector, agent->dead_after, now);
    agent->link = LINK_WAITING;
    agent->retry_at = now;
    agent->backoff = BACKOFF_FIRST;
    agent->lost_at = INT64_MAX;
    agent->join_deadline = now + agent->options.join_timeout_ns;
    agent->wake = now;
    base_list_init(&agent->groups);
    *out = agent;
    return HDL_OK;
}

void ctl_agent_destroy(struct ctl_agent *agent)
{
    if (!agent)
        return;
    base_list_each(node, after, &agent->groups)
        agent_group_free(agent, base_container_of(node, struct agent_group, node));
    ctl_map_free(agent->env, &agent->neighbours);
    base_free(agent->env, agent->socket_name);
    base_free(agent->env, agent);
}

void agent_wake_at(struct ctl_agent *agent, int64_t when)
{
    if (when < agent->wake)
        agent->wake = when;
}

void agent_out_of_memory(struct ctl_agent *agent)
{
    agent->out->failed = true;
}

void agent_send(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    if (agent->link == LINK_UP ||
        (agent->link == LINK_GREETED && msg->type == CTL_MSG_HELLO))
        ctl_do_send(agent->out, 0, msg);
}

static void connect_now(struct ctl_agent *agent)
{
    agent->link = LINK_CONNECTING;
    (void)ctl_actions_add(agent->out, CTL_DO_CONNECT);
}

static void connect_later(struct ctl_agent *agent)
{
    agent->link = LINK_WAITING;
    agent->retry_at = agent->now + agent->backoff;
    /* A restarted coordinator waits dead_after for its ranks: they must try within it. */
    int64_t most =
        agent->dead_after / 4 < BACKOFF_MOST ? agent->dead_after / 4 : BACKOFF_MOST;
    agent->backoff = 2 * agent->backoff < most ? 2 * agent->backoff : most;
    agent_wake_at(agent, agent->retry_at);
}

void agent_lost_text(struct ctl_agent *agent, char text[CTL_LINE_BYTES])
{
    bool own = agent->options.standalone, ended = agent->coordinator_exited && !own;
    char since[64] = "its process has ended";
    int64_t lost_ns = agent->now - (agent->lost_at - agent->options.lost_after_ns);
    if (!ended)
        (void)snprintf(since, sizeof(since), "not reachable for %lld ms",
                       (long long)(lost_ns / (SECOND / 1000)));
    (void)snprintf(text, CTL_LINE_BYTES, "the coordinator is lost: %s%s, %s%s",
                   own ? "" : "job rank 0 at ", agent->coordinator_at, since,
                   own ? ""
                       : "; one of its own (heddle coordinator) outlives job rank 0");
}

static void lose_coordinator(struct ctl_agent *agent)
{
    if (agent->lost)
        return;
    char text[CTL_LINE_BYTES];
    agent_lost_text(agent, text);
    agent->lost = true;
    struct ctl_action *action = ctl_actions_add(agent->out, CTL_DO_COORDINATOR_LOST);
    if (action)
        action->text = ctl_text(agent->out, "%s", text);
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (agent_group_needs_coordinator(agent, group))
            agent_group_fail(agent, group, HDL_ECOORD, text);
    }
}

/* The connection is gone; the time until the loss counts runs from the first notice. */
static void disconnected(struct ctl_agent *agent)
{
    if (agent->refused)
        return;
    if (agent->admitted && agent->lost_at == INT64_MAX) {
        agent->lost_at = agent->now + agent->options.lost_after_ns;
        agent_wake_at(agent, agent->lost_at);
    }
    if (agent->coordinator_exited && !agent->options.standalone && agent->admitted)
        lose_coordinator(agent);
}

void agent_reconnect(struct ctl_agent *agent)
{
    disconnected(agent);
    agent->backoff = BACKOFF_FIRST;
    connect_now(agent);
}

static void hello(struct ctl_agent *agent)
{
    struct ctl_hello *hello;
    struct ctl_msg msg = {.type = CTL_MSG_HELLO};
    uint32_t count = 0;
    hello = &msg.hello;
    base_list_each(node, after, &agent->groups) count++;
    hello->groups = base_alloc(agent->env, count, sizeof(*hello->groups));
    if (!hello->groups) {
        agent_out_of_memory(agent);
        return;
    }
    base_list_each(node, after, &agent->groups)
    {
        const struct agent_group *group =
            base_container_of(node, struct agent_group, node);
        bool running = group->state == AGENT_RUNNING;
        if (group->id != 0 && group->state != AGENT_FAILED)
            hello->groups[hello->num_groups++] =
                (struct ctl_group_state){group->id, running ? group->view->epoch : 0};
    }
    hello->magic = CTL_WIRE_MAGIC;
    hello->version = CTL_WIRE_VERSION;
    hello->rank = agent->options.job_rank;
    hello->incarnation = agent->options.incarnation;
    hello->rank_epoch = agent->rank_epoch;
    hello->term = agent->term;
    hello->turn = agent->turn;
    hello->host_id = agent->options.host_id;
    hello->pid = (uint32_t)agent->options.pid;
    hello->socket_name = agent->socket_name;
    agent->link = LINK_GREETED;
    agent->last_heard = agent->now;
    agent_send(agent, &msg);
    base_free(agent->env, hello->groups);
}

static void welcome(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    uint64_t term = ctl_epoch_term(msg->epoch);
    if (term < agent->term) { /* an older coordinator: there must be a newer one */
        disconnected(agent);
        connect_later(agent);
        return;
    }
    agent->term = term;
    if (msg->settings.turn > agent->turn)
        agent->turn = msg->settings.turn;
    bool first = agent->rank_epoch == 0, again = agent->lost;
    agent->rank_epoch = msg->rank_epoch;
    if (!first)
        agent->stats.reconnects++;
    if (agent->options.dead_after_ns <= 0 && msg->settings.dead_after_ns > 0)
        agent->dead_after = msg->settings.dead_after_ns;
    ctl_detector_set(&agent->detector, agent->dead_after, agent->now);
    agent->options.standalone = msg->settings.standalone;
    agent->link = LINK_UP;
    agent->admitted = true;
    agent->lost = false;
    agent->lost_at = INT64_MAX;
    agent->backoff = BACKOFF_FIRST;
    agent->next_beat = agent->now;
    agent_wake_at(agent, agent->now);
    if (first || again) {
        struct ctl_action *action = ctl_actions_add(agent->out, CTL_DO_ADMITTED);
        if (action)
            action->rank_epoch = agent->rank_epoch;
    }
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (msg->settings.collecting && !first)
            agent_group_report(agent, group);
        agent_group_resend(agent, group);
    }
}

static void refused(struct ctl_agent *agent, enum hdl_status status, const char *text)
{
    agent->refused = true;
    struct ctl_action *action = ctl_actions_add(agent->out, CTL_DO_REFUSED);
    if (action) {
        action->status = status;
        action->text = ctl_text(agent->out, "%s", text);
    }
    base_list_each(node, after, &agent->groups) agent_group_fail(
        agent, base_container_of(node, struct agent_group, node), status, text);
}

/* In place of the agent: a neighbour whose end was seen here. */
static char ended;

static void neighbour(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    uint64_t rank = (uint64_t)ctl_rank_epoch_rank(msg->rank_epoch) + 1;
    if (!msg->flag)
        ctl_map_remove(&agent->neighbours, rank);
    else if (!ctl_map_put(agent->env, &agent->neighbours, rank, agent))
        agent_out_of_memory(agent);
    struct ctl_action *action =
        ctl_actions_add(agent->out, msg->flag ? CTL_DO_WATCH : CTL_DO_UNWATCH);
    if (!action)
        return;
    action->rank_epoch = msg->rank_epoch;
    action->pid = (int32_t)msg->pid;
    if (msg->flag)
        action->text = ctl_text(agent->out, "%s", msg->text);
}

/* Declared dead: every group ends here, and the process may register anew. */
static void fenced(struct ctl_agent *agent)
{
    agent->rank_epoch = 0;
    agent->join_deadline = INT64_MAX;
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        agent_group_fail(agent, group, HDL_EFENCED,
                         "this process was declared dead while it was out of touch");
    }
    connect_now(agent);
}

static void message(struct ctl_agent *agent, const struct ctl_agent_event *event)
{
    struct ctl_msg msg;
    if (ctl_msg_decode(agent->env, event->data, event->size, &msg) != HDL_OK) {
        ctl_do_log(agent->out, HDL_LOG_WARN, "bad message from the coordinator: %s",
                   base_detail());
        agent_reconnect(agent);
        return;
    }
    agent->last_heard = agent->now;
    switch (msg.type) {
    case CTL_MSG_WELCOME:
        welcome(agent, &msg);
        break;
    case CTL_MSG_REFUSED:
        refused(agent, msg.status, msg.text);
        break;
    case CTL_MSG_HEARTBEAT:
        if (msg.flag)
            agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT, .id = msg.id});
        break;
    case CTL_MSG_NEIGHBOUR:
        neighbour(agent, &msg);
        break;
    case CTL_MSG_FENCED:
        if (msg.group == 0)
            fenced(agent);
        else
            agent_group_message(agent, &msg);
        break;
    case CTL_MSG_NOTICE:
        ctl_do_log(agent->out, HDL_LOG_WARN, "%s", msg.text);
        break;
    default:
        agent_group_message(agent, &msg);
        break;
    }
    ctl_msg_release(agent->env, &msg);
}

bool agent_saw_end(const struct ctl_agent *agent, uint64_t rank_epoch)
{
    uint64_t rank = (uint64_t)ctl_rank_epoch_rank(rank_epoch) + 1;
    return ctl_map_get(&agent->neighbours, rank) == &ended;
}

static void exited(struct ctl_agent *agent, uint64_t rank_epoch)
{
    uint64_t rank = (uint64_t)ctl_rank_epoch_rank(rank_epoch) + 1;
    agent->stats.evidence_exit++;
    if (ctl_map_get(&agent->neighbours, rank) &&
        !ctl_map_put(agent->env, &agent->neighbours, rank, &ended))
        agent_out_of_memory(agent);
    if (rank == 1 && !agent->options.standalone) {
        agent->coordinator_exited = true;
        if (agent->link != LINK_UP && agent->admitted)
            lose_coordinator(agent);
    }
    agent_send(agent,
               &(struct ctl_msg){.type = CTL_MSG_EXITED, .rank_epoch = rank_epoch});
    if (!agent->lost)
        return;
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (agent_group_has(group, rank_epoch))
            agent_group_fail(agent, group, HDL_ECOORD,
                             "a rank is lost and so is the coordinator");
    }
}

static void tick(struct ctl_agent *agent)
{
    if (agent->now < agent->wake || agent->refused)
        return;
    agent->wake = INT64_MAX;
    if (agent->rank_epoch == 0 && agent->now >= agent->join_deadline) {
        refused(agent, HDL_ETIMEDOUT, "the coordinator did not admit this rank in time");
        return;
    }
    if (agent->rank_epoch == 0)
        agent_wake_at(agent, agent->join_deadline);
    if (agent->link == LINK_WAITING && agent->now >= agent->retry_at)
        connect_now(agent);
    else if (agent->link == LINK_WAITING)
        agent_wake_at(agent, agent->retry_at);
    if (agent->link == LINK_UP) {
        if (ctl_detector_is_silent(&agent->detector, agent->last_heard, agent->now)) {
            agent->stats.evidence_silence++;
            agent_reconnect(agent);
        } else if (agent->now >= agent->next_beat) {
            agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT});
            agent->next_beat = agent->now + agent->detector.interval;
        }
        agent_wake_at(agent, agent->next_beat);
    }
    if (agent->now >= agent->lost_at && !agent->lost)
        lose_coordinator(agent);
    else if (!agent->lost)
        agent_wake_at(agent, agent->lost_at);
    base_list_each(node, after, &agent->groups)
        agent_group_timers(agent, base_container_of(node, struct agent_group, node));
}

static void goodbye(struct ctl_agent *agent)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_GOODBYE});
    agent->refused = true;
    agent->wake = INT64_MAX;
    (void)ctl_actions_add(agent->out, CTL_DO_GOODBYE);
}

static enum hdl_status dispatch(struct ctl_agent *agent,
                                const struct ctl_agent_event *event)
{
    switch (event->kind) {
    case CTL_AGENT_CONNECTED:
        (void)snprintf(agent->coordinator_at, sizeof(agent->coordinator_at), "%s",
                       event->text ? event->text : "this process");
        if (agent->link == LINK_CONNECTING && !agent->refused)
            hello(agent);
        break;
    case CTL_AGENT_CONNECT_FAILED:
        if (agent->link == LINK_CONNECTING) {
            disconnected(agent); /* the first notice for one that was just fenced */
            connect_later(agent);
        }
        break;
    case CTL_AGENT_DISCONNECTED:
        if (agent->link == LINK_UP || agent->link == LINK_GREETED) {
            disconnected(agent);
            connect_later(agent);
        }
        break;
    case CTL_AGENT_MESSAGE:
        if (!agent->refused && (agent->link == LINK_UP || agent->link == LINK_GREETED))
            message(agent, event);
        break;
    case CTL_AGENT_TICK:
        tick(agent);
        break;
    case CTL_AGENT_EXITED:
        exited(agent, event->rank_epoch);
        break;
    case CTL_AGENT_REGISTER:
        return agent_register(agent, event);
    case CTL_AGENT_PROPOSE:
        return agent_propose(agent, event);
    case CTL_AGENT_GOODBYE:
        goodbye(agent);
        break;
    default:
        agent_group_event(agent, event);
        break;
    }
    return HDL_OK;
}

enum hdl_status ctl_agent_step(struct ctl_agent *agent,
                               const struct ctl_agent_event *event, int64_t now,
                               struct ctl_actions *actions)
{
    agent->out = actions;
    agent->now = now;
    int64_t gap = ctl_detector_gap(&agent->detector, now);
    if (gap > 0)
        agent->last_heard =
            ctl_detector_after_gap(&agent->detector, agent->last_heard, gap, now);
    if (now > agent->wake) { /* while it was stopped it tried to reach nobody */
        if (agent->lost_at != INT64_MAX)
            agent->lost_at += now - agent->wake;
        agent->wake = now;
    }
    enum hdl_status status = dispatch(agent, event);
    if (actions->failed)
        return base_fail(HDL_ENOMEM, "the agent is out of memory");
    return status;
}

int64_t ctl_agent_deadline(const struct ctl_agent *agent)
{
    return agent->refused ? INT64_MAX : agent->wake;
}

struct ctl_view *ctl_agent_view(const struct ctl_agent *agent, uint64_t key)
{
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (group->key == key && group->state == AGENT_RUNNING)
            return group->view;
    }
    return NULL;
}

void ctl_agent_stats(const struct ctl_agent *agent, struct ctl_agent_stats *stats)
{
    *stats = agent->stats;
}
