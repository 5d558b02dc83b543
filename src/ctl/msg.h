/* SPDX-License-Identifier: Apache-2.0 */
/* Wire messages between agents and the coordinator: what they carry, encode, decode. */
#ifndef CTL_MSG_H
#define CTL_MSG_H

#include "base/status.h"
#include "ctl/event.h"

/*
 * A frame's payload (the host adds length, running number and MAC around it):
 *
 *     +------+------------------------------------------------------+
 *     | type | the fields of that type, in the order of the table   |
 *     |  u8  | in msg.c; integers little endian, arrays and strings |
 *     |      | with a u32 count before them                         |
 *     +------+------------------------------------------------------+
 *
 * Nothing may follow the last field. Every count is checked against the bytes that are
 * there before memory is allocated for it.
 */
#define CTL_WIRE_MAGIC UINT32_C(0x6c646448) /* "Hddl" */
#define CTL_WIRE_VERSION 4
/* Longest payload to the coordinator and to an agent: a view with all endpoints. */
#define CTL_FRAME_MAX_UP ((size_t)32 << 20)
#define CTL_FRAME_MAX_DOWN ((size_t)64 << 20)
#define CTL_TEXT_MAX 4096

enum ctl_msg_type {
    /* agent to coordinator */
    CTL_MSG_HELLO = 1, /* who I am; on reconnection also the state of my groups */
    CTL_MSG_REGISTER,  /* I found or extend a group */
    CTL_MSG_ATTACHED,  /* my data plane reaches all of view `epoch` (or why not) */
    CTL_MSG_ANSWER,    /* to PREPARE */
    CTL_MSG_FINISHED,  /* my `done` has reached x */
    CTL_MSG_EXITED,    /* a process on my host has ended */
    CTL_MSG_LINK,      /* my data link to a rank is down or up */
    CTL_MSG_PROPOSE,   /* a change of membership */
    CTL_MSG_LEAVE,     /* I leave a group */
    CTL_MSG_ABORT,     /* I am dead in a group */
    CTL_MSG_GOODBYE,   /* I leave the job; a closed connection is no evidence now */
    /* both ways */
    CTL_MSG_STATE,     /* to a restarted coordinator: my group, its newest view */
    CTL_MSG_HEARTBEAT, /* flag = answer at once, with the same id (a probe) */
    /* coordinator to agent */
    CTL_MSG_WELCOME,    /* your registration, the job's settings */
    CTL_MSG_REFUSED,    /* not in the job: status, text */
    CTL_MSG_NEIGHBOUR,  /* a process on your host: watch it (flag) or stop (no flag) */
    CTL_MSG_REGISTERED, /* your key stands for this group, slot and rank epoch */
    CTL_MSG_VIEW,       /* whole view: attach to it (flag) or take it as committed */
    CTL_MSG_START,      /* all are attached: view `epoch` is committed */
    CTL_MSG_ENDPOINT,   /* a joiner: attach to it, before it is in a view */
    CTL_MSG_FAILED,     /* the group is over for you: status, text */
    CTL_MSG_PREPARE,    /* freeze and answer */
    CTL_MSG_COMMIT,     /* change from view `base` to view `epoch` */
    CTL_MSG_WATCH,      /* say FINISHED when your `done` reaches x */
    CTL_MSG_CLOSED,     /* a slot's ended interval: its windows may go */
    CTL_MSG_PROPOSED,   /* outcome of a proposal */
    CTL_MSG_LEFT,       /* you are out of the group */
    CTL_MSG_FENCED,     /* your rank epoch is dead: group, or 0 for all */
    CTL_MSG_NOTICE,     /* a line for your log: text */
    CTL_MSG_TYPES
};

/* State of a group in HELLO after a reconnection. */
struct ctl_group_state {
    uint64_t group;
    uint64_t epoch; /* newest view; 0 = not running */
};

struct ctl_hello {
    uint32_t magic;
    uint32_t version;
    uint32_t rank;
    uint64_t incarnation;
    uint64_t rank_epoch; /* 0 on the first connection */
    uint64_t term;       /* highest seen */
    uint32_t turn;       /* likewise */
    uint64_t host_id;
    uint32_t pid;
    const char *socket_name;
    uint32_t num_groups;
    struct ctl_group_state *groups;
};

/* A changed slot of COMMIT, or a slot of VIEW. */
struct ctl_slot_change {
    uint32_t index;
    struct ctl_slot slot; /* slot.endpoint NULL in COMMIT = unchanged if the holder is */
    bool has_endpoint;
    const void *endpoint; /* decoded: points into the frame */
    size_t endpoint_size;
};

struct ctl_change {
    uint64_t base; /* epoch that it applies to; 0 = whole view */
    uint64_t settled;
    uint64_t begun;
    uint64_t link_from, link_to;
    uint32_t capacity;
    uint32_t num_attempts;
    struct ctl_attempt *attempts;
    uint32_t num_slots;
    struct ctl_slot_change *slots;
};

struct ctl_settings {
    int64_t dead_after_ns;
    uint32_t turn; /* of the coordinator's start */
    bool standalone;
    bool collecting; /* just restarted: send STATE of every group */
};

/*
 * A message as built or decoded. Only the fields of its type mean anything. Decoded
 * strings and endpoints point into the frame; arrays are owned (ctl_msg_release).
 */
struct ctl_msg {
    enum ctl_msg_type type;
    uint64_t group;
    uint64_t key;
    uint64_t rank_epoch;
    uint64_t epoch;
    uint64_t x;
    uint64_t id;
    uint32_t slot;
    uint32_t kind;
    uint32_t pid;
    enum hdl_status status;
    bool flag;
    const char *text;
    const void *endpoint;
    size_t endpoint_size;
    uint32_t num_slots;
    uint32_t *slots;
    int64_t timeout_ns;
    struct ctl_hello hello;
    struct ctl_registration registration;
    struct ctl_answer answer;
    struct ctl_change change;
    struct ctl_settings settings;
};

/*
 * Applies a decoded or built change: `base` NULL = a whole view. NULL with detail: no
 * memory, or the change does not fit (slot beyond the capacity, wrong base epoch).
 */
struct ctl_view *ctl_view_apply(struct base_env *env, const struct ctl_view *base,
                                uint64_t group, uint64_t epoch,
                                const struct ctl_change *change);

/* The change that makes a whole view out of nothing; slots [view->capacity] is the
 * caller's. */
struct ctl_change ctl_view_whole(const struct ctl_view *view,
                                 struct ctl_slot_change *slots);

/* NULL with detail: no memory, or longer than a frame may be. */
struct ctl_bytes *ctl_msg_encode(struct base_env *env, const struct ctl_msg *msg);
/*
 * HDL_EINVAL: unknown type, truncated, a count or string beyond the frame or its limit,
 * bytes left over. Nothing is left allocated on failure.
 */
enum hdl_status ctl_msg_decode(struct base_env *env, const void *data, size_t size,
                               struct ctl_msg *msg);
void ctl_msg_release(struct base_env *env, struct ctl_msg *msg);
const char *ctl_msg_name(enum ctl_msg_type type);

#endif
