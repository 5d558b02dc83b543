/* SPDX-License-Identifier: Apache-2.0 */
/* The rules of the kernels, on the CPU: in every order of events, and as threads over
 * atomics.
 *
 *   AGREE   All blocks of a rank must think the same of a source. Who gives up says
 *           "maybe", looks once more and writes what it saw; who has seen the header
 *           reads that word afterwards.
 *   SIGN    Nothing is stored into a peer's half at step s before its header of s-1 or s.
 *   TAG     A line is 8 bytes here, data and step together; older ones are ignored.
 *   FLAG    Rows that lie as they are: some are written, a fence lets them arrive, then
 *           their flags are raised. Who waits for a peer has raised all flags before.
 */
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/random.h"

enum { UNDECIDED = 0, MAYBE = 1, CAME = 2, MISSING = 3 };

/* ------------------------------------------------- AGREE, in every order of events */

enum { BLOCKS = 4 };
enum { RULE_SECOND_LOOK = 1, RULE_WORD_AFTERWARDS = 2 };
/* Where a block is. SAW and WAIT read the word, FINISHED + CAME and + MISSING end. */
enum { LOOK, GIVE_UP, SECOND, WRITE_CAME, WRITE_MISSING, WAIT, SAW, FINISHED };

struct state {
    uint8_t landed, word, at[BLOCKS];
};

static uint8_t tried[2 * 4 << 4 * BLOCKS];
static int found, states;

static void explore(struct state s, int rules);

static void go(struct state s, int block, int to, int rules)
{
    s.at[block] = (uint8_t)to;
    explore(s, rules);
}

static void block_event(struct state s, int block, int rules)
{
    switch (s.at[block]) {
    case LOOK:
        if (s.landed)
            go(s, block, rules & RULE_WORD_AFTERWARDS ? SAW : FINISHED + CAME, rules);
        go(s, block, GIVE_UP, rules);
        break;
    case GIVE_UP: { /* compare and swap */
        int mine = s.word == UNDECIDED;
        s.word = mine ? MAYBE : s.word;
        go(s, block,
           !mine                      ? WAIT
           : rules & RULE_SECOND_LOOK ? SECOND
                                      : WRITE_MISSING,
           rules);
        break;
    }
    case SECOND:
        go(s, block, s.landed ? WRITE_CAME : WRITE_MISSING, rules);
        break;
    case WRITE_CAME:
    case WRITE_MISSING:
        s.word = s.at[block] == WRITE_CAME ? CAME : MISSING;
        go(s, block, WAIT, rules);
        break;
    case WAIT:
        if (s.word != MAYBE)
            go(s, block, FINISHED + s.word, rules);
        break;
    case SAW:
        if (s.word != MAYBE)
            go(s, block, FINISHED + (s.word == MISSING ? MISSING : CAME), rules);
        break;
    }
}

static void explore(struct state s, int rules)
{
    size_t index = (size_t)s.landed * 4 + s.word;
    int over = 0, came = 0;
    for (int b = 0; b < BLOCKS; b++) {
        index = index << 4 | s.at[b];
        over += s.at[b] > FINISHED;
        came += s.at[b] == FINISHED + CAME;
    }
    if (tried[index])
        return;
    tried[index] = 1;
    states++;
    if (over == BLOCKS)
        found += came != 0 && came != BLOCKS;
    for (int b = 0; b < BLOCKS; b++)
        block_event(s, b, rules);
    s.landed = 1;
    explore(s, rules);
}

static int disagreements(int rules)
{
    struct state s = {0};
    memset(tried, 0, sizeof(tried));
    found = states = 0;
    explore(s, rules);
    printf("%d blocks, rules %d: %d states, %d disagree\n", BLOCKS, rules, states, found);
    return found;
}

static void test_agreement(void **state)
{
    assert_int_equal(disagreements(RULE_SECOND_LOOK | RULE_WORD_AFTERWARDS), 0);
    assert_int_not_equal(disagreements(RULE_WORD_AFTERWARDS), 0);
    assert_int_not_equal(disagreements(RULE_SECOND_LOOK), 0);
}

