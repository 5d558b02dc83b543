/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of arriving fabric messages. Pure; fuzzed. */
#include "net/fabric_wire.h"

#include <string.h>

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
        return left == 0 && view->head.seq > 1;
    case NET_WIRE_PROBE:
        return left == 0; /* of the first message, too */
    case NET_WIRE_HELLO: {
        if (left != sizeof(struct net_wire_hello))
            return false;
        view->hello = (const struct net_wire_hello *)(const void *)body;
        return view->hello->address_length <= NET_MAX_ADDRESS &&
               (view->head.seq == 1 || (view->head.flags & NET_WIRE_RESTART));
    }
    case NET_WIRE_TAKEN:
        if (left != sizeof(view->taken) || view->head.seq <= 1)
            return false;
        memcpy(&view->taken, body, sizeof(view->taken));
        return true;
    case NET_WIRE_OFFER:
        if (left != sizeof(view->put) + sizeof(view->offer) || view->head.seq <= 1)
            return false;
        memcpy(&view->put, body, sizeof(view->put));
        memcpy(&view->offer, body + sizeof(view->put), sizeof(view->offer));
        return view->put.bytes > 0 && view->put.bytes <= NET_PIECE_BYTES &&
               view->put.bytes2 == 0;
    case NET_WIRE_PUT:
        if (left < sizeof(view->put))
            return false;
        memcpy(&view->put, body, sizeof(view->put));
        view->payload = body + sizeof(view->put);
        return (uint64_t)view->put.bytes + view->put.bytes2 == left - sizeof(view->put) &&
               view->head.seq > 1;
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
