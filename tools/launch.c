/* SPDX-License-Identifier: Apache-2.0 */
/* Local ranks: where they live, what is shown of them, and the exit code. */
#include "tools/launch.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/netns.h"
#include "tools/options.h"
#include "tools/procs.h"

static const char *text_of(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

bool launch_is_rank(void)
{
    return text_of("RANK") && text_of("WORLD_SIZE");
}

static void plain_line(void *user, struct procs *procs, int rank, int stream,
                       const char *line)
{
    (void)user;
    (void)procs;
    (void)rank;
    FILE *out = stream == 2 ? stderr : stdout;
    fprintf(out, "%s\n", line);
    fflush(out);
}

static int explain(struct procs *procs, enum hdl_status ran, const struct launch *launch)
{
    int failed = procs_first_failure(procs);
    int signal = procs_stop_signal(procs);
    if (ran == HDL_ETIMEDOUT) {
        tool_failed("stopped the ranks after %.1f s", (double)launch->timeout_us / 1e6);
        return LAUNCH_TIMED_OUT;
    }
    if (ran != HDL_OK)
        return tool_failed("could not watch the ranks: %s", hdl_error_detail());
    if (failed < 0)
        return signal ? 128 + signal : TOOL_OK;
    int code = procs_exit_code(procs, failed);
    if (!signal && code > 128 && code < 128 + 65)
        tool_failed("rank %d was ended by signal %d (%s)", failed, code - 128,
                    strsignal(code - 128));
    else if (!signal && launch->prefix)
        tool_failed("rank %d ended with exit code %d", failed, code);
    return code;
}

static int start_and_watch(const struct procs_spec *spec, const struct launch *launch)
{
    struct procs *procs = NULL;
    if (procs_start(spec, &procs) != HDL_OK)
        return tool_failed("could not start the ranks: %s", hdl_error_detail());
    enum hdl_status ran = procs_run(procs);
    int code = explain(procs, ran, launch);
    bool ended = ran == HDL_OK && procs_stop_signal(procs) == 0;
    int left = procs_destroy(procs);
    if (ended && left > 0)
        (void)tool_failed("ended %d process%s that the ranks had left running", left,
                          left == 1 ? "" : "es");
    return code;
}

int launch_ranks(const struct launch *launch)
{
    struct netns *netns = NULL;
    struct procs_spec spec = {
        .num_ranks = (int)launch->ranks,
        .argv = launch->argv,
        .env = launch->env,
        .timeout_ns = launch->timeout_us * 1000,
        .grace_ns = launch->grace_us * 1000,
        .forward_signals = true,
        .on_line = launch->prefix ? NULL : plain_line,
    };
    if (launch->ranks > LAUNCH_RANKS_MAX)
        return tool_usage_error("at most %d ranks, got %" PRId64, LAUNCH_RANKS_MAX,
                                launch->ranks);
    if (launch->hosts > launch->ranks)
        return tool_usage_error("%" PRId64
                                " hosts need at least as many ranks, got %" PRId64,
                                launch->hosts, launch->ranks);
    if (launch->hosts > 0) {
        if (netns_create((int)launch->hosts, spec.num_ranks, &netns) != HDL_OK)
            return tool_failed("--hosts: %s", hdl_error_detail());
        spec.netns_fds = netns_rank_fds(netns);
        spec.addrs = netns_rank_addrs(netns);
        spec.master_addr = spec.addrs[0];
    }
    int code = start_and_watch(&spec, launch);
    netns_destroy(netns);
    return code;
}

int launch_self(int argc, char **argv, struct launch launch)
{
    static char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (length <= 0)
        return tool_failed("cannot read /proc/self/exe: %s", strerror(errno));
    path[length] = 0;
    char **args = calloc((size_t)argc + 2, sizeof(*args));
    if (!args)
        return tool_failed("out of memory");
    /* argv[0] is the subcommand's name here. */
    args[0] = path;
    memcpy(&args[1], argv, (size_t)argc * sizeof(*args));
    launch.argv = args;
    int code = launch_ranks(&launch);
    free(args);
    return code;
}
