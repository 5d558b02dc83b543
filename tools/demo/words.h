/* SPDX-License-Identifier: Apache-2.0 */
/* Counting and ordering words, for the demo. */
#ifndef TOOLS_DEMO_WORDS_H
#define TOOLS_DEMO_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { WORD_BYTES = 56 };

/* Longer words are cut. Unused bytes are 0, so that records compare and hash as bytes. */
struct word {
    uint64_t count;
    char text[WORD_BYTES];
};

_Static_assert(sizeof(struct word) == 64, "records travel as 64 bytes");

/* Hash table with open addressing; count 0 = free place. */
struct words {
    struct word *place;
    size_t room; /* a power of 2 */
    size_t used;
    uint64_t total; /* sum of the counts */
};

bool words_open(struct words *words);
void words_close(struct words *words);
/* Adds `count` to a word; false when memory is short. */
bool words_add(struct words *words, const char *text, uint64_t count);
/* Counts the words of a text, in lower case. */
bool words_count(struct words *words, const char *text, size_t length);
/* First place at or after `at` where no word goes on. */
size_t words_boundary(const char *text, size_t length, size_t at);
/* The used places, in the table's order; NULL when memory is short. */
struct word *words_list(const struct words *words);
uint64_t word_hash(const char *text);
/* Words are runs of letters, digits, ' and bytes above 127. */
bool word_char(char c);
/* Most frequent first, then by the alphabet; for qsort. */
int word_order(const void *a, const void *b);

#endif
