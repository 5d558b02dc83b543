/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA IPC: the allocation behind an address, and allocations of other processes. */
#include "gpu/ipc.h"

/* What the driver knows of an address; 0 if it knows nothing. */
static uint64_t fact(const struct gpu_driver *cu, int which, const void *memory)
{
    uint64_t value = 0;
    return cu->pointer_attribute(&value, which, (uint64_t)(uintptr_t)memory) ? 0 : value;
}

enum hdl_status gpu_share(const void *memory, size_t bytes, struct gpu_shared *shared)
{
    const struct gpu_driver *cu = gpu_driver_get();
    const uint64_t address = (uint64_t)(uintptr_t)memory;
    if (!cu)
        return HDL_ENOTSUP;
    if ((uint32_t)fact(cu, GPU_POINTER_TYPE, memory) != GPU_MEMORY_DEVICE)
        return base_fail(HDL_EINVAL, "%p is not device memory", memory);
    const uint64_t base = fact(cu, GPU_POINTER_BASE, memory);
    const uint64_t size = fact(cu, GPU_POINTER_SIZE, memory);
    if (bytes > size - (address - base))
        return base_fail(HDL_EINVAL, "%zu bytes at %p, of whose allocation %llu are left",
                         bytes, memory, (unsigned long long)(size - (address - base)));
    struct gpu_ctx *ctx = (struct gpu_ctx *)(uintptr_t)fact(cu, GPU_POINTER_CTX, memory);
    if (!(uint32_t)fact(cu, GPU_POINTER_IPC, memory) || !ctx)
        return base_fail(HDL_ENOTSUP,
                         "memory at %p is of an allocator that CUDA IPC does not share: "
                         "cudaMalloc's and cuMemAlloc's is",
                         memory);
    shared->offset = address - base;
    enum hdl_status s = gpu_check(cu->ctx_push(ctx), "cuCtxPushCurrent");
    if (s)
        return s;
    s = gpu_check(cu->ipc_get(&shared->ipc, base), "cuIpcGetMemHandle");
    (void)cu->ctx_pop(&ctx);
    return s;
}

enum hdl_status gpu_ipc_open(const struct gpu_shared *shared, struct gpu_ipc_map *map,
                             void **address)
{
    const struct gpu_driver *cu = gpu_driver_get();
    if (!cu)
        return HDL_ENOTSUP;
    enum hdl_status s = gpu_check(cu->ctx_current(&map->ctx), "cuCtxGetCurrent");
    if (!s && !map->ctx)
        s = base_fail(HDL_EINVAL, "no CUDA context is current on this thread, for which "
                                  "device memory could be mapped");
    if (!s)
        s = gpu_check(cu->ipc_open(&map->base, shared->ipc, GPU_IPC_PEER_ACCESS),
                      "cuIpcOpenMemHandle");
    if (!s)
        *address = (void *)(uintptr_t)(map->base + shared->offset);
    return s;
}

void gpu_ipc_close(struct gpu_ipc_map *map)
{
    const struct gpu_driver *cu = gpu_driver_get();
    struct gpu_ctx *ctx;
    if (!map->base || cu->ctx_push(map->ctx))
        return;
    (void)cu->ipc_close(map->base);
    (void)cu->ctx_pop(&ctx);
    map->base = 0;
}
