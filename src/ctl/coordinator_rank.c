/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator's processes: admission to the job, evidence, death, neighbours. */
#include <stdio.h>

#include "base/env.h"
#include "ctl/coordinator_state.h"

#define GRACE_HERE INT64_C(50000000)

struct coord_rank *coord_rank_of(const struct ctl_coordinator *c, uint64_t rank_epoch)
{
    uint32_t index = ctl_rank_epoch_rank(rank_epoch);
    struct coord_rank *rank = index < c->num_ranks ? c->ranks[index] : NULL;
    return rank && rank->rank_epoch == rank_epoch ? rank : NULL;
}

void coord_rank_free(struct ctl_coordinator *c, struct coord_rank *rank)
{
    if (!rank)
        return;
    base_free(c->env, rank->identity.socket_name);
    base_free(c->env, rank->newcomer.socket_name);
    base_free(c->env, rank);
}

struct coord_rank *coord_get_rank(struct ctl_coordinator *c, uint32_t index)
{
    if (index >= c->num_ranks) {
        uint32_t count =
            index + 1 > c->options.num_ranks ? index + 1 : c->options.num_ranks;
        struct coord_rank **ranks =
            base_grow(c->env, c->ranks, c->num_ranks, count, sizeof(*ranks));
        if (!ranks)
            return NULL;
        c->ranks = ranks;
        c->num_ranks = count;
    }
    if (!c->ranks[index]) {
        struct coord_rank *rank = base_alloc(c->env, 1, sizeof(*rank));
        if (!rank)
            return NULL;
        rank->rank = index;
        base_list_init(&rank->members);
        c->ranks[index] = rank;
    }
    return c->ranks[index];
}

static void refuse(struct ctl_coordinator *c, uint64_t conn, enum hdl_status status,
                   const char *text)
{
    ctl_do_log(c->out, HDL_LOG_WARN, "coordinator refuses connection %llu: %s",
               (unsigned long long)conn, text);
    ctl_do_send(
        c->out, conn,
        &(struct ctl_msg){.type = CTL_MSG_REFUSED, .status = status, .text = text});
    coord_close(c, conn);
}

static void neighbour(struct ctl_coordinator *c, const struct coord_rank *to,
                      const struct coord_rank *about, bool there)
{
    coord_send(c, to,
               &(struct ctl_msg){.type = CTL_MSG_NEIGHBOUR,
                                 .rank_epoch = about->rank_epoch,
                                 .flag = there,
                                 .pid = about->identity.pid,
                                 .text = about->identity.socket_name});
}

/* Every agent watches all ranks of its host; both sides are told. */
static void tell_neighbours(struct ctl_coordinator *c, struct coord_rank *rank,
                            bool there)
{
    for (uint32_t i = 0; i < c->num_ranks; i++) {
        struct coord_rank *other = c->ranks[i];
        if (!other || other == rank || other->state != RANK_LIVE ||
            other->identity.host_id != rank->identity.host_id)
            continue;
        neighbour(c, other, rank, there);
        if (there)
            neighbour(c, rank, other, true);
    }
}

static void welcome(struct ctl_coordinator *c, struct coord_rank *rank,
                    struct coord_conn *conn)
{
    conn->rank = rank;
    rank->conn = conn->id;
    rank->state = RANK_LIVE;
    rank->last_heard = c->now;
    coord_send(c, rank,
               &(struct ctl_msg){.type = CTL_MSG_WELCOME,
                                 .rank_epoch = rank->rank_epoch,
                                 .epoch = ctl_epoch(c->term, 0),
                                 .settings = {.dead_after_ns = c->options.dead_after_ns,
                                              .turn = c->options.turn,
                                              .standalone = c->options.standalone,
                                              .collecting = c->collecting}});
}

/* A new process takes the rank; `identity` is moved. */
static void admit(struct ctl_coordinator *c, struct coord_rank *rank,
                  struct coord_conn *conn, struct coord_identity *identity)
{
    base_free(c->env, rank->identity.socket_name);
    rank->identity = *identity;
    identity->socket_name = NULL;
    rank->rank_epoch = ctl_rank_epoch(rank->rank, coord_next_registration(c, rank));
    rank->new_here = c->collecting;
    welcome(c, rank, conn);
    tell_neighbours(c, rank, true);
}

