/* SPDX-License-Identifier: Apache-2.0 */
/* Offsets of a segment, with checked arithmetic. */
#include "group/segment.h"

#include <stdbool.h>

#include "base/checked.h"
#include "base/status.h"

enum { PAGE = 4096, WINDOW_CHUNKS_MAX = 1024 };
#define CHUNK_BYTES_MAX ((size_t)1 << 30)

bool group_area(size_t *end, size_t count, size_t size, size_t *offset)
{
    size_t bytes, next;
    if (!base_mul_size(count, size, &bytes) || !base_add_size(*end, bytes, &next) ||
        !base_align_up(next, PAGE, &next))
        return false;
    *offset = *end;
    *end = next;
    return true;
}

enum hdl_status group_shape_init(struct group_shape *shape, uint32_t capacity,
                                 uint32_t window_chunks, size_t chunk_bytes,
                                 size_t messaged_bytes)
{
    if (capacity == 0)
        return base_fail(HDL_EINVAL, "capacity 0");
    if (window_chunks < 2 || window_chunks > WINDOW_CHUNKS_MAX)
        return base_fail(HDL_EINVAL, "window_chunks (HEDDLE_SLOTS) %u is not in 2..%d",
                         window_chunks, WINDOW_CHUNKS_MAX);
    if (chunk_bytes < PAGE || chunk_bytes % PAGE != 0 || chunk_bytes > CHUNK_BYTES_MAX)
        return base_fail(
            HDL_EINVAL,
            "chunk_bytes (HEDDLE_SLOT_SIZE) %zu is not a multiple of 4096 up to "
            "%zu",
            chunk_bytes, CHUNK_BYTES_MAX);
    if (chunk_bytes / capacity < 64)
        return base_fail(HDL_EINVAL, "chunk_bytes %zu is too small for %u slots",
                         chunk_bytes, capacity);
    struct group_shape s = {.capacity = capacity,
                            .window_chunks = window_chunks,
                            .chunk_bytes = chunk_bytes,
                            .messaged_bytes = messaged_bytes};
    size_t end = PAGE;
    if (!group_area(&end, window_chunks, sizeof(struct group_slot), &s.slots) ||
        !group_area(&end, window_chunks, chunk_bytes, &s.data) ||
        !group_area(&end, window_chunks, chunk_bytes, &s.pieces) ||
        !group_area(&end, capacity, sizeof(struct group_intake), &s.intake) ||
        !group_area(&end, capacity, GROUP_CELLS * sizeof(struct group_cell), &s.cells) ||
        !group_area(&end, capacity, (size_t)GROUP_FRAGMENTS * GROUP_FRAGMENT_BYTES,
                    &s.bulk) ||
        !group_area(&end, 1, messaged_bytes, &s.messaged))
        return base_fail(HDL_EINVAL,
                         "a segment of %u slots with %u chunks of %zu is too large",
                         capacity, window_chunks, chunk_bytes);
    s.bytes = end;
    *shape = s;
    return HDL_OK;
}
