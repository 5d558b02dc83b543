/* SPDX-License-Identifier: Apache-2.0 */
/* The agent: the coordinator's client inside every process. A pure state machine. */
#ifndef CTL_AGENT_H
#define CTL_AGENT_H

#include "ctl/event.h"

struct ctl_agent;

struct ctl_agent_options {
    uint32_t job_rank;
    uint64_t incarnation; /* random, one per process start */
    uint64_t host_id;     /* boot id + namespace ids, hashed: equal = same host */
    int32_t pid;
    const char *socket_name; /* of the own unix socket, "" if none */
    int64_t join_timeout_ns; /* to be admitted to the job; 0 = 60 s */
    int64_t dead_after_ns;   /* silence of the coordinator; 0 = as the coordinator says */
    int64_t lost_after_ns;   /* without the coordinator's connection; 0 = 1 s */
    bool standalone;         /* the coordinator is its own process: keep reconnecting */
};

/* The first step (a TICK) asks for the connection. */
enum hdl_status ctl_agent_create(struct base_env *env,
                                 const struct ctl_agent_options *options, int64_t now,
                                 struct ctl_agent **agent);
void ctl_agent_destroy(struct ctl_agent *agent); /* NULL is legal */

/* HDL_ENOMEM: give the agent up and fail its groups. HDL_EINVAL (with detail): the event
 * is a user's request with wrong values, nothing has happened. */
enum hdl_status ctl_agent_step(struct ctl_agent *agent,
                               const struct ctl_agent_event *event, int64_t now,
                               struct ctl_actions *actions);
int64_t ctl_agent_deadline(const struct ctl_agent *agent); /* INT64_MAX = no need */

/* The newest view of a group; NULL if none is committed. Borrowed. */
struct ctl_view *ctl_agent_view(const struct ctl_agent *agent, uint64_t key);
struct ctl_agent_stats {
    uint64_t views; /* committed by this agent's groups */
    uint64_t evidence_exit;
    uint64_t evidence_silence; /* of the coordinator */
    uint64_t reconnects;
    uint64_t stale_drops;
};
void ctl_agent_stats(const struct ctl_agent *agent, struct ctl_agent_stats *stats);

#endif
