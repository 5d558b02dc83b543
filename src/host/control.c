/* SPDX-License-Identifier: Apache-2.0 */
/* The control thread's loop: commands, follow-ups, ticks. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/log.h"
#include "ctl/bytes.h"
#include "ctl/msg.h"
#include "host/conn.h"
#include "host/fork.h"
#include "host/internal.h"

/*
 * Order of one turn of the loop:
 *
 *     timers      a due tick is only noted, and the poll will not sleep
 *     poll        sockets are read, commands run; each feeds a machine and pumps
 *     after poll  the noted tick is fed
 *
 * So a process that was stopped, or late for another reason, first reads what the others
 * sent meanwhile, and only then judges their silence.
 */

void host_set_stage(struct host *host, enum host_stage stage, enum hdl_status status,
                    const char *text)
{
    (void)pthread_mutex_lock(&host->state_lock);
    host->stage = stage;
    host->stage_status = status;
    (void)strncpy(host->stage_text, text ? text : "", sizeof(host->stage_text) - 1);
    __atomic_add_fetch(&host->state_turn, 1, __ATOMIC_RELEASE);
    (void)pthread_mutex_unlock(&host->state_lock);
    base_futex_wake(&host->state_turn, INT32_MAX, false);
}

void host_refused(struct host *host, const char *peer, enum host_refusal why,
                  uint32_t peer_version)
{
    uint64_t total = atomic_fetch_add(&host->num_refused, 1) + 1;
    int64_t now = base_env_now(host->env);
    if (total > 1 && now - host->refusal_logged_ns < BASE_NS_PER_S)
        return; /* a flood of strangers is one line a second */
    host->refusal_logged_ns = now;
    /* Where jobs look for their coordinators over a range of ports they meet each other.
     */
    bool ordinary = why == HOST_REFUSAL_UNPROVEN && host->boot.mode == HOST_BOOT_RANGE;
    enum base_log_level level = ordinary ? BASE_LOG_INFO : BASE_LOG_WARN;
    if (why == HOST_REFUSAL_VERSION)
        BASE_LOG(
            host->env, level,
            "connection with %s refused: wire version %u, this process has %u, refused "
            "so far %" PRIu64,
            peer, peer_version, (unsigned)CTL_WIRE_VERSION, total);
    else
        BASE_LOG(host->env, level,
                 "connection with %s refused: %s, refused so far %" PRIu64, peer,
                 host_refusal_text(why), total);
}

/* ------------------------------------------------------------------------- follow-ups */

struct host_later *host_later_add(struct host *host, enum host_later_kind kind,
                                  size_t array_words)
{
    struct host_later *later =
        base_alloc(host->env, 1, sizeof(*later) + array_words * sizeof(uint64_t));
    if (!later) {
        host->given_up = true;
        return NULL;
    }
    later->kind = kind;
    base_list_push_back(&host->later, &later->node);
    return later;
}

void host_later_message(struct host *host, enum host_later_kind kind, uint64_t conn,
                        struct ctl_bytes *bytes)
{
    struct host_later *later = host_later_add(host, kind, 0);
    if (!later)
        return;
    later->conn = conn;
    later->bytes = ctl_bytes_ref(bytes);
}

static void feed_hub(struct host *host, const struct host_later *later)
{
    struct ctl_coordinator_event event = {.conn = later->conn};
    switch (later->kind) {
    case HOST_LATER_HUB_OPENED:
        event.kind = CTL_COORDINATOR_OPENED;
        break;
    case HOST_LATER_HUB_CLOSED:
        event.kind = CTL_COORDINATOR_CLOSED;
        break;
    default:
        event.kind = CTL_COORDINATOR_MESSAGE;
        event.data = later->bytes->data;
        event.size = later->bytes->size;
    }
    host_hub_feed(host, &event);
}

static void feed_agent(struct host *host, struct host_later *later)
{
    struct ctl_agent_event event = {.key = later->key,
                                    .rank_epoch = later->rank_epoch,
                                    .epoch = later->epoch,
                                    .status = later->status};
    switch (later->kind) {
    case HOST_LATER_AGENT_CONNECTED:
        event.kind = CTL_AGENT_CONNECTED;
        host->connected = true;
        break;
    case HOST_LATER_AGENT_DISCONNECTED:
        event.kind = CTL_AGENT_DISCONNECTED;
        host->connected = false;
        break;
    case HOST_LATER_AGENT_FROZEN:
        event.kind = CTL_AGENT_FROZEN;
        event.answer = &later->answer;
        break;
    case HOST_LATER_AGENT_ATTACHED:
        event.kind = CTL_AGENT_ATTACHED;
        event.text = "this rank takes no later views";
        break;
    case HOST_LATER_AGENT_EXITED:
        event.kind = CTL_AGENT_EXITED;
        break;
    default:
        if (later->conn != host->local_conn)
            return; /* of a connection that is over */
        event.kind = CTL_AGENT_MESSAGE;
        event.data = later->bytes->data;
        event.size = later->bytes->size;
    }
    (void)host_agent_feed(host, &event);
}

