/* SPDX-License-Identifier: Apache-2.0 */
/* The context: builds the layers on top of each other, and the calls that take a context.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/env.h"
#include "base/log.h"
#include "base/option.h"
#include "base/status.h"
#include "group/engine.h"
#include "group/group.h"
#include "heddle.h"
#include "host/host.h"
#include "net/net.h"

#define CONTEXT_MAGIC UINT64_C(0x747865746e6f63)

struct hdl_context {
    uint64_t magic;
    struct base_env env;
    void (*log)(void *user, enum hdl_log_level level, const char *line);
    void *log_user;
    struct host *host;
    struct net *net;
    struct group_engine *engine;
};

static void log_to_user(void *user, enum base_log_level level, const char *line)
{
    struct hdl_context *context = user;
    context->log(context->log_user, (enum hdl_log_level)(level + 1), line);
}

static enum hdl_status check_context_opts(const struct hdl_context_opts *opts)
{
    if (opts->num_ranks < 0 ||
        (opts->num_ranks > 0 && (opts->rank < 0 || opts->rank >= opts->num_ranks)))
        return base_fail(HDL_EINVAL, "rank %d of a job of %d ranks", opts->rank,
                         opts->num_ranks);
    if (opts->timeout_us < 0 || opts->dead_after_us < 0 || opts->grace_us < 0 ||
        opts->link_timeout_us < 0)
        return base_fail(
            HDL_EINVAL,
            "negative time: timeout_us %lld dead_after_us %lld grace_us %lld "
            "link_timeout_us %lld",
            (long long)opts->timeout_us, (long long)opts->dead_after_us,
            (long long)opts->grace_us, (long long)opts->link_timeout_us);
    if (opts->log_level < HDL_LOG_DEFAULT || opts->log_level > HDL_LOG_DEBUG)
        return base_fail(HDL_EINVAL, "log_level %d", (int)opts->log_level);
    if (opts->log_fd < 0)
        return base_fail(HDL_EINVAL, "log_fd %d", opts->log_fd);
    if (opts->allocator && (!opts->allocator->alloc || !opts->allocator->release))
        return base_fail(HDL_EINVAL, "an allocator needs both alloc and release");
    if (opts->bootstrap && (!opts->bootstrap->put || !opts->bootstrap->get))
        return base_fail(HDL_EINVAL, "a bootstrap needs both put and get");
    return HDL_OK;
}

/* Knobs from the environment; what the options say wins. */
static enum hdl_status init_env(struct base_env *env, struct hdl_context *context,
                                const struct hdl_context_opts *opts)
{
    base_env_init(env);
    enum hdl_status status = base_config_load(&env->config);
    if (status == HDL_OK && opts->transport)
        status = base_config_set(&env->config, "HEDDLE_TRANSPORT", opts->transport);
    if (status == HDL_OK && opts->interface)
        status = base_config_set(&env->config, "HEDDLE_INTERFACE", opts->interface);
    if (status != HDL_OK)
        return status;
    env->log_level = opts->log_level ? (int)opts->log_level - 1 : env->config.log;
    if (opts->num_ranks > 0)
        env->log_rank = opts->rank;
    if (opts->log_fd > 0)
        env->log_fd = opts->log_fd;
    if (opts->log) {
        env->log = log_to_user;
        env->log_user = context;
    }
    if (opts->allocator) {
        env->alloc = opts->allocator->alloc;
        env->release = opts->allocator->release;
        env->alloc_user = opts->allocator->user;
    }
    return HDL_OK;
}

static enum hdl_status create_host(struct hdl_context *context,
                                   const struct hdl_context_opts *opts)
{
    const struct host_opts host = {
        .rank = opts->rank,
        .num_ranks = opts->num_ranks,
        .coordinator = opts->coordinator,
        .bootstrap = opts->bootstrap,
        .shared_dir = opts->shared_dir,
        .token = opts->token,
        .interface = opts->interface,
        .timeout_ns = base_timeout_ns(opts->timeout_us),
        .dead_after_ns = base_timeout_ns(opts->dead_after_us),
        .grace_ns = base_timeout_ns(opts->grace_us),
        .link_timeout_ns = base_timeout_ns(opts->link_timeout_us),
        .standalone = opts->standalone,
    };
    enum hdl_status status = host_create(&context->env, &host, &context->host);
    if (status == HDL_OK)
        context->env.log_rank = host_rank(context->host);
    return status;
}

