/* SPDX-License-Identifier: Apache-2.0 */
/* The invariants, checked at every commit, every returned chunk and at the end. */
#include <stdlib.h>

#include "ctl/coordinator_state.h"
#include "tools/sim/world.h"

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash ^= value + UINT64_C(0x9e3779b97f4a7c15) + (hash << 6) + (hash >> 2);
    return hash * UINT64_C(0xff51afd7ed558ccd);
}

uint64_t sim_view_hash(const struct ctl_view *view)
{
    uint64_t hash = mix(view->group, view->epoch);
    hash = mix(hash, view->settled);
    hash = mix(hash, view->link_from ^ view->link_to << 1);
    for (uint32_t i = 0; i < view->num_attempts; i++)
        hash = mix(mix(hash, view->attempts[i].from), view->attempts[i].epoch);
    for (uint32_t i = 0; i < view->capacity; i++) {
        const struct ctl_slot *slot = &view->slots[i];
        if (slot->rank_epoch == 0)
            continue;
        hash = mix(mix(mix(hash, i), slot->rank_epoch), slot->first);
        hash = mix(mix(mix(hash, slot->last), slot->reported), slot->reported_before);
        hash = mix(hash, slot->before_from);
        hash =
            mix(hash, (uint64_t)(slot->absent | slot->active << 1 | slot->closed << 2));
    }
    return hash;
}

/* The history has one view of an epoch; NULL = no memory. */
static struct sim_history *remember(struct sim_world *w, const struct ctl_view *view,
                                    uint64_t hash)
{
    struct sim_group *group = w->group;
    for (uint32_t i = group->num_history; i > 0; i--) {
        struct sim_history *known = &group->history[i - 1];
        if (known->epoch != view->epoch)
            continue;
        if (known->hash != hash)
            sim_fail(w, "invariant 11: two views of epoch %llx",
                     (unsigned long long)view->epoch);
        return known;
    }
    if (group->num_history == group->cap_history) {
        uint32_t capacity = group->cap_history ? 2 * group->cap_history : 16;
        void *history = realloc(group->history, capacity * sizeof(*group->history));
        if (!history) {
            sim_fail(w, "out of memory");
            return NULL;
        }
        group->history = history;
        group->cap_history = capacity;
    }
    struct sim_history *entry = &group->history[group->num_history++];
    *entry = (struct sim_history){.epoch = view->epoch, .hash = hash};
    return entry;
}

/* Invariants 1 and 11: what a rank applies is what was committed, once, in one order. */
uint64_t sim_check_view(struct sim_world *w, struct sim_process *p,
                        const struct ctl_view *view)
{
    uint64_t hash = sim_view_hash(view);
    if (p->plane->view && view->epoch <= p->plane->view->epoch)
        sim_fail(w, "process %u applies view %llx after %llx", p->index,
                 (unsigned long long)view->epoch,
                 (unsigned long long)p->plane->view->epoch);
    struct sim_history *entry = remember(w, view, hash);
    if (!entry || entry->applied)
        return hash;
    entry->applied = true;
    w->result->views++;
    for (uint32_t i = 1; i < view->num_attempts; i++)
        if (ctl_attempt_tag(view->attempts[i].epoch) ==
            ctl_attempt_tag(view->attempts[i - 1].epoch))
            sim_fail(w, "attempts %llx and %llx look the same",
                     (unsigned long long)view->attempts[i - 1].epoch,
                     (unsigned long long)view->attempts[i].epoch);
    bool harmless = w->result->deaths == 0 &&
                    !(w->options.faults & ~(unsigned)(SIM_JOIN | SIM_RESTART));
    for (uint32_t i = 0; i < view->capacity; i++) {
        if (harmless && view->slots[i].absent)
            sim_fail(w, "view %llx has rank %u lost, and nothing happened to it",
                     (unsigned long long)view->epoch, i);
        if (!view->slots[i].absent || w->group->death_time[i] == 0)
            continue;
        int64_t took = w->now - w->group->death_time[i];
        w->group->death_time[i] = 0;
        if (took > w->result->slowest_commit_ns)
            w->result->slowest_commit_ns = took;
    }
    return hash;
}

/* In the coordinator; NULL if it is not running there. */
static const struct coord_group *find_group(const struct sim_world *w)
{
    if (!w->coordinator)
        return NULL;
    base_list_each(node, after, &w->coordinator->group_list)
    {
        const struct coord_group *group =
            base_container_of(node, struct coord_group, node);
        if (group->state == GROUP_RUNNING && sim_is_named(w->group, group->params.name))
            return group;
    }
    return NULL;
}

