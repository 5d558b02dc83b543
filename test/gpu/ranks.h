/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a MoE exchange on GPUs within one process: buffers, steps, comparison. */
#ifndef TEST_GPU_RANKS_H
#define TEST_GPU_RANKS_H

#include "moe/gpu_exchange.h"
#include "moe/reference.h"

/* What a test case varies. */
struct gpu_case {
    struct hdl_moe_opts opts;
    uint32_t ranks;
    uint32_t seed;
    uint32_t tokens[MOE_GPU_MAX_RANKS]; /* T of each rank in this step */
    int routing;                        /* enum gpu_routing */
    bool ids_are_64;
    bool bias, accumulate;
    bool special; /* NaN, Inf and zeros among the rows */
    bool split;   /* send and receive phases of all ranks one after the other */
    bool wide_values;
    uint32_t late;                      /* ranks whose weights come with combine */
    uint32_t masked[MOE_GPU_MAX_RANKS]; /* ranks that a rank does not wait for */
    int32_t map_counts[MOE_GPU_MAX_RANKS], *map_ids; /* for opts, if there is a map */
};

enum gpu_routing {
    ROUTE_UNIFORM,
    ROUTE_HOT_EXPERT,
    ROUTE_HOT_RANK,
    ROUTE_LOCAL,
    ROUTE_EMPTY,
    ROUTE_MIXED, /* with -1 and experts named twice */
    ROUTE_KINDS
};

/* One rank: device buffers with host copies of the same size, then what the oracle says.
 */
struct gpu_buffer {
    uint64_t device;
    size_t bytes;
    unsigned char *host, *want;
};

enum gpu_buffer_kind {
    BUF_ROWS,
    BUF_SCALES,
    BUF_IDS,
    BUF_WEIGHTS,
    BUF_OUT_ROWS,
    BUF_OUT_SCALES,
    BUF_COUNTS,
    BUF_OFFSETS,
    BUF_ROW_NUMBERS,
    BUF_SOURCE_TOKEN,
    BUF_RANGES,
    BUF_LOCAL_IDS,
    BUF_OUT_WEIGHTS,
    BUF_SOURCE_COUNTS,
    BUF_TOTALS,
    BUF_EXPERT_OUT,
    BUF_RESULT,
    BUF_BIAS,
    BUF_MISSING,
    BUF_TOKENS,
    BUF_ACTIVE,
    BUF_COUNT
};

struct gpu_rank {
    struct moe_gpu *gpu;
    struct gpu_stream *stream;
    struct gpu_buffer buffer[BUF_COUNT];
    int64_t *ids64;
};

struct gpu_world {
    struct base_env env;
    struct moe_config config;
    uint32_t ranks;
    /* Set before opening. */
    bool bench; /* large buffers stay on the device, no comparison */
    bool apart; /* this process has the GPU of rank `only` alone, as device 0 */
    uint32_t only;
    struct moe_gpu *adopted; /* with apart: that rank's, made and freed by the caller */
    /* Ranks that the oracle expects to take part. */
    int32_t present[MOE_GPU_MAX_RANKS];
    uint64_t timeout_ns;
    struct gpu_rank rank[MOE_GPU_MAX_RANKS];
};

uint64_t gpu_random(uint64_t *state);

/* Devices here, found by a child: a process that forks must not open the driver before.
 */
int gpu_count_apart(void);

/* Makes an exchange of `ranks` ranks; rank r lives on device r % devices. False = said
 * why. */
bool gpu_world_open(struct gpu_world *w, const struct hdl_moe_opts *opts, uint32_t ranks,
                    int devices, uint32_t blocks);
void gpu_world_close(struct gpu_world *w);

/* Fills the inputs of all ranks, here and on the devices, and poisons the outputs. */
bool gpu_world_fill(struct gpu_world *w, const struct gpu_case *c);
/* Copies what is in a rank's buffers here to its device. */
bool gpu_world_put(const struct gpu_rank *r);
struct moe_gpu_tokens gpu_tokens_of(const struct gpu_rank *r, const struct gpu_case *c,
                                    uint32_t rank);
struct moe_gpu_received gpu_received_of(const struct gpu_world *w,
                                        const struct gpu_rank *r);
struct moe_gpu_result gpu_result_of(const struct gpu_world *w, const struct gpu_rank *r,
                                    const struct gpu_case *c);
/* Runs one step on all ranks, or half of one and brings the outputs here; false = said
 * why. */
bool gpu_world_step(struct gpu_world *w, const struct gpu_case *c, uint32_t lane);
bool gpu_world_half(struct gpu_world *w, const struct gpu_case *c, uint32_t lane,
                    bool combine);
/* One phase (MOE_GPU_SEND, MOE_GPU_RECV, or both) of half a step on all ranks. */
bool gpu_world_phase(struct gpu_world *w, const struct gpu_case *c, uint32_t lane,
                     uint32_t phase, bool combine);
/* Copies the outputs of a rank here; waits for its stream. */
bool gpu_world_fetch(struct gpu_rank *r);
/* Writes what the oracle says of a rank's step into `want` of its buffers. */
void gpu_world_expect(struct gpu_world *w, const struct gpu_case *c, uint32_t me);
/* Compares the outputs of combine, of dispatch, or of both with the oracle, byte by byte.
 * Number of buffers that differ. */
enum gpu_outputs { OF_DISPATCH = 1, OF_COMBINE = 2, OF_BOTH = 3 };
int gpu_world_compare(struct gpu_world *w, const struct gpu_case *c, enum gpu_outputs of);

void gpu_case_defaults(struct gpu_case *c);

#endif
