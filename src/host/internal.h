/* SPDX-License-Identifier: Apache-2.0 */
/* The state of a host, shared by the files of this folder. */
#ifndef HOST_INTERNAL_H
#define HOST_INTERNAL_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <uv.h>

#include "base/env.h"
#include "base/list.h"
#include "ctl/agent.h"
#include "ctl/coordinator.h"
#include "host/boot.h"
#include "host/channel.h"
#include "host/host.h"

struct host_conn;
struct host_hub;

/* Work that another thread hands to the control thread; embedded in what it concerns. */
struct host_command {
    struct base_list node;
    void (*run)(struct host *host, struct host_command *command);
};

/* A follow-up of an action: fed once the step that asked for it is carried out. */
enum host_later_kind {
    HOST_LATER_HUB_OPENED,
    HOST_LATER_HUB_MESSAGE,
    HOST_LATER_HUB_CLOSED,
    HOST_LATER_AGENT_CONNECTED,
    HOST_LATER_AGENT_DISCONNECTED,
    HOST_LATER_AGENT_MESSAGE,
    HOST_LATER_AGENT_FROZEN,
    HOST_LATER_AGENT_ATTACHED,
    HOST_LATER_AGENT_EXITED
};

struct host_later {
    struct base_list node;
    enum host_later_kind kind;
    uint64_t conn;
    uint64_t key;
    uint64_t rank_epoch;
    uint64_t epoch;
    enum hdl_status status;
    struct ctl_bytes *bytes;
    struct ctl_answer answer;
    uint64_t arrays[]; /* of the answer: published, then open */
};

/* How far this process has come with joining; guarded by `state_lock`. */
enum host_stage { HOST_JOINING = 0, HOST_JOINED, HOST_REFUSED, HOST_LOST };

struct host {
    struct base_env *env;
    int32_t rank;
    int32_t num_ranks;
    unsigned generation; /* of forks, when it was made */
    struct host_identity identity;
    struct host_boot boot;
    uint8_t key[HOST_KEY_BYTES];
    int64_t handshake_ns;
    bool exact; /* one coordinator address, and nobody else may live there */
    bool coordinator_only;
    int64_t warn_at_ns; /* joining: to say that it takes long */
    bool join_warned;
    bool standalone;

    /* Control thread. */
    struct host_thread *thread;
    uv_loop_t loop;
    uv_async_t wake;
    uv_timer_t tick;
    uv_timer_t handshakes; /* runs while a handshake does */
    uv_timer_t connector_timer;
    uv_timer_t leave_timer;
    uv_check_t after_poll;
    uv_idle_t
        no_sleep; /* active while a tick is due: sockets are read before it is fed */
    bool tick_due;
    bool handshakes_armed;
    int64_t tick_at;
    struct base_list conns;
    struct base_list broken;
    struct base_list later;
    bool pumping;
    bool given_up; /* out of memory: the machines are gone */
    uint8_t scratch[65536];

    /* Commands from other threads. */
    pthread_mutex_t command_lock;
    struct base_list commands;
    struct host_command leave_command;

    /* Agent. */
    struct ctl_agent *agent;
    struct ctl_actions agent_actions;
    struct host_conn *up; /* to the coordinator; NULL on its own rank */
    bool connected;
    struct base_list probes; /* connection attempts of the connector */
    bool connecting;
    uint64_t next_key;
    struct base_list groups;
    struct base_list watches;
    struct host_command update_command; /* new coordinator addresses are there */
    uint32_t update_pending;

    /* Coordinator, on job rank 0 only. */
    struct host_hub *hub;
    uint64_t local_conn; /* number of this process's agent there; 0 = not connected */

    /* Unix socket. */
    int local_fd;
    uv_poll_t local_poll;
    bool local_polled;

    /* Leaving, on the control thread. */
    bool leaving;
    bool goodbye_fed;
    bool said_goodbye;
    bool shutting; /* waiting for the coordinator to see our end */
    int64_t leave_by_ns;
    bool stopped;
    atomic_bool exiting; /* the process is: its control thread has been stopped */
    bool loop_open;

    /* Seen by other threads. */
    pthread_mutex_t state_lock;
    uint32_t state_turn; /* futex: changes with the stage */
    enum host_stage stage;
    enum hdl_status stage_status;
    char stage_text[BASE_DETAIL_BYTES];
    struct host_addresses candidates; /* guarded by state_lock */
    char last_refusal[128];
    char mismatched[80]; /* who refused last if its token or version differs, else "" */
    bool reached;        /* the coordinator, once: its address is known */
    int64_t refused_since_ns;

    pthread_mutex_t end_lock; /* guards both: */
    struct host_job_hooks job_hooks;
    bool alone;

    pthread_mutex_t offer_lock;
    struct base_list offers;

