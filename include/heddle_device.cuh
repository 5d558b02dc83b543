/* SPDX-License-Identifier: Apache-2.0 */
/* Device functions for kernels that move bytes between GPUs of one host by themselves. */
#ifndef HEDDLE_DEVICE_CUH
#define HEDDLE_DEVICE_CUH

#include <stddef.h>
#include <stdint.h>

/*
 * A kernel needs addresses at which the memory of its peers is mapped here, of
 * hdl_window_adopt or by whatever means, and flags in the memory of each: 64-bit words,
 * zero at first, that one rank writes and that only grow. They are never cleared: round n
 * of a loop waits for n.
 *
 *   writer                                  reader
 *   hdl_device_put(peer data, ...)
 *   hdl_device_signal(peer flag, n)   --->  hdl_device_wait(own flag, n, timeout)
 *                                           reads the data
 *
 * The reader must have said that it is done with the data before they are written over:
 * by a signal in the other direction, or by the next one of its own ring or exchange.
 *
 * All threads of a block call put, signal and wait, with the same arguments; blocks are
 * apart from each other and need flags of their own. A kernel whose blocks wait for each
 * other must not have more of them than run at once. Nothing traps: wait gives up.
 */

/* Nanoseconds of the GPU's clock. */
static __device__ __forceinline__ uint64_t hdl_device_now_ns(void)
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

/* Copies bytes to a peer, or within the GPU. Done for the peer once a signal that follows
 * is seen. */
static __device__ inline void hdl_device_put(void *to, const void *from, size_t bytes)
{
    size_t done = 0;
    if ((((uintptr_t)to | (uintptr_t)from) & 15) == 0) {
        const size_t vectors = bytes / 16;
#pragma unroll 4
        for (size_t i = threadIdx.x; i < vectors; i += blockDim.x)
            ((uint4 *)to)[i] = ((const uint4 *)from)[i];
        done = vectors * 16;
    }
    for (size_t i = done + threadIdx.x; i < bytes; i += blockDim.x)
        ((unsigned char *)to)[i] = ((const unsigned char *)from)[i];
}

/* Writes `value` into a flag after all that the block has put. */
static __device__ inline void hdl_device_signal(uint64_t *flag, uint64_t value)
{
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("fence.acq_rel.sys;\n"
                     "st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag),
                     "l"(value)
                     : "memory");
}

/* Waits until a flag is at least `value`; false if it is not after `timeout_ns` (0 = none
 * is set). Then what was put before the signal may be read by the whole block. */
static __device__ inline bool hdl_device_wait(const uint64_t *flag, uint64_t value,
                                              uint64_t timeout_ns)
{
    const uint64_t until = timeout_ns ? hdl_device_now_ns() + timeout_ns : 0;
    bool came = true;
    if (threadIdx.x == 0) {
        uint64_t now;
        for (uint32_t polls = 1;; polls++) {
            asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                         : "=l"(now)
                         : "l"(flag)
                         : "memory");
            came = now >= value;
            if (came || (until && (polls & 63) == 0 && hdl_device_now_ns() > until))
                break;
        }
    }
    return __syncthreads_and(came);
}

#endif
