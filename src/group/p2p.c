/* SPDX-License-Identifier: Apache-2.0 */
/* Send and receive: public calls, matching, lost peers. */
#include "group/p2p.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "group/messaged.h"
#include "group/submit.h"
#include "net/net.h"

static struct group_p2p_peer *peer_of(struct hdl_group *group, uint32_t rank)
{
    return &group->p2p->peer[rank];
}

/* Vacant slots have no stream. */
static void open_stream(struct hdl_group *group, uint32_t rank,
                        struct group_p2p_peer *peer)
{
    void *segment = group->peer[rank].segment;
    if (segment) {
        peer->stream = &group_stream_mapped;
        peer->in.intake = group_segment_intake(&group->shape, segment, group->rank);
        peer->in.cells = group_segment_cells(&group->shape, segment, group->rank);
        peer->in.bulk = group_segment_bulk(&group->shape, segment, group->rank);
    } else if (group->peer[rank].remote) {
        peer->stream = &group_stream_messaged;
        messaged_stream_incoming(group, rank, &peer->in);
    }
}

static void init_peer(struct group_p2p_peer *peer)
{
    base_list_init(&peer->node);
    base_list_init(&peer->queued);
    base_list_init(&peer->large);
    base_list_init(&peer->granted);
    base_list_init(&peer->unpushed);
}

enum hdl_status group_p2p_open(struct hdl_group *group)
{
    size_t bytes;
    if (!base_mul_size(group->capacity, sizeof(struct group_p2p_peer), &bytes) ||
        !base_add_size(bytes, sizeof(struct group_p2p), &bytes))
        return base_fail(HDL_ENOMEM, "%u slots are too many", group->capacity);
    struct group_p2p *p2p = base_alloc(group->engine->env, 1, bytes);
    if (!p2p)
        return HDL_ENOMEM;
    base_list_init(&p2p->active);
    base_list_init(&p2p->unpushed);
    for (uint32_t r = 0; r < group->capacity; r++) {
        struct group_p2p_peer *peer = &p2p->peer[r];
        init_peer(peer);
        peer->rank_epoch = atomic_load(&group->view)->ctl->slots[r].rank_epoch;
        open_stream(group, r, peer);
    }
    group->p2p = p2p;
    return HDL_OK;
}

static void free_unexpected(struct hdl_group *group, struct group_unexpected *message)
{
    base_list_remove(&message->node);
    group->p2p->num_unexpected--;
    base_free(group->engine->env, message);
}

void group_p2p_close(struct hdl_group *group)
{
    if (!group->p2p)
        return;
    for (struct base_list *node; (node = base_list_first(&group->unexpected));)
        free_unexpected(group, base_container_of(node, struct group_unexpected, node));
    for (uint32_t r = 0; r < group->capacity; r++)
        base_free(group->engine->env, peer_of(group, r)->backlog);
    base_free(group->engine->env, group->p2p);
    group->p2p = NULL;
}

/* Counts an open operation at its peer, so that progress looks there. */
static void count_open(struct hdl_group *group, const struct hdl_op *op, int step)
{
    if (op->peer < 0) {
        group->p2p->any_receives += (uint32_t)step;
        return;
    }
    struct group_p2p_peer *peer = peer_of(group, (uint32_t)op->peer);
    if (op->desc.kind == GROUP_SEND)
        peer->sends += (uint32_t)step;
    else
        peer->receives += (uint32_t)step;
    if (peer->sends + peer->receives == 0)
        base_list_remove(&peer->node);
    else if (base_list_empty(&peer->node))
        base_list_push_back(&group->p2p->active, &peer->node);
}

static void release(struct hdl_group *group, struct hdl_op *op)
{
    if (op->transport)
        peer_of(group, (uint32_t)op->source)->stream->release(group, op);
}

void group_p2p_finish(struct hdl_group *group, struct hdl_op *op, enum hdl_status status)
{
    release(group, op);
    count_open(group, op, -1);
    group_op_finish(op, status);
}

