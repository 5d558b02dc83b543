/* SPDX-License-Identifier: Apache-2.0 */
/* Peers' windows: choosing the transport, put and signal on whatever it is. */
#include "net/internal.h"

#include "base/copy.h"
#include "net/fabric.h"

#include <string.h>

static const int64_t patience_alone_ns = 2 * BASE_NS_PER_S;

static bool remote_is_mapped(const struct net *net, const struct net_handle *handle)
{
    if (handle->net_id == net->id)
        return true;
    return net->opts.transport != NET_FABRIC &&
           memcmp(handle->host_id, net->exchange.host_id, sizeof(handle->host_id)) == 0;
}

bool net_handle_mapped(const struct net *net, const void *data, size_t length)
{
    struct net_handle handle;
    return net_handle_unpack(data, length, &handle) == HDL_OK &&
           remote_is_mapped(net, &handle);
}

bool net_handle_has_fabric(const void *data, size_t length)
{
    struct net_handle handle;
    return net_handle_unpack(data, length, &handle) == HDL_OK &&
           handle.address_length > 0;
}

bool net_handles_mapped(const struct net *net, const void *a, size_t a_length,
                        const void *b, size_t b_length)
{
    struct net_handle one, two;
    if (net_handle_unpack(a, a_length, &one) != HDL_OK ||
        net_handle_unpack(b, b_length, &two) != HDL_OK)
        return false;
    return one.net_id == two.net_id ||
           (net->opts.transport != NET_FABRIC &&
            memcmp(one.host_id, two.host_id, sizeof(one.host_id)) == 0);
}

/* NULL = the window cannot be reached. */
static const struct net_ops *choose(const struct net *net,
                                    const struct net_handle *handle)
{
    const bool mapped = remote_is_mapped(net, handle);
    if (handle->of_device)
        return mapped ? &net_cuda_ops : NULL;
    if (handle->net_id == net->id)
        return &net_self_ops;
    return mapped ? &net_shm_ops : net->fabric ? &net_fabric_ops : NULL;
}

enum hdl_status net_remote_open(struct net *net, const void *data, size_t length,
                                unsigned access, struct hdl_peer_window **out)
{
    struct net_handle handle;
    enum hdl_status status = net_handle_unpack(data, length, &handle);
    if (status != HDL_OK)
        return status;
    if (!(access & (NET_READ | NET_WRITE)) || access > (NET_READ | NET_WRITE | NET_GROUP))
        return base_fail(HDL_EINVAL, "access %u", access);
    if (handle.of_device && access & NET_GROUP)
        return base_fail(HDL_EINVAL, "rank %d gives device memory for a group's",
                         handle.rank);
    struct hdl_peer_window *remote = base_alloc(net->env, 1, sizeof(*remote));
    if (!remote)
        return HDL_ENOMEM;
    remote->net = net;
    remote->bytes = handle.bytes;
    remote->access = access;
    remote->rank = handle.rank;
    remote->rank_epoch = handle.rank_epoch;
    remote->ops = choose(net, &handle);
    if (!remote->ops) {
        status = base_fail(
            HDL_ENOTSUP, "rank %d (pid %d) is on another host and %s%s", handle.rank,
            handle.pid, handle.of_device ? "gives memory of its GPU" : "fabric is off: ",
            handle.of_device ? "" : net->fabric_reason);
        goto free_remote;
    }
    status = remote->ops->open(remote, &handle);
    if (status != HDL_OK)
        goto free_remote;
    pthread_mutex_lock(&net->lock);
    base_list_push_back(&net->remotes, &remote->node);
    pthread_mutex_unlock(&net->lock);
    *out = remote;
    return HDL_OK;

free_remote:
    base_free(net->env, remote);
    return status;
}

void net_remote_close(struct hdl_peer_window *remote)
{
    if (!remote)
        return;
    struct net *net = remote->net;
    pthread_mutex_lock(&net->lock);
    base_list_remove(&remote->node);
    pthread_mutex_unlock(&net->lock);
    if (remote->ops->close)
        remote->ops->close(remote);
    base_free(net->env, remote);
}

void net_remote_write_as(struct hdl_peer_window *remote, uint32_t slot,
                         const _Atomic uint64_t *writer)
{
    remote->slot = slot;
    remote->writer = writer;
}

void *net_remote_map(const struct hdl_peer_window *remote)
{
    return remote->data;
}

const char *net_remote_transport(const struct hdl_peer_window *remote)
{
    return remote->ops == &net_fabric_ops ? net_fabric_transport_name(remote->net->fabric)
                                          : remote->ops->name;
}

static enum hdl_status remote_check(const struct hdl_peer_window *remote, size_t offset,
                                    size_t bytes, size_t signal_offset)
{
    if (!(remote->access & NET_WRITE))
        return base_fail(HDL_EINVAL, "put to a window that was opened for reading");
    if (offset > remote->bytes || bytes > remote->bytes - offset)
        return base_fail(HDL_EINVAL, "put of %zu bytes at %zu exceeds the window's %zu",
                         bytes, offset, remote->bytes);
    if (signal_offset != NET_NO_SIGNAL && (signal_offset % 8 != 0 || remote->bytes < 8 ||
                                           signal_offset > remote->bytes - 8))
        return base_fail(HDL_EINVAL, "signal at %zu of a window of %zu bytes",
                         signal_offset, remote->bytes);
    return HDL_OK;
}

