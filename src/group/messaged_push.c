/* SPDX-License-Identifier: Apache-2.0 */
/* Pushing slots, `ready` and `done` into the mirrors on other hosts. */
#include "group/messaged.h"

#include <stddef.h>

#include "base/checked.h"
#include "group/mapped.h"
#include "net/net.h"

/*
 * For each published chunk and each other host that reads it, in this order:
 *
 *   chunk 0:  [slot header]  [payload, raises seq]
 *             [header, raises seq]    without payload, or with one that fits the header
 *   others:   [payload, raises seq]
 *
 * Both in one message if they are small. A header goes as a small message, which a
 * payload's signal never overtakes. Reductions of shares send the header of chunk 0 on
 * its own, then what raises words of its own. net_put may have no room: then the cursor
 * stays where it is.
 */

static struct messaged_entry *entry_at(const struct hdl_group *group, uint64_t position)
{
    return &messaged_of(group)
                ->entries[position %
                          (MESSAGED_ENTRIES * (uint64_t)group->shape.window_chunks)];
}

/* Payloads made of one block for each rank: where they lie, how long the longest is. */
static void set_blocks(const struct hdl_op *op, uint64_t chunk,
                       struct messaged_entry *entry)
{
    size_t begin, most = 0;
    switch (op->desc.kind) {
    case GROUP_ALLTOALLV:
        if (chunk == 0)
            return;
        for (uint32_t r = 0; r < op->group->capacity; r++)
            most = base_max_size(
                most, mapped_range(op, chunk - 1, op->arrays.src_counts[r], &begin));
        break;
    case GROUP_ALLTOALL:
    case GROUP_SCATTER:
    case GROUP_SCATTERV:
    case GROUP_REDUCE_SCATTER:
    case GROUP_REDUCE_SCATTERV:
        most = mapped_range(op, chunk, op->desc.count, &begin);
        break;
    default:
        return;
    }
    entry->stride = op->chunk_elems * op->elem;
    entry->used = most * op->elem;
}

void messaged_enqueue(struct hdl_group *group, struct hdl_op *op, uint64_t chunk,
                      enum messaged_what what, size_t payload)
{
    struct messaged *m = messaged_of(group);
    struct messaged_entry *entry = entry_at(group, m->published);
    *entry = (struct messaged_entry){
        .x = GROUP_X(op->number, chunk),
        .slot = group_slot_of(group, op->number, chunk),
        .what = what,
        .op = op,
        .desc = op->desc,
        .payload = payload,
        .inlined = op->inlined,
    };
    set_blocks(op, chunk, entry);
    m->published++;
}

void messaged_requeue(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    for (uint32_t t = 0; t < m->num_targets; t++)
        m->targets[t].pushed = m->published;
}

/* The cursors of all targets must stay within the ring. */
bool messaged_room(const struct hdl_group *group)
{
    const struct messaged *m = messaged_of(group);
    for (uint32_t t = 0; t < m->num_targets; t++)
        if (m->targets[t].receiver >= 0 && m->published - m->targets[t].pushed >=
                                               2 * (uint64_t)group->shape.window_chunks)
            return false;
    return true;
}

static size_t slot_offset(const struct hdl_group *group, uint32_t slot)
{
    return messaged_mirror_offset(group) + messaged_of(group)->shape.slots +
           slot * sizeof(struct group_slot);
}

/* The header behind seq: hash, inline payload, descriptor. */
static enum hdl_status push_header(struct hdl_group *group,
                                   struct messaged_target *target,
                                   const struct messaged_entry *entry)
{
    size_t at = slot_offset(group, entry->slot);
    size_t begin = offsetof(struct group_slot, done);
    size_t end = offsetof(struct group_slot, reserved1);
    return net_put(target->remote, at + begin,
                   (const char *)&group->slots[entry->slot] + begin, end - begin,
                   at + offsetof(struct group_slot, seq), entry->x, HDL_SIGNAL_SET);
}

