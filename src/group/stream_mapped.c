/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between mapped peers: cells and fragments in the sender's own segment. */
#include <string.h>

#include "base/checked.h"
#include "base/copy.h"
#include "group/messaged.h"
#include "group/p2p.h"
#include "net/net.h"

/*
 * The sender writes, the receiver reads and says in its own segment what it has taken:
 *
 *     sender's segment, per destination        receiver's segment, per source
 *     cells[64]  small messages, announcements   cells       read so far
 *     bulk[16]   fragments of 64 KiB             fragments   read so far
 *                                                grants[16]  large messages it wants
 *
 *     up to 40 B     one cell
 *     up to 64 KiB   one cell and one fragment; if no receive is posted the receiver
 *                    keeps a copy
 *     above          a cell announces it; fragments follow once a receive is posted and
 *                    granted, so they go straight to the user's memory
 */

#define GRANT_REFUSED (UINT64_C(1) << 63)

enum { CELLS_BATCH = 16 };

static struct group_p2p_peer *peer_of(struct hdl_group *group, uint32_t rank)
{
    return &group->p2p->peer[rank];
}

/* What the peer says about the stream from here to it. */
static struct group_intake *their_intake(struct hdl_group *group, uint32_t rank)
{
    return peer_of(group, rank)->in.intake;
}

static struct group_intake *my_intake(struct hdl_group *group, uint32_t rank)
{
    return group_segment_intake(&group->shape, group->segment, rank);
}

/* Words for the peer were written: whoever reads them sees them, or gets them sent. */
static void show(struct hdl_group *group, uint32_t rank)
{
    if (peer_of(group, rank)->stream == &group_stream_mapped)
        group_ring(group, rank);
    else
        (void)messaged_stream_push(group, rank);
}

/* ----------------------------------------------------------------------- outgoing */

static bool cell_free(struct hdl_group *group, struct group_p2p_peer *peer, uint32_t rank)
{
    if (peer->cells_written < peer->cells_free_to)
        return true;
    peer->cells_free_to =
        atomic_load_explicit(&their_intake(group, rank)->cells, memory_order_acquire) +
        GROUP_CELLS;
    return peer->cells_written < peer->cells_free_to;
}

static bool fragment_free(struct hdl_group *group, struct group_p2p_peer *peer,
                          uint32_t rank)
{
    if (peer->fragments_written < peer->fragments_free_to)
        return true;
    peer->fragments_free_to = atomic_load_explicit(&their_intake(group, rank)->fragments,
                                                   memory_order_acquire) +
                              GROUP_FRAGMENTS;
    return peer->fragments_written < peer->fragments_free_to;
}

/* A cell is there: fills and shows it. */
static void write_cell(struct hdl_group *group, struct group_p2p_peer *peer,
                       uint32_t rank, enum group_cell_type type, int32_t tag,
                       size_t bytes, const void *payload, size_t length)
{
    struct group_cell *cell = group_segment_cells(&group->shape, group->segment, rank) +
                              peer->cells_written % GROUP_CELLS;
    cell->tag = (uint32_t)tag;
    cell->type = (uint16_t)type;
    cell->fragment = (uint16_t)(peer->fragments_written - 1);
    cell->bytes = bytes;
    if (length)
        memcpy(cell->payload, payload, length);
    peer->cells_written++;
    atomic_store_explicit(&cell->position, peer->cells_written, memory_order_release);
    show(group, rank);
}

static void write_fragment(struct hdl_group *group, struct group_p2p_peer *peer,
                           uint32_t rank, const struct hdl_op *op, size_t bytes)
{
    char *to = group_segment_bulk(&group->shape, group->segment, rank) +
               peer->fragments_written % GROUP_FRAGMENTS * GROUP_FRAGMENT_BYTES;
    group_stage(&group->engine->stages, GROUP_STAGE_MESSAGE,
                op->bytes >= group->stream_bytes, to, (const char *)op->src + op->moved,
                bytes);
    peer->fragments_written++;
}

