/* SPDX-License-Identifier: Apache-2.0 */
/* What a group tells about itself: view, counters, transports. */
#include <string.h>

#include "base/clock.h"
#include "base/option.h"
#include "group/group.h"
#include "host/host.h"
#include "net/net.h"

/* Holding view_readers keeps the control thread from freeing the view: no lock, no loop.
 */
static const struct group_view *enter(struct hdl_group *group)
{
    atomic_fetch_add(&group->view_readers, 1);
    const struct group_view *view = atomic_load(&group->view);
    /* A change that lies ahead is not shown yet; `older` is there as long as it is not.
     */
    while (view->visible_from >
               atomic_load_explicit(&group->next, memory_order_relaxed) &&
           view->older)
        view = view->older;
    return view;
}

/* Size of the next operation: a lost rank counts as long as operations report it, so that
 * all ranks take arrays of the same length for the same operation. */
static uint32_t size_of_next(struct hdl_group *group, const struct group_view *view)
{
    uint64_t next = atomic_load_explicit(&group->next, memory_order_relaxed);
    for (uint32_t r = group->capacity; r > view->ctl->size; r--)
        if (ctl_slot_reports(&view->ctl->slots[r - 1], next))
            return r;
    return view->ctl->size;
}

static void leave(struct hdl_group *group)
{
    atomic_fetch_sub(&group->view_readers, 1);
}

/* Only atomic members are written through it. */
static struct hdl_group *writable(const struct hdl_group *group)
{
    return (struct hdl_group *)(uintptr_t)group;
}

static void copy_mask(uint64_t *to, const uint64_t *from, int32_t room, uint32_t words)
{
    memcpy(to, from, words * sizeof(*from));
    for (uint32_t w = words; w < (uint32_t)room; w++)
        to[w] = 0;
}

/* A fenced rank is no member, whatever it last saw. */
static void clear_self(const struct hdl_group *group, const struct group_view *view,
                       struct hdl_view *out)
{
    if (!view->ctl->slots[group->rank].active)
        return;
    out->num_active--;
    if (out->active)
        base_mask_clear(out->active, group->rank);
}

enum hdl_status hdl_group_view(const struct hdl_group *const_group, struct hdl_view *out)
{
    struct hdl_group *group = writable(const_group);
    if (!group || group->magic != GROUP_MAGIC || !out || !atomic_load(&group->view))
        return base_fail(HDL_EINVAL, "not a group, or no view to fill");
    const struct group_view *view = enter(group);
    int32_t words = (int32_t)view->num_words, room = out->mask_words;
    bool fits = (!out->active && !out->absent) || room >= words;
    out->mask_words = words;
    if (fits) {
        out->epoch = view->ctl->epoch;
        out->rank = (int32_t)group->rank;
        out->capacity = (int32_t)group->capacity;
        out->size = (int32_t)size_of_next(group, view);
        out->num_active = (int32_t)view->ctl->num_active;
        out->num_absent = (int32_t)view->ctl->num_absent;
        if (out->active)
            copy_mask(out->active, view->active, room, view->num_words);
        if (out->absent)
            copy_mask(out->absent, view->absent, room, view->num_words);
        if (atomic_load(&group->over) == HDL_EFENCED)
            clear_self(group, view, out);
    }
    leave(group);
    return fits ? HDL_OK
                : base_fail(HDL_EINVAL, "mask_words %d is too small, %d are needed", room,
                            words);
}

int32_t hdl_group_rank(const struct hdl_group *group)
{
    return group && group->magic == GROUP_MAGIC ? (int32_t)group->rank : -1;
}

int32_t hdl_group_size(const struct hdl_group *const_group)
{
    struct hdl_group *group = writable(const_group);
    if (!group || group->magic != GROUP_MAGIC || !atomic_load(&group->view))
        return -1;
    int32_t size = (int32_t)size_of_next(group, enter(group));
    leave(group);
    return size;
}

/* The view that progress has adopted stays while the lock is held. */
uint32_t group_size_under_lock(struct hdl_group *group)
{
    const struct group_view *view = group->seen;
    if (view != atomic_load_explicit(&group->view, memory_order_relaxed) ||
        view->visible_from > atomic_load_explicit(&group->next, memory_order_relaxed))
        return (uint32_t)hdl_group_size(group);
    return size_of_next(group, view);
}

static uint64_t counter(const _Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

enum hdl_status hdl_group_stats(const struct hdl_group *group,
                                struct hdl_group_stats *stats)
{
    if (!group || group->magic != GROUP_MAGIC || !stats)
        return base_fail(HDL_EINVAL, "not a group, or no struct to fill");
    if (stats->size < sizeof(stats->size))
        return base_fail(HDL_EINVAL, "struct hdl_group_stats has size %zu", stats->size);
    const struct group_counters *from = &group->counters;
    struct hdl_group_stats s = {.size = stats->size,
                                .ops_issued = counter(&from->ops_issued),
                                .ops_done = counter(&from->ops_done),
                                .ops_failed = counter(&from->ops_failed),
                                .bytes_sent = counter(&from->bytes_sent),
                                .bytes_received = counter(&from->bytes_received),
                                .views = counter(&from->views),
                                .redone_chunks = counter(&from->redone_chunks),
                                .stale_drops = counter(&from->stale_drops)};
    if (group->engine->net)
        s.stale_drops += net_stale(group->engine->net);
    if (group->host_group) {
        struct host_group_stats host;
        host_group_stats(group->host_group, &host);
        s.views = host.views;
        s.reconnects = host.reconnects;
        s.evidence_exit = host.evidence_exit;
        s.evidence_closed = host.evidence_closed;
        s.evidence_silence = host.evidence_silence;
        s.refused_frames = host.refused;
        s.evidence_to_commit_us = host.evidence_to_commit_ns / BASE_NS_PER_US;
    }
    if (group->engine->net)
        s.reconnects += net_reconnects(group->engine->net);
    size_t known = stats->size < sizeof(s) ? stats->size : sizeof(s);
    memcpy(stats, &s, known);
    return HDL_OK;
}

const char *hdl_group_transport(const struct hdl_group *group, int32_t rank)
{
    if (!group || group->magic != GROUP_MAGIC || rank < 0 ||
        (uint32_t)rank >= group->capacity)
        return NULL;
    if ((uint32_t)rank == group->rank)
        return "self";
    const struct hdl_peer_window *remote = group->peer[rank].remote;
    return remote ? net_remote_transport(remote) : NULL;
}
