/* SPDX-License-Identifier: Apache-2.0 */
/* Every mapped collective against a definition in plain loops: types, operators, sizes,
 * misalignment, in place, poisoned outputs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/half.h"
#include "group/reduce.h"
#include "harness.h"

enum { POISON = 0xa5, MARGIN = 64 };

/* Small numbers, exact in every type; `salt` tells operations apart. */
static void put(enum hdl_dtype type, void *at, int value)
{
    float f = (float)value;
    double d = value;
    uint16_t h;
    uint8_t b;
    switch (type) {
    case HDL_F32:
    case HDL_C64:
        memcpy(at, &f, 4);
        if (type == HDL_C64)
            memcpy((char *)at + 4, &f, 4);
        return;
    case HDL_F64:
    case HDL_C128:
        memcpy(at, &d, 8);
        if (type == HDL_C128)
            memcpy((char *)at + 8, &d, 8);
        return;
    case HDL_F16:
        h = base_f16_from_float(f);
        memcpy(at, &h, 2);
        return;
    case HDL_BF16:
        h = base_bf16_from_float(f);
        memcpy(at, &h, 2);
        return;
    case HDL_F8E4M3:
        b = base_e4m3_from_float(f);
        memcpy(at, &b, 1);
        return;
    case HDL_F8E5M2:
        b = base_e5m2_from_float(f);
        memcpy(at, &b, 1);
        return;
    default:
        break;
    }
    int64_t i = type == HDL_BOOL ? value & 1 : value;
    memcpy(at, &i, base_dtype_size(type));
}

static void fill(enum hdl_dtype type, char *at, size_t count, uint32_t rank, size_t salt)
{
    size_t elem = base_dtype_size(type);
    for (size_t i = 0; i < count; i++)
        put(type, at + i * elem, (int)((rank * 7 + i * 3 + salt + i / 13) % 4));
}

struct spec {
    size_t count;
    enum hdl_dtype type;
    enum hdl_redop redop;
    int32_t root;
    bool in_place;
    size_t shift; /* misalignment of all buffers */
};

static char *buffer(size_t bytes, size_t shift)
{
    char *memory = malloc(bytes + 2 * MARGIN + shift);
    CHECK(memory);
    memset(memory, POISON, bytes + 2 * MARGIN + shift);
    return memory + MARGIN + shift;
}

static void release(char *at, size_t shift)
{
    free(at - MARGIN - shift);
}

static void check_margins(const char *at, size_t bytes)
{
    for (size_t i = 1; i <= MARGIN; i++) {
        CHECK((unsigned char)at[-(ptrdiff_t)i] == POISON);
        CHECK((unsigned char)at[bytes + i - 1] == POISON);
    }
}

static void check_poison(const char *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        CHECK((unsigned char)at[i] == POISON);
}

/* What the reduction of `count` elements must be, starting at element `at` of the inputs.
 */
static char *expected(const struct harness *h, const struct spec *s, size_t total,
                      size_t at, size_t count)
{
    size_t elem = base_dtype_size(s->type), bytes = total * elem;
    char *in = malloc((bytes + 1) * h->num_ranks), *out = malloc(count * elem + 1);
    const void *sources[HARNESS_RANKS];
    for (uint32_t r = 0; r < h->num_ranks; r++) {
        char *mine = in + r * (bytes + 1);
        fill(s->type, mine, total, r, total);
        if (s->redop == HDL_PREMUL_SUM)
            group_premultiply(mine, mine, total, s->type, r + 1);
        sources[r] = mine + at * elem;
    }
    if (count)
        group_reduce(out, sources, h->num_ranks, count, s->type, s->redop, false);
    free(in);
    return out;
}

