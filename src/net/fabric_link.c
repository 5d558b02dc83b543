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
/* Of a sleeper, whom what it waits for may wake before: then it is piggy-backed. */
static const int64_t last_ack_delay_ns = 2 * BASE_NS_PER_MS;
/* The word that an offer was taken may be lost with a peer's queue: it is asked. */
static const int64_t ask_ns = 200 * BASE_NS_PER_MS;
static const int64_t ask_alone_ns = 500 * BASE_NS_PER_MS;
/* Probes in a row without room after which a link is down. */
enum { MOST_UNSAID = 3 };
/* How long a broken link is tried: one that was closed, one that only the peer opened. */
static const int64_t give_up_ns = BASE_NS_PER_S;
static const int64_t forget_ns = 60 * BASE_NS_PER_S;

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
    struct fabric_link *link = base_alloc(fabric->env, 1, sizeof(*link) + address_length);
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
    base_list_init(&link->offers);
    base_list_init(&link->arrivals);
    base_list_init(&link->busy);
    base_list_push_back(&fabric->links, &link->node);
    *out = link;
    return HDL_OK;
}

void fabric_link_free(struct net_fabric *fabric, struct fabric_link *link)
{
    base_list_remove(&link->node);
    base_list_remove(&link->busy);
    base_free(fabric->env, link->ring);
    base_free(fabric->env, link);
}

void fabric_link_rest(struct net_fabric *fabric, struct fabric_link *link)
{
    if (link->users || link->base != link->tail)
        return;
    base_free(fabric->env, link->ring);
    link->ring = NULL;
}

void fabric_link_set_busy(struct net_fabric *fabric, struct fabric_link *link)
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
    fabric_link_set_busy(fabric, link);
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
    link->heard_at = 0;
    link->unsaid = 0;
    if (!link->down_since || fabric->held)
        return;
    base_log_info(fabric->env, "link up context %016llx after_us %lld",
                  (unsigned long long)link->net_id,
                  (long long)((base_now_ns() - link->down_since) / BASE_NS_PER_US));
    link->down_since = 0;
    link->post = link->base;
    fabric_arrivals_again(fabric, link);
    link->ack_owed = FABRIC_ACK_EVERY; /* what was said may be lost */
    fabric->counters.reconnects++;
    link_show_down(fabric, link);
    fabric_link_set_busy(fabric, link);
}

/* ------------------------------------------------------------------------- messages */

bool fabric_link_room(const struct fabric_link *link, uint32_t count)
{
    uint32_t hello = link->tail == 1 || link->restart;
    return link->tail - link->base + count + hello <= FABRIC_LINK_WINDOW;
}

/* A message with its head filled, for a body of `body` bytes. NULL: no memory. */
static struct fabric_message *link_message(struct net_fabric *fabric,
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
    link->num_large += message->size == FABRIC_LARGE;
}

static bool link_append_hello(struct net_fabric *fabric, struct fabric_link *link)
{
    struct net_wire_hello hello = {
        .secret = fabric->secret,
        .address_length = fabric->address_length,
    };
    memcpy(hello.address, fabric->address, fabric->address_length);
    struct fabric_message *message =
        link_message(fabric, link, NET_WIRE_HELLO, sizeof(hello));
    if (!message)
        return false;
    memcpy(message->bytes + sizeof(struct net_wire), &hello, sizeof(hello));
    if (link->restart)
        ((struct net_wire *)(void *)message->bytes)->flags = NET_WIRE_RESTART;
    link->restart = false;
    link_append(link, message);
    return true;
}

static void link_told(struct fabric_link *link)
{
    link->ack_owed = 0;
    link->taken_told = link->taken;
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
        head->taken = (uint16_t)link->taken;
        ssize_t error = fi_send(fabric->endpoint, message->bytes, message->length,
                                message->desc, link->fi_addr, &message->op.context);
        if (error == -FI_EAGAIN)
            break;
        message->open = false;
        if (error) {
            fabric_link_fail(fabric, link, "send", error);
            break;
        }
        message->posted = true;
        message->posted_at = 0;
        link->post++;
        link_told(link);
    }
}

/* Behind the others, and the HELLO if it is the first. NULL: no memory. */
static struct fabric_message *link_new(struct net_fabric *fabric,
                                       struct fabric_link *link, enum net_wire_kind kind,
                                       size_t body)
{
    if (!link->ring)
        link->ring = base_alloc(fabric->env, FABRIC_LINK_WINDOW, sizeof(*link->ring));
    struct fabric_message *message =
        link->ring ? link_message(fabric, link, kind, body) : NULL;
    if (!message)
        return NULL;
    if ((link->tail == 1 || link->restart) && !link_append_hello(fabric, link)) {
        fabric_message_put(fabric, message);
        return NULL;
    }
    link_append(link, message);
    fabric_link_set_busy(fabric, link);
    return message;
}

