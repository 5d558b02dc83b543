/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle coordinator`: the coordinator of a job as a process of its own. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/parse.h"
#include "base/status.h"
#include "host/host.h"
#include "tools/commands.h"
#include "tools/options.h"

static const char *const more =
    "Ranks find it by HEDDLE_COORDINATOR=HOST:PORT and HEDDLE_STANDALONE=1, and know "
    "its\n"
    "token by HEDDLE_TOKEN or HEDDLE_TOKEN_FILE. It survives every rank. Started again "
    "at\n"
    "the same address, it takes the groups over from the ranks, whose operations go on\n"
    "meanwhile. It ends with SIGINT or SIGTERM.\n"
    "\n"
    "  heddle coordinator --listen 10.0.0.1:29400 --token-file job.token";

int command_coordinator(int argc, char **argv)
{
    const char *listen = "127.0.0.1:29400", *token_file = NULL;
    int64_t dead_after_us = 0, grace_us = 0, link_timeout_us = 0;
    const struct tool_option options[] = {
        {0, "listen", TOOL_TEXT, &listen, 0, "HOST:PORT",
         "address to listen on (default 127.0.0.1:29400)"},
        {0, "token-file", TOOL_TEXT, &token_file, 0, "FILE",
         "the job's token, 64 hexadecimal digits (default HEDDLE_TOKEN)"},
        {0, "dead-after", TOOL_SECONDS, &dead_after_us, 200000, "S",
         "a rank that is silent for so long is dead (default 5)"},
        {0, "grace", TOOL_SECONDS, &grace_us, 1, "S",
         "time to reconnect after a connection closed (default 0.5)"},
        {0, "link-timeout", TOOL_SECONDS, &link_timeout_us, 1, "S",
         "a link between live ranks that stays down is given up (default 5)"},
    };
    const struct tool_usage usage = {"heddle coordinator [options]",
                                     "Decides the membership of a job's groups.", options,
                                     sizeof(options) / sizeof(options[0]), more};
    int first, code;
    if (!tool_parse(&usage, true, argc, argv, &first, &code))
        return code;
    if (first < argc)
        return tool_usage_error("coordinator takes no argument '%s'", argv[first]);
    struct base_addr addr;
    if (base_parse_addr(listen, &addr) != HDL_OK)
        return tool_usage_error("--listen: %s", base_detail());
    if (token_file && !*token_file)
        return tool_usage_error("--token-file needs a file's name");
    if (token_file)
        (void)setenv("HEDDLE_TOKEN_FILE", token_file, 1);
    if (token_file)
        (void)unsetenv("HEDDLE_TOKEN");
    sigset_t ends;
    (void)sigemptyset(&ends);
    (void)sigaddset(&ends, SIGINT);
    (void)sigaddset(&ends, SIGTERM);
    (void)sigprocmask(SIG_BLOCK, &ends, NULL);
    struct base_env env;
    base_env_init(&env);
    struct host *host;
    struct host_opts opts = {.num_ranks = 1,
                             .coordinator = listen,
                             .standalone = true,
                             .coordinator_only = true,
                             .dead_after_ns = dead_after_us * 1000,
                             .grace_ns = grace_us * 1000,
                             .link_timeout_ns = link_timeout_us * 1000};
    enum hdl_status status = base_config_load(&env.config);
    env.log_level = env.config.log;
    if (status == HDL_OK)
        status = host_create(&env, &opts, &host);
    if (status != HDL_OK)
        return tool_failed("coordinator: %s: %s", hdl_status_name(status), base_detail());
    printf("heddle coordinator listens on %s\n", listen);
    (void)fflush(stdout);
    int received;
    while (sigwait(&ends, &received) != 0)
        ;
    host_destroy(host);
    return TOOL_OK;
}
