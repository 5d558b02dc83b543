/* SPDX-License-Identifier: Apache-2.0 */
/* Peers' windows over fabric: open, close, put. */
#include "net/fabric_impl.h"

#include <string.h>

static enum hdl_status check_peer(const struct net_fabric *fabric,
                                  const struct net_handle *handle)
{
    if (handle->address_length == 0)
        return base_fail(HDL_ENOTSUP, "rank %d (pid %d) has no fabric", handle->rank,
                         handle->pid);
    if (strcmp(handle->provider, fabric->provider) != 0)
        return base_fail(HDL_ENOTSUP, "rank %d uses fabric provider %s, this rank %s",
                         handle->rank, handle->provider, fabric->provider);
    if (handle->long_messages != (fabric->eager > NET_EAGER_BYTES))
        return base_fail(HDL_ENOTSUP,
                         "rank %d has another libfabric than this rank: only one of them "
                         "takes messages of %d bytes",
                         handle->rank, NET_LONG_BYTES);
    return HDL_OK;
}

static enum hdl_status fabric_open(struct hdl_peer_window *owner,
                                   const struct net_handle *handle)
{
    struct net_fabric *fabric = owner->net->fabric;
    enum hdl_status status = check_peer(fabric, handle);
    if (status != HDL_OK)
        return status;
    struct net_fabric_remote *remote = base_alloc(fabric->env, 1, sizeof(*remote));
    if (!remote)
        return HDL_ENOMEM;
    remote->owner = owner;
    remote->window_id = handle->window_id;
    remote->key = handle->key;
    base_list_init(&remote->writes);
    fabric_lock(fabric);
    struct fabric_link *link = fabric_link_find(fabric, handle->net_id);
    if (!link)
        status = fabric_link_open(fabric, handle->net_id, handle->secret, handle->address,
                                  handle->address_length, &link);
    if (status == HDL_OK) {
        link->users++;
        link->opened = true;
        remote->link = link;
        owner->fabric = remote;
        base_list_push_back(&fabric->remotes, &remote->node);
    }
    fabric_unlock(fabric);
    if (status != HDL_OK)
        base_free(fabric->env, remote);
    return status;
}

/* Messages already queued still go; of large puts what is not on its way is dropped. The
 * link stays: its numbers must go on. */
static void fabric_close(struct hdl_peer_window *owner)
{
    struct net_fabric *fabric = owner->net->fabric;
    struct net_fabric_remote *remote = owner->fabric;
    fabric_lock(fabric);
    fabric_offers_drop(fabric, remote);
    base_list_remove(&remote->node);
    remote->link->users--;
    fabric_link_rest(fabric, remote->link);
    fabric_unlock(fabric);
    base_free(fabric->env, remote);
}

static void fabric_drop(struct hdl_peer_window *owner)
{
    struct net_fabric *fabric = owner->net->fabric;
    fabric_lock(fabric);
    fabric_offers_drop(fabric, owner->fabric);
    fabric_unlock(fabric);
}

static void fill_put(const struct net_fabric_remote *remote,
                     const struct net_block blocks[2], size_t signal_offset,
                     uint64_t value, enum hdl_signal_op op, struct net_wire_put *put)
{
    *put = (struct net_wire_put){
        .window_id = remote->window_id,
        .key = remote->key,
        .offset = blocks[0].offset,
        .signal_offset = signal_offset == NET_NO_SIGNAL ? UINT64_MAX : signal_offset,
        .value = value,
        .bytes = (uint32_t)blocks[0].bytes,
        .op = (uint32_t)op,
        .offset2 = blocks[1].offset,
        .bytes2 = (uint32_t)blocks[1].bytes,
        .slot = remote->owner->slot,
    };
    if (remote->owner->writer)
        put->writer = atomic_load_explicit(remote->owner->writer, memory_order_relaxed);
}

