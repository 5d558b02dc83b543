/* SPDX-License-Identifier: Apache-2.0 */
/* Links: numbering, acknowledging and resending what goes to one peer context. */
#include "net/fabric_impl.h"

#include "base/log.h"

#include <string.h>

static const int64_t first_backoff_ns = BASE_NS_PER_MS;
static const int64_t last_backoff_ns = 200 * BASE_NS_PER_MS;
/* Without any error from the provider: a message that vanished with its connection. */
static const int64_t first_resend_ns = 200 * BASE_NS_PER_MS;
static const int64_t last_resend_ns = 2 * BASE_NS_PER_S;
static const int64_t ack_delay_ns = 100 * BASE_NS_PER_US;

/* ------------------------------------------------------------------ making, finding */

struct fabric_link *fabric_link_find(struct net_fabric *fabric, uint64_t net_id)
{
    base_list_each(node, after, &fabric->links)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, node);
        if (link->net_id == net_id) {
            /* The one that talks most is found first. */
            if (fabric->links.next != node) {
                base_list_remove(node);
                base_list_push_front(&fabric->links, node);
            }
            return link;
        }
    }
    return NULL;
}

enum hdl_status fabric_link_open(struct net_fabric *fabric, uint64_t net_id,
                                 uint64_t secret, const uint8_t *address,
                                 uint32_t address_length, struct fabric_link **out)
{
    if (address_length != fabric->address_length)
        return base_fail(HDL_EINVAL, "fabric address of %u bytes, %s has %u",
                         address_length, fabric->provider, fabric->address_length);
    struct fabric_link *link = base_alloc(fabric->env, 1, sizeof(*link));
    if (!link)
        return HDL_ENOMEM;
    link->net_id = net_id;
    link->secret = secret;
    memcpy(link->address, address, address_length);
    link->address_length = address_length;
    int inserted = fi_av_insert(fabric->av, link->address, 1, &link->fi_addr, 0, NULL);
    if (inserted != 1) {
        base_free(fabric->env, link);
        return base_fail(HDL_EPEER, "fabric refuses a peer's address");
    }
    link->base = link->post = link->tail = 1;
    link->expected = 1;
    link->resend_after = first_resend_ns;
    base_list_init(&link->writes);
    base_list_init(&link->busy);
    base_list_push_back(&fabric->links, &link->node);
    *out = link;
    return HDL_OK;
}

void fabric_link_free(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_remove(&link->node);
    base_list_remove(&link->busy);
    base_free(fabric->env, link);
}

static void link_set_busy(struct net_fabric *fabric, struct fabric_link *link)
{
    if (base_list_empty(&link->busy))
        base_list_push_back(&fabric->busy, &link->busy);
}

/* ---------------------------------------------------------------------- up and down */

static void link_show_down(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_each(node, after, &fabric->remotes)
    {
        struct net_fabric_remote *remote =
            base_container_of(node, struct net_fabric_remote, node);
        if (remote->link == link)
            atomic_store_explicit(&remote->down_since, link->down_since,
                                  memory_order_relaxed);
    }
}

void fabric_link_fail(struct net_fabric *fabric, struct fabric_link *link,
                      const char *what, ssize_t error)
{
    link_set_busy(fabric, link);
    if (link->down_since)
        return;
    int64_t now = base_now_ns();
    link->down_since = now;
    link->backoff = first_backoff_ns;
    link->retry_at = now + link->backoff;
    link_show_down(fabric, link);
    base_log_info(fabric->env, "link down context %016llx %s error %s",
                  (unsigned long long)link->net_id, what, fabric_error(fabric, error));
}

void fabric_link_alive(struct net_fabric *fabric, struct fabric_link *link)
{
    link->resend_after = first_resend_ns;
    if (!link->down_since || fabric->held)
        return;
    base_log_info(fabric->env, "link up context %016llx after_us %lld",
                  (unsigned long long)link->net_id,
                  (long long)((base_now_ns() - link->down_since) / BASE_NS_PER_US));
    link->down_since = 0;
    link->post = link->base;
    fabric->counters.reconnects++;
    link_show_down(fabric, link);
    link_set_busy(fabric, link);
}

