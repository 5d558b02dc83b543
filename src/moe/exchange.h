/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange and its steps: what send, receive and combine share. */
#ifndef MOE_EXCHANGE_H
#define MOE_EXCHANGE_H

#include <stdatomic.h>

#include "base/copy.h"
#include "base/clock.h"
#include "base/env.h"
#include "moe/config.h"
#include "moe/peers.h"
#include "moe/rows.h"

/*
 * A flag names a step of a lane; flags only grow.
 *
 *     63        48 47                                     2 1  0
 *    +------------+----------------------------------------+----+
 *    | generation |            step of the lane            |note|
 *    +------------+----------------------------------------+----+
 */
enum moe_note {
    MOE_GIVEN = 0,       /* contributions summed over the contributor's experts */
    MOE_GIVEN_EXACT = 1, /* one for each (token, expert) */
    MOE_DROPPED = 2      /* nothing comes */
};
#define MOE_NOTE_MASK UINT64_C(3)

static inline uint64_t moe_flag(uint64_t generation, uint64_t step)
{
    return generation << 48 | step << 2;
}

/* The first line of a header, at moe_header(). A writer sets `begun` before it touches
 * any byte of the half, so a reader that finds it unchanged afterwards has read one step.
 */
struct moe_header_line {
    _Atomic uint64_t begun;
    _Atomic uint64_t flag;    /* the header is complete */
    _Atomic uint64_t rows;    /* the rows in a mapped arena are complete; of a messaged
                                 source: it puts nothing in this step, see moe_silent */
    _Atomic uint64_t weights; /* those given to combine are complete; with a note that
                                 says how the owner sums: MOE_GIVEN or _EXACT, or
                                 MOE_DROPPED: none come */
    /* from here on it is put as one block with the token records */
    uint32_t tokens;
    uint16_t refusal; /* enum moe_refusal: the step is over */
    uint16_t weighted;
    int64_t value[3];
};
_Static_assert(sizeof(struct moe_header_line) == MOE_LINE_BYTES, "one cache line");
#define MOE_HEADER_BLOCK offsetof(struct moe_header_line, tokens)

/* Why a rank refused its own tokens; the values are what its text says. */
enum moe_refusal {
    MOE_ACCEPTED = 0,
    MOE_TOO_MANY_TOKENS, /* tokens, max_tokens */
    MOE_NO_ROWS,         /* tokens */
    MOE_NO_IDS,          /* tokens */
    MOE_NO_SCALES,       /* tokens */
    MOE_NO_WEIGHTS,      /* tokens */
    MOE_BAD_EXPERT,      /* token, position, value */
    MOE_SELF_MASKED      /* rank */
};

/* A distinct (token, expert) of a token's list. */
struct moe_route {
    uint32_t rank;
    uint32_t local; /* number of the expert there */
    uint32_t position;
    float weight; /* of all entries that name it */
};

/* The same at the receiver. */
struct moe_entry {
    uint32_t row; /* of the output; INDEXED: number in row_numbers */
    uint16_t local;
    uint16_t position;
    float weight;
};

/* A received (source, token). */
struct moe_item {
    uint32_t token;
    uint32_t row;   /* RANK_MAJOR, INDEXED: of the output */
    uint32_t entry; /* its first, in the plan's entries, experts ascending */
    uint32_t entries;
};

enum moe_source_state {
    MOE_SOURCE_MASKED = 0, /* not waited for */
    MOE_SOURCE_WAITING,
    MOE_SOURCE_CAME,  /* its header did */
    MOE_SOURCE_TAKEN, /* its rows did, too */
    MOE_SOURCE_LOST   /* missing */
};

struct moe_source {
    enum moe_source_state state;
    uint32_t first, count; /* items */
    uint32_t arrived;      /* items of a messaged source that are there */
    bool weighted;
};

enum moe_phase { MOE_IDLE = 0, MOE_SENT, MOE_RECEIVED, MOE_COMBINING };

