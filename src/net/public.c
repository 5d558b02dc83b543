/* SPDX-License-Identifier: Apache-2.0 */
/* hdl_put, hdl_signal, hdl_flush, hdl_window_wait: loops around net for user threads. */
#include "net/internal.h"

#include <sched.h>

/* A thread that waits spins, then yields, then sleeps. */
struct waiter {
    struct net *net;
    int64_t started;
    int64_t deadline;
    unsigned rounds;
};

static void waiter_begin(struct waiter *waiter, struct net *net, int64_t timeout_ns)
{
    waiter->net = net;
    waiter->started = base_now_ns();
    waiter->deadline = base_deadline_ns(waiter->started, timeout_ns);
    waiter->rounds = 0;
}

static bool waiter_expired(const struct waiter *waiter)
{
    return waiter->deadline != BASE_FOREVER && base_now_ns() >= waiter->deadline;
}

/* Between two looks at the condition: true if it is time to sleep. */
static bool waiter_step(struct waiter *waiter)
{
    const struct base_config *config = &waiter->net->env->config;
    if (net_poll(waiter->net) > 0) {
        waiter->started = base_now_ns();
        return false;
    }
    if (++waiter->rounds % 16) {
        base_cpu_relax();
        return false;
    }
    int64_t waited = base_now_ns() - waiter->started;
    if (waited > config->spin)
        sched_yield();
    return waited > config->spin + config->yield;
}

void hdl_window_destroy(struct hdl_window *window)
{
    net_window_destroy(window);
}

void *hdl_window_data(const struct hdl_window *window)
{
    return window ? net_window_data(window) : NULL;
}

size_t hdl_window_bytes(const struct hdl_window *window)
{
    return window ? net_window_bytes(window) : 0;
}

enum hdl_status hdl_window_pack(const struct hdl_window *window, void *handle,
                                size_t *length)
{
    if (!window || !handle || !length)
        return base_fail(HDL_EINVAL, "window, handle or length is NULL");
    return net_window_pack(window, handle, length);
}

void hdl_window_close(struct hdl_peer_window *peer)
{
    net_remote_close(peer);
}

void *hdl_peer_window_map(const struct hdl_peer_window *peer)
{
    return peer ? net_remote_map(peer) : NULL;
}

enum hdl_status hdl_put(struct hdl_peer_window *peer, size_t offset, const void *src,
                        size_t bytes, size_t signal_offset, uint64_t value,
                        enum hdl_signal_op signal_op)
{
    if (!peer || (!src && bytes))
        return base_fail(HDL_EINVAL, "put with a NULL %s", peer ? "source" : "peer");
    if (signal_op != HDL_SIGNAL_SET && signal_op != HDL_SIGNAL_ADD)
        return base_fail(HDL_EINVAL, "signal operator %d", (int)signal_op);
    struct waiter waiter;
    waiter_begin(&waiter, peer->net, -1);
    for (;;) {
        enum hdl_status status =
            net_put(peer, offset, src, bytes, signal_offset, value, signal_op);
        if (status != HDL_PENDING)
            return status;
        /* No room: what was sent must be acknowledged first; that shows as an event. */
        if (waiter_step(&waiter)) {
            uint32_t ticket = net_sleep_begin(peer->net);
            net_sleep(peer->net, ticket, BASE_NS_PER_MS, 0);
        }
    }
}

enum hdl_status hdl_signal(struct hdl_peer_window *peer, size_t signal_offset,
                           uint64_t value, enum hdl_signal_op signal_op)
{
    if (signal_offset == NET_NO_SIGNAL)
        return base_fail(HDL_EINVAL, "signal without an offset");
    return hdl_put(peer, 0, NULL, 0, signal_offset, value, signal_op);
}

enum hdl_status net_flush(struct hdl_peer_window *remote, int64_t timeout_ns)
{
    struct waiter waiter;
    waiter_begin(&waiter, remote->net, timeout_ns);
    uint64_t target = net_put_count(remote);
    while (net_put_done(remote) < target) {
        enum hdl_status status = net_remote_check(remote);
        if (status != HDL_OK) {
            if (remote->ops->drop)
                remote->ops->drop(remote);
            return status;
        }
        if (waiter_expired(&waiter))
            return base_fail(HDL_ETIMEDOUT, "flush: %llu of %llu puts have left",
                             (unsigned long long)net_put_done(remote),
                             (unsigned long long)target);
        if (waiter_step(&waiter)) {
            uint32_t ticket = net_sleep_begin(remote->net);
            net_sleep(remote->net, ticket, BASE_NS_PER_MS, 0);
        }
    }
    return HDL_OK;
}

enum hdl_status hdl_flush(struct hdl_peer_window *peer, int64_t timeout_us)
{
    if (!peer)
        return base_fail(HDL_EINVAL, "flush with a NULL peer");
    return net_flush(peer, base_timeout_ns(timeout_us));
}

static bool word_reached(const struct hdl_window *window, size_t offset, uint64_t value)
{
    _Atomic uint64_t *word = (_Atomic uint64_t *)(void *)(window->data + offset);
    return atomic_load_explicit(word, memory_order_acquire) >= value;
}

/* Sleeps unless the word is there already; looks again between saying so and sleeping. */
static void sleep_for_word(const struct hdl_window *window, size_t offset, uint64_t value,
                           const struct hdl_peer_window *from, int64_t deadline)
{
    struct net *net = window->net;
    uint32_t ticket = net_sleep_begin(net);
    if (word_reached(window, offset, value) ||
        (from && net_remote_check(from) != HDL_OK)) {
        net_sleep_cancel(net);
        return;
    }
    int64_t timeout = atomic_load(&net->alone) ? BASE_NS_PER_S : -1;
    if (deadline != BASE_FOREVER) {
        int64_t left = deadline - base_now_ns();
        left = left > 0 ? left : 0;
        timeout = timeout >= 0 && timeout < left ? timeout : left;
    }
    net_sleep(net, ticket, timeout, 0);
}

enum hdl_status hdl_window_wait(struct hdl_window *window, size_t offset, uint64_t value,
                                const struct hdl_peer_window *from, int64_t timeout_us)
{
    if (!window)
        return base_fail(HDL_EINVAL, "wait on a NULL window");
    if (window->of_device)
        return base_fail(HDL_ENOTSUP,
                         "a window of device memory is read by kernels only");
    if (offset % 8 != 0 || window->bytes < 8 || offset > window->bytes - 8)
        return base_fail(HDL_EINVAL, "wait at %zu of a window of %zu bytes", offset,
                         window->bytes);
    struct waiter waiter;
    waiter_begin(&waiter, window->net, base_timeout_ns(timeout_us));
    while (!word_reached(window, offset, value)) {
        enum hdl_status status = from ? net_remote_check(from) : HDL_OK;
        if (status != HDL_OK && !word_reached(window, offset, value))
            return status;
        bool sleepy = waiter_step(&waiter);
        if (word_reached(window, offset, value))
            break;
        if (waiter_expired(&waiter))
            return base_fail(HDL_ETIMEDOUT, "word at %zu is below %llu after %lld us",
                             offset, (unsigned long long)value, (long long)timeout_us);
        if (sleepy)
            sleep_for_word(window, offset, value, from, waiter.deadline);
    }
    return HDL_OK;
}
