/* SPDX-License-Identifier: Apache-2.0 */
/* The fabric transport of a context: endpoint, registrations, polling, sleeping. */
#include "net/fabric_impl.h"

#include "base/log.h"
#include "base/random.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

static const int64_t linger_ns = 500 * BASE_NS_PER_MS;
/* Where there is no descriptor to wait for that tells everything. */
static const int64_t first_nap_ns = 200 * BASE_NS_PER_US;
static const int64_t last_nap_ns = 10 * BASE_NS_PER_MS;

static bool try_lock(struct net_fabric *fabric)
{
    uint32_t none = 0;
    return atomic_compare_exchange_strong_explicit(
        &fabric->lock, &none, 1, memory_order_acquire, memory_order_relaxed);
}

void fabric_lock(struct net_fabric *fabric)
{
    for (unsigned spins = 0; !try_lock(fabric); spins++) {
        if (spins < 100)
            base_cpu_relax();
        else
            sched_yield();
    }
}

void fabric_unlock(struct net_fabric *fabric)
{
    atomic_store_explicit(&fabric->lock, 0, memory_order_release);
}

const char *fabric_error(const struct net_fabric *fabric, ssize_t error)
{
    return fabric->lib.strerror((int)(error < 0 ? -error : error));
}

/* -------------------------------------------------------------------- open and close */

static enum hdl_status fabric_failed(const struct net_fabric *fabric, const char *what,
                                     int error)
{
    return base_fail(HDL_ESYSTEM, "fabric %s of %s: %s", what,
                     fabric->info->fabric_attr->prov_name, fabric_error(fabric, error));
}

static enum hdl_status open_objects(struct net_fabric *fabric)
{
    struct fi_info *info = fabric->info;
    int error = fabric->lib.fabric(info->fabric_attr, &fabric->fabric, NULL);
    if (error)
        return fabric_failed(fabric, "access", error);
    error = fi_domain(fabric->fabric, info, &fabric->domain, NULL);
    if (error)
        return fabric_failed(fabric, "domain", error);
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE, .count = 64};
    error = fi_av_open(fabric->domain, &av_attr, &fabric->av, NULL);
    if (error)
        return fabric_failed(fabric, "address vector", error);
    struct fi_cq_attr cq_attr = {
        .size = 1024, .format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_FD};
    error = fi_cq_open(fabric->domain, &cq_attr, &fabric->cq, NULL);
    if (error)
        return fabric_failed(fabric, "completion queue", error);
    error = fi_endpoint(fabric->domain, info, &fabric->endpoint, NULL);
    if (error)
        return fabric_failed(fabric, "endpoint", error);
    error = fi_ep_bind(fabric->endpoint, &fabric->av->fid, 0);
    if (!error)
        error = fi_ep_bind(fabric->endpoint, &fabric->cq->fid, FI_SEND | FI_RECV);
    if (!error)
        error = fi_enable(fabric->endpoint);
    if (error)
        return fabric_failed(fabric, "endpoint", error);
    if (fi_control(&fabric->cq->fid, FI_GETWAIT, &fabric->wait_fd) != 0)
        fabric->wait_fd = -1;
    size_t length = sizeof(fabric->address);
    error = fi_getname(&fabric->endpoint->fid, fabric->address, &length);
    if (error)
        return fabric_failed(fabric, "address", error);
    fabric->address_length = (uint32_t)length;
    bool old = FI_VERSION_LT(fabric->lib.version(), FI_VERSION(1, 12));
    fabric->hidden = old || fabric->wait_fd < 0;
    fabric->reads = fabric->env->config.fabric_reads && !old;
    return HDL_OK;
}

static void close_objects(struct net_fabric *fabric)
{
    if (fabric->endpoint)
        fi_close(&fabric->endpoint->fid);
    if (fabric->cq)
        fi_close(&fabric->cq->fid);
    if (fabric->av)
        fi_close(&fabric->av->fid);
    fabric_pool_close(fabric);
    if (fabric->domain)
        fi_close(&fabric->domain->fid);
    if (fabric->fabric)
        fi_close(&fabric->fabric->fid);
}

