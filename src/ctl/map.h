/* SPDX-License-Identifier: Apache-2.0 */
/* A map from non-zero 64-bit numbers to pointers: open addressing, linear probing. */
#ifndef CTL_MAP_H
#define CTL_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct base_env;

struct ctl_map_entry {
    uint64_t key; /* 0 = free */
    void *value;
};

/* Zero-initialised = empty. Capacity is a power of two, at most half of it is used. */
struct ctl_map {
    struct ctl_map_entry *entries;
    size_t capacity;
    size_t count;
};

void *ctl_map_get(const struct ctl_map *map, uint64_t key); /* NULL if not there */
/* False with detail if there is no memory. */
bool ctl_map_put(struct base_env *env, struct ctl_map *map, uint64_t key, void *value);
void ctl_map_remove(struct ctl_map *map, uint64_t key);
void ctl_map_free(struct base_env *env, struct ctl_map *map);

#endif
