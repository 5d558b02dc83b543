/* SPDX-License-Identifier: Apache-2.0 */
/* Send and receive over mapped streams: tags, any source, large both ways, many, lengths.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/random.h"
#include "group/p2p.h"
#include "harness.h"

static unsigned char value(uint32_t from, uint32_t to, size_t salt, size_t i)
{
    return (unsigned char)(from * 31 + to * 17 + salt * 7 + i * 13 + i / 251);
}

static unsigned char *message(uint32_t from, uint32_t to, size_t salt, size_t bytes)
{
    unsigned char *at = malloc(bytes + 1);
    CHECK(at);
    for (size_t i = 0; i < bytes; i++)
        at[i] = value(from, to, salt, i);
    return at;
}

static void check_message(const unsigned char *at, uint32_t from, uint32_t to,
                          size_t salt, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK(at[i] == value(from, to, salt, i));
}

static const size_t sizes[] = {0,    1,     8,     39,    40,     41,
                               4096, 65535, 65536, 65537, 300000, 1048577};
enum { NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

/* Blocking ping and pong of each size. */
static void ping(struct harness_rank *me, void *argument)
{
    (void)argument;
    uint32_t other = 1 - me->rank;
    for (size_t s = 0; s < NUM_SIZES; s++) {
        size_t bytes = sizes[s];
        unsigned char *out = message(me->rank, other, s, bytes), *in = malloc(bytes + 1);
        memset(in, 0xa5, bytes + 1);
        if (me->rank == 0) {
            CHECK(hdl_send(me->group, out, bytes, HDL_U8, 1, (int32_t)s, NULL, NULL) ==
                  HDL_OK);
            CHECK(hdl_recv(me->group, in, bytes, HDL_U8, 1, (int32_t)s, NULL, NULL) ==
                  HDL_OK);
        } else {
            CHECK(hdl_recv(me->group, in, bytes, HDL_U8, 0, (int32_t)s, NULL, NULL) ==
                  HDL_OK);
            CHECK(hdl_send(me->group, out, bytes, HDL_U8, 0, (int32_t)s, NULL, NULL) ==
                  HDL_OK);
        }
        check_message(in, other, me->rank, s, bytes);
        CHECK(in[bytes] == 0xa5);
        free(out);
        free(in);
    }
}

