/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives with ranks on other hosts: publish, push, agree that all have it, pull. */
#include "group/messaged.h"

#include <string.h>

#include "group/mapped.h"
#include "net/net.h"

/*
 * Every open operation has chunks in these states:
 *
 *      chunk   0 ..... pulled .......... ready .......... published ...... num_chunks
 *              output    |  needs `ready`  |  needs all      |  needs a free
 *              written   |  from all       |  inputs         |  slot
 *
 * Before the user's output is written all ranks must have all inputs: then the loss of
 * any of them takes nothing away. That round runs ahead of the writing, so a long
 * operation pays for it once. What a rank has said to be ready it holds: inputs lie in
 * memory of its own host.
 *
 * Large reductions among many ranks go by pieces: a rank gets of every input only its
 * share, of another host's mostly as their sum, reduces that, and sends it to all; it is
 * ready when it has all pieces. Pieces are used under the view in which the operation
 * began, by all or by nobody: operations that any rank may have begun before the last
 * commit send whole inputs (again).
 *
 *      published --> sums pushed --> piece made, pushed --> all pieces here: ready
 *        inputs of     sums of          all_reduce,
 *        this host     other hosts      reduce
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
        if (r != group->rank && group_view_reading(view, r) && !peer_done(group, r, x) &&
            !group_reads_no_more(group, view, r))
            return false;
    return true;
}

/* All ranks find the same: nobody can have issued it before the newest view. */
static bool may_use_pieces(const struct hdl_op *op)
{
    const struct group_view *view = op->group->seen;
    if (!op->algorithm->share || (!op->algorithm->make_piece && !mapped_adds_up(op)))
        return false;
    return !op->inlined && op->number >= view->ctl->begun &&
           op->number > view->reports_until &&
           GROUP_X(op->number, 0) >= view->steady_from;
}

static enum messaged_what input_kind(const struct hdl_op *op)
{
    if (!op->algorithm->share || op->inlined)
        return MESSAGED_INPUT;
    return op->use_pieces ? MESSAGED_PART : MESSAGED_FULL;
}