/* ------------------------------------------------------------------------- messages */

bool fabric_link_room(const struct fabric_link *link, uint32_t count)
{
    uint32_t hello = link->tail == 1;
    return link->tail - link->base + count + hello <= FABRIC_LINK_WINDOW;
}

struct fabric_message *fabric_link_message(struct net_fabric *fabric,
                                           struct fabric_link *link,
                                           enum net_wire_kind kind, size_t body)
{
    size_t payload =
        body > sizeof(struct net_wire_put) ? body - sizeof(struct net_wire_put) : 0;
    struct fabric_message *message = fabric_message_get(fabric, payload);
    if (!message)
        return NULL;
    struct net_wire head = {
        .magic = NET_WIRE_MAGIC,
        .kind = (uint8_t)kind,
        .source = fabric->net->id,
        .secret = link->secret,
    };
    memcpy(message->bytes, &head, sizeof(head));
    message->length = (uint32_t)(sizeof(head) + body);
    message->link = link;
    return message;
}

static void link_append(struct fabric_link *link, struct fabric_message *message)
{
    struct net_wire *head = (struct net_wire *)(void *)message->bytes;
    message->seq = link->tail++;
    head->seq = message->seq;
    link->ring[message->seq % FABRIC_LINK_WINDOW] = message;
}

static bool link_append_hello(struct net_fabric *fabric, struct fabric_link *link)
{
    struct net_wire_hello hello = {
        .secret = fabric->secret,
        .address_length = fabric->address_length,
    };
    memcpy(hello.address, fabric->address, fabric->address_length);
    struct fabric_message *message =
        fabric_link_message(fabric, link, NET_WIRE_HELLO, sizeof(hello));
    if (!message)
        return false;
    memcpy(message->bytes + sizeof(struct net_wire), &hello, sizeof(hello));
    link_append(link, message);
    return true;
}

/* Hands messages to the provider, in order, until it has no room. */
static void link_pump(struct net_fabric *fabric, struct fabric_link *link)
{
    while (link->post != link->tail) {
        struct fabric_message *message = link->ring[link->post % FABRIC_LINK_WINDOW];
        /* Sent before the connection broke and not given back yet: its turn comes. */
        if (message->posted)
            break;
        struct net_wire *head = (struct net_wire *)(void *)message->bytes;
        head->ack = link->expected - 1;
        ssize_t error = fi_send(fabric->ep, message->bytes, message->length,
                                message->desc, link->fi_addr, &message->op.context);
        if (error == -FI_EAGAIN)
            break;
        if (error) {
            fabric_link_fail(fabric, link, "send", error);
            break;
        }
        message->posted = true;
        message->posted_at = 0;
        link->post++;
        link->ack_owed = 0;
    }
}

bool fabric_link_send(struct net_fabric *fabric, struct fabric_link *link,
                      struct fabric_message *message)
{
    if (link->tail == 1 && !link_append_hello(fabric, link)) {
        fabric_message_put(fabric, message);
        return false;
    }
    link_append(link, message);
    link_set_busy(fabric, link);
    if (!link->down_since)
        link_pump(fabric, link);
    return true;
}

void fabric_link_acknowledged(struct net_fabric *fabric, struct fabric_link *link,
                              uint32_t ack, bool resend)
{
    /* Only what was really sent can be acknowledged. */
    if (ack - link->base + 1 > link->tail - link->base)
        ack = link->base - 1;
    while (link->base != ack + 1) {
        struct fabric_message *message = link->ring[link->base % FABRIC_LINK_WINDOW];
        link->ring[link->base % FABRIC_LINK_WINDOW] = NULL;
        if (link->post == link->base)
            link->post++;
        link->base++;
        message->acked = true;
        if (!message->posted)
            fabric_message_put(fabric, message);
    }
    if (resend)
        link->post = link->base;
}

