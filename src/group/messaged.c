/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of groups with peers that are not mapped. */
#include "group/messaged.h"

#include "group/group.h"

size_t group_messaged_bytes(uint32_t capacity, uint32_t window_chunks, size_t chunk_bytes)
{
    (void)capacity;
    (void)window_chunks;
    (void)chunk_bytes;
    return 0;
}

static enum hdl_status messaged_open(struct hdl_group *group)
{
    return base_fail(HDL_ENOTSUP, "rank %u: a peer is not mapped", group->rank);
}

const struct group_path group_path_messaged = {
    .name = "messaged",
    .messaged = true,
    .open = messaged_open,
};
