/* SPDX-License-Identifier: Apache-2.0 */
/* Reaching ranks that come after the creation: their memory is opened before they are in.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "ctl/bytes.h"
#include "group/group.h"
#include "group/p2p.h"
#include "host/host.h"
#include "net/net.h"

/*
 *   control thread            worker thread                 data threads
 *   attach(view)  --post-->   open what is new --> arrived
 *                 <--attached--
 *   commit(view)  arrived --> view->reach     ------------> adopt: peer[] = reach
 *
 * A slot's stream memory here is cleaned before the answer, so the newcomer finds nothing
 * of its predecessor; that waits until the predecessor's interval is closed.
 */

/* Links are made before the admission, which would have to wait for them, and by the
 * newcomer alone: of two connections that cross, providers drop one. A member that does
 * not answer in this time is for others to judge. */
#define GREETING_NS BASE_NS_PER_S

static void set_arrived(struct hdl_group *group, uint32_t rank, struct group_reach *reach)
{
    group_lock_view(group);
    struct group_reach *old = group->arrived[rank];
    group->arrived[rank] = reach;
    group_unlock_view(group);
    group_reach_unref(group->engine->env, old);
}

/* A reference, or NULL: the control thread may drop the group's own one at any time. */
static struct group_reach *arrived(struct hdl_group *group, uint32_t rank)
{
    group_lock_view(group);
    struct group_reach *reach = group_reach_ref(group->arrived[rank]);
    group_unlock_view(group);
    return reach;
}

static bool has_arrived(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch)
{
    struct group_reach *reach = arrived(group, rank);
    bool yes = reach && reach->rank_epoch == rank_epoch;
    group_reach_unref(group->engine->env, reach);
    return yes;
}

enum slot_state { SLOT_CONNECTED, SLOT_FREE, SLOT_HELD };

/* What the newest view has in the slot: this rank epoch, nobody who is needed, or
 * another. */
static enum slot_state slot_state(struct hdl_group *group, uint32_t rank,
                                  uint64_t rank_epoch)
{
    atomic_fetch_add(&group->view_readers, 1);
    const struct ctl_slot *slot = &atomic_load(&group->view)->ctl->slots[rank];
    enum slot_state state = SLOT_HELD;
    if (slot->rank_epoch == rank_epoch && rank_epoch != 0)
        state = SLOT_CONNECTED;
    else if (slot->rank_epoch == 0 || slot->closed ||
             atomic_load(&group->closed[rank]) == slot->rank_epoch)
        state = SLOT_FREE;
    atomic_fetch_sub(&group->view_readers, 1);
    return state;
}

/* The path of a group is that of its founders; a newcomer finds it out. */
static const struct group_path *choose_path(struct hdl_group *group,
                                            const struct ctl_view *view)
{
    if (group->path != &group_path_isolated)
        return group->path;
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct ctl_slot *slot = &view->slots[r];
        if (r != group->rank && slot->rank_epoch && slot->endpoint && !slot->absent &&
            !net_handle_mapped(group->engine->net, slot->endpoint->data,
                               slot->endpoint->size))
            return &group_path_messaged;
    }
    return &group_path_mapped;
}

/* What a member's segment says, if it is open here, is no guess. */
static const struct group_path *path_said(struct hdl_group *group, uint32_t rank,
                                          uint64_t rank_epoch,
                                          const struct group_path *otherwise)
{
    struct group_reach *reach = arrived(group, rank);
    if (reach && reach->rank_epoch == rank_epoch)
        otherwise = group_segment_path(reach->segment, otherwise);
    group_reach_unref(group->engine->env, reach);
    return otherwise;
}

static enum hdl_status open_rank(struct hdl_group *group, uint32_t rank,
                                 const struct ctl_slot *slot, bool messaged)
{
    struct net *net = group->engine->net;
    const struct ctl_bytes *handle = slot->endpoint;
    bool near = net_handle_mapped(net, handle->data, handle->size);
    /* Both sides say the same: the newcomer, which guesses the path, sees it by this. */
    bool newcomer = group->path == &group_path_isolated;
    if (!near &&
        (!messaged || (newcomer && !net_handle_has_fabric(handle->data, handle->size))))
        return base_fail(
            HDL_ENOTSUP,
            "rank %u is on another host, and the founders of group %s share "
            "memory: give it its capacity and transport fabric from the start",
            newcomer ? group->rank : rank, group->name);
    struct group_reach *reach = base_alloc(group->engine->env, 1, sizeof(*reach));
    if (!reach)
        return HDL_ENOMEM;
    enum hdl_status status =
        group_open_memory(group, rank, handle->data, handle->size,
                          near ? NET_READ : NET_READ | NET_WRITE, &reach->remote);
    reach->references = 1;
    reach->rank_epoch = slot->rank_epoch;
    if (status == HDL_OK && near) {
        reach->segment = net_remote_map(reach->remote);
        status = group_segment_check(group, rank, reach->segment);
    }
    if (status != HDL_OK) {
        group_reach_unref(group->engine->env, reach);
        return status;
    }
    set_arrived(group, rank, reach);
    return HDL_OK;
}