    _Atomic uint64_t num_refused;
    _Atomic uint64_t num_exits;
    _Atomic uint64_t num_closes;
    _Atomic uint64_t control_bytes;    /* sent and received, of all connections */
    _Atomic uint64_t num_silences;     /* of the coordinator, as this agent sees it */
    _Atomic uint64_t num_silent_ranks; /* seen by a coordinator in this process */
    _Atomic uint64_t num_reconnects;
    int64_t refusal_logged_ns;
    _Atomic uint64_t rank_epoch;
    int64_t evidence_ns; /* when a neighbour was last seen to end; control thread */

    struct base_list process_node; /* in the list of all hosts of the process */
};

/* control.c: the loop. */
enum hdl_status host_loop_open(struct host *host);
/* Runs the loop until host_loop_stop; the body of the control thread. */
void host_loop_run(void *host);
void host_loop_stop(struct host *host);
/* Closes what host_loop_open opened; the control thread is not running (any more). */
void host_loop_close(struct host *host);
void host_command_post(struct host *host, struct host_command *command);
/* Returns when the control thread has left whatever it was running. Not on that thread.
 */
void host_barrier(struct host *host);
/* Feeds follow-ups until there are none, tells ended connections, arms the tick. */
void host_pump(struct host *host);
/* NULL if there is no memory: then the host has been given up. */
struct host_later *host_later_add(struct host *host, enum host_later_kind kind,
                                  size_t array_words);
void host_later_message(struct host *host, enum host_later_kind kind, uint64_t conn,
                        struct ctl_bytes *bytes);
void host_refused(struct host *host, const char *peer, enum host_refusal why,
                  uint32_t peer_version);
void host_handshake_started(struct host *host);
void host_set_stage(struct host *host, enum host_stage stage, enum hdl_status status,
                    const char *text);

/* agent.c */
enum hdl_status host_agent_open(struct host *host, const struct host_opts *opts);
void host_agent_close(struct host *host);
/* Not from inside a step. HDL_EINVAL: the event was refused (detail), nothing happened.
 */
enum hdl_status host_agent_feed(struct host *host, const struct ctl_agent_event *event);
void host_agent_tick(struct host *host, int64_t now);
/* CTL_DO_LOG, of either machine. */
void host_log_action(struct host *host, const struct ctl_action *action);

/* connector.c */
void host_connector_start(struct host *host);
void host_connector_stop(struct host *host);

/* hub.c */
enum hdl_status host_hub_open(struct host *host, int listen_fd,
                              const struct host_opts *opts);
void host_hub_close(struct host *host);
void host_hub_feed(struct host *host, const struct ctl_coordinator_event *event);
void host_hub_tick(struct host *host, int64_t now);
/* A number for a connection of the agent in this process. */
uint64_t host_hub_new_local(struct host *host);
/* Accepts again after a shortage of descriptors. */
void host_hub_resume(struct host *host);
int64_t host_hub_deadline(const struct host *host);
uint32_t host_hub_num_live(const struct host *host);

/* watch.c */
void host_tell_alone(struct host *host, bool alone);
void host_watch_start(struct host *host, uint64_t rank_epoch, int32_t pid,
                      const char *name);
void host_watch_stop(struct host *host, uint64_t rank_epoch);
/* Tells of neighbours that said goodbye before the loss was noticed here: perhaps nobody
 * else can. */
void host_watches_coordinator_lost(struct host *host);
void host_watches_close(struct host *host);
size_t host_watches_describe(struct host *host, char *text, size_t room, size_t used);

/* local.c: the unix socket. */
enum hdl_status host_local_open(struct host *host);
enum hdl_status host_local_listen(struct host *host);
void host_local_close(struct host *host);
void host_local_resume(struct host *host);
/* Tells the watchers that the end of their connections will be no evidence. */
void host_local_say_goodbye(struct host *host);
/* A connected non-blocking socket in the fork table, or -errno. */
int host_local_connect(const char *name);
bool host_local_same_user(int fd);
/* A duplicate of what was offered; the caller closes it. */
enum hdl_status host_offer_take(struct host *host, uint64_t id, uint64_t key, int *fd);
enum { HOST_FETCH_BYTES = 16, HOST_GOODBYE_BYTE = 'g' };

/* group.c: what actions of the agent do to groups. */
void host_group_on_action(struct host *host, struct ctl_action *action);
void host_groups_fail(struct host *host, enum hdl_status status, const char *text);

/* leave.c */
/* Run on the control thread: stops it once everybody who needs this process has left. */
void host_leave_begin(struct host *host, struct host_command *command);
void host_leave_check(struct host *host);
enum hdl_status host_process_add(struct host *host);
void host_process_remove(struct host *host);

/* describe.c: adds at `used`, cut at `room`; returns the new length. */
size_t host_append(char *text, size_t room, size_t used, const char *format, ...)
    BASE_PRINTF(4, 5);

/* thread.c */
enum hdl_status host_thread_start_env(struct base_env *env, const char *name,
                                      void (*run)(void *), void *argument,
                                      struct host_thread **thread);

/* address.c */
void host_address_format(const struct sockaddr_storage *addr, char *text, size_t size);

#endif