static void check_allreduce(struct harness_rank *me, const struct spec *s)
{
    size_t bytes = s->count * base_dtype_size(s->type);
    char *src = buffer(bytes, s->shift),
         *dst = s->in_place ? src : buffer(bytes, s->shift);
    struct hdl_call call = {.size = sizeof(call), .scalar = me->rank + 1};
    fill(s->type, src, s->count, me->rank, s->count);
    enum hdl_status status =
        s->root < 0
            ? hdl_allreduce(me->group, src, dst, s->count, s->type, s->redop, &call, NULL)
            : hdl_reduce(me->group, src, dst, s->count, s->type, s->redop, s->root, &call,
                         NULL);
    CHECK(status == HDL_OK);
    if (s->root < 0 || s->root == (int32_t)me->rank) {
        char *want = expected(me->harness, s, s->count, 0, s->count);
        CHECK(memcmp(want, dst, bytes) == 0);
        free(want);
    } else if (!s->in_place) {
        check_poison(dst, bytes);
    }
    check_margins(dst, bytes);
    if (!s->in_place)
        release(dst, s->shift);
    release(src, s->shift);
}

static void check_reduce_scatter(struct harness_rank *me, const struct spec *s,
                                 bool counts_given)
{
    uint32_t n = me->harness->num_ranks;
    size_t elem = base_dtype_size(s->type), counts[HARNESS_RANKS], at = 0, total = 0;
    for (uint32_t r = 0; r < n; r++) {
        counts[r] = counts_given ? (s->count + r * 5) * (r != 1) : s->count;
        at += r < me->rank ? counts[r] : 0;
        total += counts[r];
    }
    size_t mine = counts[me->rank];
    char *src = buffer(total * elem, s->shift);
    char *dst = s->in_place ? src + at * elem : buffer(mine * elem, s->shift);
    struct hdl_call call = {.size = sizeof(call), .scalar = me->rank + 1};
    fill(s->type, src, total, me->rank, total);
    enum hdl_status status = counts_given
                                 ? hdl_reduce_scatterv(me->group, src, dst, counts,
                                                       s->type, s->redop, &call, NULL)
                                 : hdl_reduce_scatter(me->group, src, dst, s->count,
                                                      s->type, s->redop, &call, NULL);
    CHECK(status == HDL_OK);
    char *want = expected(me->harness, s, total, at, mine);
    CHECK(memcmp(want, dst, mine * elem) == 0);
    free(want);
    if (!s->in_place) {
        check_margins(dst, mine * elem);
        release(dst, s->shift);
    }
    release(src, s->shift);
}

static void check_broadcast(struct harness_rank *me, const struct spec *s)
{
    size_t bytes = s->count * base_dtype_size(s->type);
    char *src = buffer(bytes, s->shift), *dst = buffer(bytes, s->shift),
         *want = buffer(bytes, 0);
    bool root = s->root == (int32_t)me->rank;
    fill(s->type, want, s->count, (uint32_t)s->root, s->count);
    if (root)
        memcpy(s->in_place ? dst : src, want, bytes);
    CHECK(hdl_broadcast(me->group,
                        s->in_place ? dst
                        : root      ? src
                                    : NULL,
                        dst, s->count, s->type, s->root, NULL, NULL) == HDL_OK);
    CHECK(memcmp(dst, want, bytes) == 0);
    check_margins(dst, bytes);
    release(src, s->shift);
    release(dst, s->shift);
    release(want, 0);
}

/* counts and displs with gaps, one rank without data. */
static size_t layout(const struct harness *h, const struct spec *s, bool v,
                     size_t *counts, size_t *displs)
{
    size_t end = 0;
    for (uint32_t r = 0; r < h->num_ranks; r++) {
        counts[r] = v ? (s->count + r * 3) * (r != 1) : s->count;
        displs[r] = end + (v ? 2 : 0);
        end = displs[r] + counts[r];
    }
    return end;
}

