/* SPDX-License-Identifier: Apache-2.0 */
/* The contract with the data plane: positions, rank epochs, views, freeze and its answer.
 */
#ifndef CTL_VIEW_H
#define CTL_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ctl/bytes.h"

struct base_env;

/*
 * Position x of a chunk in a group: operation number << 20 | chunk. Operations count from
 * 1, so position 0 is "before everything". The order of x is the order of the group.
 *
 *      63                                20 19                 0
 *     +------------------------------------+--------------------+
 *     |         operation number           |       chunk        |
 *     +------------------------------------+--------------------+
 */
#define CTL_CHUNK_BITS 20
#define CTL_CHUNK_MAX ((UINT64_C(1) << CTL_CHUNK_BITS) - 1)
#define CTL_X_FOREVER UINT64_MAX
#define CTL_OP_FOREVER (UINT64_MAX >> CTL_CHUNK_BITS)

static inline uint64_t ctl_x(uint64_t op, uint64_t chunk)
{
    return op << CTL_CHUNK_BITS | chunk;
}

static inline uint64_t ctl_x_op(uint64_t x)
{
    return x >> CTL_CHUNK_BITS;
}

static inline uint64_t ctl_x_chunk(uint64_t x)
{
    return x & CTL_CHUNK_MAX;
}

/* Last possible position of an operation: the boundary "after operation n". */
static inline uint64_t ctl_x_end(uint64_t op)
{
    return ctl_x(op, CTL_CHUNK_MAX);
}

/* Epoch of a view = number of its ballot: term << 40 | count of the group's ballots,
 * which goes on from term to term. 0 = none. */
#define CTL_COUNT_BITS 40

static inline uint64_t ctl_epoch(uint64_t term, uint64_t count)
{
    return term << CTL_COUNT_BITS | count;
}

static inline uint64_t ctl_epoch_count(uint64_t epoch)
{
    return epoch & ((UINT64_C(1) << CTL_COUNT_BITS) - 1);
}

static inline uint64_t ctl_epoch_term(uint64_t epoch)
{
    return epoch >> CTL_COUNT_BITS;
}

/* Rank epoch: job rank << 32 | registration. Registrations count from 1; 0 = nobody. */
static inline uint64_t ctl_rank_epoch(uint32_t job_rank, uint32_t registration)
{
    return (uint64_t)job_rank << 32 | registration;
}

static inline uint32_t ctl_rank_epoch_rank(uint64_t rank_epoch)
{
    return (uint32_t)(rank_epoch >> 32);
}

/*
 * One slot of a committed view. `first` and `last` bound the interval of its holder.
 * Operations n from ctl_x_op(first) to reported that lack the holder's data end
 * HDL_INCOMPLETE with this slot in the failed set; below `first` the same holds from
 * before_from to reported_before (of the slot's earlier holder).
 */
struct ctl_slot {
    uint64_t rank_epoch; /* 0 = no holder with an unclosed interval */
    uint64_t first;
    uint64_t last; /* CTL_X_FOREVER = open */
    uint64_t reported;
    uint64_t before_from;
    uint64_t reported_before;
    bool absent;
    bool active;
    bool closed; /* every present rank has finished `last`: nothing of it is needed */
    struct ctl_bytes *endpoint; /* the holder's opaque blob; NULL if it has none */
};

/* From position `from` on, the attempt is `epoch`, unless a later entry says otherwise.
 */
struct ctl_attempt {
    uint64_t from;
    uint64_t epoch;
};

/*
 * A committed view: immutable, counted references (atomic). `attempts` grows in both
 * fields; entries that no present rank can ask for any more have been left out.
 */
