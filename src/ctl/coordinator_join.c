/* SPDX-License-Identifier: Apache-2.0 */
/* Joiners: from their registration to the moment when every member reaches them. */
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

static bool has_active_member(const struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (group->view->slots[i].active && !group->view->slots[i].absent)
            return true;
    }
    return false;
}

struct coord_group *coord_find_running(struct ctl_coordinator *c, const char *name)
{
    for (struct base_list *node = c->group_list.prev; node != &c->group_list;
         node = node->prev) {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (group->state == GROUP_RUNNING && strcmp(group->params.name, name) == 0 &&
            has_active_member(group))
            return group;
    }
    return NULL;
}

/* Whether the slot is taken by a process not known to be dead; `sure` once it has
 * answered a question that was asked for the newcomer. */
static bool is_taken(struct ctl_coordinator *c, struct coord_slot *slot, bool *sure)
{
    struct coord_member *member = slot->joiner ? slot->joiner : slot->holder;
    *sure = false;
    if (!member || member->dead || member->left)
        return false;
    if (slot->probe == 0 || c->now >= slot->probe_until) {
        slot->probe = coord_probe(c, member->rank);
        slot->probe_until = c->now + SECOND;
    }
    *sure = member->rank->answered >= slot->probe;
    if (*sure)
        slot->probe = 0;
    return true;
}

void coord_register_joiner(struct ctl_coordinator *c, struct coord_rank *rank,
                           uint64_t key, const struct ctl_registration *registration)
{
    char text[CTL_LINE_BYTES];
    struct coord_group *group = coord_find_running(c, registration->name);
    if (!group) {
        (void)snprintf(text, sizeof(text), "group %.200s has no active member",
                       registration->name);
        coord_fail_member(c, rank, key, 0, HDL_PENDING, text);
        return;
    }
    if (coord_params_differ(group, registration, text, sizeof(text))) {
        coord_fail_member(c, rank, key, group->id, HDL_ECONFIG, text);
        return;
    }
    bool sure;
    if (is_taken(c, &group->slots[registration->slot], &sure)) {
        (void)snprintf(
            text, sizeof(text), "rank %u of group %.200s is in use by %s process",
            registration->slot, registration->name, sure ? "a live" : "another");
        coord_fail_member(c, rank, key, group->id, sure ? HDL_EINVAL : HDL_PENDING, text);
        return;
    }
    (void)coord_member_new(c, group, rank, key, registration);
}

static void send_endpoint(struct ctl_coordinator *c, const struct coord_member *joiner,
                          const struct coord_member *to)
{
    coord_send(c, to->rank,
               &(struct ctl_msg){.type = CTL_MSG_ENDPOINT,
                                 .group = joiner->group->id,
                                 .slot = joiner->slot,
                                 .rank_epoch = joiner->rank_epoch,
                                 .endpoint = joiner->endpoint->data,
                                 .endpoint_size = joiner->endpoint->size});
}

/* What was known of earlier occupants of the slot is not true of this one. */
static void forget_slot(const struct coord_group *group, uint32_t slot)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *other = group->slots[i].joiner;
        if (!other || !other->introduced)
            continue;
        base_rank_set_clear(other->reaches, slot);
        base_rank_set_clear(other->reached_by, slot);
    }
}

static bool introduce(struct ctl_coordinator *c, struct coord_group *group,
                      struct coord_member *joiner)
{
    if (!joiner->reaches)
        joiner->reaches = base_rank_set_alloc(c->env, group->params.capacity);
    if (!joiner->reached_by)
        joiner->reached_by = base_rank_set_alloc(c->env, group->params.capacity);
    if (!joiner->reaches || !joiner->reached_by)
        return false;
    base_rank_set_clear_all(joiner->reaches);
    base_rank_set_clear_all(joiner->reached_by);
    forget_slot(group, joiner->slot);
    joiner->introduced = true;
    coord_send_view(c, group, joiner, true);
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        const struct coord_member *other = group->slots[i].joiner;
        if (coord_is_asked(holder))
            send_endpoint(c, joiner, holder);
        if (!other || other == joiner || !other->introduced)
            continue;
        send_endpoint(c, joiner, other);
        send_endpoint(c, other, joiner);
    }
    return true;
}

void coord_introduce(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *joiner = group->slots[i].joiner;
        if (!joiner || joiner->state != MEMBER_READY || joiner->introduced)
            continue;
        if (!introduce(c, group, joiner))
            coord_out_of_memory(c);
    }
}

void coord_joiner_reconnected(struct ctl_coordinator *c, struct coord_member *member)
{
    struct coord_group *group = member->group;
    if (member->introduced && group->slots[member->slot].joiner == member)
        coord_send_view(c, group, member, true);
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *joiner = group->slots[i].joiner;
        if (joiner && joiner != member && joiner->introduced &&
            !base_rank_set_test(joiner->reached_by, member->slot))
            send_endpoint(c, joiner, member);
    }
}

