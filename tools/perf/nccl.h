/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL's all-to-all, the way that users of GPUs go otherwise; opened at run time. */
#ifndef TOOLS_PERF_NCCL_H
#define TOOLS_PERF_NCCL_H

#include <stddef.h>

#include "gpu/device.h"
#include "tools/perf/job.h"

struct perf_nccl;

/* Collective; `device` is entered, and must outlive it. HDL_ENOTSUP on all ranks where
 * one has no libnccl.so.2. */
enum hdl_status perf_nccl_open(const struct perf_job *job,
                               const struct gpu_device *device, struct gpu_stream *stream,
                               struct perf_nccl **nccl);
void perf_nccl_close(struct perf_nccl *nccl);

/* Replays of a graph in which every rank sends `bytes` to each, itself too. */
enum hdl_status perf_nccl_measure(struct perf_nccl *nccl, size_t bytes, int64_t replays,
                                  struct perf_times *times);

#endif
