/* SPDX-License-Identifier: Apache-2.0 */
/* Embeds the fat binaries that the build made of the .cu files. */
#include "gpu/kernels.h"

#include <stddef.h>

#ifdef GPU_ARCHITECTURES
#include "gpu/kernels_stamp.h"

GPU_EMBED(gpu_image_dispatch, GPU_FATBIN_DISPATCH)
GPU_EMBED(gpu_image_combine, GPU_FATBIN_COMBINE)
GPU_EMBED(gpu_image_mask, GPU_FATBIN_MASK)

const struct gpu_image gpu_kernel_images[GPU_MAX_IMAGES + 1] = {
    {gpu_image_dispatch, "moe_dispatch_"},
    {gpu_image_combine, "moe_combine_"},
    {gpu_image_mask, "moe_mask_"},
    {NULL, NULL},
};
const char gpu_kernels_architectures[] = GPU_ARCHITECTURES;

#else

const struct gpu_image gpu_kernel_images[GPU_MAX_IMAGES + 1] = {{NULL, NULL}};
const char gpu_kernels_architectures[] = "";

#endif