/* What others need of a chunk at once; shares follow when they are added up. */
static void enqueue_input(struct hdl_group *group, struct hdl_op *op, uint64_t chunk,
                          size_t bytes)
{
    enum messaged_what what = input_kind(op);
    if (chunk == 0 && what != MESSAGED_INPUT)
        messaged_enqueue(group, op, chunk, MESSAGED_HEAD, 0);
    if (what != MESSAGED_PART)
        messaged_enqueue(group, op, chunk, what, bytes);
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
    if (chunk == 0)
        op->use_pieces = may_use_pieces(op);
    size_t bytes = mapped_publish(group, op, chunk);
    atomic_store_explicit(&group->slots[index].full, GROUP_X(op->number, chunk),
                          memory_order_release);
    enqueue_input(group, op, chunk, bytes);
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

static const struct group_slot *slot_of(const struct hdl_op *op, uint32_t rank,
                                        uint64_t chunk)
{
    return &op->group->peer[rank].slots[group_slot_of(op->group, op->number, chunk)];
}

/* Calls that differ end at the descriptors; there may be no such payload. */
static bool raised(const struct hdl_op *op, const _Atomic uint64_t *word, uint64_t chunk)
{
    return op->mismatch ||
           atomic_load_explicit(word, memory_order_acquire) >= GROUP_X(op->number, chunk);
}

/* Has the rank's whole input of the chunk of a reduction come? Chunks behind the first
 * are not looked at, since who knows already that calls differ goes on. */
static bool full_here(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    return (chunk > 0 || mapped_look(op, rank, chunk)) &&
           raised(op, &slot_of(op, rank, chunk)->full, chunk);
}

/* Has what this rank needs of the rank's input of the chunk come? */
static bool input_here(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    if (input_kind(op) == MESSAGED_INPUT)
        return mapped_look(op, rank, chunk);
    if (mapped_needs(op, 1) == GROUP_NEEDS_ALL)
        return full_here(op, rank, chunk);
    return chunk > 0 || mapped_look(op, rank, chunk);
}

/* What a rank of this host adds up for others. */
static bool addend_here(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    return !mapped_here(op, rank) || full_here(op, rank, chunk);
}

/* What the rank gives for the own share. */
static bool part_here(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    if (mapped_here(op, rank))
        return full_here(op, rank, chunk);
    return !mapped_gives(op, rank, op->group->rank, chunk) ||
           raised(op, &slot_of(op, rank, chunk)->part, chunk);
}

static bool piece_here(struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    size_t begin;
    return op->algorithm->share(op, rank, chunk, &begin) == 0 ||
           raised(op, &slot_of(op, rank, chunk)->piece, chunk);
}

/* Everything for the own share; before, all descriptors: where calls differ parts may be
 * missing. */
static bool parts_here(struct hdl_op *op, uint64_t chunk, uint32_t *rank)
{
    size_t begin;
    uint32_t first = 0;
    if (!op->verified && !mapped_all(op, 0, &first, mapped_look))
        return false;
    op->verified = true;
    return op->sums > chunk &&
           (op->mismatch ||
            op->algorithm->share(op, op->group->rank, chunk, &begin) == 0 ||
            mapped_all(op, chunk, rank, part_here));
}

/* Everything that this rank needs for the chunk. */
static bool arrived(struct hdl_op *op, uint64_t chunk)
{
    if (op->use_pieces && !op->algorithm->make_piece)
        return parts_here(op, chunk, &op->ready_rank);
    if (op->use_pieces) {
        bool reads = mapped_needs(op, 1) == GROUP_NEEDS_ALL;
        return op->pieces > chunk &&
               (!reads || mapped_all(op, chunk, &op->ready_rank, piece_here));
    }
    switch (needs_of(op, chunk)) {
    case GROUP_NEEDS_NONE:
        return true;
    case GROUP_NEEDS_ROOT:
        return !mapped_takes_part(op, (uint32_t)op->desc.root, chunk) ||
               input_here(op, (uint32_t)op->desc.root, chunk);
    case GROUP_NEEDS_ALL:
        break;
    }
    return mapped_all(op, chunk, &op->ready_rank, input_here);
}

/* Adds up what other hosts get of the next chunk. */
static bool add_up(struct hdl_group *group)
{
    struct hdl_op *op = messaged_of(group)->readying;
    while (op && op->use_pieces && op->sums == op->num_chunks)
        op = group_next_open(group, op);
    if (!op || !op->use_pieces || op->sums == op->published ||
        (mapped_gives_sums(op, group->rank) &&
         !mapped_all(op, op->sums, &op->sum_rank, addend_here)))
        return false;
    uint64_t chunk = op->sums++;
    op->sum_rank = 0;
    if (op->mismatch)
        return true;
    mapped_add_up(op, chunk);
    messaged_enqueue(group, op, chunk, MESSAGED_PART, op->chunk_bytes);
    return true;
}

/* Reduces this rank's share of the next chunk. */
static bool make_piece(struct hdl_group *group)
{
    struct hdl_op *op = messaged_of(group)->readying;
    size_t begin;
    if (!op || !op->use_pieces || !op->algorithm->make_piece ||
        op->pieces == op->published || !parts_here(op, op->pieces, &op->piece_rank))
        return false;
    uint64_t chunk = op->pieces++;
    op->piece_rank = 0;
    if (op->mismatch || op->algorithm->share(op, group->rank, chunk, &begin) == 0)
        return true;
    op->algorithm->make_piece(op, chunk);
    struct group_slot *slot = &group->slots[group_slot_of(group, op->number, chunk)];
    atomic_store_explicit(&slot->piece, GROUP_X(op->number, chunk), memory_order_release);
    messaged_enqueue(group, op, chunk, MESSAGED_PIECE, 0);
    return true;
}

/* Says that this rank has everything for the next chunk. */
static bool raise_ready(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    struct hdl_op *op = m->readying;
    if (!op || op->ready == op->published)
        return false;
    uint64_t chunk = op->ready;
    uint64_t x = GROUP_X(op->number, chunk);
    uint64_t begin = group_ready_begin(group);
    if ((begin & GROUP_READY_FROZEN) ||
        atomic_load_explicit(&group->view, memory_order_acquire) != group->seen)
        return false;
    if (!arrived(op, chunk) || !group_ready_raise(group, begin, x))
        return false;
    atomic_store_explicit(&group->head->ready,
                          messaged_word(messaged_attempt(group, x), x),
                          memory_order_release);
    op->ready++;
    op->ready_rank = 0;
    if (op->ready == op->num_chunks && !op->unsized)
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
            group_view_absent(group->seen, r))
            continue;
        uint64_t word = atomic_load_explicit(&m->heads[r]->ready, memory_order_acquire);
        if (!messaged_word_covers(group, word, x))
            return false;
    }
    return messaged_told(group, x);
}

static bool finish(struct hdl_group *group, struct hdl_op *op, uint64_t chunk)
{
    struct messaged *m = messaged_of(group);
    struct hdl_op *next = group_next_open(group, op);
    bool was_readying = m->readying == op;
    /* Of others it may be longer if the calls differ. */
    bool chunked = op->num_chunks > 1 || op->mismatch || op->desc.kind == GROUP_REFUSED;
    if (!mapped_finish_chunk(group, op, chunk))
        return false;
    /* It may have ended before its last chunk. */
    struct base_list *first = base_list_first(&group->queue);
    bool open = first && base_container_of(first, struct hdl_op, node) == op;
    if (was_readying && !open)
        m->readying = next;
    /* The next operation uses the slots of the later chunks of this one: others must know
     * now that they are free. Else a word now and then is enough. */
    m->unsaid_done += chunked && !open ? group->shape.window_chunks : 1;
    return true;
}