void fabric_message_done(struct net_fabric *fabric, struct fabric_message *message,
                         int error)
{
    message->posted = false;
    if (error)
        fabric_link_fail(fabric, message->link, "send", -error);
    if (message->acked)
        fabric_message_put(fabric, message);
}

void fabric_link_send_ack(struct net_fabric *fabric, struct fabric_link *link)
{
    struct net_wire head = {
        .magic = NET_WIRE_MAGIC,
        .kind = NET_WIRE_ACK,
        .flags = link->gap_seen ? NET_WIRE_RESEND : 0,
        .source = fabric->net->id,
        .secret = link->secret,
        .ack = link->expected - 1,
    };
    /* A lost one is asked for again: the sender repeats, and that is answered. */
    if (fi_inject(fabric->ep, &head, sizeof(head), link->fi_addr) == -FI_EAGAIN)
        return;
    link->ack_owed = 0;
    link->gap_seen = false;
}

/* --------------------------------------------------------------------------- writes */

static void write_post(struct net_fabric *fabric, struct fabric_write *write)
{
    size_t most = fabric->info->ep_attr->max_msg_size;
    write->part = write->bytes - write->done;
    if (write->part > most)
        write->part = most;
    struct iovec iov = {.iov_base = (void *)(uintptr_t)(write->src + write->done),
                        .iov_len = write->part};
    struct fi_rma_iov target = {.addr = write->mr_base + write->offset + write->done,
                                .len = write->part,
                                .key = write->mr_key};
    void *desc = write->local ? fi_mr_desc(write->local) : NULL;
    struct fi_msg_rma msg = {
        .msg_iov = &iov,
        .desc = &desc,
        .iov_count = 1,
        .addr = write->link->fi_addr,
        .rma_iov = &target,
        .rma_iov_count = 1,
        .context = &write->op.context,
    };
    ssize_t error = fi_writemsg(fabric->ep, &msg, FI_COMPLETION | FI_DELIVERY_COMPLETE);
    if (error == 0)
        write->state = FABRIC_WRITE_POSTED;
    else if (error != -FI_EAGAIN)
        fabric_link_fail(fabric, write->link, "write", error);
}

/* The put is over: its source is free, and so are those before it that were waited for.
 */
static void write_finish(struct net_fabric *fabric, struct fabric_write *write)
{
    struct net_fabric_remote *remote = write->remote;
    base_list_remove(&write->remote_node);
    fabric_write_free(fabric, write);
    if (!remote)
        return;
    struct base_list *first = base_list_first(&remote->writes);
    uint64_t done = atomic_load_explicit(&remote->owner->puts, memory_order_relaxed);
    if (first)
        done = base_container_of(first, struct fabric_write, remote_node)->ticket - 1;
    atomic_store_explicit(&remote->done, done, memory_order_release);
}

/* False: no room for the signal's message yet. */
static bool write_signal(struct net_fabric *fabric, struct fabric_write *write)
{
    struct fabric_link *link = write->link;
    if (write->signal.signal_offset != UINT64_MAX) {
        if (!fabric_link_room(link, 1))
            return false;
        struct fabric_message *message =
            fabric_link_message(fabric, link, NET_WIRE_PUT, sizeof(write->signal));
        if (!message)
            return false;
        memcpy(message->bytes + sizeof(struct net_wire), &write->signal,
               sizeof(write->signal));
        if (!fabric_link_send(fabric, link, message))
            return false;
    }
    write_finish(fabric, write);
    return true;
}

void fabric_write_done(struct net_fabric *fabric, struct fabric_write *write, int error)
{
    struct fabric_link *link = write->link;
    write->state = FABRIC_WRITE_WAITING;
    if (error) {
        fabric_link_fail(fabric, link, "write", -error);
        if (!write->remote)
            write_finish(fabric, write);
        return;
    }
    fabric_link_alive(fabric, link);
    write->done += write->part;
    if (write->done < write->bytes) {
        write_post(fabric, write);
        return;
    }
    write->state = FABRIC_WRITE_DELIVERED;
    write_signal(fabric, write);
}

