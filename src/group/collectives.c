/* SPDX-License-Identifier: Apache-2.0 */
/* The public collectives: argument checks, descriptors. */
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "group/reduce.h"
#include "group/submit.h"

/* Takes the engine's lock, which group_submit gives back: arrays have the size that the
 * group has at the number that this call gets. A call whose arguments are bad is refused,
 * not dropped: it takes its number, so that the ranks stay in step. Without a group there
 * is no number to take: `group` is then NULL in the request. */
static struct group_request begin(struct hdl_group *group, enum group_kind kind,
                                  enum hdl_dtype dtype, size_t count, const void *src,
                                  void *dst)
{
    enum hdl_status status = group_check(group);
    if (status != HDL_OK)
        return (struct group_request){.refused = status};
    group_engine_lock(group->engine);
    struct group_request request = {.group = group,
                                    .desc = {.kind = (uint8_t)kind,
                                             .dtype = (uint8_t)dtype,
                                             .root = -1,
                                             .count = count},
                                    .src = src,
                                    .dst = dst,
                                    .elem = base_dtype_size(dtype),
                                    .array_size = group_size_under_lock(group)};
    if (request.elem == 0)
        request.refused = base_fail(HDL_EINVAL, "%s: unknown type %d",
                                    group_kind_name((uint8_t)kind), dtype);
    return request;
}

static void refuse(struct group_request *request, const char *what, size_t value)
{
    if (request->refused == HDL_OK)
        request->refused = base_fail(HDL_EINVAL, "%s: %s %zu",
                                     group_kind_name(request->desc.kind), what, value);
}

enum blocks { ONE_BLOCK, BLOCK_PER_SLOT };

/* Blocks of desc.count elements must be addressable, and be there if not empty. */
static void check_memory(struct group_request *request, enum blocks each, bool src,
                         bool dst)
{
    size_t bytes;
    if (request->refused != HDL_OK)
        return;
    size_t blocks = each == ONE_BLOCK ? 1 : request->group->capacity;
    if (!base_mul_size(request->desc.count, blocks, &bytes) ||
        !base_mul_size(bytes, request->elem, &bytes))
        refuse(request, "too large: count", request->desc.count);
    else if (bytes > 0 && src && !request->src)
        refuse(request, "src is NULL, count", request->desc.count);
    else if (bytes > 0 && dst && !request->dst)
        refuse(request, "dst is NULL, count", request->desc.count);
}

static void check_root(struct group_request *request, int32_t root)
{
    request->desc.root = root;
    if (request->refused != HDL_OK)
        return;
    uint32_t capacity = request->group->capacity;
    if (root < 0 || (uint32_t)root >= capacity)
        request->refused =
            base_fail(HDL_EINVAL, "%s: root %d is not in 0..%u",
                      group_kind_name(request->desc.kind), root, capacity - 1);
}

static void check_redop(struct group_request *request, enum hdl_redop redop)
{
    request->desc.redop = (uint8_t)redop;
    enum hdl_dtype dtype = (enum hdl_dtype)request->desc.dtype;
    if (request->refused == HDL_OK && !group_reduce_supported(dtype, redop))
        request->refused =
            base_fail(HDL_EINVAL, "%s: op %s (%d) is not defined for type %s",
                      group_kind_name(request->desc.kind), base_redop_name(redop), redop,
                      base_dtype_name(dtype));
}

/* Counts that all ranks give alike: their hash and the largest go into the descriptor. */
static void take_counts(struct group_request *request, const size_t *counts)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    size_t most = 0, sum = 0;
    if (!counts) {
        refuse(request, "counts is NULL, ranks", request->array_size);
        return;
    }
    for (uint32_t r = 0; r < request->array_size; r++) {
        hash = (hash ^ counts[r]) * UINT64_C(0x100000001b3);
        hash ^= hash >> 31;
        most = base_max_size(most, counts[r]);
        if (!base_add_size(sum, counts[r], &sum))
            refuse(request, "counts overflow at rank", r);
    }
    size_t bytes;
    if (!base_mul_size(sum, request->elem ? request->elem : 1, &bytes))
        refuse(request, "too large: sum of counts", sum);
    request->desc.count = most;
    request->desc.counts_hash = hash | 1;
}

