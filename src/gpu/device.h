/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU as this process uses it: its context made current for a while, its facts, its
 * kernels. */
#ifndef GPU_DEVICE_H
#define GPU_DEVICE_H

#include <stdbool.h>

#include "base/env.h"
#include "gpu/driver.h"
#include "gpu/kernels.h"

struct gpu_info {
    char name[96];
    char bus[32];
    uint64_t memory_bytes;
    int id; /* of the driver */
    int major, minor, multiprocessors;
    uint64_t linked;  /* bit d: device d is reached by a direct link (NVLink) */
    uint64_t reached; /* bit d: device d's memory can be accessed */
};

struct gpu_device {
    const struct gpu_driver *driver;
    struct base_env *env;
    struct gpu_ctx *ctx; /* the primary one, which the CUDA runtime and torch use too */
    struct gpu_module *module[GPU_MAX_IMAGES];
    struct gpu_info info;
    int shared_bytes; /* most that a block can have */
    bool vmm;         /* allocations can be exported as file descriptors */
};

/* Retains the primary context of device `ordinal` and loads the kernels into it.
 * HDL_ENOTSUP without a driver, device or kernels for it. */
enum hdl_status gpu_device_open(struct base_env *env, int ordinal,
                                struct gpu_device *device);
void gpu_device_close(struct gpu_device *device);

/* Makes the device's context current for the calling thread; every enter has its leave.
 */
enum hdl_status gpu_enter(const struct gpu_device *device);
void gpu_leave(const struct gpu_device *device);

/* A kernel by name. */
enum hdl_status gpu_kernel(const struct gpu_device *device, const char *name,
                           struct gpu_function **function);

/* Number of devices, 0 with detail text if there is none. */
int gpu_count(void);
/* The facts about a device, without making a context. */
enum hdl_status gpu_describe(int ordinal, struct gpu_info *info);
/* Version of the driver's interface, as 1000 * major + 10 * minor; 0 = no driver. */
int gpu_driver_version(void);

#endif
