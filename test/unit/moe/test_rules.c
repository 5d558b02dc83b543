/* SPDX-License-Identifier: Apache-2.0 */
/* The rules by which ranks reuse halves, in every order of events: 3 ranks, 4 steps,
 * split phases, puts that arrive in any order, any rank masked or given up at any moment.
 *
 * What is modelled. A step of a rank is: send (dispatch puts to both others), receive
 * from both, give (contributions to both), take from both. A put of step s lands in half
 * s mod 2 of its pair, whole, at any time after it was made. Reading a half takes two
 * events; if another step's put lands between them, the reader has mixed two steps: that
 * must never happen. At any moment a reader may give a source up.
 *
 *   rule SIGN    nothing is put into a peer's half at step s before its header of s-1 is
 * here rule LEFT    no step begins while a put of s-2, from the same half, is on its way
 *
 * With either rule left out the search finds a mixed read, which shows that it can. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/random.h"

enum { MOST = 3, DISPATCH = 0, CONTRIBUTION = 1 };

/* Size of the search: combine may be left out. */
static int ranks, steps, combines;
enum { RULE_SIGN = 1, RULE_LEFT = 2 };

/* Stages of a step: the two others are number 0 and 1, an odd receive or take is reading.
 */
enum { SEND = 0, RECEIVE = 1, GIVE = 5, TAKE = 6, STAGES = 10 };

struct state {
    uint8_t step[MOST], stage[MOST];
    uint8_t took[MOST];               /* bit: that source's rows came in this step */
    uint8_t memory[MOST][MOST][2][2]; /* [reader][writer][kind][half]: step in it */
    uint8_t flying[MOST][MOST][2];    /* [writer][reader][kind]: bit of each step */
    uint8_t unused[8 - (9 + 54) % 8]; /* whole words, for the hash */
};

/* ------------------------------------------------------------------------ visited set */

static uint64_t *seen;
static size_t seen_room, seen_count;

static uint64_t hash(const struct state *s)
{
    uint64_t h = 1, word;
    for (size_t i = 0; i < sizeof(*s); i += sizeof(word)) {
        memcpy(&word, (const uint8_t *)s + i, sizeof(word));
        h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 32;
    }
    h *= UINT64_C(0xbf58476d1ce4e5b9);
    return h ^ (h >> 29) ? h ^ (h >> 29) : 1;
}

static int visit(const struct state *s)
{
    uint64_t h = hash(s);
    size_t at = h & (seen_room - 1);
    while (seen[at] && seen[at] != h)
        at = (at + 1) & (seen_room - 1);
    if (seen[at])
        return 0;
    seen[at] = h;
    if (++seen_count * 2 > seen_room)
        fail_msg("more states than expected");
    return 1;
}

_Static_assert(sizeof(struct state) % 8 == 0, "hashed by words");

/* ------------------------------------------------------------------------------ rules */

static uint8_t other(int rank, int number)
{
    return (uint8_t)((rank + 1 + number) % ranks);
}

/* Has `rank` a sign that `peer` is done with the half of its step s - 2? */
static int has_sign(const struct state *s, int rank, int peer)
{
    int step = s->step[rank];
    const uint8_t *headers = s->memory[rank][peer][DISPATCH];
    return step <= 2 || headers[0] >= step - 1 || headers[1] >= step - 1;
}

/* Is a put of two steps ago, from the half that the next step writes, still on its way?
 */
static int half_in_use(const struct state *s, int rank)
{
    int before = s->step[rank] - 2, use = 0;
    for (int peer = 0; before > 0 && peer < ranks; peer++)
        for (int kind = 0; kind < 2; kind++)
            use |= s->flying[rank][peer][kind] >> before & 1;
    return use;
}

static void put(struct state *s, int rank, int peer, int kind)
{
    s->flying[rank][peer][kind] |= (uint8_t)(1 << s->step[rank]);
}

static void advance(struct state *s, int rank)
{
    s->stage[rank]++;
    if (ranks == 2 && (s->stage[rank] == RECEIVE + 2 || s->stage[rank] == TAKE + 2))
        s->stage[rank] = (uint8_t)(s->stage[rank] + 2); /* one other */
    if (s->stage[rank] == STAGES || (!combines && s->stage[rank] == GIVE)) {
        s->stage[rank] = SEND;
        s->took[rank] = 0;
        s->step[rank]++;
    }
}

/* ----------------------------------------------------------------------------- search */

static struct state *stack;
static size_t depth, room;
static int found;

static int searching; /* 1: every state once; 0: whatever follows */

static void start(struct state *s)
{
    memset(s, 0, sizeof(*s));
    memset(s->step, 1, sizeof(s->step));
}

static void push(const struct state *s)
{
    if (searching && !visit(s))
        return;
    if (depth == room) {
        room = room ? 2 * room : 4096;
        stack = realloc(stack, room * sizeof(*stack));
    }
    stack[depth++] = *s;
}

