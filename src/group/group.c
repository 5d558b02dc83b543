/* SPDX-License-Identifier: Apache-2.0 */
/* A group's memory, its round of progress, views and the end of a group. */
#include "group/group.h"

#include <string.h>

#include "base/clock.h"
#include "group/mapped.h"
#include "group/messaged.h"
#include "group/p2p.h"
#include "group/wait.h"
#include "host/host.h"
#include "net/net.h"

enum { STREAM_BYTES = 4 * 1024 * 1024, AHEAD = 3 };

/* ------------------------------------------------------------------- construction */

static enum hdl_status alloc_parts(struct hdl_group *group, struct ctl_view *ctl)
{
    struct base_env *env = group->engine->env;
    group->peer = base_alloc(env, group->capacity, sizeof(*group->peer));
    group->sources = base_alloc(env, group->capacity, sizeof(*group->sources));
    group->neighbours = base_alloc(env, group->capacity, sizeof(*group->neighbours));
    group->fence = base_alloc(env, group->capacity, sizeof(*group->fence));
    group->issues = base_alloc(env, GROUP_ISSUES, sizeof(*group->issues));
    group->arrived = base_alloc(env, group->capacity, sizeof(struct group_reach *));
    group->closed = base_alloc(env, group->capacity, sizeof(*group->closed));
    group->ready_epoch = base_alloc(env, group->capacity, sizeof(*group->ready_epoch));
    group->writers = base_alloc(env, group->capacity, sizeof(*group->writers));
    struct group_view *view = NULL;
    if (group->peer && group->sources && group->neighbours && group->fence &&
        group->issues && group->arrived && group->closed && group->ready_epoch &&
        group->writers)
        view = group_view_create(env, ctl, group->rank);
    if (!view)
        return HDL_ENOMEM;
    for (uint32_t i = 0; i < group->capacity; i++)
        group->fence[i] = GROUP_FOREVER;
    atomic_store(&group->view, view);
    group->seen = view;
    group->entered = ctl->slots[group->rank].first;
    group->last_op = CTL_OP_FOREVER;
    return HDL_OK;
}

void group_free_parts(struct hdl_group *group)
{
    struct base_env *env = group->engine->env;
    struct group_view *view = atomic_load(&group->view);
    while (view) {
        struct group_view *older = view->older;
        group_view_free(env, view);
        view = older;
    }
    atomic_store(&group->view, NULL);
    for (uint32_t r = 0; group->arrived && r < group->capacity; r++)
        group_reach_unref(env, group->arrived[r]);
    base_free(env, (void *)group->arrived);
    base_free(env, group->closed);
    base_free(env, group->ready_epoch);
    group->arrived = NULL;
    group_unshelter(group);
    base_free(env, group->issues);
    base_free(env, group->fence);
    base_free(env, (void *)group->sources);
    base_free(env, group->neighbours);
    base_free(env, (void *)group->writers);
    base_free(env, group->peer);
    base_free(env, group->over_text);
    group->over_text = NULL;
}

static void point(struct hdl_group *group, struct group_peer *peer, void *segment)
{
    peer->segment = segment;
    peer->slots = group_segment_slot(&group->shape, segment, 0);
    peer->data = group_segment_data(&group->shape, segment, 0);
    peer->pieces = group_segment_piece(&group->shape, segment, 0);
    peer->done = GROUP_X_END(0);
}

void group_admit_writer(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch)
{
    if (group->engine->net)
        net_set_writer(group->engine->net, &group->writers[rank], rank_epoch);
}

void group_point_self(struct hdl_group *group, void *segment)
{
    struct group_peer *self = &group->peer[group->rank];
    point(group, self, segment);
    group->slots = self->slots;
    group->data = self->data;
    group->pieces = self->pieces;
    group->head = group_segment_head(segment);
    self->segment = group->segment; /* streams are never sheltered */
}

