/* SPDX-License-Identifier: Apache-2.0 */
/* Point to point: matching of sends and receives, and the streams that move their bytes.
 */
#ifndef GROUP_P2P_H
#define GROUP_P2P_H

#include "group/group.h"

/*
 * Matching is here, moving is in a stream per peer (mapped, or messaged):
 *
 *     group->receives    posted and not matched, in order
 *     group->unexpected  messages that came before their receive, in order of arrival
 *     peer.queued        sends that wait for room in the stream, in order
 *     peer.large         sends announced that wait for their grant, or are streaming
 *     peer.granted       receives that get a large message
 */

/* A message that no receive wanted yet. */
struct group_unexpected {
    struct base_list node;
    uint32_t source;
    int32_t tag;
    size_t bytes;
    bool large;       /* waits at the sender; `data` is empty */
    uint64_t message; /* its number in the stream, if large */
    unsigned char data[];
};

/* Moves messages to and from one peer. Functions run under the lock and wait for nothing.
 */
struct group_stream {
    const char *name;
    /* A new send; group_op_finish it when its source is free, now or in progress. */
    void (*send)(struct hdl_group *group, struct hdl_op *op);
    /* Both directions of one peer; true if anything moved. */
    bool (*progress)(struct hdl_group *group, uint32_t peer);
    /* A receive wants large message `message` of the peer: its bytes go to op->dst;
     * refuse: the lengths differ, the sender must be told (op is NULL then). */
    void (*accept)(struct hdl_group *group, uint32_t peer, uint64_t message,
                   struct hdl_op *op, bool refuse);
    /* A receive ends: what accept made for it (op->transport) is given back. Optional. */
    void (*release)(struct hdl_group *group, struct hdl_op *op);
    /* The peer is lost and everything it sent has been taken: forgets it. Sends and
     * receives are ended by the caller. */
    void (*lost)(struct hdl_group *group, uint32_t peer);
};

enum group_cell_type {
    GROUP_CELL_SMALL = 1,
    GROUP_CELL_MEDIUM,
    GROUP_CELL_LARGE,
    GROUP_CELL_FRAGMENT,
    GROUP_CELL_COMPLETE /* the whole large message lies in the receiver's memory */
};

/* What an announcement or a fragment carries in its cell. */
struct group_cell_note {
    uint64_t message;
    uint64_t offset;
    uint64_t bytes;
};
static_assert(sizeof(struct group_cell_note) <= GROUP_CELL_BYTES, "fits a cell");

/* What a peer wrote for this rank: in its segment, or in the mirror of it. */
struct group_stream_ends {
    struct group_intake *intake;
    struct group_cell *cells;
    char *bulk;
};

struct group_p2p_peer {
    struct base_list node;    /* in group_p2p.active while anything is open */
    struct base_list queued;  /* sends that wait for room, in order */
    struct base_list large;   /* sends that wait for their grant */
    struct hdl_op *streaming; /* send whose fragments go out */
    struct base_list granted; /* receives whose large message was granted */
    uint32_t sends, receives; /* open ones that name this peer */
    bool lost;
    uint64_t rank_epoch; /* of the peer that the stream is with */
    const struct group_stream *stream;
    struct group_stream_ends in;
    /* messaged stream: what the peer has been sent of the words below */
    struct base_list unpushed; /* in group_p2p.unpushed while something is missing */
    uint64_t cells_pushed;
    uint64_t told_cells, told_fragments, told_taken, told_granted;
    struct group_exposure target; /* of `streaming`, both 0 = in fragments */
    uint64_t last_put;            /* of `streaming`, 0 = not all of it is put */
    /* outgoing */
    uint64_t cells_written, cells_free_to;
    uint64_t fragments_written, fragments_free_to;
    uint64_t messages; /* large ones announced */
    uint64_t grants_seen;
    /* incoming */
    uint64_t cells_read, cells_told;
    uint64_t fragments_read;
    uint64_t grants_written;
    uint64_t *backlog; /* grants that found no room, oldest first */
    uint32_t backlog_count, backlog_room;
};

struct group_p2p {
    struct base_list active;
    struct base_list unpushed;
    uint32_t any_receives; /* posted for any source */
    uint32_t num_unexpected;
    struct group_p2p_peer peer[];
};

extern const struct group_stream group_stream_mapped;
extern const struct group_stream group_stream_messaged;

enum hdl_status group_p2p_open(struct hdl_group *group);
void group_p2p_close(struct hdl_group *group);

/* Takes a new send or receive (desc.kind, peer, tag, src or dst, bytes are set); it may
 * be finished when this returns. */
void group_p2p_start(struct hdl_group *group, struct hdl_op *op);
bool group_p2p_progress(struct hdl_group *group);
static inline bool group_p2p_open_ops(const struct hdl_group *group)
{
    return group->p2p->any_receives || !base_list_empty(&group->p2p->active) ||
           !base_list_empty(&group->p2p->unpushed);
}
static inline bool group_p2p_sends(const struct hdl_group *group)
{
    if (!base_list_empty(&group->p2p->unpushed))
        return true;
    base_list_each(node, after, &group->p2p->active)
    {
        if (base_container_of(node, struct group_p2p_peer, node)->sends)
            return true;
    }
    return false;
}
/* Deadlines and slow waits: calls `each` for every open one until it returns false. */
void group_p2p_each(struct hdl_group *group, int64_t now,
                    bool (*each)(struct hdl_op *, int64_t));
/* After a new view: operations with lost peers end. */
void group_p2p_adopt(struct hdl_group *group);
/* Another process will be at `rank`: forgets the stream with the former one and cleans
 * the memory here that the new one will read or write. */
void group_p2p_renew(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch);
/* group->peer[rank] is new: opens the stream. */
void group_p2p_connect(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch);
/* Ends all with a status. */
void group_p2p_fail(struct hdl_group *group, enum hdl_status status, const char *text);
size_t group_p2p_describe(struct hdl_group *group, char *text, size_t room);

/* ----------------------------------------------------------------- for the streams */

/* First posted receive that the message fits, taken out of the posted ones; NULL = none.
 */
struct hdl_op *group_p2p_match(struct hdl_group *group, uint32_t source, int32_t tag);
/* Keeps a message for a later receive; false without memory: leave it where it is. */
bool group_p2p_keep(struct hdl_group *group, uint32_t source, int32_t tag, size_t bytes,
                    const void *data, bool large, uint64_t message);
/* A matched receive has its whole (small) message at data: checks the length, ends it. */
void group_p2p_deliver(struct hdl_group *group, struct hdl_op *op, uint32_t source,
                       int32_t tag, const void *data, size_t bytes);
/* A matched receive gets a large message: grants or refuses it. */
void group_p2p_begin(struct hdl_group *group, struct hdl_op *op, uint32_t source,
                     int32_t tag, size_t bytes, uint64_t message);
/* The last byte has come, or the operation ended otherwise: bookkeeping, group_op_finish.
 */
void group_p2p_finish(struct hdl_group *group, struct hdl_op *op, enum hdl_status status);

#endif
