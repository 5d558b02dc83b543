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
    /* Sets op->chunk_elems and op->num_chunks (at least 1). */
    enum hdl_status (*plan)(struct hdl_op *op);
    /* Copies this rank's input of the chunk into the slot's payload; NULL = owes nothing.
     */
    size_t (*publish)(struct hdl_op *op, uint64_t chunk, unsigned char *payload);
    /* For chunks above 0: chunk 0 compares descriptors with everybody. */
    enum group_needs (*needs)(const struct hdl_op *op);
    /* Optional: reduces this rank's share of the chunk for the others. */
    void (*make_piece)(struct hdl_op *op, uint64_t chunk);
    /* All input that the view gives for x is there: writes the user's output. An error
     * ends the operation on all ranks, so it may depend on published data only. */
    enum hdl_status (*pull)(struct hdl_op *op, uint64_t chunk);
};

/* Arrays of v-variants, copied at submission; each has one entry per slot, or is NULL. */
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
    _Atomic bool freed; /* handle given back while pending */
    bool blocking;      /* has no handle: the caller waits */
    bool direct;        /* a view changed while it was open: inputs only, no pieces */
    bool warned;        /* the line of a slow wait was written */

    uint64_t number; /* op number; send and receive: 0 */
    struct group_desc desc;
    uint64_t hash;
    const struct group_algorithm *algorithm;

    const void *src;
    void *dst;
    struct group_arrays arrays;
    size_t elem;        /* bytes of an element */
    size_t chunk_elems; /* elements (of each block) that one chunk moves */
    uint64_t num_chunks;
    uint64_t published; /* chunks */
    uint64_t pieces;
    uint64_t pulled;
    uint64_t restarts; /* of messaged chunks */

    int64_t started_ns; /* first slow wait, 0 = never slow */
    int64_t deadline_ns;

    /* how it ended */
    uint64_t failed0; /* slots 0 to 63 */
    uint64_t *failed; /* all slots, if the capacity is above 64 and any failed */
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
    void *transport; /* for the path that moves it */
};

const char *group_kind_name(uint8_t kind);
/* "all_reduce count 8 type f32 op sum"; returns text. */
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

#endif