/* Can a put too large for a message be taken now, behind `before` more messages? */
static bool write_room(const struct net_fabric *fabric, const struct fabric_link *link,
                       size_t bytes, uint32_t before)
{
    if (base_list_empty(&fabric->free_writes))
        return false;
    if (bytes > NET_PIECE_BYTES)
        return true; /* it may wait: its source is not free before it is done */
    if (!base_list_empty(&link->writes)) {
        const struct fabric_write *last =
            base_container_of(link->writes.prev, struct fabric_write, node);
        if (last->offered < last->bytes)
            return false;
    }
    return fabric_offer_room(fabric, link, bytes, before);
}

static bool put_room(const struct net_fabric *fabric, const struct fabric_link *link,
                     size_t bytes, uint32_t before)
{
    if (bytes > fabric->eager)
        return write_room(fabric, link, bytes, before);
    return bytes <= fabric_link_most(fabric, link) && fabric_link_room(link, before + 1);
}

static enum hdl_status put_eager(struct net_fabric *fabric,
                                 struct net_fabric_remote *remote,
                                 const struct net_wire_put *put,
                                 const struct net_block blocks[2], bool more)
{
    struct fabric_link *link = remote->link;
    size_t bytes = blocks[0].bytes + blocks[1].bytes;
    uint8_t *part = fabric_link_add(fabric, link, sizeof(*put) + bytes, false);
    if (!part)
        return HDL_PENDING;
    memcpy(part, put, sizeof(*put));
    part += sizeof(*put);
    if (blocks[0].bytes)
        memcpy(part, blocks[0].src, blocks[0].bytes);
    if (blocks[1].bytes)
        memcpy(part + blocks[0].bytes, blocks[1].src, blocks[1].bytes);
    if (!more)
        fabric_link_go(fabric, link);
    fabric->counters.bytes += bytes;
    struct hdl_peer_window *owner = remote->owner;
    uint64_t puts = atomic_fetch_add_explicit(&owner->puts, 1, memory_order_relaxed) + 1;
    if (base_list_empty(&remote->writes))
        atomic_store_explicit(&remote->done, puts, memory_order_release);
    return HDL_OK;
}

/* Pieces that fit are on their way, or not taken, when this returns: their source is
 * free. */
static enum hdl_status put_write(struct net_fabric *fabric,
                                 struct net_fabric_remote *remote,
                                 const struct net_wire_put *put, const void *src,
                                 size_t bytes, bool lazy)
{
    struct fabric_link *link = remote->link;
    struct fabric_write *write = base_container_of(
        base_list_pop_front(&fabric->free_writes), struct fabric_write, node);
    _Atomic uint64_t *puts = &remote->owner->puts;
    *write = (struct fabric_write){.link = link,
                                   .remote = remote,
                                   .src = src,
                                   .bytes = bytes,
                                   .lazy = lazy,
                                   .put = *put};
    write->ticket = atomic_fetch_add_explicit(puts, 1, memory_order_relaxed) + 1;
    base_list_push_back(&link->writes, &write->node);
    base_list_push_back(&remote->writes, &write->remote_node);
    fabric_offer_writes(fabric, link);
    bool over = link->writes.prev != &write->node;
    if (!over && bytes <= NET_PIECE_BYTES && write->offered == 0) {
        base_list_remove(&write->remote_node);
        base_list_remove(&write->node);
        base_list_push_front(&fabric->free_writes, &write->node);
        atomic_fetch_sub_explicit(puts, 1, memory_order_relaxed);
        return HDL_PENDING;
    }
    fabric_link_set_busy(fabric, link);
    return HDL_OK;
}

static enum hdl_status put_one(struct net_fabric *fabric,
                               struct net_fabric_remote *remote,
                               const struct net_block blocks[2], size_t signal_offset,
                               uint64_t value, enum hdl_signal_op op, unsigned hints)
{
    size_t bytes = blocks[0].bytes + blocks[1].bytes;
    if (!put_room(fabric, remote->link, bytes, 0))
        return HDL_PENDING;
    struct net_wire_put put;
    fill_put(remote, blocks, signal_offset, value, op, &put);
    if (bytes <= fabric->eager)
        return put_eager(fabric, remote, &put, blocks, hints & NET_PUT_MORE);
    return put_write(fabric, remote, &put, blocks[0].src, blocks[0].bytes,
                     hints & NET_PUT_LAZY);
}

