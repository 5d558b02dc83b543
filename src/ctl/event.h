/* SPDX-License-Identifier: Apache-2.0 */
/* What goes into the control plane's state machines and what comes out of them. */
#ifndef CTL_EVENT_H
#define CTL_EVENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ctl/view.h"
#include "heddle.h"

/*
 * step(machine, event, now, actions): the caller feeds one event, then carries the
 * actions out in order, then feeds what they led to (never from inside a step).
 * Everything an event points to is borrowed for the step; everything an action points to
 * is owned by the action list and lives until ctl_actions_clear (take a reference to keep
 * views and bytes). After every step the caller asks for the machine's deadline and feeds
 * a TICK then. `now` is monotonic, in nanoseconds.
 */

/* ------------------------------------------------------------------------ coordinator */

enum ctl_coordinator_event_kind {
    CTL_COORDINATOR_OPENED,  /* conn: an authenticated connection */
    CTL_COORDINATOR_CLOSED,  /* conn: closed by the peer or broken */
    CTL_COORDINATOR_MESSAGE, /* conn, data, size: one authentic frame's payload */
    CTL_COORDINATOR_TICK
};

struct ctl_coordinator_event {
    enum ctl_coordinator_event_kind kind;
    uint64_t conn; /* the caller's number for a connection, never used twice */
    const void *data;
    size_t size;
};

/* ------------------------------------------------------------------------------ agent */

enum ctl_agent_event_kind {
    CTL_AGENT_CONNECTED,      /* the connection asked for is open and authenticated;
                                 text: with whom, NULL = in this process */
    CTL_AGENT_CONNECT_FAILED, /* it could not be made (the agent asks again later) */
    CTL_AGENT_DISCONNECTED,   /* it closed or broke */
    CTL_AGENT_MESSAGE,        /* data, size */
    CTL_AGENT_TICK,
    CTL_AGENT_EXITED,   /* rank_epoch: pidfd fired or unix socket closed, without a
                           GOODBYE before; once the coordinator is lost, with one too */
    CTL_AGENT_REGISTER, /* key, registration: the user creates a group */
    CTL_AGENT_ATTACHED, /* key, epoch, status, text: answer to CTL_DO_ATTACH */
    CTL_AGENT_FROZEN,   /* key, answer: answer to CTL_DO_FREEZE */
    CTL_AGENT_FINISHED, /* key, x: own `done` has reached the x of CTL_DO_WATCH_DONE */
    CTL_AGENT_LINK, /* key, rank_epoch, up: the data link to a rank broke or came back */
    CTL_AGENT_PROPOSE, /* key, proposal */
    CTL_AGENT_LEAVE,   /* key: the user destroys the group; CTL_DO_LEFT follows */
    CTL_AGENT_ABORT,   /* key: at once; nothing follows for this key but CTL_DO_LEFT */
    CTL_AGENT_GOODBYE  /* the context goes; CTL_DO_GOODBYE follows */
};

/* One creation parameter, compared as text over all founders. */
struct ctl_param {
    const char *name;
    const char *value;
};

/* What a founder (or joiner) says about a group. */
struct ctl_registration {
    const char *name;
    uint32_t capacity;
    uint32_t slot;         /* own */
    uint32_t num_founders; /* slots 0 .. num_founders - 1 found the group */
    const uint32_t *ranks; /* job rank of slot [num_ranks] */
    uint32_t num_ranks;    /* >= num_founders; slots beyond are as their joiners say */
    bool join;             /* this process extends an existing group */
    bool found_only;       /* HDL_EBUSY if the group runs without this process */
    bool auto_deactivate;
    bool auto_sync;
    int64_t timeout_ns;
    const struct ctl_param *params;
    uint32_t num_params;
    const void *endpoint; /* at most CTL_ENDPOINT_MAX bytes */
    size_t endpoint_size;
};

#define CTL_ENDPOINT_MAX 4096
#define CTL_CAPACITY_MAX 65536

