/* SPDX-License-Identifier: Apache-2.0 */
/* Ballots: PREPARE to all, answers from all that live, one commit with all that is
 * pending. */
#include <string.h>

#include "base/env.h"
#include "ctl/boundary.h"
#include "ctl/coordinator_state.h"

static bool death_is_pending(const struct coord_group *group, uint32_t i)
{
    const struct coord_member *holder = group->slots[i].holder;
    return holder && holder->dead && !holder->left && !group->view->slots[i].absent;
}

static bool removal_is_pending(const struct coord_group *group, uint32_t i)
{
    const struct coord_slot *slot = &group->slots[i];
    const struct ctl_slot *seen = &group->view->slots[i];
    if (slot->removing && seen->absent && seen->active)
        return true;
    return slot->holder && !slot->holder->dead && slot->holder->state == MEMBER_IN &&
           (slot->removing || slot->holder->leaving);
}

static bool admission_is_pending(const struct ctl_coordinator *c,
                                 const struct coord_group *group, uint32_t i)
{
    const struct coord_slot *slot = &group->slots[i];
    return slot->admitting && c->now >= group->retry_joins_at &&
           coord_joiner_ready(group, slot);
}

bool coord_anything_is_pending(const struct ctl_coordinator *c,
                               const struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (death_is_pending(group, i) || removal_is_pending(group, i) ||
            admission_is_pending(c, group, i))
            return true;
    }
    return group->unfreeze || coord_link_is_pending(group);
}

static void send_prepare(struct ctl_coordinator *c, const struct coord_group *group,
                         const struct coord_member *to)
{
    struct ctl_msg msg = {.type = CTL_MSG_PREPARE,
                          .group = group->id,
                          .epoch = group->ballot,
                          .num_slots = group->num_dead,
                          .slots = group->dead};
    if (to) {
        coord_send(c, to->rank, &msg);
        return;
    }
    struct ctl_bytes *bytes = ctl_msg_encode(c->env, &msg);
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (holder && holder->asked && holder->rank->conn != 0)
            ctl_do_send_bytes(c->out, holder->rank->conn, bytes);
    }
    if (!bytes)
        coord_out_of_memory(c);
    ctl_bytes_unref(bytes);
}

uint64_t coord_next_ballot(const struct ctl_coordinator *c, struct coord_group *group)
{
    return ctl_epoch(c->term, ++group->num_ballots);
}

static void start(struct ctl_coordinator *c, struct coord_group *group)
{
    group->ballot = coord_next_ballot(c, group);
    group->ballot_since = c->now;
    group->num_dead = 0;
    group->num_missing = 0;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *holder = group->slots[i].holder;
        if (death_is_pending(group, i))
            group->dead[group->num_dead++] = i;
        if (!holder)
            continue;
        holder->asked = coord_is_asked(holder);
        holder->answered = false;
        if (holder->asked)
            group->num_missing++;
        if (group->slots[i].admitting)
            coord_wake_at(c, c->now + SECOND);
    }
    send_prepare(c, group, NULL);
}

void coord_prepare_again(struct ctl_coordinator *c, struct coord_member *member)
{
    if (member->group->ballot != 0 && member->asked && !member->answered)
        send_prepare(c, member->group, member);
}

/* --------------------------------------------------------------------------- commit */

struct commit {
    struct ctl_answers answers;
    struct ctl_change change;
    uint64_t epoch;
    uint64_t ready; /* of everybody */
    uint64_t done;  /* likewise */
    uint64_t next;
    uint64_t changed_from;
};

static struct ctl_slot *change_slot(struct commit *commit,
                                    const struct coord_group *group, uint32_t i)
{
    struct ctl_slot_change *change = &commit->change.slots[commit->change.num_slots++];
    change->index = i;
    change->slot = group->view->slots[i];
    change->slot.endpoint = NULL;
    return &change->slot;
}

static void end_interval(struct commit *commit, struct ctl_slot *slot, uint64_t last)
{
    if (last >= slot->last)
        return;
    slot->last = last;
    uint64_t from = last + 1 > slot->first ? last + 1 : slot->first;
    if (from < commit->changed_from)
        commit->changed_from = from;
}

static uint64_t reported_now(const struct commit *commit, const struct coord_slot *slot)
{
    uint64_t n = commit->next > 0 ? commit->next - 1 : 0;
    return n > slot->first_lacking ? n : slot->first_lacking;
}

