/* SPDX-License-Identifier: Apache-2.0 */
/* All-to-all with counts: chunk 0 carries everybody's counts, the others the blocks. */
#include <string.h>

#include "base/checked.h"
#include "group/mapped.h"

/*
 * chunk 0      | src_counts[C] | dst_counts[C] |
 * chunk c > 0  elements [(c-1) * k, c * k) of every block, block r at r * k
 *
 * Everybody checks the whole matrix, so a pair that disagrees ends the operation on all.
 */
static void plan(struct hdl_op *op)
{
    const struct group_shape *shape = &op->group->shape;
    op->chunk_elems = shape->chunk_bytes / shape->capacity / 64 * 64 / op->elem;
    op->chunk_bytes = shape->chunk_bytes;
    op->num_chunks = 1;
    op->unsized = true;
}

/* The own block does not travel. */
static size_t publish(struct hdl_op *op, uint64_t chunk, unsigned char *payload)
{
    uint32_t capacity = op->group->capacity;
    size_t bytes = capacity * sizeof(size_t);
    if (chunk == 0) {
        memcpy(payload, op->arrays.src_counts, bytes);
        memcpy(payload + bytes, op->arrays.dst_counts, bytes);
        return 2 * bytes;
    }
    bytes = 0;
    for (uint32_t r = 0; r < capacity; r++) {
        size_t begin, n = mapped_range(op, chunk - 1, op->arrays.src_counts[r], &begin);
        if (n == 0 || r == op->group->rank || !mapped_takes_part(op, r, chunk))
            continue;
        mapped_stage_for(
            op, r, payload + r * op->chunk_elems * op->elem,
            (const char *)op->src + (op->arrays.src_displs[r] + begin) * op->elem, n);
        bytes += n * op->elem;
    }
    return bytes;
}

/* Entry of the published matrix: what rank `from` sends to `to`, or expects from it. */
static size_t sends(const struct hdl_op *op, uint32_t from, uint32_t to)
{
    const size_t *counts = (const size_t *)(const void *)mapped_input(op, from, 0);
    return counts[to];
}

static size_t expects(const struct hdl_op *op, uint32_t at, uint32_t from)
{
    const size_t *counts = (const size_t *)(const void *)mapped_input(op, at, 0);
    return counts[op->group->capacity + from];
}

static enum hdl_status check_counts(struct hdl_op *op)
{
    size_t most = 0;
    for (uint32_t s = 0; s < op->group->capacity; s++) {
        if (!mapped_takes_part(op, s, 0))
            continue;
        for (uint32_t d = 0; d < op->group->capacity; d++) {
            if (!mapped_takes_part(op, d, 0))
                continue;
            size_t sent = sends(op, s, d), expected = expects(op, d, s);
            if (sent != expected)
                return base_fail(
                    HDL_EINVAL,
                    "operation %llu: alltoallv: rank %u sends %zu elements to rank "
                    "%u, which expects %zu",
                    (unsigned long long)op->number, s, sent, d, expected);
            most = sent > most ? sent : most;
        }
    }
    size_t chunks = base_div_up(most, op->chunk_elems);
    if (chunks >= GROUP_MAX_CHUNKS - 1)
        return base_fail(HDL_EINVAL,
                         "operation %llu: alltoallv: %zu elements need %zu chunks",
                         (unsigned long long)op->number, most, chunks);
    op->num_chunks = 1 + chunks;
    op->unsized = false;
    op->stream = op->stream || most * op->elem > op->group->stream_bytes;
    group_issue_chunks(op->group, op);
    return HDL_OK;
}

static enum hdl_status pull(struct hdl_op *op, uint64_t chunk)
{
    struct hdl_group *group = op->group;
    if (chunk == 0)
        return check_counts(op);
    for (uint32_t i = 0; i < group->capacity; i++) {
        uint32_t r = (group->rank + i) % group->capacity;
        size_t begin, n = mapped_range(op, chunk - 1, op->arrays.dst_counts[r], &begin);
        if (n == 0 || !mapped_takes_part(op, r, chunk))
            continue;
        char *dst = (char *)op->dst + (op->arrays.dst_displs[r] + begin) * op->elem;
        const void *src =
            r == group->rank
                ? (const char *)op->src + (op->arrays.src_displs[r] + begin) * op->elem
                : (const char *)mapped_input(op, r, chunk) +
                      group->rank * op->chunk_elems * op->elem;
        mapped_deliver(op, dst, src, n * op->elem);
    }
    return HDL_OK;
}

const struct group_algorithm group_alltoallv_pull = {
    .name = "pull",
    .kind = GROUP_ALLTOALLV,
    .plan = plan,
    .publish = publish,
    .pull = pull,
};
