/* SPDX-License-Identifier: Apache-2.0 */
/* Messages to a peer on another host: cells, fragments and counters put into its mirror.
 */
#include "group/messaged.h"

#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "group/p2p.h"
#include "net/net.h"

/*
 * stream_mapped.c writes into the own segment, as for a mapped peer; here the same bytes
 * go to the same places of the peer's mirror of this rank:
 *
 *     cell with payload or announcement   one small message, raises the cell's position
 *     cell with a fragment                the same, or its words, then the fragment
 *     counters of what was taken          the words; grants, which raise `granted`
 */

void messaged_stream_incoming(struct hdl_group *group, uint32_t peer,
                              struct group_stream_ends *ends)
{
    const struct messaged_shape *shape = &messaged_of(group)->shape;
    char *mirror = (char *)group->segment + group->shape.messaged + peer * shape->bytes;
    ends->intake = (struct group_intake *)(void *)(mirror + shape->intake);
    ends->cells = (struct group_cell *)(void *)(mirror + shape->cells);
    ends->bulk = mirror + shape->bulk;
}

static size_t fragment_bytes(const struct group_cell *cell)
{
    if (cell->type == GROUP_CELL_MEDIUM)
        return cell->bytes;
    if (cell->type != GROUP_CELL_FRAGMENT)
        return 0;
    struct group_cell_note note;
    memcpy(&note, cell->payload, sizeof(note));
    return note.bytes;
}

static enum hdl_status push_cell(struct hdl_group *group, uint32_t rank,
                                 uint64_t position)
{
    const struct messaged_shape *shape = &messaged_of(group)->shape;
    struct hdl_peer_window *remote = group->peer[rank].remote;
    size_t index = (position - 1) % GROUP_CELLS;
    const struct group_cell *cell =
        group_segment_cells(&group->shape, group->segment, rank) + index;
    size_t fragment = fragment_bytes(cell);
    size_t at = messaged_mirror_offset(group) + shape->cells + index * sizeof(*cell);
    size_t raise = at + offsetof(struct group_cell, position);
    size_t begin = offsetof(struct group_cell, tag);
    size_t in_bulk = cell->fragment % GROUP_FRAGMENTS * (size_t)GROUP_FRAGMENT_BYTES;
    const struct net_block blocks[2] = {
        {.offset = at + begin,
         .src = (const char *)cell + begin,
         .bytes = sizeof(*cell) - begin},
        {.offset = messaged_mirror_offset(group) + shape->bulk + in_bulk,
         .src = group_segment_bulk(&group->shape, group->segment, rank) + in_bulk,
         .bytes = fragment}};
    return net_put_two(remote, blocks, raise, position, HDL_SIGNAL_SET);
}

/* Counters of what this rank has taken from the peer. */
static enum hdl_status push_counters(struct hdl_group *group, uint32_t rank,
                                     struct group_p2p_peer *peer,
                                     const struct group_intake *intake)
{
    uint64_t words[3] = {
        atomic_load_explicit(&intake->cells, memory_order_relaxed),
        atomic_load_explicit(&intake->fragments, memory_order_relaxed),
        atomic_load_explicit(&intake->grants_taken, memory_order_relaxed)};
    static_assert(offsetof(struct group_intake, grants_taken) == 2 * sizeof(uint64_t),
                  "three words in a row");
    if (words[0] == peer->told_cells && words[1] == peer->told_fragments &&
        words[2] == peer->told_taken)
        return HDL_OK;
    enum hdl_status status =
        net_put(group->peer[rank].remote,
                messaged_mirror_offset(group) + messaged_of(group)->shape.intake, words,
                sizeof(words), NET_NO_SIGNAL, 0, HDL_SIGNAL_SET);
    if (status == HDL_OK) {
        peer->told_cells = words[0];
        peer->told_fragments = words[1];
        peer->told_taken = words[2];
    }
    return status;
}

