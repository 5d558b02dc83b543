/* SPDX-License-Identifier: Apache-2.0 */
/* The transports of a context: which there are, and which one reaches a peer. */
#include "net/internal.h"

#include "base/log.h"
#include "base/random.h"
#include "net/fabric.h"

#include <stdio.h>
#include <string.h>

/* Fabric is started where it may be needed; that it cannot be is no error by itself. */
static enum hdl_status net_start_fabric(struct net *net)
{
    const struct net_opts *opts = &net->opts;
    const char *reason = NULL;
    if (opts->transport == NET_SHM)
        reason = "transport is shm";
    else if (opts->transport == NET_AUTO && opts->single_host)
        reason = "not needed: all ranks of the job are on this host";
    else if (!net->exchange.interface_address[0])
        reason = "no interface address";
    if (reason) {
        snprintf(net->fabric_reason, sizeof(net->fabric_reason), "%s", reason);
        return HDL_OK;
    }
    enum hdl_status status = net_fabric_create(net, &net->fabric);
    if (status == HDL_OK)
        return HDL_OK;
    snprintf(net->fabric_reason, sizeof(net->fabric_reason), "%s", base_detail());
    if (opts->transport == NET_FABRIC)
        return status;
    base_log_info(net->env, "fabric unavailable: %s", net->fabric_reason);
    return HDL_OK;
}

enum hdl_status net_create(struct base_env *env, const struct net_exchange *exchange,
                           const struct net_opts *opts, struct net **out)
{
    struct net *net = base_alloc(env, 1, sizeof(*net));
    if (!net)
        return HDL_ENOMEM;
    net->env = env;
    net->exchange = *exchange;
    if (opts)
        net->opts = *opts;
    net->bell_fd = -1;
    net->event_fd = -1;
    pthread_mutex_init(&net->lock, NULL);
    base_list_init(&net->windows);
    base_list_init(&net->remotes);
    base_list_init(&net->peer_bells);
    enum hdl_status status = base_random_u64(&net->id);
    if (status == HDL_OK)
        status = base_random_u64(&net->bell_key);
    if (status != HDL_OK)
        goto free_net;
    /* Ids of several contexts in a process are offered through one socket. */
    net->bell_id = net->id & ~UINT64_C(0xffffff);
    net->next_id = net->bell_id + 2;
    status = net_start_fabric(net);
    if (status != HDL_OK)
        goto free_net;
    status = net_bell_create(net);
    if (status != HDL_OK)
        goto stop_fabric;
    *out = net;
    return HDL_OK;

stop_fabric:
    net_fabric_destroy(net->fabric);
free_net:
    pthread_mutex_destroy(&net->lock);
    base_free(env, net);
    return status;
}

void net_destroy(struct net *net)
{
    if (!net)
        return;
    struct base_list *node;
    while ((node = base_list_first(&net->remotes)))
        net_remote_close(base_container_of(node, struct hdl_peer_window, node));
    while ((node = base_list_first(&net->windows)))
        net_window_destroy(base_container_of(node, struct hdl_window, node));
    net_fabric_destroy(net->fabric);
    net_bell_destroy(net);
    pthread_mutex_destroy(&net->lock);
    base_free(net->env, net);
}

const char *net_fabric_provider(const struct net *net)
{
    return net->fabric ? net_fabric_provider_name(net->fabric) : NULL;
}

const char *net_fabric_reason(const struct net *net)
{
    return net->fabric_reason;
}

uint64_t net_reconnects(const struct net *net)
{
    return net->fabric ? net_fabric_counters(net->fabric).reconnects : 0;
}

uint64_t net_refused(const struct net *net)
{
    return net->fabric ? net_fabric_counters(net->fabric).refused : 0;
}

uint64_t net_stale(const struct net *net)
{
    return net->fabric ? net_fabric_counters(net->fabric).stale : 0;
}

uint64_t net_fabric_bytes(const struct net *net)
{
    return net->fabric ? net_fabric_counters(net->fabric).bytes : 0;
}

/* Polls of this thread, of whichever context: a thread that stands by polls only one. */
static _Thread_local uint32_t own_polls;

uint32_t net_polls_of_others(const struct net *net)
{
    return atomic_load_explicit(&net->polls, memory_order_relaxed) - own_polls;
}

int net_poll(struct net *net)
{
    if (!net->fabric)
        return 0;
    own_polls++;
    atomic_fetch_add_explicit(&net->polls, 1, memory_order_relaxed);
    return net_fabric_poll(net->fabric);
}

bool net_needs_poll(const struct net *net)
{
    return net->fabric && net_fabric_in_use(net->fabric);
}

void net_rank_lost(struct net *net, int32_t rank, uint64_t rank_epoch)
{
    pthread_mutex_lock(&net->lock);
    base_list_each(node, after, &net->remotes)
    {
        struct hdl_peer_window *remote =
            base_container_of(node, struct hdl_peer_window, node);
        if (remote->rank == rank && remote->rank_epoch <= rank_epoch &&
            !(remote->access & NET_GROUP))
            atomic_store(&remote->lost, true);
    }
    pthread_mutex_unlock(&net->lock);
    net_wake(net);
}

void net_set_alone(struct net *net, bool alone)
{
    atomic_store(&net->alone, alone);
    net_wake(net);
}
