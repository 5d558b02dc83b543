/* SPDX-License-Identifier: Apache-2.0 */
/* Peers of the same host: their memory, mapped through a descriptor that they hand over.
 */
#include "net/internal.h"

#include <unistd.h>

static const int64_t fetch_timeout_ns = 5 * BASE_NS_PER_S;

static enum hdl_status shm_open_window(struct hdl_peer_window *remote,
                                       const struct net_handle *handle)
{
    struct net *net = remote->net;
    if (!net->exchange.fetch)
        return base_fail(HDL_ENOTSUP, "no way to get descriptors from pid %d",
                         handle->pid);
    enum hdl_status status = net_bell_open(remote, handle);
    if (status != HDL_OK)
        return status;
    int fd;
    status = net->exchange.fetch(net->exchange.user, handle->socket_name,
                                 handle->window_id, handle->key, fetch_timeout_ns, &fd);
    if (status != HDL_OK)
        goto close_bell;
    void *data;
    status = net_memory_map(fd, handle->bytes, remote->access & NET_WRITE, &data);
    close(fd);
    if (status != HDL_OK)
        goto close_bell;
    remote->data = data;
    return HDL_OK;

close_bell:
    net_bell_close(remote);
    return status;
}

static void shm_close_window(struct hdl_peer_window *remote)
{
    net_memory_unmap(remote->data, remote->bytes);
    net_bell_close(remote);
}

const struct net_ops net_shm_ops = {
    .name = "shm",
    .open = shm_open_window,
    .close = shm_close_window,
};