static void drop_later(struct host *host, struct host_later *later)
{
    base_list_remove(&later->node);
    ctl_bytes_unref(later->bytes);
    base_free(host->env, later);
}

static void feed_later(struct host *host, struct host_later *later)
{
    base_list_remove(&later->node);
    if (later->kind <= HOST_LATER_HUB_CLOSED)
        feed_hub(host, later);
    else
        feed_agent(host, later);
    drop_later(host, later);
}

/* ---------------------------------------------------------------------------- tick */

static void no_op(uv_idle_t *idle)
{
    (void)idle;
}

static void on_tick(uv_timer_t *timer)
{
    struct host *host = timer->data;
    host->tick_at = 0;
    host->tick_due = true;
    (void)uv_idle_start(&host->no_sleep, no_op);
}

static void on_after_poll(uv_check_t *check)
{
    struct host *host = check->data;
    if (!host->tick_due)
        return;
    host->tick_due = false;
    (void)uv_idle_stop(&host->no_sleep);
    int64_t now = base_env_now(host->env);
    host_hub_tick(host, now);
    host_agent_tick(host, now);
    host_pump(host);
}

static void arm_tick(struct host *host)
{
    int64_t at = host_hub_deadline(host);
    if (host->agent && ctl_agent_deadline(host->agent) < at)
        at = ctl_agent_deadline(host->agent);
    if (at == host->tick_at || host->tick_due || host->stopped)
        return;
    host->tick_at = at;
    if (at == INT64_MAX) {
        (void)uv_timer_stop(&host->tick);
        return;
    }
    int64_t wait = at - base_env_now(host->env);
    uv_update_time(&host->loop);
    uint64_t ms = wait > 0 ? (uint64_t)((wait + BASE_NS_PER_MS - 1) / BASE_NS_PER_MS) : 0;
    (void)uv_timer_start(&host->tick, on_tick, ms, 0);
}

/* ---------------------------------------------------------------------------- pump */

/* Memory ran out in a state machine: ends all groups with HDL_ENOMEM. */
static void give_up(struct host *host)
{
    base_list_each(node, after, &host->later)
        drop_later(host, base_container_of(node, struct host_later, node));
    if (!host->agent && !host->hub)
        return;
    base_log_error(host->env, "control thread gives up: %s", base_detail());
    host_groups_fail(host, HDL_ENOMEM, "the control thread has no memory");
    host_connector_stop(host);
    host_agent_close(host);
    host_hub_close(host);
    host_set_stage(host, HOST_LOST, HDL_ENOMEM, "the control thread has no memory");
}

void host_pump(struct host *host)
{
    if (host->pumping)
        return;
    host->pumping = true;
    for (;;) {
        if (host->given_up)
            give_up(host);
        struct base_list *node = base_list_first(&host->later);
        if (node)
            feed_later(host, base_container_of(node, struct host_later, node));
        else if (!base_list_empty(&host->broken))
            host_conns_reap(host);
        else
            break;
    }
    host->pumping = false;
    host_leave_check(host);
    arm_tick(host);
}

/* ------------------------------------------------------------------------ commands */

void host_command_post(struct host *host, struct host_command *command)
{
    (void)pthread_mutex_lock(&host->command_lock);
    base_list_push_back(&host->commands, &command->node);
    (void)pthread_mutex_unlock(&host->command_lock);
    (void)uv_async_send(&host->wake);
}

struct barrier {
    struct host_command command;
    uint32_t passed;
};

static void pass_barrier(struct host *host, struct host_command *command)
{
    (void)host;
    struct barrier *barrier = base_container_of(command, struct barrier, command);
    __atomic_store_n(&barrier->passed, 1, __ATOMIC_RELEASE);
    base_futex_wake(&barrier->passed, 1, false);
}

void host_barrier(struct host *host)
{
    struct barrier barrier = {.command.run = pass_barrier};
    host_command_post(host, &barrier.command);
    while (__atomic_load_n(&barrier.passed, __ATOMIC_ACQUIRE) == 0)
        (void)base_futex_wait(&barrier.passed, 0, -1, false);
}

static void on_wake(uv_async_t *async)
{
    struct host *host = async->data;
    for (;;) {
        (void)pthread_mutex_lock(&host->command_lock);
        struct base_list *node = base_list_pop_front(&host->commands);
        (void)pthread_mutex_unlock(&host->command_lock);
        if (!node)
            break;
        struct host_command *command = base_container_of(node, struct host_command, node);
        command->run(host, command);
        host_pump(host);
    }
}

/* ---------------------------------------------------------------------- handshakes */

static void on_handshakes(uv_timer_t *timer)
{
    struct host *host = timer->data;
    host->handshakes_armed = false;
    host_hub_resume(host);
    host_local_resume(host);
    host_conns_expire(host, base_env_now(host->env));
    base_list_each(node, after, &host->conns)
    {
        struct host_conn *conn = base_container_of(node, struct host_conn, node);
        if (conn->channel.state != HOST_CHANNEL_READY) {
            host_handshake_started(host);
            break;
        }
    }
    host_pump(host);
}

