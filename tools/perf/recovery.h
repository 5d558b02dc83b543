/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf recovery`. */
#ifndef TOOLS_PERF_RECOVERY_H
#define TOOLS_PERF_RECOVERY_H

/* argv[0] is "recovery". */
int perf_recovery(int argc, char **argv);

#endif
