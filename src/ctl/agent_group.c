/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's groups: registration, attaching, freezing, commits, requests of the user.
 */
#include <string.h>

#include "base/env.h"
#include "ctl/agent_state.h"

struct agent_group *agent_group_by_key(struct ctl_agent *agent, uint64_t key)
{
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (group->key == key && key != 0)
            return group;
    }
    return NULL;
}

struct agent_group *agent_group_by_id(struct ctl_agent *agent, uint64_t id)
{
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (group->id == id && id != 0 && group->key != 0)
            return group;
    }
    return NULL;
}

void agent_endpoint_free(struct ctl_agent *agent, struct agent_endpoint *endpoint)
{
    base_list_remove(&endpoint->node);
    ctl_bytes_unref(endpoint->endpoint);
    base_free(agent->env, endpoint);
}

static void proposal_free(struct ctl_agent *agent, struct agent_proposal *proposal)
{
    base_list_remove(&proposal->node);
    ctl_bytes_unref(proposal->bytes);
    base_free(agent->env, proposal);
}

void agent_group_free(struct ctl_agent *agent, struct agent_group *group)
{
    base_list_each(node, after, &group->endpoints)
        agent_endpoint_free(agent, base_container_of(node, struct agent_endpoint, node));
    base_list_each(node, after, &group->proposals)
        proposal_free(agent, base_container_of(node, struct agent_proposal, node));
    base_list_each(node, after, &group->links)
        base_free(agent->env, base_container_of(node, struct agent_link, node));
    base_list_remove(&group->node);
    ctl_bytes_unref(group->request);
    ctl_view_unref(group->view);
    ctl_view_unref(group->attaching);
    base_free(agent->env, group);
}

struct ctl_action *agent_group_do(struct ctl_agent *agent,
                                  const struct agent_group *group,
                                  enum ctl_action_kind kind)
{
    struct ctl_action *action = ctl_actions_add(agent->out, kind);
    if (action)
        action->key = group->key;
    return action;
}

void agent_proposed(struct ctl_agent *agent, struct agent_group *group,
                    struct agent_proposal *proposal, const struct ctl_msg *msg)
{
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_PROPOSED);
    if (action) {
        action->proposal = proposal->id;
        action->status = msg->status;
        action->epoch = msg->epoch;
        action->x = msg->x;
        action->text = ctl_text(agent->out, "%s", msg->text ? msg->text : "");
    }
    proposal_free(agent, proposal);
}

void agent_end_proposals(struct ctl_agent *agent, struct agent_group *group,
                         enum hdl_status status, const char *text)
{
    base_list_each(node, after, &group->proposals)
        agent_proposed(agent, group, base_container_of(node, struct agent_proposal, node),
                       &(struct ctl_msg){.status = status, .text = text});
}

void agent_group_fail(struct ctl_agent *agent, struct agent_group *group,
                      enum hdl_status status, const char *text)
{
    if (group->state == AGENT_FAILED)
        return;
    agent_end_proposals(agent, group, status, text);
    group->state = AGENT_FAILED;
    group->frozen = false;
    struct ctl_action *action = agent_group_do(agent, group, CTL_DO_FAIL);
    if (action) {
        action->status = status;
        action->text = ctl_text(agent->out, "%s", text);
    }
    if (group->leaving) {
        (void)agent_group_do(agent, group, CTL_DO_LEFT);
        agent_group_free(agent, group);
    }
}

static bool is_open(const struct ctl_slot *slot)
{
    return slot->rank_epoch != 0 && !slot->absent && slot->last == CTL_X_FOREVER;
}

bool agent_group_has(const struct agent_group *group, uint64_t rank_epoch)
{
    for (uint32_t i = 0; group->view && i < group->view->capacity; i++) {
        const struct ctl_slot *slot = &group->view->slots[i];
        if (is_open(slot) &&
            ctl_rank_epoch_rank(slot->rank_epoch) == ctl_rank_epoch_rank(rank_epoch))
            return true;
    }
    return false;
}

/* Something to be decided already: a member that has ended, a link that is down. */
static bool has_evidence(const struct ctl_agent *agent, const struct agent_group *group)
{
    bool found = !base_list_empty(&group->links);
    for (uint32_t i = 0; i < group->view->capacity && !found; i++) {
        const struct ctl_slot *slot = &group->view->slots[i];
        found =
            i != group->slot && is_open(slot) && agent_saw_end(agent, slot->rank_epoch);
    }
    return found;
}

