/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, tables and state that the MoE kernels need. */
#include "moe/gpu_exchange.h"

#include <stdio.h>
#include <string.h>

#include "moe/gpu_state.h"

_Static_assert(sizeof(struct moe_gpu_args) <= 4000,
               "kernel parameters are 4 KiB at most");

enum { FLAG_BYTES = 8 };

static void row_geometry(struct moe_gpu_row *row, uint64_t data, uint64_t scales,
                         uint64_t weights)
{
    row->data_bytes = (uint32_t)data;
    row->scale_bytes = (uint32_t)scales;
    row->scale_at = moe_gpu_round_up((uint32_t)data, 16);
    row->weight_at = row->scale_at + moe_gpu_round_up((uint32_t)scales, 16);
    /* The weights are kept inside one access: one warp handles them. */
    if (row->weight_at % MOE_GPU_ACCESS_DATA + weights > MOE_GPU_ACCESS_DATA)
        row->weight_at = moe_gpu_round_up(row->weight_at, MOE_GPU_ACCESS_DATA);
    row->bytes = row->weight_at + (uint32_t)weights;
    row->pairs = moe_gpu_pairs(row->bytes);
    row->stride = row->pairs * MOE_GPU_PAIR;
    row->crosses = row->stride;
}

static bool has_wire(const struct moe_config *c)
{
    return c->wire != HDL_MOE_WIRE_ROW;
}

/*
 * What AUTO means, from options that all ranks have alike: packed lines but for the most
 * bytes of dispatch to a peer from which the copy engine with flags was measured to be
 * faster (doc/design/gpu.md); contributions never were by enough.
 */
static void choose_protocols(const struct moe_config *c, struct moe_gpu_geometry *g)
{
    enum { MANY_ROWS = 7 << 19 };
    const uint64_t most = c->shape.max_tokens;
    g->row_protocol = most * g->row.bytes >= MANY_ROWS ? MOE_GPU_BULK : MOE_GPU_LL;
    g->give_protocol = MOE_GPU_LL;
    if (c->protocol != HDL_MOE_AUTO)
        g->row_protocol = g->give_protocol = (uint32_t)c->protocol;
}

/* Contributions on another wire, or with flags, are in parts, each in lines of its own:
 * see device_wire.cuh. */
static void wire_geometry(const struct moe_config *c, struct moe_gpu_geometry *g)
{
    const uint32_t hidden = c->shape.hidden;
    const bool fp8 = c->wire == HDL_MOE_WIRE_FP8;
    /* Small enough that the warps of a block share a contribution. */
    const uint32_t part_pairs = c->wire == HDL_MOE_WIRE_F32 ? 8 : 4;
    const uint32_t size =
        has_wire(c) ? (uint32_t)sizeof(float) : (uint32_t)c->shape.take_elem;
    row_geometry(&g->give, (uint64_t)hidden * c->shape.take_elem, 0, 0);
    if (c->opaque || (!has_wire(c) && g->give_protocol == MOE_GPU_LL))
        return;
    const uint32_t room = part_pairs * MOE_GPU_PAIR_DATA, group = MOE_SCALE_GROUP + 4;
    g->part_elements = fp8 ? room / group * MOE_SCALE_GROUP : room / size;
    g->part_pairs = part_pairs;
    g->parts = (hidden + g->part_elements - 1) / g->part_elements;
    const uint32_t rest = hidden - (g->parts - 1) * g->part_elements;
    const uint32_t last = fp8 ? moe_scale_groups(rest) * group : rest * size;
    const uint32_t whole =
        fp8 ? moe_scale_groups(g->part_elements) * group : g->part_elements * size;
    g->give.pairs = (g->parts - 1) * part_pairs + moe_gpu_pairs(last);
    g->give.stride = g->give.pairs * MOE_GPU_PAIR;
    g->give.crosses = g->give.stride;
    if (g->give_protocol != MOE_GPU_LL)
        g->give.crosses = (g->parts - 1) * moe_gpu_round_up(whole, 16) +
                          moe_gpu_round_up(last, 16) + g->parts * FLAG_BYTES;
}

