/* SPDX-License-Identifier: Apache-2.0 */
/* Creation and update of an exchange on GPUs: every rank maps the arenas of all others.
 */
#include "moe/gpu_link.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"

enum { FETCH_S = 5 };

/* What a rank tells the others. */
struct note {
    uint64_t there; /* 1; a lost rank leaves 0 */
    uint64_t failed;
    uint64_t bytes;
    struct net_ticket ticket;
};

static struct moe_gpu_link *link_of(struct moe_peers *peers)
{
    return base_container_of(peers, struct moe_gpu_link, base);
}

/* -------------------------------------------------------------------------- presence */

static enum hdl_status check(struct moe_peers *peers)
{
    struct hdl_group *group = link_of(peers)->group;
    if (atomic_load_explicit(&group->over, memory_order_relaxed) == HDL_OK)
        return HDL_OK;
    return group_check(group);
}

static enum moe_presence presence(struct moe_peers *peers, uint32_t rank)
{
    struct moe_gpu_link *l = link_of(peers);
    if (rank == peers->self)
        return MOE_PRESENT;
    if (!l->mapped[rank])
        return l->members >> rank & 1 ? MOE_ABSENT : MOE_NO_MEMBER;
    return group_rank_absent(l->group, rank) || !group_rank_active(l->group, rank)
               ? MOE_ABSENT
               : MOE_PRESENT;
}

static uint32_t present_ranks(struct moe_gpu_link *l)
{
    uint32_t present = 0;
    for (uint32_t r = 0; r < l->base.ranks; r++)
        if (presence(&l->base, r) == MOE_PRESENT)
            present |= UINT32_C(1) << r;
    return present;
}

/* Kernels that wait for a rank that is lost go on. */
static void view_changed(struct group_job *job)
{
    struct group_watch *watch = base_container_of(job, struct group_watch, job);
    struct moe_gpu_link *l = base_container_of(watch, struct moe_gpu_link, watch);
    if (moe_gpu_set_active(l->gpu, present_ranks(l)) != HDL_OK)
        base_log_error(l->env, "a lost rank could not be told to the device: %s",
                       base_detail());
}

static void destroy(struct moe_peers *peers)
{
    struct moe_gpu_link *l = link_of(peers);
    group_unwatch_views(&l->watch);
    net_descriptor_withdraw(l->group->engine->net, &l->ticket);
    if (l->fd >= 0)
        close(l->fd);
    moe_gpu_destroy(l->gpu);
    base_free(l->env, l);
}

static const struct moe_peers_ops ops = {
    .check = check,
    .presence = presence,
    .destroy = destroy,
};

/* ----------------------------------------------------------------------------- notes */

static enum hdl_status offer_arena(struct moe_gpu_link *l)
{
    enum hdl_status status = moe_gpu_export(l->gpu, &l->fd);
    return status ? status
                  : net_descriptor_offer(l->group->engine->net, l->fd, &l->ticket);
}

/* Maps the arena of another rank, unless it is mapped already. */
static enum hdl_status attach(struct moe_gpu_link *l, uint32_t rank,
                              const struct note *note)
{
    int fd = -1;
    if (!note->there || note->ticket.key != l->mapped[rank]) {
        moe_gpu_detach(l->gpu, rank);
        l->mapped[rank] = 0;
    }
    if (!note->there || l->mapped[rank])
        return HDL_OK;
    if (note->failed)
        return base_fail(HDL_EPEER,
                         "rank %u could not make its device memory of %" PRIu64 " bytes",
                         rank, note->bytes);
    enum hdl_status status = net_descriptor_fetch(l->group->engine->net, &note->ticket,
                                                  FETCH_S * (int64_t)BASE_NS_PER_S, &fd);
    if (status == HDL_OK) {
        status = moe_gpu_attach(l->gpu, rank, fd);
        close(fd);
    }
    if (status == HDL_OK)
        l->mapped[rank] = note->ticket.key;
    else
        base_fail_append(" (device memory of rank %u)", rank);
    return status;
}

/* Notes of all ranks, and what they say mapped; every rank comes here, also one that has
 * failed, and all fail alike. */
static enum hdl_status link_ranks(struct moe_gpu_link *l, enum hdl_status own,
                                  uint64_t bytes)
{
    char text[BASE_DETAIL_BYTES];
    memcpy(text, base_detail(), sizeof(text));
    uint32_t ranks = l->base.ranks;
    struct note *notes = base_alloc(l->env, ranks + 1, sizeof(*notes));
    if (!notes)
        return HDL_ENOMEM;
    notes[ranks] = (struct note){
        .there = 1, .failed = own != HDL_OK, .bytes = bytes, .ticket = l->ticket};
    enum hdl_status status =
        hdl_allgather(l->group, &notes[ranks], notes, sizeof(*notes), HDL_U8, NULL, NULL);
    if (own != HDL_OK)
        status = base_fail(own, "%s", text);
    else if (status >= HDL_OK)
        status = HDL_OK;
    for (uint32_t r = 0; status == HDL_OK && r < ranks; r++)
        if (r != l->base.self)
            status = attach(l, r, &notes[r]);
    base_free(l->env, notes);
    return status;
}

/* --------------------------------------------------------------- create and update */