static void check_displs(struct group_request *request, const size_t *counts,
                         const size_t *displs)
{
    if (request->refused != HDL_OK)
        return;
    if (!displs) {
        refuse(request, "displs is NULL, ranks", request->array_size);
        return;
    }
    for (uint32_t r = 0; r < request->array_size; r++) {
        size_t end;
        if (counts[r] > 0 && (!base_add_size(displs[r], counts[r], &end) ||
                              !base_mul_size(end, request->elem, &end)))
            refuse(request, "displs and counts overflow at rank", r);
    }
}

static bool am_root(const struct group_request *request)
{
    return request->group && request->desc.root == (int32_t)request->group->rank;
}

static bool own_block(const struct group_request *request, const size_t *counts)
{
    return request->refused == HDL_OK && request->group->rank < request->array_size &&
           counts[request->group->rank] > 0;
}

static enum hdl_status submit(struct group_request *request, const struct hdl_call *call,
                              struct hdl_op **op)
{
    struct hdl_call copy;
    if (!request->group)
        return request->refused;
    enum hdl_status status = group_call_read(&call, &copy);
    if (status != HDL_OK && request->refused == HDL_OK)
        request->refused = status;
    return group_submit(request, call, op);
}

enum hdl_status hdl_barrier(struct hdl_group *group, const struct hdl_call *call,
                            struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_BARRIER, HDL_U8, 0, NULL, NULL);
    return submit(&request, call, op);
}

enum hdl_status hdl_broadcast(struct hdl_group *group, const void *src, void *dst,
                              size_t count, enum hdl_dtype dtype, int32_t root,
                              const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_BROADCAST, dtype, count, src, dst);
    check_root(&request, root);
    check_memory(&request, ONE_BLOCK, am_root(&request), true);
    return submit(&request, call, op);
}

enum hdl_status hdl_reduce(struct hdl_group *group, const void *src, void *dst,
                           size_t count, enum hdl_dtype dtype, enum hdl_redop redop,
                           int32_t root, const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_REDUCE, dtype, count, src, dst);
    check_root(&request, root);
    check_redop(&request, redop);
    check_memory(&request, ONE_BLOCK, true, am_root(&request));
    return submit(&request, call, op);
}

enum hdl_status hdl_allreduce(struct hdl_group *group, const void *src, void *dst,
                              size_t count, enum hdl_dtype dtype, enum hdl_redop redop,
                              const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_ALLREDUCE, dtype, count, src, dst);
    check_redop(&request, redop);
    check_memory(&request, ONE_BLOCK, true, true);
    return submit(&request, call, op);
}

enum hdl_status hdl_allgather(struct hdl_group *group, const void *src, void *dst,
                              size_t count, enum hdl_dtype dtype,
                              const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_ALLGATHER, dtype, count, src, dst);
    check_memory(&request, BLOCK_PER_SLOT, true, true);
    return submit(&request, call, op);
}

enum hdl_status hdl_allgatherv(struct hdl_group *group, const void *src, void *dst,
                               const size_t *counts, const size_t *displs,
                               enum hdl_dtype dtype, const struct hdl_call *call,
                               struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_ALLGATHERV, dtype, 0, src, dst);
    take_counts(&request, counts);
    check_displs(&request, counts, displs);
    check_memory(&request, ONE_BLOCK, own_block(&request, counts), true);
    request.dst_counts = counts;
    request.dst_displs = displs;
    return submit(&request, call, op);
}

enum hdl_status hdl_reduce_scatter(struct hdl_group *group, const void *src, void *dst,
                                   size_t count, enum hdl_dtype dtype,
                                   enum hdl_redop redop, const struct hdl_call *call,
                                   struct hdl_op **op)
{
    struct group_request request =
        begin(group, GROUP_REDUCE_SCATTER, dtype, count, src, dst);
    check_redop(&request, redop);
    check_memory(&request, BLOCK_PER_SLOT, true, true);
    return submit(&request, call, op);
}

enum hdl_status hdl_reduce_scatterv(struct hdl_group *group, const void *src, void *dst,
                                    const size_t *counts, enum hdl_dtype dtype,
                                    enum hdl_redop redop, const struct hdl_call *call,
                                    struct hdl_op **op)
{
    struct group_request request =
        begin(group, GROUP_REDUCE_SCATTERV, dtype, 0, src, dst);
    take_counts(&request, counts);
    check_redop(&request, redop);
    check_memory(&request, ONE_BLOCK, true, own_block(&request, counts));
    request.src_counts = counts;
    return submit(&request, call, op);
}