static enum hdl_status fabric_put(struct hdl_peer_window *owner,
                                  const struct net_block blocks[2], size_t signal_offset,
                                  uint64_t value, enum hdl_signal_op op, unsigned hints)
{
    enum hdl_status status = net_remote_check(owner);
    if (status != HDL_OK)
        return status;
    struct net_fabric *fabric = owner->net->fabric;
    struct net_fabric_remote *remote = owner->fabric;
    const struct net_block head[2] = {blocks[0]}, tail[2] = {blocks[1]};
    bool apart = blocks[1].bytes && blocks[0].bytes + blocks[1].bytes > fabric->eager;
    if (apart && blocks[0].bytes > NET_EAGER_BYTES)
        return base_fail(HDL_EINVAL, "first of two blocks has %zu bytes, at most %d",
                         blocks[0].bytes, NET_EAGER_BYTES);
    fabric_lock(fabric);
    /* Else the first would go again with each try of the second. */
    if (apart && (!fabric_link_room(remote->link, 1) ||
                  !put_room(fabric, remote->link, blocks[1].bytes, 1)))
        status = HDL_PENDING;
    if (status == HDL_OK && apart)
        status =
            put_one(fabric, remote, head, NET_NO_SIGNAL, 0, HDL_SIGNAL_SET, NET_PUT_MORE);
    if (status == HDL_OK)
        status = put_one(fabric, remote, apart ? tail : blocks, signal_offset, value, op,
                         hints);
    fabric_unlock(fabric);
    return status;
}

static enum hdl_status fabric_put_exposed(struct hdl_peer_window *owner,
                                          const struct net_exposed *exposed,
                                          size_t offset, const void *src, size_t bytes)
{
    enum hdl_status status = net_remote_check(owner);
    if (status != HDL_OK)
        return status;
    struct net_fabric *fabric = owner->net->fabric;
    const struct net_wire_put put = {.window_id = exposed->window,
                                     .key = exposed->key,
                                     .offset = offset,
                                     .signal_offset = UINT64_MAX};
    fabric_lock(fabric);
    status = write_room(fabric, owner->fabric->link, bytes, 0)
                 ? put_write(fabric, owner->fabric, &put, src, bytes, false)
                 : HDL_PENDING;
    fabric_unlock(fabric);
    return status;
}

static uint64_t fabric_done(const struct hdl_peer_window *owner)
{
    return atomic_load_explicit(&owner->fabric->done, memory_order_acquire);
}

static bool fabric_delivered(const struct hdl_peer_window *owner)
{
    struct net_fabric *fabric = owner->net->fabric;
    const struct fabric_link *link = owner->fabric->link;
    fabric_lock(fabric);
    bool idle = link->base == link->tail && base_list_empty(&owner->fabric->writes);
    fabric_unlock(fabric);
    return idle;
}

static bool fabric_greet(struct hdl_peer_window *owner)
{
    struct net_fabric *fabric = owner->net->fabric;
    struct fabric_link *link = owner->fabric->link;
    fabric_lock(fabric);
    if (link->tail == 1)
        fabric_link_ping(fabric, link);
    bool answered = link->base > 1 && !link->down_since;
    fabric_unlock(fabric);
    return answered;
}

static int64_t fabric_down_since(const struct hdl_peer_window *owner)
{
    return atomic_load_explicit(&owner->fabric->down_since, memory_order_relaxed);
}

const struct net_ops net_fabric_ops = {
    .name = "fabric",
    .open = fabric_open,
    .close = fabric_close,
    .drop = fabric_drop,
    .put = fabric_put,
    .put_exposed = fabric_put_exposed,
    .done = fabric_done,
    .delivered = fabric_delivered,
    .down_since = fabric_down_since,
    .greet = fabric_greet,
};
