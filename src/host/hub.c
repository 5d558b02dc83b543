/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator in the control thread: listening socket, agents' connections, machine.
 */
#include "host/hub.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/random.h"
#include "ctl/bytes.h"
#include "ctl/msg.h"
#include "host/fork.h"
#include "host/internal.h"

/*
 * Connection numbers: serial << 16 | index into `conns`. The serial makes them unique,
 * the index makes a send to thousands of agents one look-up each. The agent of this
 * process has the index that no socket gets; its messages go through the list of
 * follow-ups.
 */
enum { HUB_INDEX_BITS = 16, HUB_CONNS_MAX = 65535, HUB_STRANGERS_MAX = 512 };

struct host_hub {
    struct host *host;
    struct ctl_coordinator *machine;
    struct ctl_actions actions;
    int listen_fd;
    uv_poll_t poll;
    bool polled;
    struct host_conn **conns; /* [capacity]; authentic ones only */
    size_t capacity;
    uint64_t serial;
    uint32_t num_strangers; /* accepted, not authentic yet */
};

static bool is_local(uint64_t id)
{
    return (id & HUB_CONNS_MAX) == HUB_CONNS_MAX;
}

uint64_t host_hub_new_local(struct host *host)
{
    return ++host->hub->serial << HUB_INDEX_BITS | HUB_CONNS_MAX;
}

static struct host_conn *find_conn(const struct host_hub *hub, uint64_t id)
{
    size_t index = id & HUB_CONNS_MAX;
    struct host_conn *conn = index < hub->capacity ? hub->conns[index] : NULL;
    return conn && conn->id == id ? conn : NULL;
}

static void forget_conn(struct host_hub *hub, const struct host_conn *conn)
{
    size_t index = conn->id & HUB_CONNS_MAX;
    if (conn->id && index < hub->capacity && hub->conns[index] == conn)
        hub->conns[index] = NULL;
}

/* Gives the connection its number. */
static bool enter_conn(struct host_hub *hub, struct host_conn *conn)
{
    size_t index = 0;
    while (index < hub->capacity && hub->conns[index])
        index++;
    if (index >= HUB_CONNS_MAX)
        return false;
    if (index == hub->capacity) {
        size_t capacity = hub->capacity ? 2 * hub->capacity : 16;
        struct host_conn **conns = base_grow(hub->host->env, hub->conns, hub->capacity,
                                             capacity, sizeof(*conns));
        if (!conns)
            return false;
        hub->conns = conns;
        hub->capacity = capacity;
    }
    hub->conns[index] = conn;
    conn->id = ++hub->serial << HUB_INDEX_BITS | index;
    return true;
}

/* ------------------------------------------------------------------------- machine */

static void close_agent(struct host *host, uint64_t id)
{
    struct host_hub *hub = host->hub;
    if (is_local(id)) {
        if (id == host->local_conn)
            (void)host_later_add(host, HOST_LATER_AGENT_DISCONNECTED, 0);
        return;
    }
    struct host_conn *conn = find_conn(hub, id);
    if (!conn)
        return;
    forget_conn(hub, conn);
    conn->id = 0;
    host_conn_close_after_output(conn);
}

static void carry_out(struct host *host, const struct ctl_action *action)
{
    struct host_conn *conn;
    switch (action->kind) {
    case CTL_DO_SEND:
        if (is_local(action->conn))
            host_later_message(host, HOST_LATER_AGENT_MESSAGE, action->conn,
                               action->bytes);
        else if ((conn = find_conn(host->hub, action->conn)) != NULL)
            host_conn_send(conn, action->bytes);
        break;
    case CTL_DO_CLOSE:
        close_agent(host, action->conn);
        break;
    case CTL_DO_LOG:
        host_log_action(host, action);
        break;
    default:
        base_log_error(host->env, "coordinator asked for action %d", (int)action->kind);
    }
}

void host_hub_feed(struct host *host, const struct ctl_coordinator_event *event)
{
    struct host_hub *hub = host->hub;
    if (!hub)
        return;
    enum hdl_status status =
        ctl_coordinator_step(hub->machine, event, base_env_now(host->env), &hub->actions);
    if (status == HDL_ENOMEM || hub->actions.failed)
        host->given_up = true; /* its actions may be incomplete */
    for (size_t i = 0; i < hub->actions.count && !host->given_up; i++)
        carry_out(host, &hub->actions.items[i]);
    ctl_actions_clear(&hub->actions);
    atomic_store(&host->num_silent_ranks, ctl_coordinator_num_silent(hub->machine));
}

int64_t host_hub_deadline(const struct host *host)
{
    return host->hub ? ctl_coordinator_deadline(host->hub->machine) : INT64_MAX;
}

void host_hub_tick(struct host *host, int64_t now)
{
    if (now < host_hub_deadline(host) || !host->hub)
        return;
    struct ctl_coordinator_event event = {.kind = CTL_COORDINATOR_TICK};
    host_hub_feed(host, &event);
}

uint32_t host_hub_num_live(const struct host *host)
{
    return host->hub ? ctl_coordinator_num_live(host->hub->machine) : 0;
}

/* --------------------------------------------------------------------- connections */

static void on_opened(struct host_conn *conn)
{
    struct host_hub *hub = conn->owner;
    hub->num_strangers--;
    if (!enter_conn(hub, conn)) {
        host_conn_close(conn);
        return;
    }
    struct ctl_coordinator_event event = {.kind = CTL_COORDINATOR_OPENED,
                                          .conn = conn->id};
    host_hub_feed(conn->host, &event);
}

static void on_frame(struct host_conn *conn, const void *data, size_t size)
{
    struct ctl_coordinator_event event = {
        .kind = CTL_COORDINATOR_MESSAGE, .conn = conn->id, .data = data, .size = size};
    if (conn->id)
        host_hub_feed(conn->host, &event);
}

