/* SPDX-License-Identifier: Apache-2.0 */
/* The agent's state machine in the control thread: feeding it, carrying out its actions.
 */
#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "ctl/bytes.h"
#include "ctl/msg.h"
#include "host/conn.h"
#include "host/hub.h"
#include "host/internal.h"

enum hdl_status host_agent_open(struct host *host, const struct host_opts *opts)
{
    uint64_t host_id = 0;
    memcpy(&host_id, host->identity.host_id, sizeof(host_id));
    struct ctl_agent_options options = {
        .job_rank = (uint32_t)host->rank,
        .incarnation = host->identity.incarnation,
        .host_id = host_id,
        .pid = host->identity.pid,
        .socket_name = host->identity.socket_name,
        /* host_create has its own deadline, with a better text. */
        .join_timeout_ns = opts->timeout_ns + BASE_NS_PER_S,
        .dead_after_ns = opts->dead_after_ns,
        .standalone = host->standalone};
    host->agent_actions.env = host->env;
    return ctl_agent_create(host->env, &options, base_env_now(host->env), &host->agent);
}

void host_agent_close(struct host *host)
{
    if (host->up)
        host_conn_close(host->up);
    host->up = NULL;
    ctl_agent_destroy(host->agent);
    host->agent = NULL;
    ctl_actions_free(&host->agent_actions);
    memset(&host->agent_actions, 0, sizeof(host->agent_actions));
    host->agent_actions.env = host->env;
}

static void do_send(struct host *host, struct ctl_bytes *bytes)
{
    if (host->hub)
        host_later_message(host, HOST_LATER_HUB_MESSAGE, host->local_conn, bytes);
    else if (host->up)
        host_conn_send(host->up, bytes);
}

static void close_up(struct host *host)
{
    if (host->hub && host->local_conn) {
        struct host_later *closed = host_later_add(host, HOST_LATER_HUB_CLOSED, 0);
        if (closed)
            closed->conn = host->local_conn;
        host->local_conn = 0;
    }
    if (host->up)
        host_conn_close_after_output(host->up);
    host->up = NULL;
    host->connected = false;
}

/* The agent may ask for a new connection because it has given up on the old one. */
static void do_connect(struct host *host)
{
    close_up(host);
    if (!host->hub) {
        host_connector_start(host);
        return;
    }
    host->local_conn = host_hub_new_local(host);
    struct host_later *opened = host_later_add(host, HOST_LATER_HUB_OPENED, 0);
    if (opened)
        opened->conn = host->local_conn;
    (void)host_later_add(host, HOST_LATER_AGENT_CONNECTED, 0);
}

void host_log_action(struct host *host, const struct ctl_action *action)
{
    static const enum base_log_level levels[] = {[HDL_LOG_DEFAULT] = BASE_LOG_INFO,
                                                 [HDL_LOG_ERROR] = BASE_LOG_ERROR,
                                                 [HDL_LOG_WARN] = BASE_LOG_WARN,
                                                 [HDL_LOG_INFO] = BASE_LOG_INFO,
                                                 [HDL_LOG_DEBUG] = BASE_LOG_DEBUG};
    BASE_LOG(host->env, levels[action->level], "%s", action->text);
}

static void carry_out(struct host *host, struct ctl_action *action)
{
    switch (action->kind) {
    case CTL_DO_SEND:
        do_send(host, action->bytes);
        break;
    case CTL_DO_CLOSE:
        close_up(host);
        break;
    case CTL_DO_LOG:
        host_log_action(host, action);
        break;
    case CTL_DO_CONNECT:
        do_connect(host);
        break;
    case CTL_DO_ADMITTED:
        atomic_store(&host->rank_epoch, action->rank_epoch);
        host_set_stage(host, HOST_JOINED, HDL_OK, NULL);
        host_tell_alone(host, false);
        break;
    case CTL_DO_REFUSED:
        host_set_stage(host, HOST_REFUSED, action->status, action->text);
        break;
    case CTL_DO_COORDINATOR_LOST: /* trying goes on: the network may come back */
        if (!host->leaving)
            base_log_warn(host->env, "%s", action->text ? action->text : "");
        host_set_stage(host, HOST_LOST, HDL_ECOORD, action->text);
        host_watches_coordinator_lost(host);
        host_tell_alone(host, true);
        break;
    case CTL_DO_WATCH:
        host_watch_start(host, action->rank_epoch, action->pid, action->text);
        break;
    case CTL_DO_UNWATCH:
        host_watch_stop(host, action->rank_epoch);
        break;
    case CTL_DO_GOODBYE:
        host->said_goodbye = true;
        break;
    default:
        host_group_on_action(host, action);
    }
}

enum hdl_status host_agent_feed(struct host *host, const struct ctl_agent_event *event)
{
    if (!host->agent)
        return base_fail(HDL_ECOORD, "the control thread has given up");
    struct ctl_actions *actions = &host->agent_actions;
    enum hdl_status status =
        ctl_agent_step(host->agent, event, base_env_now(host->env), actions);
    if (status == HDL_ENOMEM || actions->failed)
        host->given_up = true; /* its actions may be incomplete */
    for (size_t i = 0; i < actions->count && !host->given_up; i++)
        carry_out(host, &actions->items[i]);
    ctl_actions_clear(actions);
    struct ctl_agent_stats stats;
    ctl_agent_stats(host->agent, &stats);
    atomic_store(&host->num_silences, stats.evidence_silence);
    return status;
}

void host_agent_tick(struct host *host, int64_t now)
{
    if (!host->agent || now < ctl_agent_deadline(host->agent))
        return;
    struct ctl_agent_event event = {.kind = CTL_AGENT_TICK};
    (void)host_agent_feed(host, &event);
}

/* ------------------------------------------ events of the coordinator's connection */

static void on_frame(struct host_conn *conn, const void *data, size_t size)
{
    struct ctl_agent_event event = {
        .kind = CTL_AGENT_MESSAGE, .data = data, .size = size};
    (void)host_agent_feed(conn->host, &event);
}

static void on_closed(struct host_conn *conn, enum host_refusal why, int error)
{
    struct host *host = conn->host;
    if (host->up != conn)
        return;
    host->up = NULL;
    host->connected = false;
    if (!host->shutting)
        base_log_info(host->env, "connection to the coordinator %s: %s", conn->peer,
                      error ? strerror(error) : host_refusal_text(why));
    struct ctl_agent_event event = {.kind = CTL_AGENT_DISCONNECTED};
    (void)host_agent_feed(host, &event);
}

const struct host_conn_ops host_agent_conn_ops = {
    .max_frame = CTL_FRAME_MAX_DOWN,
    .frame = on_frame,
    .closed = on_closed,
};
