/* SPDX-License-Identifier: Apache-2.0 */
/* The end: leaving the job in order, and what happens when the process just exits. */
#include <stdlib.h>

#include "base/clock.h"
#include "base/log.h"
#include "host/conn.h"
#include "host/fork.h"
#include "host/internal.h"

/*
 * Order of a leave, each step bounded:
 *
 *     1  coordinator's rank: until all others have left, at most 2 s
 *     2  GOODBYE to the coordinator, end of output; until it closes, at most 200 ms:
 *        it knows before any neighbour can report that this process has ended
 *     3  'g' to the neighbours, everything is closed
 *
 * A process that exits without destroying its context is a death, except that the
 * coordinator's rank does step 1, or the whole job would lose its coordinator.
 */
#define LEAVE_OTHERS_NS (2 * BASE_NS_PER_S)
#define LEAVE_SHUTDOWN_NS (200 * BASE_NS_PER_MS)

static void on_leave_timer(uv_timer_t *timer)
{
    host_pump(timer->data);
}

static void set_limit(struct host *host, int64_t limit_ns)
{
    host->leave_by_ns = base_env_now(host->env) + limit_ns;
    uv_update_time(&host->loop);
    (void)uv_timer_start(&host->leave_timer, on_leave_timer,
                         (uint64_t)(limit_ns / BASE_NS_PER_MS) + 1, 0);
}

static bool limit_over(const struct host *host)
{
    return base_env_now(host->env) >= host->leave_by_ns;
}

static void finish(struct host *host)
{
    host_local_say_goodbye(host);
    host_loop_stop(host);
}

void host_leave_check(struct host *host)
{
    if (!host->leaving || host->stopped)
        return;
    if (!host->goodbye_fed) {
        if (host->coordinator_only) {
            host_loop_stop(host);
            return;
        }
        if (host_hub_num_live(host) > 1 && !limit_over(host))
            return;
        if (atomic_load(&host->exiting)) {
            host_loop_stop(host);
            return;
        }
        host->goodbye_fed = true;
        host_connector_stop(host);
        set_limit(host, LEAVE_SHUTDOWN_NS);
        struct ctl_agent_event event = {.kind = CTL_AGENT_GOODBYE};
        if (host->agent)
            (void)host_agent_feed(host, &event);
        host_pump(host);
        return;
    }
    if (host->agent && !host->said_goodbye && host->connected && !limit_over(host))
        return;
    if (host->up && !host->shutting) {
        host->shutting = true;
        host_conn_shutdown(host->up);
    }
    if (host->up && !limit_over(host))
        return;
    finish(host);
}

void host_leave_begin(struct host *host, struct host_command *command)
{
    (void)command;
    host->leaving = true;
    set_limit(host, LEAVE_OTHERS_NS);
}

/* -------------------------------------------------------------------- process exit */

static pthread_mutex_t process_lock = PTHREAD_MUTEX_INITIALIZER;
static struct base_list process_hosts = {&process_hosts, &process_hosts};
static bool process_hooked;

/* Only coordinators keep the exit waiting; the other control threads stop at once, so
 * that no callback of a program that has already been torn down is called. */
static void exit_host(struct host *host)
{
    if (host->generation != host_fork_generation())
        return;
    atomic_store(&host->exiting, true);
    host_command_post(host, &host->leave_command);
    host_thread_join(host->thread);
    host->thread = NULL;
}

static void on_process_exit(void)
{
    (void)pthread_mutex_lock(&process_lock);
    base_list_each(node, after, &process_hosts)
        exit_host(base_container_of(node, struct host, process_node));
    (void)pthread_mutex_unlock(&process_lock);
}

enum hdl_status host_process_add(struct host *host)
{
    (void)pthread_mutex_lock(&process_lock);
    if (!process_hooked && atexit(on_process_exit) != 0) {
        (void)pthread_mutex_unlock(&process_lock);
        return base_fail(HDL_ENOMEM, "cannot register an exit hook");
    }
    process_hooked = true;
    base_list_push_back(&process_hosts, &host->process_node);
    (void)pthread_mutex_unlock(&process_lock);
    return HDL_OK;
}

void host_process_remove(struct host *host)
{
    (void)pthread_mutex_lock(&process_lock);
    base_list_remove(&host->process_node);
    (void)pthread_mutex_unlock(&process_lock);
}
