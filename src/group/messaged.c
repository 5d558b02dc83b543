/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives with ranks on other hosts: publish, push, agree that all have it, pull. */
#include "group/messaged.h"

#include <string.h>

#include "group/mapped.h"
#include "net/net.h"

/*
 * Every open operation has chunks in these states (op->pieces counts those that are ready
 * here):
 *
 *      chunk   0 ..... pulled .......... ready .......... published ...... num_chunks
 *              output    |  needs `ready`  |  needs all      |  needs a free
 *              written   |  from all       |  inputs         |  slot
 *
 * Before the user's output is written all ranks must have all inputs: then the loss of any of
 * them takes nothing away. That round runs ahead of the writing, so a long operation pays for
 * it once. What a rank has said to be ready it holds: inputs lie in memory of its own host.
 */

static bool peer_done(struct hdl_group *group, uint32_t rank, uint64_t x)
{
    struct group_peer *peer = &group->peer[rank];
    if (peer->done < x) {
        uint64_t done = atomic_load_explicit(&messaged_of(group)->heads[rank]->done,
                                             memory_order_acquire);
        if (done > peer->done)
            peer->done = done;
    }
    return peer->done >= x;
}

/* May a slot that holds x be written again? */
static bool slot_free(struct hdl_group *group, uint32_t slot, uint64_t x)
{
    if (x > group->done || !messaged_slot_left(group, slot) || !messaged_room(group))
        return false;
    const struct group_view *view = group->seen;
    for (uint32_t r = 0; r < group->capacity; r++)
        if (r != group->rank && group_view_present(view, r) && !peer_done(group, r, x))
            return false;
    return true;
}

static bool publish(struct hdl_group *group)
{
    struct hdl_op *op = group->publishing;
    if (!op || group->open_chunks >= op->ahead || op->published == op->num_chunks)
        return false;
    uint64_t chunk = op->published;
    uint32_t index = group_slot_of(group, op->number, chunk);
    uint64_t held = atomic_load_explicit(&group->slots[index].seq, memory_order_relaxed);
    if (!slot_free(group, index, held))
        return false;
    size_t bytes = mapped_publish(group, op, chunk);
    messaged_enqueue(group, op, chunk, bytes);
    return true;
}

/* ---------------------------------------------------------------------------- ready */

/* All ranks compare all descriptors, whatever their role. */
static enum group_needs needs_of(const struct hdl_op *op, uint64_t chunk)
{
    if (chunk == 0 && op->desc.kind != GROUP_REFUSED)
        return GROUP_NEEDS_ALL;
    return mapped_needs(op, chunk);
}

static bool arrived(struct hdl_op *op, uint64_t chunk)
{
    switch (needs_of(op, chunk)) {
    case GROUP_NEEDS_NONE:
        return true;
    case GROUP_NEEDS_ROOT:
        return !mapped_takes_part(op, (uint32_t)op->desc.root, chunk) ||
               mapped_look(op, (uint32_t)op->desc.root, chunk);
    case GROUP_NEEDS_ALL:
        break;
    }
    for (; op->piece_rank < op->group->capacity; op->piece_rank++)
        if (mapped_takes_part(op, op->piece_rank, chunk) &&
            !mapped_look(op, op->piece_rank, chunk))
            return false;
    return true;
}

/* Says that this rank has everything for the next chunk. */
static bool raise_ready(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    struct hdl_op *op = m->readying;
    if (!op || op->pieces == op->published)
        return false;
    uint64_t chunk = op->pieces;
    uint64_t x = GROUP_X(op->number, chunk);
    uint64_t begin = group_ready_begin(group);
    if ((begin & GROUP_READY_FROZEN) ||
        atomic_load_explicit(&group->view, memory_order_acquire) != group->seen)
        return false;
    if (!arrived(op, chunk) || !group_ready_raise(group, begin, x))
        return false;
    atomic_store_explicit(&group->head->ready, messaged_word(messaged_attempt(group, x), x),
                          memory_order_release);
    op->pieces++;
    op->piece_rank = 0;
    if (op->pieces == op->num_chunks && !op->unsized)
        m->readying = group_next_open(group, op);
    return true;
}

/* ----------------------------------------------------------------------------- pull */

static bool all_ready(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    const struct messaged *m = messaged_of(group);
    uint64_t x = GROUP_X(op->number, chunk);
    if (x <= group->seen->ctl->settled)
        return true;
    for (; op->wait_rank < group->capacity; op->wait_rank++) {
        uint32_t r = op->wait_rank;
        if (r == group->rank || !mapped_takes_part(op, r, chunk) ||
            !group_view_present(group->seen, r))
            continue;
        uint64_t word = atomic_load_explicit(&m->heads[r]->ready, memory_order_acquire);
        if (!messaged_word_covers(group, word, x))
            return false;
    }
    return messaged_told(group, x);
}