enum hdl_status group_init(struct hdl_group *group, struct group_engine *engine,
                           const struct group_shape *shape, uint32_t rank, void *segment,
                           struct ctl_view *view)
{
    group->engine = engine;
    group->rank = rank;
    group->capacity = shape->capacity;
    group->shape = *shape;
    base_list_init(&group->node);
    base_list_init(&group->queue);
    base_list_init(&group->receives);
    base_list_init(&group->unexpected);
    uint32_t chunks = shape->window_chunks;
    group->window_mask = (chunks & (chunks - 1)) == 0 ? chunks - 1 : 0;
    group->ahead = shape->capacity <= 2 || AHEAD > chunks ? chunks / 2 : AHEAD;
    group->stream_bytes = STREAM_BYTES;
    group->op_timeout_ns = BASE_FOREVER;
    enum hdl_status status = alloc_parts(group, view);
    if (status != HDL_OK) {
        group_free_parts(group);
        return status;
    }
    group->segment = segment;
    group_point_self(group, segment);
    group_job_init(&group->attach_job, group_attach_run);
    group_job_init(&group->notify_job, group_notify_run);
    group_job_init(&group->enlarge_job, group_enlarge_run);
    *group->head = (struct group_head){.magic = GROUP_SEGMENT_MAGIC,
                                       .version = GROUP_SEGMENT_VERSION,
                                       .rank = rank,
                                       .capacity = shape->capacity,
                                       .window_chunks = chunks,
                                       .chunk_bytes = shape->chunk_bytes};
    atomic_store(&group->next, 1);
    atomic_store(&group->ready, GROUP_X_END(0));
    group->done_all = 0;
    group_done(group, GROUP_X_END(0));
    group->magic = GROUP_MAGIC;
    return HDL_OK;
}

enum hdl_status group_open_memory(struct hdl_group *group, uint32_t rank,
                                  const void *handle, size_t length, unsigned access,
                                  struct hdl_peer_window **remote)
{
    enum hdl_status status =
        net_remote_open(group->engine->net, handle, length, access | NET_GROUP, remote);
    if (status == HDL_OK)
        net_remote_write_as(*remote, group->rank, &group->writers[group->rank]);
    else
        base_fail_append(" (opening the memory of rank %u)", rank);
    /* It has given up or left meanwhile, and took its memory back. */
    return status == HDL_EINVAL ? HDL_EPEER : status;
}

enum hdl_status group_segment_check(const struct hdl_group *group, uint32_t rank,
                                    const void *segment)
{
    const struct group_head *head = segment;
    if (head->magic != GROUP_SEGMENT_MAGIC || head->version != GROUP_SEGMENT_VERSION ||
        head->rank != rank || head->capacity != group->capacity ||
        head->window_chunks != group->shape.window_chunks ||
        head->chunk_bytes != group->shape.chunk_bytes)
        return base_fail(
            HDL_ECONFIG,
            "rank %u: its segment is of rank %u, version %u, capacity %u, not of "
            "version %d, capacity %u",
            rank, head->rank, head->version, head->capacity, GROUP_SEGMENT_VERSION,
            group->capacity);
    return HDL_OK;
}

const struct group_path *group_segment_path(const void *segment,
                                            const struct group_path *otherwise)
{
    const struct group_head *head = segment;
    uint64_t path = head ? atomic_load(&head->path) : 0;
    if (path == 0)
        return otherwise;
    return path == 1 ? &group_path_mapped : &group_path_messaged;
}

enum hdl_status group_peer_map(struct hdl_group *group, uint32_t rank, void *segment)
{
    enum hdl_status status = group_segment_check(group, rank, segment);
    if (status == HDL_OK)
        point(group, &group->peer[rank], segment);
    return status;
}

static uint32_t mapped_peers(const struct hdl_group *group)
{
    uint32_t n = 0;
    for (uint32_t r = 0; r < group->capacity; r++)
        n += group->peer[r].segment != NULL;
    return n;
}

/* For what is reached now; tells newcomers how the group moves. */
static void tune(struct hdl_group *group)
{
    group->crowded = mapped_peers(group) > group->engine->cores;
    if (group->crowded && group->shape.window_chunks > 4)
        group->ahead = group->shape.window_chunks / 2;
    struct group_head *head = group_segment_head(group->segment);
    if (group->path != &group_path_isolated)
        atomic_store(&head->path, group->path->messaged ? 2 : 1);
}

enum hdl_status group_open(struct hdl_group *group, const struct group_path *path)
{
    group->path = path;
    tune(group);
    enum hdl_status status = path->open ? path->open(group) : HDL_OK;
    if (status != HDL_OK)
        return status;
    status = group_p2p_open(group);
    if (status != HDL_OK) {
        if (path->close)
            path->close(group);
        return status;
    }
    group_engine_lock(group->engine);
    base_list_push_back(&group->engine->groups, &group->node);
    group->reserve = group_op_alloc(group->engine);
    group_engine_unlock(group->engine);
    return HDL_OK;
}