/* ------------------------------------------------- FLAG, in every order of arrival */

enum { ROWS = 3 };
enum { RULE_FENCE = 1, RULE_WRITTEN = 2, RULE_RAISE_FIRST = 4, ALL_RULES = 7 };
enum { WRITE, RAISE = WRITE + ROWS, FENCE = RAISE + ROWS, PEER, END };
enum { NOT_YET, UNDER_WAY, ARRIVED };

static struct chunk_search {
    uint8_t program[16];
    uint8_t tried[16 * 729];
    int states, old, untold;
} search;

/* Two rows in a chunk, a wait for a peer after its first, then one row more. */
static void write_program(int rules)
{
    uint8_t *p = search.program;
    bool early = !(rules & RULE_WRITTEN);
    *p++ = WRITE + 0;
    if (rules & RULE_RAISE_FIRST) {
        *p++ = FENCE;
        *p++ = RAISE + 0;
    }
    *p++ = PEER;
    if (early) /* of the whole chunk, though one of its rows is not there */
        *p++ = RAISE + 1;
    for (int row = 1; row < ROWS; row++) {
        *p++ = (uint8_t)(WRITE + row);
        if (rules & RULE_FENCE)
            *p++ = FENCE;
        if (row == 1 && !(rules & RULE_RAISE_FIRST))
            *p++ = RAISE + 0;
        if (row != 1 || !early)
            *p++ = (uint8_t)(RAISE + row);
    }
    *p = END;
}

/* `there`: where each row, then each flag is. */
static void search_from(uint8_t at, const uint8_t *there)
{
    uint8_t op = search.program[at], next[2 * ROWS];
    size_t index = at;
    bool waits = false;
    for (int i = 0; i < 2 * ROWS; i++) {
        index = index * 3 + there[i];
        waits |= i < ROWS && there[i] == UNDER_WAY;
    }
    if (search.tried[index])
        return;
    search.tried[index] = 1;
    search.states++;
    for (int row = 0; row < ROWS; row++) {
        search.old += there[ROWS + row] == ARRIVED && there[row] != ARRIVED;
        /* A lost peer is never there: the writer stays where it waits. */
        search.untold += op == PEER && there[row] != NOT_YET && !there[ROWS + row];
    }
    for (int i = 0; i < 2 * ROWS; i++)
        if (there[i] == UNDER_WAY) {
            memcpy(next, there, sizeof(next));
            next[i] = ARRIVED;
            search_from(at, next);
        }
    if (op == END || (op == FENCE && waits))
        return;
    memcpy(next, there, sizeof(next));
    if (op < FENCE)
        next[op] = UNDER_WAY; /* rows, then flags */
    search_from(at + 1, next);
}

static void search_all(int rules)
{
    static const uint8_t nothing[2 * ROWS];
    memset(&search, 0, sizeof(search));
    write_program(rules);
    search_from(0, nothing);
    printf("flags, rules %d: %d states, %d with old rows, %d with rows untold\n", rules,
           search.states, search.old, search.untold);
}

static void test_flags(void **state)
{
    search_all(ALL_RULES);
    assert_int_equal(search.old + search.untold, 0);
    search_all(ALL_RULES & ~RULE_FENCE);
    assert_int_not_equal(search.old, 0);
    search_all(ALL_RULES & ~RULE_WRITTEN);
    assert_int_not_equal(search.old, 0);
    search_all(ALL_RULES & ~RULE_RAISE_FIRST);
    assert_int_not_equal(search.untold, 0);
}

/* ------------------------------------------------------------- all rules, as threads */

enum { RANKS = 3, TOKENS = 3, LINES = 4, RECEIVERS = 2, STEPS = 4000, CHUNK = 2 };

typedef _Atomic uint64_t line;

/* Header signs and rows by source, contributions by token and holder; two halves. Rows
 * are there twice: as lines, and as they are with a flag. */