static void fail_op(struct hdl_group *group, struct hdl_op *op, enum hdl_status status,
                    const char *text)
{
    release(group, op);
    count_open(group, op, -1);
    group_op_fail(op, status, NULL, "%s", text);
}

static void fail_lost(struct hdl_group *group, struct hdl_op *op, uint32_t rank)
{
    char text[64];
    snprintf(text, sizeof(text), "%s: rank %u is lost", group_kind_name(op->desc.kind),
             rank);
    group_op_mark_failed(op, rank);
    fail_op(group, op, HDL_EPEER, text);
}

/* ----------------------------------------------------------------------- matching */

static bool fits(const struct hdl_op *op, uint32_t source, int32_t tag)
{
    return (op->peer == HDL_ANY_SOURCE || op->peer == (int32_t)source) &&
           (op->tag == HDL_ANY_TAG || op->tag == tag);
}

struct hdl_op *group_p2p_match(struct hdl_group *group, uint32_t source, int32_t tag)
{
    base_list_each(node, after, &group->receives)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (!fits(op, source, tag))
            continue;
        base_list_remove(&op->node);
        op->source = (int32_t)source;
        op->source_tag = tag;
        return op;
    }
    return NULL;
}

bool group_p2p_keep(struct hdl_group *group, uint32_t source, int32_t tag, size_t bytes,
                    const void *data, bool large, uint64_t message)
{
    size_t payload = large ? 0 : bytes;
    struct group_unexpected *kept =
        base_alloc(group->engine->env, 1, sizeof(*kept) + payload);
    if (!kept)
        return false;
    kept->source = source;
    kept->tag = tag;
    kept->bytes = bytes;
    kept->large = large;
    kept->message = message;
    if (payload)
        memcpy(kept->data, data, payload);
    base_list_push_back(&group->unexpected, &kept->node);
    group->p2p->num_unexpected++;
    return true;
}

static void fail_length(struct hdl_group *group, struct hdl_op *op, uint32_t source,
                        size_t bytes)
{
    char text[128];
    snprintf(text, sizeof(text), "recv of %zu bytes, rank %u sent %zu with tag %d",
             op->bytes, source, bytes, op->source_tag);
    fail_op(group, op, HDL_EINVAL, text);
}

void group_p2p_deliver(struct hdl_group *group, struct hdl_op *op, uint32_t source,
                       int32_t tag, const void *data, size_t bytes)
{
    op->source = (int32_t)source;
    op->source_tag = tag;
    if (bytes != op->bytes) {
        fail_length(group, op, source, bytes);
        return;
    }
    if (bytes)
        memcpy(op->dst, data, bytes);
    group_count(&group->counters.bytes_received, bytes);
    group_p2p_finish(group, op, HDL_OK);
}

void group_p2p_begin(struct hdl_group *group, struct hdl_op *op, uint32_t source,
                     int32_t tag, size_t bytes, uint64_t message)
{
    struct group_p2p_peer *peer = peer_of(group, source);
    op->source = (int32_t)source;
    op->source_tag = tag;
    if (bytes != op->bytes) {
        peer->stream->accept(group, source, message, NULL, true);
        fail_length(group, op, source, bytes);
        return;
    }
    /* From now on it belongs to this source alone. */
    if (op->peer < 0) {
        count_open(group, op, -1);
        op->peer = (int32_t)source;
        count_open(group, op, 1);
    }
    op->message = message;
    op->moved = 0;
    op->stream = bytes >= group->stream_bytes;
    base_list_push_back(&peer->granted, &op->node);
    peer->stream->accept(group, source, message, op, false);
}

