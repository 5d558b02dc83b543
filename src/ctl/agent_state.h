/* SPDX-License-Identifier: Apache-2.0 */
/* What an agent remembers: its connection to the coordinator, its groups, its requests.
 */
#ifndef CTL_AGENT_STATE_H
#define CTL_AGENT_STATE_H

#include "base/list.h"
#include "ctl/action.h"
#include "ctl/agent.h"
#include "ctl/detector.h"
#include "ctl/map.h"
#include "ctl/msg.h"

#define SECOND INT64_C(1000000000)

enum agent_link_state {
    LINK_CONNECTING = 0, /* asked for a connection */
    LINK_WAITING,        /* until retry_at */
    LINK_GREETED,        /* HELLO is sent */
    LINK_UP              /* WELCOME came */
};

enum agent_group_state {
    AGENT_REGISTERING = 0, /* REGISTER is or will be sent */
    AGENT_REGISTERED, /* the coordinator knows it; a joiner stays here until admitted */
    AGENT_ATTACHED,   /* own data plane reaches the founders' */
    AGENT_RUNNING,
    AGENT_FAILED /* the user was told; only LEAVE and ABORT are left */
};

/* A joiner's endpoint that waits for the attach before it. */
struct agent_endpoint {
    struct base_list node;
    uint32_t slot;
    uint64_t rank_epoch;
    struct ctl_bytes *endpoint;
};

/* A data link that is down, for telling a coordinator that does not know. */
struct agent_link {
    struct base_list node;
    uint64_t rank_epoch;
};

struct agent_proposal {
    struct base_list node;
    uint64_t id;
    int64_t deadline;
    struct ctl_bytes *bytes; /* the message, for sending again */
};

struct agent_group {
    struct base_list node; /* agent.groups, in the order of their making */
    uint64_t key;
    uint64_t id;         /* 0 before REGISTERED */
    uint64_t rank_epoch; /* own, in this group */
    uint32_t slot;
    enum agent_group_state state;
    bool leaving;
    bool join;
    int64_t deadline;           /* of creation, with some time for the coordinator */
    int64_t retry_at;           /* REGISTER again: the group is not there yet; 0 = no */
    struct ctl_bytes *request;  /* REGISTER, for sending again */
    struct ctl_view *view;      /* newest committed */
    struct ctl_view *attaching; /* handed out with ATTACH, not answered */
    uint64_t attaching_to;      /* rank epoch of the joiner it is about; 0 = all of it */
    uint64_t ballot;            /* highest PREPARE seen */
    bool frozen;
    struct base_list endpoints;
    struct base_list links; /* down */
    struct base_list proposals;
};

struct ctl_agent {
    struct base_env *env;
    struct ctl_agent_options options;
    char *socket_name;
    struct ctl_detector detector;
    enum agent_link_state link;
    bool lost;    /* without the coordinator for too long: decisions return HDL_ECOORD */
    bool refused; /* never again */
    bool coordinator_exited; /* its process was seen ending */
    bool admitted;           /* once at least: a fenced one may have rank epoch 0 again */
    uint64_t rank_epoch;     /* 0 = not admitted */
    uint64_t term;
    uint32_t turn; /* latest of a coordinator that it was admitted by */
    int64_t dead_after;
    int64_t last_heard;
    int64_t next_beat;
    int64_t retry_at;
    int64_t backoff;
    char coordinator_at[80]; /* its address, of the last connection */
    int64_t lost_at;         /* when `lost` becomes true; INT64_MAX = connected */
    int64_t join_deadline;
    int64_t wake;
    struct base_list groups;
    struct ctl_map neighbours; /* job rank + 1 of the processes watched on this host: this
                                  agent, or a mark once its end was seen */
    struct ctl_agent_stats stats;
    struct ctl_actions *out;
    int64_t now;
};

/* agent.c */
void agent_wake_at(struct ctl_agent *agent, int64_t when);
void agent_send(struct ctl_agent *agent, const struct ctl_msg *msg);
void agent_out_of_memory(struct ctl_agent *agent);
void agent_reconnect(struct ctl_agent *agent);
/* Why the groups that need the coordinator end: where it was, what to do. */
void agent_lost_text(struct ctl_agent *agent, char text[CTL_LINE_BYTES]);
/* Whether a neighbour has ended, and the coordinator may not know it yet. */
bool agent_saw_end(const struct ctl_agent *agent, uint64_t rank_epoch);

/* agent_message.c: what the coordinator says about groups */
void agent_group_message(struct ctl_agent *agent, const struct ctl_msg *msg);
void agent_attach_next(struct ctl_agent *agent, struct agent_group *group);
void agent_abort_on_wire(struct ctl_agent *agent, uint64_t group);

/* agent_group.c: groups, requests of the user */
struct agent_group *agent_group_by_id(struct ctl_agent *agent, uint64_t id);
/* An action about the group; NULL if there is no memory. */
struct ctl_action *agent_group_do(struct ctl_agent *agent,
                                  const struct agent_group *group,
                                  enum ctl_action_kind kind);
/* Hands the outcome out and frees the proposal. */
void agent_proposed(struct ctl_agent *agent, struct agent_group *group,
                    struct agent_proposal *proposal, const struct ctl_msg *msg);
void agent_end_proposals(struct ctl_agent *agent, struct agent_group *group,
                         enum hdl_status status, const char *text);
void agent_endpoint_free(struct ctl_agent *agent, struct agent_endpoint *endpoint);
void agent_send_attached(struct ctl_agent *agent, struct agent_group *group,
                         uint64_t rank_epoch, const struct ctl_agent_event *event);
enum hdl_status agent_register(struct ctl_agent *agent,
                               const struct ctl_agent_event *event);
enum hdl_status agent_propose(struct ctl_agent *agent,
                              const struct ctl_agent_event *event);
struct agent_group *agent_group_by_key(struct ctl_agent *agent, uint64_t key);
void agent_group_event(struct ctl_agent *agent, const struct ctl_agent_event *event);
void agent_group_timers(struct ctl_agent *agent, struct agent_group *group);
/* After a (re)connection: what the coordinator may not have got is sent again. */
void agent_group_resend(struct ctl_agent *agent, struct agent_group *group);
/* To a restarted coordinator: what it needs to take the group over. */
void agent_group_report(struct ctl_agent *agent, struct agent_group *group);
void agent_group_fail(struct ctl_agent *agent, struct agent_group *group,
                      enum hdl_status status, const char *text);
/* Whether the group cannot go on without a coordinator. */
bool agent_group_needs_coordinator(const struct ctl_agent *agent,
                                   const struct agent_group *group);
bool agent_group_has(const struct agent_group *group, uint64_t rank_epoch);
void agent_group_free(struct ctl_agent *agent, struct agent_group *group);

#endif
