/* SPDX-License-Identifier: Apache-2.0 */
/* Watching the other processes of this host: exit and closed socket are evidence at once.
 */
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "host/conn.h"
#include "host/fork.h"
#include "host/internal.h"

/*
 * Two ways to see an end, the first one counts:
 *
 *     unix socket   closed by the kernel when the process ends for whatever reason
 *     pidfd         where the process can be named (same pid namespace)
 *
 * A 'g' on the socket before its end means a proper leave: then neither is evidence.
 */
#define WATCH_RETRY_MS 5
#define WATCH_RETRIES 200

struct host_watch {
    struct base_list node;
    struct host *host;
    uint64_t rank_epoch;
    char name[HOST_SOCKET_NAME_BYTES];
    struct host_conn *conn;
    bool goodbye;
    bool ended;
    bool told;
    int retries;
    uv_timer_t retry;
    int pidfd;
    uv_poll_t poll;
    bool polled;
    int handles; /* still closing */
};

static void watch_frame(struct host_conn *conn, const void *data, size_t size);
static void watch_closed(struct host_conn *conn, enum host_refusal why, int error);

static const struct host_conn_ops watch_ops = {
    .max_frame = 16,
    .frame = watch_frame,
    .closed = watch_closed,
};

void host_set_job_hooks(struct host *host, const struct host_job_hooks *hooks)
{
    (void)pthread_mutex_lock(&host->end_lock);
    host->job_hooks = hooks ? *hooks : (struct host_job_hooks){0};
    if (hooks && host->alone)
        hooks->alone(hooks->user, true);
    (void)pthread_mutex_unlock(&host->end_lock);
}

void host_tell_alone(struct host *host, bool alone)
{
    (void)pthread_mutex_lock(&host->end_lock);
    host->alone = alone;
    if (host->job_hooks.alone)
        host->job_hooks.alone(host->job_hooks.user, alone);
    (void)pthread_mutex_unlock(&host->end_lock);
}

static void report_end(struct host_watch *watch)
{
    struct host *host = watch->host;
    struct host_later *later = host_later_add(host, HOST_LATER_AGENT_EXITED, 0);
    if (later)
        later->rank_epoch = watch->rank_epoch;
    (void)pthread_mutex_lock(&host->end_lock);
    if (host->job_hooks.ended)
        host->job_hooks.ended(host->job_hooks.user,
                              (int32_t)ctl_rank_epoch_rank(watch->rank_epoch),
                              watch->rank_epoch);
    (void)pthread_mutex_unlock(&host->end_lock);
}

static void tell_exit(struct host_watch *watch, _Atomic uint64_t *counter)
{
    /* Without a coordinator nobody else tells the groups that a rank has gone. */
    bool excused = watch->goodbye && watch->host->stage != HOST_LOST;
    watch->ended = true;
    if (excused || watch->told)
        return;
    watch->told = true;
    atomic_fetch_add(counter, 1);
    watch->host->evidence_ns = base_env_now(watch->host->env);
    base_log_info(watch->host->env, "process of rank epoch %llx has ended",
                  (unsigned long long)watch->rank_epoch);
    report_end(watch);
}

void host_watches_coordinator_lost(struct host *host)
{
    base_list_each(node, after, &host->watches)
    {
        struct host_watch *watch = base_container_of(node, struct host_watch, node);
        if (watch->ended)
            tell_exit(watch, &host->num_closes);
    }
}

static void connect_watch(struct host_watch *watch);

static void on_retry(uv_timer_t *timer)
{
    struct host_watch *watch = timer->data;
    connect_watch(watch);
    host_pump(watch->host);
}

static void retry_later(struct host_watch *watch, const char *why)
{
    if (++watch->retries > WATCH_RETRIES) {
        base_log_warn(watch->host->env, "cannot watch rank epoch %llx: %s",
                      (unsigned long long)watch->rank_epoch, why);
        return;
    }
    uv_update_time(&watch->host->loop);
    (void)uv_timer_start(&watch->retry, on_retry, WATCH_RETRY_MS, 0);
}

static void connect_watch(struct host_watch *watch)
{
    int fd = host_local_connect(watch->name);
    if (fd == -ECONNREFUSED) {
        tell_exit(watch, &watch->host->num_closes);
        return;
    }
    if (fd < 0) {
        retry_later(watch, strerror(-fd));
        return;
    }
    if (!host_local_same_user(fd)) {
        host_fork_close(fd);
        base_log_warn(watch->host->env, "cannot watch rank epoch %llx: another user's",
                      (unsigned long long)watch->rank_epoch);
        return;
    }
    if (host_conn_create(watch->host, fd, &watch_ops, HOST_PURPOSE_WATCH, false, watch,
                         &watch->conn) != HDL_OK)
        retry_later(watch, base_detail());
}

