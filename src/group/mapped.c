/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives over mapped peers: publish my input, wait for theirs, pull. */
#include "group/mapped.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/copy.h"
#include "base/log.h"
#include "group/reduce.h"
#include "group/spread.h"
#include "group/table.h"
#include "net/net.h"

/*
 * Every open operation has a few chunks between `published` and `pulled`:
 *
 *      chunk   0 ........ pulled ........ pieces ........ published ...... num_chunks
 *              output       |  needs all    |  needs all      |  needs a free
 *              written      |  pieces       |  inputs         |  slot
 *
 * Publishing may run ahead into the next operations; pulling goes in the order of x.
 */

/* May a slot that holds x be written again? */
static bool slot_free(struct hdl_group *group, uint64_t x)
{
    if (x <= group->done_all)
        return true;
    const struct group_view *view = group->seen;
    uint64_t lowest = group->done;
    for (uint32_t w = 0; w < view->num_words; w++) {
        for (uint64_t bits = view->reading[w]; bits; bits &= bits - 1) {
            uint32_t rank = w * 64 + (uint32_t)__builtin_ctzll(bits);
            struct group_peer *peer = &group->peer[rank];
            if (rank == group->rank || !peer->segment)
                continue;
            if (peer->done < x) {
                struct group_head *head = group_segment_head(peer->segment);
                peer->done = atomic_load_explicit(&head->done, memory_order_acquire);
            }
            /* A removed rank reads up to its last operation. */
            if (peer->done < lowest && !group_reads_no_more(group, view, rank))
                lowest = peer->done;
        }
    }
    group->done_all = lowest;
    return x <= lowest;
}

