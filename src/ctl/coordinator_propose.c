/* SPDX-License-Identifier: Apache-2.0 */
/* Proposals: who is to come in or to go, and who waits to hear of it. */
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

static void answer_proposal(struct ctl_coordinator *c, struct coord_proposal *proposal,
                            enum hdl_status status, uint64_t first, const char *text)
{
    const struct coord_member *member = proposal->member;
    coord_send(c, member->rank,
               &(struct ctl_msg){.type = CTL_MSG_PROPOSED,
                                 .group = member->group->id,
                                 .id = proposal->id,
                                 .status = status,
                                 .epoch = member->group->view->epoch,
                                 .x = first,
                                 .text = text});
    base_list_remove(&proposal->node);
    base_free(c->env, proposal);
}

void coord_join_failed(struct ctl_coordinator *c, const struct coord_member *joiner,
                       enum hdl_status status, const char *text)
{
    base_list_each(node, after, &joiner->group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member == joiner && proposal->kind == CTL_PROPOSE_JOIN)
            answer_proposal(c, proposal, status, 0, text);
    }
}

void coord_proposals_drop(struct ctl_coordinator *c, struct coord_member *member)
{
    base_list_each(node, after, &member->group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member != member)
            continue;
        base_list_remove(&proposal->node);
        base_free(c->env, proposal);
    }
}

/* All but a wish to join, which the coming state can still fulfil. */
void coord_proposals_end(struct ctl_coordinator *c, struct coord_member *member,
                         enum hdl_status status, const char *text)
{
    base_list_each(node, after, &member->group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member != member || proposal->kind == CTL_PROPOSE_JOIN)
            continue;
        /* Its slot is closed, so the others are even behind its last operation. */
        bool applied = proposal->kind == CTL_PROPOSE_DEACTIVATE && proposal->probe != 0;
        answer_proposal(c, proposal, applied ? HDL_OK : status, 0, applied ? "" : text);
    }
}

/* Who admits a rank that its own view has may know of a death that is not noticed here
 * yet: then the next process is meant. So the holder is asked for a sign of life. */
static bool in_doubt(const struct coord_group *group,
                     const struct coord_proposal *proposal, uint32_t i)
{
    const struct coord_slot *slot = &group->slots[i];
    return proposal->kind == CTL_PROPOSE_ACTIVATE && slot->holder &&
           slot->holder->rank != proposal->member->rank &&
           slot->admitted_epoch <= proposal->epoch &&
           (proposal->probe == 0 || slot->holder->rank->answered < proposal->probe);
}

static bool is_applied(const struct coord_group *group,
                       const struct coord_proposal *proposal, uint32_t i)
{
    const struct ctl_slot *seen = &group->view->slots[i];
    if (proposal->kind == CTL_PROPOSE_DEACTIVATE)
        return !seen->active || group->slots[i].admitted_epoch > proposal->epoch;
    /* The slot may be active for a predecessor whose loss no view has yet. */
    if (proposal->kind == CTL_PROPOSE_JOIN && group->slots[i].holder != proposal->member)
        return false;
    return seen->active && !seen->absent && !in_doubt(group, proposal, i);
}

/* Asks the ranks that are in, once. */
static void ask_holders(struct ctl_coordinator *c, const struct coord_group *group,
                        struct coord_proposal *proposal)
{
    bool asked = proposal->probe != 0;
    for (uint32_t k = 0; k < proposal->num_slots && !asked; k++) {
        uint32_t i = proposal->slots[k];
        if (!group->view->slots[i].active || !in_doubt(group, proposal, i))
            continue;
        uint64_t id = coord_probe(c, group->slots[i].holder->rank);
        if (proposal->probe == 0)
            proposal->probe = id;
    }
}

/* Ranks named in one proposal come in together: whether all that are not in yet could. */
static bool all_ready(const struct coord_group *group,
                      const struct coord_proposal *proposal)
{
    for (uint32_t k = 0; k < proposal->num_slots; k++) {
        const struct coord_slot *slot = &group->slots[proposal->slots[k]];
        if (is_applied(group, proposal, proposal->slots[k]))
            continue;
        if (!coord_joiner_ready(group, slot))
            return false;
        for (uint32_t m = 0; m < proposal->num_slots; m++) {
            uint32_t other = proposal->slots[m];
            if (m == k || other == proposal->slots[k] ||
                is_applied(group, proposal, other))
                continue;
            if (!coord_joiner_connected(slot->joiner, other))
                return false;
        }
    }
    return true;
}

