/* SPDX-License-Identifier: Apache-2.0 */
/* Agreement calls: sync, admit, evict, join, leave; members' states; view callbacks. */
#include <string.h>

#include "base/clock.h"
#include "base/option.h"
#include "ctl/event.h"
#include "group/group.h"
#include "group/wait.h"
#include "host/host.h"

#define PROPOSE_NS (20 * BASE_NS_PER_S)
#define JOIN_NS (300 * BASE_NS_PER_S)
#define ADOPT_NS (5 * BASE_NS_PER_S)

static enum hdl_status timeout_of(int64_t timeout_us, int64_t otherwise, int64_t *ns)
{
    if (timeout_us < 0)
        return base_fail(HDL_EINVAL, "timeout_us %lld is negative",
                         (long long)timeout_us);
    *ns = timeout_us ? base_timeout_ns(timeout_us) : otherwise;
    return HDL_OK;
}

static enum hdl_status propose(struct hdl_group *group, enum ctl_proposal_kind kind,
                               const int32_t *ranks, int32_t num_ranks,
                               int64_t timeout_ns, uint64_t *first)
{
    enum hdl_status status = group_check(group);
    if (status != HDL_OK)
        return status;
    bool lists = kind == CTL_PROPOSE_ACTIVATE || kind == CTL_PROPOSE_DEACTIVATE;
    if (lists && (num_ranks <= 0 || !ranks))
        return base_fail(HDL_EINVAL, "no ranks are given");
    for (int32_t i = 0; i < num_ranks; i++)
        if (ranks[i] < 0 || (uint32_t)ranks[i] >= group->capacity)
            return base_fail(HDL_EINVAL, "rank %d is not in 0..%u", ranks[i],
                             group->capacity - 1);
    uint32_t *slots =
        base_alloc(group->engine->env, (size_t)num_ranks + 1, sizeof(*slots));
    if (!slots)
        return HDL_ENOMEM;
    for (int32_t i = 0; i < num_ranks; i++)
        slots[i] = (uint32_t)ranks[i];
    status = host_group_propose(group->host_group, kind, slots, (uint32_t)num_ranks,
                                timeout_ns, first);
    base_free(group->engine->env, slots);
    /* What ended the group says more than that the question ended with it. */
    enum hdl_status over = status == HDL_EABORTED ? group_check(group) : HDL_OK;
    return over != HDL_OK ? over : status;
}

/* --------------------------------------------- what data threads still have to see */

static bool is_over(struct hdl_group *group)
{
    return atomic_load(&group->over) != HDL_OK;
}

static bool is_member(void *argument)
{
    struct hdl_group *group = argument;
    const struct ctl_slot *own = &group->seen->ctl->slots[group->rank];
    /* A rank that made no call since its removal has yet to take over that view, too. */
    bool newest = group->seen == atomic_load(&group->view);
    return is_over(group) || (newest && own->active && own->first == group->entered &&
                              group->path != &group_path_isolated);
}

static bool is_removed(void *argument)
{
    struct hdl_group *group = argument;
    const struct ctl_slot *own = &group->seen->ctl->slots[group->rank];
    return is_over(group) || !own->active;
}

static enum hdl_status settle(struct hdl_group *group, bool (*test)(void *))
{
    int64_t deadline = base_deadline_ns(base_now_ns(), ADOPT_NS);
    if (!group_engine_wait(group->engine, test, group, deadline))
        return base_fail(HDL_EINTERNAL, "the new view was not taken over");
    return group_check(group);
}

/* ---------------------------------------------------------------------- public calls */

enum hdl_status hdl_group_sync(struct hdl_group *group, int64_t timeout_us)
{
    int64_t ns = 0;
    enum hdl_status status = timeout_of(timeout_us, PROPOSE_NS, &ns);
    return status ? status : propose(group, CTL_PROPOSE_SYNC, NULL, 0, ns, NULL);
}

enum hdl_status hdl_group_admit(struct hdl_group *group, const int32_t *ranks,
                                int32_t num_ranks, int64_t timeout_us, uint64_t *first)
{
    int64_t ns = 0;
    enum hdl_status status = timeout_of(timeout_us, PROPOSE_NS, &ns);
    return status ? status
                  : propose(group, CTL_PROPOSE_ACTIVATE, ranks, num_ranks, ns, first);
}

enum hdl_status hdl_group_evict(struct hdl_group *group, const int32_t *ranks,
                                int32_t num_ranks, int64_t timeout_us)
{
    int64_t ns = 0;
    enum hdl_status status = timeout_of(timeout_us, PROPOSE_NS, &ns);
    if (status == HDL_OK)
        status = propose(group, CTL_PROPOSE_DEACTIVATE, ranks, num_ranks, ns, NULL);
    if (status != HDL_OK)
        return status;
    for (int32_t i = 0; i < num_ranks; i++)
        if ((uint32_t)ranks[i] == group->rank)
            return settle(group, is_removed);
    return HDL_OK;
}

enum hdl_status hdl_group_leave(struct hdl_group *group, int64_t timeout_us)
{
    enum hdl_status status = group_check(group);
    if (status != HDL_OK)
        return status;
    int32_t self = (int32_t)group->rank;
    return hdl_group_evict(group, &self, 1, timeout_us);
}

enum hdl_status hdl_group_join(struct hdl_group *group, int64_t timeout_us,
                               uint64_t *first)
{
    int64_t ns = 0;
    uint64_t number = 0;
    enum hdl_status status = timeout_of(timeout_us, JOIN_NS, &ns);
    if (status != HDL_OK)
        return status;
    int over = group && group->magic == GROUP_MAGIC ? atomic_load(&group->over) : HDL_OK;
    if (over == HDL_EFENCED || over == HDL_ECOORD)
        status = group_restart(group);
    if (status == HDL_OK)
        status = propose(group, CTL_PROPOSE_JOIN, NULL, 0, ns, &number);
    if (status == HDL_OK)
        status = settle(group, is_member);
    if (status == HDL_OK && first)
        *first = number;
    return status;
}

