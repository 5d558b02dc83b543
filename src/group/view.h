/* SPDX-License-Identifier: Apache-2.0 */
/* A committed view as the data plane reads it: masks and bounds computed once. */
#ifndef GROUP_VIEW_H
#define GROUP_VIEW_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/rankset.h"
#include "ctl/view.h"

/*
 * Immutable once published (group->view). The control thread makes one at each commit and
 * frees old ones when no reader is inside (group->view_readers), so reading is wait-free.
 */
struct group_view {
    struct group_view *older; /* retired, not freed yet */
    /* Operation number from which callers see it (hdl_group_view), 0 = at once. */
    uint64_t visible_from;
    struct ctl_view *ctl; /* one reference */
    uint32_t rank;
    uint32_t num_words;
    uint32_t num_present;
    /* From here on the ranks of every x are exactly `present`. */
    uint64_t steady_from;
    /* Operations above this number have nobody to report. */
    uint64_t reports_until;
    uint64_t *active; /* masks of num_words words */
    uint64_t *absent;
    uint64_t *present; /* has an open interval and is not absent */
    /* Present, or removed as planned and perhaps not through with its last operations. */
    uint64_t *reading;
    /* [capacity] how ranks that came after the creation are reached; NULL = as at the
     * creation. One reference each. */
    struct group_reach **reach;
    uint64_t words[];
};

struct hdl_peer_window;

/* The memory of a rank that joined, open here; its views share it. */
struct group_reach {
    _Atomic uint32_t references;
    uint64_t rank_epoch;
    struct hdl_peer_window *remote;
    void *segment; /* NULL if messaged */
};

/* Closes the window with the last reference. NULL is legal. */
void group_reach_unref(struct base_env *env, struct group_reach *reach);
struct group_reach *group_reach_ref(struct group_reach *reach); /* NULL is legal */

/* Takes a reference of `ctl`. NULL with detail text. */
struct group_view *group_view_create(struct base_env *env, struct ctl_view *ctl,
                                     uint32_t rank);
/* After everything that `older` has: from when on callers see the newer one. */
void group_view_follow(struct group_view *view, const struct group_view *older);
void group_view_free(struct base_env *env, struct group_view *view);

/* Does the slot's holder belong to x? A lost rank does, up to its last x. */
static inline bool group_view_has(const struct group_view *view, uint32_t rank,
                                  uint64_t x)
{
    return ctl_slot_takes_part(&view->ctl->slots[rank], x);
}

static inline bool group_view_present(const struct group_view *view, uint32_t rank)
{
    return base_mask_test(view->present, rank);
}

static inline bool group_view_reading(const struct group_view *view, uint32_t rank)
{
    return base_mask_test(view->reading, rank);
}

static inline bool group_view_absent(const struct group_view *view, uint32_t rank)
{
    return base_mask_test(view->absent, rank);
}

#endif
