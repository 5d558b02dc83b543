/* SPDX-License-Identifier: Apache-2.0 */
/* What /proc says of a process that hangs, and the end of descendants that were left
 * behind. */
#ifndef TOOLS_PROCS_STATE_H
#define TOOLS_PROCS_STATE_H

#include <stdio.h>
#include <sys/types.h>

/* "rank 1 pid 77 runs" and a line for each thread: name, state, wait channel, system
 * call. */
void procs_print_state(pid_t pid, int rank, FILE *out);

/* Kills and reaps every child of this process, and theirs as they become ours. Returns
 * how many it took. */
int procs_kill_children(void);

#endif