/* Whether positions of experts matter beyond dispatch. */
static bool keeps_positions(const struct moe_config *c)
{
    return !c->opaque && c->shape.order != MOE_RANK_MAJOR &&
           (c->exact || c->shape.late_weights);
}

/* What kernels do not do, in one sentence that names the option. */
static enum hdl_status check_supported(const struct moe_config *c)
{
    const struct moe_shape *s = &c->shape;
    if (s->ranks > MOE_GPU_MAX_RANKS)
        return base_fail(HDL_ENOTSUP, "GPU kernels take %d ranks, the group has %u",
                         MOE_GPU_MAX_RANKS, s->ranks);
    if ((uint64_t)s->hidden * 4 > UINT32_MAX / 2 || s->max_tokens > 1u << 20)
        return base_fail(HDL_ENOTSUP, "GPU kernels take no hidden %u with max_tokens %u",
                         s->hidden, s->max_tokens);
    return HDL_OK;
}

enum hdl_status moe_gpu_geometry_init(const struct moe_config *c,
                                      struct moe_gpu_geometry *g)
{
    const struct moe_shape *s = &c->shape;
    memset(g, 0, sizeof(*g));
    enum hdl_status status = check_supported(c);
    if (status)
        return status;
    g->ranks = s->ranks;
    g->top_k = s->top_k;
    g->top_k_pad = moe_gpu_round_up(s->top_k, 4);
    g->max_tokens = s->max_tokens;
    g->keeps = keeps_positions(c);
    /* Holders that listen to different members of a DP group may each take an expert for
     * the replica that a position means: each member has places of its own. */
    const uint32_t apart = s->top_k * s->dp;
    g->places = g->keeps && apart > s->ranks ? apart : s->ranks;
    g->sources = c->layout.sources;
    g->token_words = (s->max_tokens + 31) / 32;
    row_geometry(&g->row, (uint64_t)s->hidden * s->row_elem, s->row_scales,
                 (uint64_t)g->top_k_pad * 4);
    choose_protocols(c, g);
    if (g->row_protocol != MOE_GPU_LL)
        g->row.crosses = g->row.bytes + FLAG_BYTES;
    wire_geometry(c, g);
    g->packets = (s->top_k + MOE_GPU_PACKET_SLOTS - 1) / MOE_GPU_PACKET_SLOTS;
    uint64_t pairs = (uint64_t)s->ranks * s->max_tokens;
    g->sign_at = 0;
    g->drop_at = (uint64_t)s->ranks * MOE_GPU_LINE;
    g->header_at = g->drop_at + (uint64_t)s->ranks * MOE_GPU_LINE;
    g->weight_packets = g->keeps && s->late_weights ? (s->top_k + 1) / 2 : 0;
    g->weight_at = g->header_at + pairs * g->packets * MOE_GPU_PACKET;
    g->slot_at =
        (g->weight_at + pairs * g->weight_packets * MOE_GPU_PACKET + 255) / 256 * 256;
    g->take_at = g->slot_at + pairs * g->row.stride;
    uint64_t takes = (uint64_t)s->max_tokens * g->places * g->give.stride;
    g->half_bytes = (g->take_at + takes + 4095) / 4096 * 4096;
    g->total_bytes = g->half_bytes * 2 * s->lanes;
    return HDL_OK;
}

enum hdl_moe_protocol moe_gpu_protocol(const struct moe_gpu *g, bool combine)
{
    return (enum hdl_moe_protocol)(combine ? g->geo.give_protocol : g->geo.row_protocol);
}

const char *moe_protocol_name(enum hdl_moe_protocol protocol)
{
    static const char *const names[] = {"auto", "LL", "CHUNK", "BULK"};
    return names[protocol];
}

/* ------------------------------------------------------------------------ kernels */

static const char *dispatch_name(const struct moe_config *c)
{
    if (!c->quantise)
        return "moe_dispatch_bytes";
    return c->dtype == HDL_F32   ? "moe_dispatch_f32"
           : c->dtype == HDL_F16 ? "moe_dispatch_f16"
                                 : "moe_dispatch_bf16";
}

static const char *combine_name(const struct moe_config *c)
{
    return c->combine_dtype == HDL_F32   ? "moe_combine_f32"
           : c->combine_dtype == HDL_F16 ? "moe_combine_f16"
                                         : "moe_combine_bf16";
}