/* First cell of a message, if there is room; true if it went out. */
static bool announce(struct hdl_group *group, struct group_p2p_peer *peer,
                     struct hdl_op *op)
{
    uint32_t rank = (uint32_t)op->peer;
    if (!cell_free(group, peer, rank))
        return false;
    if (op->bytes <= GROUP_CELL_BYTES) {
        write_cell(group, peer, rank, GROUP_CELL_SMALL, op->tag, op->bytes, op->src,
                   op->bytes);
        group_p2p_finish(group, op, HDL_OK);
        return true;
    }
    if (op->bytes <= GROUP_FRAGMENT_BYTES) {
        if (!fragment_free(group, peer, rank))
            return false;
        write_fragment(group, peer, rank, op, op->bytes);
        write_cell(group, peer, rank, GROUP_CELL_MEDIUM, op->tag, op->bytes, NULL, 0);
        group_p2p_finish(group, op, HDL_OK);
        return true;
    }
    op->message = ++peer->messages;
    op->moved = 0;
    struct group_cell_note note = {.message = op->message};
    write_cell(group, peer, rank, GROUP_CELL_LARGE, op->tag, op->bytes, &note,
               sizeof(note));
    base_list_remove(&op->node);
    base_list_push_back(&peer->large, &op->node);
    return true;
}

static void mapped_send(struct hdl_group *group, struct hdl_op *op)
{
    struct group_p2p_peer *peer = peer_of(group, (uint32_t)op->peer);
    if (base_list_empty(&peer->queued) && announce(group, peer, op))
        return;
    base_list_push_back(&peer->queued, &op->node);
}

static struct hdl_op *find_message(struct base_list *head, uint64_t message)
{
    base_list_each(node, after, head)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        if (op->message == message)
            return op;
    }
    return NULL;
}

static void end_refused(struct hdl_group *group, struct hdl_op *op)
{
    op->detail = base_strdup(group->engine->env, "send: the receive has another length");
    group_p2p_finish(group, op, HDL_EINVAL);
}

/* Takes the next grant; sets peer->streaming. */
static bool take_grant(struct hdl_group *group, struct group_p2p_peer *peer,
                       uint32_t rank)
{
    struct group_intake *intake = their_intake(group, rank);
    if (atomic_load_explicit(&intake->granted, memory_order_acquire) == peer->grants_seen)
        return false;
    uint64_t grant = intake->grants[peer->grants_seen % GROUP_GRANTS];
    struct group_exposure target = intake->exposed[peer->grants_seen % GROUP_GRANTS];
    peer->grants_seen++;
    atomic_store_explicit(&my_intake(group, rank)->grants_taken, peer->grants_seen,
                          memory_order_release);
    show(group, rank);
    struct hdl_op *op = find_message(&peer->large, grant & ~GRANT_REFUSED);
    if (!op)
        return true;
    if (grant & GRANT_REFUSED)
        end_refused(group, op);
    else {
        peer->streaming = op;
        peer->target = target;
        peer->last_put = 0;
    }
    return true;
}

/* Straight into the receiver's memory; a cell says when all of it has arrived. */
static bool stream_direct(struct hdl_group *group, struct group_p2p_peer *peer,
                          uint32_t rank)
{
    struct hdl_op *op = peer->streaming;
    if (!group->peer[rank].remote)
        return false; /* lost: the view that says so is being adopted */
    bool moved = messaged_stream_put(group, rank, op);
    if (!peer->last_put || net_put_done(group->peer[rank].remote) < peer->last_put ||
        !cell_free(group, peer, rank))
        return moved;
    struct group_cell_note note = {.message = op->message};
    write_cell(group, peer, rank, GROUP_CELL_COMPLETE, op->tag, op->bytes, &note,
               sizeof(note));
    peer->streaming = NULL;
    group_p2p_finish(group, op, HDL_OK);
    return true;
}

static bool stream_fragment(struct hdl_group *group, struct group_p2p_peer *peer,
                            uint32_t rank)
{
    struct hdl_op *op = peer->streaming;
    if (peer->target.key || peer->target.window)
        return stream_direct(group, peer, rank);
    if (!cell_free(group, peer, rank) || !fragment_free(group, peer, rank))
        return false;
    size_t bytes = base_min_size(op->bytes - op->moved, GROUP_FRAGMENT_BYTES);
    write_fragment(group, peer, rank, op, bytes);
    struct group_cell_note note = {
        .message = op->message, .offset = op->moved, .bytes = bytes};
    write_cell(group, peer, rank, GROUP_CELL_FRAGMENT, op->tag, op->bytes, &note,
               sizeof(note));
    op->moved += bytes;
    if (op->moved == op->bytes) {
        peer->streaming = NULL;
        group_p2p_finish(group, op, HDL_OK);
    }
    return true;
}

