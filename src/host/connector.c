/* SPDX-License-Identifier: Apache-2.0 */
/* Finding and reaching the coordinator: tries addresses until one passes the handshake.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "ctl/msg.h"
#include "host/conn.h"
#include "host/fork.h"
#include "host/hub.h"
#include "host/internal.h"

/*
 * All candidates are tried side by side, each again after a pause that grows: a foreign
 * server that answers nothing holds up only its own address. The first connection that is
 * authentic wins, and later reconnections use its address only.
 */
#define PROBE_PAUSE_MIN (1 * BASE_NS_PER_MS)
#define PROBE_PAUSE_MAX (50 * BASE_NS_PER_MS)
/* At the ports after the first, where the coordinator is only if that was taken. */
#define PROBE_PAUSE_MAX_OTHERS (200 * BASE_NS_PER_MS)
/* Another job's coordinator or a foreign server: asking often is impolite. */
#define PROBE_PAUSE_FOREIGN (500 * BASE_NS_PER_MS)
/* At one exact address a wrong token or version for so long will not become right. */
#define MISMATCH_LIMIT (2 * BASE_NS_PER_S)

struct host_probe {
    struct base_list node;
    struct host *host;
    struct sockaddr_storage address;
    struct host_conn *conn;
    int64_t next_at;
    int64_t pause_ns;
    int64_t pause_max_ns;
    enum host_refusal last;
};

static void probe_opened(struct host_conn *conn);
static void probe_frame(struct host_conn *conn, const void *data, size_t size);
static void probe_closed(struct host_conn *conn, enum host_refusal why, int error);

static const struct host_conn_ops probe_ops = {
    .max_frame = CTL_FRAME_MAX_DOWN,
    .opened = probe_opened,
    .frame = probe_frame,
    .closed = probe_closed,
};

static void on_timer(uv_timer_t *timer);

static void arm_timer(struct host *host)
{
    int64_t at = INT64_MAX;
    base_list_each(node, after, &host->probes)
    {
        struct host_probe *probe = base_container_of(node, struct host_probe, node);
        if (!probe->conn && probe->next_at < at)
            at = probe->next_at;
    }
    if (at == INT64_MAX)
        return;
    int64_t wait = at - base_env_now(host->env);
    uint64_t ms = wait > 0 ? (uint64_t)((wait + BASE_NS_PER_MS - 1) / BASE_NS_PER_MS) : 0;
    uv_update_time(&host->loop);
    (void)uv_timer_start(&host->connector_timer, on_timer, ms, 0);
}

static void pause_probe(struct host_probe *probe, enum host_refusal why)
{
    int64_t pause = probe->pause_ns;
    if (why != HOST_REFUSAL_NONE)
        pause = PROBE_PAUSE_FOREIGN;
    else if (probe->pause_ns * 3 / 2 < probe->pause_max_ns)
        probe->pause_ns = probe->pause_ns * 3 / 2;
    probe->last = why;
    probe->next_at = base_env_now(probe->host->env) + pause;
}

/* A socket on its way to the address; -errno. */
static int start_connect(const struct sockaddr_storage *address)
{
    int fd = host_fork_socket(address->ss_family);
    if (fd < 0)
        return fd;
    int yes = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    if (connect(fd, (const struct sockaddr *)address, host_address_size(address)) == 0 ||
        errno == EINPROGRESS || errno == EINTR)
        return fd;
    int error = errno;
    host_fork_close(fd);
    return -error;
}

static void try_probe(struct host_probe *probe)
{
    int fd = start_connect(&probe->address);
    if (fd < 0 || host_conn_create(probe->host, fd, &probe_ops, HOST_PURPOSE_AGENT, true,
                                   probe, &probe->conn) != HDL_OK)
        pause_probe(probe, HOST_REFUSAL_NONE);
    else
        host_address_format(&probe->address, probe->conn->peer,
                            sizeof(probe->conn->peer));
}

static void try_due(struct host *host)
{
    int64_t now = base_env_now(host->env);
    base_list_each(node, after, &host->probes)
    {
        struct host_probe *probe = base_container_of(node, struct host_probe, node);
        if (!probe->conn && now >= probe->next_at)
            try_probe(probe);
    }
    arm_timer(host);
}

static void on_timer(uv_timer_t *timer)
{
    struct host *host = timer->data;
    try_due(host);
    host_pump(host);
}

static bool add_probe(struct host *host, const struct sockaddr_storage *address)
{
    base_list_each(node, after, &host->probes)
    {
        struct host_probe *probe = base_container_of(node, struct host_probe, node);
        if (memcmp(&probe->address, address, sizeof(*address)) == 0)
            return true;
    }
    struct host_probe *probe = base_alloc(host->env, 1, sizeof(*probe));
    if (!probe)
        return false;
    probe->host = host;
    probe->address = *address;
    probe->pause_ns = PROBE_PAUSE_MIN;
    probe->pause_max_ns =
        base_list_empty(&host->probes) ? PROBE_PAUSE_MAX : PROBE_PAUSE_MAX_OTHERS;
    base_list_push_back(&host->probes, &probe->node);
    return true;
}

