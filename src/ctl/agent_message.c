/* SPDX-License-Identifier: Apache-2.0 */
/* What the coordinator says about the agent's groups: views, ballots, outcomes. */
#include <string.h>

#include "base/env.h"
#include "ctl/agent_state.h"

static void registered(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    struct agent_group *group = agent_group_by_key(agent, msg->key);
    if (!group || group->state == AGENT_FAILED)
        return;
    /* A coordinator that was started again may know nothing of the one before. */
    bool anew = group->state == AGENT_REGISTERED && group->rank_epoch != msg->rank_epoch;
    group->id = msg->group;
    group->rank_epoch = msg->rank_epoch;
    group->retry_at = 0;
    if (group->state != AGENT_REGISTERING && !anew)
        return;
    group->state = AGENT_REGISTERED;
    base_list_each(node, after, &group->proposals) ctl_do_send_bytes(
        agent->out, 0, base_container_of(node, struct agent_proposal, node)->bytes);
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_REGISTERED);
    if (action) {
        action->slot = msg->slot;
        action->rank_epoch = msg->rank_epoch;
    }
}

static void hand_out(struct ctl_agent *agent, struct agent_group *group,
                     enum ctl_action_kind kind, struct ctl_view *view)
{
    struct ctl_action *action = agent_group_do(agent, group, kind);
    if (action)
        action->view = ctl_view_ref(view);
}

static void attach(struct ctl_agent *agent, struct agent_group *group,
                   struct ctl_view *view, uint64_t to)
{
    ctl_view_unref(group->attaching);
    group->attaching = view;
    group->attaching_to = to;
    hand_out(agent, group, CTL_DO_ATTACH, view);
}

/* The current view with the joiner in its slot, which takes part in nothing. */
void agent_attach_next(struct ctl_agent *agent, struct agent_group *group)
{
    struct base_list *node = base_list_first(&group->endpoints);
    if (!node || group->attaching || !group->view)
        return;
    struct agent_endpoint *endpoint =
        base_container_of(node, struct agent_endpoint, node);
    struct ctl_slot_change slot = {
        .index = endpoint->slot,
        .slot = {.rank_epoch = endpoint->rank_epoch,
                 .first = CTL_X_FOREVER,
                 .last = CTL_X_FOREVER,
                 .endpoint = endpoint->endpoint},
    };
    struct ctl_change change = {.base = group->view->epoch,
                                .settled = group->view->settled,
                                .begun = group->view->begun,
                                .link_from = 1,
                                .capacity = group->view->capacity,
                                .num_attempts = group->view->num_attempts,
                                .attempts = group->view->attempts,
                                .num_slots = 1,
                                .slots = &slot};
    struct ctl_view *view =
        ctl_view_apply(agent->env, group->view, group->id, group->view->epoch, &change);
    if (!view) {
        agent_out_of_memory(agent);
        return;
    }
    uint64_t to = endpoint->rank_epoch;
    agent_endpoint_free(agent, endpoint);
    attach(agent, group, view, to);
}

static void joiner_endpoint(struct ctl_agent *agent, struct agent_group *group,
                            const struct ctl_msg *msg)
{
    struct agent_endpoint *endpoint = base_alloc(agent->env, 1, sizeof(*endpoint));
    struct ctl_bytes *bytes =
        ctl_bytes_new(agent->env, msg->endpoint, msg->endpoint_size);
    if (!endpoint || !bytes || !group->view || msg->slot >= group->view->capacity) {
        if (!endpoint || !bytes)
            agent_out_of_memory(agent);
        base_free(agent->env, endpoint);
        ctl_bytes_unref(bytes);
        return;
    }
    endpoint->slot = msg->slot;
    endpoint->rank_epoch = msg->rank_epoch;
    endpoint->endpoint = bytes;
    base_list_push_back(&group->endpoints, &endpoint->node);
    agent_attach_next(agent, group);
}

/* A coordinator that was started again may not have known its term when it said so. */
static void note_term(struct ctl_agent *agent, uint64_t epoch)
{
    if (ctl_epoch_term(epoch) > agent->term)
        agent->term = ctl_epoch_term(epoch);
}

/* A newer view ends the freeze, whatever ballot it was of. */
static void commit(struct ctl_agent *agent, struct agent_group *group,
                   struct ctl_view *view)
{
    bool running = group->state == AGENT_RUNNING;
    ctl_view_unref(group->view);
    group->view = view;
    group->state = AGENT_RUNNING;
    group->frozen = false;
    note_term(agent, view->epoch);
    agent->stats.views++;
    hand_out(agent, group, running ? CTL_DO_COMMIT : CTL_DO_START, view);
}

static void whole_view(struct ctl_agent *agent, struct agent_group *group,
                       const struct ctl_msg *msg)
{
    if (!msg->flag && group->view && group->state == AGENT_RUNNING &&
        msg->epoch <= group->view->epoch)
        return;
    struct ctl_view *view =
        ctl_view_apply(agent->env, NULL, group->id, msg->epoch, &msg->change);
    if (!view) {
        agent_out_of_memory(agent);
        return;
    }
    if (!msg->flag) {
        commit(agent, group, view);
        return;
    }
    ctl_view_unref(group->view);
    group->view = ctl_view_ref(view);
    if (group->state == AGENT_ATTACHED) {
        /* Attached before the connection was lost: the answer may not have arrived. */
        agent_send_attached(
            agent, group, 0,
            &(struct ctl_agent_event){.epoch = msg->epoch, .status = HDL_OK});
        ctl_view_unref(view);
        return;
    }
    attach(agent, group, view, 0);
}