static void check_gather(struct harness_rank *me, const struct spec *s, bool v)
{
    size_t counts[HARNESS_RANKS], displs[HARNESS_RANKS], elem = base_dtype_size(s->type);
    size_t total = layout(me->harness, s, v, counts, displs) * elem;
    bool writes = s->root < 0 || s->root == (int32_t)me->rank;
    char *dst = buffer(total, s->shift), *own = buffer(counts[me->rank] * elem, s->shift);
    char *src = s->in_place && writes ? dst + displs[me->rank] * elem : own;
    fill(s->type, src, counts[me->rank], me->rank, s->count);
    enum hdl_status status;
    if (s->root < 0)
        status =
            v ? hdl_allgatherv(me->group, src, dst, counts, displs, s->type, NULL, NULL)
              : hdl_allgather(me->group, src, dst, s->count, s->type, NULL, NULL);
    else
        status = v ? hdl_gatherv(me->group, src, dst, counts, writes ? displs : NULL,
                                 s->type, s->root, NULL, NULL)
                   : hdl_gather(me->group, src, writes ? dst : NULL, s->count, s->type,
                                s->root, NULL, NULL);
    CHECK(status == HDL_OK);
    char *want = buffer(total, 0);
    for (uint32_t r = 0; writes && r < me->harness->num_ranks; r++)
        fill(s->type, want + displs[r] * elem, counts[r], r, s->count);
    CHECK(memcmp(want, dst, total) == 0);
    check_margins(dst, total);
    release(want, 0);
    release(own, s->shift);
    release(dst, s->shift);
}

static void check_scatter(struct harness_rank *me, const struct spec *s, bool v)
{
    size_t counts[HARNESS_RANKS], displs[HARNESS_RANKS], elem = base_dtype_size(s->type);
    size_t total = layout(me->harness, s, v, counts, displs) * elem;
    size_t mine = counts[me->rank] * elem;
    bool root = s->root == (int32_t)me->rank;
    char *src = buffer(total, s->shift), *dst = buffer(mine, s->shift),
         *want = buffer(mine, 0);
    for (uint32_t r = 0; root && r < me->harness->num_ranks; r++)
        fill(s->type, src + displs[r] * elem, counts[r], r, s->count);
    fill(s->type, want, counts[me->rank], me->rank, s->count);
    CHECK((v ? hdl_scatterv(me->group, root ? src : NULL, counts, root ? displs : NULL,
                            dst, s->type, s->root, NULL, NULL)
             : hdl_scatter(me->group, root ? src : NULL, dst, s->count, s->type, s->root,
                           NULL, NULL)) == HDL_OK);
    CHECK(memcmp(want, dst, mine) == 0);
    check_margins(dst, mine);
    release(src, s->shift);
    release(dst, s->shift);
    release(want, 0);
}

static size_t pair_count(const struct spec *s, bool v, uint32_t from, uint32_t to)
{
    return v && !s->in_place ? (s->count + from * 2 + to) * (from != 1 || to != 0)
                             : s->count;
}

static void check_alltoall(struct harness_rank *me, const struct spec *s, bool v)
{
    uint32_t n = me->harness->num_ranks;
    size_t sc[HARNESS_RANKS], sd[HARNESS_RANKS], dc[HARNESS_RANKS], dd[HARNESS_RANKS];
    size_t elem = base_dtype_size(s->type), out = 0, in = 0;
    for (uint32_t r = 0; r < n; r++) {
        sc[r] = pair_count(s, v, me->rank, r);
        dc[r] = pair_count(s, v, r, me->rank);
        sd[r] = out;
        dd[r] = in;
        out += sc[r];
        in += dc[r];
    }
    char *src = buffer(out * elem, s->shift), *want = buffer(in * elem, 0);
    char *dst = s->in_place ? src : buffer(in * elem, s->shift);
    for (uint32_t r = 0; r < n; r++) {
        fill(s->type, src + sd[r] * elem, sc[r], me->rank, r);
        fill(s->type, want + dd[r] * elem, dc[r], r, me->rank);
    }
    CHECK((v ? hdl_alltoallv(me->group, src, sc, sd, dst, dc, dd, s->type, NULL, NULL)
             : hdl_alltoall(me->group, src, dst, s->count, s->type, NULL, NULL)) ==
          HDL_OK);
    CHECK(memcmp(want, dst, in * elem) == 0);
    check_margins(dst, in * elem);
    if (!s->in_place)
        release(dst, s->shift);
    release(src, s->shift);
    release(want, 0);
}

