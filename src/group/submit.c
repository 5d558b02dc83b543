/* SPDX-License-Identifier: Apache-2.0 */
/* Numbering operations, waiting for those without a handle, handles. */
#include "group/submit.h"

#include <string.h>

#include "base/clock.h"
#include "base/option.h"
#include "group/p2p.h"
#include "group/spread.h"
#include "group/wait.h"

enum { INLINE_ROUNDS = 32, LATE_MANY = 8, LATE_PROBE = 64, LAST_WORDS = 1024 };

/* Of the thread's last blocking operation. The common case, none, costs one store. */
static _Thread_local uint32_t last_failed;
static _Thread_local uint64_t last_words[LAST_WORDS];

static int64_t deadline_of(const struct hdl_group *group, const struct hdl_call *call)
{
    if (call && call->timeout_us != 0)
        return base_deadline_ns(base_now_ns(), base_timeout_ns(call->timeout_us));
    if (group->op_timeout_ns != BASE_FOREVER)
        return base_deadline_ns(base_now_ns(), group->op_timeout_ns);
    return BASE_FOREVER;
}

enum hdl_status group_call_read(const struct hdl_call **call, struct hdl_call *copy)
{
    if (!*call || (*call)->size == sizeof(**call))
        return HDL_OK;
    enum hdl_status status = base_option_copy("hdl_call", *call, copy, sizeof(*copy));
    *call = status == HDL_OK ? copy : NULL;
    return status;
}

/* Its text is then also the calling thread's last one. */
static enum hdl_status outcome(const struct hdl_op *op)
{
    enum hdl_status status =
        (enum hdl_status)atomic_load_explicit(&op->status, memory_order_acquire);
    if (status == HDL_OK || status == HDL_PENDING)
        return status;
    if (op->detail)
        return base_fail(status, "%s", op->detail);
    return base_fail(status, "operation %llu: %s", (unsigned long long)op->number,
                     base_status_text(status));
}

/* Keeps status, failed set and text of an operation without a handle; under the lock. */
static enum hdl_status take_result(struct hdl_op *op)
{
    enum hdl_status status = outcome(op);
    last_failed = op->num_failed;
    if (op->num_failed)
        (void)group_op_failed(op, last_words, LAST_WORDS);
    group_op_release(op);
    return status;
}

/* Is a spin worth while? Not where ranks outnumber cores, and not after several
 * operations that ended late in a row: the peer is then probably waiting for this core.
 * Now and then a spin finds out whether that has changed. */
static bool spins(struct hdl_group *group)
{
    if (group->crowded)
        return false;
    return atomic_load_explicit(&group->late, memory_order_relaxed) < LATE_MANY ||
           ++group->late_probes % LATE_PROBE == 0;
}

static void count_late(struct hdl_group *group)
{
    uint32_t late = atomic_load_explicit(&group->late, memory_order_relaxed);
    if (late < LATE_MANY)
        atomic_store_explicit(&group->late, late + 1, memory_order_relaxed);
}

/* The operation is started and the lock is held. Most end within the first rounds. */
static enum hdl_status finish_blocking(struct hdl_group *group, struct hdl_op *op)
{
    struct group_engine *engine = group->engine;
    (void)group_spread_show(group);
    bool patient = spins(group);
    if (!group_op_spin(op, patient ? INLINE_ROUNDS : 1) && !group_op_yield(op)) {
        group_engine_unlock(engine);
        group_op_wait(op, BASE_FOREVER);
        group_engine_lock(engine);
        count_late(group);
    } else if (patient && atomic_load_explicit(&group->late, memory_order_relaxed)) {
        atomic_store_explicit(&group->late, 0, memory_order_relaxed);
    }
    enum hdl_status status = take_result(op);
    group_engine_unlock(engine);
    return status;
}

/* Started, lock held: either waits or hands out the handle. */
static enum hdl_status conclude(struct hdl_group *group, struct hdl_op *op,
                                struct hdl_op **out)
{
    if (!out)
        return finish_blocking(group, op);
    (void)group_progress(group);
    bool finished = group_op_finished(op);
    *out = op;
    group_engine_unlock(group->engine);
    if (!finished)
        group_thread_kick(group->engine);
    return HDL_OK;
}

