/* SPDX-License-Identifier: Apache-2.0 */
/* Tables and lane state in device memory, and the host's view of them. */
#include "moe/gpu_state.h"

#include <stddef.h>
#include <string.h>

/* ---------------------------------------------------------------------------- copies */

/*
 * The host's own copies go to a stream that waits for nobody, so that they reach a kernel
 * that waits. Another thread may be capturing a graph meanwhile: that forbids them unless
 * this thread says that it does not mind.
 */
static enum hdl_status begin_copies(struct moe_gpu *g, int *mode)
{
    *mode = GPU_CAPTURE_RELAXED;
    enum hdl_status s = gpu_enter(&g->device);
    if (s)
        return s;
    (void)g->device.driver->capture_mode(mode);
    return HDL_OK;
}

static enum hdl_status end_copies(struct moe_gpu *g, int error, int mode)
{
    if (!error)
        error = g->device.driver->stream_sync(g->side);
    enum hdl_status s = gpu_check(error, "copy of the exchange's state");
    (void)g->device.driver->capture_mode(&mode);
    gpu_leave(&g->device);
    return s;
}

static enum hdl_status copy_in(struct moe_gpu *g, uint64_t to, const void *from,
                               size_t bytes)
{
    int mode;
    enum hdl_status s = begin_copies(g, &mode);
    if (s)
        return s;
    return end_copies(g, g->device.driver->copy_in_async(to, from, bytes, g->side), mode);
}

/* ---------------------------------------------------------------------------- tables */

static bool is_even(const struct moe_map *m)
{
    uint32_t each = m->experts / m->ranks;
    if (m->experts % m->ranks)
        return false;
    for (uint32_t e = 0; e < m->experts; e++)
        if (m->begin[e] != e || m->holder[e] != e / each || m->local[e] != e % each)
            return false;
    return true;
}

uint32_t moe_gpu_table_slots(const struct moe_map *m)
{
    uint64_t most = (uint64_t)m->experts * m->ranks;
    return most < MOE_GPU_NO_SLOT ? (uint32_t)most : MOE_GPU_NO_SLOT - 1;
}

static size_t table_bytes(const struct moe_map *m)
{
    return sizeof(struct moe_gpu_map) + (m->experts + 1) * sizeof(uint32_t) +
           2 * (size_t)moe_gpu_table_slots(m) * sizeof(uint16_t);
}

static enum hdl_status put_tables(struct moe_gpu *g)
{
    const struct moe_map *m = &g->config->map;
    uint32_t slots = m->first[m->ranks], n = m->experts + 1;
    g->local_experts = moe_map_local_experts(m, g->rank);
    if (slots > moe_gpu_table_slots(m))
        return base_fail(HDL_ENOTSUP, "%u places of experts, kernels take %u", slots,
                         moe_gpu_table_slots(m));
    struct moe_gpu_map *map = base_alloc(g->env, 1, table_bytes(m));
    if (!map)
        return HDL_ENOMEM;
    map->local_experts = g->local_experts;
    map->slot_base = m->first[g->rank];
    map->even_experts = is_even(m) ? m->experts / m->ranks : 0;
    map->says_source = g->config->shape.dp > 1 && m->replicas > 1;
    uint32_t *table = (uint32_t *)(map + 1);
    uint16_t *slot = (uint16_t *)(table + n), *rank = slot + moe_gpu_table_slots(m);
    memcpy(table, m->begin, n * sizeof(uint32_t));
    for (uint32_t i = 0; i < slots; i++)
        slot[i] = (uint16_t)(m->first[m->holder[i]] + m->local[i]);
    for (uint32_t r = 0; r < m->ranks; r++)
        for (uint32_t i = m->first[r]; i < m->first[r + 1]; i++)
            rank[i] = (uint16_t)r;
    enum hdl_status s = copy_in(g, g->tables, map, table_bytes(m));
    base_free(g->env, map);
    return s;
}

/* ----------------------------------------------------------------------------- lanes */

/* Places of a lane's arrays behind its state. */
struct lane_places {
    uint64_t counters, sent_rows, sent_sums, own_ranks, own_places, own_weights, entries,
        bytes;
};

static size_t counters_bytes(uint32_t experts)
{
    return sizeof(struct moe_gpu_counters) +
           experts * sizeof(struct moe_gpu_expert_count);
}

