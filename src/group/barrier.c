/* SPDX-License-Identifier: Apache-2.0 */
/* Barrier and refused calls: a chunk without payload. */
#include "group/mapped.h"

static void plan_one(struct hdl_op *op)
{
    op->chunk_elems = 1;
    op->chunk_bytes = 0;
    op->num_chunks = 1;
}

/* Chunk 0 waits for everybody's descriptor: that is all a barrier needs. */
const struct group_algorithm group_barrier_flat = {
    .name = "flat",
    .kind = GROUP_BARRIER,
    .plan = plan_one,
};

static enum hdl_status end_refused(struct hdl_op *op, uint64_t chunk)
{
    (void)chunk;
    return base_fail(HDL_EINVAL, "%s",
                     op->detail ? op->detail : "the call was refused for its arguments");
}

const struct group_algorithm group_refused = {
    .name = "refused",
    .kind = GROUP_REFUSED,
    .plan = plan_one,
    .pull = end_refused,
};
