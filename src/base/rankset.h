/* SPDX-License-Identifier: Apache-2.0 */
/* A set of ranks below a capacity that is fixed when the set is made.
 *
 *     words[0] bit 0 = rank 0, words[0] bit 63 = rank 63, words[1] bit 0 = rank 64, ...
 *
 * Bits at and above the capacity are always 0.
 */
#ifndef BASE_RANKSET_H
#define BASE_RANKSET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/env.h"

/* The same words without their capacity, which the caller knows. */
static inline bool base_mask_test(const uint64_t *mask, uint32_t rank)
{
    return (mask[rank / 64] >> (rank % 64) & 1) != 0;
}

static inline void base_mask_set(uint64_t *mask, uint32_t rank)
{
    mask[rank / 64] |= UINT64_C(1) << (rank % 64);
}

static inline void base_mask_clear(uint64_t *mask, uint32_t rank)
{
    mask[rank / 64] &= ~(UINT64_C(1) << (rank % 64));
}

struct base_rank_set {
    uint32_t capacity;
    uint32_t num_words;
    uint64_t words[];
};

static inline uint32_t base_rank_set_words(uint32_t capacity)
{
    return capacity / 64 + (capacity % 64 != 0);
}

/* An empty set, NULL with detail text on failure; the caller frees it. */
struct base_rank_set *base_rank_set_alloc(struct base_env *env, uint32_t capacity);
void base_rank_set_free(struct base_env *env, struct base_rank_set *set);

/* Ranks at or above the capacity are ignored by set and clear, and are not in any set. */
static inline void base_rank_set_set(struct base_rank_set *set, uint32_t rank)
{
    if (rank < set->capacity)
        base_mask_set(set->words, rank);
}

static inline void base_rank_set_clear(struct base_rank_set *set, uint32_t rank)
{
    if (rank < set->capacity)
        base_mask_clear(set->words, rank);
}

static inline bool base_rank_set_test(const struct base_rank_set *set, uint32_t rank)
{
    return rank < set->capacity && base_mask_test(set->words, rank);
}

static inline void base_rank_set_clear_all(struct base_rank_set *set)
{
    memset(set->words, 0, set->num_words * sizeof(uint64_t));
}

/* Smallest member >= from, or UINT32_MAX. */
uint32_t base_rank_set_next(const struct base_rank_set *set, uint32_t from);

/* Writes "0-2,5" into text, always terminated, cut with "..." if it does not fit; "none"
 * if empty. Returns text. */
char *base_rank_set_format(const struct base_rank_set *set, char *text, size_t size);

#endif
