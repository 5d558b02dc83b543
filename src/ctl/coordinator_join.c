/* SPDX-License-Identifier: Apache-2.0 */
/* Joiners and proposals: who may come in, who is to go, and who waits to hear of it. */
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

/* --------------------------------------------------------------------------- joiners */

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

static void attach_failed(struct ctl_coordinator *c, struct coord_group *group,
                          struct coord_member *joiner, const struct ctl_msg *msg,
                          uint32_t by);

static void joiner_attached(struct ctl_coordinator *c, struct coord_member *joiner,
                            const struct ctl_msg *msg)
{
    struct coord_group *group = joiner->group;
    if (!joiner->introduced)
        return;
    if (msg->status != HDL_OK) {
        attach_failed(c, group, joiner, msg, joiner->slot);
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
            attach_failed(c, group, joiner, msg, member->slot);
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

static bool is_connected(const struct coord_member *joiner, uint32_t slot)
{
    return base_rank_set_test(joiner->reaches, slot) &&
           base_rank_set_test(joiner->reached_by, slot);
}

/* The first condition that the joiner of a slot does not meet yet. */
static void missing_text(const struct coord_group *group, uint32_t i, char *text,
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
        if (!is_connected(joiner, k))
            (void)snprintf(text, size, "rank %u is not connected to rank %u", i, k);
    }
}

bool coord_joiner_ready(const struct coord_group *group, const struct coord_slot *slot)
{
    const struct coord_member *joiner = slot->joiner;
    if (!joiner || joiner->state != MEMBER_READY || joiner->dead || slot->holder ||
        !joiner->introduced)
        return false;
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        if (coord_is_asked(group->slots[k].holder) && !is_connected(joiner, k))
            return false;
    }
    return true;
}

bool coord_joiner_meets(const struct coord_group *group, const struct coord_slot *slot)
{
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        if (group->slots[k].entering && !is_connected(slot->joiner, k))
            return false;
    }
    return true;
}

/* -------------------------------------------------------------------------- proposals */

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

/* A failed join rolls back: the joiner is registered, as before it asked. */
static void attach_failed(struct ctl_coordinator *c, struct coord_group *group,
                          struct coord_member *joiner, const struct ctl_msg *msg,
                          uint32_t by)
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
    base_list_each(node, after, &group->proposals)
    {
        struct coord_proposal *proposal =
            base_container_of(node, struct coord_proposal, node);
        if (proposal->member == joiner && proposal->kind == CTL_PROPOSE_JOIN)
            answer_proposal(c, proposal, msg->status, 0, text);
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
            if (!is_connected(slot->joiner, other))
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
            missing_text(group, i, text, sizeof(text));
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