/* The first message that came before and fits; true if it ended or began the receive. */
static bool take_unexpected(struct hdl_group *group, struct hdl_op *op)
{
    base_list_each(node, after, &group->unexpected)
    {
        struct group_unexpected *kept =
            base_container_of(node, struct group_unexpected, node);
        if (!fits(op, kept->source, kept->tag))
            continue;
        if (!kept->large)
            group_p2p_deliver(group, op, kept->source, kept->tag, kept->data,
                              kept->bytes);
        else if (peer_of(group, kept->source)->lost)
            fail_lost(group, op, kept->source);
        else
            group_p2p_begin(group, op, kept->source, kept->tag, kept->bytes,
                            kept->message);
        free_unexpected(group, kept);
        return true;
    }
    return false;
}

/* ----------------------------------------------------------------------- progress */

static void start_send(struct hdl_group *group, struct hdl_op *op)
{
    struct group_p2p_peer *peer = peer_of(group, (uint32_t)op->peer);
    if (peer->lost) {
        fail_lost(group, op, (uint32_t)op->peer);
        return;
    }
    group_count(&group->counters.bytes_sent, op->bytes);
    peer->stream->send(group, op);
}

/* Others were there, and none is any more. What this rank sends itself would come. */
static bool nobody_left(struct hdl_group *group)
{
    bool lost = false;
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct group_p2p_peer *peer = peer_of(group, r);
        if (r == group->rank || !peer->stream)
            continue;
        if (!peer->lost)
            return false;
        lost = true;
    }
    return lost;
}

static void start_receive(struct hdl_group *group, struct hdl_op *op)
{
    bool alone = op->peer < 0 && nobody_left(group);
    while (alone && peer_of(group, group->rank)->stream->progress(group, group->rank))
        ;
    if (!base_list_empty(&group->unexpected) && take_unexpected(group, op))
        return;
    if (op->peer >= 0 && peer_of(group, (uint32_t)op->peer)->lost) {
        fail_lost(group, op, (uint32_t)op->peer);
        return;
    }
    if (alone) {
        fail_op(group, op, HDL_EPEER, "recv: no other rank is left");
        return;
    }
    base_list_push_back(&group->receives, &op->node);
}

void group_p2p_start(struct hdl_group *group, struct hdl_op *op)
{
    op->transport = NULL;
    count_open(group, op, 1);
    if (op->desc.kind == GROUP_SEND)
        start_send(group, op);
    else
        start_receive(group, op);
}

bool group_p2p_progress(struct hdl_group *group)
{
    struct group_p2p *p2p = group->p2p;
    bool moved = group->path->messaged && net_poll(group->engine->net) > 0;
    if (p2p->any_receives) {
        for (uint32_t r = 0; r < group->capacity; r++)
            if (p2p->peer[r].stream && !p2p->peer[r].lost)
                moved |= p2p->peer[r].stream->progress(group, r);
        return moved;
    }
    base_list_each(node, after, &p2p->active)
    {
        struct group_p2p_peer *peer =
            base_container_of(node, struct group_p2p_peer, node);
        if (peer->stream && !peer->lost)
            moved |= peer->stream->progress(group, (uint32_t)(peer - p2p->peer));
    }
    base_list_each(rest, next, &p2p->unpushed)
    {
        struct group_p2p_peer *peer =
            base_container_of(rest, struct group_p2p_peer, unpushed);
        moved |= messaged_stream_push(group, (uint32_t)(peer - p2p->peer));
    }
    return moved;
}

/* ------------------------------------------------------------------------- endings */

static void fail_list(struct hdl_group *group, struct base_list *head, uint32_t rank)
{
    base_list_each(node, after, head)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (op->peer == (int32_t)rank)
            fail_lost(group, op, rank);
    }
}

/* What the lost rank had sent completely is still received: its memory outlives it. */
static void lose(struct hdl_group *group, uint32_t rank)
{
    struct group_p2p_peer *peer = peer_of(group, rank);
    while (peer->stream->progress(group, rank))
        ;
    peer->lost = true;
    if (peer->stream->lost)
        peer->stream->lost(group, rank);
    peer->streaming = NULL;
    fail_list(group, &peer->queued, rank);
    fail_list(group, &peer->large, rank);
    fail_list(group, &peer->granted, rank);
    fail_list(group, &group->receives, rank);
}

