/* SPDX-License-Identifier: Apache-2.0 */
/* What arrives over fabric: checked, put in order, then carried out. */
#include "net/fabric_impl.h"

#include "base/log.h"

#include <string.h>

void fabric_receive_post(struct net_fabric *fabric, struct fabric_receive *receive)
{
    void *desc = fabric->receive_mr ? fi_mr_desc(fabric->receive_mr) : NULL;
    ssize_t error =
        fi_recv(fabric->endpoint, receive->bytes, NET_WIRE_HEADS + fabric->eager, desc,
                FI_ADDR_UNSPEC, &receive->op.context);
    if (error)
        base_log_warn(fabric->env, "fabric receive not posted: %s",
                      fabric_error(fabric, error));
}

static void refuse(struct net_fabric *fabric, const char *why)
{
    if (fabric->counters.refused++ == 0)
        base_log_warn(fabric->env, "fabric message refused: %s", why);
}

static struct hdl_window *find_window(struct net_fabric *fabric, uint64_t id)
{
    struct base_list *bucket = &fabric->windows[id % FABRIC_BUCKETS];
    base_list_each(node, after, bucket)
    {
        struct hdl_window *window =
            base_container_of(node, struct hdl_window, fabric_node);
        if (window->id == id)
            return window;
    }
    return NULL;
}

/* Of a process that was replaced nothing is taken any more, however late it comes. */
static bool writer_is_admitted(const struct hdl_window *window,
                               const struct net_wire_put *put)
{
    return !window->writers ||
           (put->slot < window->num_writers &&
            atomic_load_explicit(&window->writers[put->slot], memory_order_relaxed) ==
                put->writer);
}

void fabric_carry_out(struct net_fabric *fabric, const struct net_wire_put *put,
                      const uint8_t *payload)
{
    struct hdl_window *window = find_window(fabric, put->window_id);
    /* A window that was destroyed a moment ago is no attack. */
    if (!window)
        return;
    if (window->key != put->key || !net_wire_put_fits(put, window->bytes)) {
        refuse(fabric, "put with a wrong key or outside its window");
        return;
    }
    if (!writer_is_admitted(window, put)) {
        fabric->counters.stale++;
        return;
    }
    fabric->arrived++;
    if (put->bytes)
        memcpy(window->data + put->offset, payload, put->bytes);
    if (put->bytes2)
        memcpy(window->data + put->offset2, payload + put->bytes, put->bytes2);
    if (put->signal_offset != UINT64_MAX)
        net_raise(window->data, put->signal_offset, put->value,
                  (enum hdl_signal_op)put->op);
}

static struct fabric_link *link_of(struct net_fabric *fabric,
                                   const struct net_wire_view *view)
{
    struct fabric_link *link = fabric_link_find(fabric, view->head.source);
    if (link || view->head.kind != NET_WIRE_HELLO)
        return link;
    if (fabric_link_open(fabric, view->head.source, view->hello->secret,
                         view->hello->address, view->hello->address_length,
                         &link) != HDL_OK) {
        refuse(fabric, base_detail());
        return NULL;
    }
    return link;
}

/* The offer of a message, if it has one. False: no memory for its payload. */
static bool take_offer(struct net_fabric *fabric, struct fabric_link *link,
                       const struct net_wire_part *part)
{
    if (part->offered && link->num_arrivals < 2 * FABRIC_OFFERS)
        return fabric_arrival_add(fabric, link, part);
    if (part->offered)
        refuse(fabric, "more offers than anybody makes");
    return true;
}

static void take_puts(struct net_fabric *fabric, const struct net_wire_view *view)
{
    const uint8_t *at = view->parts;
    size_t left = view->parts_bytes;
    struct net_wire_part part;
    while (net_wire_next(&at, &left, &part)) {
        if (!part.offered)
            fabric_carry_out(fabric, &part.put, part.payload);
    }
}

static void handle_message(struct net_fabric *fabric, const uint8_t *bytes, size_t length)
{
    struct net_wire_view view;
    if (!net_wire_parse(bytes, length, fabric->secret, &view)) {
        refuse(fabric, "not a message of this job");
        return;
    }
    /* No link: the HELLO was lost and will be sent again, with all that followed. */
    struct fabric_link *link = link_of(fabric, &view);
    if (!link)
        return;
    fabric_link_alive(fabric, link);
    fabric_link_acknowledged(fabric, link, view.head.ack,
                             view.head.flags & NET_WIRE_RESEND);
    fabric_offers_taken(fabric, link, view.head.taken);
    if (view.head.kind == NET_WIRE_ACK)
        return;
    fabric_link_set_busy(fabric, link);
    if (view.head.kind == NET_WIRE_HELLO && (view.head.flags & NET_WIRE_RESTART) &&
        (int32_t)(view.head.seq - link->expected) > 0)
        link->expected = view.head.seq;
    if (view.head.seq != link->expected) {
        link->gap_seen = (int32_t)(view.head.seq - link->expected) > 0;
        link->ack_owed = FABRIC_ACK_EVERY;
        return;
    }
    if (view.head.kind == NET_WIRE_PROBE) {
        link->ack_owed = FABRIC_ACK_EVERY;
        return;
    }
    /* Without memory for its payload it has not come. */
    if (view.head.kind == NET_WIRE_PUT && !take_offer(fabric, link, &view.offered))
        return;
    link->expected++;
    link->ack_owed += length > NET_WIRE_MAX ? FABRIC_ACK_EVERY / FABRIC_TELL_LARGE : 1;
    if (view.head.kind == NET_WIRE_PUT)
        take_puts(fabric, &view);
    else
        link->ack_owed = FABRIC_ACK_EVERY;
}

void fabric_receive_done(struct net_fabric *fabric, struct fabric_receive *receive,
                         size_t length)
{
    handle_message(fabric, receive->bytes, length);
    fabric_receive_post(fabric, receive);
}
