/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every collective with exact values: types, operators, sizes around the edges of chunks
 * and vectors, roots, in place and out of place, misaligned by one byte, blocking and
 * not. Argument: "quick" for fewer sizes.
 */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { POISON = 0xa5, GUARD = 64 };

static struct rank self;

/* A buffer with guards around it, misaligned by `shift` bytes. */
struct buffer {
    unsigned char *memory;
    unsigned char *data;
    size_t bytes;
};

static struct buffer make(size_t bytes, size_t shift)
{
    struct buffer buffer = {.bytes = bytes};
    buffer.memory = malloc(bytes + shift + 2 * GUARD);
    CHECK(buffer.memory, "no memory for %zu bytes", bytes);
    memset(buffer.memory, POISON, bytes + shift + 2 * GUARD);
    buffer.data = buffer.memory + GUARD + shift;
    return buffer;
}

static void drop(struct buffer *buffer, const char *what)
{
    for (size_t i = 0; i < GUARD; i++)
        CHECK(buffer->data[buffer->bytes + i] == POISON && buffer->memory[i] == POISON,
              "%s wrote outside its buffer of %zu bytes", what, buffer->bytes);
    free(buffer->memory);
}

/* Small enough for sums of 8 ranks in every type, with a period that no chunk divides. */
static double value(int rank, size_t i)
{
    return (double)(((size_t)rank + i * 7 + i / 251) % 3);
}

static void fill(void *data, enum hdl_dtype dtype, size_t count, int rank, size_t first)
{
    for (size_t i = 0; i < count; i++) {
        double number = value(rank, first + i);
        rank_put(data, dtype, i,
                 dtype == HDL_BOOL || dtype == HDL_F8E5M2 ? number > 1 : number);
    }
}

static double input(enum hdl_dtype dtype, int rank, size_t i)
{
    double number = value(rank, i);
    return dtype == HDL_BOOL || dtype == HDL_F8E5M2 ? number > 1 : number;
}

static void check_moved(const char *what, const void *data, enum hdl_dtype dtype,
                        size_t count, int rank, size_t first)
{
    for (size_t i = 0; i < count; i++)
        CHECK(rank_get(data, dtype, i) == input(dtype, rank, first + i) &&
                  rank_complex_ok(data, dtype, i),
              "%s of %zu %s: element %zu from rank %d is %g, not %g", what, count,
              hdl_dtype_name(dtype), i, rank, rank_get(data, dtype, i),
              input(dtype, rank, first + i));
}

/* --------------------------------------------------------------------- reductions */

static bool is_float(enum hdl_dtype dtype)
{
    return dtype >= HDL_F16;
}

static bool supported(enum hdl_dtype dtype, enum hdl_redop redop)
{
    if (dtype == HDL_C64 || dtype == HDL_C128)
        return redop == HDL_SUM || redop == HDL_AVG || redop == HDL_PREMUL_SUM;
    if (dtype == HDL_F8E4M3 || dtype == HDL_F8E5M2)
        return redop == HDL_SUM || redop == HDL_AVG || redop == HDL_MIN ||
               redop == HDL_MAX;
    if (dtype == HDL_BOOL)
        return redop != HDL_AVG && redop != HDL_PREMUL_SUM;
    if (redop == HDL_BAND || redop == HDL_BOR || redop == HDL_BXOR)
        return !is_float(dtype);
    return true;
}

static double combine(double a, double b, enum hdl_redop redop)
{
    switch (redop) {
    case HDL_PROD:
        return a * b;
    case HDL_MIN:
        return a < b ? a : b;
    case HDL_MAX:
        return a > b ? a : b;
    case HDL_BAND:
        return (double)((int)a & (int)b);
    case HDL_BOR:
        return (double)((int)a | (int)b);
    case HDL_BXOR:
        return (double)((int)a ^ (int)b);
    default:
        return a + b;
    }
}

/* What is combined when `reducer` ranks start with rank 0; scalar of PREMUL_SUM = rank
 * + 1. */
static double reduced(enum hdl_dtype dtype, enum hdl_redop redop, size_t i)
{
    double result = 0;
    for (int rank = 0; rank < self.size; rank++) {
        double one = input(dtype, rank, i);
        if (redop == HDL_PREMUL_SUM)
            one *= rank % 2 + 1;
        result = rank == 0 ? one : combine(result, one, redop);
    }
    if (dtype == HDL_BOOL)
        return redop == HDL_BXOR ? result : result != 0;
    if (redop != HDL_AVG)
        return result;
    result /= self.size;
    if (!is_float(dtype))
        return (double)(long)result;
    /* Rounded as the type rounds. */
    unsigned char room[32];
    rank_put(room, dtype, 0, result);
    return rank_get(room, dtype, 0);
}