/* A removed rank lives on and may come back; one that has left says so in its segment. */
static bool has_left(struct hdl_group *group, uint32_t rank)
{
    const struct group_view *view = group->seen;
    const struct group_head *head = group->peer[rank].segment;
    if (group_view_present(view, rank) || view->ctl->slots[rank].active)
        return false;
    if (!head && group->path->messaged)
        head = messaged_mirror_head(group, rank);
    return !head || atomic_load(&head->left) != 0;
}

void group_p2p_renew(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch)
{
    if (!group->p2p)
        return;
    struct group_p2p_peer *peer = peer_of(group, rank);
    if (peer->rank_epoch == rank_epoch)
        return;
    if (peer->stream && !peer->lost)
        lose(group, rank);
    base_list_each(node, after, &group->unexpected)
    {
        struct group_unexpected *kept =
            base_container_of(node, struct group_unexpected, node);
        if (kept->source == rank && kept->large)
            free_unexpected(group, kept);
    }
    base_list_remove(&peer->node);
    base_list_remove(&peer->unpushed);
    base_free(group->engine->env, peer->backlog);
    memset(peer, 0, sizeof(*peer));
    init_peer(peer);
    peer->lost = true;
    peer->rank_epoch = rank_epoch;
    memset(group_segment_intake(&group->shape, group->segment, rank), 0,
           sizeof(struct group_intake));
    memset(group_segment_cells(&group->shape, group->segment, rank), 0,
           GROUP_CELLS * sizeof(struct group_cell));
    if (group->path->messaged)
        messaged_mirror_clean(group, rank);
}

void group_p2p_connect(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch)
{
    struct group_p2p_peer *peer = peer_of(group, rank);
    if (peer->rank_epoch != rank_epoch)
        group_p2p_renew(group, rank, rank_epoch);
    peer->lost = false;
    open_stream(group, rank, peer);
}

static void fail_all(struct hdl_group *group, struct base_list *head,
                     enum hdl_status status, const char *text)
{
    base_list_each(node, after, head)
    {
        fail_op(group, base_container_of(node, struct hdl_op, node), status, text);
    }
}

void group_p2p_adopt(struct hdl_group *group)
{
    const struct group_view *view = group->seen;
    bool lost = false;
    for (uint32_t r = 0; r < group->capacity; r++) {
        struct group_p2p_peer *peer = peer_of(group, r);
        if (!peer->stream || peer->lost || r == group->rank ||
            peer->rank_epoch != view->ctl->slots[r].rank_epoch ||
            (!group_view_absent(view, r) && !has_left(group, r)))
            continue;
        lose(group, r);
        lost = true;
    }
    if (!lost || !nobody_left(group))
        return;
    base_list_each(node, after, &group->receives)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (op->peer < 0)
            fail_op(group, op, HDL_EPEER, "recv: no other rank is left");
    }
}

void group_p2p_fail(struct hdl_group *group, enum hdl_status status, const char *text)
{
    for (uint32_t r = 0; r < group->capacity; r++) {
        struct group_p2p_peer *peer = peer_of(group, r);
        peer->streaming = NULL;
        fail_all(group, &peer->queued, status, text);
        fail_all(group, &peer->large, status, text);
        fail_all(group, &peer->granted, status, text);
    }
    fail_all(group, &group->receives, status, text);
}

static bool each_of(struct base_list *head, int64_t now,
                    bool (*each)(struct hdl_op *, int64_t))
{
    base_list_each(node, after, head)
    {
        if (!each(base_container_of(node, struct hdl_op, node), now))
            return false;
    }
    return true;
}