/* Whether the slot's rank would still be there after all that is asked for now. */
static bool stays(const struct coord_group *group, uint32_t i)
{
    const struct coord_slot *slot = &group->slots[i];
    return slot->holder && !slot->holder->dead && !slot->holder->leaving &&
           slot->holder->state == MEMBER_IN && !slot->removing;
}

bool coord_anybody_stays(const struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (stays(group, i))
            return true;
    }
    return false;
}

/* The last one is not removed: nobody could admit anybody to the group any more. */
static bool remove_slot(struct coord_group *group, uint32_t i)
{
    bool counted = stays(group, i);
    group->slots[i].removing = true;
    if (!counted || coord_anybody_stays(group))
        return true;
    group->slots[i].removing = false;
    return false;
}

/* Whether all of it is in the view; else marks what the next ballot is to do. */
static bool examine(struct coord_group *group, struct coord_proposal *proposal,
                    uint64_t *first, bool *refused)
{
    bool applied = true;
    bool ready = proposal->kind == CTL_PROPOSE_ACTIVATE && all_ready(group, proposal);
    *first = 0;
    for (uint32_t k = 0; k < proposal->num_slots; k++) {
        uint32_t i = proposal->slots[k];
        if (is_applied(group, proposal, i)) {
            uint64_t op = ctl_x_op(group->view->slots[i].first);
            if (proposal->kind != CTL_PROPOSE_DEACTIVATE && op > *first)
                *first = op;
            continue;
        }
        applied = false;
        if (ready)
            group->slots[i].admitting = true;
        else if (proposal->kind == CTL_PROPOSE_DEACTIVATE && !remove_slot(group, i))
            *refused = true;
    }
    return applied;
}

/* Who removes himself returns when all others have the view: they answer a probe that was
 * sent behind it. */
static bool others_know(struct ctl_coordinator *c, const struct coord_group *group,
                        struct coord_proposal *proposal)
{
    bool own = false, asks = proposal->probe == 0, known = true;
    for (uint32_t k = 0; k < proposal->num_slots; k++)
        own |= proposal->slots[k] == proposal->member->slot;
    if (proposal->kind != CTL_PROPOSE_DEACTIVATE || !own)
        return true;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (!coord_is_asked(holder) || holder == proposal->member)
            continue;
        uint64_t id = asks ? coord_probe(c, holder->rank) : 0;
        if (asks && proposal->probe == 0)
            proposal->probe = id;
        known &= holder->rank->answered >= proposal->probe;
    }
    return known;
}

void coord_proposals_check(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        group->slots[i].admitting = false;
        group->slots[i].removing = false;
    }
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        uint64_t first;
        bool refused = false;
        if (proposal->kind == CTL_PROPOSE_SYNC)
            continue;
        ask_holders(c, group, proposal);
        if (examine(group, proposal, &first, &refused)) {
            if (others_know(c, group, proposal))
                answer_proposal(c, proposal, HDL_OK, first, "");
        } else if (refused)
            answer_proposal(
                c, proposal, HDL_EINVAL, 0,
                "the last active rank cannot be removed: hdl_group_destroy ends a group");
    }
    if (coord_anything_is_pending(c, group))
        return;
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->kind == CTL_PROPOSE_SYNC)
            answer_proposal(c, proposal, HDL_OK, 0, "");
    }
}

static void refuse_proposal(struct ctl_coordinator *c, const struct coord_member *member,
                            const struct ctl_msg *msg, const char *text)
{
    coord_send(c, member->rank,
               &(struct ctl_msg){.type = CTL_MSG_PROPOSED,
                                 .group = msg->group,
                                 .id = msg->id,
                                 .status = HDL_EINVAL,
                                 .text = text});
}

static bool is_known(const struct coord_group *group, const struct coord_member *member,
                     uint64_t id)
{
    base_list_each(node, after, &group->proposals)
    {
        const struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member == member && proposal->id == id)
            return true;
    }
    return false;
}

