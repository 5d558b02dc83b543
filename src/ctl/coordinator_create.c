/* SPDX-License-Identifier: Apache-2.0 */
/* Founding a group: all founders register, parameters are compared, all attach, START. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

/* Those who wait are told once why, as with operations. */
#define SLOW (5 * SECOND)

/* Appends "name", ", name", ... for one slot; keeps the list readable when it is long. */
static void list_slot(char *text, size_t size, uint32_t *listed, uint32_t slot)
{
    size_t length = strlen(text);
    if ((*listed)++ >= 16) {
        if (*listed == 17)
            (void)snprintf(text + length, size - length, ", ...");
        return;
    }
    (void)snprintf(text + length, size - length, "%s%u", *listed > 1 ? ", " : "", slot);
}

static void tell(struct ctl_coordinator *c, struct coord_group *group,
                 struct coord_rank *rank, uint64_t key, uint32_t slot)
{
    if (group->told && slot < group->params.capacity)
        group->told[slot] = rank->rank_epoch;
    coord_fail_member(c, rank, key, group->id, group->status, group->text);
}

/* A founder's process that knows of the failure, or whose end was it, and still runs. */
static bool anybody_knows(const struct ctl_coordinator *c,
                          const struct coord_group *group)
{
    for (uint32_t i = 0; group->told && i < group->params.capacity; i++) {
        const struct coord_rank *rank =
            group->told[i] != 0 ? coord_rank_of(c, group->told[i]) : NULL;
        if (rank && coord_is_up(rank))
            return true;
    }
    return false;
}

/* Creation failed: everybody registered is told now, later founders when they come. */
static void break_group(struct ctl_coordinator *c, struct coord_group *group,
                        enum hdl_status status, const char *text)
{
    ctl_do_log(c->out, HDL_LOG_WARN, "group %s not created: %s", group->params.name,
               text);
    group->state = GROUP_BROKEN;
    group->status = status;
    group->text = base_strdup(c->env, text);
    group->told = base_alloc(c->env, group->params.capacity, sizeof(*group->told));
    if (!group->text || !group->told) {
        coord_out_of_memory(c);
        return;
    }
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_member *member = group->slots[i].joiner;
        if (!member)
            continue;
        if (!member->dead)
            tell(c, group, member->rank, member->key, i);
        group->told[i] = member->process;
        coord_member_free(c, member);
    }
    coord_wake_at(c, group->deadline);
}

static void drop_if_told(struct ctl_coordinator *c, struct coord_group *group)
{
    uint32_t known = 0;
    for (uint32_t i = 0; group->told && i < group->params.num_founders; i++)
        known += group->told[i] != 0;
    if (known == group->params.num_founders || !anybody_knows(c, group))
        coord_group_free(c, group);
}

static bool differs(char *text, size_t size, const char *field, const char *mine,
                    const char *theirs, uint32_t first_slot, uint32_t slot)
{
    if (strcmp(mine, theirs) == 0)
        return false;
    (void)snprintf(text, size, "%s differs: %s on rank %u, %s on rank %u", field, mine,
                   first_slot, theirs, slot);
    return true;
}

static bool number_differs(char *text, size_t size, const char *field, uint32_t mine,
                           uint32_t theirs, uint32_t first_slot, uint32_t slot)
{
    char a[16], b[16];
    (void)snprintf(a, sizeof(a), "%u", mine);
    (void)snprintf(b, sizeof(b), "%u", theirs);
    return differs(text, size, field, a, b, first_slot, slot);
}

static bool ranks_differ(char *text, size_t size, const struct ctl_registration *mine,
                         const struct ctl_registration *theirs, uint32_t first_slot)
{
    uint32_t both =
        mine->num_ranks < theirs->num_ranks ? mine->num_ranks : theirs->num_ranks;
    for (uint32_t i = 0; i < both; i++) {
        char field[40];
        (void)snprintf(field, sizeof(field), "ranks[%u]", i);
        if (number_differs(text, size, field, mine->ranks[i], theirs->ranks[i],
                           first_slot, theirs->slot))
            return true;
    }
    return false;
}

static const char *param_value(const struct ctl_registration *registration, uint32_t i)
{
    return i < registration->num_params ? registration->params[i].value : "(none)";
}

