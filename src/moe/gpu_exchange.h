/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's side of an exchange on a GPU: arena, tables, and the launches of its
 * kernels. */
#ifndef MOE_GPU_EXCHANGE_H
#define MOE_GPU_EXCHANGE_H

#include "gpu/memory.h"
#include "moe/config.h"
#include "moe/gpu_args.h"

/*
 * The host side of the kernels, which knows nothing of groups: whoever creates it brings
 * the peers' memory as descriptors, and keeps the order of steps and lanes. All calls of
 * a lane go to streams in the order dispatch, combine, dispatch, ...; every number that
 * advances is in device memory, so they may be captured into a graph and replayed.
 */
struct moe_gpu {
    struct base_env *env;
    struct gpu_device device;
    const struct moe_config *config;
    struct moe_gpu_geometry geo;
    uint32_t rank;
    uint32_t blocks; /* most blocks of a launch: the budget of multiprocessors */
    bool budget;     /* the caller's; else two blocks may share a multiprocessor */
    uint32_t dispatch_blocks, dispatch_threads, dispatch_stages;
    uint32_t dispatch_senders, combine_senders;
    uint32_t local_experts;
    uint32_t most_experts; /* that captured launches have shared memory for */
    struct gpu_block arena[MOE_GPU_MAX_RANKS]; /* own and peers' */
    struct gpu_stream *side;   /* for the host's own copies, beside what callers run */
    volatile uint32_t *notice; /* [lanes] kernels set a word where they find an error */
    uint64_t buffer[MOE_MAX_LANES]; /* rows for combine, 0 = not asked for yet */
    uint64_t tables;                /* expert map, room for the largest */
    uint64_t lane_memory;
    uint64_t lane_bytes;
    struct gpu_function *dispatch[2], *combine[2]; /* for any rows, for aligned rows */
    struct gpu_function *mask[2]; /* before and after a call with a mask */
};

struct moe_gpu_opts {
    const struct moe_config *config; /* must outlive the exchange */
    uint32_t rank;
    int device;
    uint32_t blocks;                            /* 0 = all multiprocessors */
    uint32_t dispatch_senders, combine_senders; /* blocks of these that send; 0 = half */
};

/* Bytes of a rank's arena for these options. HDL_ENOTSUP for what kernels do not do. */
enum hdl_status moe_gpu_geometry_init(const struct moe_config *config,
                                      struct moe_gpu_geometry *geo);

/* How rows of this exchange cross in dispatch, in combine. */
enum hdl_moe_protocol moe_gpu_protocol(const struct moe_gpu *gpu, bool combine);
/* "LL", "CHUNK", "BULK"; "auto" of exchanges without GPUs. */
const char *moe_protocol_name(enum hdl_moe_protocol protocol);

enum hdl_status moe_gpu_create(struct base_env *env, const struct moe_gpu_opts *opts,
                               struct moe_gpu **gpu);
/* Ends waits of kernels in flight. NULL is legal. */
void moe_gpu_destroy(struct moe_gpu *gpu);

/* The own arena as a descriptor for peers; the caller closes it. */
enum hdl_status moe_gpu_export(struct moe_gpu *gpu, int *fd);
/* Maps the arena of `rank`, or replaces a former one when no kernel runs: the address is
 * the same since creation, captured launches have it. `fd` stays the caller's. */
enum hdl_status moe_gpu_attach(struct moe_gpu *gpu, uint32_t rank, int fd);

/* Takes the mapping away from ranks that are gone; no kernel may run. */
void moe_gpu_detach(struct moe_gpu *gpu, uint32_t rank);
/* Waits until nothing runs on the device. */
enum hdl_status moe_gpu_quiesce(struct moe_gpu *gpu);
/* Whether launches that were captured before take another map. */
enum hdl_status moe_gpu_takes_map(const struct moe_gpu *gpu, const struct moe_map *map);
/* A new map, the ranks (bit r) that calls count on, and as in moe_gpu_set_active who of
 * them is there; all lanes go on with `step` of `generation`. No kernel may run. */
enum hdl_status moe_gpu_begin(struct moe_gpu *gpu, uint32_t members, uint32_t active,
                              uint32_t generation, uint32_t step);

/* Which ranks the kernels believe in (bit r), all of them attached; seen also by kernels
 * that are waiting. Waits for no kernel. */
enum hdl_status moe_gpu_set_active(struct moe_gpu *gpu, uint32_t active);

struct moe_gpu_call {
    uint32_t lane;
    uint32_t phase;      /* MOE_GPU_SEND, MOE_GPU_RECV, or both */
    int32_t *active;     /* device [ranks], see struct hdl_moe_call; NULL = all */
    bool alone;          /* counts on no other rank; instead of a mask */
    uint64_t timeout_ns; /* 0 = none */
    uint64_t trace;      /* device address for times of blocks, or 0 */
    struct gpu_stream *stream;
};

/* Device addresses; what they mean says struct hdl_moe_tokens. */
struct moe_gpu_tokens {
    const void *rows, *scales, *ids;
    const float *weights;
    const int32_t *num_tokens_at; /* device word, or NULL */
    uint32_t num_tokens;
    bool ids_are_64;
};

/* Device addresses; what they mean says struct hdl_moe_received. */
struct moe_gpu_received {
    void *rows, *scales;
    int32_t *counts;
    int64_t *offsets, *row_numbers;
    int32_t *source_token;
    int64_t *ranges;
    int32_t *local_ids;
    float *weights;
    int32_t *source_counts;
    int64_t *totals; /* num_rows, num_pairs */
};

struct moe_gpu_result {
    const void *expert_out;
    const float *weights; /* if none came with dispatch */
    void *rows;
    const void *bias[2];
    uint8_t *missing;
    bool accumulate;
};

enum hdl_status moe_gpu_dispatch(struct moe_gpu *gpu, const struct moe_gpu_call *call,
                                 const struct moe_gpu_tokens *tokens,
                                 const struct moe_gpu_received *received);
enum hdl_status moe_gpu_combine(struct moe_gpu *gpu, const struct moe_gpu_call *call,
                                const struct moe_gpu_result *result);

/* A copy of a lane's state as it is now; waits for no kernel. */
enum hdl_status moe_gpu_read_state(struct moe_gpu *gpu, uint32_t lane,
                                   struct moe_gpu_state *state);
/* The same of its counters, with those of `experts` experts. */
enum hdl_status moe_gpu_read_counters(struct moe_gpu *gpu, uint32_t lane,
                                      struct moe_gpu_counters *counters,
                                      uint32_t experts);
/* Forgets the error that a lane's state has. */
enum hdl_status moe_gpu_clear_error(struct moe_gpu *gpu, uint32_t lane);
/* Device memory for the expert rows of a lane's combine, allocated by the first call. */
enum hdl_status moe_gpu_buffer(struct moe_gpu *gpu, uint32_t lane, uint64_t *address);

#endif