static bool is_valid(struct ctl_coordinator *c, const struct coord_member *member,
                     const struct ctl_msg *msg)
{
    const struct coord_group *group = member->group;
    bool joiner = group->slots[member->slot].joiner == member;
    char text[CTL_LINE_BYTES];
    bool alive = group->state == GROUP_RUNNING || group->state == GROUP_COLLECTING;
    if (!alive || msg->kind < CTL_PROPOSE_SYNC || msg->kind > CTL_PROPOSE_JOIN) {
        refuse_proposal(c, member, msg, "proposal out of place");
        return false;
    }
    if (group->state == GROUP_RUNNING && joiner && msg->kind != CTL_PROPOSE_JOIN &&
        msg->kind != CTL_PROPOSE_SYNC) {
        refuse_proposal(c, member, msg, "only members propose");
        return false;
    }
    for (uint32_t i = 0; i < msg->num_slots; i++) {
        if (msg->slots[i] < group->params.capacity)
            continue;
        (void)snprintf(text, sizeof(text), "rank %u is outside the capacity %u",
                       msg->slots[i], group->params.capacity);
        refuse_proposal(c, member, msg, text);
        return false;
    }
    return true;
}

void coord_propose(struct ctl_coordinator *c, struct coord_member *member,
                   const struct ctl_msg *msg)
{
    struct coord_group *group = member->group;
    if (!is_valid(c, member, msg) || is_known(group, member, msg->id))
        return;
    uint32_t count = msg->kind == CTL_PROPOSE_JOIN ? 1 : msg->num_slots;
    struct coord_proposal *proposal =
        base_alloc(c->env, 1, sizeof(*proposal) + count * sizeof(uint32_t));
    if (!proposal) {
        coord_out_of_memory(c);
        return;
    }
    proposal->member = member;
    proposal->id = msg->id;
    proposal->kind = msg->kind;
    proposal->epoch = msg->epoch;
    proposal->deadline = c->now + msg->timeout_ns;
    proposal->num_slots = count;
    if (msg->kind == CTL_PROPOSE_JOIN)
        proposal->slots[0] = member->slot;
    else if (count > 0)
        memcpy(proposal->slots, msg->slots, count * sizeof(uint32_t));
    coord_wake_at(c, proposal->deadline);
    base_list_push_back(&group->proposals, &proposal->node);
    if (group->state == GROUP_COLLECTING)
        return;
    if (msg->kind == CTL_PROPOSE_JOIN && group->slots[member->slot].joiner == member &&
        member->state == MEMBER_REGISTERED) {
        member->state = MEMBER_READY;
        coord_introduce(c, group);
    }
    coord_ballot_check(c, group);
}

void coord_rejoin(struct ctl_coordinator *c, struct coord_group *group)
{
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        struct coord_member *member = proposal->member;
        if (proposal->kind == CTL_PROPOSE_JOIN &&
            group->slots[member->slot].joiner == member)
            member->state = MEMBER_READY;
    }
    coord_introduce(c, group);
}

void coord_join_waiting(struct ctl_coordinator *c, struct coord_member *member)
{
    struct coord_group *group = member->group;
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member != member || proposal->kind != CTL_PROPOSE_JOIN)
            continue;
        member->state = MEMBER_READY;
        coord_introduce(c, group);
        return;
    }
}

static void expire(struct ctl_coordinator *c, struct coord_group *group,
                   struct coord_proposal *proposal)
{
    char text[CTL_LINE_BYTES] = "the change is not agreed yet";
    for (uint32_t k = 0; k < proposal->num_slots; k++) {
        uint32_t i = proposal->slots[k];
        if (proposal->kind != CTL_PROPOSE_DEACTIVATE && !is_applied(group, proposal, i))
            coord_joiner_lacks(group, i, text, sizeof(text));
    }
    if (group->ballot != 0) {
        for (uint32_t i = 0; i < group->params.capacity; i++) {
            const struct coord_member *holder = group->slots[i].holder;
            if (coord_is_asked(holder) && holder->asked && !holder->answered)
                (void)snprintf(text, sizeof(text), "rank %u has not answered", i);
        }
    }
    struct coord_member *member = proposal->member;
    bool join = proposal->kind == CTL_PROPOSE_JOIN;
    answer_proposal(c, proposal, HDL_ETIMEDOUT, 0, text);
    if (join && group->slots[member->slot].joiner == member) {
        member->state = MEMBER_REGISTERED;
        member->introduced = false;
    }
}

/* Frees no group: the caller goes on with it. */
void coord_proposal_timers(struct ctl_coordinator *c, struct coord_group *group)
{
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (c->now < proposal->deadline)
            coord_wake_at(c, proposal->deadline);
        else
            expire(c, group, proposal);
    }
}
