/* SPDX-License-Identifier: Apache-2.0 */
/* Send and receive: order, tags, any source, zero bytes, lengths that differ, large ones.
 */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { BIG = 100 * 1000 * 1000, POISON = 0xa5 };

static struct rank self;

static unsigned char pattern(int from, size_t i)
{
    return (unsigned char)((size_t)from * 31 + i + i / 253);
}

/* 100 MB both ways at once between pairs of ranks. */
static void test_both_ways(void)
{
    int peer = self.rank ^ 1;
    if (peer >= self.size)
        return;
    unsigned char *out = malloc(BIG), *in = malloc(BIG);
    struct hdl_op *op;
    CHECK(out && in, "no memory");
    for (size_t i = 0; i < BIG; i++)
        out[i] = pattern(self.rank, i);
    memset(in, POISON, BIG);
    double start = rank_now();
    CHECK_OK(hdl_send(self.group, out, BIG, HDL_U8, peer, 3, NULL, &op));
    CHECK_OK(hdl_recv(self.group, in, BIG, HDL_U8, peer, 3, NULL, NULL));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    double seconds = rank_now() - start;
    for (size_t i = 0; i < BIG; i++)
        CHECK(in[i] == pattern(peer, i), "byte %zu is %d", i, in[i]);
    if (self.rank == 0)
        printf("both ways: %.2f GB/s each\n", BIG / seconds / 1e9);
    free(out);
    free(in);
}

/* Both block in send first: small messages need no receive. */
static void test_send_first(void)
{
    int peer = self.rank ^ 1;
    int32_t out = 100 + self.rank, in = -1;
    if (peer >= self.size)
        return;
    CHECK_OK(hdl_send(self.group, &out, 1, HDL_I32, peer, 0, NULL, NULL));
    CHECK_OK(hdl_recv(self.group, &in, 1, HDL_I32, peer, 0, NULL, NULL));
    CHECK(in == 100 + peer, "got %d", in);
}

