/* SPDX-License-Identifier: Apache-2.0 */
/* The `heddle` command: finds the subcommand. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tools/commands.h"
#include "heddle.h"
#include "tools/options.h"

static int command_version(int argc, char **argv)
{
    const struct tool_usage usage = {"heddle version", "Prints the version.", NULL, 0,
                                     NULL};
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (first < argc)
        return tool_usage_error("version takes no argument '%s'", argv[first]);
    printf("heddle %s\n", hdl_version());
    return TOOL_OK;
}

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"run", command_run, "start a program as N ranks on this machine"},
    {"demo", command_demo, "watch N processes exchange real data"},
    {"perf", command_perf, "measure operations, losses, a mixture of experts"},
    {"info", command_info, "what this build and machine can do"},
    {"coordinator", command_coordinator,
     "decide a job's membership, outside of its ranks"},
    {"chaos", command_chaos,
     "kill, stop, remove and replace ranks that check every result"},
    {"sim", command_sim, "run the control plane under virtual time and faults"},
    {"version", command_version, "the version"},
};

static int help(void)
{
    printf("usage: heddle COMMAND [options]\n\n"
           "Heddle moves data among the processes of distributed AI "
           "programs.\n\ncommands:\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        printf("  %-12s%s\n", commands[i].name, commands[i].help);
    printf("  %-12s%s\n\nheddle COMMAND --help tells about one command.\n", "help",
           "this text, or that of a command");
    return TOOL_OK;
}

static int dispatch(int argc, char **argv)
{
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(argv[0], commands[i].name) == 0)
            return commands[i].run(argc, argv);
    return tool_usage_error("unknown command '%s' (see heddle help)", argv[0]);
}

static int run_command(int argc, char **argv)
{
    static char help_flag[] = "--help";
    const char *name = argc > 1 ? argv[1] : "help";
    if (strcmp(name, "help") == 0 && argc > 2) {
        char *args[] = {argv[2], argc > 3 ? argv[3] : help_flag, help_flag, NULL};
        return argv[2][0] == '-' ? help() : dispatch(3, args);
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 ||
        strcmp(name, "-h") == 0)
        return help();
    if (strcmp(name, "--version") == 0)
        return command_version(argc - 1, argv + 1);
    return dispatch(argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
    /* Long runs are watched through pipes, too. */
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    /* The library would put /dev/null in its place, which refuses nothing. */
    if (fcntl(STDOUT_FILENO, F_GETFD) < 0) {
        int full = open("/dev/full", O_WRONLY);
        if (full >= 0 && full != STDOUT_FILENO && dup2(full, STDOUT_FILENO) >= 0)
            (void)close(full);
    }
    int code = run_command(argc, argv);
    if (fflush(stdout) == 0 && !ferror(stdout))
        return code;
    (void)tool_failed("the output could not be written");
    return code == TOOL_OK ? TOOL_FAILED : code;
}
