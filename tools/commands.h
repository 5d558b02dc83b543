/* SPDX-License-Identifier: Apache-2.0 */
/* The subcommands of `heddle`: each gets its own name as argv[0] and returns the exit
 * code. */
#ifndef TOOLS_COMMANDS_H
#define TOOLS_COMMANDS_H

#include <stdbool.h>

int command_run(int argc, char **argv);
int command_demo(int argc, char **argv);
/* demo --words, as a rank. */
int command_demo_words(const char *path);
/* demo --elastic, likewise. */
int command_demo_elastic(const char *path);
int command_perf(int argc, char **argv);
/* perf of dispatch, combine, moe: options of their own. */
bool command_perf_is_moe(int argc, char **argv);
int command_perf_moe(int argc, char **argv);
int command_info(int argc, char **argv);
int command_chaos(int argc, char **argv);
int command_coordinator(int argc, char **argv);
int command_sim(int argc, char **argv);

#endif
