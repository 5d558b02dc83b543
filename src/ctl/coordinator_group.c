/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's groups and members: making, finding, leaving, death, reconnection. */
#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

static void params_free(struct base_env *env, struct ctl_registration *params)
{
    for (uint32_t i = 0; i < params->num_params; i++) {
        base_free(env, (void *)(uintptr_t)params->params[i].name);
        base_free(env, (void *)(uintptr_t)params->params[i].value);
    }
    base_free(env, (void *)(uintptr_t)params->params);
    base_free(env, (void *)(uintptr_t)params->ranks);
    base_free(env, (void *)(uintptr_t)params->name);
    memset(params, 0, sizeof(*params));
}

/* Owned copies of what later founders are compared with; false if there is no memory. */
static bool params_copy(struct base_env *env, struct ctl_registration *to,
                        const struct ctl_registration *from)
{
    *to = *from;
    to->endpoint = NULL;
    to->endpoint_size = 0;
    to->num_params = 0;
    to->params = NULL;
    uint32_t *ranks = base_alloc(env, from->num_ranks, sizeof(*ranks));
    to->ranks = ranks;
    to->name = base_strdup(env, from->name);
    struct ctl_param *params = base_alloc(env, from->num_params, sizeof(*params));
    to->params = params;
    if (!ranks || !to->name || !params)
        return false;
    if (from->num_ranks > 0)
        memcpy(ranks, from->ranks, from->num_ranks * sizeof(*ranks));
    for (uint32_t i = 0; i < from->num_params; i++) {
        to->num_params++;
        params[i].name = base_strdup(env, from->params[i].name);
        params[i].value = base_strdup(env, from->params[i].value);
        if (!params[i].name || !params[i].value)
            return false;
    }
    return true;
}

struct coord_group *coord_group_new(struct ctl_coordinator *c, uint64_t id,
                                    const struct ctl_registration *params)
{
    struct coord_group *group = base_alloc(c->env, 1, sizeof(*group));
    if (!group) {
        coord_out_of_memory(c);
        return NULL;
    }
    base_list_init(&group->node);
    base_list_init(&group->proposals);
    group->id = id != 0 ? id : coord_next_group(c);
    group->first_slot = params->slot;
    group->num_waiting = params->num_founders;
    if (!params_copy(c->env, &group->params, params))
        goto no_memory;
    group->slots = base_alloc(c->env, params->capacity, sizeof(*group->slots));
    group->dead = base_alloc(c->env, params->capacity, sizeof(*group->dead));
    if (!group->slots || !group->dead ||
        !ctl_map_put(c->env, &c->groups, group->id, group))
        goto no_memory;
    base_list_push_back(&c->group_list, &group->node);
    return group;
no_memory:
    coord_group_free(c, group);
    coord_out_of_memory(c);
    return NULL;
}

void coord_group_free(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; group->slots && i < group->params.capacity; i++) {
        if (group->slots[i].holder)
            coord_member_free(c, group->slots[i].holder);
        if (group->slots[i].joiner)
            coord_member_free(c, group->slots[i].joiner);
    }
    base_list_each(node, after, &group->proposals)
        base_free(c->env, base_container_of(node, struct coord_proposal, node));
    if (ctl_map_get(&c->groups, group->id) == group)
        ctl_map_remove(&c->groups, group->id);
    base_list_remove(&group->node);
    params_free(c->env, &group->params);
    ctl_view_unref(group->view);
    base_free(c->env, group->told);
    base_free(c->env, group->links);
    base_free(c->env, group->slots);
    base_free(c->env, group->dead);
    base_free(c->env, group->text);
    base_free(c->env, group);
}

static void send_registered(struct ctl_coordinator *c, const struct coord_member *member)
{
    coord_send(c, member->rank,
               &(struct ctl_msg){.type = CTL_MSG_REGISTERED,
                                 .key = member->key,
                                 .group = member->group->id,
                                 .slot = member->slot,
                                 .rank_epoch = member->rank_epoch});
}

struct coord_member *coord_member_new(struct ctl_coordinator *c,
                                      struct coord_group *group, struct coord_rank *rank,
                                      uint64_t key,
                                      const struct ctl_registration *registration)
{
    struct coord_member *member = base_alloc(c->env, 1, sizeof(*member));
    if (member) {
        member->endpoint =
            ctl_bytes_new(c->env, registration->endpoint, registration->endpoint_size);
        base_list_init(&member->node);
    }
    if (!member || !member->endpoint) {
        base_free(c->env, member);
        coord_out_of_memory(c);
        return NULL;
    }
    member->group = group;
    member->rank = rank;
    member->process = rank->rank_epoch;
    member->rank_epoch = rank->rank_epoch;
    if (registration->join)
        member->rank_epoch = ctl_rank_epoch(rank->rank, coord_next_registration(c, rank));
    member->key = key;
    member->slot = registration->slot;
    base_list_push_back(&rank->members, &member->node);
    group->slots[member->slot].joiner = member;
    send_registered(c, member);
    return member;
}

void coord_member_free(struct ctl_coordinator *c, struct coord_member *member)
{
    struct coord_slot *slot = &member->group->slots[member->slot];
    coord_proposals_drop(c, member);
    if (slot->holder == member)
        slot->holder = NULL;
    if (slot->joiner == member)
        slot->joiner = NULL;
    base_list_remove(&member->node);
    ctl_bytes_unref(member->endpoint);
    base_rank_set_free(c->env, member->reached_by);
    base_rank_set_free(c->env, member->reaches);
    base_free(c->env, member->answer.published);
    base_free(c->env, member->answer.open);
    base_free(c->env, member);
}