static struct arena {
    line sign[2][RANKS];
    line slot[2][RANKS][TOKENS][LINES];
    uint32_t row[2][RANKS][TOKENS][LINES];
    line flag[2][RANKS][TOKENS];
    line take[2][TOKENS][RANKS];
} arena[RANKS];

static struct rank {
    pthread_barrier_t kernel; /* a kernel begins when all blocks of the last have ended */
    _Atomic uint64_t decided[RANKS];
    int thinks[RECEIVERS][RANKS];
    uint32_t given_up;
} rank_of[RANKS];

struct block {
    pthread_t thread;
    int rank, number; /* number RECEIVERS sends */
    uint64_t seed;
};

/* Ends the process: cmocka cannot leave another thread. */
static void broken(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vfprintf(stderr, format, list);
    va_end(list);
    fputc('\n', stderr);
    abort();
}

static uint32_t value(int source, int token, int part, uint32_t step)
{
    return (uint32_t)(source * 1000003 + token * 10007 + part * 101) ^ step << 12;
}

static void store(line *to, uint32_t data, uint32_t step)
{
    atomic_store_explicit(to, (uint64_t)step << 32 | data, memory_order_relaxed);
}

static bool there(line *at, uint32_t step, uint32_t *data)
{
    uint64_t v = atomic_load_explicit(at, memory_order_relaxed);
    if (v >> 32 > step)
        broken("step %u reads a line of step %u", step, (uint32_t)(v >> 32));
    *data = (uint32_t)v;
    return v >> 32 == step;
}

static void await(line *at, uint32_t step, uint32_t wanted)
{
    uint32_t data;
    while (!there(at, step, &data))
        sched_yield();
    if (data != wanted)
        broken("step %u reads %x, not %x", step, data, wanted);
}

/* Signs are looked at across steps, and by who may be behind: no tag rule here. Who signs
 * has read what came in the step before. */
static bool signed_for(int here, int source, uint32_t step)
{
    uint64_t v =
        atomic_load_explicit(&arena[here].sign[step & 1][source], memory_order_acquire);
    return v >> 32 == step;
}

/* Raises the flags of rows `from` to `end`, which have been written. */
static void raise_flags(int to, int source, int from, int end, uint32_t step)
{
    for (int t = from; t < end; t++)
        atomic_store_explicit(&arena[to].flag[step & 1][source][t], step,
                              memory_order_release);
}

static void await_row(int here, int source, int t, uint32_t step)
{
    while (atomic_load_explicit(&arena[here].flag[step & 1][source][t],
                                memory_order_acquire) != step)
        sched_yield();
    for (int l = 0; l < LINES; l++)
        if (arena[here].row[step & 1][source][t][l] != value(source, t, l, step))
            broken("step %u reads an old row", step);
}

static void dawdle(struct block *b)
{
    for (uint64_t n = base_splitmix_below(&b->seed, 16); n > 13; n--)
        sched_yield();
    if (base_splitmix_below(&b->seed, 64) == 0)
        usleep(200); /* others run ahead */
}

static void wait_for_done(const struct block *b, int to, uint32_t step)
{
    while (step > 2 && to != b->rank && !signed_for(b->rank, to, step - 1) &&
           !signed_for(b->rank, to, step))
        sched_yield();
}

static void send(struct block *b, uint32_t step)
{
    for (int i = 0; i < RANKS; i++) {
        int to = (b->rank + i) % RANKS;
        wait_for_done(b, to, step);
        dawdle(b);
        atomic_store_explicit(&arena[to].sign[step & 1][b->rank],
                              (uint64_t)step << 32 | TOKENS, memory_order_release);
        for (int t = 0; t < TOKENS; t++) {
            for (int l = 0; l < LINES; l++) {
                uint32_t v = value(b->rank, t, l, step);
                store(&arena[to].slot[step & 1][b->rank][t][l], v, step);
                arena[to].row[step & 1][b->rank][t][l] = v;
            }
            if (t % CHUNK == CHUNK - 1 || t == TOKENS - 1)
                raise_flags(to, b->rank, t / CHUNK * CHUNK, t + 1, step);
        }
    }
}

