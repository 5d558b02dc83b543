/* SPDX-License-Identifier: Apache-2.0 */
/* The own process as a peer: the reference for all other transports. */
#include "net/internal.h"

/* Put and signal are those of any mapped peer (remote.c): a copy, then a store. */
static enum hdl_status self_open(struct hdl_peer_window *remote,
                                 const struct net_handle *handle)
{
    struct net *net = remote->net;
    enum hdl_status status = HDL_EPEER;
    pthread_mutex_lock(&net->lock);
    base_list_each(node, after, &net->windows)
    {
        struct hdl_window *window = base_container_of(node, struct hdl_window, node);
        if (window->id == handle->window_id && window->key == handle->key &&
            window->bytes == handle->bytes) {
            remote->data = window->data;
            status = HDL_OK;
            break;
        }
    }
    pthread_mutex_unlock(&net->lock);
    if (status != HDL_OK)
        return base_fail(status, "window %llu of this process is gone",
                         (unsigned long long)handle->window_id);
    remote->bell = net->bell;
    /* The own process may sleep without membarrier having seen this thread run. */
    remote->must_fence = true;
    return HDL_OK;
}

const struct net_ops net_self_ops = {
    .name = "self",
    .open = self_open,
};
