/* SPDX-License-Identifier: Apache-2.0 */
/* Virtual memory management of the driver: ranges, allocations, descriptors. */
#include "gpu/memory.h"

#include <string.h>

#include "base/checked.h"

static struct gpu_mem_prop prop_of(const struct gpu_device *d)
{
    struct gpu_mem_prop p;
    memset(&p, 0, sizeof(p));
    p.type = GPU_MEM_PINNED;
    p.handle_types = GPU_HANDLE_FD;
    p.location_type = GPU_LOCATION_DEVICE;
    p.location_id = d->info.id;
    return p;
}

static enum hdl_status no_memory(const struct gpu_device *d, int error, const char *what,
                                 size_t bytes)
{
    size_t unused = 0, total = 0;
    enum hdl_status s = gpu_check(error, what);
    if (!d->driver->mem_info(&unused, &total))
        base_fail_append(" (%zu bytes asked, %zu of %zu free on device %d)", bytes,
                         unused, total, d->info.id);
    return s;
}

enum hdl_status gpu_block_reserve(const struct gpu_device *d, size_t bytes,
                                  struct gpu_block *block)
{
    size_t unit = 0;
    struct gpu_mem_prop p = prop_of(d);
    memset(block, 0, sizeof(*block));
    if (!d->vmm)
        return base_fail(HDL_ENOTSUP, "device %d cannot export memory as descriptors",
                         d->info.id);
    enum hdl_status s = gpu_enter(d);
    if (s)
        return s;
    s = gpu_check(d->driver->granularity(&unit, &p, GPU_GRANULARITY_MINIMUM),
                  "cuMemGetAllocationGranularity");
    if (!s && !base_align_up(bytes, unit, &block->bytes))
        s = base_fail(HDL_EINVAL, "%zu bytes of device memory", bytes);
    if (!s)
        s = gpu_check(
            d->driver->address_reserve(&block->address, block->bytes, unit, 0, 0),
            "cuMemAddressReserve");
    gpu_leave(d);
    return s;
}

/* Maps a handle that the block then owns; on failure the handle is given back. */
static enum hdl_status map_handle(const struct gpu_device *d, struct gpu_block *block,
                                  uint64_t handle)
{
    const struct gpu_driver *cu = d->driver;
    struct gpu_mem_access access = {GPU_LOCATION_DEVICE, d->info.id,
                                    GPU_ACCESS_READ_WRITE};
    enum hdl_status s =
        gpu_check(cu->mem_map(block->address, block->bytes, 0, handle, 0), "cuMemMap");
    if (s)
        goto release;
    s = gpu_check(cu->mem_access(block->address, block->bytes, &access, 1),
                  "cuMemSetAccess");
    if (s)
        goto unmap;
    block->handle = handle;
    return HDL_OK;
unmap:
    cu->mem_unmap(block->address, block->bytes);
release:
    cu->mem_release(handle);
    return s;
}

enum hdl_status gpu_block_create(const struct gpu_device *d, size_t bytes,
                                 struct gpu_block *block)
{
    struct gpu_mem_prop p = prop_of(d);
    uint64_t handle = 0;
    enum hdl_status s = gpu_block_reserve(d, bytes, block);
    if (s)
        return s;
    s = gpu_enter(d);
    if (s)
        goto free;
    int error = d->driver->mem_create(&handle, block->bytes, &p, 0);
    s = error ? no_memory(d, error, "cuMemCreate", block->bytes)
              : map_handle(d, block, handle);
    gpu_leave(d);
    if (s)
        goto free;
    return HDL_OK;
free:
    gpu_block_free(d, block);
    return s;
}

enum hdl_status gpu_block_export(const struct gpu_device *d,
                                 const struct gpu_block *block, int *fd)
{
    enum hdl_status s = gpu_enter(d);
    if (s)
        return s;
    s = gpu_check(d->driver->mem_export(fd, block->handle, GPU_HANDLE_FD, 0),
                  "cuMemExportToShareableHandle");
    gpu_leave(d);
    return s;
}

enum hdl_status gpu_block_import(const struct gpu_device *d, int fd,
                                 struct gpu_block *block)
{
    uint64_t handle = 0;
    if (block->handle)
        return base_fail(HDL_EINVAL, "device memory at %#llx is mapped already",
                         (unsigned long long)block->address);
    enum hdl_status s = gpu_enter(d);
    if (s)
        return s;
    s = gpu_check(d->driver->mem_import(&handle, (void *)(intptr_t)fd, GPU_HANDLE_FD),
                  "cuMemImportFromShareableHandle");
    if (!s)
        s = map_handle(d, block, handle);
    gpu_leave(d);
    return s;
}

void gpu_block_unmap(const struct gpu_device *d, struct gpu_block *block)
{
    if (!block->handle || gpu_enter(d))
        return;
    d->driver->mem_unmap(block->address, block->bytes);
    d->driver->mem_release(block->handle);
    block->handle = 0;
    gpu_leave(d);
}

void gpu_block_free(const struct gpu_device *d, struct gpu_block *block)
{
    gpu_block_unmap(d, block);
    if (block->address && gpu_enter(d) == HDL_OK) {
        d->driver->address_free(block->address, block->bytes);
        gpu_leave(d);
    }
    memset(block, 0, sizeof(*block));
}

enum hdl_status gpu_alloc(const struct gpu_device *d, size_t bytes, uint64_t *address)
{
    enum hdl_status s = gpu_enter(d);
    if (s)
        return s;
    int error = d->driver->mem_alloc(address, bytes ? bytes : 1);
    if (error)
        s = no_memory(d, error, "cuMemAlloc", bytes);
    else
        s = gpu_check(d->driver->fill(*address, 0, bytes ? bytes : 1, NULL),
                      "cuMemsetD8Async");
    if (!s)
        s = gpu_check(d->driver->stream_sync(NULL), "cuStreamSynchronize");
    else if (!error)
        d->driver->mem_free(*address);
    gpu_leave(d);
    return s;
}

void gpu_free(const struct gpu_device *d, uint64_t address)
{
    if (!address || gpu_enter(d))
        return;
    d->driver->mem_free(address);
    gpu_leave(d);
}