/* Everybody sends to rank 0, which takes them as they come. */
static void test_any_source(size_t count)
{
    int32_t *data = calloc(count + 1, sizeof(*data));
    CHECK(data, "no memory");
    if (self.rank != 0) {
        for (size_t i = 0; i < count; i++)
            data[i] = self.rank * 1000 + (int32_t)(i % 997);
        CHECK_OK(
            hdl_send(self.group, data, count, HDL_I32, 0, 40 + self.rank, NULL, NULL));
    }
    int seen = 0;
    for (int n = 1; self.rank == 0 && n < self.size; n++) {
        struct hdl_op *op;
        int32_t source = -1, tag = -1;
        CHECK_OK(hdl_recv(self.group, data, count, HDL_I32, HDL_ANY_SOURCE, HDL_ANY_TAG,
                          NULL, &op));
        CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
        CHECK_OK(hdl_op_source(op, &source, &tag));
        hdl_op_free(op);
        CHECK(source > 0 && source < self.size && tag == 40 + source, "source %d tag %d",
              source, tag);
        CHECK(!(seen & 1 << source), "rank %d came twice", source);
        seen |= 1 << source;
        for (size_t i = 0; i < count; i++)
            CHECK(data[i] == source * 1000 + (int32_t)(i % 997), "element %zu is %d", i,
                  data[i]);
    }
    free(data);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* Two tags, received in the other order; and order within a tag. */
static void test_tags(size_t count)
{
    int32_t *a = calloc(count + 1, sizeof(*a)), *b = calloc(count + 1, sizeof(*b));
    struct hdl_op *ops[2];
    CHECK(a && b, "no memory");
    if (self.rank == 0) {
        a[0] = 11;
        b[0] = 22;
        CHECK_OK(hdl_send(self.group, a, count, HDL_I32, 1, 1, NULL, &ops[0]));
        CHECK_OK(hdl_send(self.group, b, count, HDL_I32, 1, 2, NULL, &ops[1]));
        CHECK_OK(hdl_op_wait(ops[0], HDL_FOREVER));
        CHECK_OK(hdl_op_wait(ops[1], HDL_FOREVER));
        hdl_op_free(ops[0]);
        hdl_op_free(ops[1]);
    } else if (self.rank == 1) {
        CHECK_OK(hdl_recv(self.group, b, count, HDL_I32, 0, 2, NULL, NULL));
        CHECK_OK(hdl_recv(self.group, a, count, HDL_I32, 0, 1, NULL, NULL));
        CHECK(count == 0 || (a[0] == 11 && b[0] == 22), "tag 1 gave %d, tag 2 %d", a[0],
              b[0]);
    }
    for (int32_t i = 0; i < 50; i++) {
        int32_t got = i;
        if (self.rank == 0)
            CHECK_OK(hdl_send(self.group, &got, 1, HDL_I32, 1, 5, NULL, NULL));
        if (self.rank == 1) {
            CHECK_OK(hdl_recv(self.group, &got, 1, HDL_I32, 0, HDL_ANY_TAG, NULL, NULL));
            CHECK(got == i, "message %d came at place %d", got, i);
        }
    }
    free(a);
    free(b);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

static void test_lengths(size_t sent, size_t taken)
{
    unsigned char *data = malloc(sent + taken + 1);
    struct hdl_op *op;
    CHECK(data, "no memory");
    memset(data, POISON, sent + taken + 1);
    if (self.rank == 0) {
        enum hdl_status status =
            hdl_send(self.group, data, sent, HDL_U8, 1, 9, NULL, NULL);
        CHECK(status == HDL_OK || status == HDL_EINVAL, "send is %s",
              hdl_status_name(status));
    } else if (self.rank == 1) {
        char from[32], to[32];
        snprintf(from, sizeof(from), "%zu", sent);
        snprintf(to, sizeof(to), "%zu", taken);
        CHECK_OK(hdl_recv(self.group, data, taken, HDL_U8, 0, 9, NULL, &op));
        CHECK_STATUS(hdl_op_wait(op, HDL_FOREVER), HDL_EINVAL);
        rank_check_text(hdl_op_detail(op), from, to, NULL);
        hdl_op_free(op);
    }
    free(data);
    /* The stream goes on. */
    test_send_first();
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* A rank to itself. */
static void test_self(void)
{
    int64_t out = 77, in = 0;
    struct hdl_op *op;
    CHECK_OK(hdl_recv(self.group, &in, 1, HDL_I64, self.rank, 1, NULL, &op));
    CHECK_OK(hdl_send(self.group, &out, 1, HDL_I64, self.rank, 1, NULL, NULL));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    CHECK(in == 77, "got %lld", (long long)in);
}

static void test_refused(void)
{
    int32_t x = 0;
    CHECK_STATUS(hdl_send(self.group, &x, 1, HDL_I32, self.size, 0, NULL, NULL),
                 HDL_EINVAL);
    CHECK_STATUS(hdl_send(self.group, &x, 1, HDL_I32, 0, -1, NULL, NULL), HDL_EINVAL);
    CHECK_STATUS(hdl_send(self.group, NULL, 1, HDL_I32, 0, 0, NULL, NULL), HDL_EINVAL);
    CHECK_STATUS(hdl_recv(self.group, &x, 1, (enum hdl_dtype)99, 0, 0, NULL, NULL),
                 HDL_EINVAL);
    CHECK_STATUS(hdl_recv(self.group, &x, 1, HDL_I32, -2, 0, NULL, NULL), HDL_EINVAL);
    CHECK_STATUS(hdl_send(self.group, &x, SIZE_MAX, HDL_I32, 0, 0, NULL, NULL),
                 HDL_EINVAL);
}

int main(void)
{
    rank_join(&self);
    test_self();
    test_refused();
    if (self.size > 1) {
        test_send_first();
        test_any_source(1);
        test_any_source(0);
        test_any_source(200000);
        test_tags(1);
        test_tags(0);
        test_tags(1000000);
        test_lengths(8, 4);
        test_lengths(4, 8);
        test_lengths(1 << 20, 1 << 19);
        test_lengths(0, 8);
        test_both_ways();
    }
    rank_leave(&self);
    return 0;
}
