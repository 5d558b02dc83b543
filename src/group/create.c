/* SPDX-License-Identifier: Apache-2.0 */
/* Creating, leaving and aborting a group: registration, peers' segments, parameters. */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/option.h"
#include "ctl/bytes.h"
#include "ctl/event.h"
#include "group/group.h"
#include "group/messaged.h"
#include "group/p2p.h"
#include "group/table.h"
#include "group/wait.h"
#include "host/host.h"
#include "net/net.h"

enum { NUM_PARAMS = 8, VALUE_BYTES = 32 };

#define CREATE_NS (60 * BASE_NS_PER_S)
#define LEAVE_NS (2 * BASE_NS_PER_S)

/* Creation parameters as the ranks compare them. */
struct params {
    struct ctl_param list[NUM_PARAMS];
    char value[NUM_PARAMS][VALUE_BYTES];
    uint32_t count;
};

static void add_param(struct params *params, const char *name, unsigned long long value)
{
    char *text = params->value[params->count];
    snprintf(text, VALUE_BYTES, "%llu", value);
    params->list[params->count++] = (struct ctl_param){.name = name, .value = text};
}

static void fill_params(struct params *params, const struct hdl_group_opts *opts,
                        const struct hdl_group *group)
{
    params->count = 0;
    add_param(params, "window_chunks", group->shape.window_chunks);
    add_param(params, "chunk_bytes", group->shape.chunk_bytes);
    add_param(params, "completion_local", opts->completion_local);
    add_param(params, "manual_deactivate", opts->manual_deactivate);
    add_param(params, "manual_sync", opts->manual_sync);
    add_param(params, "op_timeout_us", (unsigned long long)opts->op_timeout_us);
    const struct base_config *config = &group->engine->env->config;
    params->list[params->count++] =
        (struct ctl_param){.name = "algorithm", .value = config->algorithm.text};
    params->list[params->count++] =
        (struct ctl_param){.name = "transport", .value = config->transport.text};
}

/* Fills defaults; HDL_EINVAL with the offending values. */
static enum hdl_status complete_opts(struct group_engine *engine,
                                     struct hdl_group_opts *opts)
{
    if (opts->num_ranks == 0) {
        if (opts->ranks)
            return base_fail(HDL_EINVAL, "ranks are given, num_ranks is 0");
        opts->num_ranks = host_num_ranks(engine->host);
        opts->rank = host_rank(engine->host);
    }
    if (opts->capacity == 0)
        opts->capacity = opts->num_ranks;
    if (opts->num_ranks < 0 || opts->capacity < opts->num_ranks)
        return base_fail(HDL_EINVAL, "num_ranks %d, capacity %d", opts->num_ranks,
                         opts->capacity);
    if ((uint32_t)opts->capacity > CTL_CAPACITY_MAX)
        return base_fail(HDL_EINVAL, "capacity %d exceeds %d", opts->capacity,
                         CTL_CAPACITY_MAX);
    if (opts->rank < 0 || opts->rank >= opts->capacity)
        return base_fail(HDL_EINVAL, "rank %d is not in 0..%d", opts->rank,
                         opts->capacity - 1);
    if (opts->timeout_us < 0 || opts->op_timeout_us < 0)
        return base_fail(HDL_EINVAL, "timeout_us %lld, op_timeout_us %lld",
                         (long long)opts->timeout_us, (long long)opts->op_timeout_us);
    if (opts->num_ranks == 0)
        return base_fail(HDL_EINVAL, "no founders");
    if (opts->manual_deactivate && !opts->manual_sync)
        return base_fail(HDL_EINVAL,
                         "manual_deactivate without manual_sync: a view that nobody "
                         "changes cannot be waited for");
    return HDL_OK;
}

static enum hdl_status shape_of(struct group_engine *engine,
                                const struct hdl_group_opts *opts,
                                struct group_shape *shape)
{
    const struct base_config *config = &engine->env->config;
    uint32_t chunks = opts->window_chunks;
    size_t bytes = opts->chunk_bytes;
    if (chunks == 0)
        chunks = config->slots > UINT32_MAX ? UINT32_MAX : (uint32_t)config->slots;
    if (bytes == 0)
        bytes = config->slot_size;
    size_t messaged = 0;
    if (net_fabric_provider(engine->net))
        messaged = group_messaged_bytes((uint32_t)opts->capacity, chunks, bytes);
    return group_shape_init(shape, (uint32_t)opts->capacity, chunks, bytes, messaged);
}