static void drop_conn(struct ctl_coordinator *c, struct coord_rank *rank)
{
    if (rank->conn != 0)
        coord_close(c, rank->conn);
    rank->conn = 0;
}

static void admit_newcomer(struct ctl_coordinator *c, struct coord_rank *rank)
{
    struct coord_conn *conn = ctl_map_get(&c->conns, rank->newcomer_conn);
    rank->newcomer_conn = 0;
    if (conn)
        admit(c, rank, conn, &rank->newcomer);
}

/* A death may free other members of the list, so the search begins anew each time. */
static struct coord_member *next_alive(struct coord_rank *rank)
{
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        if (!member->dead)
            return member;
    }
    return NULL;
}

static void end_rank(struct ctl_coordinator *c, struct coord_rank *rank,
                     enum coord_rank_state state)
{
    rank->state = state;
    drop_conn(c, rank);
    tell_neighbours(c, rank, false);
    struct coord_member *member;
    while ((member = next_alive(rank)))
        coord_member_died(c, member);
    coord_founder_missing(c, rank);
    if (rank->newcomer_conn != 0)
        admit_newcomer(c, rank);
}

static void die(struct ctl_coordinator *c, struct coord_rank *rank, const char *why)
{
    ctl_do_log(c->out, HDL_LOG_INFO, "rank %u registration %u is dead: %s", rank->rank,
               rank->registration, why);
    coord_send(c, rank, &(struct ctl_msg){.type = CTL_MSG_FENCED});
    end_rank(c, rank, RANK_DEAD);
}

void coord_goodbye(struct ctl_coordinator *c, struct coord_rank *rank)
{
    end_rank(c, rank, RANK_LEFT);
}

void coord_exited(struct ctl_coordinator *c, uint64_t rank_epoch)
{
    struct coord_rank *rank = coord_rank_of(c, rank_epoch);
    if (rank && coord_is_up(rank))
        die(c, rank, "its process ended");
}

void coord_conn_closed(struct ctl_coordinator *c, struct coord_conn *conn)
{
    struct coord_rank *rank = conn->rank;
    if (!rank) {
        for (uint32_t i = 0; i < c->num_ranks; i++) {
            if (c->ranks[i] && c->ranks[i]->newcomer_conn == conn->id)
                c->ranks[i]->newcomer_conn = 0;
        }
        return;
    }
    rank->conn = 0;
    if (!coord_is_up(rank))
        return;
    /* On this host an end is told by the process itself; a coordinator that was stopped
     * may only have lost connections that their agents gave up and made again. */
    bool here = rank->identity.host_id == c->options.host_id;
    rank->state = RANK_GRACE;
    rank->grace_until =
        c->now +
        (here && c->options.grace_ns > GRACE_HERE ? GRACE_HERE : c->options.grace_ns);
    coord_wake_at(c, rank->grace_until);
}

uint64_t coord_probe(struct ctl_coordinator *c, const struct coord_rank *rank)
{
    uint64_t id = ++c->next_probe;
    coord_send(c, rank,
               &(struct ctl_msg){.type = CTL_MSG_HEARTBEAT, .flag = true, .id = id});
    return id;
}

/* The holder lives. Only its answer says so: other messages may be older than its end. */
void coord_probed(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t id)
{
    if (id > rank->answered && id <= c->next_probe)
        rank->answered = id;
    base_list_each(node, after, &c->group_list)
    {
        struct coord_group *group = base_container_of(node, struct coord_group, node);
        if (!base_list_empty(&group->proposals) && coord_member_of(rank, group->id))
            coord_ballot_check(c, group);
    }
    if (rank->probe != id || rank->newcomer_conn == 0)
        return;
    char text[CTL_LINE_BYTES];
    (void)snprintf(text, sizeof(text), "rank %u is in use by a live process (pid %u)",
                   rank->rank, rank->identity.pid);
    refuse(c, rank->newcomer_conn, HDL_EINVAL, text);
    rank->newcomer_conn = 0;
}

