/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf --micro`: the ranks that its benchmarks run on. */
#ifndef TOOLS_PERF_MICRO_BENCH_H
#define TOOLS_PERF_MICRO_BENCH_H

#include <stdbool.h>

#include "gpu/memory.h"
#include "tools/perf/micro.h"

/* Each rank owns MICRO_MAX_RANKS regions, that of rank r for what comes from r: larger
 * than what caches hold. */
#define MICRO_REGION ((size_t)128 << 20)
enum { MICRO_MAX_REPEATS = 1000 };

struct micro_rank {
    const struct gpu_device *device;
    struct gpu_module *module;
    struct gpu_stream *stream;
    struct gpu_event *begin, *end;
    uint64_t counters;                       /* struct micro_counters */
    struct gpu_block block[MICRO_MAX_RANKS]; /* the own memory; others' of other GPUs */
    uint64_t at[MICRO_MAX_RANKS];            /* memory of each rank, as mapped here */
};

/* Threads of one process, in effect: a stream for each rank. */
struct micro {
    struct base_env env;
    const struct gpu_driver *cu;
    int gpus, ranks; /* one for each GPU; two that share it if there is only one */
    struct gpu_device device[MICRO_MAX_RANKS];
    struct micro_rank rank[MICRO_MAX_RANKS];
    volatile uint32_t *gate; /* of the host; kernels wait until it is `runs` */
    uint32_t runs;
    int64_t repeats;
    bool json;
    bool good; /* no line's data were wrong */
};

/* What each of the first `ranks` ranks puts into its stream. */
struct micro_work {
    enum hdl_status (*launch)(struct micro *m, int rank, const struct micro_work *work);
    const void *args;
    int ranks;
    uint32_t blocks;
};

/* Median time of a run, of its slowest rank. */
enum hdl_status micro_time(struct micro *m, const struct micro_work *work, double *us);
/* A kernel for a rank, whose device's context is current. */
enum hdl_status micro_kernel(const struct micro *m, int rank, const char *name,
                             uint32_t shared_bytes, struct gpu_function **function);

/* What stores go to: "peers" or "the same GPU". */
const char *micro_path(const struct micro *m);

/* The command; --micro is one of its arguments. */
int perf_micro(int argc, char **argv);

enum hdl_status micro_bench_store(struct micro *m);
enum hdl_status micro_bench_scan(struct micro *m);
enum hdl_status micro_bench_receive(struct micro *m);
enum hdl_status micro_bench_launch(struct micro *m);

#endif