/* Bytes that this rank gives for the shares of the target's ranks. */
static void shares_of(const struct hdl_group *group, const struct messaged_target *target,
                      const struct messaged_entry *entry, size_t *begin, size_t *end)
{
    const struct hdl_op *op = entry->op;
    uint64_t chunk = GROUP_X_CHUNK(entry->x);
    *begin = SIZE_MAX;
    *end = 0;
    for (uint32_t i = 0; i < target->num_ranks; i++) {
        uint32_t reader = target->ranks[i];
        size_t at, n = op->algorithm->share(op, reader, chunk, &at);
        if (n == 0 || !mapped_gives(op, group->rank, reader, chunk))
            continue;
        *begin = base_min_size(*begin, at * op->elem);
        *end = base_max_size(*end, (at + n) * op->elem);
    }
    if (*end == 0)
        *begin = 0;
}

/* The part of the payload that ranks of the target's host read, and the word it raises.
 */
static size_t payload_range(const struct hdl_group *group,
                            const struct messaged_target *target,
                            const struct messaged_entry *entry, size_t *begin)
{
    size_t end = entry->payload;
    *begin = 0;
    if (entry->what == MESSAGED_PIECE) {
        size_t n = entry->op->algorithm->share(entry->op, group->rank,
                                               GROUP_X_CHUNK(entry->x), begin);
        *begin *= entry->op->elem;
        return n * entry->op->elem;
    }
    if (entry->what == MESSAGED_PART) {
        shares_of(group, target, entry, begin, &end);
    } else if (entry->stride) {
        *begin = target->low * entry->stride;
        end = target->high * entry->stride + entry->used;
    }
    return base_min_size(end, group->shape.chunk_bytes) - *begin;
}

/* Does anybody on the target's host wait for this rank's chunk? For the first all do. */
static bool is_waited_for(const struct hdl_group *group,
                          const struct messaged_target *target,
                          const struct messaged_entry *entry)
{
    const struct messaged *m = messaged_of(group);
    size_t begin;
    if (entry->what == MESSAGED_PART)
        return payload_range(group, target, entry, &begin) > 0;
    switch (entry->desc.kind) {
    case GROUP_GATHER:
    case GROUP_GATHERV:
    case GROUP_REDUCE:
        return m->host[entry->desc.root] == (uint32_t)(target - m->targets);
    case GROUP_BROADCAST:
    case GROUP_SCATTER:
    case GROUP_SCATTERV:
        return entry->desc.root == (int32_t)group->rank;
    default:
        return true;
    }
}

static size_t raised_word(const struct messaged_entry *entry)
{
    switch (entry->what) {
    case MESSAGED_PART:
        return offsetof(struct group_slot, part);
    case MESSAGED_FULL:
        return offsetof(struct group_slot, full);
    case MESSAGED_PIECE:
        return offsetof(struct group_slot, piece);
    case MESSAGED_INPUT:
    case MESSAGED_HEAD:
        break;
    }
    return offsetof(struct group_slot, seq);
}

/* The payload, the slot's header before it if `headed`; a large one goes on its own. */
static enum hdl_status push_payload(struct hdl_group *group,
                                    struct messaged_target *target,
                                    const struct messaged_entry *entry, bool headed)
{
    const struct messaged_shape *shape = &messaged_of(group)->shape;
    bool piece =
        entry->what == MESSAGED_PIECE ||
        (entry->what == MESSAGED_PART && mapped_gives_sums(entry->op, group->rank));
    size_t begin, bytes = payload_range(group, target, entry, &begin);
    size_t in_slot = entry->slot * group->shape.chunk_bytes + begin;
    size_t header = offsetof(struct group_slot, done);
    struct net_block blocks[2] = {
        {.offset = slot_offset(group, entry->slot) + header,
         .src = (const char *)&group->slots[entry->slot] + header,
         .bytes = headed ? offsetof(struct group_slot, reserved1) - header : 0},
        {.offset = messaged_mirror_offset(group) + (piece ? shape->pieces : shape->data) +
                   in_slot,
         .src = (piece ? group->pieces : group->data) + in_slot,
         .bytes = bytes}};
    enum hdl_status status = net_put_two(
        target->remote, blocks, slot_offset(group, entry->slot) + raised_word(entry),
        entry->x, HDL_SIGNAL_SET);
    if (status == HDL_OK)
        target->tickets[entry->slot] = net_put_count(target->remote);
    return status;
}

