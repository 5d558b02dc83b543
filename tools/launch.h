/* SPDX-License-Identifier: Apache-2.0 */
/* Starting local ranks for `heddle run`, and for perf and demo outside a launcher. */
#ifndef TOOLS_LAUNCH_H
#define TOOLS_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

enum { LAUNCH_RANKS_MAX = 1024, LAUNCH_TIMED_OUT = 124 };

struct launch {
    int64_t ranks;
    int64_t hosts; /* 0 = this machine as it is */
    int64_t timeout_us;
    int64_t grace_us; /* after the first failure; 0 = the others go on */
    bool prefix;      /* "[rank] " in front of each line */
    char *const *argv;
    const char *const *env;
};

/* RANK and WORLD_SIZE are set: this process is a rank of somebody's launcher. */
bool launch_is_rank(void);
/* Runs the ranks and returns the exit code to end with: the first failure's, 128 +
 * signal, or LAUNCH_TIMED_OUT. */
int launch_ranks(const struct launch *launch);
/* Runs this program again as each of the ranks, with the same arguments. */
int launch_self(int argc, char **argv, struct launch launch);

#endif