static void commit_death(struct coord_group *group, struct commit *commit, uint32_t dead)
{
    uint32_t i = group->dead[dead];
    struct coord_slot *slot = &group->slots[i];
    struct ctl_slot *seen = change_slot(commit, group, i);
    bool planned = seen->last != CTL_X_FOREVER;
    uint64_t before = seen->last;
    /* It may have died before its first operation: then that one is the first to lack it.
     */
    uint64_t last = ctl_boundary_last(&commit->answers, dead);
    /* What nobody alive has issued nobody has returned: a joiner may begin there, and
     * must not need the windows of one who died before it came. */
    uint64_t issued = ctl_x_end(commit->next > 0 ? commit->next - 1 : 0);
    if (last > issued)
        last = issued;
    end_interval(commit, seen, last + 1 < seen->first ? seen->first - 1 : last);
    seen->absent = true;
    slot->holder->state = MEMBER_ENDED;
    slot->first_lacking = ctl_boundary_first_lacking(&commit->answers, seen->last);
    if (slot->removing || slot->holder->leaving || group->params.auto_deactivate)
        seen->active = false;
    slot->removing = false;
    if (planned && seen->last == before)
        return; /* it had gone by plan and nothing is lost: nothing to report */
    seen->reported = seen->active ? CTL_OP_FOREVER : reported_now(commit, slot);
    /* Behind its planned end it was missed by nobody, and somebody may be there already.
     */
    if (planned && seen->reported > ctl_x_op(before))
        seen->reported = ctl_x_op(before);
}

static void commit_removal(struct coord_group *group, struct commit *commit, uint32_t i)
{
    struct coord_slot *slot = &group->slots[i];
    struct ctl_slot *seen = change_slot(commit, group, i);
    seen->active = false;
    slot->removing = false;
    if (seen->absent) {
        seen->reported = reported_now(commit, slot);
        return;
    }
    end_interval(commit, seen, ctl_x_end(slot->holder->answer.next - 1));
    slot->holder->state = MEMBER_ENDED;
}

/*
 * No member has issued it, and it is behind every ended interval: those who ran that far
 * may all be gone, and a joiner cannot use the windows of one who died before it came.
 */
static uint64_t first_for_joiner(const struct coord_group *group,
                                 const struct commit *commit)
{
    uint64_t first = commit->next;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct ctl_slot *seen = &group->view->slots[i];
        if (seen->rank_epoch != 0 && seen->last != CTL_X_FOREVER &&
            ctl_x_op(seen->last) + 1 > first)
            first = ctl_x_op(seen->last) + 1;
    }
    return first;
}

static void commit_admission(struct coord_group *group, struct commit *commit, uint32_t i)
{
    struct coord_slot *slot = &group->slots[i];
    const struct ctl_slot *old = &group->view->slots[i];
    struct ctl_slot *seen = change_slot(commit, group, i);
    uint64_t first = first_for_joiner(group, commit);
    if (seen->absent && seen->active)
        seen->reported = reported_now(commit, slot);
    bool lost = seen->reported > 0;
    uint64_t before = lost ? seen->reported : seen->reported_before;
    if (before >= first)
        before = first - 1; /* the loss is made good before it showed */
    *seen =
        (struct ctl_slot){.rank_epoch = slot->joiner->rank_epoch,
                          .first = ctl_x(first, 0),
                          .last = CTL_X_FOREVER,
                          .before_from = lost ? ctl_x_op(old->first) : old->before_from,
                          .reported_before = before,
                          .active = true,
                          .endpoint = slot->joiner->endpoint};
    if (seen->first < commit->changed_from)
        commit->changed_from = seen->first;
    slot->entering = true;
}

/* The answers of all that were asked. */
static void gather(const struct coord_group *group, struct commit *commit,
                   const struct ctl_answer **items)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *holder = group->slots[i].holder;
        if (holder && holder->asked && holder->answered)
            items[commit->answers.count++] = &holder->answer;
    }
    commit->answers.items = items;
    commit->ready = ctl_boundary_ready(&commit->answers);
    commit->next = ctl_boundary_next(&commit->answers);
    commit->done = commit->answers.count > 0 ? CTL_X_FOREVER : 0;
    for (uint32_t i = 0; i < commit->answers.count; i++) {
        if (commit->answers.items[i]->done < commit->done)
            commit->done = commit->answers.items[i]->done;
    }
}

