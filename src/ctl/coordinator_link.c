/* SPDX-License-Identifier: Apache-2.0 */
/* Links between live ranks that stay broken: who is removed, or which operations fail. */
#include "base/env.h"
#include "ctl/coordinator_state.h"

/*
 * A link is down while either end says so. Once it was down for link_timeout, the fewest
 * ranks are removed that leave the rest fully connected; in manual policy nobody is: the
 * open operations end HDL_ELINK by a ballot that changes no interval.
 */
struct coord_link {
    uint32_t ends[2]; /* slots, ascending */
    uint64_t rank_epochs[2];
    bool down[2]; /* as the end at this place says */
    int64_t since;
};

struct coord_links {
    uint32_t count, capacity;
    bool fault; /* the next commit fails operations */
    struct coord_link items[];
};

enum { EXACT_MOST = 16 }; /* ranks with failed links for which all choices are tried */

static struct coord_link *add_link(struct ctl_coordinator *c, struct coord_group *group)
{
    struct coord_links *links = group->links;
    if (links && links->count < links->capacity)
        return &links->items[links->count++];
    uint32_t capacity = links ? 2 * links->capacity : 8;
    struct coord_links *larger =
        base_alloc(c->env, 1, sizeof(*larger) + capacity * sizeof(struct coord_link));
    if (!larger) {
        coord_out_of_memory(c);
        return NULL;
    }
    if (links) {
        larger->count = links->count;
        larger->fault = links->fault;
        for (uint32_t i = 0; i < links->count; i++)
            larger->items[i] = links->items[i];
    }
    larger->capacity = capacity;
    base_free(c->env, links);
    group->links = larger;
    return &larger->items[larger->count++];
}

static struct coord_link *find_link(struct coord_group *group, uint32_t low,
                                    uint32_t high)
{
    for (uint32_t i = 0; group->links && i < group->links->count; i++) {
        struct coord_link *link = &group->links->items[i];
        if (link->ends[0] == low && link->ends[1] == high)
            return link;
    }
    return NULL;
}

static const struct coord_member *live_member(const struct coord_group *group,
                                              uint32_t slot)
{
    const struct coord_member *holder = group->slots[slot].holder;
    return holder && !holder->dead && holder->state == MEMBER_IN ? holder : NULL;
}

static bool link_counts(const struct coord_group *group, const struct coord_link *link)
{
    for (int end = 0; end < 2; end++) {
        const struct coord_member *member = live_member(group, link->ends[end]);
        if (!member || member->rank_epoch != link->rank_epochs[end])
            return false;
    }
    return link->down[0] || link->down[1];
}

void coord_link(struct ctl_coordinator *c, struct coord_member *member,
                uint64_t rank_epoch, bool up)
{
    struct coord_group *group = member->group;
    uint32_t peer = 0;
    while (peer < group->params.capacity &&
           !(live_member(group, peer) &&
             group->slots[peer].holder->rank_epoch == rank_epoch))
        peer++;
    if (group->state != GROUP_RUNNING || peer == group->params.capacity ||
        peer == member->slot || live_member(group, member->slot) != member)
        return;
    uint32_t mine = member->slot < peer ? 0 : 1;
    uint32_t low = mine == 0 ? member->slot : peer,
             high = mine == 0 ? peer : member->slot;
    struct coord_link *link = find_link(group, low, high);
    if (!link && up)
        return;
    if (!link)
        link = add_link(c, group);
    if (!link)
        return;
    if (!link_counts(group, link)) {
        link->ends[0] = low;
        link->ends[1] = high;
        link->rank_epochs[mine] = member->rank_epoch;
        link->rank_epochs[1 - mine] = rank_epoch;
        link->down[1 - mine] = false;
        link->since = c->now;
        coord_wake_at(c, c->now + c->options.link_timeout_ns);
    }
    link->down[mine] = !up;
}

/* ------------------------------------------------------------ who is to be removed */

struct suspects {
    const struct ctl_coordinator *c;
    const struct coord_group *group;
    const struct coord_link *links[64]; /* expired */
    uint32_t num_links;
    uint32_t slots[128]; /* their ends, the first to go in front */
    uint32_t num_slots;
};

static uint32_t degree(const struct suspects *suspects, uint32_t slot)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < suspects->num_links; i++)
        count +=
            suspects->links[i]->ends[0] == slot || suspects->links[i]->ends[1] == slot;
    return count;
}

/* More failed links first, then the farther from the coordinator, then the later
 * admitted. */
static bool goes_before(const struct suspects *suspects, uint32_t a, uint32_t b)
{
    uint32_t links_a = degree(suspects, a), links_b = degree(suspects, b);
    if (links_a != links_b)
        return links_a > links_b;
    const struct coord_slot *slots = suspects->group->slots;
    uint64_t host = suspects->c->options.host_id;
    bool near_a = slots[a].holder->rank->identity.host_id == host;
    bool near_b = slots[b].holder->rank->identity.host_id == host;
    if (near_a != near_b)
        return near_b;
    if (slots[a].admitted_epoch != slots[b].admitted_epoch)
        return slots[a].admitted_epoch > slots[b].admitted_epoch;
    return a > b;
}

