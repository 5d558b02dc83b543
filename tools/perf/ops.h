/* SPDX-License-Identifier: Apache-2.0 */
/* The operations that `heddle perf` measures: shapes, calls, data and its check. */
#ifndef TOOLS_PERF_OPS_H
#define TOOLS_PERF_OPS_H

#include <stdbool.h>
#include <stddef.h>

#include "heddle.h"

struct perf_run;

struct perf_op {
    const char *name;
    const char *collective; /* name in the algorithm table; NULL = none */
    bool blocks;            /* `bytes` is the sum over the ranks' blocks */
    bool reduces;           /* f32 sums; otherwise bytes are moved */
    bool has_data;
    double halves; /* an iteration is so many one-way trips */
    /* busbw / algbw, as nccl-tests defines it */
    double (*factor)(int ranks);
    enum hdl_status (*call)(struct perf_run *run);
    size_t (*check)(const struct perf_run *run);
};

/* One operation at one size on one rank. */
struct perf_run {
    const struct perf_op *op;
    struct hdl_group *group;
    int rank;
    int ranks;
    bool in_place;
    size_t
        bytes; /* as nccl-tests counts them; rounded to what the ranks can share evenly */
    size_t count; /* elements of a call's count argument */
    size_t block; /* bytes of `count` */
    enum hdl_dtype dtype;
    unsigned char *src, *dst;
    size_t src_bytes, dst_bytes;
    unsigned char *memory;
    struct hdl_op **handle; /* collectives are started only, and give this; else NULL */
};

const struct perf_op *perf_op_find(const char *name);
/* "allreduce, broadcast, ..." */
void perf_op_names(char *room, size_t length);

/* Sets the shape for `bytes` and allocates; false when memory is short. */
bool perf_run_open(struct perf_run *run, size_t bytes);
void perf_run_close(struct perf_run *run);
/* Inputs get a pattern of (rank, place), outputs a poison that no pattern contains by
 * chance. */
void perf_run_fill(struct perf_run *run);
/* Wrong elements of the own output after one call. */
size_t perf_run_check(const struct perf_run *run);
/* Inputs that stay finite when summed in place again and again. */
void perf_run_quiet(struct perf_run *run);

#endif