/*
 * A member whose end nobody would notice without the coordinator on rank 0: the
 * coordinator's own process, and all that are not watched on this host.
 */
static bool has_unwatched(const struct ctl_agent *agent, const struct agent_group *group)
{
    for (uint32_t i = 0; i < group->view->capacity; i++) {
        const struct ctl_slot *slot = &group->view->slots[i];
        uint64_t rank = ctl_rank_epoch_rank(slot->rank_epoch);
        bool watched = i == group->slot || ctl_map_get(&agent->neighbours, rank + 1);
        if (is_open(slot) && (rank == 0 || !watched))
            return true;
    }
    return false;
}

bool agent_group_needs_coordinator(const struct ctl_agent *agent,
                                   const struct agent_group *group)
{
    if (group->state != AGENT_RUNNING)
        return group->state != AGENT_FAILED;
    return group->frozen || group->leaving || has_evidence(agent, group) ||
           (!agent->options.standalone && has_unwatched(agent, group));
}

/* --------------------------------------------------------------- requests of the user */

enum hdl_status agent_register(struct ctl_agent *agent,
                               const struct ctl_agent_event *event)
{
    const struct ctl_registration *registration = event->registration;
    if (event->key == 0 || agent_group_by_key(agent, event->key))
        return base_fail(HDL_EINVAL, "group key %llu is in use",
                         (unsigned long long)event->key);
    if (registration->endpoint_size > CTL_ENDPOINT_MAX)
        return base_fail(HDL_EINVAL, "an endpoint of %zu bytes is longer than %d",
                         registration->endpoint_size, CTL_ENDPOINT_MAX);
    struct ctl_msg msg = {
        .type = CTL_MSG_REGISTER, .key = event->key, .registration = *registration};
    struct agent_group *group = base_alloc(agent->env, 1, sizeof(*group));
    struct ctl_bytes *request = ctl_msg_encode(agent->env, &msg);
    if (!group || !request || request->size > CTL_FRAME_MAX_UP) {
        bool long_request = request && request->size > CTL_FRAME_MAX_UP;
        ctl_bytes_unref(request);
        base_free(agent->env, group);
        return long_request ? base_fail(HDL_EINVAL, "the group's parameters are too long")
                            : HDL_ENOMEM;
    }
    group->key = event->key;
    group->slot = registration->slot;
    group->join = registration->join;
    group->request = request;
    group->deadline = agent->now + registration->timeout_ns;
    base_list_init(&group->endpoints);
    base_list_init(&group->links);
    base_list_init(&group->proposals);
    base_list_push_back(&agent->groups, &group->node);
    agent_wake_at(agent, group->deadline);
    char text[CTL_LINE_BYTES] = "the coordinator is lost";
    if (agent->lost)
        agent_lost_text(agent, text);
    if (agent->lost || agent->refused)
        agent_group_fail(agent, group, HDL_ECOORD, text);
    else if (agent->link == LINK_UP)
        ctl_do_send_bytes(agent->out, 0, request);
    return HDL_OK;
}

enum hdl_status agent_propose(struct ctl_agent *agent,
                              const struct ctl_agent_event *event)
{
    const struct ctl_proposal *wish = event->proposal;
    struct agent_group *group = agent_group_by_key(agent, event->key);
    if (!group || group->id == 0)
        return base_fail(HDL_EINVAL, "no group of key %llu",
                         (unsigned long long)event->key);
    struct ctl_msg msg = {.type = CTL_MSG_PROPOSE,
                          .group = group->id,
                          .id = wish->id,
                          .kind = wish->kind,
                          .epoch = group->view ? group->view->epoch : 0,
                          .num_slots = wish->num_slots,
                          .slots = (uint32_t *)(uintptr_t)wish->slots,
                          .timeout_ns = wish->timeout_ns};
    struct agent_proposal *proposal = base_alloc(agent->env, 1, sizeof(*proposal));
    struct ctl_bytes *bytes = ctl_msg_encode(agent->env, &msg);
    if (!proposal || !bytes) {
        base_free(agent->env, proposal);
        ctl_bytes_unref(bytes);
        return HDL_ENOMEM;
    }
    proposal->id = wish->id;
    proposal->bytes = bytes;
    proposal->deadline = agent->now + wish->timeout_ns + SECOND;
    base_list_push_back(&group->proposals, &proposal->node);
    agent_wake_at(agent, proposal->deadline);
    if (group->state == AGENT_FAILED || agent->lost)
        agent_proposed(
            agent, group, proposal,
            &(struct ctl_msg){.status = agent->lost ? HDL_ECOORD : HDL_EABORTED,
                              .text = "the group is over or the coordinator lost"});
    else if (agent->link == LINK_UP)
        ctl_do_send_bytes(agent->out, 0, bytes);
    return HDL_OK;
}