void coord_joiner_gone(struct ctl_coordinator *c, struct coord_member *member)
{
    struct coord_group *group = member->group;
    for (uint32_t i = 0; member->introduced && i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (coord_is_asked(holder))
            coord_send(c, holder->rank,
                       &(struct ctl_msg){.type = CTL_MSG_CLOSED,
                                         .group = group->id,
                                         .slot = member->slot,
                                         .rank_epoch = member->rank_epoch});
    }
    coord_member_free(c, member);
    coord_ballot_check(c, group);
}

/* A failed join rolls back: the joiner is registered, as before it asked. */
static void attach_failed(struct ctl_coordinator *c, struct coord_member *joiner,
                          const struct ctl_msg *msg, uint32_t by)
{
    char text[CTL_LINE_BYTES];
    if (by == joiner->slot)
        (void)snprintf(text, sizeof(text), "rank %u cannot reach the group: %.300s", by,
                       msg->text);
    else
        (void)snprintf(text, sizeof(text), "rank %u cannot reach rank %u: %.300s", by,
                       joiner->slot, msg->text);
    joiner->state = MEMBER_REGISTERED;
    joiner->introduced = false;
    coord_join_failed(c, joiner, msg->status, text);
}

static void joiner_attached(struct ctl_coordinator *c, struct coord_member *joiner,
                            const struct ctl_msg *msg)
{
    struct coord_group *group = joiner->group;
    if (!joiner->introduced)
        return;
    if (msg->status != HDL_OK) {
        attach_failed(c, joiner, msg, joiner->slot);
        return;
    }
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_slot *slot = &group->slots[i];
        if (slot->holder && slot->admitted_epoch <= msg->epoch)
            base_rank_set_set(joiner->reaches, i);
    }
}

static void attached_to(struct ctl_coordinator *c, struct coord_member *member,
                        const struct ctl_msg *msg)
{
    struct coord_group *group = member->group;
    bool introduced = member->introduced && group->slots[member->slot].joiner == member;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *joiner = group->slots[i].joiner;
        const struct coord_member *holder = group->slots[i].holder;
        /* It may have come in since its endpoint was sent. */
        if (introduced && msg->status == HDL_OK && holder &&
            holder->rank_epoch == msg->rank_epoch)
            base_rank_set_set(member->reaches, i);
        if (!joiner || !joiner->introduced || joiner->rank_epoch != msg->rank_epoch)
            continue;
        if (msg->status != HDL_OK) {
            attach_failed(c, joiner, msg, member->slot);
            return;
        }
        base_rank_set_set(joiner->reached_by, member->slot);
        if (introduced)
            base_rank_set_set(member->reaches, i);
    }
}

void coord_attached(struct ctl_coordinator *c, struct coord_member *member,
                    const struct ctl_msg *msg)
{
    struct coord_group *group = member->group;
    if (group->state != GROUP_RUNNING) {
        coord_founder_attached(c, member, msg);
        return;
    }
    if (msg->rank_epoch == 0)
        joiner_attached(c, member, msg);
    else
        attached_to(c, member, msg);
    coord_ballot_check(c, group);
}

bool coord_joiner_connected(const struct coord_member *joiner, uint32_t slot)
{
    return base_rank_set_test(joiner->reaches, slot) &&
           base_rank_set_test(joiner->reached_by, slot);
}

void coord_joiner_lacks(const struct coord_group *group, uint32_t i, char *text,
                        size_t size)
{
    const struct coord_slot *slot = &group->slots[i];
    const struct coord_member *joiner = slot->joiner;
    if (!joiner && group->view->slots[i].active && !group->view->slots[i].absent)
        (void)snprintf(text, size, "rank %u does not answer", i);
    else if (!joiner)
        (void)snprintf(text, size, "rank %u is not registered", i);
    else if (joiner->state != MEMBER_READY)
        (void)snprintf(text, size, "rank %u has not asked to join", i);
    else if (slot->holder)
        (void)snprintf(text, size, "the former rank %u is still needed by operations", i);
    else
        (void)snprintf(text, size, "no member has admitted rank %u", i);
    for (uint32_t k = 0; joiner && joiner->introduced && k < group->params.capacity;
         k++) {
        if (!coord_is_asked(group->slots[k].holder) || k == i)
            continue;
        if (!coord_joiner_connected(joiner, k))
            (void)snprintf(text, size, "rank %u is not connected to rank %u", i, k);
    }
}

bool coord_joiner_ready(const struct coord_group *group, const struct coord_slot *slot)
{
    const struct coord_member *joiner = slot->joiner;
    if (!joiner || joiner->state != MEMBER_READY || slot->holder || !joiner->introduced)
        return false;
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        if (coord_is_asked(group->slots[k].holder) && !coord_joiner_connected(joiner, k))
            return false;
    }
    return true;
}

bool coord_joiner_meets(const struct coord_group *group, const struct coord_slot *slot)
{
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        if (group->slots[k].entering && !coord_joiner_connected(slot->joiner, k))
            return false;
    }
    return true;
}