/* Receiving or taking: begin a read, end it, or give the source up. */
static void read_events(const struct state *s, int rank, int first, int kind)
{
    int number = (s->stage[rank] - first) / 2, reading = (s->stage[rank] - first) % 2;
    int source = other(rank, number), step = s->step[rank];
    int content = s->memory[rank][source][kind][step & 1];
    struct state next = *s;
    if (reading) {
        found += content != step; /* another step landed while this one was read */
        if (kind == DISPATCH)
            next.took[rank] |= (uint8_t)(1 << source);
        advance(&next, rank);
        push(&next);
        return;
    }
    if (content == step) {
        advance(&next, rank);
        push(&next);
        next = *s;
    }
    advance(&next, rank); /* masked, or the deadline passed */
    advance(&next, rank);
    push(&next);
}

static void rank_events(const struct state *s, int rank, int rules)
{
    struct state next = *s;
    if (s->step[rank] > steps)
        return;
    if (s->stage[rank] == SEND || s->stage[rank] == GIVE) {
        int kind = s->stage[rank] == SEND ? DISPATCH : CONTRIBUTION;
        if (kind == DISPATCH && (rules & RULE_LEFT) && half_in_use(s, rank))
            return; /* the send waits */
        for (int i = 0; i < ranks - 1; i++) {
            int peer = other(rank, i);
            int knows = kind == CONTRIBUTION && (s->took[rank] >> peer & 1);
            if (knows || !(rules & RULE_SIGN) || has_sign(s, rank, peer))
                put(&next, rank, peer, kind);
        }
        advance(&next, rank);
        push(&next);
    } else if (s->stage[rank] < GIVE) {
        read_events(s, rank, RECEIVE, DISPATCH);
    } else {
        read_events(s, rank, TAKE, CONTRIBUTION);
    }
}

static void deliveries(const struct state *s)
{
    for (int from = 0; from < ranks; from++)
        for (int to = 0; to < ranks; to++)
            for (int kind = 0; kind < 2; kind++)
                for (int step = 1; step <= steps; step++) {
                    struct state next = *s;
                    if (!(s->flying[from][to][kind] >> step & 1))
                        continue;
                    next.flying[from][to][kind] &= (uint8_t) ~(1 << step);
                    next.memory[to][from][kind][step & 1] = (uint8_t)step;
                    push(&next);
                }
}

/* Number of mixed reads found; stops at the first if `stop`. */
static int search(int rules, size_t most)
{
    struct state first;
    start(&first);
    searching = 1;
    seen_room = most;
    seen_count = depth = 0;
    seen = calloc(seen_room, sizeof(*seen));
    found = 0;
    push(&first);
    while (depth > 0 && !found) {
        struct state s = stack[--depth];
        for (int rank = 0; rank < ranks; rank++)
            rank_events(&s, rank, rules);
        deliveries(&s);
    }
    printf("%d ranks, %d steps, rules %d: %zu states, %s\n", ranks, steps, rules,
           seen_count, found ? "a mixed read" : "none mixed");
    free(seen);
    free(stack);
    stack = NULL;
    room = 0;
    return found;
}

static void size(int r, int s, int c)
{
    ranks = r;
    steps = s;
    combines = c;
}

static void test_rules(void **state)
{
#ifdef __SANITIZE_ADDRESS__
    size(3, 2, 0); /* the search itself is the same everywhere */
#else
    size(3, 3, 0);
#endif
    assert_int_equal(search(RULE_SIGN | RULE_LEFT, (size_t)1 << 23), 0);
    size(2, 4, 1);
    assert_int_equal(search(RULE_SIGN | RULE_LEFT, (size_t)1 << 20), 0);
    if (getenv("HEDDLE_TEST_LONG")) {
        size(3, 4, 1);
        assert_int_equal(search(RULE_SIGN | RULE_LEFT, (size_t)1 << 31), 0);
    }
}

/* Random orders of the size that is too large to try them all. */
static void test_walks(void **state)
{
    uint64_t seed = 1;
    struct state s;
    size(3, 4, 1);
    found = 0;
    for (int walk = 0; walk < 20000; walk++) {
        start(&s);
        do {
            searching = 0;
            depth = 0;
            for (int rank = 0; rank < ranks; rank++)
                rank_events(&s, rank, RULE_SIGN | RULE_LEFT);
            deliveries(&s);
            if (depth > 0)
                s = stack[base_splitmix_below(&seed, depth)];
        } while (depth > 0);
        assert_int_equal(found, 0);
    }
    free(stack);
    stack = NULL;
    room = 0;
}

static void test_without_sign(void **state)
{
    size(3, 4, 1);
    assert_int_not_equal(search(RULE_LEFT, (size_t)1 << 22), 0);
}

static void test_without_left(void **state)
{
    size(3, 4, 1);
    assert_int_not_equal(search(RULE_SIGN, (size_t)1 << 22), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_sign),
        cmocka_unit_test(test_without_left),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_walks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
