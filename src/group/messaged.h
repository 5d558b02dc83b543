/* SPDX-License-Identifier: Apache-2.0 */
/* Groups with peers that are not mapped: their part of the segment. */
#ifndef GROUP_MESSAGED_H
#define GROUP_MESSAGED_H

#include <stddef.h>
#include <stdint.h>

/* Receive memory of a rank, at shape.messaged of its segment; 0 = none. */
size_t group_messaged_bytes(uint32_t capacity, uint32_t window_chunks,
                            size_t chunk_bytes);

#endif
