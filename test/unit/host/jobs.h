/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs made of real processes for the host's tests: start, kill, wait with a limit. */
#ifndef TEST_HOST_JOBS_H
#define TEST_HOST_JOBS_H

#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"
#include "ctl/event.h"
#include "ctl/view.h"
#include "host/host.h"

enum { JOB_RANKS_MAX = 16 };

/* What the ranks share with the test, in shared memory. */
struct job_board {
    int64_t killed_at;
    int64_t told_at[JOB_RANKS_MAX];
    uint32_t ready; /* ranks that reached the test's point */
    uint32_t go;    /* set by the test */
    uint64_t values[JOB_RANKS_MAX];
    char texts[JOB_RANKS_MAX][256];
};

struct job {
    int num_ranks;
    int port;
    const char *token; /* NULL = none in the environment */
    void (*run)(struct job *job,
                int rank); /* in the rank's process; returning is exit 0 */
    void *user;
    struct job_board *board;
    pid_t pids[JOB_RANKS_MAX];
};

#define JOB_TOKEN_A "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
#define JOB_TOKEN_B "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"

/* A port nobody has now. */
int job_free_port(void);
void job_start(struct job *job);
void job_start_rank(struct job *job, int rank);
/* Exit code of the rank, 128 + signal, or -1 after 20 s (it is killed then). */
int job_wait(struct job *job, int rank);
/* All ranks end with 0. */
void job_finish(struct job *job);
/* Waits until `count` ranks have called job_ready. */
void job_await_ready(struct job *job, uint32_t count);

/* In a rank: a failed check prints and ends the process with code 1. */
#define JOB_CHECK(condition)                                                             \
    do {                                                                                 \
        if (!(condition))                                                                \
            job_check_failed(__FILE__, __LINE__, #condition);                            \
    } while (0)
_Noreturn void job_check_failed(const char *file, int line, const char *condition);

struct job_rank {
    struct job *job;
    int rank;
    struct base_env env;
    struct host *host;
    struct host_group *group;
    struct ctl_view *view; /* the first one */
    uint32_t commits;
    uint32_t num_absent;
    uint64_t absent;
    enum hdl_status fail_status;
};

/* Environment, host_create with default options. */
void job_rank_env(struct job *job, int rank, struct job_rank *out);
void job_rank_join(struct job *job, int rank, struct job_rank *out);
void job_rank_group(struct job_rank *rank, const char *name);
void job_rank_leave(struct job_rank *rank);
void job_ready(struct job *job);
void job_await_go(struct job *job);
/* Until *word >= value; a failed check after 10 s. */
void job_await(const uint32_t *word, uint32_t value);

#endif