enum hdl_status hdl_alltoall(struct hdl_group *group, const void *src, void *dst,
                             size_t count, enum hdl_dtype dtype,
                             const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_ALLTOALL, dtype, count, src, dst);
    check_memory(&request, BLOCK_PER_SLOT, true, true);
    return submit(&request, call, op);
}

static size_t largest(const size_t *counts, uint32_t n)
{
    size_t most = 0;
    for (uint32_t r = 0; counts && r < n; r++)
        most = base_max_size(most, counts[r]);
    return most;
}

/* In place both sides must describe the same blocks. */
static bool same_blocks(const struct group_request *request)
{
    size_t bytes = request->array_size * sizeof(size_t);
    return memcmp(request->src_counts, request->dst_counts, bytes) == 0 &&
           memcmp(request->src_displs, request->dst_displs, bytes) == 0;
}

enum hdl_status hdl_alltoallv(struct hdl_group *group, const void *src,
                              const size_t *src_counts, const size_t *src_displs,
                              void *dst, const size_t *dst_counts,
                              const size_t *dst_displs, enum hdl_dtype dtype,
                              const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_ALLTOALLV, dtype, 0, src, dst);
    request.src_counts = src_counts;
    request.src_displs = src_displs;
    request.dst_counts = dst_counts;
    request.dst_displs = dst_displs;
    uint32_t n = request.array_size;
    if (!src_counts || !dst_counts)
        refuse(&request, "counts is NULL, ranks", n);
    check_displs(&request, src_counts, src_displs);
    check_displs(&request, dst_counts, dst_displs);
    if (!src && largest(src_counts, n) > 0)
        refuse(&request, "src is NULL, largest count", largest(src_counts, n));
    if (!dst && largest(dst_counts, n) > 0)
        refuse(&request, "dst is NULL, largest count", largest(dst_counts, n));
    if (request.refused == HDL_OK && src == dst && !same_blocks(&request))
        refuse(&request, "in place with different counts or displs, ranks", n);
    return submit(&request, call, op);
}

enum hdl_status hdl_gather(struct hdl_group *group, const void *src, void *dst,
                           size_t count, enum hdl_dtype dtype, int32_t root,
                           const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_GATHER, dtype, count, src, dst);
    check_root(&request, root);
    check_memory(&request, BLOCK_PER_SLOT, true, am_root(&request));
    return submit(&request, call, op);
}

enum hdl_status hdl_gatherv(struct hdl_group *group, const void *src, void *dst,
                            const size_t *counts, const size_t *displs,
                            enum hdl_dtype dtype, int32_t root,
                            const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_GATHERV, dtype, 0, src, dst);
    take_counts(&request, counts);
    check_root(&request, root);
    if (am_root(&request))
        check_displs(&request, counts, displs);
    check_memory(&request, ONE_BLOCK, own_block(&request, counts), am_root(&request));
    request.dst_counts = counts;
    request.dst_displs = am_root(&request) ? displs : NULL;
    return submit(&request, call, op);
}

enum hdl_status hdl_scatter(struct hdl_group *group, const void *src, void *dst,
                            size_t count, enum hdl_dtype dtype, int32_t root,
                            const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_SCATTER, dtype, count, src, dst);
    check_root(&request, root);
    check_memory(&request, BLOCK_PER_SLOT, am_root(&request), true);
    return submit(&request, call, op);
}

enum hdl_status hdl_scatterv(struct hdl_group *group, const void *src,
                             const size_t *counts, const size_t *displs, void *dst,
                             enum hdl_dtype dtype, int32_t root,
                             const struct hdl_call *call, struct hdl_op **op)
{
    struct group_request request = begin(group, GROUP_SCATTERV, dtype, 0, src, dst);
    take_counts(&request, counts);
    check_root(&request, root);
    if (am_root(&request))
        check_displs(&request, counts, displs);
    check_memory(&request, ONE_BLOCK, am_root(&request), own_block(&request, counts));
    request.src_counts = counts;
    request.src_displs = am_root(&request) ? displs : NULL;
    return submit(&request, call, op);
}
