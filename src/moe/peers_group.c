/* SPDX-License-Identifier: Apache-2.0 */
/* The peers of a group: its arena, its engine's waiting, its view. */
#include "base/clock.h"
#include "base/env.h"
#include "base/list.h"
#include "base/rankset.h"
#include "group/engine.h"
#include "group/group.h"
#include "moe/peers.h"
#include "net/net.h"

struct group_peers {
    struct moe_peers base;
    struct base_env *env;
    struct hdl_group *group;
    struct group_arena *arena;
    struct hdl_peer_window **remote; /* [ranks] */
    bool *was_there;                 /* [ranks] a member when the making began */
};

static struct group_peers *of(struct moe_peers *peers)
{
    return base_container_of(peers, struct group_peers, base);
}

static bool wait_in_group(struct moe_peers *peers, bool (*test)(void *argument),
                          void *argument, int64_t deadline_ns)
{
    return group_wait(of(peers)->group, test, argument, deadline_ns);
}

static enum hdl_status check(struct moe_peers *peers)
{
    struct hdl_group *group = of(peers)->group;
    if (atomic_load_explicit(&group->over, memory_order_relaxed) == HDL_OK)
        return HDL_OK;
    return group_check(group);
}

/* Members as of creation or the last update: who was removed since is missing, who was
 * admitted since takes part after the next one. */
static enum moe_presence presence(struct moe_peers *peers, uint32_t rank)
{
    struct group_peers *p = of(peers);
    if (rank == peers->self)
        return MOE_PRESENT;
    if (!peers->base[rank] && !p->remote[rank])
        return p->was_there[rank] ? MOE_ABSENT : MOE_NO_MEMBER;
    return group_rank_absent(p->group, rank) || !group_rank_active(p->group, rank)
               ? MOE_ABSENT
               : MOE_PRESENT;
}

static void ring(struct moe_peers *peers, uint32_t rank)
{
    net_ring(of(peers)->remote[rank]);
}

struct put_wait {
    struct moe_peers *peers;
    uint32_t rank;
    const struct moe_put *put;
    enum hdl_status status;
};

/* True when the put is on its way, or pointless. */
static bool try_put(void *argument)
{
    struct put_wait *w = argument;
    const struct moe_put *put = w->put;
    w->status = net_put_hinted(of(w->peers)->remote[w->rank], put->offset, put->src,
                               put->bytes, put->signal, put->flag, HDL_SIGNAL_SET,
                               NET_PUT_LAZY | (put->more ? NET_PUT_MORE : 0));
    if (w->status != HDL_PENDING)
        return true;
    return presence(w->peers, w->rank) != MOE_PRESENT || check(w->peers) != HDL_OK;
}

static enum hdl_status put(struct moe_peers *peers, uint32_t rank,
                           const struct moe_put *put)
{
    struct put_wait w = {.peers = peers, .rank = rank, .put = put};
    if (!of(peers)->remote[rank])
        return HDL_EPEER;
    if (!try_put(&w))
        wait_in_group(peers, try_put, &w, BASE_FOREVER);
    return w.status == HDL_PENDING ? HDL_EPEER : w.status;
}

static uint64_t mark(struct moe_peers *peers, uint32_t rank)
{
    struct hdl_peer_window *remote = of(peers)->remote[rank];
    return remote ? net_put_count(remote) : 0;
}

static bool settled(struct moe_peers *peers, uint32_t rank, uint64_t mark)
{
    struct hdl_peer_window *remote = of(peers)->remote[rank];
    return !remote || net_put_done(remote) >= mark;
}

static void destroy(struct moe_peers *peers)
{
    struct group_peers *p = of(peers);
    group_arena_destroy(p->arena);
    base_free(p->env, (void *)p->base.base);
    base_free(p->env, (void *)p->remote);
    base_free(p->env, p->was_there);
    base_free(p->env, p);
}

static const struct moe_peers_ops group_ops = {
    .wait = wait_in_group,
    .check = check,
    .presence = presence,
    .ring = ring,
    .put = put,
    .mark = mark,
    .settled = settled,
    .destroy = destroy,
};

enum hdl_status moe_peers_group(struct base_env *env, struct hdl_group *group,
                                size_t bytes, const uint64_t *members,
                                struct moe_peers **out)
{
    uint32_t ranks = group_capacity(group);
    struct group_peers *p = base_alloc(env, 1, sizeof(*p));
    struct group_arena *arena;
    uint8_t **base = base_alloc(env, ranks, sizeof(uint8_t *));
    struct hdl_peer_window **remote = base_alloc(env, ranks, sizeof(*remote));
    bool *was_there = base_alloc(env, ranks, sizeof(*was_there));
    enum hdl_status status = group_arena_create(group, bytes, &arena);
    *out = NULL;
    if (status != HDL_OK || !p || !base || !remote || !was_there) {
        if (status == HDL_OK)
            group_arena_destroy(arena);
        base_free(env, was_there);
        base_free(env, (void *)remote);
        base_free(env, (void *)base);
        base_free(env, p);
        return status;
    }
    *p = (struct group_peers){.env = env,
                              .group = group,
                              .arena = arena,
                              .remote = remote,
                              .was_there = was_there};
    p->base = (struct moe_peers){.ranks = ranks,
                                 .self = group_rank(group),
                                 .own = group_arena_data(arena),
                                 .base = base,
                                 .ops = &group_ops};
    for (uint32_t r = 0; r < ranks; r++) {
        base[r] = group_arena_map(arena, r);
        remote[r] = group_arena_remote(arena, r);
        was_there[r] = base_mask_test(members, r);
        p->base.messaged = p->base.messaged || (!base[r] && remote[r]);
    }
    *out = &p->base;
    return HDL_OK;
}