static const struct ctl_bytes *endpoint_of(const struct ctl_view *view, uint32_t rank)
{
    return view->slots[rank].rank_epoch ? view->slots[rank].endpoint : NULL;
}

static bool is_near(struct hdl_group *group, const struct ctl_bytes *handle)
{
    return net_handle_mapped(group->engine->net, handle->data, handle->size);
}

/* A group is mapped if all its pairs are: all on one host, which every rank finds alike.
 */
static bool all_near(struct hdl_group *group, const struct ctl_view *view)
{
    for (uint32_t r = 0; r < group->capacity; r++)
        if (r != group->rank && endpoint_of(view, r) &&
            !is_near(group, endpoint_of(view, r)))
            return false;
    return true;
}

/* Mapped groups only read their peers; in messaged ones they put to each other. */
static enum hdl_status open_peer(struct hdl_group *group, uint32_t rank,
                                 const struct ctl_bytes *handle, unsigned access)
{
    struct group_peer *peer = &group->peer[rank];
    enum hdl_status status =
        group_open_memory(group, rank, handle->data, handle->size, access, &peer->remote);
    if (status == HDL_OK && is_near(group, handle))
        status = group_peer_map(group, rank, net_remote_map(peer->remote));
    return status;
}

static enum hdl_status open_peers(struct hdl_group *group, const struct ctl_view *view,
                                  bool mapped)
{
    enum hdl_status status = HDL_OK;
    for (uint32_t r = 0; status == HDL_OK && r < group->capacity; r++) {
        group->peer[r].rank_epoch = view->slots[r].rank_epoch;
        group_admit_writer(group, r, group->peer[r].rank_epoch);
        if (r != group->rank && endpoint_of(view, r))
            status = open_peer(group, r, endpoint_of(view, r),
                               mapped ? NET_READ : NET_READ | NET_WRITE);
    }
    return status;
}

/* Those of ranks that joined belong to the views. */
static void close_peers(struct hdl_group *group)
{
    for (uint32_t r = 0; group->peer && r < group->capacity; r++)
        if (!group->peer[r].reach)
            net_remote_close(group->peer[r].remote);
}

static enum hdl_status register_group(struct hdl_group *group,
                                      const struct hdl_group_opts *opts,
                                      struct ctl_view **view)
{
    char handle[NET_HANDLE_BYTES];
    size_t length = sizeof(handle);
    struct params params;
    enum hdl_status status = net_window_pack(group->window, handle, &length);
    if (status != HDL_OK)
        return status;
    fill_params(&params, opts, group);
    struct host_group_opts host_opts = {
        .name = group->name,
        .rank = group->rank,
        .num_founders = (uint32_t)opts->num_ranks,
        .capacity = group->capacity,
        .ranks = opts->ranks,
        .params = params.list,
        .num_params = params.count,
        .blob = handle,
        .blob_bytes = length,
        .auto_deactivate = !opts->manual_deactivate,
        .auto_sync = !opts->manual_sync,
        .join = opts->join,
        .found_only = opts->found_only,
        .timeout_ns = opts->timeout_us ? base_timeout_ns(opts->timeout_us) : CREATE_NS,
        .hooks = {.user = group,
                  .freeze = group_freeze,
                  .commit = group_commit,
                  .watch_done = group_watch_done,
                  .attach = group_attach,
                  .closed = group_closed,
                  .fail = group_fail}};
    return host_group_register(group->engine->host, &host_opts, &group->host_group, view);
}

/* Connects to the peers and waits until everybody has. */
static enum hdl_status connect_group(struct hdl_group *group, const struct ctl_view *view)
{
    /* With room for more and another way than shared memory, newcomers may be anywhere.
     */
    bool grows = group->capacity > (uint32_t)group->opts.num_ranks;
    bool mapped =
        all_near(group, view) && !(grows && net_fabric_provider(group->engine->net));
    enum hdl_status status = open_peers(group, view, mapped);
    if (status == HDL_OK)
        status = group_open(group, mapped ? &group_path_mapped : &group_path_messaged);
    char text[BASE_DETAIL_BYTES];
    snprintf(text, sizeof(text), "%s", base_detail());
    enum hdl_status all =
        host_group_connected(group->host_group, status, status == HDL_OK ? "" : text);
    /* What all are told says more: a peer may be gone because it was told before. */
    return all != HDL_OK || status == HDL_OK ? all : base_fail(status, "%s", text);
}

/* Until registration has given the first view, one without members stands in: the hooks
 * may be called as soon as registration begins. A joiner is alone in it. */
