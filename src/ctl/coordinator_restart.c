/* SPDX-License-Identifier: Apache-2.0 */
/* After a restart: the agents report their groups, and the coordinator takes them over.
 */
#include <stdio.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

/*
 * The coordinator keeps nothing that its agents do not also hold. Reports come with the
 * first connections; a group is taken over when every rank of its newest view has
 * reported or was silent for dead_after. Until then it proposes nothing in that group.
 */

/*
 * Registrations grow from one start to the next, also of a rank that nobody reports: of
 * two processes of a rank the later one has it. The term would not do: while ranks still
 * report it is not known, and processes may come already.
 */
uint32_t coord_next_registration(const struct ctl_coordinator *c, struct coord_rank *rank)
{
    uint32_t base = c->options.turn << 8;
    if (rank->registration < base)
        rank->registration = base;
    return ++rank->registration;
}

/* Numbers given before the restart are not given again: the term is in them; while it is
 * not known they are above all that a term gives. */
uint64_t coord_next_group(struct ctl_coordinator *c)
{
    uint64_t base = c->term;
    if (c->collecting)
        base = UINT64_C(1) << 31 | (c->options.instance >> 32 & 0x7fffffff);
    return base << 32 | ++c->num_groups;
}

static struct coord_group *find_or_make(struct ctl_coordinator *c,
                                        const struct ctl_msg *msg)
{
    struct coord_group *group = ctl_map_get(&c->groups, msg->group);
    if (group || !c->collecting)
        return group;
    group = coord_group_new(c, msg->group, &msg->registration);
    if (group)
        group->state = GROUP_COLLECTING;
    return group;
}

/* A whole view of the group that is registered. */
static bool is_sound(const struct ctl_msg *msg)
{
    const struct ctl_change *change = &msg->change;
    bool sound = msg->epoch != 0 && change->base == 0 && change->capacity != 0 &&
                 change->capacity == msg->registration.capacity &&
                 msg->slot < change->capacity;
    for (uint32_t i = 0; i < change->num_slots; i++)
        sound &= change->slots[i].index < change->capacity;
    return sound;
}

/* Keeps the newest view, and no registration number of it will be given again. False: no
 * memory. */
static bool take_view(struct ctl_coordinator *c, struct coord_group *group,
                      const struct ctl_msg *msg)
{
    /* Tags of attempts leave the term out, so the count goes on. */
    if (ctl_epoch_count(msg->epoch) > group->num_ballots)
        group->num_ballots = ctl_epoch_count(msg->epoch);
    if (group->view && msg->epoch <= group->view->epoch)
        return true;
    struct ctl_view *view =
        ctl_view_apply(c->env, NULL, group->id, msg->epoch, &msg->change);
    if (!view)
        return false;
    ctl_view_unref(group->view);
    group->view = view;
    for (uint32_t i = 0; i < view->capacity; i++) {
        uint64_t rank_epoch = view->slots[i].rank_epoch;
        if (rank_epoch == 0 || ctl_rank_epoch_rank(rank_epoch) >= CTL_CAPACITY_MAX)
            continue;
        struct coord_rank *rank = coord_get_rank(c, ctl_rank_epoch_rank(rank_epoch));
        if (!rank)
            return false;
        if ((uint32_t)rank_epoch > rank->registration)
            rank->registration = (uint32_t)rank_epoch;
    }
    return true;
}

static bool is_complete(const struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct ctl_slot *seen = &group->view->slots[i];
        const struct coord_member *member = group->slots[i].joiner;
        bool needed = seen->rank_epoch != 0 && !seen->absent && !seen->closed;
        if (needed && (!member || member->rank_epoch != seen->rank_epoch))
            return false;
    }
    return true;
}

/*
 * A rank of the view that did not report: dead, and its loss is still to be agreed. One
 * that had left by plan looks the same; its operations were done, so nothing is lost with
 * it.
 */
static void make_ghost(struct ctl_coordinator *c, struct coord_group *group, uint32_t i)
{
    const struct ctl_slot *seen = &group->view->slots[i];
    struct coord_rank *rank = coord_get_rank(c, ctl_rank_epoch_rank(seen->rank_epoch));
    struct coord_member *ghost = base_alloc(c->env, 1, sizeof(*ghost));
    if (!rank || !ghost) {
        base_free(c->env, ghost);
        coord_out_of_memory(c);
        return;
    }
    ghost->group = group;
    ghost->rank = rank;
    ghost->rank_epoch = seen->rank_epoch;
    ghost->slot = i;
    ghost->dead = true;
    ghost->state = seen->last == CTL_X_FOREVER ? MEMBER_IN : MEMBER_ENDED;
    base_list_push_back(&rank->members, &ghost->node);
    group->slots[i].holder = ghost;
}

