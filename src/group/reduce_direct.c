/* SPDX-License-Identifier: Apache-2.0 */
/* All-reduce and reduce from everybody's inputs: one step, each output reads all slots.
 */
#include "group/mapped.h"
#include "group/reduce.h"

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
    size_t ranks = mapped_sources(op, chunk, 0, (const char *)op->src + begin * op->elem,
                                  op->group->sources);
    group_reduce((char *)op->dst + begin * op->elem, op->group->sources, ranks, n,
                 (enum hdl_dtype)op->desc.dtype, (enum hdl_redop)op->desc.redop,
                 op->stream);
    group_count(&op->group->counters.bytes_received, n * op->elem * (ranks - 1));
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

/*
 * Each of n ranks reduces one n-th of a chunk, then everybody copies the parts together:
 * 2 reads of the chunk instead of n. Shares are whole lines.
 */
static size_t share(const struct hdl_op *op, size_t n, size_t index, size_t ranks,
                    size_t *begin)
{
    size_t line = 64 / op->elem;
    size_t part = (n + ranks - 1) / ranks;
    part = (part + line - 1) / line * line;
    size_t first = part * index;
    *begin = first < n ? first : n;
    return n - *begin < part ? n - *begin : part;
}

size_t mapped_share(const struct hdl_op *op, uint32_t rank, uint64_t chunk, size_t *begin)
{
    size_t at, n = mapped_range(op, chunk, op->desc.count, &at);
    size_t ranks = 0, index = 0;
    *begin = 0;
    if (!mapped_takes_part(op, rank, chunk))
        return 0;
    for (uint32_t r = 0; r < op->group->capacity; r++) {
        bool part = mapped_takes_part(op, r, chunk);
        ranks += part;
        index += part && r < rank;
    }
    return share(op, n, index, ranks, begin);
}

static void make_piece(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    size_t at, begin, part = mapped_share(op, group->rank, chunk, &begin);
    (void)mapped_range(op, chunk, op->desc.count, &at);
    if (part == 0)
        return;
    size_t bytes = part * op->elem;
    size_t ranks =
        mapped_sources(op, chunk, begin * op->elem,
                       (const char *)op->src + (at + begin) * op->elem, group->sources);
    group_reduce(mapped_piece(op, group->rank, chunk) + begin * op->elem, group->sources,
                 ranks, part, (enum hdl_dtype)op->desc.dtype,
                 (enum hdl_redop)op->desc.redop,
                 group_stage_past(&op->engine->stages, op->stream, bytes));
    group_count(&group->counters.bytes_received, bytes * (ranks - 1));
}

static enum hdl_status pull_pieces(struct hdl_op *op, uint64_t chunk)
{
    if (!op->use_pieces)
        return pull(op, chunk);
    struct hdl_group *group = op->group;
    if (!writes_output(op))
        return HDL_OK;
    size_t at, n = mapped_range(op, chunk, op->desc.count, &at);
    size_t ranks = mapped_sources(op, chunk, 0, NULL, group->sources), index = 0;
    for (uint32_t r = 0; r < group->capacity; r++) {
        size_t begin;
        if (!mapped_takes_part(op, r, chunk))
            continue;
        size_t part = share(op, n, index++, ranks, &begin);
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
    .make_piece = make_piece,
    .pull = pull_pieces,
};

const struct group_algorithm group_reduce_pieces = {
    .name = "pieces",
    .kind = GROUP_REDUCE,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .make_piece = make_piece,
    .pull = pull_pieces,
};