static void check_reduced(const char *what, const void *data, enum hdl_dtype dtype,
                          enum hdl_redop redop, size_t count, size_t first)
{
    for (size_t i = 0; i < count; i++) {
        double wanted = reduced(dtype, redop, first + i);
        CHECK(rank_get(data, dtype, i) == wanted &&
                  (redop == HDL_AVG || rank_complex_ok(data, dtype, i)),
              "%s %s of %zu %s: element %zu is %g, not %g", what, hdl_redop_name(redop),
              count, hdl_dtype_name(dtype), i, rank_get(data, dtype, i), wanted);
    }
}

static struct hdl_call scaled(void)
{
    return (struct hdl_call){.size = sizeof(struct hdl_call),
                             .scalar = self.rank % 2 + 1};
}

static void test_allreduce(enum hdl_dtype dtype, enum hdl_redop redop, size_t count,
                           size_t shift, bool in_place)
{
    size_t bytes = count * hdl_dtype_size(dtype);
    struct buffer src = make(bytes, shift), dst = make(bytes, shift);
    void *from = in_place ? dst.data : src.data;
    struct hdl_call call = scaled();
    fill(from, dtype, count, self.rank, 0);
    CHECK_OK(hdl_allreduce(self.group, from, dst.data, count, dtype, redop, &call, NULL));
    check_reduced("all_reduce", dst.data, dtype, redop, count, 0);
    if (!in_place)
        check_moved("all_reduce's source", src.data, dtype, count, self.rank, 0);
    drop(&src, "all_reduce");
    drop(&dst, "all_reduce");
}

static void test_reduce(enum hdl_dtype dtype, enum hdl_redop redop, size_t count,
                        int root, bool in_place)
{
    size_t bytes = count * hdl_dtype_size(dtype);
    struct buffer src = make(bytes, 0), dst = make(bytes, 0);
    struct hdl_call call = scaled();
    void *from = in_place ? dst.data : src.data;
    fill(from, dtype, count, self.rank, 0);
    CHECK_OK(
        hdl_reduce(self.group, from, dst.data, count, dtype, redop, root, &call, NULL));
    if (self.rank == root)
        check_reduced("reduce", dst.data, dtype, redop, count, 0);
    else if (!in_place)
        for (size_t i = 0; i < bytes; i++)
            CHECK(dst.data[i] == POISON,
                  "reduce wrote at byte %zu of a rank that is no root", i);
    drop(&src, "reduce");
    drop(&dst, "reduce");
}

static void test_reduce_scatter(enum hdl_dtype dtype, enum hdl_redop redop, size_t count,
                                bool in_place)
{
    size_t block = count * hdl_dtype_size(dtype), ranks = (size_t)self.size;
    struct buffer src = make(block * ranks, 0), dst = make(block, 0);
    struct hdl_call call = scaled();
    unsigned char *to = in_place ? src.data + block * (size_t)self.rank : dst.data;
    fill(src.data, dtype, count * ranks, self.rank, 0);
    CHECK_OK(
        hdl_reduce_scatter(self.group, src.data, to, count, dtype, redop, &call, NULL));
    check_reduced("reduce_scatter", to, dtype, redop, count, count * (size_t)self.rank);
    drop(&src, "reduce_scatter");
    drop(&dst, "reduce_scatter");
}

/* Rank r's block has `count` + r elements, rank 1's none. */
static size_t uneven(size_t count, int rank)
{
    return rank == 1 ? 0 : count + (size_t)rank;
}

static size_t lay_out(size_t count, size_t gap, size_t *counts, size_t *displs)
{
    size_t total = 0;
    for (int rank = 0; rank < self.size; rank++) {
        counts[rank] = uneven(count, rank);
        displs[rank] = total;
        total += counts[rank] + gap;
    }
    return total;
}