static void on_closed(struct host_conn *conn, enum host_refusal why, int error)
{
    (void)why;
    (void)error;
    struct host_hub *hub = conn->owner;
    if (!conn->opened)
        hub->num_strangers--;
    if (!conn->id)
        return;
    struct ctl_coordinator_event event = {.kind = CTL_COORDINATOR_CLOSED,
                                          .conn = conn->id};
    forget_conn(hub, conn);
    conn->id = 0;
    host_hub_feed(conn->host, &event);
}

static const struct host_conn_ops hub_ops = {
    .purposes = 1u << HOST_PURPOSE_AGENT,
    .max_frame = CTL_FRAME_MAX_UP,
    .opened = on_opened,
    .frame = on_frame,
    .closed = on_closed,
};

static void accept_one(struct host_hub *hub, int fd)
{
    struct host *host = hub->host;
    int yes = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    if (hub->num_strangers >= HUB_STRANGERS_MAX) {
        host_fork_close(fd);
        host_refused(host, "a stranger", HOST_REFUSAL_SLOW, 0);
        return;
    }
    struct host_conn *conn;
    if (host_conn_create(host, fd, &hub_ops, 0, false, hub, &conn) == HDL_OK)
        hub->num_strangers++;
}

static void on_acceptable(uv_poll_t *poll, int status, int events)
{
    struct host_hub *hub = poll->data;
    (void)events;
    while (status == 0) {
        int fd = host_fork_accept(hub->listen_fd), error = -fd;
        if (fd >= 0) {
            accept_one(hub, fd);
            continue;
        }
        if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
            /* The socket stays readable: look again with the handshakes' timer. */
            base_log_warn(hub->host->env, "cannot accept a connection: %s",
                          strerror(error));
            (void)uv_poll_stop(&hub->poll);
            host_handshake_started(hub->host);
            break;
        }
        if (error != EINTR && error != ECONNABORTED)
            break;
    }
    host_pump(hub->host);
}

void host_hub_resume(struct host *host)
{
    if (host->hub && host->hub->polled && !uv_is_active((uv_handle_t *)&host->hub->poll))
        (void)uv_poll_start(&host->hub->poll, UV_READABLE, on_acceptable);
}

/* ------------------------------------------------------------------ open and close */

static enum hdl_status listen_for_agents(struct host_hub *hub)
{
    if (hub->listen_fd < 0)
        return HDL_OK;
    int error = uv_poll_init(&hub->host->loop, &hub->poll, hub->listen_fd);
    if (error)
        return base_fail(HDL_ESYSTEM, "cannot poll the coordinator's socket: %s",
                         uv_strerror(error));
    hub->poll.data = hub;
    hub->polled = true;
    (void)uv_poll_start(&hub->poll, UV_READABLE, on_acceptable);
    return HDL_OK;
}

/* By the clock on the wall: nothing else is known of the starts before. Two are further
 * apart than its 8 ms, and a day is enough for those that could meet. */
static uint32_t turn_of_start(void)
{
    struct timespec wall;
    (void)clock_gettime(CLOCK_REALTIME, &wall);
    return (uint32_t)((uint64_t)wall.tv_sec * 1000 / 8 +
                      (uint64_t)wall.tv_nsec / 8000000) &
           0xffffff;
}

enum hdl_status host_hub_open(struct host *host, int listen_fd,
                              const struct host_opts *opts)
{
    /* No host_id: a process of this host is seen to end by its unix socket and its pidfd,
     * which rank 0's agent watches. A TCP connection may break here too, and is made
     * again. */
    struct ctl_coordinator_options options = {
        .num_ranks = (uint32_t)host->num_ranks,
        .dead_after_ns = opts->dead_after_ns,
        .grace_ns = opts->grace_ns,
        .link_timeout_ns = opts->link_timeout_ns,
        .standalone = host->coordinator_only,
        .restarted = host->coordinator_only,
        .turn = host->coordinator_only ? turn_of_start() : 0};
    struct host_hub *hub = base_alloc(host->env, 1, sizeof(*hub));
    if (!hub || base_random_u64(&options.instance) != HDL_OK) {
        base_free(host->env, hub);
        host_fork_close(listen_fd);
        return HDL_ENOMEM;
    }
    hub->host = host;
    hub->listen_fd = listen_fd;
    hub->actions.env = host->env;
    host->hub = hub;
    enum hdl_status status = ctl_coordinator_create(
        host->env, &options, base_env_now(host->env), &hub->machine);
    if (status == HDL_OK)
        status = listen_for_agents(hub);
    if (status)
        host_hub_close(host);
    return status;
}

static void free_hub(uv_handle_t *handle)
{
    struct host_hub *hub = handle->data;
    base_free(hub->host->env, hub);
}

static void close_conns(struct base_list *list)
{
    base_list_each(node, after, list)
    {
        struct host_conn *conn = base_container_of(node, struct host_conn, node);
        if (conn->ops == &hub_ops)
            host_conn_close(conn);
    }
}

void host_hub_close(struct host *host)
{
    struct host_hub *hub = host->hub;
    if (!hub)
        return;
    host->hub = NULL;
    close_conns(&host->conns);
    close_conns(&host->broken);
    ctl_coordinator_destroy(hub->machine);
    ctl_actions_free(&hub->actions);
    base_free(host->env, hub->conns);
    if (hub->polled) {
        (void)uv_poll_stop(&hub->poll);
        uv_close((uv_handle_t *)&hub->poll, free_hub);
        host_fork_close(hub->listen_fd);
        return;
    }
    host_fork_close(hub->listen_fd);
    base_free(host->env, hub);
}
