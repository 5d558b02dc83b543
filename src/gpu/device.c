/* SPDX-License-Identifier: Apache-2.0 */
/* Devices: facts, contexts, the kernels that are built into the library. */
#include "gpu/device.h"

#include <stdio.h>
#include <string.h>

int gpu_count(void)
{
    int count = 0;
    const struct gpu_driver *cu = gpu_driver_get();
    if (!cu || gpu_check(cu->device_count(&count), "cuDeviceGetCount"))
        return 0;
    return count;
}

int gpu_driver_version(void)
{
    int version = 0;
    const struct gpu_driver *cu = gpu_driver_get();
    if (!cu || cu->version(&version))
        return 0;
    return version;
}

static int attribute(const struct gpu_driver *cu, int which, int device)
{
    int value = 0;
    return cu->device_attribute(&value, which, device) ? 0 : value;
}

enum hdl_status gpu_describe(int ordinal, struct gpu_info *info)
{
    const struct gpu_driver *cu = gpu_driver_get();
    memset(info, 0, sizeof(*info));
    if (!cu)
        return HDL_ENOTSUP;
    int device, count = gpu_count();
    size_t bytes = 0;
    enum hdl_status s = gpu_check(cu->device_get(&device, ordinal), "cuDeviceGet");
    if (s)
        return s;
    info->id = device;
    if (cu->device_name(info->name, sizeof(info->name), device) ||
        cu->device_bus(info->bus, sizeof(info->bus), device) ||
        cu->device_memory(&bytes, device))
        return base_fail(HDL_EGPU, "device %d does not describe itself", ordinal);
    info->memory_bytes = bytes;
    info->major = attribute(cu, GPU_ATTR_MAJOR, device);
    info->minor = attribute(cu, GPU_ATTR_MINOR, device);
    info->multiprocessors = attribute(cu, GPU_ATTR_MULTIPROCESSORS, device);
    for (int other = 0; other < count && other < 64; other++) {
        int peer, value = 0;
        if (other == ordinal || cu->device_get(&peer, other))
            continue;
        if (!cu->peer_attribute(&value, GPU_PEER_ACCESS, device, peer) && value)
            info->reached |= UINT64_C(1) << other;
        if (!cu->peer_attribute(&value, GPU_PEER_NATIVE_ATOMIC, device, peer) && value)
            info->linked |= UINT64_C(1) << other;
    }
    return HDL_OK;
}

static enum hdl_status load_kernels(struct gpu_device *d)
{
    if (!gpu_kernel_images[0].image)
        return base_fail(HDL_ENOTSUP, "this build has no GPU kernels");
    for (int i = 0; gpu_kernel_images[i].image; i++) {
        int error = d->driver->module_load(&d->module[i], gpu_kernel_images[i].image);
        if (!error)
            continue;
        gpu_check(error, "cuModuleLoadData");
        return base_fail(HDL_ENOTSUP,
                         "kernels for %s do not load on device %d (sm_%d%d): %s",
                         gpu_kernels_architectures, d->info.id, d->info.major,
                         d->info.minor, base_detail());
    }
    return HDL_OK;
}

static void unload_kernels(struct gpu_device *d)
{
    for (int i = 0; i < GPU_MAX_IMAGES; i++) {
        if (d->module[i])
            d->driver->module_unload(d->module[i]);
        d->module[i] = NULL;
    }
}

enum hdl_status gpu_device_open(struct base_env *env, int ordinal, struct gpu_device *d)
{
    memset(d, 0, sizeof(*d));
    d->env = env;
    d->driver = gpu_driver_get();
    if (!d->driver)
        return HDL_ENOTSUP;
    const struct gpu_driver *cu = d->driver;
    if (ordinal < 0 || ordinal >= gpu_count())
        return base_fail(HDL_EINVAL, "device %d of %d", ordinal, gpu_count());
    enum hdl_status s = gpu_describe(ordinal, &d->info);
    if (s)
        return s;
    d->shared_bytes = attribute(cu, GPU_ATTR_SHARED_OPTIN, d->info.id);
    d->vmm = attribute(cu, GPU_ATTR_VMM, d->info.id) &&
             attribute(cu, GPU_ATTR_FD_HANDLES, d->info.id);
    s = gpu_check(cu->primary_retain(&d->ctx, d->info.id), "cuDevicePrimaryCtxRetain");
    if (s)
        return s;
    s = gpu_enter(d);
    if (s)
        goto release;
    s = load_kernels(d);
    if (s)
        unload_kernels(d);
    gpu_leave(d);
    if (s)
        goto release;
    return HDL_OK;
release:
    cu->primary_release(d->info.id);
    d->ctx = NULL;
    return s;
}

void gpu_device_close(struct gpu_device *d)
{
    if (!d->ctx)
        return;
    if (gpu_enter(d) == HDL_OK) {
        unload_kernels(d);
        gpu_leave(d);
    }
    d->driver->primary_release(d->info.id);
    d->ctx = NULL;
}

enum hdl_status gpu_enter(const struct gpu_device *d)
{
    return gpu_check(d->driver->ctx_push(d->ctx), "cuCtxPushCurrent");
}

void gpu_leave(const struct gpu_device *d)
{
    struct gpu_ctx *ctx;
    (void)d->driver->ctx_pop(&ctx);
}

enum hdl_status gpu_kernel(const struct gpu_device *d, const char *name,
                           struct gpu_function **function)
{
    for (int i = 0; i < GPU_MAX_IMAGES && d->module[i]; i++) {
        const char *prefix = gpu_kernel_images[i].prefix;
        if (strncmp(name, prefix, strlen(prefix)) == 0)
            return gpu_check(d->driver->module_function(function, d->module[i], name),
                             name);
    }
    return base_fail(HDL_EINTERNAL, "no kernel %s", name);
}