static bool progress_out(struct hdl_group *group, struct group_p2p_peer *peer,
                         uint32_t rank)
{
    bool moved = false;
    for (struct base_list *node; (node = base_list_first(&peer->queued)); moved = true)
        if (!announce(group, peer, base_container_of(node, struct hdl_op, node)))
            break;
    if (!peer->streaming && !base_list_empty(&peer->large))
        moved |= take_grant(group, peer, rank);
    if (peer->streaming)
        moved |= stream_fragment(group, peer, rank);
    return moved;
}

/* ----------------------------------------------------------------------- incoming */

static void tell_cells(struct hdl_group *group, struct group_p2p_peer *peer,
                       uint32_t rank)
{
    peer->cells_told = peer->cells_read;
    atomic_store_explicit(&my_intake(group, rank)->cells, peer->cells_read,
                          memory_order_release);
}

static const char *next_fragment(const struct group_p2p_peer *peer)
{
    return peer->in.bulk + peer->fragments_read % GROUP_FRAGMENTS * GROUP_FRAGMENT_BYTES;
}

static void fragment_taken(struct hdl_group *group, struct group_p2p_peer *peer,
                           uint32_t rank)
{
    peer->fragments_read++;
    atomic_store_explicit(&my_intake(group, rank)->fragments, peer->fragments_read,
                          memory_order_release);
    show(group, rank);
}

/* Whole message in the cell or in one fragment. */
static bool take_message(struct hdl_group *group, struct group_p2p_peer *peer,
                         uint32_t rank, const struct group_cell *cell, bool medium)
{
    size_t bytes = cell->bytes;
    if (bytes > (medium ? (size_t)GROUP_FRAGMENT_BYTES : (size_t)GROUP_CELL_BYTES))
        bytes = 0; /* nobody writes that */
    const void *data = medium ? (const void *)next_fragment(peer) : cell->payload;
    int32_t tag = (int32_t)cell->tag;
    struct hdl_op *op = group_p2p_match(group, rank, tag);
    if (op)
        group_p2p_deliver(group, op, rank, tag, data, bytes);
    else if (!group_p2p_keep(group, rank, tag, bytes, data, false, 0))
        return false;
    if (medium)
        fragment_taken(group, peer, rank);
    return true;
}

static bool take_announcement(struct hdl_group *group, uint32_t rank,
                              const struct group_cell *cell)
{
    struct group_cell_note note;
    memcpy(&note, cell->payload, sizeof(note));
    int32_t tag = (int32_t)cell->tag;
    struct hdl_op *op = group_p2p_match(group, rank, tag);
    if (!op)
        return group_p2p_keep(group, rank, tag, cell->bytes, NULL, true, note.message);
    group_p2p_begin(group, op, rank, tag, cell->bytes, note.message);
    return true;
}

/* The receive may have ended meanwhile; the fragment is dropped then. */
static void take_fragment(struct hdl_group *group, struct group_p2p_peer *peer,
                          uint32_t rank, const struct group_cell *cell)
{
    struct group_cell_note note;
    memcpy(&note, cell->payload, sizeof(note));
    struct hdl_op *op = find_message(&peer->granted, note.message);
    bool sound = op && note.bytes <= GROUP_FRAGMENT_BYTES && note.offset == op->moved &&
                 note.bytes <= op->bytes - op->moved;
    if (sound) {
        base_copy((char *)op->dst + note.offset, next_fragment(peer), note.bytes,
                  op->stream);
        op->moved += note.bytes;
    }
    fragment_taken(group, peer, rank);
    if (sound && op->moved == op->bytes) {
        group_count(&group->counters.bytes_received, op->bytes);
        group_p2p_finish(group, op, HDL_OK);
    }
}

/* A large message has arrived as a whole, without fragments. */
static void take_complete(struct hdl_group *group, struct group_p2p_peer *peer,
                          const struct group_cell *cell)
{
    struct group_cell_note note;
    memcpy(&note, cell->payload, sizeof(note));
    struct hdl_op *op = find_message(&peer->granted, note.message);
    if (!op || !op->transport)
        return;
    group_count(&group->counters.bytes_received, op->bytes);
    group_p2p_finish(group, op, HDL_OK);
}

