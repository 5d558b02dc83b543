/* SPDX-License-Identifier: Apache-2.0 */
/* All-gather and gather, with equal and with given counts: everybody publishes its block.
 */
#include "group/mapped.h"

static size_t count_of(const struct hdl_op *op, uint32_t rank)
{
    return op->arrays.dst_counts ? op->arrays.dst_counts[rank] : op->desc.count;
}

static char *block_of(const struct hdl_op *op, uint32_t rank)
{
    size_t at =
        op->arrays.dst_displs ? op->arrays.dst_displs[rank] : rank * op->desc.count;
    return (char *)op->dst + at * op->elem;
}

/* desc.count is the largest count, so all ranks have the same number of chunks. */
static void plan(struct hdl_op *op)
{
    mapped_plan_blocks(op, 1, op->desc.count);
}

static size_t publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    size_t begin, n = mapped_range(op, chunk, count_of(op, op->group->rank), &begin);
    if (mapped_is_root(op))
        return 0;
    mapped_stage(op, payload, (const char *)op->src + begin * op->elem, n);
    return n * op->elem;
}

static enum group_needs gather_needs(const struct hdl_op *op)
{
    return mapped_is_root(op) ? GROUP_NEEDS_ALL : GROUP_NEEDS_NONE;
}

static enum hdl_status pull(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    if (op->desc.root >= 0 && !mapped_is_root(op))
        return HDL_OK;
    for (uint32_t i = 0; i < group->capacity; i++) {
        /* Starting at the own rank, readers do not all ask the same slot at once. */
        uint32_t r = (group->rank + i) % group->capacity;
        size_t begin, n;
        if (r >= op->blocks || !mapped_takes_part(op, r, chunk))
            continue;
        n = mapped_range(op, chunk, count_of(op, r), &begin);
        if (n == 0)
            continue;
        /* The own block does not travel; in place it is there already. */
        const void *src = r == group->rank ? (const char *)op->src + begin * op->elem
                                           : (const char *)mapped_input(op, r, chunk);
        mapped_deliver(op, block_of(op, r) + begin * op->elem, src, n * op->elem);
    }
    return HDL_OK;
}

const struct group_algorithm group_allgather_pull = {
    .name = "pull",
    .kind = GROUP_ALLGATHER,
    .plan = plan,
    .publish = publish,
    .pull = pull,
};

const struct group_algorithm group_allgatherv_pull = {
    .name = "pull",
    .kind = GROUP_ALLGATHERV,
    .plan = plan,
    .publish = publish,
    .pull = pull,
};

const struct group_algorithm group_gather_pull = {
    .name = "pull",
    .kind = GROUP_GATHER,
    .plan = plan,
    .publish = publish,
    .needs = gather_needs,
    .pull = pull,
};

const struct group_algorithm group_gatherv_pull = {
    .name = "pull",
    .kind = GROUP_GATHERV,
    .plan = plan,
    .publish = publish,
    .needs = gather_needs,
    .pull = pull,
};