/* ------------------------------------------------------------------------- the cases */

static void reductions(struct harness_rank *me, void *argument)
{
    struct spec s = *(struct spec *)argument;
    for (int in_place = 0; in_place < 2; in_place++) {
        s.in_place = in_place;
        s.root = -1;
        check_allreduce(me, &s);
        check_reduce_scatter(me, &s, false);
        check_reduce_scatter(me, &s, true);
        s.root = (int32_t)(s.count % me->harness->num_ranks);
        check_allreduce(me, &s);
    }
}

static void movements(struct harness_rank *me, void *argument)
{
    struct spec s = *(struct spec *)argument;
    for (int in_place = 0; in_place < 2; in_place++) {
        s.in_place = in_place;
        for (int v = 0; v < 2; v++) {
            s.root = -1;
            check_gather(me, &s, v);
            check_alltoall(me, &s, v);
            s.root = (int32_t)(s.count % me->harness->num_ranks);
            check_gather(me, &s, v);
            check_scatter(me, &s, v);
        }
        check_broadcast(me, &s);
        CHECK(hdl_barrier(me->group, NULL, NULL) == HDL_OK);
    }
}

static const size_t sizes[] = {0, 1, 3, 5, 63, 64, 65, 4095, 20000};
enum { NUM_SIZES = sizeof(sizes) / sizeof(sizes[0]) };

static void run_sizes(uint32_t ranks, uint32_t chunks, size_t chunk_bytes)
{
    struct harness h;
    harness_open(&h, ranks, ranks, chunks, chunk_bytes);
    for (size_t i = 0; i < NUM_SIZES; i++) {
        struct spec s = {
            .count = sizes[i], .type = HDL_F32, .redop = HDL_SUM, .shift = i % 2};
        harness_run(&h, reductions, &s);
        s.type = HDL_I16;
        harness_run(&h, movements, &s);
    }
    harness_close(&h);
}

static void test_sizes(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 5; ranks++)
        run_sizes(ranks, 4, 4096);
    run_sizes(3, 3, 8192);
    run_sizes(4, 16, 64 * 1024);
    run_sizes(2, 16, 256 * 1024); /* in halves of slots */
}

static void test_types_and_operators(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    for (int type = 0; type < BASE_NUM_DTYPES; type++) {
        struct spec s = {.count = 3000, .type = (enum hdl_dtype)type, .shift = 1};
        harness_run(&h, movements, &s);
        for (int redop = 0; redop < BASE_NUM_REDOPS; redop++) {
            s.redop = (enum hdl_redop)redop;
            if (group_reduce_supported(s.type, s.redop))
                harness_run(&h, reductions, &s);
        }
    }
    harness_close(&h);
}

static void test_large(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 4, 16, 256 * 1024);
    struct spec s = {
        .count = ((size_t)1 << 20) + 1, .type = HDL_BF16, .redop = HDL_AVG, .shift = 1};
    harness_run(&h, reductions, &s);
    harness_close(&h);
}

/* Slots without a holder: results skip them. */
static void holes(struct harness_rank *me, void *argument)
{
    (void)argument;
    int32_t mine = (int32_t)me->rank + 1, sum = 0, all[6];
    memset(all, POISON, sizeof(all));
    CHECK(hdl_allreduce(me->group, &mine, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL) ==
          HDL_OK);
    CHECK(sum == 6);
    CHECK(hdl_allgather(me->group, &mine, all, 1, HDL_I32, NULL, NULL) == HDL_OK);
    for (int r = 0; r < 3; r++)
        CHECK(all[r] == r + 1);
    check_poison((char *)&all[3], 3 * sizeof(int32_t));
}

static void test_vacant_slots(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 6, 4, 4096);
    harness_run(&h, holes, NULL);
    harness_close(&h);
}

/* -------------------------------------------------------- many at once, mismatches */

enum { MANY = 200 };

