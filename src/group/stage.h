/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank writes what mapped peers read: through the cache, or past it. */
#ifndef GROUP_STAGE_H
#define GROUP_STAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Which way is faster depends on where the reader's core is, by a factor of ten either
 * way: lines in a cache that both cores share are taken over quickly; lines in the cache
 * of a distant core are not, and the way through memory does not touch them. A virtual
 * machine's cores move about, so the ranks find out as they go: every piece is timed, and
 * now and then some are written the other way.
 */
struct group_stage {
    uint32_t cached_ps, past_ps; /* a byte takes so long; 0 = not known yet */
    bool past;
    uint32_t pieces;  /* since the last probe began */
    int64_t probe_ns; /* no probe before */
};

/* Collectives, whose ranks all write and read at the same time, and messages, which one
 * writes while the other reads; each in small pieces, in larger ones, and of operations
 * that are too large for the cache. */
enum { GROUP_STAGE_COLLECTIVE, GROUP_STAGE_MESSAGE, GROUP_STAGES, GROUP_STAGE_SIZES };

struct group_stages {
    struct group_stage of[GROUP_STAGES][GROUP_STAGE_SIZES];
};

/* Copies a piece into the own segment. Under the engine's lock. */
void group_stage(struct group_stages *stages, int kind, bool large, void *dst,
                 const void *src, size_t bytes);

/* Would a piece of a collective go past the cache? */
bool group_stage_past(const struct group_stages *stages, bool large, size_t bytes);

#endif