static void finish(struct hdl_group *group, struct hdl_op *op, uint64_t chunk)
{
    struct messaged *m = messaged_of(group);
    struct hdl_op *next = group_next_open(group, op);
    bool was_readying = m->readying == op;
    /* Of others it may be longer if the calls differ. */
    bool chunked = op->num_chunks > 1 || op->mismatch || op->desc.kind == GROUP_REFUSED;
    mapped_finish_chunk(group, op, chunk);
    /* It may have ended before its last chunk. */
    struct base_list *first = base_list_first(&group->queue);
    bool open = first && base_container_of(first, struct hdl_op, node) == op;
    if (was_readying && !open)
        m->readying = next;
    /* The next operation uses the slots of the later chunks of this one: others must know
     * now that they are free. Else a word now and then is enough. */
    m->unsaid_done += chunked && !open ? group->shape.window_chunks : 1;
}

static bool pull(struct hdl_group *group)
{
    struct base_list *node = base_list_first(&group->queue);
    if (!node)
        return false;
    struct hdl_op *op = base_container_of(node, struct hdl_op, node);
    if (op->pulled == op->pieces || !all_ready(op, op->pulled))
        return false;
    finish(group, op, op->pulled);
    return true;
}

static void ring_host(struct hdl_group *group)
{
    const struct messaged *m = messaged_of(group);
    for (uint32_t i = 0; i < m->num_own_host; i++)
        group_ring(group, m->own_host[i]);
}

static bool messaged_progress(struct hdl_group *group)
{
    bool moved = net_poll(group->engine->net) > 0;
    for (;;) {
        bool step = publish(group);
        step |= raise_ready(group);
        step |= messaged_push(group);
        step |= pull(group);
        if (!step)
            break;
        moved = true;
        ring_host(group);
        if (atomic_load_explicit(&group->engine->contended, memory_order_relaxed))
            break;
    }
    return moved;
}

/* ------------------------------------------------------------------------ new views */

/* Chunks decided by the commit are finished with what was read before it: receivers may
 * change now, and what they held is not sent again. */
static void finish_settled(struct hdl_group *group)
{
    for (struct base_list *node; (node = base_list_first(&group->queue));) {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (op->pulled == op->pieces ||
            GROUP_X(op->number, op->pulled) > group->seen->ctl->settled)
            break;
        finish(group, op, op->pulled);
    }
}

/* `ready` fell back to x: so do the operations' own counts. */
static void fall_back(struct hdl_group *group, uint64_t x)
{
    struct messaged *m = messaged_of(group);
    m->readying = NULL;
    base_list_each(node, after, &group->queue)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        uint64_t kept = 0;
        if (op->number < GROUP_X_OP(x))
            kept = op->published;
        else if (op->number == GROUP_X_OP(x))
            kept = GROUP_X_CHUNK(x) + 1;
        if (kept < op->pieces) {
            group_count(&group->counters.redone_chunks, op->pieces - kept);
            op->pieces = kept;
        }
        if (op->pieces == 0)
            op->mismatch = false;
        if (op->published > 0)
            op->direct = true;
        op->wait_rank = 0;
        op->piece_rank = 0;
        if (!m->readying && (op->unsized || op->pieces < op->num_chunks))
            m->readying = op;
    }
}

static void messaged_adopt(struct hdl_group *group, const struct group_view *older)
{
    (void)older;
    finish_settled(group);
    fall_back(group, group_ready_x(group, group_ready_begin(group)));
    messaged_hosts_adopt(group);
}

/* --------------------------------------------------------------------- life, queries */

static enum hdl_status messaged_open(struct hdl_group *group)
{
    if (group->ahead < group->shape.window_chunks / 2)
        group->ahead = group->shape.window_chunks / 2;
    /* The first view has the handles by which hosts are told apart. No operation runs yet. */
    atomic_fetch_add(&group->view_readers, 1);
    atomic_store_explicit(&group->seen, atomic_load(&group->view), memory_order_release);
    enum hdl_status status = messaged_hosts_open(group);
    atomic_fetch_sub(&group->view_readers, 1);
    return status;
}

static void messaged_start(struct hdl_group *group, struct hdl_op *op)
{
    struct messaged *m = messaged_of(group);
    mapped_start(group, op);
    if (!m->readying)
        m->readying = op;
}

static void messaged_missing(const struct hdl_op *op, uint64_t *mask)
{
    struct hdl_group *group = op->group;
    const struct messaged *m = messaged_of(group);
    mapped_missing(op, mask);
    uint64_t x = GROUP_X(op->number, op->pulled);
    for (uint32_t r = 0; r < group->capacity; r++) {
        if (r == group->rank || !m->heads[r] || !group_view_present(group->seen, r))
            continue;
        uint64_t word = atomic_load_explicit(&m->heads[r]->ready, memory_order_relaxed);
        if (!messaged_word_covers(group, word, x))
            mask[r / 64] |= UINT64_C(1) << (r % 64);
    }
}

const struct group_path group_path_messaged = {
    .name = "messaged",
    .messaged = true,
    .open = messaged_open,
    .close = messaged_hosts_close,
    .start = messaged_start,
    .progress = messaged_progress,
    .adopt = messaged_adopt,
    .sample = mapped_sample,
    .missing = messaged_missing,
};
