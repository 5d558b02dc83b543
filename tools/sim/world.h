/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the simulator: processes, connections, the queue of events, the model of data.
 */
#ifndef SIM_WORLD_H
#define SIM_WORLD_H

#include "base/env.h"
#include "base/list.h"
#include "base/random.h"
#include "ctl/agent.h"
#include "ctl/coordinator.h"
#include "tools/sim/sim.h"

enum { SIM_GROUPS_MAX = 3, SIM_LINKS_MAX = 64 };

enum sim_event_kind {
    EV_COORD_OPENED = 1, /* conn */
    EV_COORD_CLOSED,
    EV_COORD_MESSAGE, /* conn, bytes */
    EV_COORD_TICK,
    /* of one process from here on */
    EV_CONNECT,      /* its attempt to connect succeeds or fails */
    EV_DISCONNECTED, /* conn */
    EV_MESSAGE,      /* conn, bytes */
    EV_TICK,
    EV_EXITED,  /* x = rank epoch */
    EV_LINK,    /* x = rank epoch of the peer, conn = 1: up */
    EV_JOIN,    /* it asks to join */
    EV_ADMIT,   /* it proposes to admit slot x */
    EV_REMOVE,  /* it proposes to remove slot x */
    EV_GOODBYE, /* it leaves the job and ends */
    EV_LEAVE,   /* it leaves, as soon as its issued operations are done */

    EV_ATTACHED, /* x = epoch */
    EV_PLANE,    /* the data thread makes a step */
    EV_USER,     /* the caller issues an operation */
    EV_PUT,      /* a message of the data plane arrives */
    EV_CONTINUE, /* the process goes on after a stop */
    EV_FAULT,    /* of the world: x = number */
    EV_RESTART   /* of the world: the coordinator comes back */
};

/* A message of the messaged data plane. */
struct sim_put {
    uint32_t from_slot;
    uint64_t from; /* rank epoch */
    uint64_t attempt;
    uint64_t index; /* chunk, counted over all operations */
    bool ready;     /* a `ready` flag, else an input */
};

struct sim_event {
    int64_t time;
    uint64_t order;
    enum sim_event_kind kind;
    uint32_t process;
    uint32_t group; /* the one that was looked at when it was made */
    uint64_t conn;
    uint64_t x;
    struct ctl_bytes *bytes;
    struct sim_put put;
};

struct sim_queue {
    struct sim_event *heap;
    size_t count, capacity;
    uint64_t order;
};

struct sim_conn {
    uint64_t id;
    uint32_t process;
    bool agent_open, coord_open;
    int64_t up_time, down_time; /* last delivery in each direction: order is kept */
};

/* A position in the order (attempt, index). */
struct sim_flag {
    uint64_t attempt;
    uint64_t count; /* chunks up to here; 0 = none */
};

/* What one process has of the group. Chunks are counted 0, 1, 2, ... over all operations.
 */
struct sim_plane {
    bool member;    /* the process has a place in the group */
    bool condemned; /* declared dead by a coordinator that is gone */
    bool running, over, left;
    bool joining; /* JOIN is asked for and not answered */
    uint32_t joins_tried;
    uint64_t proposals; /* not answered */
    bool leaving;       /* issues nothing more */
    bool left_sent;
    bool scheduled;
    bool user_waits; /* too many operations are open to issue another */
    enum hdl_status why;
    int64_t over_at;
    struct ctl_view *view;
    uint32_t slot;
    uint64_t rank_epoch;
    uint64_t next;      /* operation to be issued */
    uint64_t issued;    /* chunks of issued operations */
    uint64_t published; /* chunks: its window */
    uint64_t
        *wrote; /* [window] chunk + 1 that the slot holds; operations may end early */
    uint64_t ready;
    uint64_t done; /* returned to the user */
    bool frozen;
    uint64_t ballot;
    uint64_t answered;      /* `ready` in the answer */
    uint64_t answered_next; /* operations issued then, whatever the answer said */
    bool reading;           /* flags of chunk `ready` were read, `ready` not yet raised */
    uint64_t reading_epoch;
    uint64_t watch;   /* x; 0 = none */
    uint64_t *fenced; /* [capacity] published as read at the fence, +1; 0 = not fenced */
    struct sim_flag *in;    /* [capacity] newest `ready` flag */
    struct sim_flag *slots; /* [capacity * window] inputs received: attempt, index + 1 */
    uint64_t *slot_from;    /* [capacity * window] rank epochs */
    uint64_t *flag_from;    /* [capacity] */
    struct sim_process **peers; /* [capacity] holders of the view, dead ones too */
    bool *link_failed;  /* [ops + 2] operations that some view failed for a broken link */
    bool *ended;        /* [ops + 2] operations that ended before their last chunk */
    uint64_t view_hash; /* of `view` when it was committed */
    uint64_t *returned; /* [chunks] hash of who contributed; 0 = not returned */
    uint64_t *failed;   /* [ops + 1] hash of the failed set + 1; 0 = not finished */
};