size_t mapped_publish(struct hdl_group *group, struct hdl_op *op, uint64_t chunk)
{
    uint32_t index = group_slot_of(group, op->number, chunk);
    struct group_slot *slot = &group->slots[index];
    uint64_t x = GROUP_X(op->number, chunk);
    size_t bytes = 0;
    /* Who reads what this slot held, because a view that it has not heard of left it out,
     * must see that it is too late. Chunks come in order, so x - 1 is shown. */
    atomic_store_explicit(&slot->seq, x - 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    if (op->algorithm->publish) {
        unsigned char *payload = op->inlined ? slot->payload
                                             : (unsigned char *)group->data + op->place +
                                                   index * group->shape.chunk_bytes;
        bytes = op->algorithm->publish(op, chunk, payload);
        group_count(&group->counters.bytes_sent, bytes);
    }
    /* The second line is mostly right already. */
    if (chunk == 0 && slot->hash != op->hash) {
        slot->hash = op->hash;
        slot->desc = op->desc;
    }
    if (slot->view != group->seen->ctl->epoch)
        slot->view = group->seen->ctl->epoch;
    atomic_store_explicit(&slot->done, group->done, memory_order_relaxed);
    atomic_store_explicit(&slot->seq, x, memory_order_release);
    /* Two operations from here: late enough for no peer to read it meanwhile. */
    if (group->crowded)
        base_own_line(&group->slots[group_slot_of(group, op->number, chunk + 2)]);
    op->published++;
    group->open_chunks++;
    if (op->published == op->num_chunks && !op->unsized)
        group->publishing = group_next_open(group, op);
    return bytes;
}

/* Publishes the next chunk of the first operation that has one. */
static bool publish(struct hdl_group *group)
{
    struct hdl_op *op = group->publishing;
    if (!op || group->open_chunks >= op->ahead || op->published == op->num_chunks)
        return false;
    uint64_t chunk = op->published;
    uint32_t index = group_slot_of(group, op->number, chunk);
    struct group_slot *slot = &group->slots[index];
    if (!slot_free(group, atomic_load_explicit(&slot->seq, memory_order_relaxed)))
        return false;
    (void)mapped_publish(group, op, chunk);
    return true;
}

/* The rank has written over a chunk that is still needed here: a commit left this rank
 * out, of which it does not know yet (it was stopped), or which is lost with those who
 * had it. */
static void overtaken(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    char text[128];
    snprintf(text, sizeof(text),
             "operation %llu: rank %u went on without this rank before chunk %llu",
             (unsigned long long)op->number, rank, (unsigned long long)chunk);
    group_end(op->group, HDL_EFENCED, text);
}

bool mapped_look(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    struct group_peer *peer = &op->group->peer[rank];
    struct group_slot *slot = &peer->slots[group_slot_of(op->group, op->number, chunk)];
    uint64_t x = GROUP_X(op->number, chunk);
    uint64_t seq = atomic_load_explicit(&slot->seq, memory_order_acquire);
    if (seq != x) {
        if (seq > x)
            overtaken(op, rank, chunk);
        return false;
    }
    if (rank != op->group->rank) {
        uint64_t done = atomic_load_explicit(&slot->done, memory_order_relaxed);
        if (done > peer->done)
            peer->done = done;
    }
    /* Who shares a core with others mostly finds that peers are one operation ahead. */
    if (op->group->crowded)
        __builtin_prefetch(&peer->slots[group_slot_of(op->group, op->number, chunk + 1)]);
    if (chunk == 0 && slot->hash != op->hash)
        op->mismatch = true;
    if (chunk == 0 && op->algorithm->make_piece &&
        slot->view != op->group->seen->ctl->epoch)
        op->direct = true;
    return true;
}

/* What was read of the chunk was there until the end: publishers change seq before they
 * write over it. */
static bool still_there(struct hdl_op *op, uint64_t chunk)
{
    uint32_t index = group_slot_of(op->group, op->number, chunk);
    /* Others may have ended the operation before: only those that were read count. */
    enum group_needs needs = mapped_needs(op, chunk);
    atomic_thread_fence(memory_order_acquire);
    for (uint32_t r = 0; r < op->group->capacity && needs != GROUP_NEEDS_NONE; r++) {
        const struct group_slot *slots = op->group->peer[r].slots;
        bool read = needs == GROUP_NEEDS_ALL || (int32_t)r == op->desc.root;
        if (read && slots && mapped_takes_part(op, r, chunk) &&
            atomic_load_explicit(&slots[index].seq, memory_order_relaxed) >
                GROUP_X(op->number, chunk)) {
            overtaken(op, r, chunk);
            return false;
        }
    }
    return true;
}

static bool look_piece(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    const struct group_slot *slot =
        &op->group->peer[rank].slots[group_slot_of(op->group, op->number, chunk)];
    return atomic_load_explicit(&slot->piece, memory_order_acquire) >=
           GROUP_X(op->number, chunk);
}

bool mapped_all(struct hdl_op *op, uint64_t chunk, uint32_t *rank,
                bool (*arrived)(struct hdl_op *, uint32_t, uint64_t))
{
    for (; *rank < op->group->capacity; (*rank)++)
        if (mapped_takes_part(op, *rank, chunk) && !arrived(op, *rank, chunk))
            return false;
    return true;
}

static bool is_rooted(const struct hdl_op *op)
{
    return op->desc.root >= 0;
}

enum group_needs mapped_needs(const struct hdl_op *op, uint64_t chunk)
{
    if (op->desc.kind == GROUP_REFUSED)
        return GROUP_NEEDS_NONE;
    bool gives = op->desc.kind == GROUP_BROADCAST || op->desc.kind == GROUP_SCATTER ||
                 op->desc.kind == GROUP_SCATTERV;
    if (gives && mapped_is_root(op))
        return GROUP_NEEDS_NONE;
    if (chunk == 0 || !op->algorithm->needs)
        return GROUP_NEEDS_ALL;
    return op->algorithm->needs(op);
}

static bool chunk_arrived(struct hdl_op *op, uint64_t chunk)
{
    switch (mapped_needs(op, chunk)) {
    case GROUP_NEEDS_NONE:
        return true;
    case GROUP_NEEDS_ROOT:
        return !mapped_takes_part(op, (uint32_t)op->desc.root, chunk) ||
               mapped_look(op, (uint32_t)op->desc.root, chunk);
    case GROUP_NEEDS_ALL:
        break;
    }
    if (op->use_pieces)
        return mapped_all(op, chunk, &op->wait_rank, look_piece);
    return mapped_all(op, chunk, &op->wait_rank, mapped_look);
}

/* Reduces the own share of the next chunk whose inputs are all there. A piece is shown
 * only if no freeze began before its inputs were read: what it holds of a dead rank was
 * then published before the answer. */
static bool make_piece(struct hdl_group *group, struct hdl_op *op)
{
    uint64_t begin = group_ready_begin(group);
    uint64_t chunk = op->pieces;
    if (!op->use_pieces || chunk == op->published || (begin & GROUP_READY_FROZEN) ||
        !mapped_all(op, chunk, &op->piece_rank, mapped_look))
        return false;
    op->algorithm->make_piece(op, chunk);
    if (atomic_load_explicit(&group->ready, memory_order_seq_cst) != begin)
        return false;
    struct group_slot *slot = &group->slots[group_slot_of(group, op->number, chunk)];
    atomic_store_explicit(&slot->piece, GROUP_X(op->number, chunk), memory_order_release);
    op->pieces++;
    op->piece_rank = 0;
    return true;
}

static const struct group_desc *published_desc(struct hdl_op *op, uint32_t rank)
{
    return &op->group->peer[rank].slots[group_slot_of(op->group, op->number, 0)].desc;
}

void mapped_close_op(struct hdl_group *group, struct hdl_op *op)
{
    group->open_chunks -= op->published - op->pulled;
    group_done(group, GROUP_X_END(op->number));
}

/* An operation with a root that is not there ends on all ranks at the same chunk. */
static bool root_lost(const struct hdl_op *op, uint64_t chunk)
{
    return is_rooted(op) && !mapped_takes_part(op, (uint32_t)op->desc.root, chunk);
}

static void end_without_root(struct hdl_group *group, struct hdl_op *op)
{
    mapped_close_op(group, op);
    group_op_mark_failed(op, (uint32_t)op->desc.root);
    group_op_fail(op, HDL_EPEER, NULL, "operation %llu: root %d is lost",
                  (unsigned long long)op->number, op->desc.root);
}

bool mapped_finish_chunk(struct hdl_group *group, struct hdl_op *op, uint64_t chunk)
{
    enum hdl_status status = HDL_OK;
    bool pulls = !op->mismatch && !root_lost(op, chunk);
    if (pulls && op->algorithm->pull)
        status = op->algorithm->pull(op, chunk);
    bool has_read = op->mismatch || (pulls && op->algorithm->pull);
    if (has_read && !still_there(op, chunk))
        return false;
    if (op->mismatch) {
        mapped_close_op(group, op);
        group_op_mismatch(op, GROUP_X(op->number, 0), published_desc);
        return true;
    }
    if (!pulls) {
        end_without_root(group, op);
        return true;
    }
    op->pulled++;
    group->open_chunks--;
    op->wait_rank = 0;
    if (status < 0) {
        mapped_close_op(group, op);
        group_op_fail(op, status, NULL, "%s", base_detail());
    } else if (op->pulled == op->num_chunks) {
        mapped_close_op(group, op);
        group_op_finish(op, status);
    } else {
        group_done(group, GROUP_X(op->number, chunk));
    }
    return true;
}

/* Before pieces are used the descriptors must have been compared, and everybody must have
 * started under the same view, none in the last operations before its removal. */
static bool verify(struct hdl_op *op)
{
    uint32_t rank = 0;
    if (op->verified || !op->algorithm->make_piece)
        return true;
    if (!mapped_all(op, 0, &rank, mapped_look))
        return false;
    op->verified = true;
    op->use_pieces = !op->direct && !op->mismatch &&
                     GROUP_X(op->number, 0) >= op->group->seen->steady_from;
    return true;
}

/* Finishes the next chunk of the first open operation. */
static bool pull(struct hdl_group *group, struct hdl_op *op)
{
    uint64_t chunk = op->pulled;
    if (chunk == op->published || (op->use_pieces && chunk == op->pieces))
        return false;
    uint64_t begin = group_ready_begin(group);
    if (begin & GROUP_READY_FROZEN)
        return false;
    if (atomic_load_explicit(&group->view, memory_order_acquire) != group->seen)
        return false;
    /* Without its root it ends here, where others have ended it perhaps. */
    bool ends = chunk > 0 && root_lost(op, chunk);
    if ((!ends && !chunk_arrived(op, chunk)) ||
        !group_ready_raise(group, begin, GROUP_X(op->number, chunk)))
        return false;
    return mapped_finish_chunk(group, op, chunk);
}

/* Also ranks that were removed and wait for the inputs of their last operations. */
static void ring_all(struct hdl_group *group)
{
    const struct group_view *view = group->seen;
    for (uint32_t w = 0; w < view->num_words; w++) {
        for (uint64_t bits = view->reading[w]; bits; bits &= bits - 1) {
            struct hdl_peer_window *remote =
                group->peer[w * 64 + (uint32_t)__builtin_ctzll(bits)].remote;
            if (remote)
                net_ring(remote);
        }
    }
}

/* Peers are told after every chunk of a long operation, and once after a run of short
 * ones. */
static bool mapped_progress(struct hdl_group *group)
{
    bool moved = false, silent = false;
    for (;;) {
        bool step = false, published = false;
        while (publish(group))
            published = true;
        struct base_list *node = base_list_first(&group->queue);
        if (!node)
            break;
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        bool chunked = op->num_chunks > 1;
        if (verify(op)) {
            step |= make_piece(group, op);
            step |= pull(group, op);
        }
        if (step || published) {
            moved = true;
            silent = !chunked;
            if (chunked)
                ring_all(group);
        }
        if (!step ||
            atomic_load_explicit(&group->engine->contended, memory_order_relaxed))
            break;
    }
    if (silent)
        ring_all(group);
    return moved;
}

/* Open operations go on with the inputs: pieces of the old view are not looked at. */
static void mapped_adopt(struct hdl_group *group, const struct group_view *older)
{
    (void)older;
    /* A view without changes here (somebody left behind it, say) makes nothing start
     * again. */
    uint64_t from = ctl_view_changed_from(atomic_load(&group->view)->ctl);
    base_list_each(node, after, &group->queue)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        bool touched = op->published > 0 && ctl_x(op->number, op->published - 1) >= from;
        if (op->published > 0)
            op->direct = true;
        if (touched && op->published > op->pulled)
            group_count(&group->counters.redone_chunks, op->published - op->pulled);
        op->use_pieces = false;
        /* Behind chunk 0 its slots may hold other chunks by now. */
        op->verified = op->pulled > 0;
        op->mismatch = false;
        op->wait_rank = 0;
        op->piece_rank = 0;
    }
}

