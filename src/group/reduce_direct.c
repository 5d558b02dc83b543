/* SPDX-License-Identifier: Apache-2.0 */
/* All-reduce and reduce from everybody's inputs: one step, each output reads all slots.
 */
#include "base/checked.h"
#include "group/mapped.h"

static bool writes_output(const struct hdl_op *op)
{
    return op->desc.root < 0 || op->desc.root == (int32_t)op->group->rank;
}

static void plan(struct hdl_op *op)
{
    mapped_plan_blocks(op, 1, op->desc.count);
}

static size_t publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    size_t begin, n = mapped_range(op, chunk, op->desc.count, &begin);
    mapped_stage(op, payload, (const char *)op->src + begin * op->elem, n);
    return n * op->elem;
}

/* Only the root of a reduce needs the others' chunks. */
static enum group_needs needs(const struct hdl_op *op)
{
    return writes_output(op) ? GROUP_NEEDS_ALL : GROUP_NEEDS_NONE;
}

static enum hdl_status pull(struct hdl_op *op, uint64_t chunk)
{
    size_t begin, n = mapped_range(op, chunk, op->desc.count, &begin);
    if (n == 0 || !writes_output(op))
        return HDL_OK;
    size_t at = begin * op->elem;
    mapped_reduce(op, chunk, 0, (const char *)op->src + at, (char *)op->dst + at, n,
                  op->stream);
    return HDL_OK;
}

const struct group_algorithm group_allreduce_direct = {
    .name = "direct",
    .kind = GROUP_ALLREDUCE,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .pull = pull,
};

const struct group_algorithm group_reduce_direct = {
    .name = "direct",
    .kind = GROUP_REDUCE,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .pull = pull,
};

/* ------------------------------------------------------------------------- pieces */

/* Of a reduce between two hosts the other one only adds up what it gives. */
static bool reduces(const struct hdl_op *op, uint32_t rank, uint64_t chunk)
{
    const struct hdl_group *group = op->group;
    return mapped_takes_part(op, rank, chunk) &&
           (op->desc.root < 0 || group->num_hosts != 2 ||
            group->neighbours[rank].first == group->neighbours[op->desc.root].first);
}

/*
 * Each of n ranks reduces one n-th of a chunk, then everybody copies the parts together:
 * 2 reads of the chunk instead of n. Shares are whole lines, host by host.
 */
static size_t share(const struct hdl_op *op, uint32_t rank, uint64_t chunk, size_t *begin)
{
    const struct group_neighbours *neighbours = op->group->neighbours;
    size_t at, n = mapped_range(op, chunk, op->desc.count, &at);
    size_t ranks = 0, index = 0, line = 64 / op->elem;
    *begin = 0;
    if (!reduces(op, rank, chunk))
        return 0;
    for (uint32_t r = 0; r < op->group->capacity; r++) {
        bool part = reduces(op, r, chunk);
        uint32_t host = neighbours[r].first, own = neighbours[rank].first;
        ranks += part;
        index += part && (host < own || (host == own && r < rank));
    }
    size_t part = (n + ranks - 1) / ranks;
    part = (part + line - 1) / line * line;
    *begin = base_min_size(part * index, n);
    return base_min_size(n - *begin, part);
}

static void make_piece(struct hdl_op *op, uint64_t chunk)
{
    uint32_t rank = op->group->rank;
    size_t at, begin, part = share(op, rank, chunk, &begin);
    (void)mapped_range(op, chunk, op->desc.count, &at);
    if (part == 0)
        return;
    mapped_reduce(op, chunk, begin, (const char *)op->src + (at + begin) * op->elem,
                  mapped_piece(op, rank, chunk) + begin * op->elem, part,
                  group_stage_past(&op->engine->stages, op->stream, part * op->elem));
}

static enum hdl_status pull_pieces(struct hdl_op *op, uint64_t chunk)
{
    if (!op->use_pieces)
        return pull(op, chunk);
    struct hdl_group *group = op->group;
    if (!writes_output(op))
        return HDL_OK;
    size_t at, begin;
    (void)mapped_range(op, chunk, op->desc.count, &at);
    for (uint32_t r = 0; r < group->capacity; r++) {
        size_t part = share(op, r, chunk, &begin);
        if (part == 0)
            continue;
        mapped_deliver(op, (char *)op->dst + (at + begin) * op->elem,
                       mapped_piece(op, r, chunk) + begin * op->elem, part * op->elem);
    }
    return HDL_OK;
}

const struct group_algorithm group_allreduce_pieces = {
    .name = "pieces",
    .kind = GROUP_ALLREDUCE,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .share = share,
    .make_piece = make_piece,
    .pull = pull_pieces,
};

const struct group_algorithm group_reduce_pieces = {
    .name = "pieces",
    .kind = GROUP_REDUCE,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .share = share,
    .make_piece = make_piece,
    .pull = pull_pieces,
};
