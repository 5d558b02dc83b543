/* SPDX-License-Identifier: Apache-2.0 */
/* Sums in a loop: "once" a hundred, "forever" until it is killed. */
#include <string.h>

#include "rank.h"

int main(int argc, char **argv)
{
    bool forever = argc > 1 && strcmp(argv[1], "forever") == 0;
    struct rank self;
    rank_join(&self);
    for (int i = 0; forever || i < 100; i++) {
        static float data[10000];
        data[0] = data[9999] = 1;
        CHECK_OK(
            hdl_allreduce(self.group, data, data, 10000, HDL_F32, HDL_SUM, NULL, NULL));
        CHECK(data[0] == (float)self.size && data[9999] == (float)self.size, "sum %g",
              (double)data[0]);
    }
    rank_leave(&self);
    return 0;
}