enum { MOVES_FROM = 4096 };

/* Between two ranks a place in the slots is written again late, after 1 or 2 MiB of
 * others: writing a line takes five times as long while the cache of a core that has read
 * it still holds it. Operations of several chunks use the halves of their slots in turns,
 * short payloads move on through a half. More ranks fill the caches without
 * that. The same on all ranks; mirrors on other hosts lie as the slots do. */
static size_t place_of(const struct hdl_group *group, const struct hdl_op *op)
{
    size_t half = group->shape.chunk_bytes / 2;
    if (group->path != &group_path_mapped || group->capacity != 2 || op->inlined ||
        op->chunk_bytes > half)
        return 0;
    if (op->num_chunks > 1)
        return op->number % 2 ? half : 0;
    size_t bytes = base_div_up(op->chunk_bytes, GROUP_LINE) * GROUP_LINE;
    /* Long ones come back late enough as they are, and fresh pages cost the time that
     * thousands of operations gain. */
    if (bytes > half / 4 || op->number < MOVES_FROM)
        return 0;
    return op->number / group->shape.window_chunks % (half / bytes) * bytes;
}

/* Chunks of long operations after which all slots have been written, and more will come.
 */
enum { ENLARGE_FROM = 128 };

void group_enlarge_run(struct group_job *job)
{
    struct hdl_group *group = base_container_of(job, struct hdl_group, enlarge_job);
    bool large = net_window_enlarge(group->window, group->shape.pieces);
    base_log_debug(group->engine->env, "group %s slots %zu bytes large_pages %s",
                   group->name, group->shape.pieces, large ? "yes" : "no");
}

