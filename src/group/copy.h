/* SPDX-License-Identifier: Apache-2.0 */
/* Copies, optionally past the cache. */
#ifndef GROUP_COPY_H
#define GROUP_COPY_H

#include <stdbool.h>
#include <stddef.h>

/* memcpy; `stream` writes dst with stores that do not read or keep its lines in the
 * cache: for outputs that are larger than it. No alignment is needed, overlap is not
 * allowed. */
void group_copy(void *dst, const void *src, size_t bytes, bool stream);

#endif
