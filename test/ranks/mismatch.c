/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls that do not fit together: HDL_EORDER for another operation, HDL_EINVAL for
 * another count, type, operator or root, and for a call that one rank refused; on all
 * ranks, within a second, with both descriptors, buffers untouched, and the next call
 * works.
 */
#include <string.h>

#include "rank.h"

static struct rank self;

static bool odd(void)
{
    return self.rank == self.size - 1;
}

/* The group still works, with equal numbers on all ranks. */
static void check_next(void)
{
    int32_t value = self.rank + 1;
    CHECK_OK(hdl_allreduce(self.group, &value, &value, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(value == self.size * (self.size + 1) / 2, "the next sum is %d", value);
}

static void expect(const char *what, double start, enum hdl_status got,
                   enum hdl_status wanted)
{
    CHECK(got == wanted, "%s is %s, not %s: %s", what, hdl_status_name(got),
          hdl_status_name(wanted), hdl_error_detail());
    CHECK(rank_now() - start < 1.0 * RANK_SLOW, "%s took %.2f s", what,
          rank_now() - start);
}

static void check_poison(const char *what, const int32_t *data, size_t count)
{
    for (size_t i = 0; i < count; i++)
        CHECK(data[i] == -1, "%s wrote element %zu: %d", what, i, data[i]);
}

static void test_order(void)
{
    int32_t src[64] = {0}, dst[64 * 8];
    memset(dst, 0xff, sizeof(dst));
    double start = rank_now();
    enum hdl_status status =
        odd() ? hdl_allgather(self.group, src, dst, 4, HDL_I32, NULL, NULL)
              : hdl_allreduce(self.group, src, dst, 4, HDL_I32, HDL_SUM, NULL, NULL);
    expect("another operation", start, status, HDL_EORDER);
    rank_check_text(hdl_error_detail(), "allreduce", "allgather", NULL);
    check_poison("another operation", dst, 64 * 8);
    check_next();
    status = odd() ? hdl_barrier(self.group, NULL, NULL)
                   : hdl_alltoall(self.group, src, dst, 1, HDL_I32, NULL, NULL);
    expect("a barrier among others", rank_now(), status, HDL_EORDER);
    check_poison("a barrier among others", dst, 64 * 8);
    check_next();
}

static void test_count(size_t count, size_t other)
{
    static int32_t src[1 << 18], dst[1 << 18];
    char one[32], two[32];
    memset(dst, 0xff, sizeof(dst));
    snprintf(one, sizeof(one), "%zu", count);
    snprintf(two, sizeof(two), "%zu", other);
    double start = rank_now();
    enum hdl_status status = hdl_allreduce(self.group, src, dst, odd() ? other : count,
                                           HDL_I32, HDL_SUM, NULL, NULL);
    expect("another count", start, status, HDL_EINVAL);
    rank_check_text(hdl_error_detail(), one, two, NULL);
    check_poison("another count", dst, 1 << 18);
    check_next();
}

static void test_type_operator_root(void)
{
    int32_t src[16] = {0}, dst[16];
    memset(dst, 0xff, sizeof(dst));
    double start = rank_now();
    expect("another type", start,
           hdl_allreduce(self.group, src, dst, 4, odd() ? HDL_F32 : HDL_I32, HDL_SUM,
                         NULL, NULL),
           HDL_EINVAL);
    rank_check_text(hdl_error_detail(), "f32", "i32", NULL);
    check_next();
    start = rank_now();
    expect("another operator", start,
           hdl_allreduce(self.group, src, dst, 4, HDL_I32, odd() ? HDL_MAX : HDL_SUM,
                         NULL, NULL),
           HDL_EINVAL);
    rank_check_text(hdl_error_detail(), "max", "sum", NULL);
    check_next();
    start = rank_now();
    expect("another root", start,
           hdl_reduce(self.group, src, dst, 4, HDL_I32, HDL_SUM,
                      odd() ? self.size - 1 : 0, NULL, NULL),
           HDL_EINVAL);
    check_poison("other types", dst, 16);
    check_next();
}

/* One rank's bad argument is an error on all, and takes a number. */
static void test_refused(void)
{
    int32_t src[16] = {0}, dst[16 * 8];
    memset(dst, 0xff, sizeof(dst));
    double start = rank_now();
    expect("a missing pointer", start,
           hdl_allreduce(self.group, odd() ? NULL : src, dst, 4, HDL_I32, HDL_SUM, NULL,
                         NULL),
           HDL_EINVAL);
    check_next();
    expect("an unknown type", rank_now(),
           hdl_allgather(self.group, src, dst, 2, odd() ? (enum hdl_dtype)77 : HDL_I32,
                         NULL, NULL),
           HDL_EINVAL);
    check_next();
    expect("a root outside", rank_now(),
           hdl_reduce(self.group, src, dst, 2, HDL_I32, HDL_SUM, odd() ? self.size : 0,
                      NULL, NULL),
           HDL_EINVAL);
    check_next();
    expect("a size that overflows", rank_now(),
           hdl_allgather(self.group, src, dst, odd() ? SIZE_MAX / 2 : 2, HDL_I32, NULL,
                         NULL),
           HDL_EINVAL);
    check_next();
    expect("an operator that the type lacks", rank_now(),
           hdl_allreduce(self.group, src, dst, 2, HDL_F32, HDL_BAND, NULL, NULL),
           HDL_EINVAL);
    check_next();
    expect("a root's argument", rank_now(),
           hdl_broadcast(self.group, self.rank == 0 ? NULL : src, dst, 2, HDL_I32, 0,
                         NULL, NULL),
           HDL_EINVAL);
    if (self.rank != 0)
        rank_check_text(hdl_error_detail(), "rank 0 called a refused call",
                        "rank 1 called broadcast", NULL);
    check_next();
    struct {
        struct hdl_call call;
        int32_t unknown;
    } tail = {.call = {.size = sizeof(tail)}, .unknown = 1};
    expect("an unknown option", rank_now(),
           hdl_barrier(self.group, odd() ? &tail.call : NULL, NULL), HDL_EINVAL);
    check_next();
    check_poison("refused calls", dst, 16 * 8);
}

/* A pair whose two counts differ names both ranks. */
static void test_alltoallv(void)
{
    int32_t src[64] = {0}, dst[64];
    size_t sc[8], dc[8], displs[8];
    memset(dst, 0xff, sizeof(dst));
    for (int r = 0; r < self.size; r++) {
        sc[r] = dc[r] = 2;
        displs[r] = (size_t)r * 4;
    }
    if (odd())
        dc[0] = 3;
    double start = rank_now();
    expect(
        "unequal counts of a pair", start,
        hdl_alltoallv(self.group, src, sc, displs, dst, dc, displs, HDL_I32, NULL, NULL),
        HDL_EINVAL);
    check_poison("unequal counts of a pair", dst, 64);
    check_next();
}

/* Mismatches of operations in flight do not disturb those before and behind them. */
static void test_in_flight(void)
{
    struct hdl_op *ops[3];
    int32_t values[3] = {1, 1, 1};
    CHECK_OK(hdl_allreduce(self.group, &values[0], &values[0], 1, HDL_I32, HDL_SUM, NULL,
                           &ops[0]));
    CHECK_OK(hdl_allreduce(self.group, &values[1], &values[1], 1, HDL_I32,
                           odd() ? HDL_MAX : HDL_SUM, NULL, &ops[1]));
    CHECK_OK(hdl_allreduce(self.group, &values[2], &values[2], 1, HDL_I32, HDL_SUM, NULL,
                           &ops[2]));
    CHECK_OK(hdl_op_wait(ops[2], HDL_FOREVER));
    CHECK_OK(hdl_op_wait(ops[0], HDL_FOREVER));
    CHECK_STATUS(hdl_op_wait(ops[1], HDL_FOREVER), HDL_EINVAL);
    rank_check_text(hdl_op_detail(ops[1]), "sum", "max", NULL);
    CHECK(values[0] == self.size && values[1] == 1 && values[2] == self.size, "%d %d %d",
          values[0], values[1], values[2]);
    for (int i = 0; i < 3; i++)
        hdl_op_free(ops[i]);
}

int main(void)
{
    rank_join(&self);
    check_next();
    test_order();
    test_count(4, 5);
    test_count(0, 1);
    test_count(1 << 18, 16);
    test_type_operator_root();
    test_refused();
    test_alltoallv();
    test_in_flight();
    rank_leave(&self);
    return 0;
}
