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

int main(void)
{
    rank_join(&self);
    test_sizes();
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 1)
        rank_sleep_ms(500);
    double start = rank_now();
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    double seconds = rank_now() - start;
    CHECK(self.rank == 1 || self.size == 1 || seconds >= 0.45,
          "the barrier let go after %.3f s", seconds);
    rank_leave(&self);
    return 0;
}
