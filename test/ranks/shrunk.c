/* SPDX-License-Identifier: Apache-2.0 */
/* The last rank is lost between the survivors' calls of one operation that takes arrays.
 */
#include <unistd.h>

#include "rank.h"

static struct rank self;

static enum hdl_status gather(struct hdl_op **op, int32_t dst[13])
{
    static const size_t counts[4] = {1, 2, 3, 7}, displs[4] = {0, 1, 3, 6};
    static const int32_t src[7] = {5, 5, 5, 5, 5, 5, 5};
    return hdl_allgatherv(self.group, src, dst, counts, displs, HDL_I32, NULL, op);
}

static void wait_for_loss(void)
{
    struct hdl_view view = {0};
    for (double limit = rank_now() + 20; view.num_active != 3;) {
        CHECK_OK(hdl_group_view(self.group, &view));
        CHECK(rank_now() < limit, "the loss is not noticed");
        usleep(1000);
    }
    CHECK(view.size == 4 && hdl_group_size(self.group) == 4, "size %d, %d", view.size,
          hdl_group_size(self.group));
}

int main(void)
{
    int32_t dst[13] = {0}, go = 1;
    struct hdl_op *op = NULL;
    uint64_t failed = 0;
    rank_join(&self);
    CHECK(self.size == 4, "run it with 4 ranks");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 3) {
        CHECK_OK(hdl_recv(self.group, &go, 1, HDL_I32, 0, 0, NULL, NULL));
        _exit(0);
    }
    if (self.rank == 0) {
        CHECK_OK(gather(&op, dst));
        CHECK_OK(hdl_send(self.group, &go, 1, HDL_I32, 3, 0, NULL, NULL));
    } else {
        wait_for_loss();
        CHECK_OK(gather(&op, dst));
    }
    enum hdl_status status = hdl_op_wait(op, HDL_FOREVER);
    CHECK(status == HDL_INCOMPLETE, "%s %s", hdl_status_name(status), hdl_op_detail(op));
    CHECK(hdl_op_failed(op, &failed, 1) == 1 && failed == 8, "failed set %#lx",
          (unsigned long)failed);
    hdl_op_free(op);
    for (int i = 0; i < 13; i++)
        CHECK(dst[i] == (i < 6 ? 5 : 0), "element %d is %d", i, dst[i]);
    CHECK(hdl_group_size(self.group) == 3, "size %d", hdl_group_size(self.group));
    CHECK_OK(gather(&op, dst));
    CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
    hdl_op_free(op);
    rank_leave(&self);
    return 0;
}
