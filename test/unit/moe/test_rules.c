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
 *                here
 *   rule LEFT    no step begins while a put of s-2, from the same half, is on its way
 *
 * With either rule left out the search finds a mixed read, which shows that it can.
 *
 * How the search stays small. When a put lands matters to nobody but who looks there: it
 * stays undecided until then, and a look tries both. What no look can tell apart any more
 * is forgotten (with both rules: a step that its reader has left behind). Ranks differ by
 * their numbers only: of three turned states one is tried.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MOST = 3, DISPATCH = 0, CONTRIBUTION = 1 };

static int ranks, steps; /* size of the search */
enum { RULE_SIGN = 1, RULE_LEFT = 2 };

/* Stages of a step: the two others are number 0 and 1, an odd receive or take is reading.
 */
enum { SEND = 0, RECEIVE = 1, GIVE = 5, TAKE = 6, STAGES = 10 };

struct state {
    uint8_t step[MOST], stage[MOST];
    uint8_t free[MOST];               /* bit: that peer may be put to in this step */
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

static void put(struct state *s, int rank, int peer, int kind)
{
    s->flying[rank][peer][kind] |= (uint8_t)(1 << s->step[rank]);
}

static void land(struct state *s, int from, int to, int kind, int step)
{
    s->flying[from][to][kind] &= (uint8_t) ~(1 << step);
    s->memory[to][from][kind][step & 1] = (uint8_t)step;
}

/* The puts of two steps ago, from the half that the next step writes, are awaited. */
static void leave_half(struct state *s, int rank)
{
    int before = s->step[rank] - 2;
    for (int peer = 0; before > 0 && peer < ranks; peer++)
        for (int kind = 0; kind < 2; kind++)
            if (s->flying[rank][peer][kind] >> before & 1)
                land(s, rank, peer, kind, before);
}

static void advance(struct state *s, int rank)
{
    s->stage[rank]++;
    if (ranks == 2 && (s->stage[rank] == RECEIVE + 2 || s->stage[rank] == TAKE + 2))
        s->stage[rank] = (uint8_t)(s->stage[rank] + 2); /* one other */
    if (s->stage[rank] == STAGES) {
        s->stage[rank] = SEND;
        s->free[rank] = 0;
        s->step[rank]++;
    }
}

/* ----------------------------------------------------------------------------- search */

static struct state *stack;
static size_t depth, room;
static int found, rules;

/* Drops what its reader can neither take nor see a sign in. */
static void forget(struct state *s)
{
    for (int to = 0; to < ranks; to++) {
        int oldest = s->step[to] - (s->stage[to] == SEND);
        for (int from = 0; from < ranks; from++)
            for (int kind = 0; kind < 2; kind++) {
                for (int half = 0; half < 2; half++)
                    if (s->memory[to][from][kind][half] < oldest)
                        s->memory[to][from][kind][half] = 0;
                s->flying[from][to][kind] &= (uint8_t)(0xff << oldest);
            }
    }
}

static struct state turned(const struct state *s)
{
    struct state t = {.unused = {0}};
    for (int r = 0; r < ranks; r++) {
        int to = (r + 1) % ranks;
        t.step[to] = s->step[r];
        t.stage[to] = s->stage[r];
        for (int p = 0; p < ranks; p++) {
            t.free[to] |= (uint8_t)((s->free[r] >> p & 1) << (p + 1) % ranks);
            memcpy(t.memory[to][(p + 1) % ranks], s->memory[r][p], 4);
            memcpy(t.flying[to][(p + 1) % ranks], s->flying[r][p], 2);
        }
    }
    return t;
}

static void push(struct state s)
{
    if (rules == (RULE_SIGN | RULE_LEFT))
        forget(&s);
    struct state least = s, turn = s;
    for (int i = 1; i < ranks; i++) {
        turn = turned(&turn);
        if (memcmp(&turn, &least, sizeof(turn)) < 0)
            least = turn;
    }
    if (!visit(&least))
        return;
    if (depth == room) {
        room = room ? 2 * room : 4096;
        stack = realloc(stack, room * sizeof(*stack));
    }
    stack[depth++] = least;
}

/* Receiving or taking: begin a read, end it, or give the source up. */
static void read_events(const struct state *s, int rank, int first, int kind)
{
    int number = (s->stage[rank] - first) / 2, reading = (s->stage[rank] - first) % 2;
    int source = other(rank, number), step = s->step[rank];
    const uint8_t *content = &s->memory[rank][source][kind][step & 1];
    int flying = s->flying[source][rank][kind], same_half = step & 1 ? 0xaa : 0x55;
    struct state next = *s;
    if (reading) {
        /* Another step landed while this one was read, or may have. */
        found += *content != step || (flying & same_half & ~(1 << step));
        advance(&next, rank);
        push(next);
        return;
    }
    if (flying >> step & 1)
        land(&next, source, rank, kind, step);
    if (next.memory[rank][source][kind][step & 1] == step) {
        advance(&next, rank);
        push(next);
    }
    next = *s; /* masked, or the deadline passed */
    advance(&next, rank);
    advance(&next, rank);
    push(next);
}

/* Has `rank` the header by which `peer` is done with the half of step s - 2? */
static int has_sign(const struct state *s, int rank, int peer)
{
    const uint8_t *headers = s->memory[rank][peer][DISPATCH];
    int before = s->step[rank] - 1;
    return before < 2 || headers[0] >= before || headers[1] >= before;
}

/* Dispatch puts to the peers from `number` on. A look for a sign is tried with each
 * header that may land before it, and without. */
static void send_events(struct state s, int rank, int number)
{
    if (number == ranks - 1) {
        advance(&s, rank);
        push(s);
        return;
    }
    int peer = other(rank, number);
    struct state next = s;
    put(&next, rank, peer, DISPATCH);
    next.free[rank] |= (uint8_t)(1 << peer);
    if (!(rules & RULE_SIGN) || has_sign(&s, rank, peer)) {
        send_events(next, rank, number + 1);
        return;
    }
    send_events(s, rank, number + 1);
    for (int step = s.step[rank] - 1; step <= steps; step++) {
        struct state after = next;
        if (!(s.flying[peer][rank][DISPATCH] >> step & 1))
            continue;
        land(&after, peer, rank, DISPATCH, step);
        send_events(after, rank, number + 1);
    }
}

static void rank_events(const struct state *s, int rank)
{
    struct state next = *s;
    if (s->step[rank] > steps)
        return;
    if (s->stage[rank] == SEND) {
        if (rules & RULE_LEFT)
            leave_half(&next, rank);
        send_events(next, rank, 0);
    } else if (s->stage[rank] == GIVE) {
        for (int peer = 0; peer < ranks; peer++)
            if (s->free[rank] >> peer & 1)
                put(&next, rank, peer, CONTRIBUTION);
        advance(&next, rank);
        push(next);
    } else if (s->stage[rank] < GIVE) {
        read_events(s, rank, RECEIVE, DISPATCH);
    } else {
        read_events(s, rank, TAKE, CONTRIBUTION);
    }
}

/* Number of mixed reads found; stops at the first. */
static int search(int of_ranks, int with, size_t most)
{
    struct state first = {.unused = {0}};
    memset(first.step, 1, sizeof(first.step));
    ranks = of_ranks;
    steps = 4;
    rules = with;
    seen_room = most;
    seen_count = depth = 0;
    seen = calloc(seen_room, sizeof(*seen));
    found = 0;
    push(first);
    while (depth > 0 && !found) {
        struct state s = stack[--depth];
        for (int rank = 0; rank < ranks; rank++)
            rank_events(&s, rank);
    }
    printf("%d ranks, %d steps, rules %d: %zu states, %s\n", ranks, steps, rules,
           seen_count, found ? "a mixed read" : "none mixed");
    free(seen);
    free(stack);
    stack = NULL;
    room = 0;
    return found;
}

static void test_rules(void **state)
{
    assert_int_equal(search(2, RULE_SIGN | RULE_LEFT, (size_t)1 << 20), 0);
    assert_int_equal(search(3, RULE_SIGN | RULE_LEFT, (size_t)1 << 23), 0);
}

static void test_without_sign(void **state)
{
    assert_int_not_equal(search(3, RULE_LEFT, (size_t)1 << 20), 0);
}

static void test_without_left(void **state)
{
    assert_int_not_equal(search(3, RULE_SIGN, (size_t)1 << 20), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_sign),
        cmocka_unit_test(test_without_left),
        cmocka_unit_test(test_rules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