static bool take_cell(struct hdl_group *group, struct group_p2p_peer *peer, uint32_t rank)
{
    const struct group_cell *cell = peer->in.cells + peer->cells_read % GROUP_CELLS;
    if (atomic_load_explicit(&cell->position, memory_order_acquire) !=
        peer->cells_read + 1)
        return false;
    bool taken = true;
    if (cell->type == GROUP_CELL_SMALL || cell->type == GROUP_CELL_MEDIUM)
        taken = take_message(group, peer, rank, cell, cell->type == GROUP_CELL_MEDIUM);
    else if (cell->type == GROUP_CELL_LARGE)
        taken = take_announcement(group, rank, cell);
    else if (cell->type == GROUP_CELL_COMPLETE)
        take_complete(group, peer, cell);
    else
        take_fragment(group, peer, rank, cell);
    if (!taken)
        return false;
    peer->cells_read++;
    if (peer->cells_read - peer->cells_told >= CELLS_BATCH) {
        tell_cells(group, peer, rank);
        show(group, rank);
    }
    return true;
}

/* Writes grants while there is room for them. */
static void write_grants(struct hdl_group *group, struct group_p2p_peer *peer,
                         uint32_t rank)
{
    struct group_intake *intake = my_intake(group, rank);
    uint64_t taken = atomic_load_explicit(&their_intake(group, rank)->grants_taken,
                                          memory_order_acquire);
    uint32_t n = 0;
    while (n < peer->backlog_count && peer->grants_written - taken < GROUP_GRANTS) {
        uint32_t index = peer->grants_written % GROUP_GRANTS;
        intake->grants[index] = peer->backlog[n];
        intake->exposed[index] =
            messaged_stream_exposed(find_message(&peer->granted, peer->backlog[n++]));
        peer->grants_written++;
    }
    if (n == 0)
        return;
    peer->backlog_count -= n;
    memmove(peer->backlog, peer->backlog + n,
            peer->backlog_count * sizeof(*peer->backlog));
    atomic_store_explicit(&intake->granted, peer->grants_written, memory_order_release);
    show(group, rank);
}

static bool mapped_progress(struct hdl_group *group, uint32_t rank)
{
    struct group_p2p_peer *peer = peer_of(group, rank);
    if (peer->backlog_count)
        write_grants(group, peer, rank);
    bool moved = take_cell(group, peer, rank);
    if (peer->sends)
        moved |= progress_out(group, peer, rank);
    return moved;
}

static bool messaged_progress(struct hdl_group *group, uint32_t rank)
{
    bool moved = messaged_stream_push(group, rank);
    return mapped_progress(group, rank) || moved;
}

static void mapped_accept(struct hdl_group *group, uint32_t rank, uint64_t message,
                          struct hdl_op *op, bool refuse)
{
    struct group_p2p_peer *peer = peer_of(group, rank);
    (void)op;
    if (peer->backlog_count == peer->backlog_room) {
        uint32_t room = peer->backlog_room ? 2 * peer->backlog_room : GROUP_GRANTS;
        uint64_t *larger = base_grow(group->engine->env, peer->backlog,
                                     peer->backlog_room, room, sizeof(*larger));
        if (!larger) {
            group_end(group, HDL_ENOMEM, "no memory to grant a message");
            return;
        }
        peer->backlog = larger;
        peer->backlog_room = room;
    }
    peer->backlog[peer->backlog_count++] = message | (refuse ? GRANT_REFUSED : 0);
    write_grants(group, peer, rank);
}

const struct group_stream group_stream_mapped = {
    .name = "mapped",
    .send = mapped_send,
    .progress = mapped_progress,
    .accept = mapped_accept,
};

static void messaged_accept(struct hdl_group *group, uint32_t rank, uint64_t message,
                            struct hdl_op *op, bool refuse)
{
    if (!refuse)
        messaged_stream_expose(group, op);
    mapped_accept(group, rank, message, op, refuse);
}

/* The same words; the sender puts them into the receiver's mirror (messaged_stream.c). */
const struct group_stream group_stream_messaged = {
    .name = "messaged",
    .send = mapped_send,
    .progress = messaged_progress,
    .accept = messaged_accept,
    .release = messaged_stream_release,
    .lost = messaged_stream_lost,
};