static enum hdl_status push_entry(struct hdl_group *group, struct messaged_target *target,
                                  const struct messaged_entry *entry)
{
    const struct group_slot *slot = &group->slots[entry->slot];
    bool plain = entry->what == MESSAGED_INPUT, head = entry->what == MESSAGED_HEAD;
    bool first = GROUP_X_CHUNK(entry->x) == 0 && (plain || head);
    /* Superseded, or of an operation that ended early: then its descriptor is all that
     * somebody may still lack. */
    bool over = entry->x <= group->done;
    if (atomic_load_explicit(&slot->seq, memory_order_relaxed) != entry->x ||
        (over && !first))
        return HDL_OK;
    bool waited_for = !head && !over && is_waited_for(group, target, entry);
    if (!first && !waited_for)
        return HDL_OK;
    if (!waited_for || (plain && (entry->payload == 0 || entry->inlined)))
        return push_header(group, target, entry);
    return push_payload(group, target, entry, first);
}

/* The newest `ready`, with `done` before it. */
static enum hdl_status push_ready(struct hdl_group *group, struct messaged_target *target)
{
    uint64_t word = atomic_load_explicit(&group->head->ready, memory_order_relaxed);
    uint64_t done = group->done;
    size_t at = messaged_mirror_offset(group);
    enum hdl_status status = net_put(
        target->remote, at + offsetof(struct group_head, done), &done, sizeof(done),
        at + offsetof(struct group_head, ready), word, HDL_SIGNAL_SET);
    if (status == HDL_OK) {
        target->ready_told = word;
        target->done_told = done;
    }
    return status;
}

/* A broken put cannot be repaired here: bounds are ours, so it is a fault of this
 * program. */
static bool settled(struct hdl_group *group, enum hdl_status status)
{
    if (status == HDL_OK)
        return true;
    /* A lost peer is the control plane's matter: the commit replaces the receiver. */
    if (status != HDL_PENDING && status != HDL_EPEER)
        group_end(group, status, base_detail());
    return false;
}

static bool push_target(struct hdl_group *group, struct messaged_target *target,
                        bool say_done)
{
    struct messaged *m = messaged_of(group);
    bool moved = false;
    if (target->receiver < 0 || !target->remote)
        return false;
    while (target->pushed < m->published) {
        if (!settled(group, push_entry(group, target, entry_at(group, target->pushed))))
            return moved;
        target->pushed++;
        moved = true;
    }
    uint64_t word = atomic_load_explicit(&group->head->ready, memory_order_relaxed);
    bool news =
        word != target->ready_told || (say_done && group->done != target->done_told);
    if (news && settled(group, push_ready(group, target)))
        moved = true;
    return moved;
}

bool messaged_push(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    uint64_t often = group->shape.window_chunks / 4;
    bool say_done = m->unsaid_done >= (often ? often : 1);
    bool moved = false, said = true;
    for (uint32_t t = 0; t < m->num_targets; t++) {
        struct messaged_target *target = &m->targets[t];
        moved |= push_target(group, target, say_done);
        said &= target->receiver < 0 || target->done_told == group->done;
    }
    if (said)
        m->unsaid_done = 0;
    return moved;
}

bool messaged_told(const struct hdl_group *group, uint64_t x)
{
    const struct messaged *m = messaged_of(group);
    for (uint32_t t = 0; t < m->num_targets; t++) {
        const struct messaged_target *target = &m->targets[t];
        if (target->receiver < 0)
            continue;
        if (!messaged_word_covers(group, target->ready_told, x))
            return false;
    }
    return true;
}

bool messaged_slot_left(const struct hdl_group *group, uint32_t slot)
{
    const struct messaged *m = messaged_of(group);
    for (uint32_t t = 0; t < m->num_targets; t++) {
        const struct messaged_target *target = &m->targets[t];
        if (target->receiver >= 0 && target->remote &&
            net_put_done(target->remote) < target->tickets[slot])
            return false;
    }
    return true;
}

bool messaged_delivered(const struct hdl_group *group)
{
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct hdl_peer_window *remote = group->peer[r].remote;
        if (remote && group_view_present(group->seen, r) && !net_remote_delivered(remote))
            return false;
    }
    return true;
}
