/* SPDX-License-Identifier: Apache-2.0 */
/* Large payloads: offered by their sender, read by their receiver, a piece at a time. */
#include "net/fabric_impl.h"

#include <string.h>

/*
 *     sender                                        receiver
 *     source --copy--> piece
 *       OFFER {where it goes, where the piece lies, its stamp} -->
 *                      piece <------- read ------- piece
 *                                                  stamp right? writer admitted?
 *                                                  --copy--> window, then the signal
 *              <-- taken {number} in the head of the next message
 *
 * Neither side lets the provider near memory that anybody else uses. A write by the
 * sender would go straight to its place, and so could one of a process that was stopped,
 * replaced and woken again; and a source that the provider holds cannot be taken back.
 *
 * Offers of a link are carried out in their order, whatever order their reads end in.
 */

/* ------------------------------------------------------------------------- offering */

bool fabric_offer_room(const struct net_fabric *fabric, const struct fabric_link *link,
                       size_t bytes, uint32_t before)
{
    if (!fabric->reads)
        return fabric_link_room(link, before + (uint32_t)(bytes / NET_EAGER_BYTES) + 1);
    return link->num_offers < FABRIC_OFFERS && fabric_link_room(link, before + 1);
}

static void write_finish(struct net_fabric *fabric, struct fabric_write *write)
{
    struct net_fabric_remote *remote = write->remote;
    base_list_remove(&write->node);
    base_list_remove(&write->remote_node);
    base_list_push_front(&fabric->free_writes, &write->node);
    struct base_list *first = base_list_first(&remote->writes);
    uint64_t done = atomic_load_explicit(&remote->owner->puts, memory_order_relaxed);
    if (first)
        done = base_container_of(first, struct fabric_write, remote_node)->ticket - 1;
    atomic_store_explicit(&remote->done, done, memory_order_release);
}

/* Copies the next piece and tells the peer where it is. */
static bool offer_piece(struct net_fabric *fabric, struct fabric_link *link,
                        struct fabric_write *write)
{
    struct fabric_piece *piece = fabric_piece_get(fabric);
    if (!piece)
        return false;
    struct net_wire_put put = write->put;
    uint8_t *part =
        fabric_link_add(fabric, link, sizeof(put) + sizeof(piece->offer), true);
    if (!part) {
        fabric_piece_put(fabric, piece);
        return false;
    }
    size_t left = write->bytes - write->offered;
    piece->length = left < NET_PIECE_BYTES ? left : NET_PIECE_BYTES;
    piece->offer.stamp = ++fabric->stamp;
    piece->offer.number = ++link->last_offer;
    piece->offer.lazy = write->lazy;
    piece->offer.mr_key = fi_mr_key(piece->mr);
    memcpy(piece->bytes, write->src + write->offered, piece->length);
    memcpy(piece->bytes + piece->length, &piece->offer.stamp, sizeof(piece->offer.stamp));
    put.offset += write->offered;
    put.bytes = (uint32_t)piece->length;
    if (piece->length < left)
        put.signal_offset = UINT64_MAX;
    put.op |= NET_WIRE_OFFERED;
    memcpy(part, &put, sizeof(put));
    memcpy(part + sizeof(put), &piece->offer, sizeof(piece->offer));
    fabric_link_go(fabric, link);
    piece->write = write;
    write->offered += piece->length;
    fabric->counters.bytes += piece->length;
    base_list_push_back(&link->offers, &piece->node);
    link->num_offers++;
    return true;
}

/* Without reads: a message for each few KiB, which nothing overtakes. */
static bool send_part(struct net_fabric *fabric, struct fabric_link *link,
                      struct fabric_write *write)
{
    struct net_wire_put put = write->put;
    size_t left = write->bytes - write->offered;
    put.offset += write->offered;
    put.bytes = left < NET_EAGER_BYTES ? (uint32_t)left : NET_EAGER_BYTES;
    if (put.bytes < left)
        put.signal_offset = UINT64_MAX;
    uint8_t *part = fabric_link_add(fabric, link, sizeof(put) + put.bytes, false);
    if (!part)
        return false;
    memcpy(part, &put, sizeof(put));
    memcpy(part + sizeof(put), write->src + write->offered, put.bytes);
    fabric_link_go(fabric, link);
    fabric->counters.bytes += put.bytes;
    write->offered += put.bytes;
    return true;
}

static bool offer_all(struct net_fabric *fabric, struct fabric_link *link,
                      struct fabric_write *write)
{
    while (write->offered < write->bytes) {
        if (!fabric_offer_room(fabric, link, 0, 0))
            return false;
        if (!(fabric->reads ? offer_piece : send_part)(fabric, link, write))
            return false;
    }
    if (!fabric->reads)
        write_finish(fabric, write);
    return true;
}

void fabric_offer_writes(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_each(node, after, &link->writes)
    {
        struct fabric_write *write = base_container_of(node, struct fabric_write, node);
        if (!offer_all(fabric, link, write))
            return;
    }
}

static void offer_end(struct net_fabric *fabric, struct fabric_link *link,
                      struct fabric_piece *piece)
{
    struct fabric_write *write = piece->write;
    link->num_offers--;
    if (write) {
        write->taken += piece->length;
        if (write->taken == write->bytes)
            write_finish(fabric, write);
    }
    fabric_piece_put(fabric, piece);
}

