/* SPDX-License-Identifier: Apache-2.0 */
/* A tree of rank processes: started together, watched, and ended without leaving any
 * behind. */
#ifndef TOOLS_PROCS_H
#define TOOLS_PROCS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "heddle.h"

struct procs;

/* What a rank prints, line by line without the newline; stream 1 = stdout, 2 = stderr.
 * Called from procs_run; it may call procs_signal. */
typedef void procs_line_fn(void *user, struct procs *procs, int rank, int stream,
                           const char *line);

struct procs_spec {
    int num_ranks;
    char *const *argv; /* program and arguments, NULL at the end */
    const char *const
        *env; /* further "NAME=value" for every rank, NULL at the end; or NULL */
    const int *netns_fds; /* per rank: network namespace to enter, -1 = stay; or NULL */
    const char *const *addrs; /* per rank: HEDDLE_INTERFACE; or NULL */
    const char *master_addr;  /* NULL = 127.0.0.1, or ::1 where that is missing */
    uint16_t master_port;     /* 0 = a free one */
    int64_t timeout_ns;       /* of the whole run; 0 = none */
    int64_t grace_ns;     /* after the first failure the others get so long, then SIGTERM,
                             and after as long again SIGKILL; 0 = no reaction to failures */
    bool forward_signals; /* SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 go to the ranks */
    procs_line_fn *on_line; /* NULL = "[rank] line" on the own stdout or stderr */
    void *user;
};

/* A loopback address of this machine, of IPv4 or where that is missing IPv6, and a port
 * of it that was free a moment ago. HDL_ESYSTEM. */
struct procs_address {
    char host[48], port[8];
};
enum hdl_status procs_free_address(struct procs_address *found);

/*
 * Starts the ranks with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
 * MASTER_PORT and HEDDLE_TOKEN (a fresh one unless set) in their environment, each in a
 * process group of its own. stdin is /dev/null. The caller becomes the subreaper of all
 * that they start, and SIGCHLD, and the forwarded signals, are blocked until
 * procs_destroy. One tree at a time in a process. HDL_EINVAL, HDL_ENOMEM, HDL_ESYSTEM;
 * then nothing runs.
 */
enum hdl_status procs_start(const struct procs_spec *spec, struct procs **out);

/* Watches until all ranks have ended. HDL_OK whatever their exit codes; HDL_ETIMEDOUT:
 * the time limit passed, procs_dump was written to stderr, and the rest was killed. */
enum hdl_status procs_run(struct procs *procs);

/* Sends a signal to a rank's process (whole_group: and all that it started). A rank that
 * has ended is left alone. */
void procs_signal(struct procs *procs, int rank, int signal, bool whole_group);

/* Exit code, or 128 + signal; -1 while it runs. */
int procs_exit_code(const struct procs *procs, int rank);
/* The first rank that ended with another code than 0, -1 if none did. */
int procs_first_failure(const struct procs *procs);
/* The signal that a user sent to stop the tree, 0 if none came. */
int procs_stop_signal(const struct procs *procs);

/* For each rank: its end, or state, wait channel and last lines of output. */
void procs_dump(const struct procs *procs, FILE *out);

/* Kills what is left, by its own ids: the ranks' process groups and every descendant.
 * Returns how many processes the ranks had left running when they ended. */
int procs_destroy(struct procs *procs);

#endif
