/* SPDX-License-Identifier: Apache-2.0 */
/* Compares what gpu/driver.h declares with the header of the CUDA driver; nothing runs.
 */
#include <cuda.h>
#include <stddef.h>

extern "C" {
#include "gpu/driver.h"
}

static_assert(sizeof(gpu_mem_prop) == sizeof(CUmemAllocationProp),
              "allocation properties");
static_assert(offsetof(gpu_mem_prop, handle_types) ==
                  offsetof(CUmemAllocationProp, requestedHandleTypes),
              "handle types");
static_assert(offsetof(gpu_mem_prop, location_type) ==
                  offsetof(CUmemAllocationProp, location),
              "location");
static_assert(offsetof(gpu_mem_prop, compression) ==
                  offsetof(CUmemAllocationProp, allocFlags),
              "flags");
static_assert(sizeof(gpu_mem_access) == sizeof(CUmemAccessDesc), "access");
static_assert(offsetof(gpu_mem_access, flags) == offsetof(CUmemAccessDesc, flags),
              "access flags");

static_assert(sizeof(gpu_launch) == sizeof(CUlaunchConfig), "launch");
static_assert(offsetof(gpu_launch, attributes) == offsetof(CUlaunchConfig, attrs),
              "launch attributes");
static_assert(sizeof(gpu_launch_attribute) == sizeof(CUlaunchAttribute), "attribute");
static_assert(offsetof(gpu_launch_attribute, value) == offsetof(CUlaunchAttribute, value),
              "value of an attribute");
static_assert(sizeof(gpu_ipc) == sizeof(CUipcMemHandle), "ipc");
static_assert((int)GPU_POINTER_CTX == (int)CU_POINTER_ATTRIBUTE_CONTEXT, "");
static_assert((int)GPU_POINTER_TYPE == (int)CU_POINTER_ATTRIBUTE_MEMORY_TYPE, "");
static_assert((int)GPU_POINTER_IPC ==
                  (int)CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
              "");
static_assert((int)GPU_POINTER_BASE == (int)CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, "");
static_assert((int)GPU_POINTER_SIZE == (int)CU_POINTER_ATTRIBUTE_RANGE_SIZE, "");
static_assert((int)GPU_MEMORY_DEVICE == (int)CU_MEMORYTYPE_DEVICE, "");
static_assert((int)GPU_IPC_PEER_ACCESS == (int)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, "");

static_assert((int)GPU_LAUNCH_TOGETHER == (int)CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "");
static_assert((int)GPU_LAUNCH_EARLY ==
                  (int)CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
              "");

static_assert((int)GPU_MEM_PINNED == (int)CU_MEM_ALLOCATION_TYPE_PINNED, "");
static_assert((int)GPU_LOCATION_DEVICE == (int)CU_MEM_LOCATION_TYPE_DEVICE, "");
static_assert((int)GPU_HANDLE_FD == (int)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "");
static_assert((int)GPU_ACCESS_READ_WRITE == (int)CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "");
static_assert((int)GPU_GRANULARITY_MINIMUM == (int)CU_MEM_ALLOC_GRANULARITY_MINIMUM, "");
static_assert((int)GPU_ATTR_MULTIPROCESSORS ==
                  (int)CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
              "");
static_assert((int)GPU_ATTR_MAJOR == (int)CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
              "");
static_assert((int)GPU_ATTR_MINOR == (int)CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
              "");
static_assert((int)GPU_ATTR_VMM ==
                  (int)CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
              "");
static_assert((int)GPU_ATTR_FD_HANDLES ==
                  (int)CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
              "");
static_assert((int)GPU_ATTR_SHARED_OPTIN ==
                  (int)CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
              "");
static_assert((int)GPU_FUNCTION_SHARED_BYTES ==
                  (int)CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
              "");
static_assert((int)GPU_PEER_ACCESS == (int)CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, "");
static_assert((int)GPU_PEER_NATIVE_ATOMIC ==
                  (int)CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
              "");
static_assert((int)GPU_STREAM_NON_BLOCKING == (int)CU_STREAM_NON_BLOCKING, "");
static_assert((int)GPU_EVENT_UNTIMED == (int)CU_EVENT_DISABLE_TIMING, "");
static_assert((int)GPU_CAPTURE_THREAD == (int)CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "");
static_assert((int)GPU_ERROR_NOT_READY == (int)CUDA_ERROR_NOT_READY, "");
