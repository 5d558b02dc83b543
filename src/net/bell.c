/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping until a peer or the network has something, and waking those who sleep. */
#include "net/internal.h"

#include "base/futex.h"
#include "net/fabric.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

/* How long the standby thread sleeps before it looks whether others still poll. */
static const int64_t standby_ns = BASE_NS_PER_MS;

static int membarrier(int command)
{
    return (int)syscall(__NR_membarrier, command, 0, 0);
}

/* Registering costs 10 ms once the process has several threads; when the library is
 * loaded it mostly has one. The kernel remembers. */
static void __attribute__((constructor)) register_early(void)
{
    (void)membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED);
}

enum hdl_status net_bell_create(struct net *net)
{
    void *page;
    enum hdl_status status =
        net_memory_create("heddle-bell", NET_BELL_BYTES, &net->bell_fd, &page);
    if (status != HDL_OK)
        return status;
    net->bell = page;
    net->can_membarrier = membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED) == 0;
    atomic_store(&net->bell->fenced, !net->can_membarrier);
    net->event_fd = -1;
    if (net->fabric) {
        net->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (net->event_fd < 0) {
            status = base_fail_errno(HDL_ESYSTEM, errno, "eventfd");
            goto destroy;
        }
    }
    if (!net->exchange.offer)
        return HDL_OK;
    status = net->exchange.offer(net->exchange.user, net->bell_id, net->bell_key,
                                 net->bell_fd);
    if (status == HDL_OK && net->event_fd >= 0)
        status = net->exchange.offer(net->exchange.user, net->bell_id + 1, net->bell_key,
                                     net->event_fd);
    if (status == HDL_OK)
        return HDL_OK;

destroy:
    net_bell_destroy(net);
    return status;
}

void net_bell_destroy(struct net *net)
{
    if (!net->bell)
        return;
    if (net->exchange.withdraw) {
        net->exchange.withdraw(net->exchange.user, net->bell_id);
        if (net->event_fd >= 0)
            net->exchange.withdraw(net->exchange.user, net->bell_id + 1);
    }
    if (net->event_fd >= 0)
        close(net->event_fd);
    net_memory_unmap(net->bell, NET_BELL_BYTES);
    close(net->bell_fd);
    net->bell = NULL;
}

/* ------------------------------------------------------------------- bells of peers */

static enum hdl_status bell_fetch(struct net *net, const struct net_handle *handle,
                                  struct net_peer_bell *peer)
{
    const struct net_exchange *exchange = &net->exchange;
    int64_t timeout = 5 * BASE_NS_PER_S;
    int fd;
    enum hdl_status status =
        exchange->fetch(exchange->user, handle->socket_name, handle->bell_id,
                        handle->bell_key, timeout, &fd);
    if (status != HDL_OK)
        return status;
    void *page;
    status = net_memory_map(fd, NET_BELL_BYTES, true, &page);
    close(fd);
    if (status != HDL_OK)
        return status;
    peer->event_fd = -1;
    if (handle->has_event) {
        status = exchange->fetch(exchange->user, handle->socket_name, handle->bell_id + 1,
                                 handle->bell_key, timeout, &peer->event_fd);
        if (status != HDL_OK) {
            net_memory_unmap(page, NET_BELL_BYTES);
            return status;
        }
    }
    peer->bell = page;
    peer->net_id = handle->net_id;
    return HDL_OK;
}

static struct net_peer_bell *bell_find(struct net *net, uint64_t net_id)
{
    base_list_each(node, after, &net->peer_bells)
    {
        struct net_peer_bell *peer = base_container_of(node, struct net_peer_bell, node);
        if (peer->net_id == net_id)
            return peer;
    }
    return NULL;
}

static void bell_free(struct net *net, struct net_peer_bell *peer)
{
    net_memory_unmap(peer->bell, NET_BELL_BYTES);
    if (peer->event_fd >= 0)
        close(peer->event_fd);
    base_free(net->env, peer);
}

enum hdl_status net_bell_open(struct hdl_peer_window *remote,
                              const struct net_handle *handle)
{
    struct net *net = remote->net;
    pthread_mutex_lock(&net->lock);
    struct net_peer_bell *peer = bell_find(net, handle->net_id);
    if (peer)
        peer->users++;
    pthread_mutex_unlock(&net->lock);
    if (!peer) {
        struct net_peer_bell *fresh = base_alloc(net->env, 1, sizeof(*fresh));
        if (!fresh)
            return HDL_ENOMEM;
        enum hdl_status status = bell_fetch(net, handle, fresh);
        if (status != HDL_OK) {
            base_free(net->env, fresh);
            return status;
        }
        /* Another thread may have been faster: then its bell serves. */
        pthread_mutex_lock(&net->lock);
        peer = bell_find(net, handle->net_id);
        if (!peer) {
            peer = fresh;
            base_list_push_back(&net->peer_bells, &peer->node);
        }
        peer->users++;
        pthread_mutex_unlock(&net->lock);
        if (peer != fresh)
            bell_free(net, fresh);
    }
    remote->peer_bell = peer;
    remote->bell = peer->bell;
    remote->must_fence = !net->can_membarrier || atomic_load(&peer->bell->fenced);
    return HDL_OK;
}

