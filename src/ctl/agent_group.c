/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's groups: registration, attaching, freezing, commits, requests of the user.
 */
#include <string.h>

#include "base/env.h"
#include "ctl/agent_state.h"

#define SECOND INT64_C(1000000000)

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

static struct agent_group *by_id(struct ctl_agent *agent, uint64_t id)
{
    base_list_each(node, after, &agent->groups)
    {
        struct agent_group *group = base_container_of(node, struct agent_group, node);
        if (group->id == id && id != 0 && group->key != 0)
            return group;
    }
    return NULL;
}

static void endpoint_free(struct ctl_agent *agent, struct agent_endpoint *endpoint)
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
        endpoint_free(agent, base_container_of(node, struct agent_endpoint, node));
    base_list_each(node, after, &group->proposals)
        proposal_free(agent, base_container_of(node, struct agent_proposal, node));
    base_list_remove(&group->node);
    ctl_bytes_unref(group->request);
    ctl_view_unref(group->view);
    ctl_view_unref(group->attaching);
    base_free(agent->env, group);
}

static struct ctl_action *group_do(struct ctl_agent *agent,
                                   const struct agent_group *group,
                                   enum ctl_action_kind kind)
{
    struct ctl_action *action = ctl_actions_add(agent->out, kind);
    if (action)
        action->key = group->key;
    return action;
}

static void proposed(struct ctl_agent *agent, struct agent_group *group,
                     struct agent_proposal *proposal, const struct ctl_msg *msg)
{
    struct ctl_action *action = group_do(agent, group, CTL_DO_PROPOSED);
    if (action) {
        action->proposal = proposal->id;
        action->status = msg->status;
        action->epoch = msg->epoch;
        action->x = msg->x;
        action->text = ctl_text(agent->out, "%s", msg->text ? msg->text : "");
    }
    proposal_free(agent, proposal);
}

static void end_proposals(struct ctl_agent *agent, struct agent_group *group,
                          enum hdl_status status, const char *text)
{
    base_list_each(node, after, &group->proposals)
        proposed(agent, group, base_container_of(node, struct agent_proposal, node),
                 &(struct ctl_msg){.status = status, .text = text});
}

void agent_group_fail(struct ctl_agent *agent, struct agent_group *group,
                      enum hdl_status status, const char *text)
{
    if (group->state == AGENT_FAILED)
        return;
    end_proposals(agent, group, status, text);
    group->state = AGENT_FAILED;
    group->frozen = false;
    struct ctl_action *action = group_do(agent, group, CTL_DO_FAIL);
    if (action) {
        action->status = status;
        action->text = ctl_text(agent->out, "%s", text);
    }
    if (group->leaving) {
        (void)group_do(agent, group, CTL_DO_LEFT);
        agent_group_free(agent, group);
    }
}

bool agent_group_has(const struct agent_group *group, uint64_t rank_epoch)
{
    for (uint32_t i = 0; group->view && i < group->view->capacity; i++) {
        const struct ctl_slot *slot = &group->view->slots[i];
        if (slot->rank_epoch != 0 && !slot->absent && slot->last == CTL_X_FOREVER &&
            ctl_rank_epoch_rank(slot->rank_epoch) == ctl_rank_epoch_rank(rank_epoch))
            return true;
    }
    return false;
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
        bool open = slot->rank_epoch != 0 && !slot->absent && slot->last == CTL_X_FOREVER;
        bool watched = i == group->slot || ctl_map_get(&agent->neighbours, rank + 1);
        if (open && (rank == 0 || !watched))
            return true;
    }
    return false;
}

bool agent_group_needs_coordinator(const struct ctl_agent *agent,
                                   const struct agent_group *group)
{
    if (group->state != AGENT_RUNNING)
        return group->state != AGENT_FAILED;
    return group->frozen || group->leaving ||
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
    base_list_init(&group->proposals);
    base_list_push_back(&agent->groups, &group->node);
    agent_wake_at(agent, group->deadline);
    if (agent->lost || agent->refused)
        agent_group_fail(agent, group, HDL_ECOORD, "the coordinator is lost");
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
        proposed(agent, group, proposal,
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
    end_proposals(agent, group, HDL_EABORTED, "the group was left");
    (void)group_do(agent, group, CTL_DO_LEFT);
    if (agent->link == LINK_UP || group->id == 0 || agent->rank_epoch == 0) {
        agent_group_free(agent, group);
        return;
    }
    /* The coordinator cannot be told now: the record stays until it can. */
    group->key = 0;
    group->state = AGENT_FAILED;
}

static void send_attached(struct ctl_agent *agent, struct agent_group *group,
                          uint64_t rank_epoch, const struct ctl_agent_event *event)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_ATTACHED,
                                        .group = group->id,
                                        .epoch = event->epoch,
                                        .rank_epoch = rank_epoch,
                                        .status = event->status,
                                        .text = event->text});
}

