/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptors that processes of this host hand each other, such as those of device
 * memory. */
#include "net/internal.h"

#include "base/random.h"

#include <string.h>

enum hdl_status net_descriptor_offer(struct net *net, int fd, struct net_ticket *ticket)
{
    memset(ticket, 0, sizeof(*ticket));
    if (!net->exchange.offer)
        return base_fail(HDL_ENOTSUP, "no way to hand descriptors to other processes");
    enum hdl_status status = base_random_u64(&ticket->key);
    if (status != HDL_OK)
        return status;
    memcpy(ticket->host_id, net->exchange.host_id, sizeof(ticket->host_id));
    memcpy(ticket->socket_name, net->exchange.socket_name, sizeof(ticket->socket_name));
    pthread_mutex_lock(&net->lock);
    ticket->id = net->next_id++;
    pthread_mutex_unlock(&net->lock);
    return net->exchange.offer(net->exchange.user, ticket->id, ticket->key, fd);
}

void net_descriptor_withdraw(struct net *net, const struct net_ticket *ticket)
{
    if (ticket->key)
        net->exchange.withdraw(net->exchange.user, ticket->id);
}

enum hdl_status net_descriptor_fetch(struct net *net, const struct net_ticket *ticket,
                                     int64_t timeout_ns, int *fd)
{
    if (memcmp(ticket->host_id, net->exchange.host_id, sizeof(ticket->host_id)) != 0)
        return base_fail(HDL_ENOTSUP, "it is on another host");
    if (!memchr(ticket->socket_name, 0, sizeof(ticket->socket_name)))
        return base_fail(HDL_EINVAL, "its socket's name has no end");
    return net->exchange.fetch(net->exchange.user, ticket->socket_name, ticket->id,
                               ticket->key, timeout_ns, fd);
}