void net_bell_close(struct hdl_peer_window *remote)
{
    struct net *net = remote->net;
    struct net_peer_bell *peer = remote->peer_bell;
    if (!peer)
        return;
    remote->peer_bell = NULL;
    remote->bell = NULL;
    pthread_mutex_lock(&net->lock);
    bool last = --peer->users == 0;
    if (last)
        base_list_remove(&peer->node);
    pthread_mutex_unlock(&net->lock);
    if (last)
        bell_free(net, peer);
}

/* --------------------------------------------------------------------------- ringing */

static void bell_write_event(int event_fd)
{
    uint64_t one = 1;
    /* It can only fail because it is readable already. */
    if (event_fd >= 0 && write(event_fd, &one, sizeof(one)) < 0)
        return;
}

static void bell_strike(struct net_bell *bell, int event_fd)
{
    atomic_fetch_add(&bell->count, 1);
    if (atomic_load(&bell->polling))
        bell_write_event(event_fd);
    base_futex_wake((uint32_t *)&bell->count, INT32_MAX, true);
}

void net_ring(struct hdl_peer_window *remote)
{
    struct net_bell *bell = remote->bell;
    if (!bell)
        return;
    if (remote->must_fence)
        atomic_thread_fence(memory_order_seq_cst);
    else
        atomic_signal_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&bell->sleepers, memory_order_relaxed) == 0)
        return;
    bell_strike(bell,
                remote->peer_bell ? remote->peer_bell->event_fd : remote->net->event_fd);
}

void net_ring_host(struct net *net)
{
    pthread_mutex_lock(&net->lock);
    base_list_each(node, after, &net->peer_bells)
    {
        struct net_peer_bell *peer = base_container_of(node, struct net_peer_bell, node);
        atomic_thread_fence(memory_order_seq_cst);
        if (atomic_load_explicit(&peer->bell->sleepers, memory_order_relaxed))
            bell_strike(peer->bell, peer->event_fd);
    }
    pthread_mutex_unlock(&net->lock);
}

void net_wake(struct net *net)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(&net->bell->sleepers, memory_order_relaxed))
        bell_strike(net->bell, net->event_fd);
}

/* -------------------------------------------------------------------------- sleeping */

uint32_t net_sleep_begin(struct net *net)
{
    struct net_bell *bell = net->bell;
    if (net->fabric)
        atomic_fetch_add(&bell->polling, 1);
    atomic_fetch_add(&bell->sleepers, 1);
    uint32_t ticket = atomic_load(&bell->count);
    if (net->can_membarrier)
        membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED);
    else
        atomic_thread_fence(memory_order_seq_cst);
    return ticket;
}

void net_sleep_cancel(struct net *net)
{
    struct net_bell *bell = net->bell;
    atomic_fetch_sub(&bell->sleepers, 1);
    if (net->fabric)
        atomic_fetch_sub(&bell->polling, 1);
}

/* Sleeps in poll() on the eventfd and fabric's descriptor; only one thread at a time,
 * since two that read the same eventfd would take each other's wake-ups. */
static void sleep_polling(struct net *net, uint32_t ticket, int64_t timeout_ns)
{
    struct pollfd fds[2] = {{.fd = net->event_fd, .events = POLLIN}, {.fd = -1}};
    int64_t limit = timeout_ns;
    bool may_sleep = net_fabric_sleep_begin(net->fabric, &fds[1].fd, &limit);
    fds[1].events = POLLIN;
    if (may_sleep && atomic_load(&net->bell->count) == ticket) {
        struct timespec time = {.tv_sec = limit / BASE_NS_PER_S,
                                .tv_nsec = limit % BASE_NS_PER_S};
        int ready = ppoll(fds, 2, limit < 0 ? NULL : &time, NULL);
        uint64_t rings;
        if (ready > 0 && (fds[0].revents & POLLIN) &&
            read(net->event_fd, &rings, sizeof(rings)) < 0)
            errno = 0; /* somebody else's ring */
    }
}

void net_sleep(struct net *net, uint32_t ticket, int64_t timeout_ns, unsigned flags)
{
    struct net_bell *bell = net->bell;
    uint32_t *word = (uint32_t *)&bell->count;
    if (timeout_ns == BASE_FOREVER)
        timeout_ns = -1;
    if ((flags & NET_SLEEP_STANDBY) && net->fabric) {
        uint32_t polls = net_polls_of_others(net);
        bool others_poll = polls != net->standby_polls;
        net->standby_polls = polls;
        if (others_poll) {
            if (timeout_ns < 0 || timeout_ns > standby_ns)
                timeout_ns = standby_ns;
            base_futex_wait(word, ticket, timeout_ns, true);
            net_sleep_cancel(net);
            return;
        }
    }
    uint32_t none = 0;
    if (net->fabric && atomic_compare_exchange_strong(&net->poll_leader, &none, 1)) {
        sleep_polling(net, ticket, timeout_ns);
        atomic_store(&net->poll_leader, 0);
        net_sleep_cancel(net);
        /* The next leader must come from those who still sleep. */
        if (atomic_load(&bell->sleepers) > 0) {
            atomic_fetch_add(&bell->count, 1);
            base_futex_wake(word, INT32_MAX, true);
        }
        return;
    }
    base_futex_wait(word, ticket, timeout_ns, true);
    net_sleep_cancel(net);
}