static bool pull(struct hdl_group *group)
{
    struct base_list *node = base_list_first(&group->queue);
    if (!node)
        return false;
    struct hdl_op *op = base_container_of(node, struct hdl_op, node);
    if (op->pulled == op->ready || !all_ready(op, op->pulled))
        return false;
    return finish(group, op, op->pulled);
}

static void ring_host(struct hdl_group *group)
{
    const struct messaged *m = messaged_of(group);
    for (uint32_t i = 0; i < m->num_own_host; i++)
        group_ring(group, m->own_host[i]);
}

/* The commit ended the operation on all ranks: a link stays broken. */
static bool end_broken(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    const struct ctl_view *ctl = group->seen->ctl;
    struct base_list *node = base_list_first(&group->queue);
    if (!node)
        return false;
    struct hdl_op *op = base_container_of(node, struct hdl_op, node);
    if (op->number < ctl->link_from || op->number > ctl->link_to)
        return false;
    if (m->readying == op)
        m->readying = group_next_open(group, op);
    mapped_close_op(group, op);
    m->unsaid_done += group->shape.window_chunks;
    group_op_fail(op, HDL_ELINK, NULL,
                  "operation %llu: a link between two ranks stays broken",
                  (unsigned long long)op->number);
    return true;
}

static bool messaged_progress(struct hdl_group *group)
{
    bool moved = net_poll(group->engine->net) > 0;
    for (;;) {
        bool step = end_broken(group);
        step |= publish(group);
        step |= add_up(group);
        step |= make_piece(group);
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
        if (op->pulled == op->ready ||
            GROUP_X(op->number, op->pulled) > group->seen->ctl->settled ||
            !finish(group, op, op->pulled))
            break;
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
        if (kept < op->ready) {
            group_count(&group->counters.redone_chunks, op->ready - kept);
            op->ready = kept;
        }
        if (op->ready == 0)
            op->mismatch = false;
        if (op->published > 0)
            op->direct = true;
        op->use_pieces = false;
        op->wait_rank = 0;
        op->sum_rank = 0;
        op->piece_rank = 0;
        op->ready_rank = 0;
        if (!m->readying && (op->unsized || op->ready < op->num_chunks))
            m->readying = op;
    }
}

/* Open chunks go out again: to new receivers, and whole where shares had been sent. */
static void push_again(struct hdl_group *group)
{
    messaged_requeue(group);
    base_list_each(node, after, &group->queue)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        for (uint64_t chunk = op->pulled; chunk < op->published; chunk++)
            enqueue_input(group, op, chunk, op->chunk_bytes);
    }
}

/* A commit that only ends a freeze leaves what is under way as it is, receivers
 * included. */
static bool restarts(const struct hdl_group *group, const struct group_view *older)
{
    const struct ctl_view *ctl = group->seen->ctl;
    return ctl->num_attempts > 0 &&
           ctl->attempts[ctl->num_attempts - 1].epoch > older->ctl->epoch;
}

static void messaged_adopt(struct hdl_group *group, const struct group_view *older)
{
    finish_settled(group);
    if (!restarts(group, older))
        return;
    fall_back(group, group_ready_x(group, group_ready_begin(group)));
    messaged_hosts_adopt(group);
    push_again(group);
}

/* --------------------------------------------------------------------- life, queries */

static enum hdl_status messaged_open(struct hdl_group *group)
{
    if (group->ahead < group->shape.window_chunks / 2)
        group->ahead = group->shape.window_chunks / 2;
    /* The first view has the handles by which hosts are told apart. No operation runs
     * yet. */
    atomic_fetch_add(&group->view_readers, 1);
    if (group->seen->ctl->epoch == 0)
        atomic_store_explicit(&group->seen, atomic_load(&group->view),
                              memory_order_release);
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

/* Who has not come, and only if all have: whose `ready` is missing. The others may wait
 * for the same rank as this one. */
static void messaged_missing(const struct hdl_op *op, uint64_t *mask)
{
    struct hdl_group *group = op->group;
    const struct messaged *m = messaged_of(group);
    mapped_missing(op, mask);
    for (uint32_t w = 0; w < group->seen->num_words; w++)
        if (mask[w])
            return;
    uint64_t x = GROUP_X(op->number, op->pulled);
    for (uint32_t r = 0; r < group->capacity; r++) {
        if (r == group->rank || !m->heads[r] || !group_view_present(group->seen, r))
            continue;
        uint64_t word = atomic_load_explicit(&m->heads[r]->ready, memory_order_relaxed);
        if (!messaged_word_covers(group, word, x))
            base_mask_set(mask, r);
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
    .tick = messaged_watch_links,
    .missing = messaged_missing,
};
