/* SPDX-License-Identifier: Apache-2.0 */
/* Wait really waits: every element is final when it returns; nobody leaves a barrier
 * early. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

static struct rank self;

static void test_sizes(void)
{
    static const size_t counts[] = {0, 1, 3, 63, 64, 65, 4095, (1 << 20) + 1};
    for (size_t s = 0; s < sizeof(counts) / sizeof(counts[0]); s++) {
        size_t count = counts[s], ranks = (size_t)self.size;
        for (size_t shift = 0; shift < 2; shift++) {
            unsigned char *memory = malloc(count * 4 * (ranks + 1) + 8);
            CHECK(memory, "no memory");
            unsigned char *src = memory + shift, *dst = src + count * 4;
            struct hdl_op *op;
            memset(memory, 0xa5, count * 4 * (ranks + 1) + 8);
            for (size_t i = 0; i < count; i++)
                rank_put(src, HDL_F32, i, (double)(i % 4099) + self.rank);
            if (self.rank == (int)(s % ranks))
                rank_sleep_ms(20);
            CHECK_OK(hdl_allgather(self.group, src, dst, count, HDL_F32, NULL, &op));
            CHECK_OK(hdl_op_wait(op, HDL_FOREVER));
            for (size_t r = 0; r < ranks; r++)
                for (size_t i = 0; i < count; i++)
                    CHECK(rank_get(dst, HDL_F32, r * count + i) == (double)(i % 4099 + r),
                          "element %zu of rank %zu is not final", i, r);
            hdl_op_free(op);
            free(memory);
        }
    }
}

/* Nobody leaves before the last has come: all ranks read the same clock. */
static void test_barrier(void)
{
    for (int late = 0; late < self.size; late++) {
        if (self.rank == late)
            rank_sleep_ms(20);
        double came = rank_now(), last = 0;
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        double left = rank_now();
        CHECK_OK(
            hdl_allreduce(self.group, &came, &last, 1, HDL_F64, HDL_MAX, NULL, NULL));
        CHECK(left >= last, "left a barrier %.6f s before the last came", last - left);
    }
}

int main(void)
{
    rank_join(&self);
    test_sizes();
    test_barrier();
    rank_leave(&self);
    return 0;
}
