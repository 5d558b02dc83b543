/* SPDX-License-Identifier: Apache-2.0 */
/* Builds the tables of an expert map and resolves replicas. */
#include "moe/map.h"

static enum hdl_status fill_lists(struct moe_map *map, const int32_t *counts,
                                  const int32_t *ids)
{
    uint32_t at = 0;
    for (uint32_t r = 0; r < map->ranks; r++) {
        uint32_t n = counts ? (uint32_t)counts[r] : map->experts / map->ranks;
        map->first[r] = at;
        for (uint32_t i = 0; i < n; i++, at++) {
            int64_t id = ids ? ids[at] : (int64_t)at;
            if (id < 0 || id >= map->experts)
                return base_fail(HDL_EINVAL, "expert %lld of rank %u is outside 0 to %u",
                                 (long long)id, r, map->experts - 1);
            if (i > 0 && id <= map->list[at - 1])
                return base_fail(HDL_EINVAL,
                                 "experts of rank %u do not ascend: %lld after %u", r,
                                 (long long)id, map->list[at - 1]);
            map->list[at] = (uint32_t)id;
        }
        if (n > map->max_local)
            map->max_local = n;
    }
    map->first[map->ranks] = at;
    return HDL_OK;
}

static enum hdl_status fill_holders(struct moe_map *map)
{
    uint32_t total = map->first[map->ranks];
    for (uint32_t i = 0; i < total; i++)
        map->begin[map->list[i] + 1]++;
    for (uint32_t e = 0; e < map->experts; e++) {
        if (map->begin[e + 1] == 0)
            return base_fail(HDL_EINVAL, "expert %u has no holder", e);
        if (map->begin[e + 1] > map->replicas)
            map->replicas = map->begin[e + 1];
        map->begin[e + 1] += map->begin[e];
    }
    for (uint32_t r = 0; r < map->ranks; r++) {
        for (uint32_t i = map->first[r]; i < map->first[r + 1]; i++) {
            uint32_t at = map->begin[map->list[i]]++;
            map->holder[at] = r;
            map->local[at] = i - map->first[r];
        }
    }
    for (uint32_t e = map->experts; e > 0; e--) /* the fill moved each to its end */
        map->begin[e] = map->begin[e - 1];
    map->begin[0] = 0;
    return HDL_OK;
}

static enum hdl_status count_entries(uint32_t ranks, uint32_t experts,
                                     const int32_t *counts, const int32_t *ids,
                                     size_t *total)
{
    *total = experts;
    if (!counts && ids)
        return base_fail(HDL_EINVAL, "expert_ids without expert_counts");
    if (!counts) {
        if (experts % ranks != 0)
            return base_fail(
                HDL_EINVAL,
                "%u experts do not divide among %u ranks, and there is no map", experts,
                ranks);
        return HDL_OK;
    }
    if (!ids)
        return base_fail(HDL_EINVAL, "expert_counts without expert_ids");
    *total = 0;
    for (uint32_t r = 0; r < ranks; r++) {
        if (counts[r] < 0 || (uint32_t)counts[r] > experts)
            return base_fail(HDL_EINVAL, "rank %u has %d of %u experts", r, counts[r],
                             experts);
        *total += (size_t)counts[r];
    }
    return HDL_OK;
}

enum hdl_status moe_map_init(struct base_env *env, struct moe_map *map, uint32_t ranks,
                             uint32_t experts, const int32_t *counts, const int32_t *ids)
{
    size_t total;
    *map = (struct moe_map){.ranks = ranks, .experts = experts};
    enum hdl_status status = count_entries(ranks, experts, counts, ids, &total);
    if (status != HDL_OK)
        return status;
    size_t words = ranks + 1 + experts + 1 + 3 * total;
    map->first = base_alloc(env, words, sizeof(uint32_t));
    if (!map->first)
        return HDL_ENOMEM;
    map->begin = map->first + ranks + 1;
    map->list = map->begin + experts + 1;
    map->holder = map->list + total;
    map->local = map->holder + total;
    status = fill_lists(map, counts, ids);
    if (status == HDL_OK)
        status = fill_holders(map);
    if (status != HDL_OK)
        moe_map_free(env, map);
    return status;
}

void moe_map_free(struct base_env *env, struct moe_map *map)
{
    base_free(env, map->first);
    map->first = NULL;
}

struct moe_place moe_map_choose(const struct moe_map *map, uint32_t dp, uint32_t expert,
                                uint32_t source, uint32_t token, const uint64_t *active)
{
    uint32_t begin = map->begin[expert], end = map->begin[expert + 1];
    uint32_t group = source / dp, alive = 0;
    for (uint32_t i = begin; i < end; i++) {
        bool up = base_mask_test(active, map->holder[i]);
        if (up && map->holder[i] / dp == group)
            return (struct moe_place){map->holder[i], map->local[i]};
        alive += up;
    }
    uint32_t wanted = (group + token) % (alive ? alive : end - begin);
    for (uint32_t i = begin; i < end; i++) {
        if (alive && !base_mask_test(active, map->holder[i]))
            continue;
        if (wanted-- == 0)
            return (struct moe_place){map->holder[i], map->local[i]};
    }
    return (struct moe_place){map->holder[begin], map->local[begin]}; /* not reached */
}