/* Everybody sends to everybody (itself, too), tags received in the opposite order. */
static void crossing(struct harness_rank *me, void *argument)
{
    enum { TAGS = 24 };
    (void)argument;
    uint32_t n = me->harness->num_ranks;
    struct hdl_op *sends[HARNESS_RANKS][TAGS], *receives[HARNESS_RANKS][TAGS];
    unsigned char *out[HARNESS_RANKS][TAGS], *in[HARNESS_RANKS][TAGS];
    for (uint32_t r = 0; r < n; r++) {
        for (int t = 0; t < TAGS; t++) {
            size_t bytes = sizes[(size_t)t % NUM_SIZES];
            out[r][t] = message(me->rank, r, (size_t)t, bytes);
            CHECK(hdl_send(me->group, out[r][t], bytes, HDL_U8, (int32_t)r, t, NULL,
                           &sends[r][t]) == HDL_OK);
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        for (int t = TAGS - 1; t >= 0; t--) {
            size_t bytes = sizes[(size_t)t % NUM_SIZES];
            in[r][t] = malloc(bytes + 1);
            CHECK(hdl_recv(me->group, in[r][t], bytes, HDL_U8, (int32_t)r, t, NULL,
                           &receives[r][t]) == HDL_OK);
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        for (int t = 0; t < TAGS; t++) {
            CHECK(hdl_op_wait(receives[r][t], HDL_FOREVER) == HDL_OK);
            check_message(in[r][t], r, me->rank, (size_t)t, sizes[(size_t)t % NUM_SIZES]);
            hdl_op_free(receives[r][t]);
            free(in[r][t]);
        }
        for (int t = 0; t < TAGS; t++) {
            CHECK(hdl_op_wait(sends[r][t], HDL_FOREVER) == HDL_OK);
            hdl_op_free(sends[r][t]);
            free(out[r][t]);
        }
    }
}

/* All ranks send to rank 0, which takes whatever comes; the order per sender must hold.
 */
static void gathering(struct harness_rank *me, void *argument)
{
    enum { EACH = 300 };
    (void)argument;
    uint32_t n = me->harness->num_ranks;
    if (me->rank != 0) {
        for (uint32_t i = 0; i < EACH; i++) {
            uint32_t note[2] = {me->rank, i};
            CHECK(hdl_send(me->group, note, 2, HDL_U32, 0, 5, NULL, NULL) == HDL_OK);
        }
        return;
    }
    uint32_t next[HARNESS_RANKS] = {0};
    for (uint32_t i = 0; i < EACH * (n - 1); i++) {
        uint32_t note[2] = {0, 0};
        struct hdl_op *op;
        int32_t source, tag;
        CHECK(hdl_recv(me->group, note, 2, HDL_U32, HDL_ANY_SOURCE, HDL_ANY_TAG, NULL,
                       &op) == HDL_OK);
        CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK);
        CHECK(hdl_op_source(op, &source, &tag) == HDL_OK);
        CHECK(source == (int32_t)note[0] && tag == 5);
        CHECK(note[1] == next[note[0]]++);
        hdl_op_free(op);
    }
}

static void lengths(struct harness_rank *me, void *argument)
{
    (void)argument;
    static unsigned char big[2][200000];
    unsigned char small[8] = {0};
    if (me->rank == 0) {
        CHECK(hdl_send(me->group, small, 8, HDL_U8, 1, 1, NULL, NULL) == HDL_OK);
        CHECK(hdl_send(me->group, big[0], 200000, HDL_U8, 1, 2, NULL, NULL) ==
              HDL_EINVAL);
        CHECK(hdl_send(me->group, small, 8, HDL_U8, 1, 3, NULL, NULL) == HDL_OK);
    } else {
        CHECK(hdl_recv(me->group, small, 4, HDL_U8, 0, 1, NULL, NULL) == HDL_EINVAL);
        CHECK(strstr(base_detail(), "4 bytes") && strstr(base_detail(), "sent 8"));
        CHECK(hdl_recv(me->group, big[1], 199999, HDL_U8, 0, 2, NULL, NULL) ==
              HDL_EINVAL);
        CHECK(hdl_recv(me->group, small, 8, HDL_U8, 0, 3, NULL, NULL) == HDL_OK);
    }
    CHECK(hdl_send(me->group, small, 8, HDL_U8, 7, 3, NULL, NULL) == HDL_EINVAL);
    CHECK(hdl_send(me->group, small, 8, HDL_U8, 0, -3, NULL, NULL) == HDL_EINVAL);
    CHECK(hdl_recv(me->group, NULL, 8, HDL_U8, 0, 0, NULL, NULL) == HDL_EINVAL);
}

/* Large both ways at once, blocking receives against pending sends. */
static void both_ways(struct harness_rank *me, void *argument)
{
    size_t bytes = *(size_t *)argument;
    uint32_t other = 1 - me->rank;
    unsigned char *out = message(me->rank, other, 1, bytes), *in = malloc(bytes);
    struct hdl_op *op;
    CHECK(hdl_send(me->group, out, bytes, HDL_U8, (int32_t)other, 0, NULL, &op) ==
          HDL_OK);
    CHECK(hdl_recv(me->group, in, bytes, HDL_U8, (int32_t)other, 0, NULL, NULL) ==
          HDL_OK);
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK);
    hdl_op_free(op);
    check_message(in, other, me->rank, 1, bytes);
    free(in);
    free(out);
}

/* More large messages open than grants fit. */
static void flood(struct harness_rank *me, void *argument)
{
    enum { FLOOD = 60, BYTES = 70000 };
    (void)argument;
    uint32_t other = 1 - me->rank;
    struct hdl_op *ops[2 * FLOOD];
    unsigned char *memory[2 * FLOOD];
    for (int i = 0; i < FLOOD; i++) {
        memory[i] = message(me->rank, other, (size_t)i, BYTES);
        memory[FLOOD + i] = malloc(BYTES);
        CHECK(hdl_recv(me->group, memory[FLOOD + i], BYTES, HDL_U8, (int32_t)other, i,
                       NULL, &ops[FLOOD + i]) == HDL_OK);
        CHECK(hdl_send(me->group, memory[i], BYTES, HDL_U8, (int32_t)other, i, NULL,
                       &ops[i]) == HDL_OK);
    }
    for (int i = 0; i < 2 * FLOOD; i++) {
        CHECK(hdl_op_wait(ops[i], HDL_FOREVER) == HDL_OK);
        hdl_op_free(ops[i]);
    }
    for (int i = 0; i < FLOOD; i++) {
        check_message(memory[FLOOD + i], other, me->rank, (size_t)i, BYTES);
        free(memory[i]);
        free(memory[FLOOD + i]);
    }
}

