/* SPDX-License-Identifier: Apache-2.0 */
/* Compares the MoE kernels with the oracle over random shapes: moe_check [cases] [seed]
 * [only this]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ranks.h"

/* The choices of one random case. */
static uint32_t pick(uint64_t *seed, const uint32_t *from, uint32_t n)
{
    return from[gpu_random(seed) % n];
}

#define PICK(seed, ...)                                                                  \
    pick(seed, (const uint32_t[]){__VA_ARGS__},                                          \
         sizeof((const uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t))

static void random_types(struct hdl_moe_opts *o, uint64_t *seed)
{
    switch (gpu_random(seed) % 8) {
    case 0:
        o->dtype = HDL_BF16;
        o->format = HDL_MOE_PLAIN;
        break;
    case 1:
        o->dtype = HDL_F32;
        o->format = PICK(seed, HDL_MOE_PLAIN, HDL_MOE_FP8);
        break;
    case 2:
        o->dtype = HDL_F16;
        o->format = PICK(seed, HDL_MOE_PLAIN, HDL_MOE_FP8, HDL_MOE_FP8_UE8M0);
        break;
    case 3:
        o->dtype = HDL_F8E4M3;
        o->format = PICK(seed, HDL_MOE_PLAIN, HDL_MOE_FP8, HDL_MOE_FP8_UE8M0);
        break;
    case 4:
        o->dtype = HDL_U8;
        o->format = HDL_MOE_PLAIN;
        break;
    default:
        o->dtype = HDL_BF16;
        o->format = PICK(seed, HDL_MOE_FP8, HDL_MOE_FP8_POW2, HDL_MOE_FP8_UE8M0);
        break;
    }
    if (o->dtype == HDL_F8E4M3)
        o->combine_dtype = PICK(seed, HDL_BF16, HDL_F16, HDL_F32);
    if (o->dtype != HDL_U8)
        o->combine_wire = PICK(seed, HDL_MOE_WIRE_ROW, HDL_MOE_WIRE_ROW, HDL_MOE_WIRE_F32,
                               HDL_MOE_WIRE_FP8);
}

/* Every expert on one rank or several, a rank with few or none. */
static void random_map(struct gpu_case *c, uint64_t *seed)
{
    uint32_t experts = (uint32_t)c->opts.num_experts, at = 0;
    bool *held = calloc(experts, sizeof(bool));
    c->map_ids = malloc(c->ranks * experts * sizeof(int32_t));
    for (uint32_t r = 0; r < c->ranks; r++) {
        uint32_t first = at;
        for (uint32_t e = 0; e < experts; e++) {
            bool last = r == c->ranks - 1 && !held[e];
            if (!last && gpu_random(seed) % c->ranks != 0)
                continue;
            held[e] = true;
            c->map_ids[at++] = (int32_t)e;
        }
        c->map_counts[r] = (int32_t)(at - first);
    }
    free(held);
    c->opts.expert_counts = c->map_counts;
    c->opts.expert_ids = c->map_ids;
}

/* How the ranks of a case share the GPUs. */
enum placement {
    IN_PHASES,    /* on one GPU, the phases of all ranks one after the other */
    SIDE_BY_SIDE, /* on one GPU, with a few blocks each */
    CROWDED,      /* two on one GPU, with more blocks than have room at once */
    APART         /* a GPU each */
};
static const char *const placements[] = {"in phases on one GPU",
                                         "side by side on one GPU", "crowded on one GPU",
                                         "on a GPU each"};

static void random_case(struct gpu_case *c, uint64_t *seed, enum placement how,
                        uint32_t gpus)
{
    struct hdl_moe_opts *o = &c->opts;
    const char *forced = getenv("MOE_CHECK_PROTOCOL"); /* number of one, else any */
    gpu_case_defaults(c);
    c->split = how == IN_PHASES;
    c->ranks = how == APART ? gpus : how == CROWDED ? 2 : PICK(seed, 1, 2, 3, 4, 8);
    o->hidden =
        (int32_t)PICK(seed, 8, 16, 100, 128, 136, 256, 331, 512, 896, 2048, 2880, 7168);
    o->max_tokens = (int32_t)PICK(seed, 1, 2, 7, 31, 64, 128, 129, 300);
    if (o->hidden > 300 && o->max_tokens > 31)
        o->max_tokens = 31;
    o->top_k = (int32_t)PICK(seed, 1, 2, 6, 8, 9, 16, 40, 64);
    o->num_experts = (int32_t)(c->ranks * PICK(seed, 1, 2, 8, 33, 64));
    while (o->top_k > o->num_experts)
        o->top_k /= 2;
    if (o->num_experts > 32 && o->max_tokens > 31)
        o->num_experts = (int32_t)(c->ranks * 4);
    while (o->top_k > o->num_experts)
        o->top_k /= 2;
    o->protocol = PICK(seed, HDL_MOE_AUTO, HDL_MOE_LL, HDL_MOE_CHUNK, HDL_MOE_BULK);
    if (forced)
        o->protocol = (enum hdl_moe_protocol)atoi(forced);
    o->layout = PICK(seed, HDL_MOE_EXPERT_3D, HDL_MOE_EXPERT_3D, HDL_MOE_EXPERT_FLAT,
                     HDL_MOE_RANK_MAJOR, HDL_MOE_INDEXED);
    if (o->layout == HDL_MOE_EXPERT_FLAT)
        o->align = (int32_t)PICK(seed, 1, 8, 64);
    o->zero_padding = gpu_random(seed) & 1;
    random_types(o, seed);
    o->lanes = (int32_t)PICK(seed, 1, 2, 3);
    if (o->max_tokens > 64)
        o->lanes = 1;
    if ((gpu_random(seed) & 3) == 0)
        random_map(c, seed);
    uint32_t dp = PICK(seed, 1, 1, 2, 4);
    o->dp_size = c->ranks % dp == 0 ? (int32_t)dp : 1;
    if (c->map_ids && o->max_tokens > 31) /* the oracle takes too long */
        o->max_tokens = 31;
    if (o->dtype == HDL_U8 || o->layout == HDL_MOE_RANK_MAJOR)
        return;
    o->exact = (gpu_random(seed) & 3) == 0;
    o->late_weights = gpu_random(seed) & 1;
}

static void random_step(struct gpu_case *c, uint64_t *seed)
{
    c->seed = (uint32_t)gpu_random(seed);
    c->routing = (int)(gpu_random(seed) % ROUTE_KINDS);
    if (gpu_random(seed) & 1)
        c->routing = ROUTE_UNIFORM;
    c->ids_are_64 = gpu_random(seed) & 1;
    c->bias = gpu_random(seed) & 1;
    c->accumulate = (gpu_random(seed) & 3) == 0;
    c->special = (gpu_random(seed) & 3) == 0;
    c->wide_values = gpu_random(seed) & 1;
    uint32_t M = (uint32_t)c->opts.max_tokens;
    for (uint32_t r = 0; r < c->ranks; r++)
        c->tokens[r] =
            (gpu_random(seed) & 1) ? M : (uint32_t)(gpu_random(seed) % (M + 1));
    c->late = c->opts.late_weights ? (uint32_t)gpu_random(seed) : 0;
    /* A DP group has the same tokens. */
    uint32_t dp = (uint32_t)c->opts.dp_size;
    for (uint32_t r = 0; r < c->ranks; r++) {
        c->tokens[r] = c->tokens[r / dp * dp];
        c->late = (c->late & ~(1u << r)) | (c->late >> r / dp * dp & 1) << r;
    }
    bool masks = (gpu_random(seed) & (dp > 1 ? 1 : 3)) == 0;
    for (uint32_t r = 0; r < c->ranks; r++)
        c->masked[r] =
            masks ? (uint32_t)(gpu_random(seed) & gpu_random(seed)) & ~(1u << r) : 0;
}

/* All multiprocessors, or so few blocks that each does everything in turn. */
static uint32_t blocks_of(enum placement how, uint32_t number)
{
    static const uint32_t few[] = {3, 7, 12};
    return how == SIDE_BY_SIDE ? few[number % 3]
           : how == CROWDED    ? 120
           : (number % 3)      ? 0
                               : 3;
}

/* A step, or with several lanes two of them, the one inside the other. Buffers that
 * differ. */
static int run_step(struct gpu_world *w, struct gpu_case *c, int step, uint64_t *seed)
{
    uint32_t lanes = (uint32_t)c->opts.lanes, lane = (uint32_t)step % lanes;
    struct gpu_case inner = *c;
    if (lanes == 1) {
        if (!gpu_world_fill(w, c) || !gpu_world_step(w, c, 0))
            exit(1);
        return gpu_world_compare(w, c, OF_BOTH);
    }
    random_step(&inner, seed);
    if (!gpu_world_fill(w, c) || !gpu_world_half(w, c, lane, false))
        exit(1);
    int differ = gpu_world_compare(w, c, OF_DISPATCH);
    lane = (lane + 1) % lanes;
    if (!gpu_world_fill(w, &inner) || !gpu_world_step(w, &inner, lane))
        exit(1);
    differ += gpu_world_compare(w, &inner, OF_BOTH);
    lane = (lane + lanes - 1) % lanes;
    if (!gpu_world_fill(w, c) || !gpu_world_half(w, c, lane, true))
        exit(1);
    return differ + gpu_world_compare(w, c, OF_COMBINE);
}

static int run_case(uint64_t *seed, enum placement how, int gpus, uint32_t number,
                    int only)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    int bad = 0;
    random_case(&c, seed, how, (uint32_t)gpus);
    if (only >= 0 && only != (int)number) {
        for (int step = 0; step < (c.opts.lanes > 1 ? 6 : 3); step++)
            random_step(&c, seed);
        free(c.map_ids);
        free(w);
        return 0;
    }
    if (!w || !gpu_world_open(w, &c.opts, c.ranks, how == APART ? gpus : 1,
                              blocks_of(how, number)))
        exit(1);
    for (int step = 0; step < 3; step++) {
        random_step(&c, seed);
        int differ = run_step(w, &c, step, seed);
        if (differ)
            fprintf(
                stderr,
                "%s, case %u step %d: ranks %u hidden %d M %d k %d E %d layout %d "
                "align %d dtype %d format %d combine %d wire %d protocol %d routing %d "
                "special "
                "%d wide %d "
                "blocks %u dp %d map %d exact %d late %x lanes %d masked %x %x: %d "
                "buffers "
                "differ\n",
                placements[how], number, step, c.ranks, c.opts.hidden, c.opts.max_tokens,
                c.opts.top_k, c.opts.num_experts, (int)c.opts.layout, c.opts.align,
                (int)c.opts.dtype, (int)c.opts.format, (int)c.opts.combine_dtype,
                (int)c.opts.combine_wire, (int)c.opts.protocol, c.routing, c.special,
                c.wide_values, w->rank[0].gpu->blocks, c.opts.dp_size, c.map_ids != NULL,
                c.opts.exact, c.late, c.opts.lanes, c.masked[0], c.masked[1], differ);
        bad += differ != 0;
    }
    gpu_world_close(w);
    free(c.map_ids);
    free(w);
    return bad;
}