static void link_writes(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_each(node, after, &link->writes)
    {
        struct fabric_write *write = base_container_of(node, struct fabric_write, node);
        if (write->state == FABRIC_WRITE_WAITING && !write->remote)
            write_finish(fabric, write);
        else if (write->state == FABRIC_WRITE_WAITING && !link->down_since)
            write_post(fabric, write);
        else if (write->state == FABRIC_WRITE_DELIVERED && !write_signal(fabric, write))
            break;
    }
}

/* ------------------------------------------------------------------------ attending */

/* Nobody opened it and its peer does not answer: it is gone. */
static void link_drop_queue(struct net_fabric *fabric, struct fabric_link *link)
{
    fabric_link_acknowledged(fabric, link, link->tail - 1, false);
}

static void link_ping(struct net_fabric *fabric, struct fabric_link *link)
{
    struct fabric_message *message = fabric_link_message(fabric, link, NET_WIRE_PING, 0);
    if (message)
        link_append(link, message);
}

static void link_retry(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    link->backoff *= 2;
    if (link->backoff > last_backoff_ns)
        link->backoff = last_backoff_ns;
    link->retry_at = now + link->backoff;
    if (fabric->held)
        return;
    if (link->users == 0 && now - link->down_since > BASE_NS_PER_S)
        link_drop_queue(fabric, link);
    if (link->base == link->tail && base_list_empty(&link->writes)) {
        if (link->users == 0 || link->tail == 1)
            link->down_since = 0; /* nobody to ask, nothing to ask about */
        else
            link_ping(fabric, link);
    }
    link->post = link->base;
    link_pump(fabric, link);
    /* One write at a time tells whether the link is back. */
    base_list_each(node, after, &link->writes)
    {
        struct fabric_write *write = base_container_of(node, struct fabric_write, node);
        if (write->state == FABRIC_WRITE_WAITING) {
            write_post(fabric, write);
            break;
        }
    }
}

static void link_resend(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    if (link->base == link->post)
        return;
    struct fabric_message *oldest = link->ring[link->base % FABRIC_LINK_WINDOW];
    if (oldest->posted_at == 0)
        oldest->posted_at = now;
    if (oldest->posted || now - oldest->posted_at < link->resend_after)
        return;
    oldest->posted_at = now;
    link->resend_after *= 2;
    if (link->resend_after > last_resend_ns)
        link->resend_after = last_resend_ns;
    link->post = link->base;
    fabric->counters.resent++;
}

void fabric_link_attend(struct net_fabric *fabric, struct fabric_link *link, bool idle,
                        int64_t now)
{
    if (link->down_since) {
        if (now >= link->retry_at)
            link_retry(fabric, link, now);
        link_writes(fabric, link);
    } else {
        link_resend(fabric, link, now);
        link_pump(fabric, link);
        link_writes(fabric, link);
    }
    if (link->ack_owed && link->owed_since == 0)
        link->owed_since = now;
    if (link->gap_seen || link->ack_owed >= FABRIC_ACK_EVERY ||
        (idle && link->ack_owed && now - link->owed_since > ack_delay_ns))
        fabric_link_send_ack(fabric, link);
    if (link->ack_owed == 0)
        link->owed_since = 0;
    if (link->base == link->tail && base_list_empty(&link->writes) && !link->ack_owed &&
        !link->gap_seen && !link->down_since)
        base_list_remove(&link->busy);
}

int64_t fabric_link_timer(const struct fabric_link *link)
{
    if (link->down_since)
        return link->retry_at;
    /* The provider's own connecting and retrying may not show in its descriptor. */
    if (link->post != link->tail || !base_list_empty(&link->writes))
        return base_now_ns() + BASE_NS_PER_MS;
    if (link->base != link->tail)
        return base_now_ns() + 20 * BASE_NS_PER_MS;
    return BASE_FOREVER;
}