static void fabric_free(struct net_fabric *fabric)
{
    close_objects(fabric);
    if (fabric->info)
        fabric->lib.freeinfo(fabric->info);
    fabric_pool_free(fabric);
    base_free(fabric->env, fabric);
}

enum hdl_status net_fabric_create(struct net *net, struct net_fabric **out)
{
    struct net_fabric *fabric = base_alloc(net->env, 1, sizeof(*fabric));
    if (!fabric)
        return HDL_ENOMEM;
    fabric->net = net;
    fabric->env = net->env;
    fabric->wait_fd = -1;
    fabric_pool_init(fabric);
    base_list_init(&fabric->links);
    base_list_init(&fabric->busy);
    base_list_init(&fabric->remotes);
    for (size_t i = 0; i < FABRIC_BUCKETS; i++)
        base_list_init(&fabric->windows[i]);
    enum hdl_status status = base_random_u64(&fabric->secret);
    if (status == HDL_OK)
        status = base_random_u64(&fabric->stamp);
    if (status == HDL_OK)
        status = net_fabric_lib_open(net->env, &fabric->lib);
    if (status == HDL_OK)
        status = net_fabric_choose(net->env, &fabric->lib,
                                   net->exchange.interface_address, &fabric->info);
    if (status != HDL_OK)
        goto free_fabric;
    snprintf(fabric->provider, sizeof(fabric->provider), "%s",
             fabric->info->fabric_attr->prov_name);
    snprintf(fabric->transport, sizeof(fabric->transport), "fabric:%s", fabric->provider);
    fabric->eager = net_fabric_takes_long(&fabric->lib, fabric->provider)
                        ? NET_LONG_BYTES
                        : NET_EAGER_BYTES;
    status = open_objects(fabric);
    if (status == HDL_OK)
        status = fabric_pool_create(fabric);
    if (status != HDL_OK)
        goto free_fabric;
    for (size_t i = 0; i < FABRIC_RECEIVES; i++)
        fabric_receive_post(fabric, &fabric->receives[i]);
    base_log_info(net->env, "fabric provider %s address %s", fabric->provider,
                  net->exchange.interface_address);
    *out = fabric;
    return HDL_OK;

free_fabric:
    fabric_free(fabric);
    return status;
}

/* Reads from a peer that has not ended. */
static bool fabric_reads(struct net_fabric *fabric)
{
    base_list_each(node, after, &fabric->links)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, node);
        if (!link->down_since && link->num_arrivals)
            return true;
    }
    return false;
}

/* Is something on its way that a peer may still wait for? */
static bool fabric_unfinished(struct net_fabric *fabric)
{
    base_list_each(node, after, &fabric->links)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, node);
        if (!link->down_since &&
            (link->base != link->tail || link->ack_owed || link->num_offers))
            return true;
    }
    return false;
}

void net_fabric_destroy(struct net_fabric *fabric)
{
    if (!fabric)
        return;
    int64_t deadline = base_now_ns() + linger_ns;
    while ((fabric_unfinished(fabric) || fabric_reads(fabric)) &&
           base_now_ns() < deadline) {
        if (net_fabric_poll(fabric) == 0)
            sched_yield();
    }
    /* The tcp provider of libfabric 1.17 crashes when it closes a connection in which a
     * read's request has not been sent. */
    if (fabric_reads(fabric)) {
        base_log_warn(fabric->env, "fabric stays open: a peer does not answer reads");
        return;
    }
    close_objects(fabric);
    fabric->endpoint = NULL;
    fabric->cq = NULL;
    fabric->av = NULL;
    fabric->domain = NULL;
    fabric->fabric = NULL;
    base_list_each(node, after, &fabric->links)
        fabric_link_free(fabric, base_container_of(node, struct fabric_link, node));
    fabric_free(fabric);
}

