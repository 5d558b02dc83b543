/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory that somebody else has allocated, for other processes: CUDA IPC. */
#ifndef GPU_IPC_H
#define GPU_IPC_H

#include "gpu/driver.h"

/* Where the memory lies, for another process of this host. */
struct gpu_shared {
    struct gpu_ipc ipc; /* of the whole allocation */
    uint64_t offset;
};

/* HDL_EINVAL: not device memory, or it ends before `bytes`; HDL_ENOTSUP: no driver, or
 * memory of an allocator that cannot be shared so. */
enum hdl_status gpu_share(const void *memory, size_t bytes, struct gpu_shared *shared);

/* Memory of another process, as mapped here. */
struct gpu_ipc_map {
    struct gpu_ctx *ctx;
    uint64_t base; /* of the allocation; 0 = nothing */
};

/* Maps it for the thread's current context; `address` is that of the shared memory.
 * HDL_EINVAL: no context is current. */
enum hdl_status gpu_ipc_open(const struct gpu_shared *shared, struct gpu_ipc_map *map,
                             void **address);
void gpu_ipc_close(struct gpu_ipc_map *map);

#endif