/*
 * A slot remembers the losses of one earlier holder: a third has to wait until everybody
 * has issued the operations that report the first one.
 */
static bool may_enter(struct ctl_coordinator *c, struct coord_group *group,
                      const struct commit *commit, uint32_t i)
{
    const struct ctl_slot *seen = &group->view->slots[i];
    if (!admission_is_pending(c, group, i) ||
        !coord_joiner_meets(group, &group->slots[i]))
        return false;
    for (uint32_t k = 0; k < commit->answers.count; k++) {
        if (seen->reported == 0 || seen->reported_before == 0 ||
            commit->answers.items[k]->next > seen->reported_before)
            continue;
        group->retry_joins_at = c->now + SECOND / 10;
        coord_wake_at(c, group->retry_joins_at);
        return false;
    }
    return true;
}

static void collect_changes(struct ctl_coordinator *c, struct coord_group *group,
                            struct commit *commit)
{
    for (uint32_t i = 0; !coord_anybody_stays(group) && i < group->params.capacity; i++) {
        if (!group->view->slots[i].absent)
            group->slots[i].removing = false; /* the others died meanwhile */
    }
    for (uint32_t i = 0, dead = 0; i < group->params.capacity; i++) {
        if (dead < group->num_dead && group->dead[dead] == i)
            commit_death(group, commit, dead++);
        else if (may_enter(c, group, commit, i))
            commit_admission(group, commit, i);
        else if (removal_is_pending(group, i))
            commit_removal(group, commit, i);
        else if (group->slots[i].closed_unsaid)
            change_slot(commit, group, i)->closed = true;
        group->slots[i].closed_unsaid = false;
    }
}

/* Whoever receives for others on its host changes with the members. So what not all had
 * received starts again, in a new attempt; nobody has returned it. */
static void restart_unsettled(struct commit *commit)
{
    for (uint32_t i = 0; i < commit->answers.count; i++)
        if (commit->answers.items[i]->messaged && commit->ready != CTL_X_FOREVER &&
            commit->change.settled + 1 < commit->changed_from)
            commit->changed_from = commit->change.settled + 1;
}

/* Entries that nobody can ask for any more go; a change of x takes all later ones over.
 */
static void next_attempts(const struct coord_group *group, struct commit *commit)
{
    const struct ctl_view *view = group->view;
    struct ctl_attempt *attempts = commit->change.attempts;
    uint32_t count = 0;
    for (uint32_t i = 0; i < view->num_attempts; i++) {
        if (view->attempts[i].from >= commit->changed_from)
            break;
        if (i + 1 < view->num_attempts && view->attempts[i + 1].from <= commit->done)
            continue;
        attempts[count++] = view->attempts[i];
    }
    if (commit->changed_from != CTL_X_FOREVER)
        attempts[count++] = (struct ctl_attempt){commit->changed_from, commit->epoch};
    commit->change.num_attempts = count;
}

static void publish(struct ctl_coordinator *c, struct coord_group *group,
                    const struct commit *commit)
{
    struct ctl_msg msg = {.type = CTL_MSG_COMMIT,
                          .group = group->id,
                          .epoch = commit->epoch,
                          .change = commit->change};
    struct ctl_view *view =
        ctl_view_apply(c->env, group->view, group->id, commit->epoch, &commit->change);
    struct ctl_bytes *bytes = ctl_msg_encode(c->env, &msg);
    if (!view || !bytes) {
        coord_out_of_memory(c);
        ctl_view_unref(view);
        ctl_bytes_unref(bytes);
        return;
    }
    ctl_view_unref(group->view);
    group->view = view;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (coord_is_asked(holder) && holder->rank->conn != 0)
            ctl_do_send_bytes(c->out, holder->rank->conn, bytes);
    }
    ctl_bytes_unref(bytes);
}

/* The joiners of the commit become holders, the leavers are let go. */
static void move_members(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_slot *slot = &group->slots[i];
        struct coord_member *joiner = slot->joiner;
        if (slot->entering) {
            slot->entering = false;
            slot->holder = joiner;
            slot->joiner = NULL;
            slot->admitting = false;
            slot->admitted_epoch = group->view->epoch;
            joiner->state = MEMBER_IN;
            joiner->done = group->view->slots[i].first - 1;
            joiner->watch = 0;
            coord_send_view(c, group, joiner, false);
        }
        struct coord_member *holder = slot->holder;
        if (holder && holder->leaving && !holder->left && holder->state == MEMBER_ENDED) {
            holder->left = true;
            coord_send_left(c, holder->rank, group->id, holder->key);
        }
    }
}

