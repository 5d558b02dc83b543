/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that may go past the cache. */
#ifndef BASE_COPY_H
#define BASE_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* memcpy. past_cache: with stores that neither read nor keep the lines of dst; they are
 * ordered behind earlier stores and before later ones. No alignment is needed. */
void base_copy(void *restrict dst, const void *restrict src, size_t bytes,
               bool past_cache);

/* From here on a copy to memory that another core has read before may be faster past the
 * cache: that core's cache holds the old lines, and they are taken over one by one. */
#define BASE_SHARED_BYTES ((size_t)2 * 1024)

/* Takes a line away from other cores' caches ahead of the store to it. A builtin asks
 * only for reading on most x86 targets. */
static inline void base_own_line(const void *line)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1);
#endif
}

#endif