static void many(struct harness_rank *me, void *argument)
{
    static const size_t counts[] = {1, 700, 3, 5000, 0, 40};
    struct hdl_op *ops[MANY];
    char *memory[MANY];
    (void)argument;
    for (size_t i = 0; i < MANY; i++) {
        size_t count = counts[i % 6];
        memory[i] = malloc(count * 4 + 4);
        for (size_t k = 0; k < count; k++)
            ((int32_t *)(void *)memory[i])[k] = (int32_t)(me->rank + k + i);
        if (i % 7 == 3)
            CHECK(hdl_barrier(me->group, NULL, &ops[i]) == HDL_OK);
        else
            CHECK(hdl_allreduce(me->group, memory[i], memory[i], count, HDL_I32, HDL_SUM,
                                NULL, &ops[i]) == HDL_OK);
    }
    uint32_t n = me->harness->num_ranks;
    for (size_t j = 0; j < MANY; j++) {
        size_t i = MANY - 1 - j, count = i % 7 == 3 ? 0 : counts[i % 6];
        CHECK(hdl_op_wait(ops[i], HDL_FOREVER) == HDL_OK);
        for (size_t k = 0; k < count; k++)
            CHECK(((int32_t *)(void *)memory[i])[k] ==
                  (int32_t)(n * (n - 1) / 2 + n * (k + i)));
        hdl_op_free(ops[i]);
        free(memory[i]);
    }
}

static void test_many_outstanding(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        struct harness h;
        harness_open(&h, ranks, ranks, 4, 4096);
        harness_run(&h, many, NULL);
        harness_close(&h);
    }
}

static void good_call(struct harness_rank *me)
{
    int32_t one = 1, sum = 0;
    CHECK(hdl_allreduce(me->group, &one, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL) ==
          HDL_OK);
    CHECK(sum == (int32_t)me->harness->num_ranks);
}

static void mismatched(struct harness_rank *me, void *argument)
{
    (void)argument;
    int32_t in[4] = {1, 2, 3, 4}, out[4];
    bool odd = me->rank == 1;
    memset(out, POISON, sizeof(out));
    good_call(me);
    CHECK(hdl_allreduce(me->group, in, out, odd ? 3 : 4, HDL_I32, HDL_SUM, NULL, NULL) ==
          HDL_EINVAL);
    CHECK(strstr(base_detail(), "count 3") && strstr(base_detail(), "count 4"));
    CHECK(strstr(base_detail(), "rank 0") && strstr(base_detail(), "rank 1"));
    good_call(me);
    CHECK((odd ? hdl_barrier(me->group, NULL, NULL)
               : hdl_allreduce(me->group, in, out, 4, HDL_I32, HDL_SUM, NULL, NULL)) ==
          HDL_EORDER);
    CHECK(strstr(base_detail(), "barrier") && strstr(base_detail(), "allreduce"));
    good_call(me);
    CHECK(hdl_allreduce(me->group, odd ? NULL : in, out, 4, HDL_I32, HDL_SUM, NULL,
                        NULL) == HDL_EINVAL);
    good_call(me);
    CHECK(hdl_reduce(me->group, in, out, 4, HDL_I32, odd ? HDL_MAX : HDL_SUM, 0, NULL,
                     NULL) == HDL_EINVAL);
    enum hdl_status status =
        hdl_broadcast(me->group, in, out, 4, HDL_I32, odd ? 1 : 0, NULL, NULL);
    CHECK(status == HDL_EINVAL || (status == HDL_OK && me->rank < 2));
    if (status == HDL_OK)
        memset(out, POISON, sizeof(out));
    good_call(me);
    check_poison((char *)out, sizeof(out));
    size_t counts[3] = {2, 2, odd ? 3 : 2}, displs[3] = {0, 4, 8};
    int32_t big[16];
    CHECK(hdl_allgatherv(me->group, in, big, counts, displs, HDL_I32, NULL, NULL) ==
          HDL_EINVAL);
    good_call(me);
    size_t huge[3] = {SIZE_MAX, 1, 0};
    CHECK(hdl_reduce_scatterv(me->group, in, out, huge, HDL_U8, HDL_SUM, NULL, NULL) ==
          HDL_EINVAL);
    CHECK(strstr(base_detail(), "counts overflow at rank 1"));
    good_call(me);
}

