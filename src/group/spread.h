/* SPDX-License-Identifier: Apache-2.0 */
/* Moving a waiting thread off a core that it shares with the peer it waits for. */
#ifndef GROUP_SPREAD_H
#define GROUP_SPREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "group/group.h"

/* Tells the peers on which core this thread is; returns it, from 1. */
uint32_t group_spread_show(struct hdl_group *group);
/* Tells them that it sleeps. */
void group_spread_hide(struct hdl_group *group);
/* Where a rank of this host waited last, from 1; 0 = it sleeps, or nothing is known.
 * Under the lock. */
static inline uint32_t group_spread_core(const struct hdl_group *group, uint32_t rank)
{
    const struct group_head *head = group->peer[rank].segment;
    return head && group_view_present(group->seen, rank)
               ? atomic_load_explicit(&head->core, memory_order_relaxed)
               : 0;
}
/* Where ranks outnumber cores: did the rank wait last on the core that this one did? */
bool group_spread_same_core(const struct hdl_group *group, uint32_t rank);
/* Ranks of the group that are awake on this host. */
struct group_awake {
    uint32_t all, here, below; /* here: on this core; below: those with lower ranks */
};
/* Are more of them on a core than its share? */
enum group_crowding {
    GROUP_CORE_FREE = 0,
    GROUP_CORE_SHARED, /* others of them should leave first, or it is not known who */
    GROUP_CORE_LEAVE   /* this rank should: there are enough below it */
};
enum group_crowding group_spread_crowding(const struct hdl_group *group,
                                          const struct group_awake *awake);
/* After a wait that yielded: moves the calling thread to another core of its mask if wait
 * after wait found that this one is shared. */
void group_spread(struct group_engine *engine, enum group_crowding crowding);

#endif