static void attach_next(struct ctl_agent *agent, struct agent_group *group);

static void attached(struct ctl_agent *agent, struct agent_group *group,
                     const struct ctl_agent_event *event)
{
    if (!group->attaching || group->attaching->epoch != event->epoch)
        return;
    if (group->state == AGENT_REGISTERED && group->attaching_to == 0 && !group->join)
        group->state = AGENT_ATTACHED;
    send_attached(agent, group, group->attaching_to, event);
    ctl_view_unref(group->attaching);
    group->attaching = NULL;
    attach_next(agent, group);
}

static void link_report(struct ctl_agent *agent, struct agent_group *group,
                        const struct ctl_agent_event *event)
{
    agent_send(agent, &(struct ctl_msg){.type = CTL_MSG_LINK,
                                        .group = group->id,
                                        .rank_epoch = event->rank_epoch,
                                        .flag = event->up});
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

/* ---------------------------------------------------- what the coordinator has to say */

static void registered(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    struct agent_group *group = agent_group_by_key(agent, msg->key);
    if (!group || group->state == AGENT_FAILED)
        return;
    group->id = msg->group;
    group->rank_epoch = msg->rank_epoch;
    group->retry_at = 0;
    if (group->state != AGENT_REGISTERING)
        return;
    group->state = AGENT_REGISTERED;
    base_list_each(node, after, &group->proposals) ctl_do_send_bytes(
        agent->out, 0, base_container_of(node, struct agent_proposal, node)->bytes);
    struct ctl_action *action = group_do(agent, group, CTL_DO_REGISTERED);
    if (action) {
        action->slot = msg->slot;
        action->rank_epoch = msg->rank_epoch;
    }
}

static void hand_out(struct ctl_agent *agent, struct agent_group *group,
                     enum ctl_action_kind kind, struct ctl_view *view)
{
    struct ctl_action *action = group_do(agent, group, kind);
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
static void attach_next(struct ctl_agent *agent, struct agent_group *group)
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
    endpoint_free(agent, endpoint);
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
    attach_next(agent, group);
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
        send_attached(agent, group, 0,
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
    struct ctl_action *action = group_do(agent, group, CTL_DO_FREEZE);
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
    if (msg->status == HDL_PENDING && group->join) {
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
            proposed(agent, group, proposal, msg);
            return;
        }
    }
}

static void left(struct ctl_agent *agent, const struct ctl_msg *msg)
{
    struct agent_group *group = agent_group_by_key(agent, msg->key);
    if (!group || !group->leaving)
        return;
    end_proposals(agent, group, HDL_EABORTED, "the group was left");
    (void)group_do(agent, group, CTL_DO_LEFT);
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
            endpoint_free(agent, endpoint);
    }
    struct ctl_action *action = group_do(agent, group, CTL_DO_CLOSED);
    if (action) {
        action->slot = msg->slot;
        action->rank_epoch = msg->rank_epoch;
    }
}

static void watch(struct ctl_agent *agent, struct agent_group *group,
                  const struct ctl_msg *msg)
{
    struct ctl_action *action = group_do(agent, group, CTL_DO_WATCH_DONE);
    if (action)
        action->x = msg->x;
}

/* Sent again after a reconnection, and to whoever asks about a group that is over here.
 */
static void abort_on_wire(struct ctl_agent *agent, uint64_t group)
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
    struct agent_group *group = by_id(agent, msg->group);
    if (!group || group->state == AGENT_FAILED) {
        if (msg->type == CTL_MSG_PREPARE)
            abort_on_wire(agent, msg->group);
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

void agent_group_report(struct ctl_agent *agent, struct agent_group *group)
{
    bool known = group->state == AGENT_RUNNING || group->state == AGENT_ATTACHED;
    if (group->state == AGENT_REGISTERED)
        group->state = AGENT_REGISTERING; /* the registration is gone: once more */
    if (!known || !group->view)
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
            abort_on_wire(agent, group->id);
        if (group->key == 0)
            agent_group_free(agent, group);
        return;
    }
    if (group->state == AGENT_REGISTERING || group->state == AGENT_REGISTERED)
        ctl_do_send_bytes(agent->out, 0, group->request);
    base_list_each(node, after, &group->proposals) ctl_do_send_bytes(
        agent->out, 0, base_container_of(node, struct agent_proposal, node)->bytes);
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
            proposed(agent, group, proposal,
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
