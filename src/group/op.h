/* SPDX-License-Identifier: Apache-2.0 */
/* The operation object: what was called, how far it is, how it ended. */
#ifndef GROUP_OP_H
#define GROUP_OP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"
#include "base/env.h"
#include "group/segment.h"

struct hdl_group;
struct group_engine;

enum group_kind {
    GROUP_BARRIER = 1,
    GROUP_BROADCAST,
    GROUP_REDUCE,
    GROUP_ALLREDUCE,
    GROUP_ALLGATHER,
    GROUP_ALLGATHERV,
    GROUP_REDUCE_SCATTER,
    GROUP_REDUCE_SCATTERV,
    GROUP_ALLTOALL,
    GROUP_ALLTOALLV,
    GROUP_GATHER,
    GROUP_GATHERV,
    GROUP_SCATTER,
    GROUP_SCATTERV,
    GROUP_REFUSED, /* a call with bad arguments: uses its number, ends HDL_EINVAL on all
                    */
    GROUP_SEND,    /* no op number */
    GROUP_RECV,
};

/* Which ranks' chunk must be there before this rank may go on. */
enum group_needs {
    GROUP_NEEDS_NONE,
    GROUP_NEEDS_ROOT,
    GROUP_NEEDS_ALL,
};

/*
 * One way to do one kind of collective over a mapped group, one per file. Every function
 * is called under the engine's lock, does one chunk, and waits for nothing.
 */
struct group_algorithm {
    const char *name;
    enum group_kind kind;
    /* Sets chunk_elems, num_chunks (at least 1) and chunk_bytes from the descriptor and
     * the shape alone: also the control thread asks, for calls that were not made here.
     */
    void (*plan)(struct hdl_op *op);
    /* Copies this rank's input of the chunk to the payload and returns its bytes; NULL:
     * no rank owes anything. */
    size_t (*publish)(struct hdl_op *op, uint64_t chunk, unsigned char *payload);
    /* For chunks above 0: chunk 0 compares descriptors with everybody. NULL = all. */
    enum group_needs (*needs)(const struct hdl_op *op);
    /* Reductions, optional: the elements of a chunk's payload that a rank reduces, 0 if
     * it takes no part. Shares of a host's ranks lie together, those of others apart. */
    size_t (*share)(const struct hdl_op *op, uint32_t rank, uint64_t chunk,
                    size_t *begin);
    /* Optional: reduces this rank's share of the chunk for the others. */
    void (*make_piece)(struct hdl_op *op, uint64_t chunk);
    /* All input that the view gives for the chunk is there (with op->use_pieces: all
     * pieces): writes the user's output. An error ends the operation on all ranks, so it
     * may depend on published data only. NULL: nothing to write. */
    enum hdl_status (*pull)(struct hdl_op *op, uint64_t chunk);
};

/* Arrays of v-variants, copied at submission; each
 * has one entry per slot, or is NULL. */
struct group_arrays {
    size_t *src_counts;
    size_t *src_displs;
    size_t *dst_counts;
    size_t *dst_displs;
};

struct hdl_op {
    struct base_list node; /* in its group's queue, or the engine's free list */
    struct hdl_group *group;
    struct group_engine *engine;
    _Atomic int status; /* HDL_PENDING until everything else here is final */
    bool freed;         /* handle given back while pending; under the lock */
    bool blocking;      /* has no handle: the caller waits */
    bool direct;        /* a view changed while it was open: inputs only, no pieces */
    bool warned;        /* the line of a slow wait was written */
    bool inlined;       /* payloads lie in the slots' first lines */
    bool stream;        /* output is larger than the cache: write past it */
    bool verified;      /* descriptors of all ranks are equal */
    bool mismatch;      /* found while looking at chunk 0 */
    bool use_pieces;    /* a rank gets of the inputs only its share */
    bool unsized;       /* num_chunks becomes known with chunk 0 */

    uint64_t number; /* op number; send and receive: 0 */
    struct group_desc desc;
    uint64_t hash;
    const struct group_algorithm *algorithm;

    const void *src;
    void *dst;
    struct group_arrays arrays;
    size_t *array_block; /* the memory behind them */
    double scalar;
    uint32_t blocks; /* ranks that the caller's arrays have room for: size at the call */
    size_t elem;     /* bytes of an element */
    size_t chunk_elems; /* elements (of each block) that one chunk moves */
    size_t chunk_bytes; /* most that a chunk has in a slot */
    size_t place;       /* in a slot, where payloads begin */
    uint64_t num_chunks;
    uint64_t published; /* chunks */
    uint64_t sums; /* messaged: chunks of whose inputs the other hosts got their shares */
    uint64_t pieces;
    uint64_t ready; /* messaged: chunks of which this rank has everything */
    uint64_t pulled;
    uint32_t ahead;      /* chunks that may be published and not pulled */
    uint32_t wait_rank;  /* ranks below it have arrived, for chunk `pulled` */
    uint32_t sum_rank;   /* the same for chunk `sums` */
    uint32_t piece_rank; /* the same for chunk `pieces` */
    uint32_t ready_rank; /* the same for chunk `ready` */

    int64_t started_ns; /* first tick that saw it, 0 = none yet */
    int64_t deadline_ns;

    /* how it ended */
    uint64_t failed0; /* slots 0 to 63 */
    uint64_t *failed; /* all words, if a slot above 63 failed (word 0 is failed0) */
    uint32_t failed_words;
    uint32_t num_failed;
    char *detail; /* NULL = "" */

    /* send and receive */
    int32_t peer; /* HDL_ANY_SOURCE */
    int32_t tag;
    int32_t source; /* who sent */
    int32_t source_tag;
    uint64_t message; /* number within the stream */
    size_t bytes;
    size_t moved;
    uint32_t step;
    void *transport; /* for the path that moves it */
};

const char *group_kind_name(uint8_t kind);
/* "allreduce count 8 type f32 op sum"; returns text. */
const char *group_desc_format(const struct group_desc *desc, char *text, size_t size);

/* Mixes what ranks must agree on into 64 bits. */
static inline uint64_t group_desc_hash(const struct group_desc *desc)
{
    uint64_t head = (uint64_t)desc->kind << 56 | (uint64_t)desc->dtype << 48 |
                    (uint64_t)desc->redop << 40 | (uint32_t)desc->root;
    uint64_t h = head * UINT64_C(0x9e3779b97f4a7c15) ^ desc->counts_hash;
    h = (h ^ (h >> 29)) + desc->count * UINT64_C(0xbf58476d1ce4e5b9);
    return h ^ (h >> 32);
}

/* From the engine's pool, under its lock; fields that every operation sets are not
 * cleared. NULL with detail text. */
struct hdl_op *group_op_alloc(struct group_engine *engine);
/* Back to the pool, under the lock. */
void group_op_release(struct hdl_op *op);
void group_op_pool_destroy(struct group_engine *engine);

/* The failed set as a mask of `words` words; returns how many there are. */
uint32_t group_op_failed(const struct hdl_op *op, uint64_t *mask, size_t words);

static inline bool group_op_finished(const struct hdl_op *op)
{
    return atomic_load_explicit(&op->status, memory_order_acquire) != HDL_PENDING;
}

#endif
