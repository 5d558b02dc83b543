/* SPDX-License-Identifier: Apache-2.0 */
/* Operation objects: pool, names, comparison of descriptors. */
#include "group/op.h"

#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "group/engine.h"
#include "group/group.h"

enum { SLAB_OPS = 32 };

struct op_slab {
    struct op_slab *next;
    struct hdl_op ops[SLAB_OPS];
};

static const char *const kind_names[] = {
    [GROUP_BARRIER] = "barrier",
    [GROUP_BROADCAST] = "broadcast",
    [GROUP_REDUCE] = "reduce",
    [GROUP_ALLREDUCE] = "allreduce",
    [GROUP_ALLGATHER] = "allgather",
    [GROUP_ALLGATHERV] = "allgatherv",
    [GROUP_REDUCE_SCATTER] = "reduce_scatter",
    [GROUP_REDUCE_SCATTERV] = "reduce_scatterv",
    [GROUP_ALLTOALL] = "alltoall",
    [GROUP_ALLTOALLV] = "alltoallv",
    [GROUP_GATHER] = "gather",
    [GROUP_GATHERV] = "gatherv",
    [GROUP_SCATTER] = "scatter",
    [GROUP_SCATTERV] = "scatterv",
    [GROUP_REFUSED] = "a refused call",
    [GROUP_SEND] = "send",
    [GROUP_RECV] = "recv",
};

const char *group_kind_name(uint8_t kind)
{
    if (kind >= sizeof(kind_names) / sizeof(kind_names[0]) || !kind_names[kind])
        return "unknown";
    return kind_names[kind];
}

static bool kind_reduces(uint8_t kind)
{
    return kind == GROUP_REDUCE || kind == GROUP_ALLREDUCE ||
           kind == GROUP_REDUCE_SCATTER || kind == GROUP_REDUCE_SCATTERV;
}

const char *group_desc_format(const struct group_desc *desc, char *text, size_t size)
{
    char root[24] = "", redop[24] = "", counts[32] = "";
    if (desc->kind == GROUP_REFUSED || desc->kind == GROUP_BARRIER) {
        snprintf(text, size, "%s", group_kind_name(desc->kind));
        return text;
    }
    if (desc->root >= 0)
        snprintf(root, sizeof(root), " root %d", desc->root);
    if (kind_reduces(desc->kind))
        snprintf(redop, sizeof(redop), " op %s",
                 base_redop_name((enum hdl_redop)desc->redop));
    if (desc->counts_hash)
        snprintf(counts, sizeof(counts), " counts #%016llx",
                 (unsigned long long)desc->counts_hash);
    snprintf(text, size, "%s count %llu type %s%s%s%s", group_kind_name(desc->kind),
             (unsigned long long)desc->count,
             base_dtype_name((enum hdl_dtype)desc->dtype), redop, root, counts);
    return text;
}

static bool pool_grow(struct group_engine *engine)
{
    struct op_slab *slab = base_alloc(engine->env, 1, sizeof(struct op_slab));
    if (!slab)
        return false;
    slab->next = engine->op_slabs;
    engine->op_slabs = slab;
    for (int i = 0; i < SLAB_OPS; i++) {
        slab->ops[i].engine = engine;
        base_list_push_back(&engine->free_ops, &slab->ops[i].node);
    }
    return true;
}

struct hdl_op *group_op_alloc(struct group_engine *engine)
{
    if (base_list_empty(&engine->free_ops) && !pool_grow(engine))
        return NULL;
    struct base_list *node = base_list_pop_front(&engine->free_ops);
    struct hdl_op *op = base_container_of(node, struct hdl_op, node);
    atomic_store_explicit(&op->status, HDL_PENDING, memory_order_relaxed);
    return op;
}

uint32_t group_op_failed(const struct hdl_op *op, uint64_t *mask, size_t words)
{
    for (size_t w = 0; w < words; w++)
        mask[w] = w == 0 ? op->failed0
                         : (op->failed && w < op->failed_words ? op->failed[w] : 0);
    return op->num_failed;
}

/* Whatever only unusual operations own. */
static void release_extras(struct hdl_op *op)
{
    struct base_env *env = op->engine->env;
    base_free(env, op->array_block);
    base_free(env, op->failed);
    base_free(env, op->detail);
    memset(&op->arrays, 0, sizeof(op->arrays));
    op->array_block = NULL;
    op->failed = NULL;
    op->detail = NULL;
}

void group_op_release(struct hdl_op *op)
{
    if (op->array_block || op->failed || op->detail)
        release_extras(op);
    op->failed0 = 0;
    op->num_failed = 0;
    op->freed = false;
    op->transport = NULL;
    base_list_push_front(&op->engine->free_ops, &op->node);
}

void group_op_pool_destroy(struct group_engine *engine)
{
    struct op_slab *slab = engine->op_slabs;
    engine->op_slabs = NULL;
    while (slab) {
        struct op_slab *next = slab->next;
        for (int i = 0; i < SLAB_OPS; i++)
            release_extras(&slab->ops[i]);
        base_free(engine->env, slab);
        slab = next;
    }
}