static void copy_blocks(struct hdl_peer_window *remote, const struct net_block blocks[2])
{
    for (int i = 0; i < 2; i++)
        if (blocks[i].bytes)
            base_copy(remote->data + blocks[i].offset, blocks[i].src, blocks[i].bytes,
                      blocks[i].bytes >= BASE_SHARED_BYTES);
}

static enum hdl_status put_blocks(struct hdl_peer_window *remote,
                                  const struct net_block blocks[2], size_t signal_offset,
                                  uint64_t value, enum hdl_signal_op op, unsigned hints)
{
    for (int i = 0; i < 2; i++) {
        enum hdl_status status =
            remote_check(remote, blocks[i].offset, blocks[i].bytes, signal_offset);
        if (status != HDL_OK)
            return status;
    }
    if (remote->ops->put)
        return remote->ops->put(remote, blocks, signal_offset, value, op, hints);
    copy_blocks(remote, blocks);
    if (signal_offset != NET_NO_SIGNAL)
        net_raise(remote->data, signal_offset, value, op);
    atomic_fetch_add_explicit(&remote->puts, 1, memory_order_relaxed);
    net_ring(remote);
    return HDL_OK;
}

enum hdl_status net_put_two(struct hdl_peer_window *remote,
                            const struct net_block blocks[2], size_t signal_offset,
                            uint64_t value, enum hdl_signal_op op)
{
    return put_blocks(remote, blocks, signal_offset, value, op, 0);
}

enum hdl_status net_put(struct hdl_peer_window *remote, size_t offset, const void *src,
                        size_t bytes, size_t signal_offset, uint64_t value,
                        enum hdl_signal_op op)
{
    const struct net_block blocks[2] = {{.offset = offset, .src = src, .bytes = bytes}};
    return put_blocks(remote, blocks, signal_offset, value, op, 0);
}

enum hdl_status net_put_hinted(struct hdl_peer_window *remote, size_t offset,
                               const void *src, size_t bytes, size_t signal_offset,
                               uint64_t value, enum hdl_signal_op op, unsigned hints)
{
    const struct net_block blocks[2] = {{.offset = offset, .src = src, .bytes = bytes}};
    return put_blocks(remote, blocks, signal_offset, value, op, hints);
}

enum hdl_status net_signal(struct hdl_peer_window *remote, size_t signal_offset,
                           uint64_t value, enum hdl_signal_op op)
{
    if (signal_offset == NET_NO_SIGNAL)
        return base_fail(HDL_EINVAL, "signal without an offset");
    return net_put(remote, 0, NULL, 0, signal_offset, value, op);
}

uint64_t net_put_count(const struct hdl_peer_window *remote)
{
    return atomic_load_explicit(&remote->puts, memory_order_relaxed);
}

uint64_t net_put_done(const struct hdl_peer_window *remote)
{
    return remote->ops->done ? remote->ops->done(remote) : net_put_count(remote);
}

enum hdl_status net_put_exposed(struct hdl_peer_window *remote,
                                const struct net_exposed *exposed, size_t offset,
                                const void *src, size_t bytes)
{
    if (offset > exposed->bytes || bytes > exposed->bytes - offset)
        return base_fail(HDL_EINVAL, "put of %zu bytes at %zu exceeds the exposed %llu",
                         bytes, offset, (unsigned long long)exposed->bytes);
    if (!remote->ops->put_exposed)
        return base_fail(HDL_ENOTSUP, "rank %d is mapped", remote->rank);
    return remote->ops->put_exposed(remote, exposed, offset, src, bytes);
}

bool net_remote_delivered(const struct hdl_peer_window *remote)
{
    return !remote->ops->delivered || remote->ops->delivered(remote);
}

bool net_remote_greet(struct hdl_peer_window *remote)
{
    return !remote->ops->greet || remote->ops->greet(remote);
}

int64_t net_remote_down_since(const struct hdl_peer_window *remote)
{
    return remote->ops->down_since ? remote->ops->down_since(remote) : 0;
}

enum hdl_status net_remote_check(const struct hdl_peer_window *remote)
{
    if (atomic_load_explicit(&remote->lost, memory_order_relaxed))
        return base_fail(HDL_EPEER, "rank %d is lost", remote->rank);
    if (remote->access & NET_GROUP ||
        !atomic_load_explicit(&remote->net->alone, memory_order_relaxed))
        return HDL_OK;
    int64_t since = net_remote_down_since(remote);
    if (since == 0 || base_now_ns() - since < patience_alone_ns)
        return HDL_OK;
    return base_fail(HDL_ECOORD, "rank %d does not answer, and the coordinator is lost",
                     remote->rank);
}