static void finish_ballot(struct coord_group *group)
{
    group->ballot = 0;
    group->unfreeze = false;
    group->num_dead = 0;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (group->slots[i].holder)
            group->slots[i].holder->asked = false;
    }
}

static void commit_ballot(struct ctl_coordinator *c, struct coord_group *group,
                          bool empty)
{
    uint32_t capacity = group->params.capacity;
    struct commit commit = {.epoch = group->ballot, .changed_from = CTL_X_FOREVER};
    const struct ctl_answer **items =
        base_alloc(c->env, capacity, sizeof(struct ctl_answer *));
    commit.change.slots = base_alloc(c->env, capacity, sizeof(*commit.change.slots));
    commit.change.attempts = base_alloc(c->env, group->view->num_attempts + 1,
                                        sizeof(*commit.change.attempts));
    if (!items || !commit.change.slots || !commit.change.attempts) {
        coord_out_of_memory(c);
        goto done;
    }
    commit.change.base = group->view->epoch;
    commit.change.capacity = capacity;
    commit.change.settled = group->view->settled;
    commit.change.begun = group->view->begun;
    commit.change.link_from = group->view->link_from;
    commit.change.link_to = group->view->link_to;
    if (!empty) {
        gather(group, &commit, items);
        commit.change.begun = commit.next;
        if (commit.ready != CTL_X_FOREVER && commit.ready > commit.change.settled)
            commit.change.settled = commit.ready;
        collect_changes(c, group, &commit);
        coord_link_commit(group, &commit.change, commit.ready, commit.done, commit.next);
        /* Chunks of operations that failed before must not count as complete now: some
         * ranks have ended them already. */
        const struct ctl_view *view = group->view;
        if (view->link_from <= view->link_to && commit.done < ctl_x_end(view->link_to))
            commit.change.settled = view->settled;
        restart_unsettled(&commit);
    }
    next_attempts(group, &commit);
    publish(c, group, &commit);
    finish_ballot(group);
    move_members(c, group);
done:
    base_free(c->env, items);
    base_free(c->env, commit.change.slots);
    base_free(c->env, commit.change.attempts);
}

/* All members are gone: the group ends, whoever waited to join it is told. */
static void end_group(struct ctl_coordinator *c, struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *joiner = group->slots[i].joiner;
        if (joiner && !joiner->dead)
            coord_fail_member(c, joiner->rank, joiner->key, group->id, HDL_EPEER,
                              "all members of the group are gone");
    }
    coord_group_free(c, group);
}

static bool anybody_lives(const struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (coord_is_asked(group->slots[i].holder))
            return true;
    }
    return false;
}

static void count_missing(struct coord_group *group, bool *new_death)
{
    group->num_missing = 0;
    *new_death = false;
    for (uint32_t i = 0, dead = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        bool named = dead < group->num_dead && group->dead[dead] == i;
        if (named)
            dead++;
        if (holder && holder->asked && !holder->dead && !holder->answered)
            group->num_missing++;
        if (death_is_pending(group, i) && !named)
            *new_death = true;
    }
}

static bool has_answered(const struct coord_member *holder)
{
    return holder && holder->asked && holder->answered && !holder->dead;
}

static uint64_t least_ready(const struct coord_group *group)
{
    uint64_t least = CTL_X_FOREVER;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (has_answered(holder) && holder->answer.ready < least)
            least = holder->answer.ready;
    }
    return least;
}

/*
 * Who takes part in the first messaged chunk that not all are ready for, and is done with
 * it, has seen it decided: all were ready, or it ended early on all, for want of its
 * root.
 */
static void count_done_as_decided(struct coord_group *group)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        uint64_t least = least_ready(group);
        if (!has_answered(holder) || !holder->answer.messaged ||
            holder->answer.done <= least || group->view->slots[i].first > least + 1)
            continue;
        for (uint32_t k = 0; k < group->params.capacity; k++) {
            struct coord_member *other = group->slots[k].holder;
            if (!has_answered(other) || other->answer.ready >= holder->answer.done)
                continue;
            other->answer.ready = holder->answer.done;
            ctl_boundary_normalise(&other->answer, group->view->slots[k].last);
        }
    }
}

