/* SPDX-License-Identifier: Apache-2.0 */
/* How operations end: failed sets, texts, mismatched descriptors, waking who waits. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/env.h"
#include "base/rankset.h"
#include "group/group.h"
#include "group/wait.h"

static void trace(struct hdl_group *group, const struct hdl_op *op,
                  enum hdl_status status)
{
    struct group_trace *line = &group->trace[group->num_traced++ % GROUP_TRACE];
    line->number = op->number;
    line->desc = op->desc;
    line->status = status;
    line->peer = op->peer;
}

void group_op_mark_failed(struct hdl_op *op, uint32_t rank)
{
    struct hdl_group *group = op->group;
    if (rank < 64) {
        if (op->failed0 >> rank & 1)
            return;
        op->failed0 |= UINT64_C(1) << rank;
    } else {
        op->failed_words = base_rank_set_words(group->capacity);
        if (!op->failed)
            op->failed =
                base_alloc(group->engine->env, op->failed_words, sizeof(uint64_t));
        /* Without memory the count still says that there are more. */
        if (op->failed) {
            if (base_mask_test(op->failed, rank))
                return;
            base_mask_set(op->failed, rank);
        }
    }
    op->num_failed++;
}

/* Slots whose data the operation lacks, as the view says it for everybody. */
static void collect_lost(struct hdl_op *op)
{
    const struct group_view *view = op->group->seen;
    uint64_t last_x = GROUP_X(op->number, op->num_chunks - 1);
    for (uint32_t r = 0; r < op->group->capacity; r++)
        if (!group_view_has(view, r, last_x) && view->ctl->slots[r].rank_epoch != 0 &&
            ctl_slot_reports(&view->ctl->slots[r], op->number))
            group_op_mark_failed(op, r);
}

static enum hdl_status final_status(struct hdl_op *op, enum hdl_status status)
{
    const struct group_view *view = op->group->seen;
    if (op->number == 0 || op->number > view->reports_until)
        return status;
    if (status != HDL_OK && status != HDL_EPEER)
        return status;
    collect_lost(op);
    if (status != HDL_OK || op->num_failed == 0)
        return status;
    if (op->group->completion_local && op->direct)
        return HDL_EPEER;
    return HDL_INCOMPLETE;
}

/* What it says for itself who had no more to tell. Without memory it stays "". */
static void name_lost(struct hdl_op *op)
{
    struct base_env *env = op->engine->env;
    struct base_rank_set *lost = base_rank_set_alloc(env, op->group->capacity);
    op->detail = base_alloc(env, 1, BASE_DETAIL_BYTES);
    if (lost && op->detail) {
        char desc[160], ranks[128];
        (void)group_op_failed(op, lost->words, lost->num_words);
        snprintf(op->detail, BASE_DETAIL_BYTES, "operation %llu, %s: without ranks %s",
                 (unsigned long long)op->number,
                 group_desc_format(&op->desc, desc, sizeof(desc)),
                 base_rank_set_format(lost, ranks, sizeof(ranks)));
    }
    base_rank_set_free(env, lost);
}

void group_op_finish(struct hdl_op *op, enum hdl_status status)
{
    struct hdl_group *group = op->group;
    struct group_engine *engine = group->engine;
    status = final_status(op, status);
    if (op->number && op->num_failed && !op->detail && !op->freed)
        name_lost(op);
    trace(group, op, status);
    if (group->publishing == op)
        group->publishing = group_next_open(group, op);
    base_list_remove(&op->node);
    if (op->number)
        group->num_open--;
    group_count(status < 0 ? &group->counters.ops_failed : &group->counters.ops_done, 1);
    if (!op->blocking)
        atomic_fetch_sub_explicit(&engine->pending, 1, memory_order_relaxed);
    if (op->freed) {
        group_op_release(op);
        return;
    }
    atomic_store_explicit(&op->status, status, memory_order_release);
    if (atomic_load_explicit(&engine->waiters, memory_order_relaxed) >
        engine->holder_waits)
        group_engine_wake(engine);
}

void group_op_fail(struct hdl_op *op, enum hdl_status status, const uint64_t *mask,
                   const char *format, ...)
{
    va_list args;
    va_start(args, format);
    char *text = base_alloc(op->engine->env, 1, BASE_DETAIL_BYTES);
    if (text)
        vsnprintf(text, BASE_DETAIL_BYTES, format, args);
    va_end(args);
    base_free(op->engine->env, op->detail);
    op->detail = text;
    for (uint32_t r = 0; mask && r < op->group->capacity; r++)
        if (base_mask_test(mask, r))
            group_op_mark_failed(op, r);
    group_op_finish(op, status);
}

/* Everybody compares everybody's descriptor, so all find the same status: any refused
 * call is HDL_EINVAL, else any other operation HDL_EORDER, else HDL_EINVAL. */
static enum hdl_status
mismatch_status(struct hdl_op *op, uint64_t x,
                const struct group_desc *(*desc_of)(struct hdl_op *, uint32_t),
                uint32_t *a, uint32_t *b)
{
    const struct group_view *view = op->group->seen;
    const struct group_desc *first = NULL;
    enum hdl_status status = HDL_OK;
    for (uint32_t r = 0; r < op->group->capacity; r++) {
        if (!group_view_has(view, r, x))
            continue;
        const struct group_desc *desc = desc_of(op, r);
        if (!first) {
            first = desc;
            *a = r;
            *b = r;
        }
        if (desc->kind == GROUP_REFUSED || first->kind == GROUP_REFUSED) {
            status = HDL_EINVAL;
            *b = r;
            if (r != *a)
                break;
            continue;
        }
        if (status == HDL_OK && memcmp(desc, first, sizeof(*desc)) != 0) {
            status = HDL_EINVAL;
            *b = r;
        }
        if (status == HDL_EINVAL && desc->kind != first->kind) {
            status = HDL_EORDER;
            *b = r;
        }
    }
    return status;
}

void group_op_mismatch(struct hdl_op *op, uint64_t x,
                       const struct group_desc *(*desc_of)(struct hdl_op *, uint32_t))
{
    uint32_t a = 0, b = 0;
    char text_a[128], text_b[128];
    enum hdl_status status = mismatch_status(op, x, desc_of, &a, &b);
    if (status == HDL_OK) {
        group_op_fail(op, HDL_EINTERNAL, NULL,
                      "operation %llu: equal descriptors differ in hash",
                      (unsigned long long)op->number);
        return;
    }
    /* The own call's refusal says more than its descriptor. */
    group_op_fail(op, status, NULL,
                  "operation %llu: rank %u called %s, rank %u called %s%s%s",
                  (unsigned long long)op->number, a,
                  group_desc_format(desc_of(op, a), text_a, sizeof(text_a)), b,
                  group_desc_format(desc_of(op, b), text_b, sizeof(text_b)),
                  op->detail ? "; " : "", op->detail ? op->detail : "");
}