static enum hdl_status exchange_fetch(void *user, const char *socket_name, uint64_t id,
                                      uint64_t key, int64_t timeout_ns, int *fd)
{
    return host_fetch_fd(user, socket_name, id, key, timeout_ns, fd);
}

static enum hdl_status exchange_offer(void *user, uint64_t id, uint64_t key, int fd)
{
    return host_offer_fd(user, id, key, fd);
}

static void exchange_withdraw(void *user, uint64_t id)
{
    host_withdraw_fd(user, id);
}

static enum hdl_status parse_transport(const char *text, enum net_transport *transport)
{
    static const char *const names[] = {
        [NET_AUTO] = "auto", [NET_SHM] = "shm", [NET_FABRIC] = "fabric"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (strcmp(text, names[i]) == 0) {
            *transport = (enum net_transport)i;
            return HDL_OK;
        }
    return base_fail(HDL_EINVAL,
                     "transport \"%s\" (HEDDLE_TRANSPORT or the context's option) is "
                     "none of auto, shm, fabric",
                     text);
}

static uint64_t exchange_rank_epoch(void *user)
{
    return host_rank_epoch(user);
}

static void rank_ended(void *net, int32_t rank, uint64_t rank_epoch)
{
    net_rank_lost(net, rank, rank_epoch);
}

static void is_alone(void *net, bool alone)
{
    net_set_alone(net, alone);
}

static void destroy_net(struct hdl_context *context)
{
    host_set_job_hooks(context->host, NULL);
    net_destroy(context->net);
}

static enum hdl_status create_net(struct hdl_context *context,
                                  enum net_transport transport)
{
    const struct host_identity *self = host_identity(context->host);
    struct net_exchange exchange = {
        .user = context->host,
        .pid = self->pid,
        .rank = host_rank(context->host),
        .rank_epoch = exchange_rank_epoch,
        .fetch = exchange_fetch,
        .offer = exchange_offer,
        .withdraw = exchange_withdraw,
    };
    memcpy(exchange.host_id, self->host_id, sizeof(exchange.host_id));
    memcpy(exchange.socket_name, self->socket_name, sizeof(exchange.socket_name));
    memcpy(exchange.interface_address, self->address, sizeof(exchange.interface_address));
    const struct net_opts opts = {
        .transport = transport,
        .single_host = host_single_host(context->host),
    };
    enum hdl_status status = net_create(&context->env, &exchange, &opts, &context->net);
    const struct host_job_hooks hooks = {
        .user = context->net, .ended = rank_ended, .alone = is_alone};
    if (status == HDL_OK)
        host_set_job_hooks(context->host, &hooks);
    return status;
}

enum hdl_status hdl_context_create(const struct hdl_context_opts *given,
                                   struct hdl_context **context)
{
    struct hdl_context_opts opts;
    struct base_env env;
    enum net_transport transport = NET_AUTO;
    enum hdl_status status =
        base_option_copy("hdl_context_opts", given, &opts, sizeof(opts));
    if (status == HDL_OK && !context)
        status = base_fail(HDL_EINVAL, "context is NULL");
    if (status == HDL_OK)
        status = check_context_opts(&opts);
    if (status == HDL_OK)
        status = init_env(&env, NULL, &opts);
    if (status == HDL_OK)
        status = parse_transport(env.config.transport.text, &transport);
    if (status != HDL_OK)
        return status;