/* All that take part in it are ready, as far as they live. */
static bool may_be_returned(const struct coord_group *group, uint64_t x)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (has_answered(holder) && ctl_slot_takes_part(&group->view->slots[i], x) &&
            holder->answer.ready < x)
            return false;
    }
    return true;
}

/* Whether somebody who came after `last` may have returned an operation. */
static bool later_ones_go_on(const struct coord_group *group, uint64_t last)
{
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        if (has_answered(group->slots[i].holder) && group->view->slots[i].first > last &&
            may_be_returned(group, group->view->slots[i].first))
            return true;
    }
    return false;
}

/*
 * A messaged chunk is returned when all its ranks are ready, and others rely on it that
 * all before it are decided, too. A rank that was removed, and is slow with its last
 * operations, takes no part in later ones: who came after it may have returned those.
 * Then nobody waits for it any more.
 */
static bool fence_late_leavers(struct ctl_coordinator *c, struct coord_group *group)
{
    bool fenced = false;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *holder = group->slots[i].holder;
        uint64_t last = group->view->slots[i].last;
        if (!has_answered(holder) || holder->state != MEMBER_ENDED ||
            !holder->answer.messaged || holder->answer.ready >= last ||
            !later_ones_go_on(group, last))
            continue;
        ctl_do_log(c->out, HDL_LOG_WARN,
                   "group %s: rank %u was removed and is too late with its operations",
                   group->params.name, i);
        coord_send(c, holder->rank,
                   &(struct ctl_msg){.type = CTL_MSG_FENCED, .group = group->id});
        holder->dead = true;
        coord_proposals_drop(c, holder);
        fenced = true;
    }
    return fenced;
}

/*
 * Starts a ballot if something is pending. A death during a ballot replaces it, but only
 * when everybody else has answered: so many deaths at once cost few ballots.
 */
void coord_ballot_check(struct ctl_coordinator *c, struct coord_group *group)
{
    if (group->state != GROUP_RUNNING)
        return;
    for (;;) {
        if (!anybody_lives(group)) {
            end_group(c, group);
            return;
        }
        if (group->ballot == 0) {
            coord_proposals_check(c, group);
            if (!coord_anything_is_pending(c, group))
                return;
            start(c, group);
        }
        bool new_death;
        count_missing(group, &new_death);
        if (group->num_missing > 0 || c->out->failed)
            return;
        count_done_as_decided(group);
        if (new_death || fence_late_leavers(c, group)) {
            start(c, group);
            return;
        }
        commit_ballot(c, group, false);
        coord_proposals_check(c, group);
        coord_introduce(c, group);
        coord_check_closed(c, group);
    }
}

static bool take_answer(struct ctl_coordinator *c, struct coord_member *member,
                        const struct ctl_answer *answer)
{
    struct ctl_answer *own = &member->answer;
    base_free(c->env, own->published);
    base_free(c->env, own->open);
    *own = *answer;
    own->published = base_alloc(c->env, answer->num_dead, sizeof(*own->published));
    own->open = base_alloc(c->env, answer->num_open, sizeof(*own->open));
    if (!own->published || !own->open)
        return false;
    if (answer->num_dead > 0)
        memcpy(own->published, answer->published,
               answer->num_dead * sizeof(*own->published));
    if (answer->num_open > 0)
        memcpy(own->open, answer->open, answer->num_open * sizeof(*own->open));
    ctl_boundary_normalise(own, member->group->view->slots[member->slot].last);
    return true;
}

void coord_answer(struct ctl_coordinator *c, struct coord_member *member,
                  const struct ctl_answer *answer)
{
    struct coord_group *group = member->group;
    if (group->state != GROUP_RUNNING || group->ballot == 0 || !member->asked ||
        member->answered || answer->ballot != group->ballot ||
        answer->num_dead != group->num_dead || answer->next == 0)
        return; /* of an older ballot */
    if (!take_answer(c, member, answer)) {
        coord_out_of_memory(c);
        return;
    }
    member->answered = true;
    if (member->answer.done > member->done)
        member->done = member->answer.done;
    if (group->num_missing > 1) {
        group->num_missing--;
        return; /* not the last one: nothing to look at */
    }
    coord_ballot_check(c, group);
}

