/* SPDX-License-Identifier: Apache-2.0 */
/* A hash table of counted words. */
#include "tools/demo/words.h"

#include <stdlib.h>
#include <string.h>

enum { WORDS_ROOM = 1024 };

bool words_open(struct words *words)
{
    *words = (struct words){.room = WORDS_ROOM};
    words->place = calloc(words->room, sizeof(words->place[0]));
    return words->place != NULL;
}

void words_close(struct words *words)
{
    free(words->place);
    words->place = NULL;
}

uint64_t word_hash(const char *text)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < WORD_BYTES && text[i]; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash ^ (hash >> 29);
}

static struct word *find(const struct words *words, const char *text)
{
    size_t at = word_hash(text) & (words->room - 1);
    while (words->place[at].count &&
           strncmp(words->place[at].text, text, WORD_BYTES) != 0)
        at = (at + 1) & (words->room - 1);
    return &words->place[at];
}

static bool grow(struct words *words)
{
    struct words larger = {
        .room = words->room * 2, .used = words->used, .total = words->total};
    larger.place = calloc(larger.room, sizeof(larger.place[0]));
    if (!larger.place)
        return false;
    for (size_t i = 0; i < words->room; i++)
        if (words->place[i].count)
            *find(&larger, words->place[i].text) = words->place[i];
    free(words->place);
    *words = larger;
    return true;
}

bool words_add(struct words *words, const char *text, uint64_t count)
{
    struct word *place = find(words, text);
    if (!place->count) {
        if (words->used * 2 >= words->room) {
            if (!grow(words))
                return false;
            place = find(words, text);
        }
        strncpy(place->text, text, WORD_BYTES - 1);
        words->used++;
    }
    place->count += count;
    words->total += count;
    return true;
}

bool word_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '\'' || (unsigned char)c > 127;
}

bool words_count(struct words *words, const char *text, size_t length)
{
    for (size_t at = 0; at < length;) {
        char word[WORD_BYTES] = "";
        size_t used = 0;
        for (; at < length && word_char(text[at]); at++)
            if (used + 1 < WORD_BYTES)
                word[used++] =
                    (char)(text[at] >= 'A' && text[at] <= 'Z' ? text[at] + 32 : text[at]);
        if (used > 0 && !words_add(words, word, 1))
            return false;
        while (at < length && !word_char(text[at]))
            at++;
    }
    return true;
}

size_t words_boundary(const char *text, size_t length, size_t at)
{
    while (at < length && at > 0 && word_char(text[at]) && word_char(text[at - 1]))
        at++;
    return at < length ? at : length;
}

struct word *words_list(const struct words *words)
{
    struct word *list = calloc(words->used + 1, sizeof(*list));
    size_t used = 0;
    for (size_t i = 0; list && i < words->room; i++)
        if (words->place[i].count)
            list[used++] = words->place[i];
    return list;
}

int word_order(const void *a, const void *b)
{
    const struct word *x = a;
    const struct word *y = b;
    if (x->count != y->count)
        return x->count > y->count ? -1 : 1;
    return strncmp(x->text, y->text, WORD_BYTES);
}