static void test_mismatches(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    harness_run(&h, mismatched, NULL);
    harness_close(&h);
}

/* Where nothing is touched a displacement may be anything. */
static void empty_blocks(struct harness_rank *me, void *argument)
{
    (void)argument;
    struct hdl_group *g = me->group;
    int32_t rank = (int32_t)me->rank, in[3] = {rank, rank, rank}, out[3];
    size_t counts[3] = {2, 0, 1}, displs[3] = {1, SIZE_MAX, 0};
    size_t nothing[3] = {0, 0, 0}, wild[3] = {SIZE_MAX, SIZE_MAX, SIZE_MAX};
    size_t send[3] = {1, 0, 1}, from[3] = {1, SIZE_MAX, 2};
    size_t want[3] = {1, 1, 1}, to[3] = {2, 1, 0};
    bool idle = me->rank == 1;
    CHECK(hdl_allgatherv(g, in, out, counts, displs, HDL_I32, NULL, NULL) == HDL_OK);
    CHECK(out[0] == 2 && out[1] == 0 && out[2] == 0);
    memset(out, POISON, sizeof(out));
    CHECK(hdl_gatherv(g, in, out, counts, displs, HDL_I32, 1, NULL, NULL) == HDL_OK);
    CHECK(!idle || (out[0] == 2 && out[1] == 0 && out[2] == 0));
    CHECK(hdl_scatterv(g, in, counts, displs, out, HDL_I32, 1, NULL, NULL) == HDL_OK);
    CHECK(idle || out[0] == 1);
    CHECK(hdl_alltoallv(g, in, send, from, out, idle ? nothing : want, idle ? wild : to,
                        HDL_I32, NULL, NULL) == HDL_OK);
    CHECK(idle || (out[0] == 2 && out[1] == 1 && out[2] == 0));
    counts[1] = 1;
    CHECK(hdl_allgatherv(g, in, out, counts, displs, HDL_I32, NULL, NULL) == HDL_EINVAL);
    CHECK(strstr(base_detail(), "rank 1"));
}

static void test_empty_blocks(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    harness_run(&h, empty_blocks, NULL);
    harness_close(&h);
}

static void unequal_pairs(struct harness_rank *me, void *argument)
{
    (void)argument;
    int32_t in[8] = {0}, out[8];
    size_t send[3] = {1, 1, 1}, want[3] = {1, 1, 1}, displs[3] = {0, 2, 4};
    memset(out, POISON, sizeof(out));
    if (me->rank == 2)
        want[1] = 2;
    CHECK(hdl_alltoallv(me->group, in, send, displs, out, want, displs, HDL_I32, NULL,
                        NULL) == HDL_EINVAL);
    CHECK(strstr(base_detail(), "rank 1 sends 1") && strstr(base_detail(), "rank 2"));
    check_poison((char *)out, sizeof(out));
    good_call(me);
    /* In place a block must come to where one goes from. */
    size_t there[3] = {1, 3, 5}, equal[3] = {1, 1, 1};
    CHECK(hdl_alltoallv(me->group, out, send, displs, out, equal, there, HDL_I32, NULL,
                        NULL) == HDL_EINVAL);
    CHECK(strstr(base_detail(), "in place with different counts or displs"));
    check_poison((char *)out, sizeof(out));
    good_call(me);
}

static void test_unequal_pairs(void **state)
{
    (void)state;
    struct harness h;
    harness_open(&h, 3, 3, 4, 4096);
    harness_run(&h, unequal_pairs, NULL);
    harness_close(&h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_types_and_operators),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_vacant_slots),
        cmocka_unit_test(test_many_outstanding),
        cmocka_unit_test(test_mismatches),
        cmocka_unit_test(test_empty_blocks),
        cmocka_unit_test(test_unequal_pairs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
