/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sends that are pending when their rank leaves: destroy delivers or reports; after an
 * exit without it the receiver gets the data or HDL_EPEER, within its deadline.
 *
 *     pending destroy|exit BYTES
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

int main(int argc, char **argv)
{
    bool leaves = argc > 1 && strcmp(argv[1], "destroy") == 0;
    size_t bytes = argc > 2 ? (size_t)atol(argv[2]) : 1024;
    struct rank self;
    rank_join(&self);
    unsigned char *data = malloc(bytes);
    CHECK(data, "no memory");
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 1) {
        struct hdl_op *op;
        memset(data, 0x5c, bytes);
        CHECK_OK(hdl_send(self.group, data, bytes, HDL_U8, 0, 1, NULL, &op));
        hdl_op_free(op);
        if (!leaves)
            _exit(0);
    }
    if (self.rank == 0) {
        rank_sleep_ms(leaves ? 300 : 0);
        memset(data, 0, bytes);
        double start = rank_now();
        enum hdl_status status =
            hdl_recv(self.group, data, bytes, HDL_U8, 1, 1, NULL, NULL);
        CHECK(rank_now() - start < 3 * RANK_SLOW, "the receive took %.1f s",
              rank_now() - start);
        CHECK(status == HDL_OK || (status == HDL_EPEER && !leaves), "%s: %s",
              hdl_status_name(status), hdl_error_detail());
        for (size_t i = 0; status == HDL_OK && i < bytes; i++)
            CHECK(data[i] == 0x5c, "byte %zu is %d", i, data[i]);
        if (status == HDL_EPEER)
            rank_check_failed(1);
        printf("%s\n", hdl_status_name(status));
    }
    double start = rank_now();
    rank_leave(&self);
    CHECK(rank_now() - start < 5 * RANK_SLOW, "leaving took %.1f s", rank_now() - start);
    free(data);
    return 0;
}