static void test_reduce_scatterv(enum hdl_dtype dtype, size_t count)
{
    size_t counts[64], displs[64], size = hdl_dtype_size(dtype);
    size_t total = lay_out(count, 0, counts, displs);
    struct buffer src = make(total * size, 0), dst = make(counts[self.rank] * size, 0);
    fill(src.data, dtype, total, self.rank, 0);
    CHECK_OK(hdl_reduce_scatterv(self.group, src.data, dst.data, counts, dtype, HDL_SUM,
                                 NULL, NULL));
    check_reduced("reduce_scatterv", dst.data, dtype, HDL_SUM, counts[self.rank],
                  displs[self.rank]);
    drop(&src, "reduce_scatterv");
    drop(&dst, "reduce_scatterv");
}

/* ----------------------------------------------------------------------- movement */

static void test_broadcast(enum hdl_dtype dtype, size_t count, int root, size_t shift,
                           bool in_place)
{
    size_t bytes = count * hdl_dtype_size(dtype);
    struct buffer src = make(bytes, shift), dst = make(bytes, shift);
    void *from = self.rank != root ? NULL : in_place ? dst.data : src.data;
    if (from)
        fill(from, dtype, count, root, 0);
    CHECK_OK(hdl_broadcast(self.group, self.rank == root ? from : NULL, dst.data, count,
                           dtype, root, NULL, NULL));
    check_moved("broadcast", dst.data, dtype, count, root, 0);
    drop(&src, "broadcast");
    drop(&dst, "broadcast");
}

static void test_allgather(enum hdl_dtype dtype, size_t count, size_t shift,
                           bool in_place)
{
    size_t block = count * hdl_dtype_size(dtype), ranks = (size_t)self.size;
    struct buffer src = make(block, shift), dst = make(block * ranks, shift);
    unsigned char *from = in_place ? dst.data + block * (size_t)self.rank : src.data;
    fill(from, dtype, count, self.rank, 0);
    CHECK_OK(hdl_allgather(self.group, from, dst.data, count, dtype, NULL, NULL));
    for (int rank = 0; rank < self.size; rank++)
        check_moved("all_gather", dst.data + block * (size_t)rank, dtype, count, rank, 0);
    drop(&src, "all_gather");
    drop(&dst, "all_gather");
}

static void check_gaps(const char *what, const struct buffer *dst, const size_t *counts,
                       const size_t *displs, size_t size)
{
    for (int rank = 0; rank < self.size; rank++) {
        const unsigned char *gap = dst->data + (displs[rank] + counts[rank]) * size;
        for (size_t i = 0; i < 2 * size; i++)
            CHECK(gap[i] == POISON, "%s wrote between the blocks of rank %d and the next",
                  what, rank);
    }
}

static void test_allgatherv(enum hdl_dtype dtype, size_t count)
{
    size_t counts[64], displs[64], size = hdl_dtype_size(dtype);
    size_t total = lay_out(count, 2, counts, displs);
    struct buffer src = make(counts[self.rank] * size, 0), dst = make(total * size, 0);
    fill(src.data, dtype, counts[self.rank], self.rank, 0);
    CHECK_OK(hdl_allgatherv(self.group, src.data, dst.data, counts, displs, dtype, NULL,
                            NULL));
    for (int rank = 0; rank < self.size; rank++)
        check_moved("all_gatherv", dst.data + displs[rank] * size, dtype, counts[rank],
                    rank, 0);
    check_gaps("all_gatherv", &dst, counts, displs, size);
    drop(&src, "all_gatherv");
    drop(&dst, "all_gatherv");
}

static void test_alltoall(enum hdl_dtype dtype, size_t count, size_t shift, bool in_place)
{
    size_t block = count * hdl_dtype_size(dtype), ranks = (size_t)self.size;
    struct buffer src = make(block * ranks, shift), dst = make(block * ranks, shift);
    void *from = in_place ? dst.data : src.data;
    fill(from, dtype, count * ranks, self.rank, 0);
    CHECK_OK(hdl_alltoall(self.group, from, dst.data, count, dtype, NULL, NULL));
    for (int rank = 0; rank < self.size; rank++)
        check_moved("all_to_all", dst.data + block * (size_t)rank, dtype, count, rank,
                    count * (size_t)self.rank);
    drop(&src, "all_to_all");
    drop(&dst, "all_to_all");
}

/* From s to d go count + s + 2 d elements, none from a rank to itself. */
static size_t pair_count(size_t count, int from, int to)
{
    return from == to ? 0 : count + (size_t)from + 2 * (size_t)to;
}