/* Puts `copy` in the place of a message that has not gone, or will not come back. */
static void link_replace(struct fabric_link *link, const struct fabric_message *old,
                         struct fabric_message *copy)
{
    memcpy(copy->bytes, old->bytes, old->length);
    copy->length = old->length;
    copy->seq = old->seq;
    copy->link = link;
    copy->posted_at = old->posted_at;
    copy->open = old->open;
    copy->offers = old->offers;
    link->ring[old->seq % FABRIC_LINK_WINDOW] = copy;
    link->num_large += copy->size == FABRIC_LARGE;
    link->num_large -= old->size == FABRIC_LARGE;
}

/* The newest message if a part may join it, in a larger buffer if need be. */
static struct fabric_message *
link_open(struct net_fabric *fabric, struct fabric_link *link, size_t bytes, bool offer)
{
    if (link->base == link->tail)
        return NULL;
    struct fabric_message *message = link->ring[(link->tail - 1) % FABRIC_LINK_WINDOW];
    if (!message->open || (offer && message->offers))
        return NULL;
    size_t length = message->length + bytes;
    if (length <= fabric_message_room(fabric, message->size))
        return message;
    if (length > NET_WIRE_HEADS + fabric_link_most(fabric, link))
        return NULL;
    struct fabric_message *larger = fabric_message_get(fabric, length - NET_WIRE_HEADS);
    if (!larger)
        return NULL;
    link_replace(link, message, larger);
    fabric_message_put(fabric, message);
    return larger;
}

size_t fabric_link_most(const struct net_fabric *fabric, const struct fabric_link *link)
{
    return link->num_large < FABRIC_MOST_LARGE ? fabric->eager : NET_EAGER_BYTES;
}

uint8_t *fabric_link_add(struct net_fabric *fabric, struct fabric_link *link,
                         size_t bytes, bool offer)
{
    struct fabric_message *message = link_open(fabric, link, bytes, offer);
    if (!message) {
        fabric_link_go(fabric, link); /* what nothing joins any more */
        message = link_new(fabric, link, NET_WIRE_PUT, bytes);
        if (!message)
            return NULL;
        message->open = true;
        message->length -= (uint32_t)bytes;
    }
    uint8_t *part = message->bytes + message->length;
    message->length += (uint32_t)bytes;
    message->offers = message->offers || offer;
    return part;
}

void fabric_link_go(struct net_fabric *fabric, struct fabric_link *link)
{
    if (!link->down_since)
        link_pump(fabric, link);
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
        link->num_large -= message->size == FABRIC_LARGE;
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

/* A message outside the sequence, which may be lost. Not injected: ofi_rxm of libfabric
 * 1.11 crashes when a connection breaks with one under way. False: no room now. */
static bool link_say(struct net_fabric *fabric, struct fabric_link *link,
                     struct net_wire head)
{
    struct fabric_message *message = link_message(fabric, link, head.kind, 0);
    if (!message)
        return false;
    struct net_wire *said = (struct net_wire *)(void *)message->bytes;
    said->flags = head.flags;
    said->seq = head.seq;
    said->ack = link->expected - 1;
    said->taken = (uint16_t)link->taken;
    message->acked = true;
    ssize_t error = fi_send(fabric->endpoint, message->bytes, message->length,
                            message->desc, link->fi_addr, &message->op.context);
    message->posted = error == 0;
    if (error)
        fabric_message_put(fabric, message);
    if (error && error != -FI_EAGAIN)
        fabric_link_fail(fabric, link, "send", error);
    return error == 0;
}

void fabric_link_send_ack(struct net_fabric *fabric, struct fabric_link *link)
{
    /* A lost one is asked for again: the sender repeats, and that is answered. */
    if (!link_say(fabric, link,
                  (struct net_wire){.kind = NET_WIRE_ACK,
                                    .flags = link->gap_seen ? NET_WIRE_RESEND : 0}))
        return;
    link_told(link);
    link->gap_seen = false;
}

/* ------------------------------------------------------------------------ attending */

/* Nobody needs it and its peer does not answer: it is gone. Should it come back, it is
 * told where the numbers go on. */
static void link_drop(struct net_fabric *fabric, struct fabric_link *link)
{
    if (link->base != link->tail || link->num_offers)
        link->restart = true;
    fabric_link_acknowledged(fabric, link, link->tail - 1, false);
    fabric_pieces_give_up(fabric, link);
    link_told(link);
}

void fabric_link_ping(struct net_fabric *fabric, struct fabric_link *link)
{
    if (link_new(fabric, link, NET_WIRE_PING, 0))
        fabric_link_go(fabric, link);
}

void fabric_links_ask(struct net_fabric *fabric)
{
    int64_t now = base_now_ns();
    if (now < fabric->ask_at)
        return;
    fabric->ask_at = now + ask_alone_ns;
    base_list_each(node, after, &fabric->links)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, node);
        if (link->users && link->base == link->tail && !link->down_since)
            fabric_link_ping(fabric, link);
    }
}

/* Is there a payload that is not through? */
static bool link_moves(const struct fabric_link *link)
{
    return !base_list_empty(&link->writes) || link->num_offers || link->num_arrivals;
}

