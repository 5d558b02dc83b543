/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle run`: starts a program as N local ranks. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/commands.h"
#include "tools/launch.h"
#include "tools/options.h"

static const char *const more =
    "Every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, "
    "MASTER_PORT\n"
    "and HEDDLE_TOKEN. Its output appears with [rank] in front. Signals go on to the "
    "ranks.\n"
    "The exit code is that of the first rank that fails (128 + signal if it was killed), "
    "124\n"
    "after a timeout. Ranks that go on after a failure are left to finish, unless "
    "--grace\n"
    "is given. Whatever the ranks leave running is killed in the end.\n"
    "\n"
    "  heddle run -n 4 -- ./program argument\n"
    "  heddle run -n 4 --hosts 2 -- ./program       two ranks on each of two hosts";

/* So that a wrong name is one sentence, not one from each rank. */
static bool can_run(const char *program)
{
    if (strchr(program, '/'))
        return access(program, X_OK) == 0;
    const char *path = getenv("PATH");
    while (path && *path) {
        char candidate[4096];
        int length = (int)strcspn(path, ":");
        snprintf(candidate, sizeof(candidate), "%.*s/%s", length, path, program);
        if (access(candidate, X_OK) == 0)
            return true;
        path += length;
        path += *path == ':';
    }
    errno = ENOENT;
    return false;
}

int command_run(int argc, char **argv)
{
    struct launch launch = {.prefix = true};
    bool raw = false;
    const struct tool_option options[] = {
        {'n', "ranks", TOOL_INT, &launch.ranks, 1, "N", "ranks to start"},
        {0, "hosts", TOOL_INT, &launch.hosts, 1, "H",
         "spread them over H network namespaces that act as hosts"},
        {0, "timeout", TOOL_SECONDS, &launch.timeout_us, 0, "S",
         "stop all after S seconds"},
        {0, "grace", TOOL_SECONDS, &launch.grace_us, 0, "S",
         "after the first failure stop the others within S seconds"},
        {0, "raw", TOOL_FLAG, &raw, 0, NULL, "no [rank] in front of the lines"},
    };
    const struct tool_usage usage = {
        "heddle run -n N [options] [--] program [arguments]",
        "Starts a program as N ranks on this machine and waits for them.",
        options,
        sizeof(options) / sizeof(options[0]),
        more,
    };
    int first, code;
    if (!tool_parse(&usage, false, argc, argv, &first, &code))
        return code;
    if (first >= argc)
        return tool_usage_error("run needs a program to start (see heddle run --help)");
    if (launch.ranks == 0)
        return tool_usage_error("run needs the number of ranks: -n N");
    if (!can_run(argv[first])) {
        tool_failed("cannot run '%s': %s", argv[first], strerror(errno));
        return 127;
    }
    launch.prefix = !raw;
    launch.argv = argv + first;
    return launch_ranks(&launch);
}