/* Of two ranks that hold the same tokens one gives weights with dispatch, the other does
 * not: both learn of it, and no sum is delivered as if it were whole. */
static int unlike_weights(void)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    int bad = 0;
    gpu_case_defaults(&c);
    c.ranks = 2;
    c.split = true;
    c.late = 2;
    c.tokens[0] = c.tokens[1] = 9;
    c.opts.hidden = 256;
    c.opts.max_tokens = 16;
    c.opts.num_experts = 8;
    c.opts.top_k = 4;
    c.opts.dp_size = 2;
    c.opts.late_weights = true;
    if (!w || !gpu_world_open(w, &c.opts, c.ranks, 1, 0) || !gpu_world_fill(w, &c) ||
        !gpu_world_step(w, &c, 0))
        exit(1);
    for (uint32_t r = 0; r < c.ranks; r++) {
        struct moe_gpu_state state;
        if (moe_gpu_read_state(w->rank[r].gpu, 0, &state))
            exit(1);
        bad += (state.error.first & 0xff) != MOE_GPU_ERR_WEIGHTS;
        for (uint32_t t = 0; t < c.tokens[r]; t++)
            bad += w->rank[r].buffer[BUF_MISSING].host[t] != 1;
    }
    gpu_world_close(w);
    free(w);
    printf("weights given unlike in a DP group: %s\n", bad ? "WRONG" : "told");
    return bad;
}

