/* SPDX-License-Identifier: Apache-2.0 */
/* What the coordinator remembers: connections, ranks, groups, members, ballots. */
#ifndef CTL_COORDINATOR_STATE_H
#define CTL_COORDINATOR_STATE_H

#include "base/list.h"
#include "base/rankset.h"
#include "ctl/action.h"
#include "ctl/coordinator.h"
#include "ctl/detector.h"
#include "ctl/map.h"
#include "ctl/msg.h"

#define SECOND INT64_C(1000000000)

/*
 *   coordinator -- conns (by number)      authenticated; of a rank after HELLO
 *               -- ranks (by job rank)    one process start each: rank epoch, evidence
 *               -- groups (by creation)   one committed view, at most one ballot
 *                      slots -- holder    member with an unclosed interval of the view
 *                            -- joiner    member that is registered, not in the view
 *
 * A member is one registration of one process in one group. It is linked in its rank, so
 * that the death of a process reaches every group it is in.
 */

enum coord_rank_state { RANK_NONE = 0, RANK_LIVE, RANK_GRACE, RANK_DEAD, RANK_LEFT };

struct coord_conn {
    uint64_t id;
    struct coord_rank *rank; /* NULL before HELLO, and while waiting for a slot */
    struct base_list node;   /* coordinator.conn_list */
};

/* Who a process says it is. */
struct coord_identity {
    uint64_t incarnation;
    uint64_t host_id;
    uint32_t pid;
    char *socket_name;
};

struct coord_rank {
    uint32_t rank;
    uint32_t registration;
    uint64_t rank_epoch;
    enum coord_rank_state state;
    struct coord_identity identity;
    uint64_t conn; /* 0 = none */
    int64_t last_heard;
    int64_t grace_until;
    uint64_t probe; /* id of the sign of life that the holder was asked for; 0 = none */
    uint64_t answered;      /* highest id of a probe that this process has answered */
    uint64_t newcomer_conn; /* another process that wants this rank; 0 = none */
    bool new_here; /* came while ranks of the coordinator before still reported */
    struct coord_identity newcomer;
    struct base_list members;
};

enum coord_member_state {
    MEMBER_REGISTERED = 0, /* founder of a forming group, or joiner that waits */
    MEMBER_ATTACHED,       /* founder whose data plane reaches all */
    MEMBER_READY,          /* joiner that wants to be admitted */
    MEMBER_IN,             /* in the view, interval open */
    MEMBER_ENDED           /* in the view, interval ended, not closed */
};

struct coord_member {
    struct base_list node; /* rank->members */
    struct coord_group *group;
    struct coord_rank *rank;
    uint64_t process;    /* rank epoch of the process in the job */
    uint64_t rank_epoch; /* in the group: a joiner gets its own, so that nothing of an
                            earlier membership of the same process is taken for it */
    uint64_t key;
    uint32_t slot;
    enum coord_member_state state;
    bool dead;    /* by evidence, or it aborted */
    bool leaving; /* asked to leave */
    bool left;    /* was told LEFT: asked for nothing any more */
    bool asked;   /* takes part in the running ballot */
    bool answered;
    struct ctl_answer answer; /* own arrays */
    uint64_t done;
    uint64_t watch;          /* position asked for by WATCH; 0 = none */
    uint64_t reported_epoch; /* collecting: of the view that it has; 0 = not committed */
    bool founding;           /* collecting: a founder that was not told of the start */
    struct ctl_bytes *endpoint;
    struct base_rank_set *reached_by; /* joiner: slots whose data plane reaches it */
    struct base_rank_set *reaches;    /* joiner: slots that its data plane reaches */
    bool introduced;                  /* joiner: its endpoint was sent to the members */
};

struct coord_slot {
    struct coord_member *holder;
    struct coord_member *joiner;
    bool removing;      /* a removal is asked for */
    bool admitting;     /* an admission is asked for */
    bool entering;      /* its joiner is admitted by the commit that is being made */
    bool closed_unsaid; /* closed since the last commit */
    uint64_t probe;     /* asked of who is here, for a newcomer; 0 = none */
    int64_t probe_until;
    uint64_t admitted_epoch; /* of the commit that admitted the holder */
    uint64_t first_lacking;  /* of the last death in this slot */
};

enum coord_group_state {
    GROUP_FORMING = 0, /* founders register */
    GROUP_ATTACHING,   /* founders connect to each other */
    GROUP_RUNNING,
    GROUP_COLLECTING, /* after a restart: its members report what they have */
    GROUP_BROKEN      /* creation failed; founders that come later are told */
};

struct coord_proposal {
    struct base_list node;
    struct coord_member *member;
    uint64_t id;
    uint32_t kind;
    uint64_t epoch; /* of the proposer's view */
    int64_t deadline;
    /* First id of the probes that it waits for; 0 = none yet. Own removal: everybody else
     * shall have the commit. Admission: ranks that are in shall live. */
    uint64_t probe;
    uint32_t num_slots;
    uint32_t slots[];
};