struct sim_process {
    uint32_t index;
    uint32_t job_rank;
    bool alive, stopped, left;
    bool contended; /* another process of its rank lived beside it */
    int64_t continue_at;
    int64_t cut_up, cut_down; /* nothing to, nothing from the coordinator before */
    struct ctl_agent *agent;
    uint64_t conn; /* 0 = none */
    int64_t tick_at;
    uint64_t rank_epoch;
    bool joiner;
    int64_t slowness;  /* of its data thread: 1 = quick */
    uint64_t *watched; /* rank epochs on this host */
    uint32_t num_watched, cap_watched;
    struct sim_plane planes[SIM_GROUPS_MAX];
    struct sim_plane *plane; /* of the group that is looked at */
};

/* A data link that is down. */
struct sim_link {
    const struct sim_process *ends[2];
    int64_t until;
};

/* One committed view, for the comparison of histories. */
struct sim_history {
    uint64_t epoch;
    uint64_t hash;
    bool applied; /* by a rank */
};

/* How far the slots were looked at for one chunk, by ranks of one view. */
struct sim_look {
    uint64_t epoch;
    uint32_t inputs, done;
    uint64_t contributors, failed; /* hashes; 0 = not known */
};

/* The program that all members of a group run, and what they agreed on. */
struct sim_group {
    uint32_t index;
    uint32_t capacity;
    uint32_t num_founders;
    uint32_t *rank_of; /* [capacity] job rank of a slot */
    uint32_t *slot_of; /* [ranks of the job] UINT32_MAX = no place */
    bool broken;       /* somebody's creation failed */
    uint64_t num_chunks;
    uint64_t *first_index; /* [ops + 2] */
    uint32_t *root;        /* [ops + 1] slot; UINT32_MAX = none */
    struct sim_history *history;
    uint32_t num_history, cap_history;
    uint64_t newest;         /* epoch that the coordinator has shown */
    struct sim_look *looks;  /* [2 * chunks] */
    uint64_t most_published; /* chunks, by anybody */
    uint32_t *num_resting;   /* [capacity] data threads of the slot that stand still */
    uint64_t *resting;       /* the slots that have one, a bit each */
    uint64_t *agreed;        /* [chunks] contributors returned by a live rank; 0 = none */
    uint32_t *agreed_by;     /* [chunks] process */
    uint64_t *agreed_failed; /* [ops + 1] */
    uint32_t *agreed_failed_by; /* [ops + 1] */
    uint64_t *least;            /* [capacity] of a planted defect */
    int64_t *death_time;        /* [capacity] of the newest death, 0 = committed */
    uint64_t *dead_epoch;       /* [capacity] its rank epoch */
};

struct sim_world {
    struct sim_options options;
    struct sim_group groups[SIM_GROUPS_MAX];
    struct sim_group *group; /* that is looked at; see sim_select */
    struct sim_result *result;
    struct base_env env;
    uint64_t random;
    int64_t now;
    struct sim_queue queue;
    struct ctl_coordinator *coordinator;
    int64_t coord_tick_at;
    int64_t coord_stopped_until;
    int64_t coord_died_at; /* 0 = it lives */
    uint32_t num_processes, cap_processes;
    struct sim_process **processes;
    uint32_t *by_rank; /* job rank -> newest process */
    struct sim_conn *conns;
    uint32_t num_conns, cap_conns;
    uint32_t num_ranks; /* of the job: capacity of the first group */
    uint64_t num_proposals;
    struct sim_link links[SIM_LINKS_MAX];
    uint32_t num_links;
    uint32_t faults_left;
    bool faults_planned;
    int64_t data_scale; /* delay of data messages in eighths of a link's */
    int64_t faults_end;
    bool failed;
};

/* queue.c */
void sim_push(struct sim_world *w, int64_t time, const struct sim_event *event);
/* Later, but in its old place among the events of that time. */
void sim_push_again(struct sim_world *w, int64_t time, const struct sim_event *event);
bool sim_pop(struct sim_world *w, struct sim_event *event);

