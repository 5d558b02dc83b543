/* SPDX-License-Identifier: Apache-2.0 */
/* Tells the supervisor the views that a rank sees, as the library holds them. */
#include "tools/crew/crew.h"

#include "group/group.h"

void crew_tell_view(struct hdl_group *group, uint64_t *told,
                    void (*emit)(struct crew_record *record))
{
    struct crew_record slots[CREW_RANKS_MAX];
    uint32_t n = 0;
    atomic_fetch_add(&group->view_readers, 1);
    const struct ctl_view *view = atomic_load(&group->view)->ctl;
    for (uint32_t s = 0; view->epoch != *told && s < group->capacity; s++)
        if (view->slots[s].rank_epoch)
            slots[n++] =
                (struct crew_record){.what = CREW_SLOT,
                                     .slot = {.epoch = view->epoch,
                                              .rank_epoch = view->slots[s].rank_epoch,
                                              .first = view->slots[s].first,
                                              .last = view->slots[s].last,
                                              .reported = view->slots[s].reported,
                                              .slot = s}};
    *told = view->epoch;
    atomic_fetch_sub(&group->view_readers, 1);
    for (uint32_t i = 0; i < n; i++)
        emit(&slots[i]);
}