static struct lane_places place_lane(const struct moe_gpu_geometry *g, uint32_t experts)
{
    struct lane_places p;
    uint64_t pairs = (uint64_t)g->ranks * g->max_tokens;
    p.counters = (sizeof(struct moe_gpu_state) + 255) / 256 * 256;
    p.sent_rows = (p.counters + counters_bytes(experts) + 255) / 256 * 256;
    p.sent_sums = p.sent_rows + g->max_tokens * 4ull;
    p.own_ranks = p.sent_sums + pairs * 4;
    uint64_t kept = g->keeps ? (uint64_t)g->max_tokens * g->top_k : 0;
    p.own_weights = p.own_ranks + g->max_tokens * 4ull;
    p.own_places = p.own_weights + kept * 4;
    p.entries = (p.own_places + kept * 2 + 255) / 256 * 256;
    p.bytes = p.entries + pairs * g->top_k * sizeof(struct moe_gpu_entry);
    p.bytes = (p.bytes + 255) / 256 * 256;
    return p;
}

static uint64_t state_at(const struct moe_gpu *g, uint32_t lane)
{
    return g->lane_memory + lane * g->lane_bytes;
}

void moe_gpu_lane_of(const struct moe_gpu *g, const struct moe_gpu_call *call,
                     struct moe_gpu_lane *out)
{
    struct lane_places p = place_lane(&g->geo, g->config->shape.experts);
    uint64_t at = state_at(g, call->lane);
    out->state = (struct moe_gpu_state *)at;
    out->counters = (struct moe_gpu_counters *)(at + p.counters);
    out->counted =
        (const uint32_t *)(at + (call->alone ? offsetof(struct moe_gpu_state, alone)
                                 : call->active
                                     ? offsetof(struct moe_gpu_state, mask)
                                     : offsetof(struct moe_gpu_state, members)));
    out->notice = (uint32_t *)&g->notice[call->lane];
    out->sent_rows = (uint32_t *)(at + p.sent_rows);
    out->sent_sums = (uint32_t *)(at + p.sent_sums);
    out->own_ranks = (uint32_t *)(at + p.own_ranks);
    out->own_places = (uint16_t *)(at + p.own_places);
    out->own_weights = (float *)(at + p.own_weights);
    out->entries = (struct moe_gpu_entry *)(at + p.entries);
}

#define PUT_STATE(g, lane, member, from)                                                 \
    copy_in(g, state_at(g, lane) + offsetof(struct moe_gpu_state, member), from,         \
            sizeof(((struct moe_gpu_state *)0)->member))

/* The number of the next step of a lane. */
static enum hdl_status set_step(struct moe_gpu *g, uint32_t lane, uint32_t step)
{
    uint32_t steps[MOE_GPU_MAX_CTAS], seen[MOE_GPU_MAX_RANKS];
    for (int i = 0; i < MOE_GPU_MAX_CTAS; i++)
        steps[i] = step;
    for (int i = 0; i < MOE_GPU_MAX_RANKS; i++)
        seen[i] = step - 1;
    enum hdl_status s = PUT_STATE(g, lane, step, steps);
    return s ? s : PUT_STATE(g, lane, seen, seen);
}

enum hdl_status moe_gpu_set_active(struct moe_gpu *g, uint32_t active)
{
    enum hdl_status s = HDL_OK;
    for (uint32_t lane = 0; !s && lane < g->config->shape.lanes; lane++)
        s = PUT_STATE(g, lane, active, &active);
    return s;
}

enum hdl_status moe_gpu_clear_error(struct moe_gpu *g, uint32_t lane)
{
    struct moe_gpu_error none = {UINT64_MAX, 0};
    g->notice[lane] = 0;
    return PUT_STATE(g, lane, error, &none);
}

static enum hdl_status copy_out(struct moe_gpu *g, void *to, uint64_t from, size_t bytes)
{
    int mode;
    enum hdl_status s = begin_copies(g, &mode);
    if (s)
        return s;
    return end_copies(g, g->device.driver->copy_out_async(to, from, bytes, g->side),
                      mode);
}

enum hdl_status moe_gpu_read_state(struct moe_gpu *g, uint32_t lane,
                                   struct moe_gpu_state *state)
{
    return copy_out(g, state, state_at(g, lane), sizeof(*state));
}