static void add_suspect(struct suspects *suspects, uint32_t slot)
{
    for (uint32_t i = 0; i < suspects->num_slots; i++) {
        if (suspects->slots[i] == slot)
            return;
    }
    suspects->slots[suspects->num_slots++] = slot;
}

static void sort_suspects(struct suspects *suspects)
{
    for (uint32_t i = 1; i < suspects->num_slots; i++) {
        uint32_t slot = suspects->slots[i];
        uint32_t at = i;
        for (; at > 0 && goes_before(suspects, slot, suspects->slots[at - 1]); at--)
            suspects->slots[at] = suspects->slots[at - 1];
        suspects->slots[at] = slot;
    }
}

/* Whether every failed link has an end among the chosen (bit i = suspects->slots[i]). */
static bool covers(const struct suspects *suspects, uint64_t chosen)
{
    for (uint32_t k = 0; k < suspects->num_links; k++) {
        bool covered = false;
        for (uint32_t i = 0; i < suspects->num_slots; i++) {
            uint32_t slot = suspects->slots[i];
            if ((chosen >> i & 1) && (suspects->links[k]->ends[0] == slot ||
                                      suspects->links[k]->ends[1] == slot))
                covered = true;
        }
        if (!covered)
            return false;
    }
    return true;
}

/* Fewest; of equals the one whose members stand first in the order. */
static uint64_t choose_exactly(const struct suspects *suspects)
{
    uint64_t best = 0;
    int best_count = 65;
    for (uint64_t chosen = 1; chosen < UINT64_C(1) << suspects->num_slots; chosen++) {
        int count = __builtin_popcountll(chosen);
        if (count > best_count || !covers(suspects, chosen))
            continue;
        uint64_t differ = chosen ^ best;
        if (count < best_count || (chosen & differ & -differ) != 0) {
            best = chosen;
            best_count = count;
        }
    }
    return best;
}

static uint64_t choose_greedily(const struct suspects *suspects)
{
    uint64_t chosen = 0;
    for (uint32_t i = 0; i < suspects->num_slots && i < 64; i++) {
        if (covers(suspects, chosen))
            break;
        chosen |= UINT64_C(1) << i;
    }
    return chosen;
}

static void remove_suspects(struct ctl_coordinator *c, struct coord_group *group,
                            const struct suspects *suspects)
{
    uint64_t chosen = suspects->num_slots <= EXACT_MOST ? choose_exactly(suspects)
                                                        : choose_greedily(suspects);
    struct coord_member *victims[64];
    uint32_t count = 0;
    for (uint32_t i = 0; i < suspects->num_slots && i < 64; i++) {
        if (chosen >> i & 1)
            victims[count++] = group->slots[suspects->slots[i]].holder;
    }
    for (uint32_t i = 0; i < count; i++) {
        ctl_do_log(c->out, HDL_LOG_WARN,
                   "group %s: rank %u is removed: its links are broken",
                   group->params.name, victims[i]->slot);
        coord_send(c, victims[i]->rank,
                   &(struct ctl_msg){.type = CTL_MSG_FENCED, .group = group->id});
        victims[i]->dead = true;
        coord_proposals_drop(c, victims[i]);
    }
}

void coord_link_timers(struct ctl_coordinator *c, struct coord_group *group)
{
    struct suspects suspects = {.c = c, .group = group};
    for (uint32_t i = 0; group->links && i < group->links->count; i++) {
        struct coord_link *link = &group->links->items[i];
        if (!link_counts(group, link)) {
            *link = group->links->items[--group->links->count];
            i--;
            continue;
        }
        int64_t due = link->since + c->options.link_timeout_ns;
        if (c->now < due) {
            coord_wake_at(c, due);
        } else if (suspects.num_links < 64) {
            link->since = c->now; /* in manual policy it may come to this again */
            coord_wake_at(c, c->now + c->options.link_timeout_ns);
            suspects.links[suspects.num_links++] = link;
            add_suspect(&suspects, link->ends[0]);
            add_suspect(&suspects, link->ends[1]);
        }
    }
    if (suspects.num_links == 0)
        return;
    if (group->params.auto_deactivate) {
        sort_suspects(&suspects);
        remove_suspects(c, group, &suspects);
    } else {
        group->links->fault = true;
    }
}

/* ------------------------------------------------------------------- manual policy */

bool coord_link_is_pending(const struct coord_group *group)
{
    return group->links && group->links->fault;
}

/*
 * Operations with chunks above everybody's `ready`, up to the last one issued, fail. The
 * range stays in the views until everybody has ended them, since a slow rank may issue
 * its last operation after the next commit.
 */
void coord_link_commit(const struct coord_group *group, struct ctl_change *change,
                       uint64_t ready, uint64_t done, uint64_t next)
{
    bool old = change->link_to >= change->link_from;
    if (old && done >= ctl_x_end(change->link_to)) {
        old = false;
        change->link_from = 1;
        change->link_to = 0;
    }
    if (!coord_link_is_pending(group) || next == 0)
        return;
    group->links->fault = false;
    uint64_t from = ctl_x_op(ready);
    if (ctl_x_chunk(ready) == CTL_CHUNK_MAX)
        from++;
    if (from > next - 1)
        return;
    change->link_from = old && change->link_from < from ? change->link_from : from;
    change->link_to = old && change->link_to > next - 1 ? change->link_to : next - 1;
}
