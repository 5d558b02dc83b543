/* SPDX-License-Identifier: Apache-2.0 */
/* The fat binaries of the kernels, built into the library; none in builds without nvcc.
 */
#ifndef GPU_KERNELS_H
#define GPU_KERNELS_H

/* Embeds a file, such as a fat binary, as the array `name`. The assembler reads it: a C
 * array of its size would take the compiler minutes. */
#define GPU_EMBED(name, file)                                                            \
    __asm__(".section .rodata\n"                                                         \
            ".balign 64\n"                                                               \
            ".hidden " #name "\n"                                                        \
            ".global " #name "\n" #name ":\n"                                            \
            ".incbin \"" file "\"\n"                                                     \
            ".balign 16\n"                                                               \
            ".text\n");                                                                  \
    extern const unsigned char name[];

enum { GPU_MAX_IMAGES = 4 };

/* One image for each .cu file; the names of its kernels begin with `prefix`. */
struct gpu_image {
    const unsigned char *image;
    const char *prefix;
};
/* The last one has no image. */
extern const struct gpu_image gpu_kernel_images[GPU_MAX_IMAGES + 1];
/* What they were compiled for, such as "sm_90 compute_90"; "" without kernels. */
extern const char gpu_kernels_architectures[];

#endif
