/* SPDX-License-Identifier: Apache-2.0 */
/* Masks and bounds of a committed view. */
#include "group/view.h"

#include "base/checked.h"
#include "base/rankset.h"
#include "net/net.h"

/* Adds one slot to the masks and moves the bounds. */
static void take_slot(struct group_view *view, uint32_t rank)
{
    const struct ctl_slot *slot = &view->ctl->slots[rank];
    if (slot->active)
        base_mask_set(view->active, rank);
    if (slot->absent)
        base_mask_set(view->absent, rank);
    if (slot->rank_epoch == 0)
        return;
    if (!slot->absent && (slot->last == CTL_X_FOREVER || !slot->closed))
        base_mask_set(view->reading, rank);
    if (!slot->absent && slot->last == CTL_X_FOREVER) {
        base_mask_set(view->present, rank);
        view->num_present++;
        if (slot->first > view->steady_from)
            view->steady_from = slot->first;
        if (slot->reported_before > view->reports_until)
            view->reports_until = slot->reported_before;
        return;
    }
    uint64_t behind = slot->last == CTL_X_FOREVER ? CTL_X_FOREVER : slot->last + 1;
    if (behind > view->steady_from)
        view->steady_from = behind;
    uint64_t until =
        slot->reported > slot->reported_before ? slot->reported : slot->reported_before;
    if (until > view->reports_until)
        view->reports_until = until;
}

struct group_view *group_view_create(struct base_env *env, struct ctl_view *ctl,
                                     uint32_t rank)
{
    uint32_t words = base_rank_set_words(ctl->capacity);
    size_t bytes;
    if (!base_mul_size((size_t)words + ctl->capacity, 4 * sizeof(uint64_t), &bytes) ||
        !base_add_size(bytes, sizeof(struct group_view), &bytes)) {
        (void)base_fail(HDL_ENOMEM, "a view of %u slots is too large", ctl->capacity);
        return NULL;
    }
    struct group_view *view = base_alloc(env, 1, bytes);
    if (!view)
        return NULL;
    view->ctl = ctl_view_ref(ctl);
    view->rank = rank;
    view->num_words = words;
    view->active = view->words;
    view->absent = view->words + words;
    view->present = view->words + 2 * words;
    view->reading = view->words + 3 * words;
    view->reach = (struct group_reach **)(void *)(view->words + 4 * words);
    for (uint32_t i = 0; i < ctl->capacity; i++)
        take_slot(view, i);
    return view;
}

void group_view_free(struct base_env *env, struct group_view *view)
{
    if (!view)
        return;
    for (uint32_t r = 0; r < view->ctl->capacity; r++)
        group_reach_unref(env, view->reach[r]);
    ctl_view_unref(view->ctl);
    base_free(env, view);
}

/* A removal that is ahead or an admission that is ahead; a loss shows at once, with all
 * that was decided before it. */
void group_view_follow(struct group_view *view, const struct group_view *older)
{
    uint64_t from = 0;
    view->visible_from = 0;
    if (view->ctl->slots[view->rank].first != older->ctl->slots[view->rank].first)
        return; /* the own admission */
    for (uint32_t r = 0; r < view->ctl->capacity; r++) {
        const struct ctl_slot *slot = &view->ctl->slots[r],
                              *before = &older->ctl->slots[r];
        bool changed = slot->active != before->active || slot->first != before->first;
        if (slot->absent && !before->absent)
            return;
        if (!changed || r == view->rank || slot->absent)
            continue;
        uint64_t op = slot->active                  ? ctl_x_op(slot->first)
                      : slot->last == CTL_X_FOREVER ? 0
                                                    : ctl_x_op(slot->last) + 1;
        if (slot->rank_epoch != 0 && op > from)
            from = op;
    }
    view->visible_from = from;
}

struct group_reach *group_reach_ref(struct group_reach *reach)
{
    if (reach)
        atomic_fetch_add(&reach->references, 1);
    return reach;
}

void group_reach_unref(struct base_env *env, struct group_reach *reach)
{
    if (!reach || atomic_fetch_sub(&reach->references, 1) != 1)
        return;
    net_remote_close(reach->remote);
    base_free(env, reach);
}
