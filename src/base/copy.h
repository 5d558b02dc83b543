/* SPDX-License-Identifier: Apache-2.0 */
/* Copies that do not displace the cache: for memory that is read elsewhere or much later.
 */
#ifndef BASE_COPY_H
#define BASE_COPY_H

#include <stddef.h>

/* Below this a plain copy is faster: what is written will be read from the cache. */
#define BASE_STREAM_BYTES ((size_t)256 * 1024)

/* Like memcpy. From BASE_STREAM_BYTES on with streaming stores, which need no read of the
 * destination; ordered before later release stores. */
void base_copy_stream(void *restrict dst, const void *restrict src, size_t bytes);
/* The same, streaming whatever the size: for callers that know that the whole transfer is
 * large though its pieces are small. */
void base_copy_stream_always(void *restrict dst, const void *restrict src, size_t bytes);
/* Name of the kernel in use: "avx512", "avx2", "plain". */
const char *base_copy_kernel(void);

#endif
