/* SPDX-License-Identifier: Apache-2.0 */
/* Groups with peers on other hosts: mirrors of their slots, pushes, the round of `ready`.
 */
#ifndef GROUP_MESSAGED_H
#define GROUP_MESSAGED_H

#include "group/group.h"

/*
 * A rank of another host cannot be read, so it writes: what it publishes in its own
 * segment it also puts into a mirror of that segment, in the memory of one rank of each
 * other host (its receiver there). The receiver's neighbours map that memory. So a chunk
 * crosses the network once for each host, and the algorithms of the mapped path work on
 * mirrors as they are.
 *
 *      host A                                   host B
 *      rank 0 segment  --put-->  rank 2: mirror of 0  <--map--  rank 3
 *      rank 1 segment  --put-->  rank 3: mirror of 1  <--map--  rank 2
 *
 * The receive area at the end of a segment (shape.messaged): one mirror for each source.
 *
 *   0         group_head: done, ready of the source
 *   4 KiB     slots[W], data[W][B], pieces[W][B]   of collectives
 *             intake, cells[64], bulk[16]            of the stream to this rank alone
 */
struct messaged_shape {
    size_t slots, data, pieces, intake, cells, bulk;
    size_t bytes; /* of one mirror */
};

/* Receive memory of a rank, at shape.messaged of its segment; SIZE_MAX if it is too
 * large. */
size_t group_messaged_bytes(uint32_t capacity, uint32_t window_chunks,
                            size_t chunk_bytes);

enum messaged_what {
    MESSAGED_INPUT, /* raises seq */
    /* Reductions that may go by pieces: chunk 0's header comes first. */
    MESSAGED_HEAD,  /* raises seq */
    MESSAGED_PART,  /* shares of the input, or of the sum of this host; raises part */
    MESSAGED_FULL,  /* the whole input: not by pieces, or no more; raises full */
    MESSAGED_PIECE, /* what this rank reduced; raises piece */
};

/* Of the ring, for each slot: a chunk is published if less than 2 are queued (and may add
 * one more); its shares and its piece follow without asking. */
enum { MESSAGED_ENTRIES = 5 };

/* A chunk that was published here and must be pushed to the receivers. */
struct messaged_entry {
    uint64_t x;
    uint32_t slot;
    enum messaged_what what;
    struct hdl_op
        *op; /* of PART and PIECE: shares depend on the ranks; open as long as x */
    struct group_desc desc;
    size_t payload; /* bytes that publish wrote */
    size_t stride;  /* of the blocks of one rank each; 0 = all ranks read all of it */
    size_t used;    /* bytes of the longest block */
    bool inlined;
};

/* Another host, as this rank pushes to it. */
struct messaged_target {
    struct ctl_bytes *handle; /* of one of its ranks: says which host it is */
    uint32_t low, high;       /* its lowest and highest rank */
    uint32_t *ranks;          /* its founders, ascending */
    uint32_t num_ranks;
    int32_t receiver; /* of this rank's slots there; -1 = nobody is left */
    struct hdl_peer_window *remote;
    uint64_t pushed; /* entries */
    uint64_t ready_told, done_told;
    uint64_t *tickets; /* [W] last put from each slot */
};

struct messaged {
    struct messaged_shape shape;
    uint32_t num_targets;
    struct messaged_target *targets;
    uint32_t
        *host; /* [capacity] number of its host in `targets`, UINT32_MAX = own host */
    const struct group_head *
        *heads; /* [capacity] where done and ready of a rank are read */
    struct messaged_entry *entries; /* [MESSAGED_ENTRIES * W] ring, by number */
    uint64_t published;             /* entries so far */
    struct hdl_op *readying;        /* first operation with chunks not ready here */
    uint64_t unsaid_done; /* chunks done since the last word about it; W = say now */
    uint16_t attempt;     /* of all x from `steady` on */
    uint64_t steady;
    bool *link_down;    /* [capacity] as the control plane was told */
    uint32_t *own_host; /* ranks of the own host, ascending */
    uint32_t num_own_host;
};

static inline struct messaged *messaged_of(const struct hdl_group *group)
{
    return group->path_state;
}

