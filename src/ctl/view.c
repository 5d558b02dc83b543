/* SPDX-License-Identifier: Apache-2.0 */
/* Committed views: making, counting, applying a change, attempts. */
#include "ctl/view.h"

#include <string.h>

#include "base/checked.h"
#include "base/env.h"
#include "ctl/msg.h"

struct ctl_view *ctl_view_new(struct base_env *env, uint32_t capacity,
                              uint32_t num_attempts)
{
    size_t slots, attempts, head, total;
    if (!base_mul_size(capacity, sizeof(struct ctl_slot), &slots) ||
        !base_mul_size(num_attempts, sizeof(struct ctl_attempt), &attempts) ||
        !base_add_size(sizeof(struct ctl_view), slots, &head) ||
        !base_add_size(head, attempts, &total)) {
        (void)base_fail(HDL_ENOMEM, "a view of %u slots is too large", capacity);
        return NULL;
    }
    struct ctl_view *view = base_alloc(env, 1, total);
    if (!view)
        return NULL;
    view->env = env;
    view->references = 1;
    view->capacity = capacity;
    view->link_from = 1;
    view->num_attempts = num_attempts;
    view->attempts = (struct ctl_attempt *)(void *)((char *)view + head);
    return view;
}

struct ctl_view *ctl_view_ref(struct ctl_view *view)
{
    if (view)
        __atomic_fetch_add(&view->references, 1, __ATOMIC_RELAXED);
    return view;
}

void ctl_view_unref(struct ctl_view *view)
{
    if (!view || __atomic_sub_fetch(&view->references, 1, __ATOMIC_ACQ_REL) > 0)
        return;
    for (uint32_t i = 0; i < view->capacity; i++)
        ctl_bytes_unref(view->slots[i].endpoint);
    base_free(view->env, view);
}

void ctl_view_count(struct ctl_view *view)
{
    view->size = 0;
    view->num_active = 0;
    view->num_absent = 0;
    for (uint32_t i = 0; i < view->capacity; i++) {
        if (!view->slots[i].active)
            continue;
        view->size = i + 1;
        view->num_active++;
        if (view->slots[i].absent)
            view->num_absent++;
    }
}

uint64_t ctl_view_attempt(const struct ctl_view *view, uint64_t x)
{
    uint32_t low = 0, high = view->num_attempts;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (view->attempts[middle].from <= x)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? view->attempts[low - 1].epoch : 0;
}

uint64_t ctl_view_changed_from(const struct ctl_view *view)
{
    if (view->num_attempts == 0)
        return CTL_X_FOREVER;
    const struct ctl_attempt *newest = &view->attempts[view->num_attempts - 1];
    return newest->epoch == view->epoch ? newest->from : CTL_X_FOREVER;
}

static enum hdl_status take_slot(struct base_env *env, struct ctl_view *view,
                                 const struct ctl_slot_change *change)
{
    if (change->index >= view->capacity)
        return base_fail(HDL_EINVAL, "slot %u of a view of %u slots", change->index,
                         view->capacity);
    struct ctl_slot *slot = &view->slots[change->index];
    struct ctl_bytes *old = slot->endpoint;
    struct ctl_bytes *endpoint = NULL;
    if (change->slot.endpoint)
        endpoint = ctl_bytes_ref(change->slot.endpoint);
    else if (change->has_endpoint) {
        endpoint = ctl_bytes_new(env, change->endpoint, change->endpoint_size);
        if (!endpoint)
            return HDL_ENOMEM;
    } else if (slot->rank_epoch == change->slot.rank_epoch)
        endpoint = ctl_bytes_ref(old);
    *slot = change->slot;
    slot->endpoint = endpoint;
    ctl_bytes_unref(old);
    return HDL_OK;
}

struct ctl_view *ctl_view_apply(struct base_env *env, const struct ctl_view *base,
                                uint64_t group, uint64_t epoch,
                                const struct ctl_change *change)
{
    if (base ? base->epoch != change->base || base->capacity != change->capacity
             : change->base != 0) {
        (void)base_fail(HDL_EINVAL, "a change of view %llx does not fit view %llx",
                        (unsigned long long)change->base,
                        (unsigned long long)(base ? base->epoch : 0));
        return NULL;
    }
    struct ctl_view *view = ctl_view_new(env, change->capacity, change->num_attempts);
    if (!view)
        return NULL;
    view->group = group;
    view->epoch = epoch;
    view->settled = change->settled;
    view->begun = change->begun;
    view->link_from = change->link_from;
    view->link_to = change->link_to;
    if (change->num_attempts > 0)
        memcpy(view->attempts, change->attempts,
               change->num_attempts * sizeof(*view->attempts));
    for (uint32_t i = 0; base && i < base->capacity; i++) {
        view->slots[i] = base->slots[i];
        ctl_bytes_ref(view->slots[i].endpoint);
    }
    for (uint32_t i = 0; i < change->num_slots; i++) {
        if (take_slot(env, view, &change->slots[i]) != HDL_OK) {
            ctl_view_unref(view);
            return NULL;
        }
    }
    ctl_view_count(view);
    return view;
}

struct ctl_change ctl_view_whole(const struct ctl_view *view,
                                 struct ctl_slot_change *slots)
{
    struct ctl_change change = {.settled = view->settled,
                                .begun = view->begun,
                                .link_from = view->link_from,
                                .link_to = view->link_to,
                                .capacity = view->capacity,
                                .attempts = view->attempts,
                                .num_attempts = view->num_attempts,
                                .slots = slots};
    for (uint32_t i = 0; i < view->capacity; i++) {
        if (view->slots[i].rank_epoch == 0)
            continue;
        slots[change.num_slots] =
            (struct ctl_slot_change){.index = i, .slot = view->slots[i]};
        change.num_slots++;
    }
    return change;
}
