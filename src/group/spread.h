/* SPDX-License-Identifier: Apache-2.0 */
/* Moving a waiting thread off a core that it shares with the peer it waits for. */
#ifndef GROUP_SPREAD_H
#define GROUP_SPREAD_H

#include <stdbool.h>
#include <stdint.h>

struct group_engine;
struct hdl_group;

/* Tells the peers on which core this thread is; returns it, from 1. */
uint32_t group_spread_show(struct hdl_group *group);
/* Tells them that it sleeps. */
void group_spread_hide(struct hdl_group *group);
/* Where ranks outnumber cores: did the rank wait last on the core that this one did? */
bool group_spread_same_core(const struct hdl_group *group, uint32_t rank);
/* Are more ranks of the group on a core than its share of those awake on this host? */
enum group_crowding {
    GROUP_CORE_FREE = 0,
    GROUP_CORE_SHARED, /* others of them should leave first, or it is not known who */
    GROUP_CORE_LEAVE   /* this rank should: there are enough below it */
};
/* Under the lock. */
enum group_crowding group_spread_crowding(struct hdl_group *group, uint32_t core);
/* After a wait that yielded: moves the calling thread to another core of its mask if wait
 * after wait found that this one is shared. */
void group_spread(struct group_engine *engine, enum group_crowding crowding);

#endif