/* program.c */
bool sim_groups_make(struct sim_world *w);
void sim_groups_free(struct sim_world *w);
bool sim_is_named(const struct sim_group *group, const char *name);
/* The process registers in the group that is looked at. */
void sim_register(struct sim_world *w, struct sim_process *p);
/* Which group w->group and the processes' `plane` stand for. */
void sim_select(struct sim_world *w, uint32_t group);
uint64_t sim_key(const struct sim_world *w); /* of the agents, for that group */

/* world.c */
void sim_fail(struct sim_world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void sim_trace(struct sim_world *w, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
int64_t sim_delay(struct sim_world *w);
void sim_agent(struct sim_world *w, struct sim_process *p,
               const struct ctl_agent_event *event);
struct sim_process *sim_spawn(struct sim_world *w, uint32_t job_rank, bool joiner);
void sim_kill(struct sim_world *w, struct sim_process *p);
void sim_kill_coordinator(struct sim_world *w);
/* It comes back after `away`; only of one that is its own process. */
void sim_restart_coordinator(struct sim_world *w, int64_t away);
/* Once the first rank has started: the faults fall into the time of the operations. */
void sim_plan_faults(struct sim_world *w);
struct sim_process *sim_by_epoch(struct sim_world *w, uint64_t rank_epoch);
/* Not declared dead by the coordinator, and not out of the group by its own doing. */
bool sim_counts(const struct sim_world *w, const struct sim_process *p);

/* plane.c */
bool sim_plane_init(struct sim_world *w, struct sim_process *p);
void sim_plane_free(struct sim_plane *plane);
void sim_plane_start(struct sim_world *w, struct sim_process *p, struct ctl_view *view);
void sim_plane_freeze(struct sim_world *w, struct sim_process *p,
                      const struct ctl_prepare *prepare);
void sim_plane_commit(struct sim_world *w, struct sim_process *p, struct ctl_view *view);
void sim_plane_step(struct sim_world *w, struct sim_process *p);
void sim_plane_issue(struct sim_world *w, struct sim_process *p);
void sim_plane_put(struct sim_world *w, struct sim_process *p, const struct sim_put *put);
void sim_plane_watch(struct sim_world *w, struct sim_process *p, uint64_t x);
/* Whether it has nothing more to do in its program. */
bool sim_plane_finished(const struct sim_world *w, const struct sim_process *p);
uint64_t sim_x_of(const struct sim_world *w, uint64_t index);
uint64_t sim_op_of(const struct sim_world *w, uint64_t index);
/* Whether an operation's end says that its root was lost. */
bool sim_is_root_lost(uint64_t failed);

/* check.c */
/* Its hash. */
uint64_t sim_check_view(struct sim_world *w, struct sim_process *p,
                        const struct ctl_view *view);
void sim_check_chunk(struct sim_world *w, struct sim_process *p, uint64_t index);
void sim_check_op(struct sim_world *w, struct sim_process *p, uint64_t op);
/* Invariants 1 and 6, after every event of a process: nothing but a commit has changed
 * its view. */
void sim_check_immutable(struct sim_world *w, const struct sim_process *p);
/* Invariants 6 and 11 of the coordinator's own views, after every step of it. */
void sim_check_coordinator(struct sim_world *w);
void sim_check_end(struct sim_world *w);
/* The coordinator went with its rank: every other rank knows within 2 s. */
void sim_check_lost(struct sim_world *w);
uint64_t sim_view_hash(const struct ctl_view *view);
/* Whether the newest death of the slot is in the coordinator's view, or needs not be. */
bool sim_death_is_agreed(const struct sim_world *w, uint32_t slot);
bool sim_slot_is_open(const struct sim_world *w, uint32_t slot);
void sim_check_proposal(struct sim_world *w, struct sim_process *p,
                        const struct ctl_action *action);

/* fault.c */
void sim_fault(struct sim_world *w);
/* One of `kinds`, to the process of that rank. */
void sim_fault_at(struct sim_world *w, unsigned kinds, uint32_t rank);
void sim_propose(struct sim_world *w, struct sim_process *p, enum ctl_proposal_kind kind,
                 uint32_t slot);
void sim_join(struct sim_world *w, struct sim_process *p);
void sim_proposed(struct sim_world *w, struct sim_process *p,
                  const struct ctl_action *action);
void sim_leave(struct sim_world *w, struct sim_process *p);

#endif
