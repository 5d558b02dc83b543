/* SPDX-License-Identifier: Apache-2.0 */
/* Open-addressing map; a removal shifts the entries behind it back, so no tombstones. */
#include "ctl/map.h"

#include "base/env.h"

static size_t home(const struct ctl_map *map, uint64_t key)
{
    uint64_t hash = key * UINT64_C(0x9e3779b97f4a7c15);
    return (size_t)(hash >> 32) & (map->capacity - 1);
}

static size_t find(const struct ctl_map *map, uint64_t key)
{
    size_t at = home(map, key);
    while (map->entries[at].key != 0 && map->entries[at].key != key)
        at = (at + 1) & (map->capacity - 1);
    return at;
}

void *ctl_map_get(const struct ctl_map *map, uint64_t key)
{
    if (map->capacity == 0 || key == 0)
        return NULL;
    return map->entries[find(map, key)].value;
}

static bool grow(struct base_env *env, struct ctl_map *map)
{
    struct ctl_map larger = {.capacity = map->capacity ? 2 * map->capacity : 16};
    larger.entries = base_alloc(env, larger.capacity, sizeof(*larger.entries));
    if (!larger.entries)
        return false;
    for (size_t i = 0; i < map->capacity; i++) {
        if (map->entries[i].key != 0)
            larger.entries[find(&larger, map->entries[i].key)] = map->entries[i];
    }
    larger.count = map->count;
    base_free(env, map->entries);
    *map = larger;
    return true;
}

bool ctl_map_put(struct base_env *env, struct ctl_map *map, uint64_t key, void *value)
{
    if (2 * (map->count + 1) > map->capacity && !grow(env, map))
        return false;
    size_t at = find(map, key);
    if (map->entries[at].key == 0)
        map->count++;
    map->entries[at] = (struct ctl_map_entry){key, value};
    return true;
}

void ctl_map_remove(struct ctl_map *map, uint64_t key)
{
    if (map->capacity == 0 || key == 0)
        return;
    size_t mask = map->capacity - 1;
    size_t hole = find(map, key);
    if (map->entries[hole].key == 0)
        return;
    map->count--;
    for (size_t at = (hole + 1) & mask; map->entries[at].key != 0; at = (at + 1) & mask) {
        size_t from = home(map, map->entries[at].key);
        if (((at - from) & mask) >= ((at - hole) & mask)) {
            map->entries[hole] = map->entries[at];
            hole = at;
        }
    }
    map->entries[hole] = (struct ctl_map_entry){0, NULL};
}

void ctl_map_free(struct base_env *env, struct ctl_map *map)
{
    base_free(env, map->entries);
    *map = (struct ctl_map){0};
}