/* The provider may have lost it with a connection, and never give it back. */
static void link_renew(struct net_fabric *fabric, struct fabric_link *link,
                       struct fabric_message *lost)
{
    struct fabric_message *copy = fabric_message_get(
        fabric, fabric_message_room(fabric, lost->size) - NET_WIRE_HEADS);
    if (!copy)
        return;
    link_replace(link, lost, copy);
    lost->acked = true;
}

/* Is it time to send again? What the provider holds for so long is sent from a copy. */
static bool link_late(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    if (link->base == link->tail)
        return false;
    struct fabric_message *oldest = link->ring[link->base % FABRIC_LINK_WINDOW];
    bool held = oldest->posted; /* also if its turn has come again */
    if (oldest->posted_at == 0)
        oldest->posted_at = link->probed_at = now;
    if ((link->base == link->post && !held) ||
        now - oldest->posted_at < link->resend_after)
        return false;
    oldest->posted_at = now;
    if (held)
        link_renew(fabric, link, oldest);
    link->resend_after *= 2;
    if (link->resend_after > last_resend_ns)
        link->resend_after = last_resend_ns;
    fabric->counters.resent++;
    return true;
}

static void link_retry(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    link->backoff *= 2;
    if (link->backoff > last_backoff_ns)
        link->backoff = last_backoff_ns;
    link->retry_at = now + link->backoff;
    if (fabric->held)
        return;
    if (link->users == 0 &&
        now - link->down_since > (link->opened ? give_up_ns : forget_ns))
        link_drop(fabric, link);
    /* An answer, or the end of a read, tells that the link is back. */
    if (link->base == link->tail && link->num_arrivals == 0) {
        if (!link_moves(link) && (link->users == 0 || link->tail == 1))
            link->down_since = 0; /* nobody to ask, nothing to ask about */
        else
            fabric_link_ping(fabric, link);
    }
    (void)link_late(fabric, link, now);
    link->post = link->base;
    link_pump(fabric, link);
    fabric_arrivals_attend(fabric, link, 1);
}

/* Asks what has arrived. A provider that has no room for even this has no connection, and
 * never says so by itself. */
static void link_probe(struct net_fabric *fabric, struct fabric_link *link)
{
    if (link_say(fabric, link,
                 (struct net_wire){.kind = NET_WIRE_PROBE, .seq = link->post}))
        link->unsaid = 0;
    else if (++link->unsaid == MOST_UNSAID)
        fabric_link_fail(fabric, link, "send", FI_ENOTCONN);
}

static void link_resend(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    if (link->base == link->tail)
        return;
    bool patient = link->resend_after < last_resend_ns;
    bool late = link_late(fabric, link, now);
    if (late && !patient && link->users == 0 && link->opened)
        link_drop(fabric, link);
    else if (late && !patient && atomic_load(&fabric->net->alone))
        fabric_link_fail(fabric, link, "answer", FI_ETIMEDOUT);
    else if (late)
        link->post = link->base;
    else if (now - link->probed_at > link->resend_after / 8) {
        link->probed_at = now;
        link_probe(fabric, link);
    }
}

static void link_ask(struct net_fabric *fabric, struct fabric_link *link, int64_t now)
{
    if (link->heard_at == 0)
        link->heard_at = now;
    if (link->num_offers == 0 || link->base != link->tail ||
        now - link->heard_at < ask_ns)
        return;
    link->heard_at = now;
    fabric_link_ping(fabric, link);
}

void fabric_link_attend(struct net_fabric *fabric, struct fabric_link *link, bool idle,
                        int64_t now)
{
    if (link->down_since) {
        if (now >= link->retry_at)
            link_retry(fabric, link, now);
    } else {
        link_resend(fabric, link, now);
        link_pump(fabric, link);
        fabric_arrivals_attend(fabric, link, FABRIC_OFFERS);
        fabric_offer_writes(fabric, link);
        link_ask(fabric, link, now);
    }
    if (link->ack_owed && link->owed_since == 0)
        link->owed_since = now;
    bool due = link->taken != link->taken_told ||
               (link->ack_owed && now - link->owed_since > ack_delay_ns);
    if (link->gap_seen || link->ack_owed >= FABRIC_ACK_EVERY || (idle && due))
        fabric_link_send_ack(fabric, link);
    if (link->ack_owed == 0)
        link->owed_since = 0;
    if (link->base == link->tail && !link_moves(link) && !link->ack_owed &&
        !link->gap_seen && !link->down_since) {
        base_list_remove(&link->busy);
        fabric_link_rest(fabric, link);
    }
}

int64_t fabric_link_timer(const struct fabric_link *link)
{
    if (link->down_since)
        return link->retry_at;
    /* The provider's own connecting and retrying may not show in its descriptor. */
    if (link->post != link->tail || link_moves(link))
        return base_now_ns() + BASE_NS_PER_MS;
    if (link->base != link->tail)
        return base_now_ns() + 20 * BASE_NS_PER_MS;
    if (link->ack_owed)
        return base_now_ns() + last_ack_delay_ns;
    return BASE_FOREVER;
}
