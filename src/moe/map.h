/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks hold an expert, and which of them gets a token. */
#ifndef MOE_MAP_H
#define MOE_MAP_H

/*
 *     first  [R+1]  0  2  2  5      experts of rank r: list[first[r] .. first[r+1])
 *     list          0  3  1  2  3   ascending in a rank; the place is the local number
 *     begin  [E+1]  0  1  2  3  5   holders of expert e: holder[begin[e] .. begin[e+1])
 *     holder        0  2  2  0  2   ranks ascending
 *     local         0  0  1  1  2   the expert's local number there
 */

#include "base/rankset.h"
#include "moe/layout.h"

struct moe_map {
    uint32_t ranks, experts;
    uint32_t max_local; /* most experts on one rank */
    uint32_t replicas;  /* most holders of one expert */
    uint32_t *first, *list;
    uint32_t *begin, *holder, *local;
};

struct moe_place {
    uint32_t rank;
    uint32_t local;
};

/* counts NULL = contiguous, E / R each. HDL_EINVAL with the offending values. */
enum hdl_status moe_map_init(struct base_env *env, struct moe_map *map, uint32_t ranks,
                             uint32_t experts, const int32_t *counts, const int32_t *ids);
void moe_map_free(struct base_env *env, struct moe_map *map);

static inline uint32_t moe_map_local_experts(const struct moe_map *map, uint32_t rank)
{
    return map->first[rank + 1] - map->first[rank];
}

/* Several holders: see moe_map_place. */
struct moe_place moe_map_choose(const struct moe_map *map, uint32_t dp, uint32_t expert,
                                uint32_t source, uint32_t token, const uint64_t *active);

/*
 * Where the rows of `token` of `source` for `expert` go: the own rank (with dp > 1 the
 * lowest member of the source's group) if it holds the expert, else holder number (source
 * / dp + token) mod n of the n holders that are in `active`; of all holders if none is.
 */
static inline struct moe_place moe_map_place(const struct moe_map *map, uint32_t dp,
                                             uint32_t expert, uint32_t source,
                                             uint32_t token, const uint64_t *active)
{
    uint32_t begin = map->begin[expert];
    if (map->begin[expert + 1] - begin == 1)
        return (struct moe_place){map->holder[begin], map->local[begin]};
    return moe_map_choose(map, dp, expert, source, token, active);
}

/*
 * The member of DP group `group` whose rows go to rank `to`: number to mod dp, or the
 * next (cyclically) that is in `active`; to mod dp if none is.
 */
static inline uint32_t moe_dp_member(uint32_t dp, uint32_t group, uint32_t to,
                                     const uint64_t *active)
{
    for (uint32_t i = 0; i < dp; i++) {
        uint32_t member = group * dp + (to + i) % dp;
        if (base_mask_test(active, member))
            return member;
    }
    return group * dp + to % dp;
}

#endif