static void start(struct ctl_agent *agent, struct agent_group *group,
                  const struct ctl_msg *msg)
{
    if (group->state != AGENT_ATTACHED || !group->view ||
        group->view->epoch != msg->epoch)
        return;
    commit(agent, group, ctl_view_ref(group->view));
}

static void prepare(struct ctl_agent *agent, struct agent_group *group,
                    const struct ctl_msg *msg)
{
    if (group->state != AGENT_RUNNING || msg->epoch < group->ballot ||
        msg->epoch <= group->view->epoch)
        return; /* replaced by a later one */
    group->ballot = msg->epoch;
    group->frozen = true;
    note_term(agent, msg->epoch);
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_FREEZE);
    if (!action)
        return;
    size_t size = sizeof(struct ctl_prepare) + msg->num_slots * sizeof(uint32_t);
    struct ctl_prepare *prepare = base_alloc(agent->env, 1, size);
    if (!prepare) {
        agent_out_of_memory(agent);
        return;
    }
    uint32_t *dead = (uint32_t *)(void *)(prepare + 1);
    prepare->ballot = msg->epoch;
    prepare->num_dead = msg->num_slots;
    prepare->dead = dead;
    if (msg->num_slots > 0)
        memcpy(dead, msg->slots, msg->num_slots * sizeof(uint32_t));
    action->prepare = prepare;
}

static void change(struct ctl_agent *agent, struct agent_group *group,
                   const struct ctl_msg *msg)
{
    if (group->state != AGENT_RUNNING || msg->epoch <= group->view->epoch)
        return;
    if (msg->change.base != group->view->epoch) {
        ctl_do_log(agent->out, HDL_LOG_WARN, "group %llu: a commit was missed",
                   (unsigned long long)group->id);
        agent_reconnect(agent);
        return;
    }
    struct ctl_view *view =
        ctl_view_apply(agent->env, group->view, group->id, msg->epoch, &msg->change);
    if (!view) {
        agent_out_of_memory(agent);
        return;
    }
    commit(agent, group, view);
}

static void failed(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    struct agent_group *group = agent_group_by_key(agent, msg->key);
    if (!group)
        return;
    if (msg->status == HDL_PENDING && group->state < AGENT_RUNNING) {
        group->state = AGENT_REGISTERING;
        group->retry_at = agent->now + SECOND / 10;
        agent_wake_at(agent, group->retry_at);
        return;
    }
    agent_group_fail(agent, group, msg->status, msg->text);
}

static void outcome(struct ctl_agent *agent, struct agent_group *group,
                    const struct ctl_msg *msg)
{
    base_list_each(node, after, &group->proposals)
    {
        struct agent_proposal *proposal =
            base_container_of(node, struct agent_proposal, node);
        if (proposal->id == msg->id) {
            agent_proposed(agent, group, proposal, msg);
            return;
        }
    }
}

static void left(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    struct agent_group *group = agent_group_by_key(agent, msg->key);
    if (!group || !group->leaving)
        return;
    agent_end_proposals(agent, group, HDL_EABORTED, "the group was left");
    (void)agent_group_do(agent, group, CTL_DO_LEFT);
    agent_group_free(agent, group);
}

static void closed(struct ctl_agent *agent, struct agent_group *group,
                   const struct ctl_msg *msg)
{
    base_list_each(node, after, &group->endpoints)
    {
        struct agent_endpoint *endpoint =
            base_container_of(node, struct agent_endpoint, node);
        if (endpoint->rank_epoch == msg->rank_epoch)
            agent_endpoint_free(agent, endpoint);
    }
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_CLOSED);
    if (action) {
        action->slot = msg->slot;
        action->rank_epoch = msg->rank_epoch;
    }
}

static void watch(struct ctl_agent *agent, struct agent_group *group,
                  const struct ctl_msg *msg)
{
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_WATCH_DONE);
    if (action)
        action->x = msg->x;
}

/* Sent again after a reconnection, and to whoever asks about a group that is over here.
 */
void agent_abort_on_wire(struct ctl_agent *agent, uint64_t group)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_ABORT, .group = group});
}

void agent_group_message(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    if (msg->type == CTL_MSG_REGISTERED) {
        registered(agent, msg);
        return;
    }
    if (msg->type == CTL_MSG_FAILED || msg->type == CTL_MSG_LEFT) {
        if (msg->type == CTL_MSG_FAILED)
            failed(agent, msg);
        else
            left(agent, msg);
        return;
    }
    struct agent_group *group = agent_group_by_id(agent, msg->group);
    if (!group || group->state == AGENT_FAILED) {
        if (msg->type == CTL_MSG_PREPARE)
            agent_abort_on_wire(agent, msg->group);
        return;
    }
    switch (msg->type) {
    case CTL_MSG_VIEW:
        whole_view(agent, group, msg);
        break;
    case CTL_MSG_START:
        start(agent, group, msg);
        break;
    case CTL_MSG_ENDPOINT:
        joiner_endpoint(agent, group, msg);
        break;
    case CTL_MSG_PREPARE:
        prepare(agent, group, msg);
        break;
    case CTL_MSG_COMMIT:
        change(agent, group, msg);
        break;
    case CTL_MSG_WATCH:
        watch(agent, group, msg);
        break;
    case CTL_MSG_CLOSED:
        closed(agent, group, msg);
        break;
    case CTL_MSG_PROPOSED:
        outcome(agent, group, msg);
        break;
    case CTL_MSG_FENCED:
        agent_group_fail(agent, group, HDL_EFENCED, "this rank was declared dead");
        break;
    default:
        break;
    }
}