enum hdl_status moe_gpu_read_counters(struct moe_gpu *g, uint32_t lane,
                                      struct moe_gpu_counters *counters, uint32_t experts)
{
    struct lane_places p = place_lane(&g->geo, g->config->shape.experts);
    return copy_out(g, counters, state_at(g, lane) + p.counters, counters_bytes(experts));
}

/* Another map may have other experts: they are counted anew. */
static enum hdl_status forget_experts(struct moe_gpu *g, uint32_t lane)
{
    const uint32_t experts = g->config->shape.experts;
    const size_t bytes = experts * sizeof(struct moe_gpu_expert_count);
    struct lane_places p = place_lane(&g->geo, experts);
    void *none = base_alloc(g->env, 1, bytes);
    if (!none)
        return HDL_ENOMEM;
    enum hdl_status s =
        copy_in(g, state_at(g, lane) + p.counters + counters_bytes(0), none, bytes);
    base_free(g->env, none);
    return s;
}

enum hdl_status moe_gpu_begin(struct moe_gpu *g, uint32_t members, uint32_t active,
                              uint32_t generation, uint32_t step)
{
    const uint32_t alone = UINT32_C(1) << g->rank;
    enum hdl_status s = put_tables(g);
    for (uint32_t lane = 0; !s && lane < g->config->shape.lanes; lane++) {
        s = set_step(g, lane, step);
        if (!s)
            s = forget_experts(g, lane);
        if (!s)
            s = PUT_STATE(g, lane, generation, &generation);
        if (!s)
            s = PUT_STATE(g, lane, members, &members);
        if (!s)
            s = PUT_STATE(g, lane, alone, &alone);
    }
    return s ? s : moe_gpu_set_active(g, active);
}

enum hdl_status moe_gpu_buffer(struct moe_gpu *g, uint32_t lane, uint64_t *address)
{
    enum hdl_status s = HDL_OK;
    if (!g->buffer[lane])
        s = gpu_alloc(&g->device, g->config->layout.buffer_bytes, &g->buffer[lane]);
    *address = g->buffer[lane];
    return s;
}

/* ---------------------------------------------------------------------------- memory */

static enum hdl_status make_side(struct moe_gpu *g)
{
    const struct gpu_driver *cu = g->device.driver;
    void *notice = NULL;
    size_t bytes = g->config->shape.lanes * sizeof(uint32_t);
    enum hdl_status s = gpu_enter(&g->device);
    if (s)
        return s;
    s = gpu_check(cu->stream_create(&g->side, GPU_STREAM_NON_BLOCKING, 0),
                  "cuStreamCreateWithPriority");
    if (!s)
        s = gpu_check(cu->host_alloc(&notice, bytes, GPU_HOST_PORTABLE_MAPPED),
                      "cuMemHostAlloc");
    if (!s)
        memset(notice, 0, bytes);
    g->notice = notice;
    gpu_leave(&g->device);
    return s;
}

enum hdl_status moe_gpu_make_state(struct moe_gpu *g)
{
    uint32_t lanes = g->config->shape.lanes;
    uint32_t all = g->geo.ranks == 32 ? UINT32_MAX : (UINT32_C(1) << g->geo.ranks) - 1;
    enum hdl_status s = make_side(g);
    g->lane_bytes = place_lane(&g->geo, g->config->shape.experts).bytes;
    if (!s)
        s = gpu_alloc(&g->device, table_bytes(&g->config->map), &g->tables);
    if (!s)
        s = gpu_alloc(&g->device, g->lane_bytes * lanes, &g->lane_memory);
    for (uint32_t lane = 0; !s && lane < lanes; lane++)
        s = moe_gpu_clear_error(g, lane);
    return s ? s : moe_gpu_begin(g, all, all, 1, 1);
}

void moe_gpu_free_state(struct moe_gpu *g)
{
    for (int i = 0; i < MOE_MAX_LANES; i++)
        gpu_free(&g->device, g->buffer[i]);
    gpu_free(&g->device, g->lane_memory);
    gpu_free(&g->device, g->tables);
    if (gpu_enter(&g->device))
        return;
    if (g->notice)
        g->device.driver->host_free((void *)g->notice);
    if (g->side)
        g->device.driver->stream_destroy(g->side);
    gpu_leave(&g->device);
}