static void watch_frame(struct host_conn *conn, const void *data, size_t size)
{
    struct host_watch *watch = conn->owner;
    if (size == 1 && *(const char *)data == HOST_GOODBYE_BYTE)
        watch->goodbye = true;
}

static void watch_closed(struct host_conn *conn, enum host_refusal why, int error)
{
    struct host_watch *watch = conn->owner;
    watch->conn = NULL;
    bool ended = why == HOST_REFUSAL_NONE || why == HOST_REFUSAL_TRUNCATED;
    if (ended && error != ETIMEDOUT && error != ENOMEM)
        tell_exit(watch, &watch->host->num_closes);
    else
        retry_later(watch, error ? strerror(error) : host_refusal_text(why));
}

static void on_exit_seen(uv_poll_t *poll, int status, int events)
{
    struct host_watch *watch = poll->data;
    (void)events;
    (void)uv_poll_stop(poll);
    if (status == 0) {
        if (watch->conn)
            host_conn_read_now(watch->conn); /* perhaps its goodbye is still there */
        tell_exit(watch, &watch->host->num_exits);
    }
    host_pump(watch->host);
}

static void poll_pid(struct host_watch *watch, int32_t pid)
{
    if (pid <= 0 || pid == watch->host->identity.pid)
        return; /* another context of this process: only its socket can end */
    host_fork_hold();
    watch->pidfd = host_fork_keep((int)syscall(SYS_pidfd_open, pid, 0));
    host_fork_release();
    /* Failing is ordinary: another pid namespace, an old kernel, a sandbox. The socket
     * tells a process that has ended already. */
    if (watch->pidfd < 0)
        return;
    if (uv_poll_init(&watch->host->loop, &watch->poll, watch->pidfd) != 0) {
        host_fork_close(watch->pidfd);
        watch->pidfd = -1;
        return;
    }
    watch->poll.data = watch;
    watch->polled = true;
    (void)uv_poll_start(&watch->poll, UV_READABLE, on_exit_seen);
}

void host_watch_start(struct host *host, uint64_t rank_epoch, int32_t pid,
                      const char *name)
{
    if (name && strcmp(name, host->identity.socket_name) == 0)
        return;
    base_list_each(node, after, &host->watches)
    {
        struct host_watch *known = base_container_of(node, struct host_watch, node);
        if (known->rank_epoch != rank_epoch)
            continue;
        /* After a reconnection: what was told before may not have arrived. */
        if (known->told)
            report_end(known);
        return;
    }
    struct host_watch *watch = base_alloc(host->env, 1, sizeof(*watch));
    if (!watch) {
        host->given_up = true;
        return;
    }
    watch->host = host;
    watch->rank_epoch = rank_epoch;
    watch->pidfd = -1;
    (void)strncpy(watch->name, name ? name : "", sizeof(watch->name) - 1);
    (void)uv_timer_init(&host->loop, &watch->retry);
    watch->retry.data = watch;
    base_list_push_back(&host->watches, &watch->node);
    poll_pid(watch, pid);
    if (watch->name[0])
        connect_watch(watch);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct host_watch *watch = handle->data;
    if (--watch->handles == 0)
        base_free(watch->host->env, watch);
}

static void close_watch(struct host_watch *watch)
{
    base_list_remove(&watch->node);
    if (watch->conn)
        host_conn_close(watch->conn);
    watch->handles = 1 + (watch->polled ? 1 : 0);
    (void)uv_timer_stop(&watch->retry);
    uv_close((uv_handle_t *)&watch->retry, on_handle_closed);
    if (watch->polled) {
        (void)uv_poll_stop(&watch->poll);
        uv_close((uv_handle_t *)&watch->poll, on_handle_closed);
    }
    host_fork_close(watch->pidfd);
}

void host_watch_stop(struct host *host, uint64_t rank_epoch)
{
    base_list_each(node, after, &host->watches)
    {
        struct host_watch *watch = base_container_of(node, struct host_watch, node);
        if (watch->rank_epoch == rank_epoch)
            close_watch(watch);
    }
}

void host_watches_close(struct host *host)
{
    base_list_each(node, after, &host->watches)
        close_watch(base_container_of(node, struct host_watch, node));
}

size_t host_watches_describe(struct host *host, char *text, size_t room, size_t used)
{
    base_list_each(node, after, &host->watches)
    {
        const struct host_watch *watch = base_container_of(node, struct host_watch, node);
        used = host_append(text, room, used, "neighbour rank %u pid %s socket %s%s\n",
                           ctl_rank_epoch_rank(watch->rank_epoch),
                           watch->polled ? "watched" : "not watched",
                           watch->conn && watch->conn->opened ? "open" : "closed",
                           watch->told      ? ", ended"
                           : watch->goodbye ? ", left"
                                            : "");
    }
    return used;
}
