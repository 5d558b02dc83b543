/* SPDX-License-Identifier: Apache-2.0 */
/* Rank sets: the parts that loop. */
#include "base/rankset.h"

#include <stdio.h>

#include "base/checked.h"

struct base_rank_set *base_rank_set_alloc(struct base_env *env, uint32_t capacity)
{
    uint32_t num_words = base_rank_set_words(capacity);
    struct base_rank_set *set =
        base_alloc(env, 1, sizeof(*set) + num_words * sizeof(uint64_t));
    if (set) {
        set->capacity = capacity;
        set->num_words = num_words;
    }
    return set;
}

void base_rank_set_free(struct base_env *env, struct base_rank_set *set)
{
    base_free(env, set);
}

uint32_t base_rank_set_next(const struct base_rank_set *set, uint32_t from)
{
    if (from >= set->capacity)
        return UINT32_MAX;
    uint32_t w = from / 64;
    uint64_t word = set->words[w] & (UINT64_MAX << (from % 64));
    while (word == 0) {
        if (++w >= set->num_words)
            return UINT32_MAX;
        word = set->words[w];
    }
    return w * 64 + (uint32_t)__builtin_ctzll(word);
}

/* First rank after `first` that is not a member. */
static uint32_t run_end(const struct base_rank_set *set, uint32_t first)
{
    uint32_t end = first + 1;
    while (base_rank_set_test(set, end))
        end++;
    return end;
}

char *base_rank_set_format(const struct base_rank_set *set, char *text, size_t size)
{
    if (size == 0)
        return text;
    snprintf(text, size, "none");
    size_t used = 0;
    uint32_t rank = base_rank_set_next(set, 0);
    while (rank != UINT32_MAX) {
        char run[32];
        uint32_t end = run_end(set, rank);
        const char *comma = used ? "," : "";
        if (end - rank > 2)
            snprintf(run, sizeof(run), "%s%u-%u", comma, rank, end - 1);
        else
            snprintf(run, sizeof(run), "%s%u", comma, rank);
        uint32_t next = base_rank_set_next(set, end - rank > 2 ? end : rank + 1);
        size_t length = strlen(run);
        size_t reserve = next == UINT32_MAX ? 0 : 3;
        if (used + length + reserve + 1 > size) {
            size_t where = base_min_size(used, size - base_min_size(size, 4));
            snprintf(text + where, size - where, "...");
            return text;
        }
        memcpy(text + used, run, length + 1);
        used += length;
        rank = next;
    }
    return text;
}
