/* SPDX-License-Identifier: Apache-2.0 */
/* Unguessable numbers from the kernel, and a seeded sequence for schedules and tests. */
#ifndef BASE_RANDOM_H
#define BASE_RANDOM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* HDL_ESYSTEM if the kernel gives none (never seen after boot). */
enum hdl_status base_random_bytes(void *out, size_t size);
/* Never 0, so that 0 can mean "none"; for keys and incarnations. */
enum hdl_status base_random_u64(uint64_t *out);

/* splitmix64: the next number of the sequence that `state` seeds. */
static inline uint64_t base_splitmix_next(uint64_t *state)
{
    *state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* A number from 0 to limit - 1; limit > 0. Its bias is limit / 2^64. */
static inline uint64_t base_splitmix_below(uint64_t *state, uint64_t limit)
{
    return (uint64_t)((unsigned __int128)base_splitmix_next(state) * limit >> 64);
}

#endif