uint64_t hdl_group_next(const struct hdl_group *group)
{
    if (!group || group->magic != GROUP_MAGIC)
        return 0;
    return atomic_load_explicit(&group->next, memory_order_relaxed);
}

/* -------------------------------------------------------------------- members' states */

static void fill_member(struct hdl_group *group, const struct ctl_slot *slot,
                        uint32_t rank, struct hdl_member *m)
{
    m->job_rank = -1;
    if (slot->active)
        m->member = HDL_MEMBER_ACTIVE;
    else if (slot->rank_epoch)
        m->member = HDL_MEMBER_INACTIVE;
    if (slot->rank_epoch) {
        m->process = slot->absent ? HDL_PROCESS_LOST : HDL_PROCESS_LIVE;
        m->job_rank = (int32_t)ctl_rank_epoch_rank(slot->rank_epoch);
        m->rank_epoch = slot->rank_epoch;
        m->first = ctl_x_op(slot->first);
        m->last = slot->last == CTL_X_FOREVER ? UINT64_MAX : ctl_x_op(slot->last);
    }
    uint64_t ready = atomic_load(&group->ready_epoch[rank]);
    if (slot->active || ready == 0)
        return;
    m->member = HDL_MEMBER_READY;
    m->process = HDL_PROCESS_LIVE;
    m->job_rank = (int32_t)ctl_rank_epoch_rank(ready);
    m->rank_epoch = ready;
}

enum hdl_status hdl_group_member(const struct hdl_group *const_group, int32_t rank,
                                 struct hdl_member *out)
{
    struct hdl_group *group = (struct hdl_group *)(uintptr_t)const_group;
    if (!group || group->magic != GROUP_MAGIC || !out || !atomic_load(&group->view))
        return base_fail(HDL_EINVAL, "not a group, or no struct to fill");
    if (rank < 0 || (uint32_t)rank >= group->capacity)
        return base_fail(HDL_EINVAL, "rank %d is not in 0..%u", rank,
                         group->capacity - 1);
    if (out->size < sizeof(out->size))
        return base_fail(HDL_EINVAL, "struct hdl_member has size %zu", out->size);
    struct hdl_member m = {.size = out->size};
    atomic_fetch_add(&group->view_readers, 1);
    fill_member(group, &atomic_load(&group->view)->ctl->slots[rank], (uint32_t)rank, &m);
    atomic_fetch_sub(&group->view_readers, 1);
    memcpy(out, &m, out->size < sizeof(m) ? out->size : sizeof(m));
    return HDL_OK;
}

/* ---------------------------------------------------------------------- notifications */

void group_notify(struct hdl_group *group)
{
    struct group_engine *engine = group->engine;
    if (atomic_load(&group->on_view))
        (void)group_worker_post(&engine->notifier, &group->notify_job);
    pthread_mutex_lock(&engine->watch_lock);
    base_list_each(i, after, &engine->watches)
    {
        struct group_watch *watch = base_container_of(i, struct group_watch, node);
        if (watch->group == group)
            (void)group_worker_post(&engine->notifier, &watch->job);
    }
    pthread_mutex_unlock(&engine->watch_lock);
}

void group_watch_views(struct hdl_group *group, struct group_watch *watch,
                       void (*run)(struct group_job *job))
{
    watch->group = group;
    group_job_init(&watch->job, run);
    pthread_mutex_lock(&group->engine->watch_lock);
    base_list_push_back(&group->engine->watches, &watch->node);
    pthread_mutex_unlock(&group->engine->watch_lock);
}

void group_unwatch_views(struct group_watch *watch)
{
    if (!watch->group)
        return;
    struct group_engine *engine = watch->group->engine;
    pthread_mutex_lock(&engine->watch_lock);
    base_list_remove(&watch->node);
    pthread_mutex_unlock(&engine->watch_lock);
    group_worker_cancel(&engine->notifier, &watch->job);
    watch->group = NULL;
}

void group_notify_run(struct group_job *job)
{
    struct hdl_group *group = base_container_of(job, struct hdl_group, notify_job);
    group_view_callback *callback = atomic_load(&group->on_view);
    atomic_fetch_add(&group->view_readers, 1);
    uint64_t epoch = atomic_load(&group->view)->ctl->epoch;
    atomic_fetch_sub(&group->view_readers, 1);
    if (!callback || epoch == group->notified)
        return;
    group->notified = epoch;
    callback(group->on_view_user, group, epoch);
}

void group_notify_stop(struct hdl_group *group)
{
    atomic_store(&group->on_view, NULL);
    group_worker_cancel(&group->engine->notifier, &group->notify_job);
}

enum hdl_status hdl_group_on_view(struct hdl_group *group,
                                  void (*callback)(void *user, struct hdl_group *group,
                                                   uint64_t epoch),
                                  void *user)
{
    if (!group || group->magic != GROUP_MAGIC)
        return base_fail(HDL_EINVAL, "not a group");
    enum hdl_status status = group_engine_check(group->engine);
    if (status != HDL_OK)
        return status;
    group_notify_stop(group);
    group->on_view_user = user;
    struct hdl_view view = {0};
    status = hdl_group_view(group, &view);
    group->notified = view.epoch;
    atomic_store(&group->on_view, callback);
    /* A view that came in between is told now. */
    group_notify(group);
    return status;
}