void coord_ballot_timers(struct ctl_coordinator *c, struct coord_group *group)
{
    if (group->ballot == 0) {
        coord_ballot_check(c, group);
        return;
    }
    bool admitting = false, died = false;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        admitting |= admission_is_pending(c, group, i);
        died |= holder && holder->asked && holder->dead;
    }
    if (died) {
        coord_ballot_check(c, group); /* removed for its links during the ballot */
        return;
    }
    if (!admitting)
        return;
    if (c->now < group->ballot_since + SECOND) {
        coord_wake_at(c, group->ballot_since + SECOND);
        return;
    }
    group->retry_joins_at = c->now + SECOND;
    coord_wake_at(c, group->retry_joins_at);
    if (coord_anything_is_pending(c, group)) {
        start(c, group);
        return;
    }
    group->ballot = coord_next_ballot(c, group);
    commit_ballot(c, group, true);
}

/* -------------------------------------------------------------------------- closing */

void coord_finished(struct ctl_coordinator *c, struct coord_member *member, uint64_t x)
{
    struct coord_group *group = member->group;
    if (x > member->done)
        member->done = x;
    member->watch = 0;
    if (group->state != GROUP_RUNNING)
        return;
    coord_check_closed(c, group);
    coord_ballot_check(c, group);
}

/* The slot's holder is needed by nobody: its windows may go, its slot may be given out.
 */
static void close_slot(struct ctl_coordinator *c, struct coord_group *group, uint32_t i)
{
    struct coord_slot *slot = &group->slots[i];
    struct coord_member *holder = slot->holder;
    struct ctl_bytes *bytes =
        ctl_msg_encode(c->env, &(struct ctl_msg){.type = CTL_MSG_CLOSED,
                                                 .group = group->id,
                                                 .slot = i,
                                                 .rank_epoch = holder->rank_epoch});
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        const struct coord_member *other = group->slots[k].holder;
        if (other != holder && coord_is_asked(other) && other->rank->conn != 0)
            ctl_do_send_bytes(c->out, other->rank->conn, bytes);
    }
    if (!bytes)
        coord_out_of_memory(c);
    ctl_bytes_unref(bytes);
    slot->closed_unsaid = true;
    slot->holder = NULL;
    if (holder->dead || holder->left || slot->joiner) {
        coord_member_free(c, holder);
        return;
    }
    coord_proposals_end(c, holder, HDL_ENOTMEMBER, "this rank was removed");
    holder->state = MEMBER_REGISTERED;
    holder->introduced = false;
    slot->joiner = holder;
    coord_join_waiting(c, holder);
}

static bool needs(const struct coord_group *group, const struct coord_member *member,
                  uint64_t last)
{
    uint64_t own_last = group->view->slots[member->slot].last;
    return member->done < (own_last < last ? own_last : last);
}

static void watch(struct ctl_coordinator *c, struct coord_member *member, uint64_t x)
{
    if (member->watch != 0 && member->watch <= x)
        return;
    member->watch = x;
    coord_send(
        c, member->rank,
        &(struct ctl_msg){.type = CTL_MSG_WATCH, .group = member->group->id, .x = x});
}

static bool check_slot(struct ctl_coordinator *c, struct coord_group *group, uint32_t i)
{
    uint64_t last = group->view->slots[i].last;
    bool closed = true;
    for (uint32_t k = 0; k < group->params.capacity; k++) {
        struct coord_member *other = group->slots[k].holder;
        if (!coord_is_asked(other) || !needs(group, other, last))
            continue; /* its live owner counts too: it may still be in its last operations
                       */
        closed = false;
        uint64_t own_last = group->view->slots[k].last;
        watch(c, other, own_last < last ? own_last : last);
    }
    return closed;
}

/* Not during a ballot, which may name the slots in question; its commit looks again. */
void coord_check_closed(struct ctl_coordinator *c, struct coord_group *group)
{
    if (group->ballot != 0)
        return;
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        const struct coord_member *holder = group->slots[i].holder;
        if (!holder || holder->state != MEMBER_ENDED ||
            (holder->leaving && !holder->left && !holder->dead))
            continue;
        if (check_slot(c, group, i))
            close_slot(c, group, i);
    }
}