static void test_alltoallv(enum hdl_dtype dtype, size_t count)
{
    size_t sc[64], sd[64], dc[64], dd[64], size = hdl_dtype_size(dtype);
    size_t sent = 0, received = 0;
    for (int rank = 0; rank < self.size; rank++) {
        sc[rank] = pair_count(count, self.rank, rank);
        dc[rank] = pair_count(count, rank, self.rank);
        sd[rank] = sent;
        dd[rank] = received;
        sent += sc[rank];
        received += dc[rank] + 2;
    }
    struct buffer src = make(sent * size, 0), dst = make(received * size, 0);
    for (int rank = 0; rank < self.size; rank++)
        fill(src.data + sd[rank] * size, dtype, sc[rank], self.rank, 100 * (size_t)rank);
    CHECK_OK(
        hdl_alltoallv(self.group, src.data, sc, sd, dst.data, dc, dd, dtype, NULL, NULL));
    for (int rank = 0; rank < self.size; rank++)
        check_moved("all_to_allv", dst.data + dd[rank] * size, dtype, dc[rank], rank,
                    100 * (size_t)self.rank);
    check_gaps("all_to_allv", &dst, dc, dd, size);
    drop(&src, "all_to_allv");
    drop(&dst, "all_to_allv");
}

static void test_gather(enum hdl_dtype dtype, size_t count, int root)
{
    size_t block = count * hdl_dtype_size(dtype), ranks = (size_t)self.size;
    bool is_root = self.rank == root;
    struct buffer src = make(block, 0), dst = make(is_root ? block * ranks : 0, 0);
    fill(src.data, dtype, count, self.rank, 0);
    CHECK_OK(hdl_gather(self.group, src.data, is_root ? dst.data : NULL, count, dtype,
                        root, NULL, NULL));
    for (int rank = 0; is_root && rank < self.size; rank++)
        check_moved("gather", dst.data + block * (size_t)rank, dtype, count, rank, 0);
    drop(&src, "gather");
    drop(&dst, "gather");
}

static void test_gatherv(enum hdl_dtype dtype, size_t count, int root)
{
    size_t counts[64], displs[64], size = hdl_dtype_size(dtype);
    size_t total = lay_out(count, 2, counts, displs);
    bool is_root = self.rank == root;
    struct buffer src = make(counts[self.rank] * size, 0);
    struct buffer dst = make(is_root ? total * size : 0, 0);
    fill(src.data, dtype, counts[self.rank], self.rank, 0);
    CHECK_OK(hdl_gatherv(self.group, src.data, is_root ? dst.data : NULL, counts, displs,
                         dtype, root, NULL, NULL));
    for (int rank = 0; is_root && rank < self.size; rank++)
        check_moved("gatherv", dst.data + displs[rank] * size, dtype, counts[rank], rank,
                    0);
    if (is_root)
        check_gaps("gatherv", &dst, counts, displs, size);
    drop(&src, "gatherv");
    drop(&dst, "gatherv");
}

static void test_scatter(enum hdl_dtype dtype, size_t count, int root)
{
    size_t block = count * hdl_dtype_size(dtype), ranks = (size_t)self.size;
    bool is_root = self.rank == root;
    struct buffer src = make(is_root ? block * ranks : 0, 0), dst = make(block, 0);
    if (is_root)
        fill(src.data, dtype, count * ranks, root, 0);
    CHECK_OK(hdl_scatter(self.group, is_root ? src.data : NULL, dst.data, count, dtype,
                         root, NULL, NULL));
    check_moved("scatter", dst.data, dtype, count, root, count * (size_t)self.rank);
    drop(&src, "scatter");
    drop(&dst, "scatter");
}

static void test_scatterv(enum hdl_dtype dtype, size_t count, int root)
{
    size_t counts[64], displs[64], size = hdl_dtype_size(dtype);
    size_t total = lay_out(count, 2, counts, displs);
    bool is_root = self.rank == root;
    struct buffer src = make(is_root ? total * size : 0, 0);
    struct buffer dst = make(counts[self.rank] * size, 0);
    if (is_root)
        fill(src.data, dtype, total, root, 0);
    CHECK_OK(hdl_scatterv(self.group, is_root ? src.data : NULL, counts, displs, dst.data,
                          dtype, root, NULL, NULL));
    check_moved("scatterv", dst.data, dtype, counts[self.rank], root, displs[self.rank]);
    drop(&src, "scatterv");
    drop(&dst, "scatterv");
}

/* -------------------------------------------------------------------------- suites */

