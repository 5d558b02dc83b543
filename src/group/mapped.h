/* SPDX-License-Identifier: Apache-2.0 */
/* What the algorithms over mapped peers share: where payloads lie, who takes part. */
#ifndef GROUP_MAPPED_H
#define GROUP_MAPPED_H

#include "group/group.h"

static inline bool mapped_is_root(const struct hdl_op *op)
{
    return op->desc.root == (int32_t)op->group->rank;
}

/* A rank's published input of a chunk. */
static inline const unsigned char *mapped_input(const struct hdl_op *op, uint32_t rank,
                                                uint64_t chunk)
{
    const struct hdl_group *group = op->group;
    uint32_t slot = group_slot_of(group, op->number, chunk);
    const struct group_peer *peer = &group->peer[rank];
    if (op->inlined)
        return peer->slots[slot].payload;
    return (const unsigned char *)peer->data + slot * group->shape.chunk_bytes +
           op->place;
}

/* A rank's piece of a chunk. */
static inline unsigned char *mapped_piece(const struct hdl_op *op, uint32_t rank,
                                          uint64_t chunk)
{
    const struct hdl_group *group = op->group;
    uint32_t slot = group_slot_of(group, op->number, chunk);
    return (unsigned char *)group->peer[rank].pieces + slot * group->shape.chunk_bytes +
           op->place;
}

static inline bool mapped_takes_part(const struct hdl_op *op, uint32_t rank,
                                     uint64_t chunk)
{
    const struct group_view *view = op->group->seen;
    uint64_t x = GROUP_X(op->number, chunk);
    if (x >= view->steady_from)
        return group_view_present(view, rank);
    return group_view_has(view, rank, x);
}

/* Elements [begin, begin + n) of `count` that a chunk covers. */
static inline size_t mapped_range(const struct hdl_op *op, uint64_t chunk, size_t count,
                                  size_t *begin)
{
    size_t first = (size_t)chunk * op->chunk_elems;
    *begin = first;
    if (first >= count)
        return 0;
    return count - first < op->chunk_elems ? count - first : op->chunk_elems;
}

/* Reduces n elements of all ranks' payloads from `begin` on into dst; with
 * op->use_pieces they lie in the own share, and a host's sum stands for its inputs. The
 * own input lies at `own` in the user's memory: it is intact until this chunk is written,
 * and the slot may be out of the cache. */
void mapped_reduce(const struct hdl_op *op, uint64_t chunk, size_t begin, const void *own,
                   void *dst, size_t n, bool stream);
/* Do hosts add up their inputs before they cross to other hosts? */
bool mapped_adds_up(const struct hdl_op *op);
/* With op->use_pieces: does what `rank` gives to other hosts lie in its piece area, as
 * the sum of its host's inputs? */
bool mapped_gives_sums(const struct hdl_op *op, uint32_t rank);
/* Does it give anything for the share of `reader`, who is on another host? */
bool mapped_gives(const struct hdl_op *op, uint32_t rank, uint32_t reader,
                  uint64_t chunk);
/* Is the rank on this host? */
bool mapped_here(const struct hdl_op *op, uint32_t rank);
/* Adds up what this rank gives, if that is sums. */
void mapped_add_up(struct hdl_op *op, uint64_t chunk);

/* Sets chunk_elems, chunk_bytes and num_chunks: `blocks` blocks of `count` elements, so
 * that one chunk's share of all blocks fits into a slot. */
void mapped_plan_blocks(struct hdl_op *op, size_t blocks, size_t count);

/* Copies user data into the own slot: with PREMUL_SUM scaled. */
void mapped_stage(const struct hdl_op *op, void *payload, const void *src, size_t elems);
/* The same for what one rank alone reads: in this core's cache if that rank shares it. */
void mapped_stage_for(const struct hdl_op *op, uint32_t reader, void *payload,
                      const void *src, size_t elems);
/* Copies a payload into the user's output. */
void mapped_deliver(const struct hdl_op *op, void *dst, const void *payload,
                    size_t bytes);

/* ------------------------------------------------- for the messaged path, which adds to
 * it */

/* Writes and shows the next chunk in the own slot, which must be free; bytes of payload.
 */
size_t mapped_publish(struct hdl_group *group, struct hdl_op *op, uint64_t chunk);
/* Has the rank's chunk come? Chunk 0 is compared with the own call, too. */
bool mapped_look(struct hdl_op *op, uint32_t rank, uint64_t chunk);
/* Has every rank's chunk arrived? Goes on at *rank, where it stopped before. */
bool mapped_all(struct hdl_op *op, uint64_t chunk, uint32_t *rank,
                bool (*arrived)(struct hdl_op *, uint32_t, uint64_t));
/* What the rank waits for before it may finish the chunk. */
enum group_needs mapped_needs(const struct hdl_op *op, uint64_t chunk);
/* Everything for the chunk is there and `ready` covers it: pulls, ends the operation.
 * False: the group has ended, as a peer went on without this rank. */
bool mapped_finish_chunk(struct hdl_group *group, struct hdl_op *op, uint64_t chunk);
/* The operation ends here, whatever it lacks: its slots are free. group_op_fail follows.
 */
void mapped_close_op(struct hdl_group *group, struct hdl_op *op);
void mapped_start(struct hdl_group *group, struct hdl_op *op);
uint64_t mapped_sample(struct hdl_group *group, uint32_t rank);
/* Has the rank's input of the chunk that is pulled next not come? */
bool mapped_lacks(const struct hdl_op *op, uint32_t rank);
void mapped_missing(const struct hdl_op *op, uint64_t *mask);

/* One per kind; the table (table.h) chooses where there are several. */
extern const struct group_algorithm group_barrier_flat;
extern const struct group_algorithm group_broadcast_pull;
extern const struct group_algorithm group_reduce_direct;
extern const struct group_algorithm group_reduce_pieces;
extern const struct group_algorithm group_allreduce_direct;
extern const struct group_algorithm group_allreduce_pieces;
extern const struct group_algorithm group_allgather_pull;
extern const struct group_algorithm group_allgatherv_pull;
extern const struct group_algorithm group_reduce_scatter_direct;
extern const struct group_algorithm group_reduce_scatterv_direct;
extern const struct group_algorithm group_reduce_scatter_shares;
extern const struct group_algorithm group_reduce_scatterv_shares;
extern const struct group_algorithm group_alltoall_pull;
extern const struct group_algorithm group_alltoallv_pull;
extern const struct group_algorithm group_gather_pull;
extern const struct group_algorithm group_gatherv_pull;
extern const struct group_algorithm group_scatter_pull;
extern const struct group_algorithm group_scatterv_pull;
extern const struct group_algorithm group_refused;

#endif