    struct hdl_context *made = base_alloc(&env, 1, sizeof(*made));
    if (!made)
        return HDL_ENOMEM;
    made->env = env;
    made->log = opts.log;
    made->log_user = opts.log_user;
    if (opts.log)
        made->env.log_user = made;
    status = create_host(made, &opts);
    if (status != HDL_OK)
        goto free_context;
    status = create_net(made, transport);
    if (status != HDL_OK)
        goto destroy_host;
    status = group_engine_create(&made->env, made->host, made->net, &made->engine);
    if (status != HDL_OK)
        goto no_engine;
    made->magic = CONTEXT_MAGIC;
    *context = made;
    return HDL_OK;

no_engine:
    destroy_net(made);
destroy_host:
    host_destroy(made->host);
free_context:
    base_free(&env, made);
    return status;
}

/* HDL_OK for a live context of this process. */
static enum hdl_status check_context(const struct hdl_context *context)
{
    if (!context || context->magic != CONTEXT_MAGIC)
        return base_fail(HDL_EINVAL, "%s is not a context",
                         context ? "the argument" : "NULL");
    return host_check(context->host);
}

void hdl_context_destroy(struct hdl_context *context)
{
    if (!context || context->magic != CONTEXT_MAGIC)
        return;
    if (host_check(context->host) != HDL_OK)
        return; /* a forked child owns none of it */
    context->magic = 0;
    group_destroy_all(context->engine);
    group_engine_destroy(context->engine);
    destroy_net(context);
    host_destroy(context->host);
    struct base_env env = context->env;
    base_free(&env, context);
}

static enum hdl_status write_all(int fd, const char *text, size_t length)
{
    while (length > 0) {
        ssize_t done = write(fd, text, length);
        if (done < 0 && errno != EINTR)
            return base_fail_errno(HDL_ESYSTEM, errno, "cannot write to descriptor %d",
                                   fd);
        text += done > 0 ? done : 0;
        length -= done > 0 ? (size_t)done : 0;
    }
    return HDL_OK;
}

enum hdl_status hdl_context_dump(struct hdl_context *context, int fd)
{
    enum { ROOM = 128 * 1024 };
    enum hdl_status status = check_context(context);
    if (status != HDL_OK)
        return status;
    char *text = base_alloc(&context->env, 1, ROOM);
    if (!text)
        return HDL_ENOMEM;
    size_t length = host_describe(context->host, text, ROOM);
    length += group_engine_describe(context->engine, text + length, ROOM - length);
    status = write_all(fd, text, length);
    base_free(&context->env, text);
    return status;
}

enum hdl_status hdl_group_create(struct hdl_context *context,
                                 const struct hdl_group_opts *opts,
                                 struct hdl_group **group)
{
    enum hdl_status status = check_context(context);
    if (status == HDL_OK && !group)
        status = base_fail(HDL_EINVAL, "group is NULL");
    return status == HDL_OK ? group_create(context->engine, opts, group) : status;
}

enum hdl_status hdl_window_create(struct hdl_context *context, size_t bytes,
                                  enum hdl_window_kind kind, struct hdl_window **window)
{
    enum hdl_status status = check_context(context);
    if (status == HDL_OK && kind != HDL_WINDOW_HOST)
        status = base_fail(HDL_ENOTSUP, "window kind %d", (int)kind);
    if (status == HDL_OK && (bytes == 0 || !window))
        status = base_fail(HDL_EINVAL, bytes ? "window is NULL" : "a window of 0 bytes");
    return status == HDL_OK ? net_window_create(context->net, bytes, window) : status;
}

enum hdl_status hdl_window_adopt(struct hdl_context *context, void *memory, size_t bytes,
                                 struct hdl_window **window)
{
    enum hdl_status status = check_context(context);
    if (status == HDL_OK && (!memory || bytes == 0 || !window))
        status = base_fail(HDL_EINVAL, !memory   ? "memory is NULL"
                                       : !window ? "window is NULL"
                                                 : "a window of 0 bytes");
    return status == HDL_OK ? net_window_adopt(context->net, memory, bytes, window)
                            : status;
}

enum hdl_status hdl_window_open(struct hdl_context *context, const void *handle,
                                size_t length, struct hdl_peer_window **peer)
{
    enum hdl_status status = check_context(context);
    if (status == HDL_OK && (!handle || !peer))
        status = base_fail(HDL_EINVAL, "%s is NULL", handle ? "peer" : "handle");
    if (status != HDL_OK)
        return status;
    return net_remote_open(context->net, handle, length, NET_READ | NET_WRITE, peer);
}

const char *hdl_status_name(enum hdl_status status)
{
    return base_status_name(status);
}

const char *hdl_status_text(enum hdl_status status)
{
    return base_status_text(status);
}

const char *hdl_error_detail(void)
{
    return base_detail();
}
size_t hdl_dtype_size(enum hdl_dtype dtype)
{
    return base_dtype_size(dtype);
}

const char *hdl_dtype_name(enum hdl_dtype dtype)
{
    return base_dtype_name(dtype);
}

const char *hdl_redop_name(enum hdl_redop redop)
{
    return base_redop_name(redop);
}