struct coord_member *coord_member_of(struct coord_rank *rank, uint64_t group)
{
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        if (member->group->id == group && member->process == rank->rank_epoch)
            return member;
    }
    return NULL;
}

struct coord_member *coord_member_by_key(struct coord_rank *rank, uint64_t key)
{
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        if (member->key == key && member->process == rank->rank_epoch)
            return member;
    }
    return NULL;
}

void coord_fail_member(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                       uint64_t group, enum hdl_status status, const char *text)
{
    coord_send(c, rank,
               &(struct ctl_msg){.type = CTL_MSG_FAILED,
                                 .key = key,
                                 .group = group,
                                 .status = status,
                                 .text = text});
}

void coord_member_died(struct ctl_coordinator *c, struct coord_member *member)
{
    struct coord_group *group = member->group;
    if (member->dead)
        return;
    member->dead = true;
    coord_proposals_drop(c, member);
    if (group->state == GROUP_COLLECTING)
        return; /* decided when all have reported */
    if (group->state != GROUP_RUNNING) {
        coord_founder_gone(c, member);
        return;
    }
    if (group->slots[member->slot].joiner == member) {
        coord_joiner_gone(c, member);
        return;
    }
    coord_ballot_check(c, group);
}

void coord_send_left(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t group,
                     uint64_t key)
{
    coord_send(c, rank,
               &(struct ctl_msg){.type = CTL_MSG_LEFT, .group = group, .key = key});
}

void coord_leave(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key)
{
    struct coord_member *member = coord_member_by_key(rank, key);
    if (!member || member->dead || member->left) {
        coord_send_left(c, rank, member ? member->group->id : 0, key);
        return;
    }
    struct coord_group *group = member->group;
    bool holder = group->slots[member->slot].holder == member;
    if (group->state == GROUP_RUNNING && holder && member->state == MEMBER_ENDED) {
        member->leaving = true; /* removed before: no commit has to come */
        member->left = true;
        coord_send_left(c, rank, group->id, key);
        coord_check_closed(c, group);
        coord_ballot_check(c, group);
        return;
    }
    if (group->state == GROUP_COLLECTING || (group->state == GROUP_RUNNING && holder)) {
        member->leaving = true;
        coord_ballot_check(c, group);
        return;
    }
    coord_send_left(c, rank, group->id, key);
    coord_member_died(c, member);
}

void coord_abort(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                 uint64_t group)
{
    struct coord_member *member =
        key != 0 ? coord_member_by_key(rank, key) : coord_member_of(rank, group);
    if (!member || member->dead || member->left)
        return;
    ctl_do_log(c->out, HDL_LOG_INFO, "rank %u aborted group %s", member->slot,
               member->group->params.name);
    coord_member_died(c, member);
}

/* `to` NULL: to every registered founder, encoded once. */
void coord_send_view(struct ctl_coordinator *c, const struct coord_group *group,
                     const struct coord_member *to, bool attach)
{
    const struct ctl_view *view = group->view;
    struct ctl_slot_change *slots = base_alloc(c->env, view->capacity, sizeof(*slots));
    if (!slots) {
        coord_out_of_memory(c);
        return;
    }
    struct ctl_msg msg = {
        .type = CTL_MSG_VIEW, .group = group->id, .epoch = view->epoch, .flag = attach};
    msg.change = ctl_view_whole(view, slots);
    struct ctl_bytes *bytes = ctl_msg_encode(c->env, &msg);
    base_free(c->env, slots);
    if (to && to->rank->conn != 0)
        ctl_do_send_bytes(c->out, to->rank->conn, bytes);
    for (uint32_t i = 0; !to && i < group->params.capacity; i++) {
        const struct coord_member *founder = group->slots[i].joiner;
        if (founder && founder->rank->conn != 0)
            ctl_do_send_bytes(c->out, founder->rank->conn, bytes);
    }
    if (!bytes)
        coord_out_of_memory(c);
    ctl_bytes_unref(bytes);
}

void coord_group_reconnected(struct ctl_coordinator *c, struct coord_member *member,
                             const struct ctl_group_state *state)
{
    struct coord_group *group = member->group;
    if (member->process != member->rank->rank_epoch || member->dead)
        return;
    send_registered(c, member);
    uint64_t epoch = state ? state->epoch : 0;
    if (member->left) {
        coord_send_left(c, member->rank, group->id, member->key);
    } else if (group->state == GROUP_ATTACHING) {
        coord_send_view(c, group, member, true);
    } else if (group->state == GROUP_RUNNING &&
               group->slots[member->slot].holder == member) {
        if (epoch < group->view->epoch)
            coord_send_view(c, group, member, false);
        coord_prepare_again(c, member);
        member->watch = 0;
        coord_check_closed(c, group);
        coord_joiner_reconnected(c, member);
    } else if (group->state == GROUP_RUNNING) {
        bool removed = group->view->slots[member->slot].rank_epoch == member->rank_epoch;
        if (removed && epoch != 0 && epoch < group->view->epoch)
            coord_send_view(c, group, member, false); /* perhaps it was not told */
        coord_joiner_reconnected(c, member);
    }
}