/* A kernel that may have as much shared memory as `bytes` besides `fixed` of its own. */
static enum hdl_status find_kernel(struct moe_gpu *g, const char *base,
                                   const char *suffix, uint64_t bytes, uint64_t fixed,
                                   struct gpu_function **function)
{
    char name[64];
    (void)snprintf(name, sizeof(name), "%s%s", base, suffix);
    if (bytes + fixed > (uint64_t)g->device.shared_bytes)
        return base_fail(
            HDL_ENOTSUP,
            "%s needs %llu bytes of shared memory for max_tokens %u and %u local "
            "experts, the device has %d",
            name, (unsigned long long)(bytes + fixed), g->geo.max_tokens,
            g->local_experts, g->device.shared_bytes);
    enum hdl_status s = gpu_enter(&g->device);
    if (s)
        return s;
    s = gpu_kernel(&g->device, name, function);
    if (!s)
        s = gpu_check(g->device.driver->function_attribute(
                          *function, GPU_FUNCTION_SHARED_BYTES, (int)bytes),
                      name);
    gpu_leave(&g->device);
    return s;
}

/* `blocks` blocks as classes of tokens, and several slices for each if there are few
 * tokens. */
static void divide(uint32_t blocks, uint32_t tokens, uint32_t most_slices,
                   uint32_t *classes, uint32_t *slices)
{
    *slices = 1;
    *classes = blocks < tokens ? blocks : tokens;
    while (*slices < most_slices && *classes * *slices * 2 <= blocks)
        *slices *= 2;
}

/*
 * The plan of a launch. Where `senders` is all blocks, every block sends first and then
 * receives; so do the blocks of separate phases what these do. Else one block that
 * neither sends nor receives rows is kept for the counts.
 */
static struct moe_gpu_plan plan_work(const struct moe_gpu *g, uint32_t blocks,
                                     uint32_t senders, uint32_t give_slices,
                                     uint32_t take_slices)
{
    uint32_t tokens = g->geo.max_tokens, takers = blocks;
    struct moe_gpu_plan p = {.grid = blocks, .senders = blocks};
    if (senders < blocks - 1 && blocks > 2) {
        p.senders = senders < tokens * give_slices ? senders : tokens * give_slices;
        takers = blocks - p.senders - 1;
    }
    divide(takers, tokens, take_slices, &p.take_classes, &p.take_slices);
    divide(p.senders, tokens, give_slices, &p.give_classes, &p.give_slices);
    if (takers < blocks)
        p.grid = p.take_classes * p.take_slices + 1 + p.senders;
    return p;
}

static bool is_whole(uint32_t phase)
{
    return phase == (MOE_GPU_SEND | MOE_GPU_RECV);
}

static struct moe_gpu_plan dispatch_plan(const struct moe_gpu *g, uint32_t phase)
{
    const bool bulk = g->geo.row_protocol == MOE_GPU_BULK; /* receivers have less to do */
    uint32_t blocks = g->dispatch_blocks, tokens = g->geo.max_tokens;
    uint32_t senders = g->dispatch_senders       ? g->dispatch_senders
                       : tokens * 2 + 1 < blocks ? tokens
                                                 : blocks / (bulk ? 2 : 3);
    return plan_work(g, blocks, is_whole(phase) ? senders : blocks, 1, bulk ? 1 : 4);
}

/* Few contributions leave before the owners' waiting begins; many fill all blocks. */
static struct moe_gpu_plan combine_plan(const struct moe_gpu *g, uint32_t phase)
{
    bool few = g->geo.max_tokens <= g->blocks / 4;
    uint32_t senders = g->combine_senders ? g->combine_senders
                       : few              ? g->blocks / 2
                                          : g->blocks;
    return plan_work(g, g->blocks, is_whole(phase) ? senders : g->blocks, 8, 2);
}

/* Groups of a dispatch block's warps, one for a rank at a time, and warps in each: powers
 * of two. */
