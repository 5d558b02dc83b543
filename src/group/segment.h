/* SPDX-License-Identifier: Apache-2.0 */
/* Layout of the memory that a rank shows to its peers: one segment per group. */
#ifndef GROUP_SEGMENT_H
#define GROUP_SEGMENT_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heddle.h"

/*
 * A segment is written by its owner alone; peers only read it. Offsets depend on the
 * creation parameters (capacity C, W chunks, B bytes a chunk), so they are the same on
 * all ranks, and a page costs memory only when it is first written.
 *
 *   0        +---------------------------------------------------------------+
 *            | head: magic, shape, the owner's core                          |
 *            | line: done                     (this rank needs nobody's x    |
 *            |                                 up to here any more)          |
 *   4 KiB    +---------------------------------------------------------------+
 *   slots    | W slot headers of 256 B: seq, descriptor, small payload       |
 *            +---------------------------------------------------------------+
 *   data     | W x B  payload of the slots: this rank's input of chunk x     |
 *            +---------------------------------------------------------------+
 *   pieces   | W x B  what this rank reduced of chunk x                      |
 *            +---------------------------------------------------------------+
 *   in       | C x 512 B  for each source: cells and fragments consumed,     |
 *            |            large messages granted                             |
 *            +---------------------------------------------------------------+
 *   cells    | C x 64 cells of 64 B  small messages for each destination     |
 *            +---------------------------------------------------------------+
 *   bulk     | C x 16 x 64 KiB       fragments for each destination          |
 *            +---------------------------------------------------------------+
 *   messaged | receive memory, written by messaged peers (messaged.h)        |
 *            +---------------------------------------------------------------+
 *
 * A position x = (op number << 20 | chunk); its slot is (op + chunk) % W. seq of a slot
 * is the x that it holds and only grows; x - 1 while the input of x is written, which
 * says that the chunk before is published. A slot is written again only when `done` of
 * all present readers is at or above the x that it held; whoever is no reader any more
 * and does not know it yet sees by seq that what it read was written over.
 */
#define GROUP_CHUNK_BITS 20
#define GROUP_MAX_CHUNKS (UINT64_C(1) << GROUP_CHUNK_BITS)
#define GROUP_X(op, chunk) (((uint64_t)(op) << GROUP_CHUNK_BITS) | (uint64_t)(chunk))
#define GROUP_X_OP(x) ((uint64_t)(x) >> GROUP_CHUNK_BITS)
#define GROUP_X_CHUNK(x) ((uint64_t)(x) & (GROUP_MAX_CHUNKS - 1))
/* Behind every chunk of an operation. */
#define GROUP_X_END(op) GROUP_X(op, GROUP_MAX_CHUNKS - 1)
#define GROUP_FOREVER UINT64_MAX

#define GROUP_SEGMENT_MAGIC UINT64_C(0x6564646c65736567)
#define GROUP_SEGMENT_VERSION 3

enum {
    GROUP_LINE = 64,
    GROUP_INLINE_BYTES = 40,
    GROUP_SLOT_LEAST = 4096, /* chunk_bytes is a multiple */
    GROUP_CELL_BYTES = 40,
    GROUP_CELLS = 64,
    GROUP_FRAGMENTS = 16, /* 1 MiB: written again after it left the reader's cache */
    GROUP_FRAGMENT_BYTES = 64 * 1024,
    GROUP_GRANTS = 16,
};

/* What every rank must have called at an op number; the ranks compare its hash. */
struct group_desc {
    uint8_t kind; /* enum group_kind */
    uint8_t dtype;
    uint8_t redop;
    uint8_t reserved;
    int32_t root; /* -1 = none */
    uint64_t count;
    uint64_t counts_hash; /* of the array of counts, where all ranks must give the same */
    uint64_t reserved2;
};
static_assert(sizeof(struct group_desc) == 32, "descriptor is half a line");

/* Line 0 is all that a small operation moves. */
struct group_slot {
    alignas(256) _Atomic uint64_t seq;
    _Atomic uint64_t done; /* the publisher's done when it published: saves a line */
    uint64_t hash;         /* of the descriptor */
    unsigned char payload[GROUP_INLINE_BYTES];
    /* line 1, read when something differs, and of large operations */
    struct group_desc desc;
    uint64_t bytes; /* payload */
    uint64_t view;  /* epoch under which the chunk was published */
    uint64_t reserved1[2];
    /* line 2 */
    _Atomic uint64_t piece; /* x whose piece is complete */
    /* Messaged reductions: x of which this host has what the rank gives for its shares,
     * or the whole input. */
    _Atomic uint64_t part;
    _Atomic uint64_t full;
    uint64_t reserved2[13];
};
static_assert(sizeof(struct group_slot) == 256, "slot header is four lines");
static_assert(offsetof(struct group_slot, desc) == 64, "small operations move one line");
static_assert(offsetof(struct group_slot, piece) == 128,
              "piece flags have their own line");