const char *net_fabric_provider_name(const struct net_fabric *fabric)
{
    return fabric->provider;
}

const char *net_fabric_transport_name(const struct net_fabric *fabric)
{
    return fabric->transport;
}

struct net_fabric_counters net_fabric_counters(struct net_fabric *fabric)
{
    fabric_lock(fabric);
    struct net_fabric_counters counters = fabric->counters;
    fabric_unlock(fabric);
    return counters;
}

/* -------------------------------------------------------------------------- windows */

static enum hdl_status wish_key(const struct net_fabric *fabric, uint64_t *wish)
{
    *wish = 0;
    if (fabric->info->domain_attr->mr_mode & FI_MR_PROV_KEY)
        return HDL_OK;
    enum hdl_status status = base_random_u64(wish);
    /* Some providers have room for fewer bytes, and keep the top bit for themselves. */
    size_t bits = fabric->info->domain_attr->mr_key_size * 8;
    *wish &= bits >= 64 ? INT64_MAX : (UINT64_C(1) << bits) - 1;
    return status;
}

enum hdl_status fabric_register(struct net_fabric *fabric, void *data, size_t bytes,
                                uint64_t access, struct fid_mr **mr)
{
    uint64_t wish;
    int mode = fabric->info->domain_attr->mr_mode;
    *mr = NULL;
    if (!(access & FI_REMOTE_READ) && !(mode & FI_MR_LOCAL))
        return HDL_OK;
    enum hdl_status status = wish_key(fabric, &wish);
    if (status != HDL_OK)
        return status;
    int error = fi_mr_reg(fabric->domain, data, bytes, access, 0, wish, 0, mr, NULL);
    if (!error && (mode & FI_MR_ENDPOINT)) {
        error = fi_mr_bind(*mr, &fabric->endpoint->fid, 0);
        if (!error)
            error = fi_mr_enable(*mr);
        if (error)
            fi_close(&(*mr)->fid);
    }
    if (!error)
        return HDL_OK;
    *mr = NULL;
    return base_fail(HDL_ESYSTEM, "fabric registration of %zu bytes: %s", bytes,
                     fabric_error(fabric, error));
}

void net_fabric_admit(struct net_fabric *fabric, struct hdl_window *window)
{
    fabric_lock(fabric);
    base_list_push_back(&fabric->windows[window->id % FABRIC_BUCKETS],
                        &window->fabric_node);
    atomic_fetch_add(&fabric->num_windows, 1);
    fabric_unlock(fabric);
}

void net_fabric_dismiss(struct net_fabric *fabric, struct hdl_window *window)
{
    fabric_lock(fabric);
    base_list_remove(&window->fabric_node);
    atomic_fetch_sub(&fabric->num_windows, 1);
    fabric_unlock(fabric);
}

void net_fabric_set_writer(struct net_fabric *fabric, _Atomic uint64_t *word,
                           uint64_t writer)
{
    fabric_lock(fabric);
    atomic_store_explicit(word, writer, memory_order_relaxed);
    fabric_unlock(fabric);
}

void net_fabric_fill_handle(const struct net_fabric *fabric, struct net_handle *handle)
{
    memcpy(handle->provider, fabric->provider, sizeof(handle->provider));
    memcpy(handle->address, fabric->address, fabric->address_length);
    handle->address_length = fabric->address_length;
    handle->secret = fabric->secret;
    handle->long_messages = fabric->eager > NET_EAGER_BYTES;
}

/* -------------------------------------------------------------------------- polling */

static void handle_completion(struct net_fabric *fabric, struct fabric_op *op,
                              size_t length, int error)
{
    if (fabric_test_loses(fabric, op))
        return;
    switch (op->kind) {
    case FABRIC_OP_MESSAGE:
        fabric_message_done(fabric, (struct fabric_message *)op, error);
        break;
    case FABRIC_OP_READ:
        fabric_read_done(fabric, (struct fabric_piece *)op, error);
        break;
    case FABRIC_OP_RECEIVE:
        if (error)
            fabric_receive_post(fabric, (struct fabric_receive *)op);
        else
            fabric_receive_done(fabric, (struct fabric_receive *)op, length);
        break;
    }
}

