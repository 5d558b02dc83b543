/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of arriving fabric messages. Pure; fuzzed. */
#include "net/fabric_wire.h"

#include <string.h>

bool net_wire_next(const uint8_t **at, size_t *left, struct net_wire_part *part)
{
    struct net_wire_put *put = &part->put;
    if (*left < sizeof(*put))
        return false;
    memcpy(put, *at, sizeof(*put));
    part->payload = *at + sizeof(*put);
    part->offered = put->op & NET_WIRE_OFFERED;
    put->op &= ~NET_WIRE_OFFERED;
    uint64_t bytes =
        part->offered ? sizeof(part->offer) : (uint64_t)put->bytes + put->bytes2;
    if (bytes > *left - sizeof(*put))
        return false;
    if (part->offered) {
        if (put->bytes == 0 || put->bytes > NET_PIECE_BYTES || put->bytes2 != 0)
            return false;
        memcpy(&part->offer, part->payload, sizeof(part->offer));
    }
    *at += sizeof(*put) + bytes;
    *left -= sizeof(*put) + bytes;
    return true;
}

static bool parts_are_whole(struct net_wire_view *view)
{
    const uint8_t *at = view->parts;
    size_t left = view->parts_bytes;
    struct net_wire_part part;
    view->offered.offered = false;
    do {
        if (!net_wire_next(&at, &left, &part) || (part.offered && view->offered.offered))
            return false;
        if (part.offered)
            view->offered = part;
    } while (left > 0);
    return true;
}

bool net_wire_parse(const void *data, size_t length, uint64_t secret,
                    struct net_wire_view *view)
{
    const uint8_t *bytes = data;
    if (length < sizeof(view->head))
        return false;
    memcpy(&view->head, bytes, sizeof(view->head));
    if (view->head.magic != NET_WIRE_MAGIC || view->head.secret != secret)
        return false;
    const uint8_t *body = bytes + sizeof(view->head);
    size_t left = length - sizeof(view->head);
    switch (view->head.kind) {
    case NET_WIRE_ACK:
        return left == 0 && view->head.seq == 0;
    case NET_WIRE_PING:
        return left == 0 && view->head.seq != 1;
    case NET_WIRE_PROBE:
        return left == 0; /* of the first message, too */
    case NET_WIRE_HELLO: {
        if (left != sizeof(struct net_wire_hello))
            return false;
        view->hello = (const struct net_wire_hello *)(const void *)body;
        return view->hello->address_length <= NET_MAX_ADDRESS &&
               (view->head.seq == 1 || (view->head.flags & NET_WIRE_RESTART));
    }
    case NET_WIRE_PUT:
        view->parts = body;
        view->parts_bytes = left;
        return parts_are_whole(view) && view->head.seq != 1;
    default:
        return false;
    }
}

bool net_wire_put_fits(const struct net_wire_put *put, size_t bytes)
{
    if (put->offset > bytes || put->bytes > bytes - put->offset)
        return false;
    if (put->offset2 > bytes || put->bytes2 > bytes - put->offset2)
        return false;
    if (put->op != HDL_SIGNAL_SET && put->op != HDL_SIGNAL_ADD)
        return false;
    if (put->signal_offset == UINT64_MAX)
        return true;
    return put->signal_offset % 8 == 0 && bytes >= 8 && put->signal_offset <= bytes - 8;
}