struct group_head {
    uint64_t magic;
    uint32_t version;
    uint32_t rank;
    uint32_t capacity;
    uint32_t window_chunks;
    uint64_t chunk_bytes;
    _Atomic uint64_t path; /* 1 = mapped, 2 = messaged, 0 = not known yet */
    _Atomic uint64_t left; /* the owner has left the group for good */
    _Atomic uint32_t core; /* where the owner waited last, from 1; 0 = asleep, unknown */
    uint32_t reserved[3];
    /* Far enough from what peers read for no prefetch to share it: it is written in every
     * operation and rarely read. */
    alignas(256) _Atomic uint64_t done;
    _Atomic uint64_t ready; /* of messaged groups, see messaged.h */
    uint64_t reserved2[6];
};
static_assert(sizeof(struct group_head) == 512, "head is a part of its page");

/* A message or a step of one. position = number of cells written to this destination. */
struct group_cell {
    _Atomic uint64_t position;
    uint32_t tag;
    uint16_t type; /* enum group_cell_type */
    uint16_t fragment;
    uint64_t bytes; /* of the whole message */
    unsigned char payload[GROUP_CELL_BYTES];
};
static_assert(sizeof(struct group_cell) == GROUP_LINE, "a cell is one line");

/* Memory of the receiver that a messaged sender may write for a granted message: net's
 * key and window; both 0 = none, the message comes in fragments. */
struct group_exposure {
    uint64_t key;
    uint64_t window;
};

/* What the owner has taken from one source, and which large messages it wants. */
struct group_intake {
    alignas(GROUP_LINE) _Atomic uint64_t cells;
    _Atomic uint64_t fragments;
    _Atomic uint64_t
        grants_taken; /* of those that this peer wrote for the owner's sends */
    uint64_t reserved[5];
    alignas(GROUP_LINE) _Atomic uint64_t granted; /* grants written */
    uint64_t grants[GROUP_GRANTS];                /* message numbers, in order */
    struct group_exposure exposed[GROUP_GRANTS];  /* of each */
    uint64_t reserved2[7];
};
static_assert(sizeof(struct group_intake) == 512, "intake is eight lines");

struct group_shape {
    uint32_t capacity;
    uint32_t window_chunks;
    size_t chunk_bytes;
    /* offsets */
    size_t slots, data, pieces, intake, cells, bulk;
    size_t messaged; /* receive memory of the messaged path, messaged_bytes long */
    size_t messaged_bytes;
    size_t bytes;
};

/* Puts an area of count * size bytes behind *end and moves *end to its last page; false
 * if that overflows. */
bool group_area(size_t *end, size_t count, size_t size, size_t *offset);
/* Fills the offsets. HDL_EINVAL: parameters out of range or the size overflows. */
enum hdl_status group_shape_init(struct group_shape *shape, uint32_t capacity,
                                 uint32_t window_chunks, size_t chunk_bytes,
                                 size_t messaged_bytes);

static inline struct group_head *group_segment_head(void *segment)
{
    return (struct group_head *)segment;
}

static inline struct group_slot *group_segment_slot(const struct group_shape *shape,
                                                    void *segment, uint32_t slot)
{
    return (struct group_slot *)(void *)((char *)segment + shape->slots) + slot;
}

/* The largest x that a rank has published in its slots. */
uint64_t group_segment_newest(const struct group_shape *shape, void *segment);

static inline char *group_segment_data(const struct group_shape *shape, void *segment,
                                       uint32_t slot)
{
    return (char *)segment + shape->data + slot * shape->chunk_bytes;
}

static inline char *group_segment_piece(const struct group_shape *shape, void *segment,
                                        uint32_t slot)
{
    return (char *)segment + shape->pieces + slot * shape->chunk_bytes;
}

static inline struct group_intake *group_segment_intake(const struct group_shape *shape,
                                                        void *segment, uint32_t source)
{
    return (struct group_intake *)(void *)((char *)segment + shape->intake) + source;
}

static inline struct group_cell *group_segment_cells(const struct group_shape *shape,
                                                     void *segment, uint32_t destination)
{
    return (struct group_cell *)(void *)((char *)segment + shape->cells) +
           (size_t)destination * GROUP_CELLS;
}

static inline char *group_segment_bulk(const struct group_shape *shape, void *segment,
                                       uint32_t destination)
{
    return (char *)segment + shape->bulk +
           (size_t)destination * GROUP_FRAGMENTS * GROUP_FRAGMENT_BYTES;
}

#endif