void group_p2p_each(struct hdl_group *group, int64_t now,
                    bool (*each)(struct hdl_op *, int64_t))
{
    bool more = each_of(&group->receives, now, each);
    base_list_each(node, after, &group->p2p->active)
    {
        struct group_p2p_peer *peer =
            base_container_of(node, struct group_p2p_peer, node);
        more = more && each_of(&peer->queued, now, each) &&
               each_of(&peer->large, now, each) && each_of(&peer->granted, now, each);
    }
}

size_t group_p2p_describe(struct hdl_group *group, char *text, size_t room)
{
    size_t n = 0;
    for (uint32_t r = 0; group->p2p && r < group->capacity && n < room; r++) {
        const struct group_p2p_peer *peer = peer_of(group, r);
        if (peer->sends + peer->receives == 0)
            continue;
        n += (size_t)snprintf(
            text + n, room - n,
            "  peer %u: sends open %u receives open %u cells %llu/%llu%s\n", r,
            peer->sends, peer->receives, (unsigned long long)peer->cells_written,
            (unsigned long long)peer->cells_read, peer->lost ? " lost" : "");
    }
    return n < room ? n : room;
}

/* ---------------------------------------------------------------------- public calls */

/* HDL_OK and the size, or a refusal. */
static enum hdl_status check_args(struct hdl_group *group, struct group_message *m)
{
    const char *what = group_kind_name(m->kind);
    enum hdl_status status = group_check(group);
    if (status != HDL_OK)
        return status;
    size_t elem = base_dtype_size(m->dtype);
    if (elem == 0)
        return base_fail(HDL_EINVAL, "%s: unknown type %d", what, m->dtype);
    if (!base_mul_size(m->count, elem, &m->bytes))
        return base_fail(HDL_EINVAL, "%s: too large: count %zu", what, m->count);
    if (m->bytes && !m->src && !m->dst)
        return base_fail(HDL_EINVAL, "%s: memory is NULL, count %zu", what, m->count);
    int32_t least = m->kind == GROUP_SEND ? 0 : HDL_ANY_SOURCE;
    if (m->peer >= (int32_t)group->capacity || m->peer < least)
        return base_fail(HDL_EINVAL, "%s: peer %d is not in 0..%u", what, m->peer,
                         group->capacity - 1);
    if (m->tag < least)
        return base_fail(HDL_EINVAL, "%s: tag %d is negative", what, m->tag);
    if (m->peer >= 0 && !group->p2p->peer[m->peer].stream)
        return base_fail(HDL_EPEER, "%s: slot %d is vacant", what, m->peer);
    return HDL_OK;
}

static enum hdl_status submit(struct hdl_group *group, struct group_message *message,
                              const struct hdl_call *call, struct hdl_op **op)
{
    struct hdl_call copy;
    enum hdl_status status = check_args(group, message);
    if (status == HDL_OK)
        status = group_call_read(&call, &copy);
    return status == HDL_OK ? group_submit_p2p(group, message, call, op) : status;
}

enum hdl_status hdl_send(struct hdl_group *group, const void *src, size_t count,
                         enum hdl_dtype dtype, int32_t peer, int32_t tag,
                         const struct hdl_call *call, struct hdl_op **op)
{
    struct group_message message = {.kind = GROUP_SEND,
                                    .dtype = dtype,
                                    .count = count,
                                    .src = src,
                                    .peer = peer,
                                    .tag = tag};
    return submit(group, &message, call, op);
}

enum hdl_status hdl_recv(struct hdl_group *group, void *dst, size_t count,
                         enum hdl_dtype dtype, int32_t peer, int32_t tag,
                         const struct hdl_call *call, struct hdl_op **op)
{
    struct group_message message = {.kind = GROUP_RECV,
                                    .dtype = dtype,
                                    .count = count,
                                    .dst = dst,
                                    .peer = peer,
                                    .tag = tag};
    return submit(group, &message, call, op);
}