/* Another process wants a rank whose holder is not known to be dead. */
static void contend(struct ctl_coordinator *c, struct coord_rank *rank,
                    struct coord_conn *conn, struct coord_identity *identity)
{
    if (rank->newcomer_conn != 0)
        refuse(c, rank->newcomer_conn, HDL_EINVAL, "a newer process wants this rank");
    base_free(c->env, rank->newcomer.socket_name);
    rank->newcomer = *identity;
    identity->socket_name = NULL;
    rank->newcomer_conn = conn->id;
    rank->probe = coord_probe(c, rank);
}

/* Groups in which this process is dead, or was and is forgotten. */
static void fence_unknown(struct ctl_coordinator *c, struct coord_rank *rank,
                          const struct ctl_hello *hello)
{
    for (uint32_t i = 0; i < hello->num_groups; i++) {
        const struct coord_member *member = coord_member_of(rank, hello->groups[i].group);
        if (hello->groups[i].epoch != 0 && (!member || member->dead))
            coord_send(c, rank,
                       &(struct ctl_msg){.type = CTL_MSG_FENCED,
                                         .group = hello->groups[i].group});
    }
}

static const struct ctl_group_state *state_of(const struct ctl_hello *hello,
                                              uint64_t group)
{
    for (uint32_t i = 0; i < hello->num_groups; i++) {
        if (hello->groups[i].group == group)
            return &hello->groups[i];
    }
    return NULL;
}

/* A member that its own agent does not speak of any more: it aborted, and that was lost.
 */
static struct coord_member *next_abandoned(struct coord_rank *rank,
                                           const struct ctl_hello *hello)
{
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        bool in = member->state == MEMBER_IN || member->state == MEMBER_ENDED;
        if (in && !member->dead && !member->left && member->process == rank->rank_epoch &&
            !state_of(hello, member->group->id))
            return member;
    }
    return NULL;
}

static void reconnect(struct ctl_coordinator *c, struct coord_rank *rank,
                      struct coord_conn *conn, const struct ctl_hello *hello)
{
    drop_conn(c, rank);
    welcome(c, rank, conn);
    tell_neighbours(c, rank, true);
    struct coord_member *abandoned;
    while ((abandoned = next_abandoned(rank, hello)))
        coord_member_died(c, abandoned);
    base_list_each(node, after, &rank->members)
    {
        struct coord_member *member = base_container_of(node, struct coord_member, node);
        coord_group_reconnected(c, member, state_of(hello, member->group->id));
    }
    (void)coord_probe(c, rank); /* for those that got lost */
    fence_unknown(c, rank, hello);
    /* What it was asked before may be lost. */
    uint64_t again = coord_probe(c, rank);
    if (rank->newcomer_conn != 0)
        rank->probe = again;
}

/* A rank of the coordinator before: keeps its rank epoch. */
static void adopt(struct ctl_coordinator *c, struct coord_rank *rank,
                  struct coord_conn *conn, const struct ctl_hello *hello,
                  struct coord_identity *identity)
{
    uint32_t registration = (uint32_t)hello->rank_epoch;
    base_free(c->env, rank->identity.socket_name);
    rank->identity = *identity;
    rank->new_here = false;
    identity->socket_name = NULL;
    if (registration > rank->registration)
        rank->registration = registration;
    if (hello->turn >= c->options.turn) /* the clock was set back since */
        c->options.turn = hello->turn + 1;
    rank->rank_epoch = hello->rank_epoch;
    welcome(c, rank, conn);
    tell_neighbours(c, rank, true);
}

static bool is_in_running_group(const struct coord_rank *rank)
{
    base_list_each(node, after, &rank->members)
    {
        const struct coord_member *member =
            base_container_of(node, struct coord_member, node);
        if (member->state == MEMBER_IN || member->state == MEMBER_ENDED)
            return true;
    }
    return false;
}

/* Does the holder give way to a process of the coordinator before? One that took the rank
 * meanwhile would have been refused; one that was registered earlier had ended, or this
 * one had not been registered. */