static struct ctl_view *view_before(struct group_engine *engine,
                                    const struct hdl_group_opts *opts)
{
    struct ctl_view *view = ctl_view_new(engine->env, (uint32_t)opts->capacity, 0);
    if (view && opts->join) {
        view->slots[opts->rank] = (struct ctl_slot){
            .rank_epoch = ctl_rank_epoch((uint32_t)host_rank(engine->host), 1),
            .last = CTL_X_FOREVER,
            .active = true};
        ctl_view_count(view);
    }
    return view;
}

static enum hdl_status init_group(struct hdl_group *group, struct group_engine *engine,
                                  const struct hdl_group_opts *opts,
                                  const struct group_shape *shape)
{
    struct ctl_view *view = view_before(engine, opts);
    if (!view)
        return HDL_ENOMEM;
    enum hdl_status status = group_init(group, engine, shape, (uint32_t)opts->rank,
                                        net_window_data(group->window), view);
    ctl_view_unref(view);
    if (status != HDL_OK)
        return status;
    net_window_set_writers(group->window, group->writers, group->capacity);
    group->completion_local = opts->completion_local;
    group->manual_deactivate = opts->manual_deactivate;
    group->manual_sync = opts->manual_sync;
    if (opts->op_timeout_us)
        group->op_timeout_ns = base_timeout_ns(opts->op_timeout_us);
    return HDL_OK;
}

static void close_host_group(struct hdl_group *group)
{
    group_attach_stop(group);
    host_group_close(group->host_group);
    group->host_group = NULL;
}

/* Alone until hdl_group_join. */
static enum hdl_status enter_alone(struct hdl_group *group)
{
    enum hdl_status status = group_isolate(group);
    if (status == HDL_OK)
        status = group_open(group, &group_path_isolated);
    return status;
}

static enum hdl_status join_group(struct hdl_group *group,
                                  const struct hdl_group_opts *opts)
{
    struct ctl_view *view = NULL;
    enum hdl_status status = opts->join ? enter_alone(group) : HDL_OK;
    if (status == HDL_OK)
        status = register_group(group, opts, &view);
    if (status != HDL_OK)
        return status;
    if (opts->join)
        return HDL_OK;
    status = group_first_view(group, view);
    if (status == HDL_OK)
        status = connect_group(group, view);
    if (status != HDL_OK) {
        char text[BASE_DETAIL_BYTES];
        snprintf(text, sizeof(text), "%s", base_detail());
        close_host_group(group);
        (void)base_fail(status, "%s", text);
    }
    return status;
}

static void take_apart(struct hdl_group *group)
{
    group_stop(group);
    close_peers(group);
    net_window_destroy(group->window);
    group->window = NULL;
    group_free_parts(group);
}

static void free_group(struct hdl_group *group)
{
    struct base_env *env = group->engine->env;
    base_free(env, group->name);
    base_free(env, (void *)(uintptr_t)group->opts.ranks);
    base_free_aligned(env, group);
}

/* The options outlive the call. */
static enum hdl_status keep_opts(struct hdl_group *group,
                                 const struct hdl_group_opts *opts)
{
    struct base_env *env = group->engine->env;
    group->opts = *opts;
    group->opts.ranks = NULL;
    group->name = base_strdup(env, opts->name ? opts->name : "world");
    group->opts.name = group->name;
    if (!group->name || !opts->ranks)
        return group->name ? HDL_OK : HDL_ENOMEM;
    size_t n = (size_t)opts->num_ranks;
    int32_t *ranks = base_alloc(env, n, sizeof(*ranks));
    if (!ranks)
        return HDL_ENOMEM;
    memcpy(ranks, opts->ranks, n * sizeof(*ranks));
    group->opts.ranks = ranks;
    return HDL_OK;
}

/* Window, registration, peers. */
static enum hdl_status build(struct hdl_group *group, const struct group_shape *shape)
{
    struct group_engine *engine = group->engine;
    enum hdl_status status = net_window_create(engine->net, shape->bytes, &group->window);
    if (status != HDL_OK)
        return status;
    status = init_group(group, engine, &group->opts, shape);
    if (status != HDL_OK)
        goto close_window;
    status = join_group(group, &group->opts);
    if (status != HDL_OK)
        goto close_group;
    return HDL_OK;

close_group:
    take_apart(group);
close_window:
    net_window_destroy(group->window);
    group->window = NULL;
    return status;
}