/* Puts the member that reported where the newest view has it. */
static void place(struct ctl_coordinator *c, struct coord_group *group, uint32_t i)
{
    struct coord_slot *slot = &group->slots[i];
    const struct ctl_slot *seen = &group->view->slots[i];
    struct coord_member *member = slot->joiner;
    bool same = member && member->rank_epoch == seen->rank_epoch;
    if (member && (!same || seen->absent) &&
        (member->reported_epoch != 0 || member->founding) &&
        !(same && seen->closed && !seen->absent)) {
        /* The view before the restart had it dead or replaced. */
        coord_send(c, member->rank,
                   &(struct ctl_msg){.type = CTL_MSG_FENCED, .group = group->id});
        coord_member_free(c, member);
        member = NULL;
    }
    slot->first_lacking = ctl_x_op(seen->last) + 1;
    if (member && same && !seen->closed) {
        slot->holder = member;
        slot->joiner = NULL;
        member->state = seen->last == CTL_X_FOREVER ? MEMBER_IN : MEMBER_ENDED;
    } else if (!slot->holder && seen->rank_epoch != 0 && !seen->closed) {
        make_ghost(c, group, i);
    }
    if (slot->joiner && slot->joiner->dead) /* since it reported */
        coord_member_free(c, slot->joiner);
}

/* Nobody runs it: its founders begin again. */
static void register_again(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *member = group->slots[i].joiner;
        if (member && !member->dead)
            coord_fail_member(
                c, member->rank, member->key, group->id, HDL_PENDING,
                "the coordinator was restarted while the group was created");
    }
    coord_group_free(c, group);
}

static void take_over(struct ctl_coordinator *c, struct coord_group *group)
{
    bool running = false;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *member = group->slots[i].joiner;
        running |= member && member->reported_epoch != 0;
    }
    if (!running) {
        register_again(c, group);
        return;
    }
    ctl_do_log(c->out, HDL_LOG_INFO, "group %s is taken over with view %llx",
               group->params.name, (unsigned long long)group->view->epoch);
    for (uint32_t i = 0; i < group->params.capacity; i++)
        place(c, group, i);
    group->state = GROUP_RUNNING;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (coord_is_asked(holder) && holder->reported_epoch < group->view->epoch)
            coord_send_view(c, group, holder, false);
        /* One that left, and does not know yet that it is out. */
        const struct coord_member *gone = group->slots[i].joiner;
        if (gone && gone->reported_epoch != 0 &&
            gone->reported_epoch < group->view->epoch)
            coord_send_view(c, group, gone, false);
    }
    coord_rejoin(c, group);
    coord_check_closed(c, group);
    coord_ballot_check(c, group);
}

/* Removed by plan and closed before the restart: it may join again. */
static bool is_spare(const struct coord_group *group, const struct ctl_msg *msg)
{
    const struct ctl_slot *seen = &group->view->slots[msg->slot];
    return group->state == GROUP_RUNNING && seen->rank_epoch == msg->rank_epoch &&
           seen->closed && !seen->absent;
}

void coord_state(struct ctl_coordinator *c, struct coord_rank *rank,
                 const struct ctl_msg *msg)
{
    const struct ctl_registration *registration = &msg->registration;
    if (coord_member_by_key(rank, msg->key) || !is_sound(msg))
        return;
    struct coord_group *group = find_or_make(c, msg);
    bool late = !group || (group->state != GROUP_COLLECTING && !is_spare(group, msg));
    if (late && !msg->flag && registration->join)
        return; /* a joiner registers anew */
    if (late || registration->capacity != group->params.capacity ||
        group->slots[msg->slot].joiner) {
        coord_send(c, rank,
                   &(struct ctl_msg){.type = CTL_MSG_FENCED, .group = msg->group});
        return; /* taken over without it */
    }
    struct coord_member *member = base_alloc(c->env, 1, sizeof(*member));
    struct ctl_bytes *endpoint =
        ctl_bytes_new(c->env, registration->endpoint, registration->endpoint_size);
    bool collecting = group->state == GROUP_COLLECTING;
    if (!member || !endpoint || (collecting && !take_view(c, group, msg))) {
        base_free(c->env, member);
        ctl_bytes_unref(endpoint);
        coord_out_of_memory(c);
        return;
    }
    member->group = group;
    member->rank = rank;
    member->process = rank->rank_epoch;
    member->rank_epoch = msg->rank_epoch;
    member->key = msg->key;
    member->slot = msg->slot;
    member->endpoint = endpoint;
    member->reported_epoch = msg->flag ? msg->epoch : 0;
    member->founding = !msg->flag && !registration->join;
    base_list_push_back(&rank->members, &member->node);
    group->slots[msg->slot].joiner = member;
    group->unfreeze |= collecting && msg->x != 0;
    if (collecting && is_complete(group))
        take_over(c, group);
    else if (!collecting && msg->epoch < group->view->epoch)
        coord_send_view(c, group, member,
                        false); /* perhaps it does not know that it is out */
}

void coord_collect_timers(struct ctl_coordinator *c)
{
    if (!c->collecting)
        return;
    if (c->now < c->collect_until) {
        coord_wake_at(c, c->collect_until);
        return;
    }
    c->collecting = false;
    for (;;) {
        struct coord_group *group = NULL;
        base_list_each(node, after, &c->group_list)
        {
            struct coord_group *one = base_container_of(node, struct coord_group, node);
            if (one->state == GROUP_COLLECTING && !group)
                group = one;
        }
        if (!group || c->out->failed)
            return;
        take_over(c, group);
    }
}
