/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and lane state of a GPU exchange in device memory. */
#ifndef MOE_GPU_STATE_H
#define MOE_GPU_STATE_H

#include "moe/gpu_exchange.h"

/* Allocates the expert tables and the lanes' memory, with the notices and the stream for
 * the host's copies; fills them in. What failed is freed by moe_gpu_free_state. */
enum hdl_status moe_gpu_make_state(struct moe_gpu *gpu);
void moe_gpu_free_state(struct moe_gpu *gpu);

/* Places of experts that the tables have room for. */
uint32_t moe_gpu_table_slots(const struct moe_map *map);
/* Addresses of a call's lane. */
void moe_gpu_lane_of(const struct moe_gpu *gpu, const struct moe_gpu_call *call,
                     struct moe_gpu_lane *out);

#endif
