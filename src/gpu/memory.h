/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory that other processes can map, and plain device memory. */
#ifndef GPU_MEMORY_H
#define GPU_MEMORY_H

#include "gpu/device.h"

/*
 * Memory of one device at an address range that stays reserved: what is mapped there may
 * be exchanged, so captured graphs that hold the address survive the replacement of a
 * peer.
 */
struct gpu_block {
    uint64_t address;
    size_t bytes;    /* whole granules */
    uint64_t handle; /* 0 = nothing mapped */
};

/* Reserves a range of at least `bytes` for a block without memory. */
enum hdl_status gpu_block_reserve(const struct gpu_device *device, size_t bytes,
                                  struct gpu_block *block);
/* Memory of this device, accessible from it. The error names bytes asked and free. */
enum hdl_status gpu_block_create(const struct gpu_device *device, size_t bytes,
                                 struct gpu_block *block);
/* A descriptor that another process can map; the caller closes it. */
enum hdl_status gpu_block_export(const struct gpu_device *device,
                                 const struct gpu_block *block, int *fd);
/* Maps exported memory of another process (or this one) into a reserved block; `fd` stays
 * the caller's. The block must have nothing mapped. */
enum hdl_status gpu_block_import(const struct gpu_device *device, int fd,
                                 struct gpu_block *block);
/* Takes the memory away but keeps the range. No kernel may be using it. */
void gpu_block_unmap(const struct gpu_device *device, struct gpu_block *block);
/* Gives back everything; an empty block is legal. */
void gpu_block_free(const struct gpu_device *device, struct gpu_block *block);

/* Plain device memory, zeroed. */
enum hdl_status gpu_alloc(const struct gpu_device *device, size_t bytes,
                          uint64_t *address);
void gpu_free(const struct gpu_device *device, uint64_t address);

#endif