struct coord_group {
    struct base_list node; /* coordinator.group_list, newest last */
    uint64_t id;
    enum coord_group_state state;
    /* creation */
    struct ctl_registration params; /* of the first founder; owned copies */
    uint32_t first_slot;            /* of the first founder */
    uint32_t num_waiting;           /* founders not yet registered, or not yet attached */
    uint64_t *told; /* [capacity] broken: processes that know, or were the reason */
    int64_t began;
    int64_t deadline;
    bool warned;            /* its founders, that it takes long */
    enum hdl_status status; /* broken: why */
    char *text;
    /* life */
    struct ctl_view *view;
    struct coord_slot *slots;
    uint64_t num_ballots; /* ever, of all terms */
    uint64_t ballot;      /* running; 0 = none */
    int64_t ballot_since;
    int64_t
        retry_joins_at;   /* nobody is admitted before: an answer was missing too long */
    uint32_t num_missing; /* answers */
    uint32_t num_dead;    /* named by the running ballot */
    uint32_t *dead;
    bool unfreeze; /* somebody is frozen in a ballot of the coordinator before */
    struct base_list proposals;
    struct coord_links *links; /* broken links reported by members; NULL = none */
};

struct ctl_coordinator {
    struct base_env *env;
    struct ctl_coordinator_options options;
    struct ctl_detector detector;
    uint64_t term;
    uint64_t num_groups; /* ever made in this term */
    bool collecting;     /* restarted: ranks of the term before report until then */
    int64_t collect_until;
    uint64_t next_probe;
    uint64_t num_silent; /* ranks found dead by their silence */
    int64_t next_beat;
    int64_t wake; /* earliest timer; may be too early, never too late */
    struct ctl_map conns;
    struct base_list conn_list;
    struct ctl_map groups;
    struct base_list group_list;
    struct coord_rank **ranks;
    uint32_t num_ranks;      /* of the array */
    struct ctl_actions *out; /* of the step that runs */
    int64_t now;             /* likewise */
};

/* coordinator.c */
void coord_wake_at(struct ctl_coordinator *c, int64_t when);
void coord_send(struct ctl_coordinator *c, const struct coord_rank *rank,
                const struct ctl_msg *msg);
void coord_out_of_memory(struct ctl_coordinator *c);
/* Closes a connection after what was sent on it, and forgets it. */
void coord_close(struct ctl_coordinator *c, uint64_t id);

/* coordinator_rank.c: processes and evidence about them */
void coord_hello(struct ctl_coordinator *c, struct coord_conn *conn,
                 const struct ctl_hello *hello);
void coord_conn_closed(struct ctl_coordinator *c, struct coord_conn *conn);
void coord_probed(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t id);
/* Asks for a sign of life; returns the id that comes back. */
uint64_t coord_probe(struct ctl_coordinator *c, const struct coord_rank *rank);
void coord_exited(struct ctl_coordinator *c, uint64_t rank_epoch);
void coord_goodbye(struct ctl_coordinator *c, struct coord_rank *rank);
void coord_rank_timers(struct ctl_coordinator *c);
/* The coordinator itself did not run for so long: nobody was silent meanwhile. */
void coord_excuse_gap(struct ctl_coordinator *c, int64_t gap);
struct coord_rank *coord_get_rank(struct ctl_coordinator *c, uint32_t index);
struct coord_rank *coord_rank_of(const struct ctl_coordinator *c, uint64_t rank_epoch);
void coord_rank_free(struct ctl_coordinator *c, struct coord_rank *rank);

/* coordinator_group.c: groups and members */
/* id 0 = the next creation number. */
struct coord_group *coord_group_new(struct ctl_coordinator *c, uint64_t id,
                                    const struct ctl_registration *params);
void coord_group_free(struct ctl_coordinator *c, struct coord_group *group);
struct coord_member *coord_member_new(struct ctl_coordinator *c,
                                      struct coord_group *group, struct coord_rank *rank,
                                      uint64_t key,
                                      const struct ctl_registration *registration);
void coord_member_free(struct ctl_coordinator *c, struct coord_member *member);
struct coord_member *coord_member_of(struct coord_rank *rank, uint64_t group);
struct coord_member *coord_member_by_key(struct coord_rank *rank, uint64_t key);
/* The process is dead, or it aborted this group. May free the member. */
void coord_member_died(struct ctl_coordinator *c, struct coord_member *member);
void coord_leave(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key);
void coord_abort(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                 uint64_t group);
void coord_send_view(struct ctl_coordinator *c, const struct coord_group *group,
                     const struct coord_member *to, bool attach);
void coord_send_left(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t group,
                     uint64_t key);
void coord_fail_member(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                       uint64_t group, enum hdl_status status, const char *text);
void coord_group_reconnected(struct ctl_coordinator *c, struct coord_member *member,
                             const struct ctl_group_state *state);

/* coordinator_create.c: founding and its failures */
void coord_register(struct ctl_coordinator *c, struct coord_rank *rank, uint64_t key,
                    const struct ctl_registration *registration);
