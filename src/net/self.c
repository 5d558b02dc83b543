/* SPDX-License-Identifier: Apache-2.0 */
/* The own process as a peer: the reference for all other transports. */
#include "net/internal.h"

/* Put and signal are those of any mapped peer (remote.c): a copy, then a store. */
static enum hdl_status self_open(struct hdl_peer_window *remote,
                                 const struct net_handle *handle)
{
    struct net *net = remote->net;
    enum hdl_status status = net_window_of(net, handle, &remote->data);
    if (status != HDL_OK)
        return status;
    remote->bell = net->bell;
    /* The own process may sleep without membarrier having seen this thread run. */
    remote->must_fence = true;
    return HDL_OK;
}

const struct net_ops net_self_ops = {
    .name = "self",
    .open = self_open,
};