static void share_warps(const struct moe_gpu *g, uint32_t *groups, uint32_t *per_group)
{
    *groups = 1;
    while (*groups * 2 <= g->geo.ranks && *groups * 2 <= MOE_GPU_GROUPS)
        *groups *= 2;
    *per_group = g->dispatch_threads / 32 / *groups;
}

/* The same for combine, in powers of two; several warps share a contribution, so that
 * each has one part of it if that is possible. */
static void share_give(const struct moe_gpu *g, struct moe_gpu_args *a)
{
    uint32_t warps = MOE_GPU_COMBINE_THREADS / 32, slices = a->plan.give_slices;
    uint32_t accesses = a->give_accesses;
    a->groups = 1;
    while (a->groups * 2 <= g->geo.ranks && a->groups * 2 <= MOE_GPU_GROUPS &&
           accesses * a->groups * 2 <= MOE_GPU_PART_MOST * warps * slices)
        a->groups *= 2;
    a->per_group = warps / a->groups;
    a->give_share = (accesses + a->per_group * slices - 1) / (a->per_group * slices);
    uint32_t parts = (a->give_share + MOE_GPU_PART_MOST - 1) / MOE_GPU_PART_MOST;
    a->give_part = (a->give_share + parts - 1) / parts;
}

static uint64_t dispatch_shared(const struct moe_gpu *g, const struct moe_gpu_plan *p)
{
    return moe_gpu_share(&g->geo, g->dispatch_stages, g->most_experts,
                         g->config->shape.order, p)
        .bytes;
}