struct moe_lane {
    enum moe_phase phase;
    uint32_t number;
    uint64_t first_step; /* of this generation; 1 in the first */
    uint64_t step;       /* of its newest dispatch */
    uint64_t flag;
    size_t half;
    uint32_t tokens;
    bool weighted;
    bool refused;                 /* the own newest dispatch: it waited for nobody */
    bool in_place;                /* own rows are read where the caller has them */
    bool stream;                  /* large step: results are written past the cache */
    bool past;                    /* and so is what only other ranks read */
    const uint8_t *rows, *scales; /* in_place */
    uint64_t *active;             /* [mask_words] that routes count on */
    uint8_t *seen;                /* [R] its header of the newest step came */
    uint8_t *free;      /* [R] it is done with the half, as far as this rank knows */
    uint64_t *marks[2]; /* [R] puts of the newest step that used the half */
    struct moe_source *source; /* [R] */
    uint32_t *listen; /* [S] the member of a DP group that this rank takes rows of */
    uint8_t *alike;   /* [g] members of the own DP group who count on the same ranks */
    bool exact;       /* the own tokens are summed over positions */
    struct moe_item *items;
    struct moe_entry *entries;
    uint32_t num_items, num_entries;
};

/*
 * Rows of one rank for another travel in runs, each with one flag, at its first token.
 * Between small ones may be places that nobody wants: that costs less than one more put.
 * Both ends cut the runs by this rule.
 */
struct moe_run {
    uint32_t first, token; /* its first and its last */
    uint32_t rows;         /* of the last one; 0 = no run yet */
};

struct moe_run_limits {
    uint32_t places; /* of a token */
    uint32_t most;   /* places of a run */
    uint32_t gap;    /* places that may be in vain before a token */
};

static inline bool moe_run_joins(const struct moe_run *run, uint32_t token,
                                 const struct moe_run_limits *l)
{
    return run->rows > 0 && (token - run->token) * l->places - run->rows <= l->gap &&
           (token - run->first + 1) * l->places <= l->most;
}

/* Adds a token, of that many rows, to the run that it joins, or begins one with it. */
static inline void moe_run_add(struct moe_run *run, uint32_t token, uint32_t rows,
                               bool joins)
{
    *run = (struct moe_run){joins ? run->first : token, token, rows};
}

/* From the first row of the run to the end of its last. */
static inline size_t moe_run_bytes(const struct moe_run *run,
                                   const struct moe_run_limits *l, size_t stride,
                                   size_t bytes)
{
    return ((run->token - run->first) * l->places + run->rows - 1) * stride + bytes;
}

struct hdl_moe {
    uint64_t magic;
    uint64_t id; /* in its handles */
    struct base_env *env;
    struct moe_config config;
    struct moe_peers *peers;
    struct moe_wire wire;
    uint64_t generation;
    uint64_t next;             /* number of the next dispatch */
    uint64_t turn;             /* the same in this generation: lanes are used in turn */
    uint64_t first_next;       /* on GPUs: what `next` was when this generation began */
    struct hdl_group *group;   /* NULL in tests; for update */
    struct moe_gpu_link *link; /* on GPUs; it is also `peers` */
    struct hdl_moe_opts opts;  /* without the map */
    uint32_t local;            /* own experts */
    struct moe_run_limits row_runs, give_runs; /* of dispatch, of combine */
    struct moe_lane *lanes;
    /* scratch of one call */
    uint64_t *mask;           /* [mask_words] taking part */
    uint8_t *pending;         /* [R] */
    uint32_t *cursor;         /* [L] */
    uint32_t *needs;          /* [R] */
    struct moe_run *runs;     /* [R] */
    struct moe_route *routes; /* [k] */
    const void **parts;       /* [k] */
    float *part_weights;      /* [k] */
    void **places;            /* [k] */
    uint8_t *copies;          /* [takes][give_stride] */
    float *sum;               /* [H] */
    /* counters */
    uint64_t failed_steps, incomplete_calls, stale_drops;
    enum hdl_moe_protocol protocol[2]; /* of GPUs' dispatch, combine */
    enum hdl_status last_error;
    int64_t error[3]; /* token, position, value */
    uint64_t *expert_rows, *wait_ns, *bytes_sent, *bytes_received;
};

/* ------------------------------------------------------------------- small helpers */

static inline bool moe_mapped(const struct hdl_moe *m, uint32_t rank)
{
    return m->peers->base[rank] != NULL;
}

/* Do routes depend on which member of a DP group a contributor listened to? */
static inline bool moe_says_source(const struct hdl_moe *m)
{
    return m->config.shape.dp > 1 && m->config.map.replicas > 1;
}