/* HDL_PENDING: a former holder is still needed; looked at again when that changes. */
static enum hdl_status attach_rank(struct hdl_group *group, uint32_t rank,
                                   const struct ctl_slot *slot, bool messaged)
{
    enum slot_state state = slot_state(group, rank, slot->rank_epoch);
    if (state == SLOT_CONNECTED || has_arrived(group, rank, slot->rank_epoch))
        return HDL_OK;
    if (state == SLOT_HELD && group->path != &group_path_isolated)
        return HDL_PENDING;
    enum hdl_status status = open_rank(group, rank, slot, messaged);
    if (status != HDL_OK)
        return status;
    group_admit_writer(group, rank, slot->rank_epoch);
    group_engine_lock(group->engine);
    group_p2p_renew(group, rank, slot->rank_epoch);
    group_engine_unlock(group->engine);
    return HDL_OK;
}

/* Do all whose memory a newcomer opened know it? */
static bool all_answered(void *argument)
{
    struct hdl_group *group = argument;
    bool all = true;
    for (uint32_t r = 0; all && r < group->capacity; r++) {
        struct group_reach *reach = arrived(group, r);
        all = !reach || net_remote_greet(reach->remote);
        group_reach_unref(group->engine->env, reach);
    }
    return all || atomic_load(&group->attach_stopped);
}

static enum hdl_status attach_all(struct hdl_group *group, const struct ctl_view *view)
{
    const struct group_path *path = choose_path(group, view);
    enum hdl_status status = HDL_OK;
    for (uint32_t r = 0; status == HDL_OK && r < group->capacity; r++) {
        const struct ctl_slot *slot = &view->slots[r];
        bool ended = slot->last != CTL_X_FOREVER;
        if (r != group->rank && slot->rank_epoch && slot->endpoint && !slot->absent &&
            !ended)
            status = attach_rank(group, r, slot, path->messaged);
        if (status == HDL_OK && group->path == &group_path_isolated)
            path = path_said(group, r, slot->rank_epoch, path);
    }
    if (status == HDL_OK && group->path == &group_path_isolated) {
        (void)group_engine_wait(group->engine, all_answered, group,
                                base_now_ns() + GREETING_NS);
        group_engine_lock(group->engine);
        group->joined_path = path;
        group_engine_unlock(group->engine);
    }
    return status;
}

static void post(struct hdl_group *group)
{
    if (group_worker_post(&group->engine->attacher, &group->attach_job) != HDL_OK)
        group_end(group, HDL_ESYSTEM, "no thread to reach new ranks");
}

void group_attach_run(struct group_job *job)
{
    struct hdl_group *group = base_container_of(job, struct hdl_group, attach_job);
    uint64_t closings = atomic_load(&group->closings);
    struct ctl_view *view = atomic_exchange(&group->attaching, NULL);
    if (!view)
        return;
    enum hdl_status status = attach_all(group, view);
    if (status == HDL_PENDING) {
        struct ctl_view *none = NULL;
        if (!atomic_compare_exchange_strong(&group->attaching, &none, view))
            ctl_view_unref(view); /* a newer one came, and is posted */
        else if (atomic_load(&group->closings) != closings)
            post(group);
        return;
    }
    if (status != HDL_OK)
        base_log_warn(group->engine->env, "group %s cannot reach a new rank: %s",
                      group->name, base_detail());
    for (uint32_t r = 0; status == HDL_OK && r < group->capacity; r++)
        if (view->slots[r].rank_epoch && view->slots[r].first == CTL_X_FOREVER)
            atomic_store(&group->ready_epoch[r], view->slots[r].rank_epoch);
    host_group_attached(group->host_group, view->epoch, status,
                        status == HDL_OK ? "" : base_detail());
    ctl_view_unref(view);
}

void group_attach(void *user, struct ctl_view *view)
{
    struct hdl_group *group = user;
    if (atomic_load(&group->attach_stopped))
        return;
    ctl_view_unref(atomic_exchange(&group->attaching, ctl_view_ref(view)));
    post(group);
}

void group_closed(void *user, uint32_t slot, uint64_t rank_epoch)
{
    struct hdl_group *group = user;
    if (slot >= group->capacity)
        return;
    if (atomic_load(&group->ready_epoch[slot]) == rank_epoch)
        atomic_store(&group->ready_epoch[slot], 0);
    /* A joiner that went away again says nothing of the former holder, which may be
     * closed already. */
    if (slot_state(group, slot, rank_epoch) == SLOT_CONNECTED)
        atomic_store(&group->closed[slot], rank_epoch);
    atomic_fetch_add(&group->closings, 1);
    if (has_arrived(group, slot, rank_epoch))
        set_arrived(group, slot, NULL); /* a joiner that went away again */
    group_attach_again(group);
    group_engine_wake(group->engine);
}

void group_attach_again(struct hdl_group *group)
{
    if (atomic_load(&group->attaching) && !atomic_load(&group->attach_stopped))
        post(group);
}

void group_attach_stop(struct hdl_group *group)
{
    atomic_store(&group->attach_stopped, true);
    group_worker_cancel(&group->engine->attacher, &group->attach_job);
    group_worker_cancel(&group->engine->attacher, &group->enlarge_job);
    ctl_view_unref(atomic_exchange(&group->attaching, NULL));
    for (uint32_t r = 0; group->arrived && r < group->capacity; r++)
        set_arrived(group, r, NULL);
}