void group_stop(struct hdl_group *group)
{
    group_end(group, HDL_EABORTED, "the group was destroyed");
    group->magic = 0;
    if (!group->p2p)
        return;
    group_engine_lock(group->engine);
    (void)group_progress(group);
    base_list_remove(&group->node);
    if (group->reserve)
        group_op_release(group->reserve);
    group->reserve = NULL;
    group_engine_unlock(group->engine);
    group_p2p_close(group);
    if (group->path->close)
        group->path->close(group);
}

/* ----------------------------------------------------------------------- progress */

/* Ranks that came are reached as the view says. Nobody needs their predecessors any more:
 * that was a condition of their admission. */
static void install_peers(struct hdl_group *group, const struct group_view *view)
{
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct ctl_slot *slot = &view->ctl->slots[r];
        struct group_peer *peer = &group->peer[r];
        struct group_reach *reach = view->reach[r];
        if (r == group->rank) {
            group_admit_writer(group, r, slot->rank_epoch);
            continue;
        }
        if (reach && reach != peer->reach) {
            if (!peer->reach)
                net_remote_close(peer->remote);
            memset(peer, 0, sizeof(*peer));
            peer->reach = reach;
            peer->remote = reach->remote;
            if (reach->segment)
                point(group, peer, reach->segment);
            peer->fresh = true;
        }
        peer->rank_epoch = slot->rank_epoch;
        /* It needs nothing from before its interval. */
        if (slot->first > 0 && peer->done < slot->first - 1)
            peer->done = slot->first - 1;
    }
}

static void connect_streams(struct hdl_group *group, const struct group_view *view)
{
    for (uint32_t r = 0; r < group->capacity; r++) {
        if (!group->peer[r].fresh)
            continue;
        group->peer[r].fresh = false;
        group_p2p_connect(group, r, view->ctl->slots[r].rank_epoch);
    }
}

/* Operations called behind the own last one, before this was known here. */
static void end_removed(struct hdl_group *group)
{
    base_list_each(node, after, &group->queue)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (op->number <= group->last_op)
            continue;
        group->open_chunks -= op->published - op->pulled;
        group_op_fail(op, HDL_ENOTMEMBER, NULL, "operation %llu: rank %u was removed",
                      (unsigned long long)op->number, group->rank);
    }
}

/* Views are adopted by whoever holds the lock; view_readers keeps the control thread from
 * freeing the new one in between. Not before the commit has ended its freeze: `ready` is
 * then what the view says. */
static void adopt(struct hdl_group *group)
{
    atomic_fetch_add(&group->view_readers, 1);
    const struct group_view *older = group->seen;
    const struct group_view *view = atomic_load(&group->view);
    if (group_frozen(group) || view == older) {
        atomic_fetch_sub(&group->view_readers, 1);
        return;
    }
    const struct ctl_slot *own = &view->ctl->slots[group->rank];
    bool open_path = group->path == &group_path_isolated;
    bool enters = own->rank_epoch && own->active && own->first != group->entered;
    if (enters)
        group_enter(group, view);
    atomic_store_explicit(&group->seen, view, memory_order_release);
    group->done_all = 0;
    install_peers(group, view);
    group->last_op = own->rank_epoch ? ctl_x_op(own->last) : CTL_OP_FOREVER;
    tune(group);
    end_removed(group);
    if (enters && open_path && group->path->open && group->path->open(group) != HDL_OK) {
        group_end(group, HDL_ENOMEM, "no memory to enter the group");
    } else {
        group->path->adopt(group, older);
        connect_streams(group, view);
        group_p2p_adopt(group);
    }
    atomic_fetch_sub(&group->view_readers, 1);
}

static bool fail_open(struct hdl_group *group, enum hdl_status status)
{
    bool moved = false;
    const char *text = group->over_text ? group->over_text : base_status_text(status);
    for (struct base_list *node; (node = base_list_first(&group->queue)); moved = true)
        group_op_fail(base_container_of(node, struct hdl_op, node), status, NULL, "%s",
                      text);
    if (group_p2p_open_ops(group)) {
        group_p2p_fail(group, status, text);
        moved = true;
    }
    group->open_chunks = 0;
    return moved;
}

static void tell_done(struct hdl_group *group)
{
    uint64_t x = atomic_load_explicit(&group->watch_done, memory_order_relaxed);
    if (x && group->done >= x) {
        atomic_store(&group->watch_done, 0);
        if (group->host_group)
            host_group_finished(group->host_group, group->done);
    }
}

/* Nothing goes to a removed rank any more that is through with its last operation. */
static void see_closings(struct hdl_group *group)
{
    group->seen_closings = atomic_load(&group->closings);
    if (!group->path->messaged)
        return;
    atomic_fetch_add(&group->view_readers, 1);
    messaged_hosts_adopt(group);
    atomic_fetch_sub(&group->view_readers, 1);
}

