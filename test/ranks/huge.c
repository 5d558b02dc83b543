/* SPDX-License-Identifier: Apache-2.0 */
/* More than 2^31 elements: an all_reduce of int8 in place, by two ranks. */
#include <stdlib.h>
#include <sys/sysinfo.h>

#include "rank.h"

enum { SKIPPED = 77 };

int main(void)
{
    const size_t count = (UINT64_C(1) << 31) + 12345;
    struct sysinfo memory;
    struct rank self;
    if (sysinfo(&memory) != 0 || memory.freeram / 8 * memory.mem_unit < count / 8 * 3)
        return SKIPPED;
    rank_join(&self);
    int8_t *data = malloc(count);
    CHECK(data, "no memory");
    for (size_t i = 0; i < count; i++)
        data[i] = (int8_t)((i >> 16) % 50 + (size_t)self.rank);
    CHECK_OK(hdl_allreduce(self.group, data, data, count, HDL_I8, HDL_SUM, NULL, NULL));
    int tail = self.size * (self.size - 1) / 2;
    for (size_t i = 0; i < count; i++)
        CHECK(data[i] == (int8_t)((int)((i >> 16) % 50) * self.size + tail),
              "element %zu is %d", i, data[i]);
    free(data);
    rank_leave(&self);
    return 0;
}
