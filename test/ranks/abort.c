/* SPDX-License-Identifier: Apache-2.0 */
/* Abort from another thread, and an operation's own deadline. */
#include <pthread.h>
#include <string.h>

#include "rank.h"

static struct rank self;
static double aborted_at;

static void *abort_later(void *argument)
{
    rank_sleep_ms(200);
    aborted_at = rank_now();
    CHECK_OK(hdl_group_abort(self.group));
    CHECK(rank_now() - aborted_at < 0.1 * RANK_SLOW, "abort took %.3f s",
          rank_now() - aborted_at);
    return argument;
}

/* All but `gone` see it as lost in their operations. */
static void others_go_on(int gone)
{
    int32_t one = 1;
    enum hdl_status status = HDL_OK;
    double limit = rank_now() + 5;
    while (status == HDL_OK && rank_now() < limit) {
        one = 1;
        status = hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL);
    }
    CHECK_STATUS(status, HDL_INCOMPLETE);
    rank_check_failed(gone);
    CHECK(one == self.size - 1, "sum %d", one);
}

/* Everybody can make a new group afterwards. */
static void again(void)
{
    int32_t one = 1;
    hdl_group_destroy(self.group);
    self.group = rank_group(self.context, "again");
    CHECK_OK(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(one == self.size, "sum %d in the new group", one);
}

static void test_abort(void)
{
    if (self.rank != 1) {
        rank_sleep_ms(300);
        others_go_on(1);
        return;
    }
    pthread_t thread;
    int32_t one = 1, two = 1;
    struct hdl_op *op;
    CHECK_OK(hdl_allreduce(self.group, &two, &two, 1, HDL_I32, HDL_SUM, NULL, &op));
    CHECK(pthread_create(&thread, NULL, abort_later, NULL) == 0, "no thread");
    CHECK_STATUS(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL),
                 HDL_EABORTED);
    CHECK(rank_now() - aborted_at < 0.1 * RANK_SLOW, "the blocked call took %.3f s",
          rank_now() - aborted_at);
    CHECK_STATUS(hdl_op_wait(op, HDL_FOREVER), HDL_EABORTED);
    hdl_op_free(op);
    CHECK(pthread_join(thread, NULL) == 0, "no join");
    CHECK_STATUS(hdl_barrier(self.group, NULL, NULL), HDL_EABORTED);
    CHECK_STATUS(hdl_send(self.group, &one, 1, HDL_I32, 0, 0, NULL, NULL), HDL_EABORTED);
}

/* The late rank is missing; the group is over for the one whose deadline passed. */
static void test_deadline(void)
{
    const struct hdl_call call = {.size = sizeof(call), .timeout_us = 300000};
    int last = self.size - 1;
    int32_t one = 1;
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank != last) {
        rank_sleep_ms(1000);
        others_go_on(last);
        return;
    }
    double start = rank_now();
    CHECK_STATUS(hdl_allreduce(self.group, &one, &one, 1, HDL_I32, HDL_SUM, &call, NULL),
                 HDL_ETIMEDOUT);
    double seconds = rank_now() - start;
    CHECK(seconds >= 0.3 && seconds < 0.8 * RANK_SLOW,
          "the deadline of 0.3 s passed after %.3f s", seconds);
    rank_check_text(hdl_error_detail(), "allreduce", "operation 3", "missing ranks 0,1",
                    NULL);
    enum hdl_status later = hdl_barrier(self.group, NULL, NULL);
    CHECK(later == HDL_EABORTED || later == HDL_ETIMEDOUT, "a later call is %s",
          hdl_status_name(later));
}

int main(void)
{
    rank_join(&self);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    test_abort();
    again();
    test_deadline();
    hdl_group_destroy(self.group);
    self.group = rank_group(self.context, "third");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    rank_leave(&self);
    return 0;
}
