/* SPDX-License-Identifier: Apache-2.0 */
/* Scatter, reduce-scatter and all-to-all: a slot holds one block for each rank. */
#include "group/mapped.h"

/*
 * Payload of a chunk: elements [c * k, (c + 1) * k) of every block, block r at r * k.
 *
 *     | block 0 | block 1 | ... | block C-1 |      k = chunk_elems, C = capacity
 */
static size_t count_of(const struct hdl_op *op, uint32_t rank)
{
    return op->arrays.src_counts ? op->arrays.src_counts[rank] : op->desc.count;
}

static const char *block_of(const struct hdl_op *op, uint32_t rank)
{
    size_t at =
        op->arrays.src_displs ? op->arrays.src_displs[rank] : rank * op->desc.count;
    return (const char *)op->src + at * op->elem;
}

static size_t offset_of(const struct hdl_op *op, uint32_t rank)
{
    return rank * op->chunk_elems * op->elem;
}

static void plan(struct hdl_op *op)
{
    mapped_plan_blocks(op, op->group->capacity, op->desc.count);
}

/* All blocks but `except` (UINT32_MAX = none) go into the slot. */
static size_t publish_blocks(struct hdl_op *op, uint64_t chunk, unsigned char *payload,
                             uint32_t except)
{
    size_t bytes = 0;
    for (uint32_t r = 0; r < op->group->capacity; r++) {
        size_t begin, n;
        if (r == except || r >= op->blocks || !mapped_takes_part(op, r, chunk))
            continue;
        n = mapped_range(op, chunk, count_of(op, r), &begin);
        if (n == 0)
            continue;
        mapped_stage_for(op, r, payload + offset_of(op, r),
                         block_of(op, r) + begin * op->elem, n);
        bytes += n * op->elem;
    }
    return bytes;
}

/* ------------------------------------------------------------------------ scatter */

static size_t scatter_publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    return mapped_is_root(op) ? publish_blocks(op, chunk, payload, op->group->rank) : 0;
}

static enum group_needs scatter_needs(const struct hdl_op *op)
{
    (void)op;
    return GROUP_NEEDS_ROOT;
}

static enum hdl_status scatter_pull(struct hdl_op *op, uint64_t chunk)
{
    uint32_t rank = op->group->rank;
    size_t begin, n = mapped_range(op, chunk, count_of(op, rank), &begin);
    if (n == 0)
        return HDL_OK;
    const void *src =
        mapped_is_root(op)
            ? (const void *)(block_of(op, rank) + begin * op->elem)
            : mapped_input(op, (uint32_t)op->desc.root, chunk) + offset_of(op, rank);
    mapped_deliver(op, (char *)op->dst + begin * op->elem, src, n * op->elem);
    return HDL_OK;
}

const struct group_algorithm group_scatter_pull = {
    .name = "pull",
    .kind = GROUP_SCATTER,
    .plan = plan,
    .publish = scatter_publish,
    .needs = scatter_needs,
    .pull = scatter_pull,
};

const struct group_algorithm group_scatterv_pull = {
    .name = "pull",
    .kind = GROUP_SCATTERV,
    .plan = plan,
    .publish = scatter_publish,
    .needs = scatter_needs,
    .pull = scatter_pull,
};

/* ----------------------------------------------------------------- reduce-scatter */

static size_t reduce_publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    return publish_blocks(op, chunk, payload, UINT32_MAX);
}

static size_t reduce_share(const struct hdl_op *op, uint32_t rank, uint64_t chunk,
                           size_t *begin)
{
    size_t first;
    *begin = rank * op->chunk_elems;
    if (rank >= op->blocks || !mapped_takes_part(op, rank, chunk))
        return 0;
    return mapped_range(op, chunk, count_of(op, rank), &first);
}

static enum hdl_status reduce_pull(struct hdl_op *op, uint64_t chunk)
{
    uint32_t rank = op->group->rank;
    size_t begin, n = mapped_range(op, chunk, count_of(op, rank), &begin);
    if (n > 0)
        mapped_reduce(op, chunk, rank * op->chunk_elems,
                      block_of(op, rank) + begin * op->elem,
                      (char *)op->dst + begin * op->elem, n, op->stream);
    return HDL_OK;
}

const struct group_algorithm group_reduce_scatter_direct = {
    .name = "direct",
    .kind = GROUP_REDUCE_SCATTER,
    .plan = plan,
    .publish = reduce_publish,
    .pull = reduce_pull,
};

const struct group_algorithm group_reduce_scatterv_direct = {
    .name = "direct",
    .kind = GROUP_REDUCE_SCATTERV,
    .plan = plan,
    .publish = reduce_publish,
    .pull = reduce_pull,
};

const struct group_algorithm group_reduce_scatter_shares = {
    .name = "shares",
    .kind = GROUP_REDUCE_SCATTER,
    .plan = plan,
    .publish = reduce_publish,
    .share = reduce_share,
    .pull = reduce_pull,
};

const struct group_algorithm group_reduce_scatterv_shares = {
    .name = "shares",
    .kind = GROUP_REDUCE_SCATTERV,
    .plan = plan,
    .publish = reduce_publish,
    .share = reduce_share,
    .pull = reduce_pull,
};

/* --------------------------------------------------------------------- all-to-all */

/* The own block does not travel: it is copied from the user's memory. */
static size_t exchange_publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    return publish_blocks(op, chunk, payload, op->group->rank);
}

static enum hdl_status exchange_pull(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    size_t begin, n = mapped_range(op, chunk, op->desc.count, &begin);
    for (uint32_t i = 0; n > 0 && i < group->capacity; i++) {
        uint32_t r = (group->rank + i) % group->capacity;
        if (r >= op->blocks || !mapped_takes_part(op, r, chunk))
            continue;
        char *dst = (char *)op->dst + (r * op->desc.count + begin) * op->elem;
        const void *src = r == group->rank
                              ? (const void *)(block_of(op, r) + begin * op->elem)
                              : mapped_input(op, r, chunk) + offset_of(op, group->rank);
        mapped_deliver(op, dst, src, n * op->elem);
    }
    return HDL_OK;
}

const struct group_algorithm group_alltoall_pull = {
    .name = "pull",
    .kind = GROUP_ALLTOALL,
    .plan = plan,
    .publish = exchange_publish,
    .pull = exchange_pull,
};