/* The slots of a group that moves much pass through the caches again and again: a tenth
 * of the time goes into finding their pages. */
static void count_long(struct hdl_group *group, const struct hdl_op *op)
{
    if (op->num_chunks == 1 || group->long_chunks >= ENLARGE_FROM || !group->window ||
        group->path != &group_path_mapped ||
        op->chunk_bytes < group->shape.chunk_bytes / 2)
        return;
    group->long_chunks += op->num_chunks;
    if (group->long_chunks >= ENLARGE_FROM)
        (void)group_worker_post(&group->engine->attacher, &group->enlarge_job);
}

void mapped_start(struct hdl_group *group, struct hdl_op *op)
{
    op->algorithm = group_table_choose(group, op);
    op->algorithm->plan(op);
    if (op->num_chunks >= GROUP_MAX_CHUNKS - 1) {
        /* All ranks find the same. */
        char text[96];
        snprintf(text, sizeof(text), "%s: too large: count %llu is %llu chunks",
                 group_kind_name(op->desc.kind), (unsigned long long)op->desc.count,
                 (unsigned long long)op->num_chunks);
        op->detail = base_strdup(op->engine->env, text);
        op->desc.kind = GROUP_REFUSED;
        op->hash = group_desc_hash(&op->desc);
        op->algorithm = &group_refused;
        op->algorithm->plan(op);
    }
    op->inlined = op->chunk_bytes <= GROUP_INLINE_BYTES;
    op->place = place_of(group, op);
    count_long(group, op);
    if (!group->publishing)
        group->publishing = op;
}