void host_connector_start(struct host *host)
{
    if (host->up || !host->agent || host->goodbye_fed)
        return;
    host->connecting = true;
    (void)pthread_mutex_lock(&host->state_lock);
    struct host_addresses candidates = host->candidates;
    (void)pthread_mutex_unlock(&host->state_lock);
    for (uint32_t i = 0; i < candidates.count; i++)
        if (!add_probe(host, &candidates.items[i]))
            host->given_up = true;
    try_due(host);
}

static void drop_probe(struct host_probe *probe)
{
    if (probe->conn)
        host_conn_close(probe->conn);
    base_list_remove(&probe->node);
    base_free(probe->host->env, probe);
}

void host_connector_stop(struct host *host)
{
    host->connecting = false;
    (void)uv_timer_stop(&host->connector_timer);
    base_list_each(node, after, &host->probes)
        drop_probe(base_container_of(node, struct host_probe, node));
}

/* ------------------------------------------------------------------------- results */

/* The address that peers reach this process at, unless the user chose one. */
static void note_own_address(struct host *host, int fd)
{
    struct sockaddr_storage own;
    socklen_t size = sizeof(own);
    memset(&own, 0, sizeof(own));
    if (host->identity.address[0] == 0 &&
        getsockname(fd, (struct sockaddr *)&own, &size) == 0)
        host_address_numeric(&own, host->identity.address,
                             sizeof(host->identity.address));
}

static void probe_opened(struct host_conn *conn)
{
    struct host_probe *probe = conn->owner;
    struct host *host = conn->host;
    if (host->leaving || !host->agent) {
        probe->conn = NULL;
        host_conn_close(conn);
        return;
    }
    probe->conn = NULL;
    conn->ops = &host_agent_conn_ops;
    conn->owner = NULL;
    host->up = conn;
    host->connected = true;
    note_own_address(host, conn->fd);
    (void)pthread_mutex_lock(&host->state_lock);
    if (host->reached)
        atomic_fetch_add(&host->num_reconnects, 1);
    host->candidates.count = 1;
    host->candidates.items[0] = probe->address;
    host->reached = true;
    (void)pthread_mutex_unlock(&host->state_lock);
    host_connector_stop(host);
    struct ctl_agent_event event = {.kind = CTL_AGENT_CONNECTED, .text = conn->peer};
    (void)host_agent_feed(host, &event);
}

static void probe_frame(struct host_conn *conn, const void *data, size_t size)
{
    (void)conn;
    (void)data;
    (void)size;
}

/* Remembers why for the message of a timeout; true if waiting longer is pointless. Of a
 * range of ports most are closed: a coordinator of another token or version says more. */
static bool note_refusal(struct host *host, const struct host_conn *conn,
                         enum host_refusal why, int error)
{
    bool mismatch = why == HOST_REFUSAL_TOKEN || why == HOST_REFUSAL_VERSION;
    bool pointless = false;
    int64_t now = base_env_now(host->env);
    (void)pthread_mutex_lock(&host->state_lock);
    if (!mismatch && host->mismatched[0] && strcmp(host->mismatched, conn->peer) != 0)
        goto unlock;
    if (mismatch && !host->mismatched[0])
        host->refused_since_ns = now;
    (void)snprintf(host->mismatched, sizeof(host->mismatched), "%s",
                   mismatch ? conn->peer : "");
    if (why == HOST_REFUSAL_VERSION)
        (void)snprintf(host->last_refusal, sizeof(host->last_refusal),
                       "%.80s has wire version %u, this process %u", conn->peer,
                       conn->channel.peer_version, (unsigned)CTL_WIRE_VERSION);
    else
        (void)snprintf(host->last_refusal, sizeof(host->last_refusal), "%.80s: %s",
                       conn->peer, error ? strerror(error) : host_refusal_text(why));
    pointless = mismatch && host->exact && now - host->refused_since_ns >= MISMATCH_LIMIT;
unlock:
    (void)pthread_mutex_unlock(&host->state_lock);
    return pointless;
}

static void probe_closed(struct host_conn *conn, enum host_refusal why, int error)
{
    struct host_probe *probe = conn->owner;
    struct host *host = conn->host;
    probe->conn = NULL;
    if (why == HOST_REFUSAL_NONE && !error)
        why = HOST_REFUSAL_MAGIC; /* took the hello and hung up */
    bool pointless = note_refusal(host, conn, why, error);
    pause_probe(probe, why);
    if (pointless)
        host_set_stage(host, HOST_REFUSED, HDL_ECONFIG, host->last_refusal);
    arm_timer(host);
    if (!host->reached || !host->agent)
        return;
    struct ctl_agent_event event = {.kind = CTL_AGENT_CONNECT_FAILED};
    host_connector_stop(host);
    (void)host_agent_feed(host, &event);
}