static bool gives_way(const struct coord_rank *rank, const struct ctl_hello *hello)
{
    if (rank->new_here)
        return !coord_is_up(rank) || !is_in_running_group(rank);
    return (uint32_t)hello->rank_epoch > (uint32_t)rank->rank_epoch;
}

/* A rank of the coordinator before, which has its place also if another was here first.
 */
static bool known_before(struct ctl_coordinator *c, struct coord_rank *rank,
                         const struct ctl_hello *hello)
{
    if (!c->collecting || hello->rank_epoch == 0 ||
        ctl_rank_epoch_rank(hello->rank_epoch) != hello->rank)
        return false;
    while (coord_is_up(rank) && gives_way(rank, hello))
        die(c, rank, "its rank is in use by a live process");
    return rank->state == RANK_NONE || (!coord_is_up(rank) && gives_way(rank, hello));
}

void coord_hello(struct ctl_coordinator *c, struct coord_conn *conn,
                 const struct ctl_hello *hello)
{
    char text[CTL_LINE_BYTES];
    if (hello->magic != CTL_WIRE_MAGIC || hello->version != CTL_WIRE_VERSION) {
        (void)snprintf(text, sizeof(text),
                       "wire version %u, the coordinator has %u (magic %08x and %08x)",
                       hello->version, CTL_WIRE_VERSION, hello->magic, CTL_WIRE_MAGIC);
        refuse(c, conn->id, HDL_ECONFIG, text);
        return;
    }
    if (hello->rank >= CTL_CAPACITY_MAX) {
        (void)snprintf(text, sizeof(text), "rank %u exceeds %u", hello->rank,
                       CTL_CAPACITY_MAX - 1);
        refuse(c, conn->id, HDL_EINVAL, text);
        return;
    }
    struct coord_rank *rank = coord_get_rank(c, hello->rank);
    struct coord_identity identity = {hello->incarnation, hello->host_id, hello->pid,
                                      base_strdup(c->env, hello->socket_name)};
    if (!rank || !identity.socket_name) {
        base_free(c->env, identity.socket_name);
        coord_out_of_memory(c);
        return;
    }
    bool same = rank->identity.incarnation == hello->incarnation && coord_is_up(rank) &&
                (hello->rank_epoch == 0 || hello->rank_epoch == rank->rank_epoch);
    if (c->collecting && hello->term >= c->term)
        c->term = hello->term + 1;
    if (same) {
        reconnect(c, rank, conn, hello);
    } else if (known_before(c, rank, hello)) {
        adopt(c, rank, conn, hello, &identity);
    } else if (hello->rank_epoch != 0) {
        ctl_do_send(c->out, conn->id, &(struct ctl_msg){.type = CTL_MSG_FENCED});
        coord_close(c, conn->id);
    } else if (coord_is_up(rank)) {
        contend(c, rank, conn, &identity);
    } else {
        admit(c, rank, conn, &identity);
    }
    base_free(c->env, identity.socket_name); /* unless it was moved */
}

void coord_excuse_gap(struct ctl_coordinator *c, int64_t gap)
{
    if (c->collecting)
        c->collect_until += gap;
    for (uint32_t i = 0; i < c->num_ranks; i++) {
        struct coord_rank *rank = c->ranks[i];
        if (!rank)
            continue;
        rank->last_heard =
            ctl_detector_after_gap(&c->detector, rank->last_heard, gap, c->now);
        if (rank->state == RANK_GRACE)
            rank->grace_until += gap;
    }
}

void coord_rank_timers(struct ctl_coordinator *c)
{
    for (uint32_t i = 0; i < c->num_ranks; i++) {
        struct coord_rank *rank = c->ranks[i];
        if (!rank)
            continue;
        if (rank->state == RANK_GRACE) {
            if (c->now >= rank->grace_until)
                die(c, rank, "its connection closed and it did not come back");
            else
                coord_wake_at(c, rank->grace_until);
        } else if (rank->state == RANK_LIVE &&
                   ctl_detector_is_silent(&c->detector, rank->last_heard, c->now)) {
            c->num_silent++;
            die(c, rank, "it was silent");
        }
    }
}