static uint64_t newest_of(const struct group_slot *slots, uint32_t count)
{
    uint64_t newest = GROUP_X_END(0);
    for (uint32_t i = 0; slots && i < count; i++) {
        uint64_t seq = atomic_load_explicit(&slots[i].seq, memory_order_seq_cst);
        newest = seq > newest ? seq : newest;
    }
    return newest;
}

uint64_t mapped_sample(struct hdl_group *group, uint32_t rank)
{
    return newest_of(group->peer[rank].slots, group->shape.window_chunks);
}

uint64_t group_segment_newest(const struct group_shape *shape, void *segment)
{
    return newest_of(group_segment_slot(shape, segment, 0), shape->window_chunks);
}

bool mapped_lacks(const struct hdl_op *op, uint32_t rank)
{
    const struct group_slot *slots = op->group->peer[rank].slots;
    uint64_t chunk = op->pulled;
    if (!slots || !mapped_takes_part(op, rank, chunk))
        return false;
    const struct group_slot *slot = &slots[group_slot_of(op->group, op->number, chunk)];
    return atomic_load_explicit(&slot->seq, memory_order_relaxed) <
           GROUP_X(op->number, chunk);
}

void mapped_missing(const struct hdl_op *op, uint64_t *mask)
{
    for (uint32_t r = 0; r < op->group->capacity; r++)
        if (mapped_lacks(op, r))
            base_mask_set(mask, r);
}

const struct group_path group_path_mapped = {
    .name = "mapped",
    .messaged = false,
    .start = mapped_start,
    .progress = mapped_progress,
    .adopt = mapped_adopt,
    .sample = mapped_sample,
    .missing = mapped_missing,
};

/* --------------------------------------------------------- shared by the algorithms */

void mapped_plan_blocks(struct hdl_op *op, size_t blocks, size_t count)
{
    /* Without divisions what fits into any slot. */
    if (count <= GROUP_SLOT_LEAST && count * blocks * op->elem <= GROUP_SLOT_LEAST) {
        op->chunk_elems = base_max_size(count, 1);
        op->num_chunks = 1;
        op->chunk_bytes = count * op->elem * blocks;
        return;
    }
    size_t room = group_table_chunk_bytes(op, blocks, count) / blocks;
    if (room < 64)
        room = op->group->shape.chunk_bytes / blocks;
    room -= room % 64;
    op->chunk_elems = base_max_size(room / op->elem, 1);
    if (op->chunk_elems > count)
        op->chunk_elems = base_max_size(count, 1);
    op->num_chunks = base_max_size(base_div_up(count, op->chunk_elems), 1);
    op->chunk_bytes = base_min_size(op->chunk_elems, count) * op->elem * blocks;
}

void mapped_stage(const struct hdl_op *op, void *payload, const void *src, size_t elems)
{
    if (op->desc.redop == HDL_PREMUL_SUM)
        group_premultiply(payload, src, elems, (enum hdl_dtype)op->desc.dtype,
                          op->scalar);
    else
        group_stage(&op->engine->stages, GROUP_STAGE_COLLECTIVE, op->stream, payload, src,
                    elems * op->elem);
}

void mapped_stage_for(const struct hdl_op *op, uint32_t reader, void *payload,
                      const void *src, size_t elems)
{
    if (op->desc.redop != HDL_PREMUL_SUM && group_spread_same_core(op->group, reader))
        base_copy(payload, src, elems * op->elem, false);
    else
        mapped_stage(op, payload, src, elems);
}

void mapped_deliver(const struct hdl_op *op, void *dst, const void *payload, size_t bytes)
{
    if (dst != payload)
        base_copy(dst, payload, bytes, op->stream);
    group_count(&op->group->counters.bytes_received, bytes);
}
