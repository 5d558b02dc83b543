/* SPDX-License-Identifier: Apache-2.0 */
/* How an exchange reaches the other ranks' arenas: mapped memory, puts, waiting, absence.
 */
#ifndef MOE_PEERS_H
#define MOE_PEERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heddle.h"

/*
 * Filled by moe_peers_group (peers_group.c), or by tests that run ranks as threads. None
 * of the functions allocates. `base[r]` is the arena of rank r if it is mapped, the own
 * one for the own rank, NULL if it is messaged or was never there.
 */
struct moe_peers {
    uint32_t ranks;
    uint32_t self;
    uint8_t *own;
    uint8_t **base;
    bool messaged; /* some rank is */
    const struct moe_peers_ops *ops;
};

/* Writes `bytes` of `src` at `offset`, then sets the flag at `signal`. src is in the own
 * arena and stays as it is until `settled`. */
struct moe_put {
    size_t offset;
    const void *src;
    size_t bytes; /* may be 0 */
    size_t signal;
    uint64_t flag;
    bool more; /* another one to the rank follows at once: they may share a message */
};

enum moe_presence {
    MOE_PRESENT = 0,
    MOE_ABSENT,   /* agreed to be lost */
    MOE_NO_MEMBER /* a slot without an active rank */
};

struct moe_peers_ops {
    /* Waits until test(argument) is true; false at the deadline (BASE_FOREVER = none).
     * Tests look at memory that peers write and ring for, at absence, and at check. */
    bool (*wait)(struct moe_peers *peers, bool (*test)(void *argument), void *argument,
                 int64_t deadline_ns);
    /* HDL_OK, or what ended the group, with the text set. */
    enum hdl_status (*check)(struct moe_peers *peers);
    enum moe_presence (*presence)(struct moe_peers *peers, uint32_t rank);
    /* Wakes a mapped rank after a store that it may wait for. */
    void (*ring)(struct moe_peers *peers, uint32_t rank);
    /* To a messaged rank. */
    enum hdl_status (*put)(struct moe_peers *peers, uint32_t rank,
                           const struct moe_put *put);
    /* A mark after the newest put to the rank, and whether all before a mark have left.
     */
    uint64_t (*mark)(struct moe_peers *peers, uint32_t rank);
    bool (*settled)(struct moe_peers *peers, uint32_t rank, uint64_t mark);
    /* Closes. Optional. */
    void (*destroy)(struct moe_peers *peers);
};

struct base_env;
struct hdl_group;

/* Arenas of `bytes` on all ranks of a group; a collective of it, which fails on all
 * alike. Who is in the mask `members` and lost meanwhile is absent. *peers is NULL if
 * only this rank lacks memory. */
enum hdl_status moe_peers_group(struct base_env *env, struct hdl_group *group,
                                size_t bytes, const uint64_t *members,
                                struct moe_peers **peers);

#endif