/* So many tokens and experts that they fill a block's shared memory. */
static int full_blocks(void)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    gpu_case_defaults(&c);
    c.ranks = 2;
    c.split = true;
    c.tokens[0] = c.tokens[1] = 9;
    c.opts.hidden = 16;
    c.opts.max_tokens = 4096;
    if (!w || !gpu_world_open(w, &c.opts, c.ranks, 1, 0) || !gpu_world_fill(w, &c) ||
        !gpu_world_step(w, &c, 0))
        exit(1);
    const int bad = gpu_world_compare(w, &c, OF_BOTH);
    gpu_world_close(w);
    free(w);
    printf("4096 tokens and 256 experts: %s\n", bad ? "WRONG" : "right");
    return bad != 0;
}

/* Takes the last tag of a row away from a place in rank 0's memory, as if its source had
 * been lost before all of it came. */
static void lose_row(struct gpu_world *w, uint32_t source, uint32_t token)
{
    static const uint64_t nothing;
    struct moe_gpu *g = w->rank[0].gpu;
    struct moe_gpu_state state;
    if (moe_gpu_read_state(g, 0, &state) || gpu_enter(&g->device))
        exit(1);
    uint64_t at = g->arena[0].address + (state.step[0] & 1) * g->geo.half_bytes +
                  moe_gpu_slot(&g->geo, source, token) + g->geo.row.stride - 8;
    if (gpu_check(g->device.driver->copy_in(at, &nothing, sizeof(nothing)), "copy in"))
        exit(1);
    gpu_leave(&g->device);
}

