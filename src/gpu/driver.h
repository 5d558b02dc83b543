/* SPDX-License-Identifier: Apache-2.0 */
/* The CUDA driver, opened at run time into a table: no CUDA header and no link
 * dependency. */
#ifndef GPU_DRIVER_H
#define GPU_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The driver's own objects; what the driver calls CUcontext is a pointer to gpu_ctx here.
 */
struct gpu_ctx;
struct gpu_stream;
struct gpu_event;
struct gpu_module;
struct gpu_function;
struct gpu_graph;
struct gpu_graph_exec;

/* Layouts of the driver's interface; test/gpu/abi.cu compares them with its header. */
struct gpu_mem_prop {
    int type; /* 1 = pinned */
    int handle_types;
    int location_type; /* 1 = device */
    int location_id;
    void *windows;
    unsigned char compression;
    unsigned char rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
};

struct gpu_mem_access {
    int location_type;
    int location_id;
    int flags; /* 3 = read and write */
};

/* What the driver tells other processes of an allocation. */
struct gpu_ipc {
    unsigned char bytes[64];
};

struct gpu_launch_attribute {
    int id;
    char pad[4];
    int value[16];
};

struct gpu_launch {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    struct gpu_stream *stream;
    struct gpu_launch_attribute *attributes;
    unsigned count;
};

enum {
    GPU_MEM_PINNED = 1,
    GPU_LOCATION_DEVICE = 1,
    GPU_HANDLE_FD = 1,
    GPU_ACCESS_READ_WRITE = 3,
    GPU_GRANULARITY_MINIMUM = 0,
    GPU_ATTR_MULTIPROCESSORS = 16,
    GPU_ATTR_MAJOR = 75,
    GPU_ATTR_MINOR = 76,
    GPU_ATTR_VMM = 102,
    GPU_ATTR_FD_HANDLES = 103,
    GPU_ATTR_SHARED_OPTIN = 97,
    GPU_FUNCTION_SHARED_BYTES = 8,
    GPU_LAUNCH_TOGETHER = 2, /* cooperative: all blocks at once, or none */
    GPU_LAUNCH_EARLY = 6,    /* programmatic stream serialization */
    GPU_POINTER_CTX = 1,     /* CU_POINTER_ATTRIBUTE_* */
    GPU_POINTER_TYPE = 2,
    GPU_POINTER_IPC = 10,
    GPU_POINTER_BASE = 11,
    GPU_POINTER_SIZE = 12,
    GPU_MEMORY_DEVICE = 2,
    GPU_IPC_PEER_ACCESS = 1,
    GPU_PEER_ACCESS = 2,        /* CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED */
    GPU_PEER_NATIVE_ATOMIC = 3, /* hardware link with atomics: NVLink */
    GPU_STREAM_NON_BLOCKING = 1,
    GPU_EVENT_TIMED = 0,
    GPU_EVENT_UNTIMED = 2,
    GPU_HOST_PORTABLE_MAPPED = 3,
    GPU_CAPTURE_THREAD = 1,
    GPU_CAPTURE_RELAXED = 2,
    GPU_ERROR_NOT_READY = 600
};

struct gpu_driver {
    void *library;
#define GPU_CALL(member, symbol, args) int(*member) args;
#include "gpu/driver.def"
#undef GPU_CALL
};

/*
 * The driver, initialised; the same table for the whole process. NULL with detail text if
 * there is no driver or no device: HDL_ENOTSUP is the status to pass on. Thread-safe.
 */
const struct gpu_driver *gpu_driver_get(void);

/* Turns a driver error into HDL_EGPU (HDL_ENOMEM for lack of memory) with `what` in the
 * text. */
enum hdl_status gpu_check(int error, const char *what);

#endif