/* Where what `source` wrote for others is read: its arena, or what it put into mine. */
static inline uint8_t *moe_base(const struct hdl_moe *m, uint32_t source)
{
    uint8_t *base = m->peers->base[source];
    return base ? base : m->peers->own;
}

static inline struct moe_header_line *moe_line(const struct hdl_moe *m, size_t half,
                                               uint32_t source)
{
    return (
        struct moe_header_line *)(void *)(moe_base(m, source) +
                                          moe_header(&m->config.layout, half, source));
}

static inline _Atomic uint64_t *moe_word(uint8_t *base, size_t offset)
{
    return (_Atomic uint64_t *)(void *)(base + offset);
}

/* Asks for cache lines of a small step ahead of their use: to read what a peer wrote, or
 * to write what a peer has read. All at once takes little longer than one. */
enum { MOE_AHEAD_BYTES = 8 << 10 };

static inline void moe_fetch_ahead(const uint8_t *at, size_t bytes)
{
    for (size_t i = 0; bytes <= MOE_AHEAD_BYTES && i < bytes; i += MOE_LINE_BYTES)
        __builtin_prefetch(at + i);
}

static inline void moe_own_ahead(uint8_t *at, size_t bytes)
{
    for (size_t i = 0; bytes <= MOE_AHEAD_BYTES && i < bytes; i += MOE_LINE_BYTES)
        base_own_line(at + i);
}

static inline bool moe_gone(const struct hdl_moe *m, uint32_t rank)
{
    return m->peers->ops->presence(m->peers, rank) != MOE_PRESENT;
}

/* A messaged rank that gave no sign of being done with the half gets nothing in the step
 * but a word that says so. */
static inline bool moe_cut(const struct hdl_moe *m, const struct moe_lane *lane,
                           uint32_t rank)
{
    return !moe_mapped(m, rank) && !lane->free[rank];
}

/* May the rank be sent anything in this step by put? */
static inline bool moe_reachable(const struct hdl_moe *m, const struct moe_lane *lane,
                                 uint32_t rank)
{
    return !moe_mapped(m, rank) && !moe_cut(m, lane, rank) && !moe_gone(m, rank);
}

/* If it fails the rank is lost, and will be missed by its absence. */
static inline void moe_send(const struct hdl_moe *m, uint32_t rank,
                            const struct moe_put *put)
{
    if (m->peers->ops->put(m->peers, rank, put) == HDL_OK)
        m->bytes_sent[rank] += put->bytes;
}

/* Is the rank gone, or has it said that this one gets nothing? */
static inline bool moe_silent(const struct hdl_moe *m, const struct moe_lane *lane,
                              uint32_t rank)
{
    return moe_gone(m, rank) ||
           (!moe_mapped(m, rank) &&
            atomic_load_explicit(&moe_line(m, lane->half, rank)->rows,
                                 memory_order_acquire) >= lane->flag);
}

/* The own header has the weights of a token, then its ids. */
static inline const float *moe_record(const struct hdl_moe *m, size_t half,
                                      uint32_t source, uint32_t token)
{
    return (
        const float *)(const void *)(moe_base(m, source) +
                                     moe_token(&m->config.layout, half, source, token));
}

/* ---------------------------------------------------------------------- exchange.c */

/* The exchange over `peers`, which it then owns (also on failure). */
enum hdl_status moe_exchange_create(struct base_env *env, struct moe_config *config,
                                    struct moe_peers *peers, struct hdl_moe **moe);

/* The next dispatch of every lane has this step. */
void moe_exchange_start_at(struct hdl_moe *m, uint64_t step);

/* Puts what `fresh` is made of into m: lanes, peers, options; frees the rest of both. */
void moe_exchange_replace(struct hdl_moe *m, struct hdl_moe *fresh);

/* hdl_moe_status of what the host has counted. */
enum hdl_status moe_exchange_status(const struct hdl_moe *m, struct hdl_moe_state *state);

/* HDL_EINVAL unless it is an exchange. */
enum hdl_status moe_exchange_check(const struct hdl_moe *m);

/* Options of a call, and m->mask: the members that the caller's mask has. Who is lost, or
 * left, stays in it: what came before that counts. The waits find out and clear it. */
