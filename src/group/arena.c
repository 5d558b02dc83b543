/* SPDX-License-Identifier: Apache-2.0 */
/* Symmetric memory of a group: one window per rank, open at all peers. */
#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "group/group.h"
#include "net/net.h"

/* What each rank tells the others: its window's packed handle. */
struct arena_note {
    uint64_t bytes;
    uint64_t status; /* of the making of the window */
    uint64_t length;
    unsigned char handle[NET_HANDLE_BYTES];
};

struct group_arena {
    struct hdl_group *group;
    struct hdl_window *window;
    struct hdl_peer_window **remote; /* [capacity] */
};

static enum hdl_status make_note(struct group_arena *arena, size_t bytes,
                                 struct arena_note *note)
{
    size_t length = NET_HANDLE_BYTES;
    struct net *net = arena->group->engine->net;
    enum hdl_status status = net_window_create(net, bytes, &arena->window);
    if (status == HDL_OK)
        net_window_set_writers(arena->window, arena->group->writers,
                               arena->group->capacity);
    if (status == HDL_OK)
        status = net_window_pack(arena->window, note->handle, &length);
    note->bytes = bytes;
    note->status = status == HDL_OK ? 0 : 1;
    note->length = length;
    return status;
}

/* Ranks that were lost have left zeros. */
static enum hdl_status open_remotes(struct group_arena *arena,
                                    const struct arena_note *notes, size_t bytes)
{
    struct hdl_group *group = arena->group;
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct arena_note *note = &notes[r];
        if (r == group->rank || note->length == 0)
            continue;
        if (note->status != 0)
            return base_fail(HDL_EPEER, "rank %u could not make its arena of %llu bytes",
                             r, (unsigned long long)note->bytes);
        if (note->bytes != bytes)
            return base_fail(HDL_ECONFIG,
                             "arena: rank %u asks for %zu bytes, rank %u for %llu",
                             group->rank, bytes, r, (unsigned long long)note->bytes);
        enum hdl_status status =
            group_open_memory(group, r, note->handle, note->length, NET_READ | NET_WRITE,
                              &arena->remote[r]);
        if (status != HDL_OK)
            return status;
    }
    return HDL_OK;
}

enum hdl_status group_agree(struct hdl_group *group, enum hdl_status own,
                            const char *what)
{
    int32_t mine = own, all = HDL_OK;
    char text[BASE_DETAIL_BYTES];
    snprintf(text, sizeof(text), "%s", base_detail());
    enum hdl_status status =
        hdl_allreduce(group, &mine, &all, 1, HDL_I32, HDL_MIN, NULL, NULL);
    if (own != HDL_OK)
        return base_fail(own, "%s", text);
    if (status < HDL_OK)
        return status;
    return all == HDL_OK ? HDL_OK
                         : base_fail(HDL_EPEER, "%s: another rank failed with %s", what,
                                     base_status_name((enum hdl_status)all));
}

enum hdl_status group_decline(struct hdl_group *group, const char *what)
{
    /* Refused for its arguments, so that the others are told. */
    enum hdl_status status = hdl_allgather(group, NULL, NULL, 1, HDL_U8, NULL, NULL);
    (void)status;
    return base_fail(HDL_ENOMEM, "%s: no memory to take part", what);
}

enum hdl_status group_told(enum hdl_status status)
{
    return status == HDL_EINVAL ? HDL_EPEER : status;
}

static enum hdl_status exchange(struct group_arena *arena, size_t bytes,
                                struct arena_note *mine, struct arena_note *notes)
{
    enum hdl_status made = make_note(arena, bytes, mine);
    enum hdl_status status =
        hdl_allgather(arena->group, mine, notes, sizeof(*mine), HDL_U8, NULL, NULL);
    if (status < 0)
        return group_told(status);
    return group_agree(
        arena->group, made != HDL_OK ? made : open_remotes(arena, notes, bytes), "arena");
}

enum hdl_status group_arena_create(struct hdl_group *group, size_t bytes,
                                   struct group_arena **out)
{
    struct base_env *env = group->engine->env;
    struct group_arena *arena = base_alloc(env, 1, sizeof(*arena));
    struct arena_note *notes =
        base_alloc(env, (size_t)group->capacity + 1, sizeof(*notes));
    enum hdl_status status;
    if (arena)
        arena->remote =
            base_alloc(env, group->capacity, sizeof(struct hdl_peer_window *));
    if (arena && arena->remote && notes) {
        arena->group = group;
        status = exchange(arena, bytes, &notes[group->capacity], notes);
    } else {
        status = group_decline(group, "arena");
    }
    base_free(env, notes);
    if (status == HDL_OK) {
        *out = arena;
        return HDL_OK;
    }
    char text[BASE_DETAIL_BYTES];
    snprintf(text, sizeof(text), "%s", base_detail());
    if (arena) {
        arena->group = group;
        group_arena_destroy(arena);
    }
    return base_fail(status, "%s", text);
}

void group_arena_destroy(struct group_arena *arena)
{
    if (!arena)
        return;
    struct base_env *env = arena->group->engine->env;
    for (uint32_t r = 0; arena->remote && r < arena->group->capacity; r++)
        net_remote_close(arena->remote[r]);
    net_window_destroy(arena->window);
    base_free(env, (void *)arena->remote);
    base_free(env, arena);
}

void *group_arena_data(const struct group_arena *arena)
{
    return net_window_data(arena->window);
}

void *group_arena_map(const struct group_arena *arena, uint32_t rank)
{
    if (rank == arena->group->rank)
        return net_window_data(arena->window);
    return arena->remote[rank] ? net_remote_map(arena->remote[rank]) : NULL;
}

struct hdl_peer_window *group_arena_remote(const struct group_arena *arena, uint32_t rank)
{
    return arena->remote[rank];
}
