/* SPDX-License-Identifier: Apache-2.0 */
/* A caller's mask in device memory: read before a call's kernel, written back after it.
 */
#include "moe/gpu_args.h"

/* One warp each, a lane for each rank. */
extern "C" __global__ void moe_mask_begin(moe_gpu_mask m)
{
    const uint32_t r = threadIdx.x;
    bool counts = r < m.ranks && (r == m.rank || m.active[r] != 0);
    uint32_t all = __ballot_sync(0xffffffff, counts);
    if (r == 0)
        m.state->mask = all & m.state->members;
}

/* Who did not come in the call, or in the dispatch before a combine; a rank that was not
 * sent to gives nothing. */
extern "C" __global__ void moe_mask_end(moe_gpu_mask m)
{
    const uint32_t r = threadIdx.x;
    const uint32_t step = m.state->step[0] - 1;
    const bool gave = m.state->late[r] != step && (m.state->sent >> r & 1);
    if (r < m.ranks && r != m.rank &&
        (m.state->dropped[r] == step || (m.combine && !gave)))
        m.active[r] = 0;
}