static void leave(struct ctl_agent *agent, struct agent_group *group, bool at_once)
{
    bool decided = group->state == AGENT_RUNNING && !agent->lost && !agent->refused;
    agent_send(agent, &(struct ctl_msg){.type = at_once ? CTL_MSG_ABORT : CTL_MSG_LEAVE,
                                        .group = group->id,
                                        .key = group->key});
    if (decided && !at_once) {
        group->leaving = true;
        return;
    }
    agent_end_proposals(agent, group, HDL_EABORTED, "the group was left");
    (void)agent_group_do(agent, group, CTL_DO_LEFT);
    if (agent->link == LINK_UP || group->id == 0 || agent->rank_epoch == 0) {
        agent_group_free(agent, group);
        return;
    }
    /* The coordinator cannot be told now: the record stays until it can. */
    group->key = 0;
    group->state = AGENT_FAILED;
}

void agent_send_attached(struct ctl_agent *agent, struct agent_group *group,
                         uint64_t rank_epoch, const struct ctl_agent_event *event)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_ATTACHED,
                                        .group = group->id,
                                        .epoch = event->epoch,
                                        .rank_epoch = rank_epoch,
                                        .status = event->status,
                                        .text = event->text});
}

static void attached(struct ctl_agent *agent, struct agent_group *group,
                     const struct ctl_agent_event *event)
{
    if (!group->attaching || group->attaching->epoch != event->epoch)
        return;
    if (group->state == AGENT_REGISTERED && group->attaching_to == 0 && !group->join)
        group->state = AGENT_ATTACHED;
    agent_send_attached(agent, group, group->attaching_to, event);
    ctl_view_unref(group->attaching);
    group->attaching = NULL;
    agent_attach_next(agent, group);
}

static void send_link(struct ctl_agent *agent, const struct agent_group *group,
                      uint64_t rank_epoch, bool up)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_LINK,
                                        .group = group->id,
                                        .rank_epoch = rank_epoch,
                                        .flag = up});
}

static void remember_link(struct ctl_agent *agent, struct agent_group *group,
                          uint64_t rank_epoch, bool up)
{
    base_list_each(node, after, &group->links)
    {
        struct agent_link *link = base_container_of(node, struct agent_link, node);
        if (link->rank_epoch != rank_epoch)
            continue;
        base_list_remove(&link->node);
        base_free(agent->env, link);
    }
    if (up)
        return;
    struct agent_link *link = base_alloc(agent->env, 1, sizeof(*link));
    if (!link) {
        agent_out_of_memory(agent);
        return;
    }
    link->rank_epoch = rank_epoch;
    base_list_push_back(&group->links, &link->node);
}

static void link_report(struct ctl_agent *agent, struct agent_group *group,
                        const struct ctl_agent_event *event)
{
    remember_link(agent, group, event->rank_epoch, event->up);
    send_link(agent, group, event->rank_epoch, event->up);
    if (agent->lost && !event->up)
        agent_group_fail(agent, group, HDL_ECOORD,
                         "a link is lost and so is the coordinator");
}

static void frozen(struct ctl_agent *agent, struct agent_group *group,
                   const struct ctl_answer *answer)
{
    if (group->state != AGENT_RUNNING || !group->frozen ||
        answer->ballot != group->ballot)
        return;
    agent_send(agent, &(struct ctl_msg){
                          .type = CTL_MSG_ANSWER, .group = group->id, .answer = *answer});
}