static void copy_side(const size_t *counts, const size_t *displs, size_t n, size_t *to,
                      size_t *displs_to)
{
    size_t end = 0;
    for (size_t r = 0; r < n; r++) {
        to[r] = counts[r];
        displs_to[r] = displs ? displs[r] : end;
        end += counts[r];
    }
}

/* One block for all arrays of the capacity; entries behind the caller's are 0. */
static enum hdl_status copy_arrays(struct hdl_op *op, const struct group_request *request)
{
    size_t capacity = op->group->capacity, n = request->array_size;
    if (!request->src_counts && !request->dst_counts)
        return HDL_OK;
    size_t *block = base_alloc(op->engine->env, 4 * capacity, sizeof(size_t));
    if (!block)
        return HDL_ENOMEM;
    op->array_block = block;
    if (request->src_counts) {
        op->arrays.src_counts = block;
        op->arrays.src_displs = block + capacity;
        copy_side(request->src_counts, request->src_displs, n, op->arrays.src_counts,
                  op->arrays.src_displs);
    }
    if (request->dst_counts) {
        op->arrays.dst_counts = block + 2 * capacity;
        op->arrays.dst_displs = block + 3 * capacity;
        copy_side(request->dst_counts, request->dst_displs, n, op->arrays.dst_counts,
                  op->arrays.dst_displs);
    }
    return HDL_OK;
}

/* An operation from the pool with what every call sets; the lock is held. */
static struct hdl_op *new_op(struct hdl_group *group, const struct hdl_call *call,
                             bool blocking)
{
    struct hdl_op *op = group_op_alloc(group->engine);
    if (!op)
        return NULL;
    if (!group->reserve)
        group->reserve = group_op_alloc(group->engine);
    op->group = group;
    op->blocking = blocking;
    op->warned = false;
    op->started_ns = 0;
    op->deadline_ns = deadline_of(group, call);
    op->scalar = call ? call->scalar : 0;
    return op;
}

/* Without memory for the call its number is taken all the same, by an operation that
 * every group keeps for that. */
static enum hdl_status submit_nothing(struct hdl_group *group, struct hdl_op *op)
{
    if (!op) {
        op = group->reserve;
        group->reserve = NULL;
    }
    if (!op) {
        group_engine_unlock(group->engine);
        group_end(group, HDL_ENOMEM, "no memory for an operation");
        return HDL_ENOMEM;
    }
    op->group = group;
    op->desc = (struct group_desc){.kind = GROUP_REFUSED, .root = -1};
    op->hash = group_desc_hash(&op->desc);
    op->blocking = false;
    op->freed = true;
    op->warned = false;
    op->started_ns = 0;
    op->deadline_ns = BASE_FOREVER;
    atomic_fetch_add_explicit(&group->engine->pending, 1, memory_order_seq_cst);
    group_issue(group, op);
    (void)group_progress(group);
    group_engine_unlock(group->engine);
    group_thread_kick(group->engine);
    return base_fail(HDL_ENOMEM, "no memory for the call");
}

enum hdl_status group_submit(struct group_request *request, const struct hdl_call *call,
                             struct hdl_op **out)
{
    struct hdl_group *group = request->group;
    struct group_engine *engine = group->engine;
    char *detail = NULL;
    if (request->refused != HDL_OK) {
        detail = base_strdup(engine->env, base_detail());
        request->desc = (struct group_desc){.kind = GROUP_REFUSED, .root = -1};
    }
    if (atomic_load_explicit(&group->next, memory_order_relaxed) > group->last_op) {
        group_engine_unlock(engine);
        base_free(engine->env, detail);
        return base_fail(HDL_ENOTMEMBER, "rank %u was removed from group %s", group->rank,
                         group->name ? group->name : "");
    }
    struct hdl_op *op = new_op(group, call, !out);
    enum hdl_status status = op ? HDL_OK : HDL_ENOMEM;
    if (op && request->refused == HDL_OK)
        status = copy_arrays(op, request);
    if (status != HDL_OK) {
        base_free(engine->env, detail);
        return submit_nothing(group, op);
    }
    op->desc = request->desc;
    op->hash = group_desc_hash(&request->desc);
    op->src = request->src;
    op->dst = request->dst;
    op->elem = request->elem;
    op->blocks = request->array_size;
    op->detail = detail;
    if (out)
        atomic_fetch_add_explicit(&engine->pending, 1, memory_order_seq_cst);
    group_issue(group, op);
    return conclude(group, op, out);
}