static bool params_differ(char *text, size_t size, const struct ctl_registration *mine,
                          const struct ctl_registration *theirs, uint32_t first_slot)
{
    uint32_t count =
        mine->num_params > theirs->num_params ? mine->num_params : theirs->num_params;
    for (uint32_t i = 0; i < count; i++) {
        const struct ctl_param *param =
            i < mine->num_params ? &mine->params[i] : &theirs->params[i];
        if (differs(text, size, param->name, param_value(mine, i), param_value(theirs, i),
                    first_slot, theirs->slot))
            return true;
    }
    return false;
}

/* Text names the field, both values and both ranks. Joiners are not compared in what only
 * founders know. */
bool coord_params_differ(const struct coord_group *group,
                         const struct ctl_registration *theirs, char *text, size_t size)
{
    const struct ctl_registration *mine = &group->params;
    uint32_t a = group->first_slot, b = theirs->slot;
    return number_differs(text, size, "capacity", mine->capacity, theirs->capacity, a,
                          b) ||
           (!theirs->join && number_differs(text, size, "num_ranks", mine->num_founders,
                                            theirs->num_founders, a, b)) ||
           ranks_differ(text, size, mine, theirs, a) ||
           number_differs(text, size, "auto_deactivate", mine->auto_deactivate,
                          theirs->auto_deactivate, a, b) ||
           number_differs(text, size, "auto_sync", mine->auto_sync, theirs->auto_sync, a,
                          b) ||
           params_differ(text, size, mine, theirs, a);
}

static bool is_in_group(const struct coord_group *group, const struct coord_rank *rank)
{
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        if (member->group == group && member->process == rank->rank_epoch)
            return true;
    }
    return false;
}

/* A failure is told to founders of the same start: not to the successor of a process that
 * knows of it or was its reason, nor to anybody once all who knew have ended. */
static bool is_to_be_told(const struct ctl_coordinator *c,
                          const struct coord_group *group, uint32_t slot)
{
    bool told = slot < group->params.capacity && group->told && group->told[slot] != 0;
    return !told && anybody_knows(c, group);
}

/* The newest group of that name, if a founder may still enter it or must hear of its
 * failure. */
static struct coord_group *find_forming(struct ctl_coordinator *c,
                                        const struct coord_rank *rank,
                                        const struct ctl_registration *registration)
{
    for (struct base_list *node = c->group_list.prev; node != &c->group_list;
         node = node->prev) {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (strcmp(group->params.name, registration->name) != 0 ||
            group->state == GROUP_COLLECTING)
            continue;
        if (group->state == GROUP_BROKEN)
            return is_to_be_told(c, group, registration->slot) ? group : NULL;
        return group->state == GROUP_FORMING && !is_in_group(group, rank) ? group : NULL;
    }
    return NULL;
}

static void start_attaching(struct ctl_coordinator *c, struct coord_group *group)
{
    uint32_t capacity = group->params.capacity;
    struct ctl_view *view = ctl_view_new(c->env, capacity, 1);
    if (!view) {
        coord_out_of_memory(c);
        return;
    }
    view->group = group->id;
    view->epoch = coord_next_ballot(c, group);
    view->settled = ctl_x_end(0);
    view->attempts[0] = (struct ctl_attempt){ctl_x(1, 0), view->epoch};
    for (uint32_t i = 0; i < capacity; i++) {
        struct coord_member *member = group->slots[i].joiner;
        if (!member)
            continue;
        view->slots[i] = (struct ctl_slot){.rank_epoch = member->rank_epoch,
                                           .first = ctl_x(1, 0),
                                           .last = CTL_X_FOREVER,
                                           .active = true,
                                           .endpoint = ctl_bytes_ref(member->endpoint)};
    }
    ctl_view_count(view);
    group->view = view;
    group->state = GROUP_ATTACHING;
    group->num_waiting = group->params.num_founders;
    coord_send_view(c, group, NULL, true);
}