void agent_group_event(struct ctl_agent *agent, const struct ctl_agent_event *event)
{
    struct agent_group *group = agent_group_by_key(agent, event->key);
    if (!group)
        return; /* left meanwhile */
    switch (event->kind) {
    case CTL_AGENT_ATTACHED:
        attached(agent, group, event);
        break;
    case CTL_AGENT_FROZEN:
        frozen(agent, group, event->answer);
        break;
    case CTL_AGENT_FINISHED:
        agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_FINISHED,
                                            .group = group->id,
                                            .x = event->x});
        break;
    case CTL_AGENT_LINK:
        link_report(agent, group, event);
        break;
    case CTL_AGENT_LEAVE:
        leave(agent, group, false);
        break;
    case CTL_AGENT_ABORT:
        leave(agent, group, true);
        break;
    default:
        break;
    }
}

void agent_group_report(struct ctl_agent *agent, struct agent_group *group)
{
    bool known = group->state == AGENT_RUNNING || group->state == AGENT_ATTACHED;
    /* A joiner that is introduced may be a member already and not know it. */
    bool introduced = group->state == AGENT_REGISTERED && group->join && group->view;
    if (group->state == AGENT_REGISTERED && !introduced)
        group->state = AGENT_REGISTERING; /* the registration is gone: once more */
    if ((!known && !introduced) || !group->view)
        return;
    struct ctl_msg request;
    struct ctl_view *view = group->view;
    struct ctl_slot_change *slots =
        base_alloc(agent->env, view->capacity, sizeof(*slots));
    if (!slots || ctl_msg_decode(agent->env, group->request->data, group->request->size,
                                 &request) != HDL_OK) {
        base_free(agent->env, slots);
        agent_out_of_memory(agent);
        return;
    }
    struct ctl_msg msg = {.type = CTL_MSG_STATE,
                          .key = group->key,
                          .group = group->id,
                          .slot = group->slot,
                          .rank_epoch = group->rank_epoch,
                          .epoch = view->epoch,
                          .x = group->frozen ? group->ballot : 0,
                          .flag = group->state == AGENT_RUNNING,
                          .registration = request.registration,
                          .change = ctl_view_whole(view, slots)};
    agent_send(agent, &msg);
    ctl_msg_release(agent->env, &request);
    base_free(agent->env, slots);
}

void agent_group_resend(struct ctl_agent *agent, struct agent_group *group)
{
    if (group->state == AGENT_FAILED) {
        if (group->id != 0)
            agent_abort_on_wire(agent, group->id);
        if (group->key == 0)
            agent_group_free(agent, group);
        return;
    }
    if (group->state == AGENT_REGISTERING || group->state == AGENT_REGISTERED)
        ctl_do_send_bytes(agent->out, 0, group->request);
    base_list_each(node, after, &group->proposals) ctl_do_send_bytes(
        agent->out, 0, base_container_of(node, struct agent_proposal, node)->bytes);
    base_list_each(node, after, &group->links)
        send_link(agent, group,
                  base_container_of(node, struct agent_link, node)->rank_epoch, false);
    if (group->leaving)
        agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_LEAVE,
                                            .group = group->id,
                                            .key = group->key});
}

void agent_group_timers(struct ctl_agent *agent, struct agent_group *group)
{
    base_list_each(node, after, &group->proposals)
    {
        struct agent_proposal *proposal =
            base_container_of(node, struct agent_proposal, node);
        if (agent->now < proposal->deadline)
            agent_wake_at(agent, proposal->deadline);
        else
            agent_proposed(agent, group, proposal,
                           &(struct ctl_msg){.status = HDL_ETIMEDOUT,
                                             .text = "the coordinator did not answer"});
    }
    bool creating = group->state < AGENT_RUNNING &&
                    !(group->join && group->state == AGENT_REGISTERED);
    if (!creating)
        return;
    if (agent->now >= group->deadline + SECOND ||
        (group->join && agent->now >= group->deadline)) {
        agent_group_fail(agent, group, HDL_ETIMEDOUT,
                         group->join
                             ? "the group has no active member, or the rank is in use"
                             : "the coordinator did not answer");
        return;
    }
    agent_wake_at(agent, group->join ? group->deadline : group->deadline + SECOND);
    if (group->retry_at == 0)
        return;
    if (agent->now < group->retry_at) {
        agent_wake_at(agent, group->retry_at);
        return;
    }
    group->retry_at = agent->now + SECOND / 10;
    agent_wake_at(agent, group->retry_at);
    if (agent->link == LINK_UP)
        ctl_do_send_bytes(agent->out, 0, group->request);
}
