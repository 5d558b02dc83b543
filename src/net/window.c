/* SPDX-License-Identifier: Apache-2.0 */
/* Own windows: memory that peers may write and read. */
#include "net/internal.h"

#include "base/checked.h"
#include "base/random.h"
#include "net/fabric.h"

#include <string.h>
#include <unistd.h>

enum hdl_status net_window_create(struct net *net, size_t bytes, struct hdl_window **out)
{
    struct hdl_window *window = base_alloc(net->env, 1, sizeof(*window));
    if (!window)
        return HDL_ENOMEM;
    window->net = net;
    window->bytes = bytes;
    void *data;
    enum hdl_status status = base_random_u64(&window->key);
    if (status == HDL_OK)
        status = net_memory_create("heddle-window", bytes, &window->fd, &data);
    if (status != HDL_OK)
        goto free_window;
    window->data = data;
    pthread_mutex_lock(&net->lock);
    window->id = net->next_id++;
    pthread_mutex_unlock(&net->lock);
    if (net->fabric)
        net_fabric_admit(net->fabric, window);
    if (net->exchange.offer) {
        status =
            net->exchange.offer(net->exchange.user, window->id, window->key, window->fd);
        if (status != HDL_OK)
            goto dismiss;
    }
    pthread_mutex_lock(&net->lock);
    base_list_push_back(&net->windows, &window->node);
    pthread_mutex_unlock(&net->lock);
    *out = window;
    return HDL_OK;

dismiss:
    if (net->fabric)
        net_fabric_dismiss(net->fabric, window);
    net_memory_unmap(window->data, bytes);
    close(window->fd);
free_window:
    base_free(net->env, window);
    return status;
}

enum hdl_status net_window_adopt(struct net *net, void *memory, size_t bytes,
                                 struct hdl_window **out)
{
    struct gpu_shared shared;
    enum hdl_status status = gpu_share(memory, bytes, &shared);
    if (status != HDL_OK)
        return status;
    struct hdl_window *window = base_alloc(net->env, 1, sizeof(*window));
    if (!window)
        return HDL_ENOMEM;
    window->net = net;
    window->data = memory;
    window->bytes = bytes;
    window->of_device = true;
    window->shared = shared;
    status = base_random_u64(&window->key);
    if (status != HDL_OK) {
        base_free(net->env, window);
        return status;
    }
    pthread_mutex_lock(&net->lock);
    window->id = net->next_id++;
    base_list_push_back(&net->windows, &window->node);
    pthread_mutex_unlock(&net->lock);
    *out = window;
    return HDL_OK;
}

enum hdl_status net_window_of(struct net *net, const struct net_handle *handle,
                              uint8_t **data)
{
    enum hdl_status status = HDL_EPEER;
    pthread_mutex_lock(&net->lock);
    base_list_each(node, after, &net->windows)
    {
        struct hdl_window *window = base_container_of(node, struct hdl_window, node);
        if (window->id == handle->window_id && window->key == handle->key &&
            window->bytes == handle->bytes && window->of_device == handle->of_device) {
            *data = window->data;
            status = HDL_OK;
            break;
        }
    }
    pthread_mutex_unlock(&net->lock);
    return status ? base_fail(status, "window %llu of this process is gone",
                              (unsigned long long)handle->window_id)
                  : HDL_OK;
}

void net_window_destroy(struct hdl_window *window)
{
    if (!window)
        return;
    struct net *net = window->net;
    pthread_mutex_lock(&net->lock);
    base_list_remove(&window->node);
    pthread_mutex_unlock(&net->lock);
    if (!window->of_device) {
        if (net->exchange.withdraw)
            net->exchange.withdraw(net->exchange.user, window->id);
        if (net->fabric)
            net_fabric_dismiss(net->fabric, window);
        net_memory_unmap(window->data, window->bytes);
        close(window->fd);
    }
    base_free(net->env, window);
}

void net_window_set_writers(struct hdl_window *window, const _Atomic uint64_t *writers,
                            uint32_t num_writers)
{
    window->writers = writers;
    window->num_writers = num_writers;
}

void net_set_writer(struct net *net, _Atomic uint64_t *word, uint64_t writer)
{
    if (net->fabric)
        net_fabric_set_writer(net->fabric, word, writer);
    else
        atomic_store_explicit(word, writer, memory_order_relaxed);
}

enum hdl_status net_expose(struct net *net, void *data, size_t bytes,
                           struct net_exposed *exposed, struct hdl_window **registration)
{
    if (!net->fabric)
        return base_fail(HDL_ENOTSUP, "fabric is off: %s", net->fabric_reason);
    struct hdl_window *window = base_alloc(net->env, 1, sizeof(*window));
    if (!window)
        return HDL_ENOMEM;
    window->data = data;
    window->bytes = bytes;
    enum hdl_status status = base_random_u64(&window->key);
    if (status != HDL_OK) {
        base_free(net->env, window);
        return status;
    }
    pthread_mutex_lock(&net->lock);
    window->id = net->next_id++;
    pthread_mutex_unlock(&net->lock);
    net_fabric_admit(net->fabric, window);
    *exposed =
        (struct net_exposed){.key = window->key, .window = window->id, .bytes = bytes};
    *registration = window;
    return HDL_OK;
}

void net_unexpose(struct net *net, struct hdl_window *registration)
{
    if (!registration)
        return;
    net_fabric_dismiss(net->fabric, registration);
    base_free(net->env, registration);
}

void *net_window_data(const struct hdl_window *window)
{
    return window->data;
}

size_t net_window_bytes(const struct hdl_window *window)
{
    return window->bytes;
}

bool net_window_enlarge(struct hdl_window *window, size_t bytes)
{
    return net_memory_enlarge(window->data, base_min_size(bytes, window->bytes));
}

enum hdl_status net_window_pack(const struct hdl_window *window, void *out,
                                size_t *length)
{
    const struct net *net = window->net;
    struct net_handle handle = {
        .pid = net->exchange.pid,
        .rank = net->exchange.rank,
        .rank_epoch =
            net->exchange.rank_epoch ? net->exchange.rank_epoch(net->exchange.user) : 0,
        .net_id = net->id,
        .window_id = window->id,
        .key = window->key,
        .bytes = window->bytes,
        .bell_id = net->bell_id,
        .bell_key = net->bell_key,
        .has_event = net->event_fd >= 0,
        .of_device = window->of_device,
        .shared = window->shared,
    };
    memcpy(handle.host_id, net->exchange.host_id, sizeof(handle.host_id));
    memcpy(handle.socket_name, net->exchange.socket_name, sizeof(handle.socket_name));
    if (net->fabric && !window->of_device)
        net_fabric_fill_handle(net->fabric, &handle);
    return net_handle_pack(&handle, out, length);
}