void fabric_offers_taken(struct net_fabric *fabric, struct fabric_link *link,
                         uint16_t taken)
{
    base_list_each(node, after, &link->offers)
    {
        struct fabric_piece *piece = base_container_of(node, struct fabric_piece, node);
        if ((int16_t)(taken - (uint16_t)piece->offer.number) < 0)
            break;
        offer_end(fabric, link, piece);
    }
}

void fabric_offers_drop(struct net_fabric *fabric, struct net_fabric_remote *remote)
{
    base_list_each(node, after, &remote->link->offers)
    {
        struct fabric_piece *piece = base_container_of(node, struct fabric_piece, node);
        if (piece->write && piece->write->remote == remote)
            piece->write = NULL;
    }
    base_list_each(node, after, &remote->writes)
        write_finish(fabric, base_container_of(node, struct fabric_write, remote_node));
}

/* ------------------------------------------------------------------------- arriving */

static void arrival_begin(struct fabric_link *link, struct fabric_piece *piece,
                          const struct net_wire_put *put,
                          const struct net_wire_offer *wanted)
{
    piece->link = link;
    piece->put = *put;
    piece->wanted = *wanted;
    piece->state = FABRIC_PIECE_WAITING;
    link->num_arrivals++;
}

bool fabric_arrival_add(struct net_fabric *fabric, struct fabric_link *link,
                        const struct net_wire_part *offered)
{
    struct fabric_piece *piece = fabric_piece_get(fabric);
    if (!piece)
        return false;
    arrival_begin(link, piece, &offered->put, &offered->offer);
    base_list_push_back(&link->arrivals, &piece->node);
    return true;
}

/* False: not now. */
static bool read_post(struct net_fabric *fabric, struct fabric_piece *piece)
{
    void *desc = fi_mr_desc(piece->mr);
    ssize_t error = fi_read(fabric->endpoint, piece->bytes,
                            piece->put.bytes + sizeof(piece->wanted.stamp), desc,
                            piece->link->fi_addr, piece->wanted.address,
                            piece->wanted.mr_key, &piece->op.context);
    if (error == 0)
        piece->state = FABRIC_PIECE_POSTED;
    else if (error != -FI_EAGAIN)
        fabric_link_fail(fabric, piece->link, "read", error);
    return error == 0;
}

void fabric_arrivals_attend(struct net_fabric *fabric, struct fabric_link *link,
                            uint32_t most)
{
    base_list_each(node, after, &link->arrivals)
    {
        struct fabric_piece *piece = base_container_of(node, struct fabric_piece, node);
        if (piece->state != FABRIC_PIECE_WAITING)
            continue;
        if (most-- == 0 || !read_post(fabric, piece))
            break;
    }
}

static void arrival_end(struct net_fabric *fabric, struct fabric_piece *piece)
{
    struct fabric_link *link = piece->link;
    uint64_t stamp;
    memcpy(&stamp, piece->bytes + piece->put.bytes, sizeof(stamp));
    if (stamp == piece->wanted.stamp)
        fabric_carry_out(fabric, &piece->put, piece->bytes);
    link->taken = piece->wanted.number;
    uint32_t owed = FABRIC_ACK_EVERY;
    link->ack_owed += piece->wanted.lazy ? owed / FABRIC_TELL_LAZY : owed;
    link->num_arrivals--;
    fabric_piece_put(fabric, piece);
}

void fabric_read_done(struct net_fabric *fabric, struct fabric_piece *piece, int error)
{
    struct fabric_link *link = piece->link;
    if (!link) {
        fabric_piece_put(fabric, piece);
        return;
    }
    piece->state = error ? FABRIC_PIECE_WAITING : FABRIC_PIECE_READ;
    if (error) {
        fabric_link_fail(fabric, link, "read", -error);
        return;
    }
    fabric_link_alive(fabric, link);
    for (struct base_list *node; (node = base_list_first(&link->arrivals));) {
        piece = base_container_of(node, struct fabric_piece, node);
        if (piece->state != FABRIC_PIECE_READ)
            break;
        arrival_end(fabric, piece);
    }
}

/* The provider may hold it still: then it is given back with its read. */
static void arrival_forget(struct net_fabric *fabric, struct fabric_piece *piece)
{
    piece->link->num_arrivals--;
    piece->link = NULL;
    if (piece->state == FABRIC_PIECE_POSTED)
        base_list_remove(&piece->node);
    else
        fabric_piece_put(fabric, piece);
}

void fabric_arrivals_again(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_each(node, after, &link->arrivals)
    {
        struct fabric_piece *held = base_container_of(node, struct fabric_piece, node);
        if (held->state != FABRIC_PIECE_POSTED)
            continue;
        struct fabric_piece *piece = fabric_piece_get(fabric);
        if (!piece)
            return;
        arrival_begin(link, piece, &held->put, &held->wanted);
        base_list_insert_after(&held->node, &piece->node);
        arrival_forget(fabric, held);
    }
}

void fabric_pieces_give_up(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_each(node, after, &link->offers)
        offer_end(fabric, link, base_container_of(node, struct fabric_piece, node));
    base_list_each(next, following, &link->arrivals)
        arrival_forget(fabric, base_container_of(next, struct fabric_piece, node));
}
