/* SPDX-License-Identifier: Apache-2.0 */
/* Asks an operation of the measured shape which algorithm it took. */
#include "tools/perf/algorithm.h"

#include "group/group.h"
#include "group/op.h"

const char *perf_algorithm(struct hdl_group *group, const struct perf_run *run)
{
    struct perf_run probe = *run;
    struct hdl_op *op = NULL;
    const char *name = "-";
    if (!run->op->collective)
        return name;
    probe.handle = &op;
    if (probe.op->call(&probe) != HDL_OK || !op)
        return name;
    name = op->algorithm ? op->algorithm->name : group->path->name;
    if (hdl_op_wait(op, HDL_FOREVER) != HDL_OK)
        name = "-";
    hdl_op_free(op);
    return name;
}