/* The most shared memory that any phase needs. */
static uint64_t most_shared(const struct moe_gpu *g, bool combine)
{
    uint64_t most = 0;
    for (uint32_t phase = MOE_GPU_SEND; phase <= (MOE_GPU_SEND | MOE_GPU_RECV); phase++) {
        struct moe_gpu_plan p =
            combine ? combine_plan(g, phase) : dispatch_plan(g, phase);
        uint64_t bytes =
            combine ? moe_gpu_combine_shared(&g->geo, &p) : dispatch_shared(g, &p);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/*
 * Two small blocks on a multiprocessor are faster than a large one, if both find room
 * there and the rows for several other ranks do not hold up the loads of the block beside
 * their sender. A budget counts blocks: they are spread over multiprocessors first. What
 * room is left goes to experts that an update may bring.
 */
static uint64_t fit_dispatch(struct moe_gpu *g)
{
    enum { FEW_ROWS = 128 }; /* stored into other ranks, that is */
    uint64_t room = (uint64_t)g->device.shared_bytes - MOE_GPU_DISPATCH_FIXED;
    const bool few =
        g->geo.ranks <= 2 || g->geo.max_tokens * (g->geo.ranks - 1) <= FEW_ROWS;
    const uint64_t half =
        ((uint64_t)g->device.shared_bytes + 1024) / 2 - MOE_GPU_DISPATCH_FIXED;
    g->most_experts = g->local_experts;
    g->dispatch_stages = MOE_GPU_STAGES;
    g->dispatch_blocks = g->blocks * 2;
    g->dispatch_threads = MOE_GPU_DISPATCH_THREADS / 2;
    if (few && !g->budget && most_shared(g, false) <= half) {
        room = half;
    } else {
        g->dispatch_blocks = g->blocks;
        g->dispatch_threads = MOE_GPU_DISPATCH_THREADS;
    }
    if (g->geo.row_protocol == MOE_GPU_BULK) { /* leaves room for other maps, too */
        const uint32_t experts = g->config->shape.experts;
        g->most_experts = g->local_experts * 2 < experts ? g->local_experts * 2 : experts;
        while (++g->dispatch_stages <= MOE_GPU_MOVERS + 1 &&
               most_shared(g, false) <= room)
            ;
        g->dispatch_stages--;
        g->most_experts = g->local_experts;
    }
    do
        g->most_experts++;
    while (g->most_experts <= g->config->shape.experts && most_shared(g, false) <= room);
    g->most_experts--;
    return most_shared(g, false);
}

enum hdl_status moe_gpu_takes_map(const struct moe_gpu *g, const struct moe_map *map)
{
    const uint32_t experts = moe_map_local_experts(map, g->rank);
    if (experts <= g->most_experts)
        return HDL_OK;
    return base_fail(HDL_ENOTSUP,
                     "GPU kernels of rank %u have shared memory for %u experts, the map "
                     "gives it %u",
                     g->rank, g->most_experts, experts);
}

/* Gets the kernels ready. */
static enum hdl_status fit(struct moe_gpu *g)
{
    uint64_t bytes = fit_dispatch(g);
    const bool plain = g->geo.row_protocol != MOE_GPU_LL;
    const char *name = dispatch_name(g->config);
    enum hdl_status s = find_kernel(g, name, plain ? "_plain" : "", bytes,
                                    MOE_GPU_DISPATCH_FIXED, &g->dispatch[0]);
    if (!s)
        s = find_kernel(g, name, plain ? "_plain_wide" : "_wide", bytes,
                        MOE_GPU_DISPATCH_FIXED, &g->dispatch[1]);
    if (!s)
        s = find_kernel(g, "moe_mask_begin", "", 0, 0, &g->mask[0]);
    if (!s)
        s = find_kernel(g, "moe_mask_end", "", 0, 0, &g->mask[1]);
    if (s || g->config->opaque)
        return s;
    bytes = most_shared(g, true);
    name = combine_name(g->config);
    const char *suffix[2] = {"", "_wide"};
    if (g->geo.give_protocol != MOE_GPU_LL)
        suffix[0] = suffix[1] = "_plain";
    else if (has_wire(g->config))
        suffix[0] = suffix[1] = "_wire";
    s = find_kernel(g, name, suffix[0], bytes, 0, &g->combine[0]);
    return s ? s : find_kernel(g, name, suffix[1], bytes, 0, &g->combine[1]);
}

enum hdl_status moe_gpu_create(struct base_env *env, const struct moe_gpu_opts *opts,
                               struct moe_gpu **gpu)
{
    struct moe_gpu_geometry geo;
    enum hdl_status s = moe_gpu_geometry_init(opts->config, &geo);
    if (s)
        return s;
    struct moe_gpu *g = base_alloc(env, 1, sizeof(*g));
    if (!g)
        return HDL_ENOMEM;
    g->env = env;
    g->config = opts->config;
    g->geo = geo;
    g->rank = opts->rank;
    s = gpu_device_open(env, opts->device, &g->device);
    if (s)
        goto fail;
    g->dispatch_senders = opts->dispatch_senders;
    g->combine_senders = opts->combine_senders;
    g->blocks = opts->blocks ? opts->blocks : (uint32_t)g->device.info.multiprocessors;
    if (g->blocks > MOE_GPU_MAX_CTAS / 2)
        g->blocks = MOE_GPU_MAX_CTAS / 2;
    g->budget = opts->blocks != 0;
    g->local_experts = moe_map_local_experts(&g->config->map, g->rank);
    s = moe_gpu_make_state(g);
    if (!s)
        s = fit(g);
    for (uint32_t r = 0; !s && r < geo.ranks; r++)
        s = r == g->rank ? gpu_block_create(&g->device, geo.total_bytes, &g->arena[r])
                         : gpu_block_reserve(&g->device, geo.total_bytes, &g->arena[r]);
    if (s)
        goto fail;
    s = gpu_enter(&g->device);
    if (s)
        goto fail;
    s = gpu_check(
        g->device.driver->fill(g->arena[g->rank].address, 0, geo.total_bytes, NULL),
        "cuMemsetD8Async");
    if (!s)
        s = gpu_check(g->device.driver->stream_sync(NULL), "cuStreamSynchronize");
    gpu_leave(&g->device);
    if (s)
        goto fail;
    *gpu = g;
    return HDL_OK;
fail:
    moe_gpu_destroy(g);
    return s;
}

void moe_gpu_destroy(struct moe_gpu *g)
{
    if (!g)
        return;
    if (g->device.ctx) {
        if (g->lane_memory)
            (void)moe_gpu_set_active(g, 1u << g->rank);
        (void)moe_gpu_quiesce(g);
        for (int r = 0; r < MOE_GPU_MAX_RANKS; r++)
            gpu_block_free(&g->device, &g->arena[r]);
        moe_gpu_free_state(g);
        gpu_device_close(&g->device);
    }
    base_free(g->env, g);
}

enum hdl_status moe_gpu_export(struct moe_gpu *g, int *fd)
{
    return gpu_block_export(&g->device, &g->arena[g->rank], fd);
}

enum hdl_status moe_gpu_attach(struct moe_gpu *g, uint32_t rank, int fd)
{
    if (rank >= g->geo.ranks || rank == g->rank)
        return base_fail(HDL_EINVAL, "arena of rank %u of %u for rank %u", rank,
                         g->geo.ranks, g->rank);
    gpu_block_unmap(&g->device, &g->arena[rank]);
    return gpu_block_import(&g->device, fd, &g->arena[rank]);
}

void moe_gpu_detach(struct moe_gpu *g, uint32_t rank)
{
    if (rank != g->rank)
        gpu_block_unmap(&g->device, &g->arena[rank]);
}

enum hdl_status moe_gpu_quiesce(struct moe_gpu *g)
{
    enum hdl_status s = gpu_enter(&g->device);
    if (s)
        return s;
    s = gpu_check(g->device.driver->ctx_sync(), "cuCtxSynchronize");
    gpu_leave(&g->device);
    return s;
}

/* ----------------------------------------------------------------------- launches */

static void common_args(const struct moe_gpu *g, const struct moe_gpu_call *call,
                        struct moe_gpu_args *a)
{
    const struct moe_map *m = &g->config->map;
    const struct moe_shape *s = &g->config->shape;
    memset(a, 0, sizeof(*a));
    for (uint32_t r = 0; r < g->geo.ranks; r++)
        a->base[r] = g->arena[r].address;
    a->geo = g->geo;
    moe_gpu_lane_of(g, call, &a->lane);
    a->packets_magic = moe_gpu_magic(g->geo.packets);
    a->header_parts = (s->max_tokens * g->geo.packets + 31) / 32;
    a->row_accesses = (g->geo.row.pairs + 1) / 2;
    a->give_accesses = (g->geo.give.pairs + 1) / 2;
    a->half_at[0] = g->geo.half_bytes * 2 * call->lane;
    a->half_at[1] = a->half_at[0] + g->geo.half_bytes;
    a->rank = g->rank;
    a->phase = call->phase;
    a->experts = s->experts;
    a->order = s->order;
    a->align = s->align ? s->align : 1;
    a->format = (uint32_t)g->config->format;
    a->hidden = s->hidden;
    a->exact = g->config->exact;
    a->dp = s->dp;
    a->expert_rows = g->geo.sources * s->max_tokens;
    a->timeout_ns = call->timeout_ns;
    a->map = (const struct moe_gpu_map *)g->tables;
    a->holder_first = (const uint32_t *)(a->map + 1);
    a->holder_slot = (const uint16_t *)(a->holder_first + m->experts + 1);
    a->slot_rank = a->holder_slot + moe_gpu_table_slots(m);
    a->trace = (uint64_t *)call->trace;
}

/* Rows can be moved as vectors of 16 B. */
static bool is_wide(const void *rows, uint64_t stride)
{
    return ((uintptr_t)rows | stride) % 16 == 0;
}

/* A kernel of one warp before and after a call that has a mask. */
static int launch_mask(const struct moe_gpu *g, const struct moe_gpu_args *a,
                       const struct moe_gpu_call *call, bool combine, bool end)
{
    struct moe_gpu_mask m = {a->lane.state, call->active, g->geo.ranks, g->rank, combine};
    void *params[] = {&m};
    return g->device.driver->launch(g->mask[end], 1, 1, 1, 32, 1, 1, 0, call->stream,
                                    params, NULL);
}

/* A kernel whose blocks may be scheduled before the one before it in the stream has
 * ended, for which it waits itself. */
static int launch_early(const struct moe_gpu *g, struct gpu_function *function,
                        uint32_t blocks, uint32_t threads, uint64_t shared,
                        const struct moe_gpu_call *call, void **params)
{
    struct gpu_launch_attribute early = {.id = GPU_LAUNCH_EARLY, .value = {1}};
    const struct gpu_launch l = {.grid = {blocks, 1, 1},
                                 .block = {threads, 1, 1},
                                 .shared_bytes = (unsigned)shared,
                                 .stream = call->stream,
                                 .attributes = &early,
                                 .count = 1};
    return g->device.driver->launch_ex(&l, function, params, NULL);
}

static enum hdl_status launch(const struct moe_gpu *g, bool combine, bool wide,
                              uint32_t threads, uint64_t shared, struct moe_gpu_args *a,
                              const struct moe_gpu_call *call)
{
    void *params[] = {a};
    int error = 0;
    struct gpu_function *function = combine ? g->combine[wide] : g->dispatch[wide];
    enum hdl_status s = gpu_enter(&g->device);
    if (s)
        return s;
    if (call->active)
        error = launch_mask(g, a, call, combine, false);
    if (!error)
        error = launch_early(g, function, a->plan.grid, threads, shared, call, params);
    if (!error && call->active && (call->phase & MOE_GPU_RECV))
        error = launch_mask(g, a, call, combine, true);
    s = gpu_check(error, "cuLaunchKernel");
    gpu_leave(&g->device);
    return s;
}

enum hdl_status moe_gpu_dispatch(struct moe_gpu *g, const struct moe_gpu_call *call,
                                 const struct moe_gpu_tokens *tokens,
                                 const struct moe_gpu_received *received)
{
    struct moe_gpu_args a;
    bool wide = true;
    common_args(g, call, &a);
    if (tokens && (call->phase & MOE_GPU_SEND)) {
        a.in_rows = tokens->rows;
        a.in_scales = tokens->scales;
        a.ids = tokens->ids;
        a.in_weights = tokens->weights;
        a.num_tokens_at = tokens->num_tokens_at;
        a.num_tokens = tokens->num_tokens;
        a.ids_are_64 = tokens->ids_are_64;
        a.in_scale_bytes = g->geo.row.scale_bytes;
        wide = wide && is_wide(tokens->rows, g->config->row_in_bytes);
    }
    if (received && (call->phase & MOE_GPU_RECV)) {
        a.out_rows = received->rows;
        a.out_scales = received->scales;
        a.counts = received->counts;
        a.offsets = received->offsets;
        a.row_numbers = received->row_numbers;
        a.source_token = received->source_token;
        a.ranges = received->ranges;
        a.local_ids = received->local_ids;
        a.out_weights = received->weights;
        a.source_counts = received->source_counts;
        a.totals = received->totals;
        wide = wide && is_wide(received->rows, g->geo.row.data_bytes) &&
               is_wide(received->scales, g->geo.row.scale_bytes);
        a.zero_padding = g->config->zero_padding;
    }
    struct moe_gpu_plan p = dispatch_plan(g, call->phase);
    a.plan = p;
    a.classes_magic = moe_gpu_magic(p.take_classes);
    share_warps(g, &a.groups, &a.per_group);
    a.shared = moe_gpu_share(&g->geo, g->dispatch_stages, g->most_experts, a.order, &p);
    return launch(g, false, wide, g->dispatch_threads, a.shared.bytes, &a, call);
}

enum hdl_status moe_gpu_combine(struct moe_gpu *g, const struct moe_gpu_call *call,
                                const struct moe_gpu_result *result)
{
    struct moe_gpu_args a;
    if (!g->combine[0])
        return base_fail(HDL_ENOTSUP, "combine of opaque rows");
    common_args(g, call, &a);
    a.expert_out = result->expert_out;
    a.result = result->rows;
    a.bias[0] = result->bias[0];
    a.bias[1] = result->bias[1];
    a.missing = result->missing;
    a.accumulate = result->accumulate;
    a.in_weights = result->weights;
    a.wire = (uint32_t)g->config->wire;
    bool wide = is_wide(result->expert_out, g->geo.give.data_bytes) &&
                is_wide(result->rows, 0) && is_wide(result->bias[0], 0) &&
                is_wide(result->bias[1], 0);
    a.wide = wide;
    struct moe_gpu_plan p = combine_plan(g, call->phase);
    a.plan = p;
    share_give(g, &a);
    return launch(g, true, wide, MOE_GPU_COMBINE_THREADS,
                  moe_gpu_combine_shared(&g->geo, &p), &a, call);
}