void host_handshake_started(struct host *host)
{
    if (host->handshakes_armed || host->stopped)
        return;
    host->handshakes_armed = true;
    uint64_t ms = (uint64_t)(host->handshake_ns / (4 * BASE_NS_PER_MS)) + 1;
    (void)uv_timer_start(&host->handshakes, on_handshakes, ms, 0);
}

/* ------------------------------------------------------------------ open and close */

static enum hdl_status init_handles(struct host *host)
{
    int error = uv_async_init(&host->loop, &host->wake, on_wake);
    if (error)
        return base_fail(HDL_ESYSTEM, "cannot make the control thread's wake-up: %s",
                         uv_strerror(error));
    /* These only link themselves into the loop. */
    (void)uv_timer_init(&host->loop, &host->tick);
    (void)uv_timer_init(&host->loop, &host->handshakes);
    (void)uv_timer_init(&host->loop, &host->connector_timer);
    (void)uv_timer_init(&host->loop, &host->leave_timer);
    (void)uv_check_init(&host->loop, &host->after_poll);
    (void)uv_idle_init(&host->loop, &host->no_sleep);
    host->wake.data = host->tick.data = host->handshakes.data = host;
    host->connector_timer.data = host->leave_timer.data = host;
    host->after_poll.data = host->no_sleep.data = host;
    (void)uv_check_start(&host->after_poll, on_after_poll);
    return HDL_OK;
}

/* libuv's own descriptors must not outlive a fork either. */
static enum hdl_status note_descriptors(struct host *host)
{
    int epoll_fd = uv_backend_fd(&host->loop);
    int wake_fd = host->loop.async_io_watcher.fd;
    enum hdl_status status = host_fork_note(epoll_fd);
    return status ? status : host_fork_note(wake_fd);
}

/* libuv ends the process if it cannot open its first pipe, or closes one of the standard
 * descriptors. So those are taken, for good (what the program prints must not go into
 * memory that ranks share, either), and there must be room. */
static enum hdl_status make_room(void)
{
    enum { ROOM = 6 };
    int spare[ROOM], n = 0, error = 0;
    while (n < ROOM && !error) {
        int fd = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (fd > STDERR_FILENO)
            spare[n++] = fd;
        else if (fd < 0)
            error = errno;
    }
    while (n > 0)
        (void)close(spare[--n]);
    if (error != EMFILE && error != ENFILE)
        return HDL_OK; /* also without a /dev */
    return base_fail(HDL_ESYSTEM, "no %d descriptors for an event loop: %s", ROOM,
                     strerror(error));
}

enum hdl_status host_loop_open(struct host *host)
{
    base_list_init(&host->conns);
    base_list_init(&host->broken);
    base_list_init(&host->later);
    base_list_init(&host->probes);
    base_list_init(&host->groups);
    base_list_init(&host->watches);
    enum hdl_status status = make_room();
    if (status != HDL_OK)
        return status;
    host_fork_hold();
    int error = uv_loop_init(&host->loop);
    if (error) {
        /* These versions forget the descriptor when a later step fails. */
        if (uv_version() <= 0x012cff && host->loop.backend_fd > 0)
            (void)close(host->loop.backend_fd);
        status = base_fail(error == UV_ENOMEM ? HDL_ENOMEM : HDL_ESYSTEM,
                           "cannot make an event loop: %s", uv_strerror(error));
    } else {
        host->loop_open = true;
        host->loop.data = host;
        status = init_handles(host);
        if (status == HDL_OK)
            status = note_descriptors(host);
    }
    host_fork_release();
    if (status)
        host_loop_close(host);
    return status;
}

void host_loop_run(void *argument)
{
    struct host *host = argument;
    host_pump(host);
    (void)uv_run(&host->loop, UV_RUN_DEFAULT);
}

void host_loop_stop(struct host *host)
{
    host->stopped = true;
    uv_stop(&host->loop);
}

static void close_handle(uv_handle_t *handle, void *unused)
{
    (void)unused;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

void host_loop_close(struct host *host)
{
    if (!host->loop_open)
        return;
    base_list_each(node, after, &host->broken)
        host_conn_close(base_container_of(node, struct host_conn, node));
    base_list_each(other, next, &host->conns)
        host_conn_close(base_container_of(other, struct host_conn, node));
    base_list_each(late, follow, &host->later)
        drop_later(host, base_container_of(late, struct host_later, node));
    host_fork_forget(uv_backend_fd(&host->loop));
    if (host->loop.async_io_watcher.fd >= 0)
        host_fork_forget(host->loop.async_io_watcher.fd);
    uv_walk(&host->loop, close_handle, NULL);
    (void)uv_run(&host->loop, UV_RUN_DEFAULT);
    (void)uv_loop_close(&host->loop);
    host->loop_open = false;
}
