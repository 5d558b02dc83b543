/* SPDX-License-Identifier: Apache-2.0 */
/* The smallest program: every rank gives its number, all get the sum. */
#include <heddle.h>
#include <stdio.h>

int main(void)
{
    struct hdl_context *context;
    struct hdl_group *group;
    if (hdl_context_create(NULL, &context) != HDL_OK ||
        hdl_group_create(context, NULL, &group) != HDL_OK) {
        fprintf(stderr, "cannot join: %s\n", hdl_error_detail());
        return 1;
    }
    int rank = hdl_group_rank(group), size = hdl_group_size(group);
    float value = (float)rank, sum; /* `size` is read here: it shrinks as others end */
    if (hdl_allreduce(group, &value, &sum, 1, HDL_F32, HDL_SUM, NULL, NULL) == HDL_OK)
        printf("rank %d of %d: the sum is %g\n", rank, size, (double)sum);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return 0;
}