enum hdl_status group_submit_p2p(struct hdl_group *group,
                                 const struct group_message *message,
                                 const struct hdl_call *call, struct hdl_op **out)
{
    struct group_engine *engine = group->engine;
    group_engine_lock(engine);
    struct hdl_op *op = new_op(group, call, !out);
    if (!op) {
        group_engine_unlock(engine);
        return HDL_ENOMEM;
    }
    op->desc = (struct group_desc){.kind = (uint8_t)message->kind,
                                   .dtype = (uint8_t)message->dtype,
                                   .root = -1,
                                   .count = message->count};
    op->number = 0;
    op->src = message->src;
    op->dst = message->dst;
    op->bytes = message->bytes;
    op->peer = message->peer;
    op->tag = message->tag;
    op->moved = 0;
    op->step = 0;
    op->source = -1;
    op->source_tag = -1;
    if (out)
        atomic_fetch_add_explicit(&engine->pending, 1, memory_order_seq_cst);
    group_count(&group->counters.ops_issued, 1);
    group_p2p_start(group, op);
    return conclude(group, op, out);
}

/* ------------------------------------------------------------------------ handles */

enum hdl_status hdl_op_test(struct hdl_op *op)
{
    if (!op)
        return base_fail(HDL_EINVAL, "no operation");
    enum hdl_status status = group_engine_check(op->engine);
    if (status != HDL_OK)
        return status;
    if (!group_op_finished(op) && group_engine_try_lock(op->engine)) {
        if (!group_op_finished(op))
            (void)group_engine_progress(op->engine);
        group_engine_unlock(op->engine);
    }
    return outcome(op);
}

enum hdl_status hdl_op_wait(struct hdl_op *op, int64_t timeout_us)
{
    if (!op)
        return base_fail(HDL_EINVAL, "no operation");
    if (group_op_finished(op))
        return outcome(op);
    enum hdl_status status = group_engine_check(op->engine);
    if (status != HDL_OK)
        return status;
    if (timeout_us == 0)
        return hdl_op_test(op);
    group_op_wait(op, base_deadline_ns(base_now_ns(), base_timeout_ns(timeout_us)));
    return outcome(op);
}

const char *hdl_op_detail(const struct hdl_op *op)
{
    return op && group_op_finished(op) && op->detail ? op->detail : "";
}

int32_t hdl_op_failed(const struct hdl_op *op, uint64_t *mask, size_t words)
{
    if (!op || !group_op_finished(op))
        return 0;
    return (int32_t)group_op_failed(op, mask, mask ? words : 0);
}

int32_t hdl_last_failed(uint64_t *mask, size_t words)
{
    for (size_t w = 0; mask && w < words; w++)
        mask[w] = last_failed && w < LAST_WORDS ? last_words[w] : 0;
    return (int32_t)last_failed;
}

enum hdl_status hdl_op_source(const struct hdl_op *op, int32_t *rank, int32_t *tag)
{
    if (!op || op->desc.kind != GROUP_RECV)
        return base_fail(HDL_EINVAL, "not a receive");
    if (!group_op_finished(op))
        return HDL_PENDING;
    if (rank)
        *rank = op->source;
    if (tag)
        *tag = op->source_tag;
    return HDL_OK;
}

void hdl_op_free(struct hdl_op *op)
{
    if (!op || group_engine_check(op->engine) != HDL_OK)
        return;
    struct group_engine *engine = op->engine;
    group_engine_lock(engine);
    if (group_op_finished(op))
        group_op_release(op);
    else
        op->freed = true;
    group_engine_unlock(engine);
}