/* Large views are looked at now and then only. */
static bool look_now(const struct sim_world *w)
{
    return w->group->capacity <= 64 || w->result->events % 64 == 0;
}

void sim_check_immutable(struct sim_world *w, const struct sim_process *p)
{
    for (uint32_t g = 0; g < w->options.groups; g++) {
        const struct sim_plane *plane = &p->planes[g];
        if (plane->view && look_now(w) && sim_view_hash(plane->view) != plane->view_hash)
            sim_fail(w, "invariants 1, 6: view %llx of rank %u has changed",
                     (unsigned long long)plane->view->epoch, plane->slot);
    }
}

void sim_check_coordinator(struct sim_world *w)
{
    uint32_t selected = w->group->index;
    for (uint32_t g = 0; g < w->options.groups; g++) {
        sim_select(w, g);
        const struct coord_group *group = find_group(w);
        if (group && (look_now(w) || group->view->epoch != w->group->newest)) {
            (void)remember(w, group->view, sim_view_hash(group->view));
            w->group->newest = group->view->epoch;
        }
    }
    sim_select(w, selected);
}

/* Removed for its broken links, though its process lives. */
static bool is_removed(const struct sim_world *w, const struct sim_process *p)
{
    const struct coord_group *group = find_group(w);
    if (!group)
        return false;
    const struct coord_member *holder = group->slots[p->plane->slot].holder;
    const struct ctl_slot *seen = &group->view->slots[p->plane->slot];
    return (holder && holder->dead && holder->rank_epoch == p->plane->rank_epoch) ||
           (seen->rank_epoch == p->plane->rank_epoch && seen->absent);
}

bool sim_counts(const struct sim_world *w, const struct sim_process *p)
{
    if (!p->alive || p->plane->over || p->plane->rank_epoch == 0 || p->plane->condemned)
        return false;
    const struct ctl_coordinator *c = w->coordinator;
    if (!c)
        return true;
    uint32_t rank = p->job_rank;
    if (rank >= c->num_ranks || !c->ranks[rank] ||
        c->ranks[rank]->rank_epoch != p->rank_epoch)
        return c->collecting; /* perhaps it only has not reported yet */
    if (is_removed(w, p))
        return false;
    enum coord_rank_state state = c->ranks[rank]->state;
    return state == RANK_LIVE || state == RANK_GRACE;
}

/* Invariants 2 and 3: the same ranks contributed to a chunk wherever it was returned. */
void sim_check_chunk(struct sim_world *w, struct sim_process *p, uint64_t index)
{
    uint64_t mine = p->plane->returned[index];
    if (!sim_counts(w, p))
        return;
    const struct sim_process *other =
        w->group->agreed[index] != 0 ? w->processes[w->group->agreed_by[index]] : NULL;
    if (other && other != p && sim_counts(w, other) && w->group->agreed[index] != mine)
        sim_fail(
            w,
            "invariants 2, 3: operation %llu chunk %llu: ranks %u and %u returned the "
            "data of different ranks",
            (unsigned long long)sim_op_of(w, index),
            (unsigned long long)ctl_x_chunk(sim_x_of(w, index)), p->plane->slot,
            other->plane->slot);
    w->group->agreed[index] = mine;
    w->group->agreed_by[index] = p->index;
}

bool sim_death_is_agreed(const struct sim_world *w, uint32_t slot)
{
    const struct coord_group *group = find_group(w);
    if (!group)
        return true;
    const struct ctl_slot *seen = &group->view->slots[slot];
    return seen->rank_epoch != w->group->dead_epoch[slot] || seen->absent ||
           seen->last != CTL_X_FOREVER;
}

/* Whether a new process may be started for the slot. */
bool sim_slot_is_open(const struct sim_world *w, uint32_t slot)
{
    const struct coord_group *group = find_group(w);
    return group && !group->slots[slot].joiner;
}

/* A proposal returns when the proposer's own view shows it. */
void sim_check_proposal(struct sim_world *w, struct sim_process *p,
                        const struct ctl_action *action)
{
    uint32_t kind = action->proposal & 0xff;
    uint32_t slot = (uint32_t)(action->proposal >> 8) & 0xffff;
    if (action->status != HDL_OK || !p->plane->running)
        return;
    const struct ctl_slot *seen = &p->plane->view->slots[slot];
    /* One that was removed is not told what is committed after that. */
    bool stays = p->plane->view->slots[p->plane->slot].last == CTL_X_FOREVER;
    if (stays && p->plane->view->epoch < action->epoch)
        sim_fail(w, "rank %u: a proposal returned before its view", p->plane->slot);
    if (kind == CTL_PROPOSE_ACTIVATE && !seen->active)
        sim_fail(w, "rank %u: rank %u was admitted but is not active", p->plane->slot,
                 slot);
}