static void handle_error(struct net_fabric *fabric)
{
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(fabric->cq, &entry, 0) != 1)
        return;
    base_log_debug(fabric->env, "fabric completion error %d (%s) provider error %d",
                   entry.err, fabric_error(fabric, entry.err), entry.prov_errno);
    if (entry.op_context)
        handle_completion(fabric, entry.op_context, 0, entry.err ? entry.err : FI_EIO);
}

static int poll_completions(struct net_fabric *fabric)
{
    struct fi_cq_msg_entry entries[16];
    int events = 0;
    for (int round = 0; round < 4; round++) {
        ssize_t count = fi_cq_read(fabric->cq, entries, 16);
        if (count == -FI_EAVAIL) {
            handle_error(fabric);
            events++;
            continue;
        }
        if (count <= 0)
            break;
        for (ssize_t i = 0; i < count; i++)
            handle_completion(fabric, entries[i].op_context, entries[i].len, 0);
        events += (int)count;
        if (count < 16)
            break;
    }
    return events;
}

static int poll_locked(struct net_fabric *fabric)
{
    int events = poll_completions(fabric);
    if (atomic_load_explicit(&fabric->net->alone, memory_order_relaxed))
        fabric_links_ask(fabric);
    if (base_list_empty(&fabric->busy))
        return events;
    int64_t now = base_now_ns();
    base_list_each(node, after, &fabric->busy)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, busy);
        fabric_link_attend(fabric, link, events == 0, now);
    }
    return events;
}

int net_fabric_poll(struct net_fabric *fabric)
{
    if (!try_lock(fabric))
        return 0;
    uint64_t before = fabric->arrived;
    int events = poll_locked(fabric);
    bool arrived = fabric->arrived != before;
    fabric_unlock(fabric);
    if (events)
        net_wake(fabric->net);
    if (arrived)
        net_ring_host(fabric->net);
    return events;
}

bool net_fabric_in_use(const struct net_fabric *fabric)
{
    return atomic_load_explicit(&fabric->num_windows, memory_order_relaxed) != 0;
}

bool net_fabric_sleep_begin(struct net_fabric *fabric, int *fd, int64_t *timeout_ns)
{
    fabric_lock(fabric);
    uint64_t before = fabric->arrived;
    bool may_sleep = poll_locked(fabric) == 0;
    int64_t due = BASE_FOREVER;
    base_list_each(node, after, &fabric->busy)
    {
        struct fabric_link *link = base_container_of(node, struct fabric_link, busy);
        if (link->taken != link->taken_told)
            fabric_link_send_ack(fabric, link);
        int64_t timer = fabric_link_timer(link);
        due = timer < due ? timer : due;
    }
    struct fid *fids[] = {&fabric->cq->fid};
    if (may_sleep)
        may_sleep = fi_trywait(fabric->fabric, fids, 1) == FI_SUCCESS;
    uint64_t now = fabric->arrived;
    bool arrived = now != before;
    fabric_unlock(fabric);
    *fd = fabric->wait_fd;
    if (fabric->hidden) {
        fabric->nap =
            now == fabric->heard && fabric->nap ? fabric->nap * 2 : first_nap_ns;
        fabric->nap = fabric->nap < last_nap_ns ? fabric->nap : last_nap_ns;
        fabric->heard = now;
        if (*timeout_ns < 0 || fabric->nap < *timeout_ns)
            *timeout_ns = fabric->nap;
    }
    if (due != BASE_FOREVER) {
        int64_t wait = due - base_now_ns();
        wait = wait > 0 ? wait : 0;
        if (*timeout_ns < 0 || wait < *timeout_ns)
            *timeout_ns = wait;
    }
    if (!may_sleep)
        net_wake(fabric->net);
    if (arrived)
        net_ring_host(fabric->net);
    return may_sleep;
}