struct ctl_view {
    struct base_env *env;
    uint32_t references;
    uint64_t group; /* creation number, unique in the job */
    uint64_t epoch;
    uint64_t settled; /* messaged chunks up to here count as `ready` from everybody */
    /* Operations from this number on began nowhere before this view, or before the one
     * that it repeats. */
    uint64_t begun;
    /* Operations not finished yet that end HDL_ELINK; none if from > to. Also those of
     * the views before that are not finished here yet. */
    uint64_t link_from, link_to;
    uint32_t capacity;
    uint32_t size; /* highest active slot + 1 */
    uint32_t num_active;
    uint32_t num_absent; /* of the active ones */
    uint32_t num_attempts;
    struct ctl_attempt *attempts;
    struct ctl_slot slots[];
};

struct ctl_view *ctl_view_new(struct base_env *env, uint32_t capacity,
                              uint32_t num_attempts); /* zeroed, one reference */
struct ctl_view *ctl_view_ref(struct ctl_view *view);
void ctl_view_unref(struct ctl_view *view); /* NULL is legal */
/* Recomputes size, num_active and num_absent from the slots. */
void ctl_view_count(struct ctl_view *view);

/* Whether the slot's holder takes part in x (a fact of the history, absent or not). */
static inline bool ctl_slot_takes_part(const struct ctl_slot *slot, uint64_t x)
{
    return slot->rank_epoch != 0 && x >= slot->first && x <= slot->last;
}

/* Whether the loss of the slot shows in operation n, given that n lacks its data. */
static inline bool ctl_slot_reports(const struct ctl_slot *slot, uint64_t n)
{
    if (n >= ctl_x_op(slot->first))
        return n <= slot->reported;
    return n >= slot->before_from && n <= slot->reported_before;
}

/*
 * What flags on the data path carry of an attempt; never 0, as flags are that nobody has
 * raised. Attempts of a group with one tag are 65,535 of its ballots apart. To be
 * mistaken, a rank's newest flag would have to be as old as that, and of a chunk that is
 * open: though all these ballots waited for the rank, it raised none in any of them.
 */
static inline uint16_t ctl_attempt_tag(uint64_t epoch)
{
    return (uint16_t)(ctl_epoch_count(epoch) % UINT16_MAX + 1);
}

/* Attempt of x; 0 if the view has no entry for it. */
uint64_t ctl_view_attempt(const struct ctl_view *view, uint64_t x);
/* Lowest position that this view's own ballot changed; CTL_X_FOREVER = none. Chunks from
 * there on restart: `ready` falls back to the position before. */
uint64_t ctl_view_changed_from(const struct ctl_view *view);

/* ------------------------------------------------------------------ freeze and answer */

/*
 * PREPARE as the data plane sees it. `dead` holds every slot whose holder is dead and
 * whose interval no commit has ended yet (it grows over the ballots between two commits).
 * For these `published` is sampled now, if it was not in an earlier ballot since the last
 * commit; nothing of them beyond that reading is used until the commit.
 */
struct ctl_prepare {
    uint64_t ballot;
    uint32_t num_dead;
    const uint32_t *dead; /* slots, ascending */
};

/* An operation with chunks between `ready` and the largest `published` of the answer. */
struct ctl_open_op {
    uint64_t op;
    uint32_t num_chunks; /* 0 = not known */
    bool messaged;
};

/*
 * The answer of one rank. All four counters are positions of the data plane's own, in a
 * fresh group: published = ready = done = ctl_x_end(0), next = 1; in one joined with
 * boundary `first`: ctl_x_end(op(first) - 1), op(first).
 * num_open: operations from op(ready) to op(max published[]), op(ready) included so that
 * its number of chunks is known; at most CTL_OPEN_MAX.
 */
#define CTL_OPEN_MAX 64
struct ctl_answer {
    uint64_t ballot;
    uint64_t ready;
    uint64_t done; /* needs nobody's chunk up to here any more */
    uint64_t next; /* lowest operation number not issued */
    uint32_t num_dead;
    uint64_t *published; /* [num_dead], in the order of prepare.dead */
    uint32_t num_open;
    struct ctl_open_op *open;
    bool messaged; /* kind of the operations that `open` does not list */
};

#endif