struct moe_call {
    int32_t *active;
    int64_t deadline_ns;
    uint32_t lost;   /* ranks whose entry this call cleared */
    uint32_t latest; /* of them */
};
enum hdl_status moe_call_begin(struct hdl_moe *m, const struct hdl_moe_call *opts,
                               struct moe_call *call);
/* Clears a rank in the caller's mask and in m->mask. */
void moe_call_lose(struct hdl_moe *m, struct moe_call *call, uint32_t rank);
enum hdl_status moe_call_end(struct hdl_moe *m, const struct moe_call *call,
                             bool missing);

/* Copies the caller's struct and checks it; tells the caller what was delivered. */
enum hdl_status moe_received_open(const struct hdl_moe *m,
                                  const struct hdl_moe_received *received,
                                  struct hdl_moe_received *copy);
void moe_received_close(struct hdl_moe_received *received, int64_t num_rows,
                        int64_t num_pairs);

/* The lane of an open step in this phase. */
enum hdl_status moe_handle_open(struct hdl_moe *m, const struct hdl_moe_handle *handle,
                                enum moe_phase phase, struct moe_lane **lane);
/* Before combine, also before dispatch_recv. */
enum hdl_status moe_handle_open_early(struct hdl_moe *m,
                                      const struct hdl_moe_handle *handle,
                                      struct moe_lane **lane);
void moe_handle_make(const struct hdl_moe *m, const struct moe_lane *lane,
                     struct hdl_moe_handle *handle);

/* ------------------------------------------------------------------------- route.c */

/* Distinct (token, expert)s of a token of `source`, positions ascending; returns how
 * many. `weights` is separate from the record: NULL gives weights of 0. */
uint32_t moe_resolve(const struct moe_config *config, const uint16_t *ids,
                     const float *weights, uint32_t source, uint32_t token,
                     const uint64_t *active, struct moe_route *routes);

static inline const uint16_t *moe_record_ids(const struct hdl_moe *m, const float *record)
{
    return (const uint16_t *)(const void *)(record + m->config.shape.top_k);
}

/* -------------------------------------------------------------------------- send.c */

enum hdl_status moe_dispatch_begin(struct hdl_moe *m, const struct hdl_moe_tokens *tokens,
                                   struct moe_call *call, bool fused,
                                   struct moe_lane **lane);
/* Tells `rank` the state of this rank's contributions; rows: some follow by put. */
void moe_tell(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
              enum moe_note note, bool rows);
/* Tells all that the own late weights, of so many bytes, are there, or MOE_DROPPED. */
void moe_tell_weights(struct hdl_moe *m, const struct moe_lane *lane, size_t bytes,
                      enum moe_note note);
/* Remembers that all puts so far use the lane's half. */
void moe_mark_puts(struct hdl_moe *m, struct moe_lane *lane);
/* Ends a step that cannot go on: everybody is told that nothing comes. */
void moe_step_fail(struct hdl_moe *m, struct moe_lane *lane);
/* What is wrong, as text. */
void moe_refusal_text(enum moe_refusal refusal, const int64_t *value, char *text,
                      size_t size);

/* -------------------------------------------------------------------------- plan.c */

/* Items and entries of the sources that came; rows of the output; the arrays of `out`
 * that routing alone determines. */
void moe_plan(struct hdl_moe *m, struct moe_lane *lane, struct hdl_moe_received *out);

/* ----------------------------------------------------------------------- receive.c */

/* Adds the time since `start` (0: did not wait) to what was waited for a rank. */
static inline void moe_count_wait(struct hdl_moe *m, uint32_t rank, int64_t start)
{
    if (start)
        m->wait_ns[rank] += (uint64_t)(base_now_ns() - start);
}

enum hdl_status moe_dispatch_finish(struct hdl_moe *m, struct moe_lane *lane,
                                    struct hdl_moe_received *out, struct moe_call *call);

/* ------------------------------------------------------------------ give.c, take.c */

enum hdl_status moe_combine_begin(struct hdl_moe *m, struct moe_lane *lane,
                                  const struct hdl_moe_outputs *outputs,
                                  struct moe_call *call, bool fused);
enum hdl_status moe_combine_finish(struct hdl_moe *m, struct moe_lane *lane,
                                   const struct hdl_moe_result *result,
                                   struct moe_call *call);

#endif
