/* SPDX-License-Identifier: Apache-2.0 */
/* The name of the algorithm that an operation takes. */
#ifndef TOOLS_PERF_ALGORITHM_H
#define TOOLS_PERF_ALGORITHM_H

#include "tools/perf/ops.h"

/* "-" for point to point. */
const char *perf_algorithm(struct hdl_group *group, const struct perf_run *run);

#endif