static enum hdl_status push_grants(struct hdl_group *group, uint32_t rank,
                                   struct group_p2p_peer *peer,
                                   const struct group_intake *intake)
{
    static_assert(offsetof(struct group_intake, exposed) ==
                      offsetof(struct group_intake, grants) + sizeof(intake->grants),
                  "one put for both");
    uint64_t granted = atomic_load_explicit(&intake->granted, memory_order_relaxed);
    if (granted == peer->told_granted)
        return HDL_OK;
    size_t at = messaged_mirror_offset(group) + messaged_of(group)->shape.intake;
    enum hdl_status status =
        net_put(group->peer[rank].remote, at + offsetof(struct group_intake, grants),
                intake->grants, sizeof(intake->grants) + sizeof(intake->exposed),
                at + offsetof(struct group_intake, granted), granted, HDL_SIGNAL_SET);
    if (status == HDL_OK)
        peer->told_granted = granted;
    return status;
}

bool messaged_stream_push(struct hdl_group *group, uint32_t rank)
{
    struct group_p2p_peer *peer = &group->p2p->peer[rank];
    const struct group_intake *intake =
        group_segment_intake(&group->shape, group->segment, rank);
    if (!group->peer[rank].remote || peer->lost)
        return false;
    uint64_t before = peer->cells_pushed + peer->told_cells + peer->told_fragments +
                      peer->told_taken + peer->told_granted;
    enum hdl_status status = push_counters(group, rank, peer, intake);
    if (status == HDL_OK)
        status = push_grants(group, rank, peer, intake);
    while (status == HDL_OK && peer->cells_pushed < peer->cells_written) {
        status = push_cell(group, rank, peer->cells_pushed + 1);
        if (status == HDL_OK)
            peer->cells_pushed++;
    }
    base_list_remove(&peer->unpushed);
    /* A lost peer is the control plane's matter; its operations end with the view. */
    if (status == HDL_PENDING || status == HDL_EPEER)
        base_list_push_back(&group->p2p->unpushed, &peer->unpushed);
    else if (status != HDL_OK)
        group_end(group, status, base_detail());
    return before != peer->cells_pushed + peer->told_cells + peer->told_fragments +
                         peer->told_taken + peer->told_granted;
}

void messaged_stream_lost(struct hdl_group *group, uint32_t rank)
{
    base_list_remove(&group->p2p->peer[rank].unpushed);
}

/* ------------------------------------------------------------- without copies between */

struct exposure {
    struct net_exposed memory;
    struct hdl_window *registration;
};

void messaged_stream_expose(struct hdl_group *group, struct hdl_op *op)
{
    struct exposure *exposure = base_alloc(group->engine->env, 1, sizeof(*exposure));
    if (!exposure)
        return; /* then it comes in fragments */
    if (net_expose(group->engine->net, op->dst, op->bytes, &exposure->memory,
                   &exposure->registration) != HDL_OK) {
        base_free(group->engine->env, exposure);
        return;
    }
    op->transport = exposure;
}

struct group_exposure messaged_stream_exposed(const struct hdl_op *op)
{
    const struct exposure *exposure = op ? op->transport : NULL;
    if (!exposure)
        return (struct group_exposure){0};
    return (struct group_exposure){.key = exposure->memory.key,
                                   .window = exposure->memory.window};
}

void messaged_stream_release(struct hdl_group *group, struct hdl_op *op)
{
    struct exposure *exposure = op->transport;
    net_unexpose(group->engine->net, exposure->registration);
    base_free(group->engine->env, exposure);
    op->transport = NULL;
}

bool messaged_stream_put(struct hdl_group *group, uint32_t rank, struct hdl_op *op)
{
    struct group_p2p_peer *peer = &group->p2p->peer[rank];
    struct hdl_peer_window *remote = group->peer[rank].remote;
    const struct net_exposed target = {
        .key = peer->target.key, .window = peer->target.window, .bytes = op->bytes};
    bool moved = false;
    while (op->moved < op->bytes) {
        size_t bytes = base_min_size(op->bytes - op->moved, NET_PIECE_BYTES);
        enum hdl_status status = net_put_exposed(
            remote, &target, op->moved, (const char *)op->src + op->moved, bytes);
        if (status != HDL_OK) {
            if (status != HDL_PENDING && status != HDL_EPEER)
                group_end(group, status, base_detail());
            break;
        }
        op->moved += bytes;
        moved = true;
    }
    if (op->moved == op->bytes && !peer->last_put)
        peer->last_put = net_put_count(remote);
    return moved;
}
