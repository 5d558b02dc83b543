/* SPDX-License-Identifier: Apache-2.0 */
/* A committed view as the data plane reads it: masks and bounds computed once. */
#ifndef GROUP_VIEW_H
#define GROUP_VIEW_H

#include <stdbool.h>
#include <stdint.h>

#include "base/env.h"
#include "ctl/view.h"

/*
 * Immutable once published (group->view). The control thread makes one at each commit and
 * frees old ones when no reader is inside (group->view_readers), so reading is wait-free.
 */
struct group_view {
    struct group_view *older; /* retired, not freed yet */
    struct ctl_view *ctl;     /* one reference */
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
    uint64_t words[];
};

/* Takes a reference of `ctl`. NULL with detail text. */
struct group_view *group_view_create(struct base_env *env, struct ctl_view *ctl,
                                     uint32_t rank);
void group_view_free(struct base_env *env, struct group_view *view);

/* Does the slot's holder belong to x? A lost rank does, up to its last x. */
static inline bool group_view_has(const struct group_view *view, uint32_t rank,
                                  uint64_t x)
{
    return ctl_slot_takes_part(&view->ctl->slots[rank], x);
}

static inline bool group_view_present(const struct group_view *view, uint32_t rank)
{
    return (view->present[rank / 64] >> (rank % 64) & 1) != 0;
}

static inline bool group_view_absent(const struct group_view *view, uint32_t rank)
{
    return (view->absent[rank / 64] >> (rank % 64) & 1) != 0;
}

#endif
