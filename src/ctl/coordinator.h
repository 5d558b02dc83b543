/* SPDX-License-Identifier: Apache-2.0 */
/* The coordinator: decides the views of all groups of a job. A pure state machine. */
#ifndef CTL_COORDINATOR_H
#define CTL_COORDINATOR_H

#include "ctl/event.h"

struct ctl_coordinator;

struct ctl_coordinator_options {
    uint32_t num_ranks;      /* of the job; HELLO of a rank beyond is refused */
    int64_t dead_after_ns;   /* 0 = 5 s */
    int64_t grace_ns;        /* closed connection between hosts; 0 = 500 ms */
    int64_t link_timeout_ns; /* 0 = 5 s */
    bool standalone;         /* own process: survives every rank and may be restarted */
    bool restarted;          /* collects the ranks' views before it decides anything */
    uint64_t instance;       /* random, one per start */
    uint32_t turn; /* 24 bits: of this start, later than those before; ranks that know of
                      a later one say so */
    uint64_t host_id; /* of the coordinator's host; connections on it get little grace */
};

enum hdl_status ctl_coordinator_create(struct base_env *env,
                                       const struct ctl_coordinator_options *options,
                                       int64_t now, struct ctl_coordinator **coordinator);
void ctl_coordinator_destroy(struct ctl_coordinator *coordinator); /* NULL is legal */

/* HDL_ENOMEM: give the coordinator up (close all connections). Nothing else can fail. */
enum hdl_status ctl_coordinator_step(struct ctl_coordinator *coordinator,
                                     const struct ctl_coordinator_event *event,
                                     int64_t now, struct ctl_actions *actions);
/* When to feed the next tick; INT64_MAX = no need. */
int64_t ctl_coordinator_deadline(const struct ctl_coordinator *coordinator);
/* Ranks that have neither said GOODBYE nor died, the coordinator's own included: rank 0
 * leaves when this is 1. */
uint32_t ctl_coordinator_num_live(const struct ctl_coordinator *coordinator);
/* Ranks that were found dead by their silence. */
uint64_t ctl_coordinator_num_silent(const struct ctl_coordinator *coordinator);

#endif