static void test_types(void)
{
    for (int dtype = HDL_I8; dtype <= HDL_F8E5M2; dtype++) {
        for (int redop = HDL_SUM; redop <= HDL_PREMUL_SUM; redop++) {
            if (!supported(dtype, redop))
                continue;
            test_allreduce(dtype, redop, 67, 0, false);
            test_reduce(dtype, redop, 33, self.size - 1, false);
            test_reduce_scatter(dtype, redop, 19, false);
        }
        test_broadcast(dtype, 31, self.size - 1, 0, false);
        test_allgather(dtype, 13, 0, false);
        test_alltoall(dtype, 11, 0, false);
        test_gather(dtype, 9, 0);
        test_scatter(dtype, 9, self.size / 2);
    }
}

static void test_sizes(const size_t *sizes, size_t num_sizes)
{
    for (size_t s = 0; s < num_sizes; s++) {
        size_t count = sizes[s];
        int root = (int)(s % (size_t)self.size);
        for (size_t shift = 0; shift < 2; shift++) {
            bool in_place = (s + shift) % 2 == 1;
            test_allreduce(HDL_F32, HDL_SUM, count, shift, in_place);
            test_allreduce(HDL_BF16, HDL_MAX, count, shift, !in_place);
            test_broadcast(HDL_I64, count, root, shift, in_place);
            test_allgather(HDL_U8, count, shift, in_place);
            test_alltoall(HDL_U16, count, shift, in_place);
        }
        test_reduce(HDL_F64, HDL_SUM, count, root, s % 2 == 0);
        test_reduce_scatter(HDL_I32, HDL_SUM, count, s % 2 == 0);
        test_reduce_scatterv(HDL_F32, count);
        test_allgatherv(HDL_I16, count);
        test_alltoallv(HDL_F32, count);
        test_gather(HDL_F32, count, root);
        test_gatherv(HDL_U8, count, root);
        test_scatter(HDL_F32, count, root);
        test_scatterv(HDL_U8, count, root);
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    }
}

/* No pointers where there is nothing to read or write. */
static void test_nothing(void)
{
    struct hdl_group *g = self.group;
    size_t none[64] = {0};
    CHECK_OK(hdl_allreduce(g, NULL, NULL, 0, HDL_F32, HDL_SUM, NULL, NULL));
    CHECK_OK(hdl_broadcast(g, NULL, NULL, 0, HDL_F32, 0, NULL, NULL));
    CHECK_OK(hdl_reduce(g, NULL, NULL, 0, HDL_F32, HDL_SUM, 0, NULL, NULL));
    CHECK_OK(hdl_allgather(g, NULL, NULL, 0, HDL_F32, NULL, NULL));
    CHECK_OK(hdl_allgatherv(g, NULL, NULL, none, none, HDL_F32, NULL, NULL));
    CHECK_OK(hdl_reduce_scatter(g, NULL, NULL, 0, HDL_F32, HDL_SUM, NULL, NULL));
    CHECK_OK(hdl_reduce_scatterv(g, NULL, NULL, none, HDL_F32, HDL_SUM, NULL, NULL));
    CHECK_OK(hdl_alltoall(g, NULL, NULL, 0, HDL_F32, NULL, NULL));
    CHECK_OK(hdl_alltoallv(g, NULL, none, none, NULL, none, none, HDL_F32, NULL, NULL));
    CHECK_OK(hdl_gather(g, NULL, NULL, 0, HDL_F32, 0, NULL, NULL));
    CHECK_OK(hdl_gatherv(g, NULL, NULL, none, none, HDL_F32, 0, NULL, NULL));
    CHECK_OK(hdl_scatter(g, NULL, NULL, 0, HDL_F32, 0, NULL, NULL));
    CHECK_OK(hdl_scatterv(g, NULL, none, none, NULL, HDL_F32, 0, NULL, NULL));
}

int main(int argc, char **argv)
{
    static const size_t quick[] = {1, 64, 4095, (1 << 17) + 1};
    static const size_t all[] = {1,    3,    63,    64,     65,           4095,
                                 4096, 4097, 65535, 262144, (1 << 20) + 1};
    bool is_quick = argc > 1 && strcmp(argv[1], "quick") == 0;
    rank_join(&self);
    test_nothing();
    test_types();
    if (is_quick)
        test_sizes(quick, sizeof(quick) / sizeof(quick[0]));
    else
        test_sizes(all, sizeof(all) / sizeof(all[0]));
    test_nothing();
    rank_leave(&self);
    return 0;
}