static void run(uint32_t ranks, void (*body)(struct harness_rank *, void *),
                void *argument)
{
    struct harness h;
    harness_open(&h, ranks, ranks, 4, 4096);
    harness_run(&h, body, argument);
    harness_close(&h);
}

static void test_ping(void **state)
{
    (void)state;
    run(2, ping, NULL);
}

static void test_crossing(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks++)
        run(ranks, crossing, NULL);
}

static void test_any_source(void **state)
{
    (void)state;
    run(5, gathering, NULL);
}

static void test_lengths(void **state)
{
    (void)state;
    run(2, lengths, NULL);
}

static void test_both_ways(void **state)
{
    (void)state;
    size_t bytes = (size_t)8 << 20;
    run(2, both_ways, &bytes);
}

static void test_flood(void **state)
{
    (void)state;
    run(2, flood, NULL);
}

/* ------------------------------------------------------------------------ lost peers */

static void survivors(struct harness_rank *me, void *argument)
{
    (void)argument;
    unsigned char data[100];
    uint64_t mask = 0;
    if (me->rank == 2)
        return;
    /* Sent completely before its death: still comes. */
    CHECK(hdl_recv(me->group, data, 100, HDL_U8, 2, 1, NULL, NULL) == HDL_OK);
    check_message(data, 2, me->rank, 1, 100);
    CHECK(hdl_recv(me->group, data, 100, HDL_U8, 2, 1, NULL, NULL) == HDL_EPEER);
    CHECK(hdl_last_failed(&mask, 1) == 1 && mask == 4);
    CHECK(hdl_send(me->group, data, 100, HDL_U8, 2, 1, NULL, NULL) == HDL_EPEER);
    uint32_t other = 1 - me->rank;
    struct hdl_op *op;
    CHECK(hdl_send(me->group, data, 100, HDL_U8, (int32_t)other, 1, NULL, &op) == HDL_OK);
    CHECK(hdl_recv(me->group, data, 100, HDL_U8, HDL_ANY_SOURCE, 1, NULL, NULL) ==
          HDL_OK);
    CHECK(hdl_op_wait(op, HDL_FOREVER) == HDL_OK);
    hdl_op_free(op);
}

static void dying(struct harness_rank *me, void *argument)
{
    (void)argument;
    if (me->rank != 2)
        return;
    for (int32_t r = 0; r < 2; r++) {
        unsigned char *out = message(2, (uint32_t)r, 1, 100);
        CHECK(hdl_send(me->group, out, 100, HDL_U8, r, 1, NULL, NULL) == HDL_OK);
        free(out);
    }
}

static void test_lost_peer(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    harness_run(&h, dying, NULL);
    harness_start(&h, survivors, NULL);
    struct harness_rank *dead = &h.ranks[2];
    pthread_join(dead->thread, NULL);
    harness_lose(&h, 2, true);
    harness_join(&h);
    harness_close(&h);
}

/* A large message from a rank that dies while it streams. */
static void half_way(struct harness_rank *me, void *argument)
{
    (void)argument;
    static unsigned char out[1 << 20], in[1 << 20];
    if (me->rank == 1) {
        struct hdl_op *op;
        CHECK(hdl_send(me->group, out, sizeof(out), HDL_U8, 0, 1, NULL, &op) == HDL_OK);
        return;
    }
    CHECK(hdl_recv(me->group, in, sizeof(in), HDL_U8, HDL_ANY_SOURCE, 1, NULL, NULL) ==
          HDL_EPEER);
}

static void test_lost_half_way(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 2, 2, 4, 4096);
    harness_start(&h, half_way, NULL);
    pthread_join(h.ranks[1].thread, NULL);
    harness_lose(&h, 1, true);
    harness_join(&h);
    harness_close(&h);
}