bool group_progress(struct hdl_group *group)
{
    int over = atomic_load_explicit(&group->over, memory_order_acquire);
    if (over == HDL_PENDING)
        return false; /* whoever ends it is writing the text */
    if (over != HDL_OK)
        return fail_open(group, (enum hdl_status)over);
    if (atomic_load_explicit(&group->view, memory_order_seq_cst) != group->seen)
        adopt(group);
    if (atomic_load_explicit(&group->closings, memory_order_acquire) !=
        group->seen_closings)
        see_closings(group);
    bool moved = false;
    if (!base_list_empty(&group->queue) && !group_frozen(group))
        moved = group->path->progress(group);
    if (group_p2p_open_ops(group))
        moved |= group_p2p_progress(group);
    if (atomic_load_explicit(&group->watch_done, memory_order_relaxed))
        tell_done(group);
    return moved;
}

void group_issue(struct hdl_group *group, struct hdl_op *op)
{
    uint64_t number = atomic_load_explicit(&group->next, memory_order_relaxed);
    op->number = number;
    op->published = 0;
    op->sums = 0;
    op->pieces = 0;
    op->ready = 0;
    op->pulled = 0;
    op->wait_rank = 0;
    op->sum_rank = 0;
    op->piece_rank = 0;
    op->ready_rank = 0;
    op->direct = false;
    op->verified = false;
    op->mismatch = false;
    op->use_pieces = false;
    op->unsized = false;
    base_list_push_back(&group->queue, &op->node);
    group->num_open++;
    if (group->path->start)
        group->path->start(group, op);
    struct group_issue *issue = &group->issues[number % GROUP_ISSUES];
    atomic_store_explicit(&issue->num_chunks, op->unsized ? 0 : op->num_chunks,
                          memory_order_relaxed);
    atomic_store_explicit(&issue->number, number, memory_order_release);
    atomic_store_explicit(&group->next, number + 1, memory_order_release);
    group_count(&group->counters.ops_issued, 1);
}

void group_issue_chunks(struct hdl_group *group, const struct hdl_op *op)
{
    atomic_store_explicit(&group->issues[op->number % GROUP_ISSUES].num_chunks,
                          op->num_chunks, memory_order_release);
}

/* --------------------------------------------------------------------- the end of it */

bool group_end_here(struct hdl_group *group, enum hdl_status status, const char *text)
{
    char *copy = base_strdup(group->engine->env, text);
    int expected = HDL_OK;
    /* The text goes first, so that whoever sees the status sees it. Only one call wins.
     */
    if (!atomic_compare_exchange_strong(&group->over, &expected, HDL_PENDING)) {
        base_free(group->engine->env, copy);
        return false;
    }
    group->over_text = copy;
    atomic_store_explicit(&group->over, status, memory_order_release);
    group_engine_wake(group->engine);
    return true;
}

void group_end(struct hdl_group *group, enum hdl_status status, const char *text)
{
    if (group_end_here(group, status, text) && group->host_group)
        host_group_abort(group->host_group);
}

enum hdl_status group_check(const struct hdl_group *group)
{
    if (!group || group->magic != GROUP_MAGIC)
        return base_fail(HDL_EINVAL, "not a group");
    /* Before any lock: in a forked child nobody would ever release it. */
    enum hdl_status status = group_engine_check(group->engine);
    if (status != HDL_OK)
        return status;
    int over = atomic_load_explicit(&group->over, memory_order_acquire);
    if (over == HDL_OK || over == HDL_PENDING)
        return HDL_OK;
    return base_fail((enum hdl_status)over, "%s",
                     group->over_text ? group->over_text
                                      : base_status_text((enum hdl_status)over));
}

bool group_rank_absent(struct hdl_group *group, uint32_t rank)
{
    atomic_fetch_add(&group->view_readers, 1);
    bool absent = group_view_absent(atomic_load(&group->view), rank);
    atomic_fetch_sub(&group->view_readers, 1);
    return absent;
}

bool group_rank_active(struct hdl_group *group, uint32_t rank)
{
    atomic_fetch_add(&group->view_readers, 1);
    const struct group_view *view = atomic_load(&group->view);
    bool active = base_mask_test(view->active, rank);
    atomic_fetch_sub(&group->view_readers, 1);
    return active;
}

void group_ring(struct hdl_group *group, uint32_t rank)
{
    if (group->peer[rank].remote)
        net_ring(group->peer[rank].remote);
}
