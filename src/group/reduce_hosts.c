/* SPDX-License-Identifier: Apache-2.0 */
/* What a reduction reads: inputs, and of other hosts what one of their ranks added up. */
#include "base/checked.h"
#include "group/mapped.h"
#include "group/reduce.h"

/*
 * A share of a chunk, reduced by rank 0, of two hosts with two ranks each:
 *
 *      host A   rank 0: input ----------------------+
 *               rank 1: input ----------------------+--> piece of rank 0
 *      host B   rank 2: input --+                   |
 *               rank 3: input --+--> sum, in rank 2's or rank 3's piece area
 *
 * A rank's piece area holds its own piece at its own share and sums at the shares of
 * others, so they do not meet. Every share is reduced by one rank, so the order in which
 * ranks are combined there is the same for all.
 */

bool mapped_adds_up(const struct hdl_op *op)
{
    return op->group->adds_up && group_reduce_splits((enum hdl_dtype)op->desc.dtype,
                                                     (enum hdl_redop)op->desc.redop);
}

bool mapped_here(const struct hdl_op *op, uint32_t rank)
{
    const struct group_neighbours *neighbours = op->group->neighbours;
    return neighbours[rank].first == neighbours[op->group->rank].first;
}

bool mapped_gives_sums(const struct hdl_op *op, uint32_t rank)
{
    return op->group->neighbours[rank].count > 1 && mapped_adds_up(op);
}

bool mapped_gives(const struct hdl_op *op, uint32_t rank, uint32_t reader, uint64_t chunk)
{
    const struct group_neighbours *own = &op->group->neighbours[rank],
                                  *there = &op->group->neighbours[reader];
    if (!mapped_gives_sums(op, rank))
        return true;
    /* The readers there, in their order, among the ranks here; with each chunk others. */
    size_t number = (size_t)there->index * base_min_size(own->count, there->count);
    return (number / there->count + chunk) % own->count == own->index;
}

/* The inputs of this host's ranks, or with `all` what there is from others, too. */
static size_t sources_of(const struct hdl_op *op, uint64_t chunk, size_t begin,
                         const void *own, bool all)
{
    struct hdl_group *group = op->group;
    size_t n = 0, offset = begin * op->elem;
    for (uint32_t r = 0; r < group->capacity; r++) {
        bool far = op->use_pieces && !mapped_here(op, r);
        if (!mapped_takes_part(op, r, chunk) ||
            (far && (!all || !mapped_gives(op, r, group->rank, chunk))))
            continue;
        if (far && mapped_gives_sums(op, r))
            group->sources[n++] = mapped_piece(op, r, chunk) + offset;
        else if (r == group->rank && own)
            group->sources[n++] = own;
        else
            group->sources[n++] = mapped_input(op, r, chunk) + offset;
    }
    return n;
}

void mapped_reduce(const struct hdl_op *op, uint64_t chunk, size_t begin, const void *own,
                   void *dst, size_t n, bool stream)
{
    struct hdl_group *group = op->group;
    enum hdl_dtype dtype = (enum hdl_dtype)op->desc.dtype;
    enum hdl_redop redop = (enum hdl_redop)op->desc.redop;
    bool sums = op->use_pieces && mapped_adds_up(op);
    /* The slot has it scaled. */
    if (redop == HDL_PREMUL_SUM)
        own = NULL;
    size_t sources = sources_of(op, chunk, begin, own, true), ranks = 0;
    group_reduce(dst, group->sources, sources, n, dtype,
                 sums && redop == HDL_AVG ? HDL_SUM : redop, stream);
    group_count(&group->counters.bytes_received, n * op->elem * (sources - 1));
    if (!sums || redop != HDL_AVG)
        return;
    for (uint32_t r = 0; r < group->capacity; r++)
        ranks += mapped_takes_part(op, r, chunk);
    group_divide(dst, n, dtype, ranks);
}

void mapped_add_up(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    enum hdl_redop redop = (enum hdl_redop)op->desc.redop;
    if (!mapped_gives_sums(op, group->rank))
        return;
    for (uint32_t r = 0; r < group->capacity; r++) {
        size_t begin, n = op->algorithm->share(op, r, chunk, &begin);
        if (n == 0 || mapped_here(op, r) || !mapped_gives(op, group->rank, r, chunk))
            continue;
        size_t sources = sources_of(op, chunk, begin, NULL, false);
        group_reduce(mapped_piece(op, group->rank, chunk) + begin * op->elem,
                     group->sources, sources, n, (enum hdl_dtype)op->desc.dtype,
                     redop == HDL_AVG ? HDL_SUM : redop, false);
        group_count(&group->counters.bytes_received, n * op->elem * (sources - 1));
    }
}
