/* SPDX-License-Identifier: Apache-2.0 */
/* Rank sets: the parts that loop. */
#include "base/rankset.h"

#include <stdio.h>

#include "base/checked.h"

struct base_rank_set *base_rank_set_alloc(struct base_env *env, uint32_t capacity)
{
    struct base_rank_set *set = base_alloc(env, 1, base_rank_set_bytes(capacity));
    if (set)
        base_rank_set_init(set, capacity);
    return set;
}

void base_rank_set_free(struct base_env *env, struct base_rank_set *set)
{
    base_free(env, set);
}

static void mask_tail(struct base_rank_set *set)
{
    if (set->capacity % 64 != 0)
        set->words[set->num_words - 1] &= (UINT64_C(1) << (set->capacity % 64)) - 1;
}

void base_rank_set_fill(struct base_rank_set *set, uint32_t count)
{
    for (uint32_t w = 0; w < set->num_words; w++) {
        uint32_t first = w * 64;
        if (count >= first + 64)
            set->words[w] = UINT64_MAX;
        else if (count > first)
            set->words[w] = (UINT64_C(1) << (count - first)) - 1;
        else
            set->words[w] = 0;
    }
    mask_tail(set);
}

uint32_t base_rank_set_count(const struct base_rank_set *set)
{
    uint32_t count = 0;
    for (uint32_t w = 0; w < set->num_words; w++)
        count += (uint32_t)__builtin_popcountll(set->words[w]);
    return count;
}

bool base_rank_set_empty(const struct base_rank_set *set)
{
    return base_rank_set_next(set, 0) == UINT32_MAX;
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

uint32_t base_rank_set_size(const struct base_rank_set *set)
{
    for (uint32_t w = set->num_words; w > 0; w--) {
        if (set->words[w - 1])
            return w * 64 - (uint32_t)__builtin_clzll(set->words[w - 1]);
    }
    return 0;
}

static uint64_t word_or_0(const struct base_rank_set *set, uint32_t w)
{
    return w < set->num_words ? set->words[w] : 0;
}

bool base_rank_set_equal(const struct base_rank_set *a, const struct base_rank_set *b)
{
    uint32_t num_words = a->num_words > b->num_words ? a->num_words : b->num_words;
    for (uint32_t w = 0; w < num_words; w++) {
        if (word_or_0(a, w) != word_or_0(b, w))
            return false;
    }
    return true;
}

bool base_rank_set_intersects(const struct base_rank_set *a,
                              const struct base_rank_set *b)
{
    for (uint32_t w = 0; w < a->num_words; w++) {
        if (a->words[w] & word_or_0(b, w))
            return true;
    }
    return false;
}

void base_rank_set_copy(struct base_rank_set *dst, const struct base_rank_set *src)
{
    for (uint32_t w = 0; w < dst->num_words; w++)
        dst->words[w] = word_or_0(src, w);
    mask_tail(dst);
}

void base_rank_set_union(struct base_rank_set *dst, const struct base_rank_set *src)
{
    for (uint32_t w = 0; w < dst->num_words; w++)
        dst->words[w] |= word_or_0(src, w);
    mask_tail(dst);
}

void base_rank_set_subtract(struct base_rank_set *dst, const struct base_rank_set *src)
{
    for (uint32_t w = 0; w < dst->num_words; w++)
        dst->words[w] &= ~word_or_0(src, w);
}

void base_rank_set_intersect(struct base_rank_set *dst, const struct base_rank_set *src)
{
    for (uint32_t w = 0; w < dst->num_words; w++)
        dst->words[w] &= word_or_0(src, w);
}

void base_rank_set_to_words(const struct base_rank_set *set, uint64_t *words,
                            uint32_t num_words)
{
    for (uint32_t w = 0; w < num_words; w++)
        words[w] = word_or_0(set, w);
}

void base_rank_set_from_words(struct base_rank_set *set, const uint64_t *words,
                              uint32_t num_words)
{
    for (uint32_t w = 0; w < set->num_words; w++)
        set->words[w] = w < num_words ? words[w] : 0;
    mask_tail(set);
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