static enum hdl_status within_seconds(struct hdl_op *op)
{
    enum hdl_status status = hdl_op_wait(op, 5000000);
    CHECK(status != HDL_PENDING);
    hdl_op_free(op);
    return status;
}

static struct hdl_op *receive(struct hdl_group *group, void *data, size_t bytes,
                              int32_t peer, int32_t tag)
{
    struct hdl_op *op;
    CHECK(hdl_recv(group, data, bytes, HDL_U8, peer, tag, NULL, &op) == HDL_OK);
    return op;
}

static void announce_large(struct harness_rank *me, void *argument)
{
    static unsigned char out[1 << 20];
    struct hdl_op *op;
    (void)argument;
    if (me->rank == 1)
        CHECK(hdl_send(me->group, out, sizeof(out), HDL_U8, 0, 1, NULL, &op) == HDL_OK);
}

/* It was announced and nobody asked for it: its receive ends; and what a rank announced
 * is nothing that its successor sends. */
static void test_lost_before_its_receive(void **state)
{
    (void)state;
    static unsigned char in[1 << 20];
    for (int replaced = 0; replaced < 2; replaced++) {
        struct harness h;
        harness_open(&h, 3, 3, 4, 4096);
        struct hdl_group *group = h.ranks[0].group;
        harness_run(&h, announce_large, NULL);
        struct hdl_op *other = receive(group, in, 8, 1, 9);
        CHECK(hdl_op_test(other) == HDL_PENDING); /* and has seen the announcement */
        harness_lose(&h, 1, true);
        CHECK(within_seconds(other) == HDL_EPEER);
        group_engine_lock(h.ranks[0].engine);
        CHECK(group->p2p->num_unexpected == 1);
        if (replaced)
            group_p2p_connect(group, 1, ctl_rank_epoch(1, 2));
        CHECK(group->p2p->num_unexpected == !replaced);
        group_engine_unlock(h.ranks[0].engine);
        if (!replaced)
            CHECK(within_seconds(receive(group, in, sizeof(in), 1, 1)) == HDL_EPEER);
        harness_close(&h);
    }
}

/* Nobody is left who could send, but the rank itself. */
static void test_any_source_alone(void **state)
{
    (void)state;
    unsigned char data[8] = {7}, in[8] = {0};
    struct harness h;
    harness_open(&h, 2, 3, 4, 4096);
    struct hdl_group *group = h.ranks[0].group;
    struct hdl_op *op = receive(group, in, 8, HDL_ANY_SOURCE, 1);
    CHECK(hdl_op_test(op) == HDL_PENDING);
    harness_lose(&h, 1, true);
    CHECK(within_seconds(op) == HDL_EPEER);
    CHECK(within_seconds(receive(group, in, 8, HDL_ANY_SOURCE, 1)) == HDL_EPEER);
    CHECK(hdl_send(group, data, 8, HDL_U8, 0, 1, NULL, NULL) == HDL_OK);
    CHECK(within_seconds(receive(group, in, 8, HDL_ANY_SOURCE, 1)) == HDL_OK);
    CHECK(in[0] == 7);
    op = receive(group, in, 8, 0, 2);
    CHECK(hdl_send(group, data, 8, HDL_U8, 0, 2, NULL, NULL) == HDL_OK);
    CHECK(within_seconds(op) == HDL_OK);
    harness_close(&h);
}

static void blocked(struct harness_rank *me, void *argument)
{
    unsigned char data[8];
    (void)argument;
    CHECK(hdl_recv(me->group, data, 8, HDL_U8, 1 - (int32_t)me->rank, 1, NULL, NULL) ==
          HDL_EABORTED);
    CHECK(hdl_barrier(me->group, NULL, NULL) == HDL_EABORTED);
}

static void test_abort(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 2, 2, 4, 4096);
    harness_start(&h, blocked, NULL);
    group_end(h.ranks[0].group, HDL_EABORTED, "the test says so");
    group_end(h.ranks[1].group, HDL_EABORTED, "the test says so");
    harness_join(&h);
    harness_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ping),
        cmocka_unit_test(test_crossing),
        cmocka_unit_test(test_any_source),
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_both_ways),
        cmocka_unit_test(test_flood),
        cmocka_unit_test(test_lost_peer),
        cmocka_unit_test(test_lost_half_way),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_lost_before_its_receive),
        cmocka_unit_test(test_any_source_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