/* A row of which not all came keeps its places, with zeros, and its owner learns that its
 * sum lacks a contribution; all else is as if nothing had happened. */
static int lost_row(enum hdl_moe_protocol protocol)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    uint32_t token = 0, own = 0, bad = 0;
    gpu_case_defaults(&c);
    c.ranks = 2;
    c.split = true;
    c.tokens[0] = c.tokens[1] = 9;
    c.opts.protocol = protocol;
    c.opts.hidden = 256;
    c.opts.max_tokens = 16;
    c.opts.num_experts = 8;
    c.opts.top_k = 4;
    if (!w || !gpu_world_open(w, &c.opts, c.ranks, 1, 0) || !gpu_world_fill(w, &c))
        exit(1);
    for (; own == 0; token++)
        for (uint32_t j = 0; j < 4; j++)
            own += w->rank[1].ids64[token * 4 + j] < 4;
    token--;
    w->timeout_ns = 50000000;
    if (!gpu_world_phase(w, &c, 0, MOE_GPU_SEND, false))
        exit(1);
    lose_row(w, 1, token);
    if (!gpu_world_phase(w, &c, 0, MOE_GPU_RECV, false) ||
        !gpu_world_half(w, &c, 0, true))
        exit(1);
    const struct gpu_buffer *b = w->rank[0].buffer;
    const size_t rows = b[BUF_SOURCE_TOKEN].bytes / 4;
    for (size_t i = 0; i < rows; i++) {
        if (((int32_t *)b[BUF_SOURCE_TOKEN].host)[i] != -1)
            continue;
        own--;
        for (size_t j = 0; j < 256; j++)
            bad += b[BUF_OUT_ROWS].host[i * 256 + j] != 0;
    }
    fprintf(stderr, "expected to differ:\n");
    bad += own + (gpu_world_compare(w, &c, OF_BOTH) != 5);
    b = w->rank[1].buffer;
    for (uint32_t t = 0; t < 9; t++) {
        bool equal =
            memcmp(b[BUF_RESULT].host + t * 512, b[BUF_RESULT].want + t * 512, 512) == 0;
        bad += equal == (t == token) || b[BUF_MISSING].host[t] != (t == token);
    }
    gpu_world_close(w);
    free(w);
    printf("a row of which a part is lost, protocol %d: %s\n", (int)protocol,
           bad ? "WRONG" : "zeros and told");
    return bad != 0;
}

int main(int argc, char **argv)
{
    uint32_t cases = argc > 1 ? (uint32_t)atoi(argv[1]) : 50;
    uint64_t seed = argc > 2 ? (uint64_t)atoll(argv[2]) : 1;
    /* Ranks side by side wait for each other: none may be queued behind another. */
    (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 0);
    int only = argc > 3 ? atoi(argv[3]) : -1, gpus = gpu_count(), total = 0;
    const char *mode = getenv("MOE_CHECK_MODE"); /* number of a placement, else all */
    if (gpus == 0) {
        printf("skipped: %s\n", base_detail());
        return 77;
    }
    if (!mode || atoi(mode) == IN_PHASES)
        total += full_blocks() + unlike_weights() + lost_row(HDL_MOE_LL) +
                 lost_row(HDL_MOE_CHUNK) + lost_row(HDL_MOE_BULK);
    for (enum placement how = IN_PHASES; how <= APART; how++) {
        int bad = 0;
        if ((mode && atoi(mode) != (int)how) || (how == APART && gpus < 2))
            continue;
        for (uint32_t i = 0; i < cases && bad < 8; i++) {
            bad += run_case(&seed, how, gpus, i, only);
            if (getenv("MOE_CHECK_PROGRESS")) /* what a run that is cut off reached */
                fprintf(stderr, "%s: %u of %u cases\n", placements[how], i + 1, cases);
        }
        printf("ranks %s: %u cases, %d steps differ\n", placements[how], cases, bad);
        fflush(stdout);
        total += bad;
    }
    return total ? 1 : 0;
}