void coord_founder_attached(struct ctl_coordinator *c, struct coord_member *member,
                            const struct ctl_msg *msg);
void coord_founder_gone(struct ctl_coordinator *c, struct coord_member *member);
void coord_founder_missing(struct ctl_coordinator *c, const struct coord_rank *rank);
void coord_creation_timers(struct ctl_coordinator *c, struct coord_group *group);

bool coord_params_differ(const struct coord_group *group,
                         const struct ctl_registration *theirs, char *text, size_t size);

/* coordinator_ballot.c: one ballot at a time */
/* The next number of a ballot, which is that of its view. */
uint64_t coord_next_ballot(const struct ctl_coordinator *c, struct coord_group *group);
/* Whether the next ballot has something to do. */
bool coord_anything_is_pending(const struct ctl_coordinator *c,
                               const struct coord_group *group);
void coord_ballot_check(struct ctl_coordinator *c, struct coord_group *group);
void coord_answer(struct ctl_coordinator *c, struct coord_member *member,
                  const struct ctl_answer *answer);
void coord_finished(struct ctl_coordinator *c, struct coord_member *member, uint64_t x);
void coord_ballot_timers(struct ctl_coordinator *c, struct coord_group *group);
void coord_prepare_again(struct ctl_coordinator *c, struct coord_member *member);
void coord_check_closed(struct ctl_coordinator *c, struct coord_group *group);

/* coordinator_join.c: joiners */
/* The newest group of that name that has a member. */
struct coord_group *coord_find_running(struct ctl_coordinator *c, const char *name);
void coord_register_joiner(struct ctl_coordinator *c, struct coord_rank *rank,
                           uint64_t key, const struct ctl_registration *registration);
/* Joiners that are ready and the members get each other's endpoints, once. */
void coord_introduce(struct ctl_coordinator *c, struct coord_group *group);
void coord_attached(struct ctl_coordinator *c, struct coord_member *member,
                    const struct ctl_msg *msg);
/* Whether the joiner and the rank of a slot reach each other. */
bool coord_joiner_connected(const struct coord_member *joiner, uint32_t slot);
bool coord_joiner_ready(const struct coord_group *group, const struct coord_slot *slot);
/* Whether the joiner and those that enter in the same commit reach each other. */
bool coord_joiner_meets(const struct coord_group *group, const struct coord_slot *slot);
/* A condition that the joiner of a slot does not meet yet. */
void coord_joiner_lacks(const struct coord_group *group, uint32_t i, char *text,
                        size_t size);
void coord_joiner_gone(struct ctl_coordinator *c, struct coord_member *member);
void coord_joiner_reconnected(struct ctl_coordinator *c, struct coord_member *member);

/* coordinator_propose.c: proposals */
void coord_propose(struct ctl_coordinator *c, struct coord_member *member,
                   const struct ctl_msg *msg);
/* A former member is registered again: it may have asked to join before that. */
void coord_join_waiting(struct ctl_coordinator *c, struct coord_member *member);
/* Takes up the wishes to join that came while the group was collecting. */
void coord_rejoin(struct ctl_coordinator *c, struct coord_group *group);
void coord_join_failed(struct ctl_coordinator *c, const struct coord_member *joiner,
                       enum hdl_status status, const char *text);
void coord_proposals_check(struct ctl_coordinator *c, struct coord_group *group);
void coord_proposals_drop(struct ctl_coordinator *c, struct coord_member *member);
void coord_proposals_end(struct ctl_coordinator *c, struct coord_member *member,
                         enum hdl_status status, const char *text);
void coord_proposal_timers(struct ctl_coordinator *c, struct coord_group *group);
/* Whether an active rank is left after all removals and losses that are known now. */
bool coord_anybody_stays(const struct coord_group *group);

/* coordinator_restart.c: taking over what agents report after a restart */
uint32_t coord_next_registration(const struct ctl_coordinator *c,
                                 struct coord_rank *rank);
uint64_t coord_next_group(struct ctl_coordinator *c);
void coord_state(struct ctl_coordinator *c, struct coord_rank *rank,
                 const struct ctl_msg *msg);
void coord_collect_timers(struct ctl_coordinator *c);

/* coordinator_link.c: links between live ranks that stay broken */
void coord_link(struct ctl_coordinator *c, struct coord_member *member,
                uint64_t rank_epoch, bool up);
void coord_link_timers(struct ctl_coordinator *c, struct coord_group *group);
bool coord_link_is_pending(const struct coord_group *group);
void coord_link_commit(const struct coord_group *group, struct ctl_change *change,
                       uint64_t ready, uint64_t done, uint64_t next);

static inline bool coord_is_up(const struct coord_rank *rank)
{
    return rank->state == RANK_LIVE || rank->state == RANK_GRACE;
}

/* Whether a member is asked in ballots: alive, and its interval is not closed. */
static inline bool coord_is_asked(const struct coord_member *member)
{
    return member && !member->dead && !member->left;
}

#endif
