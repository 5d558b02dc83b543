/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of an exchange on GPUs, measured. */
#ifndef TOOLS_PERF_MOE_CUDA_H
#define TOOLS_PERF_MOE_CUDA_H

#include "tools/perf/job.h"

struct moe_cuda_opts {
    const struct perf_job *job;
    int64_t hidden, topk, experts, replays, blocks;
    const char *routing;
    bool fp8;
    bool nccl; /* also NCCL's all_to_all, if there is one */
    enum hdl_moe_layout layout;
    enum hdl_moe_protocol protocol;
    const int64_t *tokens;
    int64_t num_tokens;
};

/* A rank's part; the exit code. */
int moe_cuda_run(const struct moe_cuda_opts *opts);

#endif
