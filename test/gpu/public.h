/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of an exchange through the public calls, a process for each: what their programs
 * share. */
#ifndef TEST_GPU_PUBLIC_H
#define TEST_GPU_PUBLIC_H

#include <sys/types.h>

#include "ranks.h"

/*
 * The parent never touches a GPU. Rank r sees one device alone, the last rank the first
 * one. All ranks go through the same steps and compare all that was written with the
 * oracle.
 */
struct gpu_process {
    uint32_t rank, ranks, last;
    struct hdl_context *context;
    struct hdl_group *group;
    struct hdl_moe *moe;
    struct gpu_world *w;
    struct gpu_rank *r;
    const struct gpu_driver *cu;
    uint64_t active; /* on the device */
    int bad;
};

extern struct gpu_process self;

_Noreturn void public_fail(const char *file, int line, const char *what);

#define CHECK(x)                                                                         \
    do {                                                                                 \
        if (!(x))                                                                        \
            public_fail(__FILE__, __LINE__, #x);                                         \
    } while (0)
#define OK(call) CHECK((call) == HDL_OK)

double public_now(void);
/* By rank 0 alone. */
void public_say(const char *what);
/* A barrier of the present ranks. */
void public_meet(void);

void public_set_active(const int32_t *active);
void public_get_active(int32_t *active);

/* Arguments of the calls, all of them on the device. */
struct public_arguments {
    struct hdl_moe_tokens tokens;
    struct hdl_moe_received received;
    struct hdl_moe_outputs outputs;
    struct hdl_moe_result result;
    struct hdl_moe_call call;
};
struct public_arguments public_arguments_of(const struct gpu_case *c, int64_t timeout_us);

/* Dispatch and combine. */
void public_step(const struct gpu_case *c, int64_t timeout_us);
/* The same as a graph. */
struct gpu_graph_exec *public_capture(const struct gpu_case *c, int64_t timeout_us);

/* Inputs of a step and a mask without one rank (or nobody: ranks). */
void public_fill(const struct gpu_case *c, uint32_t without);
/* Fetches and compares what the oracle expects of a step without it. */
void public_compare(const struct gpu_case *c, uint32_t without);

/* Becomes a member of the job's group. */
void public_join(bool joins);
/* Makes the exchange. */
void public_open(const struct hdl_moe_opts *opts);
/* 0 if all was right. */
int public_close(void);

/* How many ranks there are on so many GPUs; their environment. */
uint32_t public_job(int gpus);
/* A process for a rank, which runs `run` and gives up after `limit_s`. */
pid_t public_start(uint32_t rank, uint32_t ranks, int gpus, unsigned limit_s,
                   int (*run)(bool joins), bool joins);

#endif