static struct moe_gpu_link *new_link(struct hdl_group *group)
{
    struct base_env *env = group->engine->env;
    struct moe_gpu_link *l = base_alloc(env, 1, sizeof(*l));
    if (!l)
        return NULL;
    l->base = (struct moe_peers){
        .ranks = group_capacity(group), .self = group_rank(group), .ops = &ops};
    l->env = env;
    l->group = group;
    l->fd = -1;
    return l;
}

static enum hdl_status begin(struct moe_gpu_link *l, const struct moe_newest *newest)
{
    l->members = (uint32_t)newest->members[0];
    return moe_gpu_begin(l->gpu, l->members, present_ranks(l),
                         (uint32_t)newest->generation + 1, (uint32_t)newest->step + 1);
}

static enum hdl_status make(struct hdl_group *group, const struct hdl_moe_opts *opts,
                            struct moe_config *config, struct hdl_moe **made)
{
    struct base_env *env = group->engine->env;
    struct moe_gpu_link *l = new_link(group);
    if (!l) {
        moe_config_free(env, config);
        return HDL_ENOMEM;
    }
    enum hdl_status status = moe_exchange_create(env, config, &l->base, made);
    if (status != HDL_OK)
        return status;
    struct moe_gpu_opts o = {.config = &(*made)->config,
                             .rank = l->base.self,
                             .device = opts->cuda_device,
                             .blocks = (uint32_t)opts->cuda_blocks};
    (*made)->link = l;
    (*made)->group = group;
    status = moe_gpu_create(env, &o, &l->gpu);
    return status ? status : offer_arena(l);
}

/* Without an exchange to hold it, still a collective of the same operations. */
static enum hdl_status take_part(struct hdl_group *group, enum hdl_status own)
{
    struct moe_gpu_link *l = new_link(group);
    if (!l)
        return own;
    enum hdl_status status = link_ranks(l, own, 0);
    base_free(l->env, l);
    return status;
}

enum hdl_status moe_gpu_link_create(struct hdl_group *group,
                                    const struct hdl_moe_opts *opts,
                                    struct moe_config *config,
                                    const struct moe_newest *newest, struct hdl_moe **moe)
{
    struct hdl_moe *m = NULL;
    enum hdl_status status = make(group, opts, config, &m);
    if (m)
        status =
            link_ranks(m->link, status, m->link->gpu ? m->link->gpu->geo.total_bytes : 0);
    else
        status = take_part(group, status);
    if (status == HDL_OK)
        status = begin(m->link, newest);
    status = group_agree(group, status, "exchange on GPUs");
    if (status != HDL_OK) {
        char text[BASE_DETAIL_BYTES];
        memcpy(text, base_detail(), sizeof(text));
        hdl_moe_destroy(m);
        return base_fail(status, "%s", text);
    }
    m->generation = newest->generation + 1;
    moe_exchange_start_at(m, newest->step + 1);
    struct moe_gpu_link *l = m->link;
    group_watch_views(group, &l->watch, view_changed);
    view_changed(&l->watch.job);
    base_log_info(m->env,
                  "exchange on device %d: path cuda, dispatch by %s, combine by %s, %u "
                  "ranks, %" PRIu64 " bytes of device memory",
                  opts->cuda_device, moe_protocol_name(moe_gpu_protocol(l->gpu, false)),
                  moe_protocol_name(moe_gpu_protocol(l->gpu, true)), l->base.ranks,
                  l->gpu->geo.total_bytes);
    *moe = m;
    return HDL_OK;
}

enum hdl_status moe_gpu_link_update(struct hdl_moe *m, struct moe_config *config,
                                    const struct moe_newest *newest)
{
    struct moe_gpu_link *l = m->link;
    enum hdl_status status = moe_gpu_takes_map(l->gpu, &config->map);
    if (status == HDL_OK)
        status = moe_gpu_set_active(l->gpu, present_ranks(l));
    if (status == HDL_OK)
        status = moe_gpu_quiesce(l->gpu);
    status = link_ranks(l, status, l->gpu->geo.total_bytes);
    status = group_agree(m->group, status, "exchange on GPUs");
    if (status != HDL_OK) {
        moe_config_free(m->env, config);
        return status;
    }
    struct moe_config old = m->config;
    (void)moe_gpu_call_status(m); /* counts the steps until now */
    m->first_next = m->next;
    m->config = *config;
    moe_config_free(m->env, &old);
    m->local = moe_map_local_experts(&m->config.map, m->peers->self);
    status = begin(l, newest);
    if (status != HDL_OK)
        return status;
    m->generation = newest->generation + 1;
    m->turn = 0;
    for (uint32_t i = 0; i < m->config.shape.lanes; i++)
        m->lanes[i].phase = MOE_IDLE;
    moe_exchange_start_at(m, newest->step + 1);
    view_changed(&l->watch.job);
    return HDL_OK;
}

uint64_t moe_gpu_link_step(const struct hdl_moe *m)
{
    struct moe_gpu_state state;
    uint64_t step = 0;
    for (uint32_t lane = 0; lane < m->config.shape.lanes; lane++) {
        uint32_t last = moe_gpu_read_state(m->link->gpu, lane, &state) == HDL_OK
                            ? state.step[0] - 1
                            : 0;
        step = last > step ? last : step;
    }
    return step;
}