/* Where a peer of another host keeps the mirror of this rank. */
static inline size_t messaged_mirror_offset(const struct hdl_group *group)
{
    return group->shape.messaged + (size_t)group->rank * messaged_of(group)->shape.bytes;
}

/*
 * `ready` as others read it: (attempt, x) in one word, so that a flag of an older attempt
 * is never taken for one of this.
 *
 *     63           48 47                  20 19        0
 *    +---------------+----------------------+-----------+
 *    | attempt: its  | op number: low 28    |   chunk   |
 *    | tag           | bits                 |           |
 *    +---------------+----------------------+-----------+
 */
enum { MESSAGED_X_BITS = 48 };

static inline uint64_t messaged_word(uint16_t attempt, uint64_t x)
{
    return (uint64_t)attempt << MESSAGED_X_BITS |
           (x & ((UINT64_C(1) << MESSAGED_X_BITS) - 1));
}

/* Is the x of the word at or behind `x`? They are never 2^27 operations apart. */
static inline bool messaged_word_reaches(uint64_t word, uint64_t x)
{
    return (int64_t)((word - x) << (64 - MESSAGED_X_BITS)) >= 0;
}

/* Attempt of x in the view that progress uses. */
uint16_t messaged_attempt(const struct hdl_group *group, uint64_t x);

/* Does a rank's word say that it is ready for x? An older attempt does not count any
 * more, a newer one not before the own view has it. */
bool messaged_word_covers(const struct hdl_group *group, uint64_t word, uint64_t x);

/* messaged_hosts.c: who is where, whom to push to, where to read from. */
enum hdl_status messaged_hosts_open(struct hdl_group *group);
void messaged_hosts_close(struct hdl_group *group);
/* Tells the control plane which links are down, and when they are up again. */
void messaged_watch_links(struct hdl_group *group, int64_t now_ns);
/* After a new view: receivers of lost ranks are replaced, mirrors read elsewhere. */
void messaged_hosts_adopt(struct hdl_group *group);

/* What a rank of another host has written about itself here. */
struct group_head *messaged_mirror_head(struct hdl_group *group, uint32_t rank);
/* Nobody needs what the rank's former process has written here. */
void messaged_mirror_clean(struct hdl_group *group, uint32_t rank);
/* Tells everybody elsewhere that this rank leaves for good. */
void messaged_say_left(struct hdl_group *group);

/* messaged_push.c: slots and flags on their way to other hosts. */
void messaged_enqueue(struct hdl_group *group, struct hdl_op *op, uint64_t chunk,
                      enum messaged_what what, size_t payload);
/* Forgets what was queued: it belongs to an older view. */
void messaged_requeue(struct hdl_group *group);
bool messaged_push(struct hdl_group *group);
/* Is there room for another entry? */
bool messaged_room(const struct hdl_group *group);
/* Everybody elsewhere was told this rank's `ready` up to x? */
bool messaged_told(const struct hdl_group *group, uint64_t x);
/* Has every earlier put from this slot left it? */
bool messaged_slot_left(const struct hdl_group *group, uint32_t slot);

/* Has everything this rank put reached the present peers? Before it may leave. */
bool messaged_delivered(const struct hdl_group *group);

/* messaged_stream.c: the stream of stream_mapped.c to a peer that cannot read this
 * segment. */
struct group_stream_ends;
void messaged_stream_incoming(struct hdl_group *group, uint32_t peer,
                              struct group_stream_ends *ends);
/* Puts what was written for the peer since the last time; true if anything went out. What
 * finds no room is on the list of unpushed peers. */
bool messaged_stream_push(struct hdl_group *group, uint32_t peer);
/* A large message goes straight into the receiver's memory: the receiver exposes it (if
 * it can), says so with the grant, the sender puts what there is room for. */
void messaged_stream_expose(struct hdl_group *group, struct hdl_op *op);
struct group_exposure messaged_stream_exposed(const struct hdl_op *op);
void messaged_stream_release(struct hdl_group *group, struct hdl_op *op);
bool messaged_stream_put(struct hdl_group *group, uint32_t peer, struct hdl_op *op);
void messaged_stream_lost(struct hdl_group *group, uint32_t peer);

#endif
