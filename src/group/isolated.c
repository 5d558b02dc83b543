/* SPDX-License-Identifier: Apache-2.0 */
/* A joiner before its admission: collectives over itself alone; then the entry. */
#include "group/group.h"
#include "group/mapped.h"

/*
 * Operations over {self} have numbers of their own, which say nothing to the members. So
 * they run in a shelter, memory that nobody else maps, and the segment stays as it was
 * made until the first operation as a member:
 *
 *     create (join) --> isolated in the shelter --commit that admits--> enter: numbers of
 *     the members, the segment, their path
 *
 * A member that was removed comes back the same way, without a shelter: its operations
 * ended with HDL_ENOTMEMBER meanwhile.
 */

static bool step(struct hdl_group *group, struct hdl_op *op)
{
    uint64_t chunk = op->pulled;
    if (op->published == chunk)
        (void)mapped_publish(group, op, chunk);
    (void)mapped_look(op, group->rank, chunk);
    return mapped_finish_chunk(group, op, chunk);
}

static bool isolated_progress(struct hdl_group *group)
{
    bool moved = false;
    for (struct base_list *node; (node = base_list_first(&group->queue)); moved = true)
        (void)step(group, base_container_of(node, struct hdl_op, node));
    return moved;
}

static void isolated_adopt(struct hdl_group *group, const struct group_view *older)
{
    (void)group;
    (void)older;
}

static uint64_t isolated_sample(struct hdl_group *group, uint32_t rank)
{
    (void)group;
    (void)rank;
    return GROUP_X_END(0);
}

static void isolated_missing(const struct hdl_op *op, uint64_t *mask)
{
    (void)op;
    (void)mask;
}

const struct group_path group_path_isolated = {
    .name = "isolated",
    .messaged = false,
    .start = mapped_start,
    .progress = isolated_progress,
    .adopt = isolated_adopt,
    .sample = isolated_sample,
    .missing = isolated_missing,
};

enum hdl_status group_isolate(struct hdl_group *group)
{
    group->shelter = base_alloc_aligned(group->engine->env, 4096, 1, group->shape.intake);
    if (!group->shelter)
        return HDL_ENOMEM;
    group->joining = true;
    group_point_self(group, group->shelter);
    group_done(group, GROUP_X_END(0));
    return HDL_OK;
}

void group_unshelter(struct hdl_group *group)
{
    base_free_aligned(group->engine->env, group->shelter);
    group->shelter = NULL;
}

/* The freeze bit and the count of freezes stay: the control thread may be at them. */
static void set_ready(struct hdl_group *group, uint64_t x)
{
    uint64_t word = atomic_load(&group->ready);
    while (!atomic_compare_exchange_weak(
        &group->ready, &word, (word & ~GROUP_READY_X_MASK) | (x & GROUP_READY_X_MASK)))
        ;
}

void group_enter(struct hdl_group *group, const struct group_view *view)
{
    uint64_t first = view->ctl->slots[group->rank].first;
    uint64_t number = GROUP_X_OP(first), before = GROUP_X_END(number - 1);
    if (group->path == &group_path_isolated) {
        (void)isolated_progress(group);
        group_point_self(group, group->segment);
        group->path = group->joined_path;
    }
    for (uint32_t i = 0; i < GROUP_ISSUES; i++)
        atomic_store(&group->issues[i].number, 0);
    group->publishing = NULL;
    group->open_chunks = 0;
    group->done_all = 0;
    atomic_store(&group->next, number);
    set_ready(group, before);
    group_done(group, before);
    atomic_store(&group->entered, first);
}