/* Uniform statuses: the same failed set of an operation on all. */
void sim_check_op(struct sim_world *w, struct sim_process *p, uint64_t op)
{
    uint64_t mine = p->plane->failed[op];
    if (!sim_counts(w, p))
        return;
    const struct sim_process *other = w->group->agreed_failed[op] != 0
                                          ? w->processes[w->group->agreed_failed_by[op]]
                                          : NULL;
    /* In a mapped operation with a root a rank may have returned before the loss of one
     * that owed it nothing; whether the root was lost is the same on all. */
    bool rooted = !w->options.messaged && w->group->root[op] != UINT32_MAX;
    bool differ = w->group->agreed_failed[op] != mine;
    if (rooted)
        differ = sim_is_root_lost(w->group->agreed_failed[op]) != sim_is_root_lost(mine);
    if (other && other != p && sim_counts(w, other) && differ)
        sim_fail(w, "operation %llu: ranks %u and %u report different failed sets",
                 (unsigned long long)op, p->plane->slot, other->plane->slot);
    w->group->agreed_failed[op] = mine;
    w->group->agreed_failed_by[op] = p->index;
}

static void check_process(struct sim_world *w, const struct sim_process *p)
{
    const struct sim_plane *plane = p->plane;
    if (!plane->running && p->joiner && find_group(w)) {
        sim_fail(w, "invariant 8: process %u never joined as rank %u (%u tries)",
                 p->index, p->job_rank, p->plane->joins_tried);
        return;
    }
    if (!plane->running && !p->joiner && w->result->deaths == 0 && !w->group->broken) {
        sim_fail(w, "invariant 8: process %u of rank %u never got into the group",
                 p->index, p->job_rank);
        return;
    }
    if (plane->running && !sim_plane_finished(w, p))
        sim_fail(
            w,
            "invariant 7: rank %u hangs: %llu of %llu chunks, ready %llu, published "
            "%llu, view %llx, %s in ballot %llx",
            plane->slot, (unsigned long long)plane->done,
            (unsigned long long)w->group->num_chunks, (unsigned long long)plane->ready,
            (unsigned long long)plane->published, (unsigned long long)plane->view->epoch,
            plane->frozen ? "frozen" : "not frozen", (unsigned long long)plane->ballot);
}

/* All live ranks ended with the newest view, and every pair agrees on every result. */
void sim_check_end(struct sim_world *w)
{
    uint64_t newest = 0;
    for (uint32_t i = 0; i < w->num_processes; i++) {
        struct sim_process *p = w->processes[i];
        if (sim_counts(w, p) && p->plane->running && p->plane->view->epoch > newest)
            newest = p->plane->view->epoch;
    }
    for (uint32_t i = 0; i < w->num_processes && !w->failed; i++) {
        struct sim_process *p = w->processes[i];
        if (!p->alive || p->plane->over || p->plane->left)
            continue;
        check_process(w, p);
        if (w->failed || !sim_counts(w, p) || !p->plane->running)
            continue;
        if (p->plane->view->epoch != newest &&
            p->plane->view->slots[p->plane->slot].last == CTL_X_FOREVER)
            sim_fail(w, "rank %u ends with view %llx, others with %llx", p->plane->slot,
                     (unsigned long long)p->plane->view->epoch,
                     (unsigned long long)newest);
        for (uint64_t k = 0; k < w->group->num_chunks && !w->failed; k++) {
            if (p->plane->returned[k] != 0)
                sim_check_chunk(w, p, k);
        }
        for (uint64_t op = 1; op <= w->options.ops && !w->failed; op++) {
            if (p->plane->failed[op] != 0)
                sim_check_op(w, p, op);
        }
    }
}

void sim_check_lost(struct sim_world *w)
{
    for (uint32_t i = 0; i < w->num_processes; i++) {
        const struct sim_process *p = w->processes[i];
        if (!p->alive || p->plane->left || p->rank_epoch == 0)
            continue; /* never in the job: its own deadline ends the attempt */
        if (!p->plane->over && p->plane->running && sim_plane_finished(w, p))
            continue; /* it had nothing left to lose */
        if (!p->plane->over)
            sim_fail(w, "rank %u does not know that the coordinator is lost",
                     p->plane->slot);
        else if (p->plane->over_at > w->coord_died_at + INT64_C(2000000000) &&
                 p->plane->why == HDL_ECOORD && w->options.faults == SIM_KILL)
            sim_fail(w, "rank %u learnt of the coordinator's loss after %.3f s",
                     p->plane->slot,
                     (double)(p->plane->over_at - w->coord_died_at) / 1e9);
    }
}