static void start_running(struct ctl_coordinator *c, struct coord_group *group)
{
    group->state = GROUP_RUNNING;
    struct ctl_bytes *bytes =
        ctl_msg_encode(c->env, &(struct ctl_msg){.type = CTL_MSG_START,
                                                 .group = group->id,
                                                 .epoch = group->view->epoch});
    for (uint32_t i = 0; i < group->params.capacity; i++) {
        struct coord_slot *slot = &group->slots[i];
        if (!slot->joiner)
            continue;
        slot->holder = slot->joiner;
        slot->joiner = NULL;
        slot->holder->state = MEMBER_IN;
        slot->holder->done = ctl_x_end(0);
        slot->admitted_epoch = group->view->epoch;
        if (slot->holder->rank->conn != 0)
            ctl_do_send_bytes(c->out, slot->holder->rank->conn, bytes);
    }
    if (!bytes)
        coord_out_of_memory(c);
    ctl_bytes_unref(bytes);
}

static void found(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                  const struct ctl_registration *registration)
{
    char text[CTL_LINE_BYTES];
    struct coord_group *group = find_forming(c, rank, registration);
    if (!group) {
        group = coord_group_new(c, 0, registration);
        if (!group)
            return;
        group->began = c->now;
        group->deadline = c->now + registration->timeout_ns;
        coord_wake_at(c, group->began + SLOW);
        coord_wake_at(c, group->deadline);
    }
    if (group->state == GROUP_BROKEN) {
        tell(c, group, rank, key, registration->slot);
        drop_if_told(c, group);
        return;
    }
    bool differ = coord_params_differ(group, registration, text, sizeof(text));
    if (!differ && !coord_member_new(c, group, rank, key, registration))
        return;
    if (differ) {
        break_group(c, group, HDL_ECONFIG, text);
        tell(c, group, rank, key, registration->slot);
        drop_if_told(c, group);
        return;
    }
    if (--group->num_waiting == 0)
        start_attaching(c, group);
}

/* Whether a group that this process could join stands in the way of founding one. */
static bool runs_without(struct ctl_coordinator *c, const struct coord_rank *rank,
                         const struct ctl_registration *registration)
{
    struct coord_group *group = coord_find_running(c, registration->name);
    return group && !is_in_group(group, rank) &&
           registration->capacity == group->params.capacity;
}

/* Whether a registration is wrong by itself; then `text` says why. */
static bool is_wrong(const struct coord_rank *rank, const struct ctl_registration *r,
                     char *text, size_t size)
{
    text[0] = 0;
    if (r->capacity == 0 || r->capacity > CTL_CAPACITY_MAX)
        (void)snprintf(text, size, "capacity %u is outside 1 to %u", r->capacity,
                       CTL_CAPACITY_MAX);
    else if (r->slot >= r->capacity)
        (void)snprintf(text, size, "rank %u is outside the capacity %u", r->slot,
                       r->capacity);
    else if (r->num_founders == 0 || r->num_founders > r->num_ranks ||
             r->num_ranks > r->capacity)
        (void)snprintf(text, size, "%u founders, %u ranks, capacity %u", r->num_founders,
                       r->num_ranks, r->capacity);
    else if (!r->join && r->slot >= r->num_founders)
        (void)snprintf(text, size, "rank %u is not one of %u founders", r->slot,
                       r->num_founders);
    else if (r->slot < r->num_ranks && r->ranks[r->slot] != rank->rank)
        (void)snprintf(text, size, "rank %u is job rank %u in the rank list, not %u",
                       r->slot, r->ranks[r->slot], rank->rank);
    else if (!r->auto_deactivate && r->auto_sync)
        (void)snprintf(text, size, "auto_sync without auto_deactivate");
    else if (r->timeout_ns <= 0)
        (void)snprintf(text, size, "timeout of %" PRId64 " ns", r->timeout_ns);
    return text[0] != 0;
}

void coord_register(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                    const struct ctl_registration *registration)
{
    char text[CTL_LINE_BYTES];
    if (coord_member_by_key(rank, key))
        return; /* sent again after a reconnection */
    if (is_wrong(rank, registration, text, sizeof(text)))
        coord_fail_member(c, rank, key, 0, HDL_EINVAL, text);
    else if (registration->join)
        coord_register_joiner(c, rank, key, registration);
    else if (registration->found_only && runs_without(c, rank, registration)) {
        (void)snprintf(text, sizeof(text), "group %.200s runs already: rank %u can join",
                       registration->name, registration->slot);
        coord_fail_member(c, rank, key, 0, HDL_EBUSY, text);
    } else
        found(c, rank, key, registration);
}