enum hdl_status group_create(struct group_engine *engine,
                             const struct hdl_group_opts *given, struct hdl_group **out)
{
    struct hdl_group_opts opts;
    struct group_shape shape;
    enum hdl_status status =
        base_option_copy("hdl_group_opts", given, &opts, sizeof(opts));
    if (status == HDL_OK)
        status = complete_opts(engine, &opts);
    if (status == HDL_OK)
        status = group_table_check(engine->env->config.algorithm.text);
    if (status == HDL_OK)
        status = shape_of(engine, &opts, &shape);
    if (status != HDL_OK)
        return status;
    struct hdl_group *group = base_alloc_aligned(engine->env, 64, 1, sizeof(*group));
    if (!group)
        return HDL_ENOMEM;
    group->engine = engine;
    status = keep_opts(group, &opts);
    if (status == HDL_OK)
        status = build(group, &shape);
    if (status != HDL_OK) {
        free_group(group);
        return status;
    }
    *out = group;
    return HDL_OK;
}

/* Everything is made anew, but what the application holds: the group and its callback. */
enum hdl_status group_restart(struct hdl_group *group)
{
    struct group_engine *engine = group->engine;
    struct hdl_group_opts opts = group->opts;
    struct group_shape shape = group->shape;
    char *name = group->name;
    group_view_callback *callback = atomic_load(&group->on_view);
    void *user = group->on_view_user;
    int over = atomic_load(&group->over);
    group_worker_cancel(&engine->notifier, &group->notify_job);
    close_host_group(group);
    take_apart(group);
    memset(group, 0, sizeof(*group));
    group->engine = engine;
    group->opts = opts;
    group->opts.join = true;
    group->opts.found_only = false;
    group->name = name;
    group->on_view_user = user;
    atomic_store(&group->on_view, callback);
    enum hdl_status status = build(group, &shape);
    if (status == HDL_OK)
        return HDL_OK;
    /* As before: hdl_group_join may be tried again, hdl_group_destroy works. */
    memset(group, 0, sizeof(*group));
    group->engine = engine;
    group->opts = opts;
    group->name = name;
    group->shape = shape;
    group_job_init(&group->attach_job, group_attach_run);
    group_job_init(&group->notify_job, group_notify_run);
    group_job_init(&group->enlarge_job, group_enlarge_run);
    atomic_store(&group->over, over);
    group->magic = GROUP_MAGIC;
    return status;
}

/* ------------------------------------------------------------------------- the end */

static bool all_finished(void *argument)
{
    struct hdl_group *group = argument;
    return atomic_load(&group->over) != HDL_OK ||
           (base_list_empty(&group->queue) && !group_p2p_sends(group) &&
            (!group->path->messaged || messaged_delivered(group)));
}

static bool said_left(void *argument)
{
    return messaged_delivered(argument);
}

/* Who is removed may come back, who has left does not: peers end what they wait for. */
static void say_left(struct hdl_group *group)
{
    atomic_store(&group_segment_head(group->segment)->left, 1);
    if (!group->path->messaged)
        return;
    group_engine_lock(group->engine);
    messaged_say_left(group);
    group_engine_unlock(group->engine);
    (void)group_engine_wait(group->engine, said_left, group, base_now_ns() + LEAVE_NS);
}

void hdl_group_destroy(struct hdl_group *group)
{
    if (!group || group->magic != GROUP_MAGIC)
        return;
    struct group_engine *engine = group->engine;
    if (group_engine_check(engine) != HDL_OK)
        return; /* a forked child owns none of it */
    if (atomic_load(&group->over) == HDL_OK) {
        (void)group_engine_wait(engine, all_finished, group, base_now_ns() + LEAVE_NS);
        if (atomic_load(&group->over) == HDL_OK)
            say_left(group);
        if (atomic_load(&group->over) == HDL_OK)
            host_group_leave(group->host_group, LEAVE_NS);
    }
    group_notify_stop(group);
    close_host_group(group);
    take_apart(group);
    free_group(group);
}

void group_destroy_all(struct group_engine *engine)
{
    while (!base_list_empty(&engine->groups))
        hdl_group_destroy(
            base_container_of(base_list_first(&engine->groups), struct hdl_group, node));
}

enum hdl_status hdl_group_abort(struct hdl_group *group)
{
    if (!group || group->magic != GROUP_MAGIC)
        return base_fail(HDL_EINVAL, "not a group");
    enum hdl_status status = group_engine_check(group->engine);
    if (status != HDL_OK)
        return status;
    group_end(group, HDL_EABORTED, "the group was aborted");
    return HDL_OK;
}
