/* SPDX-License-Identifier: Apache-2.0 */
/* Broadcast: the root publishes, everybody else pulls from its slots. */
#include <string.h>

#include "group/mapped.h"

static void plan(struct hdl_op *op)
{
    mapped_plan_blocks(op, 1, op->desc.count);
}

static size_t publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    size_t begin, n = mapped_range(op, chunk, op->desc.count, &begin);
    if (!mapped_is_root(op))
        return 0;
    mapped_stage(op, payload, (const char *)op->src + begin * op->elem, n);
    return n * op->elem;
}

static enum group_needs needs(const struct hdl_op *op)
{
    (void)op;
    return GROUP_NEEDS_ROOT;
}

static enum hdl_status pull(struct hdl_op *op, uint64_t chunk)
{
    size_t begin, n = mapped_range(op, chunk, op->desc.count, &begin);
    char *dst = (char *)op->dst + begin * op->elem;
    const void *src =
        mapped_is_root(op)
            ? (const char *)op->src + begin * op->elem
            : (const char *)mapped_input(op, (uint32_t)op->desc.root, chunk);
    mapped_deliver(op, dst, src, n * op->elem);
    return HDL_OK;
}

const struct group_algorithm group_broadcast_pull = {
    .name = "pull",
    .kind = GROUP_BROADCAST,
    .plan = plan,
    .publish = publish,
    .needs = needs,
    .pull = pull,
};