void coord_founder_attached(struct ctl_coordinator *c, struct coord_member *member,
                            const struct ctl_msg *msg)
{
    struct coord_group *group = member->group;
    if (group->state != GROUP_ATTACHING || member->state != MEMBER_REGISTERED ||
        msg->epoch != group->view->epoch)
        return;
    if (msg->status != HDL_OK) {
        char text[CTL_LINE_BYTES];
        (void)snprintf(text, sizeof(text), "rank %u: %.400s", member->slot, msg->text);
        break_group(c, group, msg->status, text);
        drop_if_told(c, group);
        return;
    }
    member->state = MEMBER_ATTACHED;
    if (--group->num_waiting == 0)
        start_running(c, group);
}

/* Nobody waits for the deadline: a founder that is lost fails the creation on all. */
static void break_for(struct ctl_coordinator *c, struct coord_group *group, uint32_t slot,
                      const struct coord_rank *rank)
{
    char text[CTL_LINE_BYTES];
    (void)snprintf(text, sizeof(text),
                   "group %.200s: rank %u was lost while the group was created",
                   group->params.name, slot);
    break_group(c, group, HDL_EPEER, text);
    if (!group->told)
        return;
    group->told[slot] = rank->rank_epoch;
    drop_if_told(c, group);
}

void coord_founder_gone(struct ctl_coordinator *c, struct coord_member *member)
{
    break_for(c, member->group, member->slot, member->rank);
}

/* A process ended that had not registered yet: the groups that wait for it fail. */
void coord_founder_missing(struct ctl_coordinator *c, const struct coord_rank *rank)
{
    base_list_each(node, after, &c->group_list)
    {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (group->state != GROUP_FORMING)
            continue;
        for (uint32_t i = 0; i < group->params.num_founders; i++) {
            if (group->params.ranks[i] != rank->rank || group->slots[i].joiner)
                continue;
            break_for(c, group, i, rank);
            break;
        }
    }
}

/* Appends the founders that are not registered, or not connected to all. */
static void list_awaited(const struct coord_group *group, char *text, size_t size)
{
    uint32_t listed = 0;
    for (uint32_t i = 0; i < group->params.num_founders; i++) {
        const struct coord_member *member = group->slots[i].joiner;
        if (!member ||
            (group->state == GROUP_ATTACHING && member->state != MEMBER_ATTACHED))
            list_slot(text, size, &listed, i);
    }
}

static void warn_waiting(struct ctl_coordinator *c, struct coord_group *group)
{
    char text[CTL_LINE_BYTES];
    group->warned = true;
    (void)snprintf(text, sizeof(text), "group %.200s has waited %d s for ranks ",
                   group->params.name, (int)(SLOW / SECOND));
    list_awaited(group, text, sizeof(text));
    size_t length = strlen(text);
    (void)snprintf(text + length, sizeof(text) - length, " to %s",
                   group->state == GROUP_FORMING ? "register" : "connect");
    for (uint32_t i = 0; i < group->params.num_founders; i++) {
        const struct coord_member *member = group->slots[i].joiner;
        if (member)
            coord_send(c, member->rank,
                       &(struct ctl_msg){.type = CTL_MSG_NOTICE, .text = text});
    }
}

static void time_out(struct ctl_coordinator *c, struct coord_group *group)
{
    char text[CTL_LINE_BYTES];
    (void)snprintf(text, sizeof(text), "group %.200s: %s within %" PRId64 " ms: ranks ",
                   group->params.name,
                   group->state == GROUP_FORMING ? "not seen" : "not connected to all",
                   (c->now - group->began) / (SECOND / 1000));
    list_awaited(group, text, sizeof(text));
    break_group(c, group, HDL_ETIMEDOUT, text);
    coord_group_free(c, group);
}

void coord_creation_timers(struct ctl_coordinator *c, struct coord_group *group)
{
    bool waits = group->state == GROUP_FORMING || group->state == GROUP_ATTACHING;
    if (waits && !group->warned) {
        if (c->now >= group->began + SLOW)
            warn_waiting(c, group);
        else
            coord_wake_at(c, group->began + SLOW);
    }
    if (c->now < group->deadline)
        coord_wake_at(c, group->deadline);
    else if (group->state == GROUP_BROKEN)
        coord_group_free(c, group);
    else
        time_out(c, group);
}