/* As decide() of the kernels. */
static int decide(struct block *b, int source, uint32_t step)
{
    _Atomic uint64_t *word = &rank_of[b->rank].decided[source];
    uint64_t now = atomic_load(word);
    if (now >> 2 != step &&
        atomic_compare_exchange_strong(word, &now, (uint64_t)step << 2 | MAYBE)) {
        int saw = signed_for(b->rank, source, step) ? CAME : MISSING;
        dawdle(b);
        atomic_store(word, (uint64_t)step << 2 | (unsigned)saw);
    }
    do
        now = atomic_load(word);
    while (now == ((uint64_t)step << 2 | MAYBE));
    return (int)(now & 3);
}

static int look_for(struct block *b, int source, uint32_t step)
{
    bool patient = base_splitmix_below(&b->seed, 2) > 0 || source == b->rank;
    while (!signed_for(b->rank, source, step)) {
        if (!patient && decide(b, source, step) == MISSING)
            return MISSING;
        sched_yield();
    }
    atomic_thread_fence(memory_order_seq_cst);
    bool open = atomic_load(&rank_of[b->rank].decided[source]) >> 2 != step;
    return open ? CAME : decide(b, source, step);
}

/* Rows of every RECEIVERS-th token; then its contributions, which also say "dropped". */
static void receive(struct block *b, uint32_t step)
{
    int *thinks = rank_of[b->rank].thinks[b->number];
    for (int r = 0; r < RANKS; r++)
        thinks[r] = look_for(b, r, step);
    dawdle(b);
    for (int r = 0; r < RANKS; r++)
        for (int t = b->number; t < TOKENS; t += RECEIVERS) {
            for (int l = 0; l < LINES && thinks[r] == CAME; l++)
                await(&arena[b->rank].slot[step & 1][r][t][l], step,
                      value(r, t, l, step));
            if (thinks[r] == CAME)
                await_row(b->rank, r, t, step);
            wait_for_done(b, r, step);
            store(&arena[r].take[step & 1][t][b->rank], value(r, t, b->rank, step), step);
        }
    for (int t = b->number; t < TOKENS; t += RECEIVERS)
        for (int holder = 0; holder < RANKS; holder++)
            if (thinks[holder] == CAME) /* else this rank may run ahead of it */
                await(&arena[b->rank].take[step & 1][t][holder], step,
                      value(b->rank, t, holder, step));
}

static void *run(void *argument)
{
    struct block *b = argument;
    struct rank *own = &rank_of[b->rank];
    for (uint32_t step = 1; step <= STEPS; step++) {
        pthread_barrier_wait(&own->kernel);
        if (b->number == RECEIVERS) {
            send(b, step);
        } else {
            receive(b, step);
        }
        pthread_barrier_wait(&own->kernel);
        for (int r = 0; r < RANKS && b->number == 0; r++) {
            own->given_up += own->thinks[0][r] == MISSING;
            if (own->thinks[0][r] != own->thinks[1][r])
                broken("blocks of rank %d disagree about rank %d", b->rank, r);
        }
    }
    return NULL;
}

static void test_threads(void **state)
{
    static struct block blocks[RANKS][RECEIVERS + 1];
    for (int r = 0; r < RANKS; r++)
        pthread_barrier_init(&rank_of[r].kernel, NULL, RECEIVERS + 1);
    for (int r = 0; r < RANKS; r++)
        for (int n = 0; n <= RECEIVERS; n++) {
            blocks[r][n] = (struct block){.rank = r, .number = n, .seed = 100u * n + r};
            assert_int_equal(
                pthread_create(&blocks[r][n].thread, NULL, run, &blocks[r][n]), 0);
        }
    for (int r = 0; r < RANKS; r++)
        for (int n = 0; n <= RECEIVERS; n++)
            pthread_join(blocks[r][n].thread, NULL);
    printf("%d steps; sources given up by each rank: %u %u %u\n", STEPS,
           rank_of[0].given_up, rank_of[1].given_up, rank_of[2].given_up);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