enum ctl_proposal_kind {
    CTL_PROPOSE_SYNC =
        1, /* wait until what was proposed or noticed before is committed */
    CTL_PROPOSE_ACTIVATE,   /* admit the slots */
    CTL_PROPOSE_DEACTIVATE, /* remove the slots, planned */
    CTL_PROPOSE_JOIN        /* be admitted oneself: done when a member has admitted */
};

struct ctl_proposal {
    uint64_t id; /* the caller's; comes back in CTL_DO_PROPOSED */
    enum ctl_proposal_kind kind;
    uint32_t num_slots;
    const uint32_t *slots;
    int64_t timeout_ns;
};

struct ctl_agent_event {
    enum ctl_agent_event_kind kind;
    uint64_t key; /* the caller's number for one of its groups, never used twice */
    uint64_t rank_epoch;
    uint64_t epoch;
    uint64_t x;
    bool up;
    enum hdl_status status;
    const char *text;
    const void *data;
    size_t size;
    const struct ctl_registration *registration;
    const struct ctl_proposal *proposal;
    const struct ctl_answer *answer;
};

/* ---------------------------------------------------------------------------- actions */

enum ctl_action_kind {
    /* of both machines */
    CTL_DO_SEND,  /* conn (coordinator only), bytes: one frame's payload */
    CTL_DO_CLOSE, /* conn (coordinator only): close after what was sent before */
    CTL_DO_LOG,   /* level, text */
    /* of the agent only: the connection to the coordinator and the processes of this host
     */
    CTL_DO_CONNECT,          /* open one and authenticate */
    CTL_DO_ADMITTED,         /* rank_epoch: in the job now; again after a loss */
    CTL_DO_REFUSED,          /* status, text: never in the job */
    CTL_DO_COORDINATOR_LOST, /* text: groups that need it end by CTL_DO_FAIL */
    CTL_DO_WATCH,            /* rank_epoch, pid, name: of a process on this host */
    CTL_DO_UNWATCH,          /* rank_epoch */
    CTL_DO_GOODBYE,          /* the connection may be closed, the agent destroyed */
    /* of the agent only: one group (key) */
    CTL_DO_ATTACH, /* view: map or connect what is not yet; feed ATTACHED(view->epoch) */
    CTL_DO_START,  /* view: created; operations may run */
    CTL_DO_FREEZE, /* prepare: freeze and feed FROZEN */
    CTL_DO_COMMIT, /* view: the new view, ends the freeze */
    CTL_DO_CLOSED, /* slot, rank_epoch: its windows may be unmapped */
    CTL_DO_WATCH_DONE, /* x: feed FINISHED once `done` >= x (replaces an earlier watch) */
    CTL_DO_FAIL,       /* status, text: the group is over here; LEAVE is still fed */
    CTL_DO_PROPOSED,   /* proposal, status, text, epoch, x = first operation number */
    CTL_DO_LEFT,       /* the key is forgotten */
    CTL_DO_REGISTERED  /* slot, rank_epoch: the coordinator knows it; a joiner may ask to
                          join */
};

struct ctl_action {
    enum ctl_action_kind kind;
    enum hdl_status status;
    enum hdl_log_level level;
    uint32_t slot;
    int32_t pid;
    uint64_t conn;
    uint64_t key;
    uint64_t rank_epoch;
    uint64_t epoch;
    uint64_t x;
    uint64_t proposal;
    struct ctl_bytes *bytes;
    struct ctl_view *view;
    struct ctl_prepare *prepare; /* one allocation with its array */
    char *text;                  /* also the unix socket's name in CTL_DO_WATCH */
};

/* Zero-initialise with its env, clear after use; memory is kept between steps. */
struct ctl_actions {
    struct base_env *env;
    struct ctl_action *items;
    size_t count;
    size_t capacity;
    bool failed; /* memory ran out: the machine that was stepped must be given up */
};

/* Drops what the actions own; the list is empty afterwards. */
void ctl_actions_clear(struct ctl_actions *actions);
void ctl_actions_free(struct ctl_actions *actions);
/* Appends; NULL (and `failed`) if there is no memory. The rest of the action is zero. */
struct ctl_action *ctl_actions_add(struct ctl_actions *actions,
                                   enum ctl_action_kind kind);

#endif
