/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of a MoE exchange on GPUs within one process: buffers, steps, comparison. */
#include "ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/dtype.h"
#include "moe/element.h"

enum { POISON = 0xa5, POOL = 64 };

uint64_t gpu_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

int gpu_count_apart(void)
{
    pid_t pid = fork();
    int status = 0;
    if (pid == 0)
        _exit(gpu_count());
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

static bool say(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, base_detail());
    return false;
}

void gpu_case_defaults(struct gpu_case *c)
{
    memset(c, 0, sizeof(*c));
    c->opts.size = sizeof(c->opts);
    c->opts.num_experts = 256;
    c->opts.top_k = 8;
    c->opts.hidden = 7168;
    c->opts.max_tokens = 128;
    c->opts.dtype = HDL_BF16;
    c->opts.format = HDL_MOE_FP8;
    c->opts.lanes = 1;
}

/* ------------------------------------------------------------------------- buffers */

static bool stays_on_device(const struct gpu_world *w, enum gpu_buffer_kind kind)
{
    return w->bench &&
           (kind == BUF_OUT_ROWS || kind == BUF_OUT_SCALES || kind == BUF_EXPERT_OUT);
}

static bool make_buffer(struct gpu_world *w, struct gpu_rank *r,
                        enum gpu_buffer_kind kind, size_t bytes)
{
    struct gpu_buffer *b = &r->buffer[kind];
    b->bytes = bytes;
    if (!bytes)
        return true;
    if (r->gpu && gpu_alloc(&r->gpu->device, bytes, &b->device))
        return say("buffer");
    if (stays_on_device(w, kind)) {
        enum { SMALL_NUMBERS = 0x3c };
        bool ok = !gpu_enter(&r->gpu->device) &&
                  !r->gpu->device.driver->fill(b->device, SMALL_NUMBERS, bytes, NULL) &&
                  !r->gpu->device.driver->stream_sync(NULL);
        gpu_leave(&r->gpu->device);
        return ok || say("fill");
    }
    b->host = malloc(bytes);
    b->want = malloc(bytes);
    return (b->host && b->want) || say("buffer");
}

static bool make_buffers(struct gpu_world *w, struct gpu_rank *r)
{
    const struct moe_config *c = &w->config;
    const struct moe_shape *s = &c->shape;
    size_t M = s->max_tokens, k = s->top_k, L = s->local_experts,
           rows = c->layout.out_rows;
    size_t by_rank = (size_t)s->ranks * M, S = c->layout.sources;
    size_t take = (size_t)s->hidden * s->take_elem;
    bool given = c->dtype == HDL_F8E4M3 && s->row_scales;
    return make_buffer(w, r, BUF_ROWS, M * c->row_in_bytes) &&
           make_buffer(w, r, BUF_SCALES, given ? M * s->row_scales : 0) &&
           make_buffer(w, r, BUF_IDS, M * k * 8) &&
           make_buffer(w, r, BUF_WEIGHTS, M * k * 4) &&
           make_buffer(w, r, BUF_OUT_ROWS, rows * s->hidden * s->row_elem) &&
           make_buffer(w, r, BUF_OUT_SCALES, rows * s->row_scales) &&
           make_buffer(w, r, BUF_COUNTS, L * 4) &&
           make_buffer(w, r, BUF_OFFSETS, (L + 1) * 8) &&
           make_buffer(w, r, BUF_ROW_NUMBERS, c->layout.map_entries * 8) &&
           make_buffer(w, r, BUF_SOURCE_TOKEN, rows * 4) &&
           make_buffer(w, r, BUF_RANGES, L * S * 8) &&
           make_buffer(w, r, BUF_LOCAL_IDS, by_rank * k * 4) &&
           make_buffer(w, r, BUF_OUT_WEIGHTS, by_rank * k * 4) &&
           make_buffer(w, r, BUF_SOURCE_COUNTS, S * 4) &&
           make_buffer(w, r, BUF_TOTALS, 16) &&
           make_buffer(w, r, BUF_EXPERT_OUT, c->layout.take_rows * take) &&
           make_buffer(w, r, BUF_RESULT, M * take) &&
           make_buffer(w, r, BUF_BIAS, M * take) && make_buffer(w, r, BUF_MISSING, M) &&
           make_buffer(w, r, BUF_TOKENS, 4) &&
           make_buffer(w, r, BUF_ACTIVE, s->ranks * 4);
}

static uint32_t number_from(const char *variable)
{
    const char *text = getenv(variable);
    return text ? (uint32_t)atoi(text) : 0;
}

bool gpu_world_open(struct gpu_world *w, const struct hdl_moe_opts *opts, uint32_t ranks,
                    int devices, uint32_t blocks)
{
    struct gpu_world asked = *w;
    memset(w, 0, sizeof(*w));
    w->bench = asked.bench;
    w->apart = asked.apart;
    w->only = asked.only;
    w->adopted = asked.adopted;
    w->timeout_ns = 2000000000;
    for (uint32_t i = 0; i < ranks; i++)
        w->present[i] = 1;
    base_env_init(&w->env);
    w->ranks = ranks;
    if (moe_config_init(&w->env, &w->config, opts, (int32_t)ranks))
        return say("options");
    for (uint32_t i = 0; i < ranks; i++) {
        struct gpu_rank *r = &w->rank[i];
        struct moe_gpu_opts o = {.config = &w->config,
                                 .rank = i,
                                 .device = w->apart ? 0 : (int)i % devices,
                                 .blocks = blocks,
                                 .dispatch_senders = number_from("MOE_DISPATCH_SENDERS"),
                                 .combine_senders = number_from("MOE_COMBINE_SENDERS")};
        if (w->apart && i != w->only) {
            if (!make_buffers(w, r))
                return say("rank");
            continue;
        }
        r->gpu = w->adopted;
        if ((!r->gpu && moe_gpu_create(&w->env, &o, &r->gpu)) ||
            gpu_enter(&r->gpu->device))
            return say("exchange");
        enum hdl_status s = gpu_check(
            r->gpu->device.driver->stream_create(&r->stream, GPU_STREAM_NON_BLOCKING, 0),
            "stream");
        gpu_leave(&r->gpu->device);
        if (s || !make_buffers(w, r))
            return say("rank");
    }
    for (uint32_t i = 0; !w->apart && i < ranks; i++) {
        int fd = -1;
        if (moe_gpu_export(w->rank[i].gpu, &fd))
            return say("export");
        for (uint32_t j = 0; j < ranks; j++)
            if (j != i && moe_gpu_attach(w->rank[j].gpu, i, fd))
                return say("attach");
        close(fd);
    }
    return true;
}

void gpu_world_close(struct gpu_world *w)
{
    for (uint32_t i = 0; i < w->ranks; i++) {
        struct gpu_rank *r = &w->rank[i];
        if (!r->gpu)
            continue;
        for (int k = 0; k < BUF_COUNT; k++) {
            gpu_free(&r->gpu->device, r->buffer[k].device);
            free(r->buffer[k].host);
            free(r->buffer[k].want);
        }
        free(r->ids64);
        if (r->stream && !gpu_enter(&r->gpu->device)) {
            r->gpu->device.driver->stream_destroy(r->stream);
            gpu_leave(&r->gpu->device);
        }
        if (!w->adopted)
            moe_gpu_destroy(r->gpu);
    }
    moe_config_free(&w->env, &w->config);
}

/* -------------------------------------------------------------------------- inputs */

static float random_value(uint64_t *seed, bool wide)
{
    uint64_t v = gpu_random(seed);
    float x = (float)((int)(v & 0xffff) - 0x8000) / 4096.0f;
    return wide ? ldexpf(x, (int)(v >> 16 & 31) - 16) : x;
}

static void fill_values(enum hdl_dtype dtype, unsigned char *to, size_t count,
                        uint64_t *seed, bool special, bool wide)
{
    for (size_t i = 0; i < count; i++) {
        float x = random_value(seed, wide);
        if (special && (gpu_random(seed) & 63) == 0) {
            static const float odd[] = {0.0f, -0.0f,  INFINITY, -INFINITY,
                                        NAN,  1e-30f, 3e38f};
            x = odd[gpu_random(seed) % 7];
        }
        moe_store(dtype, to, i, x);
    }
}

/* Rows out of a pool: random, but cheap for buffers of any size. */
static void fill_pooled(enum hdl_dtype dtype, unsigned char *to, size_t rows,
                        size_t hidden, uint64_t seed, bool special, bool wide)
{
    size_t bytes = hidden * base_dtype_size(dtype);
    size_t distinct = rows < POOL ? rows : POOL;
    fill_values(dtype, to, distinct * hidden, &seed, special, wide);
    for (size_t i = distinct; i < rows; i++)
        memcpy(to + i * bytes, to + (gpu_random(&seed) % distinct) * bytes, bytes);
}

static int64_t choose_expert(const struct gpu_world *w, const struct gpu_case *c,
                             uint32_t rank, uint64_t *seed)
{
    const struct moe_map *m = &w->config.map;
    uint64_t r = gpu_random(seed);
    uint32_t local = moe_map_local_experts(m, rank);
    switch (c->routing) {
    case ROUTE_HOT_EXPERT:
        return (r & 3) ? (int64_t)(r >> 8) % m->experts : 0;
    case ROUTE_HOT_RANK:
        local = moe_map_local_experts(m, 0);
        return local ? (int64_t)m->list[(r >> 8) % local] : -1;
    case ROUTE_LOCAL:
        return local ? (int64_t)m->list[m->first[rank] + (r >> 8) % local] : -1;
    case ROUTE_EMPTY:
        return -1;
    case ROUTE_MIXED:
        if ((r & 7) == 0)
            return -1;
        return (int64_t)((r >> 8) % m->experts);
    default:
        return (int64_t)((r >> 8) % m->experts);
    }
}

/* Distinct experts of a token, but for the routing that is meant to repeat them. The
 * members of a DP group choose alike. */
static void fill_ids(const struct gpu_world *w, const struct gpu_case *c, uint32_t rank,
                     int64_t *ids)
{
    uint32_t k = w->config.shape.top_k;
    uint32_t dp = w->config.shape.dp, first = rank / dp * dp;
    uint64_t seed = c->seed * UINT64_C(7919) + rank / dp;
    for (uint32_t t = 0; t < c->tokens[rank]; t++) {
        for (uint32_t j = 0; j < k; j++) {
            for (int tries = 0; tries < 64; tries++) {
                int64_t e = choose_expert(w, c, first, &seed);
                bool again = false;
                for (uint32_t i = 0; i < j; i++)
                    again |= ids[t * k + i] == e;
                ids[t * k + j] = e;
                if (!again || c->routing != ROUTE_UNIFORM)
                    break;
            }
        }
    }
}

static bool put(const struct gpu_rank *r, enum gpu_buffer_kind kind)
{
    const struct gpu_buffer *b = &r->buffer[kind];
    if (!b->host)
        return true;
    return !gpu_check(r->gpu->device.driver->copy_in(b->device, b->host, b->bytes),
                      "copy in");
}

bool gpu_world_put(const struct gpu_rank *r)
{
    bool ok = true;
    if (gpu_enter(&r->gpu->device))
        return false;
    for (int k = 0; k < BUF_COUNT; k++)
        ok = ok && put(r, k);
    /* A copy out of pageable memory may still be under way when the call returns. */
    ok = ok && !gpu_check(r->gpu->device.driver->stream_sync(NULL), "copy in");
    gpu_leave(&r->gpu->device);
    return ok;
}

static bool fill_rank(struct gpu_world *w, const struct gpu_case *c, uint32_t rank)
{
    struct gpu_rank *r = &w->rank[rank];
    struct gpu_buffer *b = r->buffer;
    const struct moe_shape *s = &w->config.shape;
    uint64_t seed = c->seed * UINT64_C(1000003), own = seed + rank * UINT64_C(131);
    seed += rank / w->config.shape.dp * UINT64_C(131);
    size_t ids = (size_t)c->tokens[rank] * s->top_k, M = s->max_tokens;
    for (int k = 0; k < BUF_COUNT; k++)
        if (b[k].host) {
            memset(b[k].host, POISON, b[k].bytes);
            memset(b[k].want, POISON, b[k].bytes);
        }
    if (w->config.opaque || w->config.dtype == HDL_F8E4M3)
        for (size_t i = 0; i < b[BUF_ROWS].bytes; i++)
            b[BUF_ROWS].host[i] = (unsigned char)gpu_random(&seed);
    else
        fill_pooled(w->config.dtype, b[BUF_ROWS].host, M, s->hidden, seed, c->special,
                    c->wide_values);
    for (size_t i = 0; i < b[BUF_SCALES].bytes; i++)
        b[BUF_SCALES].host[i] = (unsigned char)gpu_random(&seed);
    free(r->ids64);
    r->ids64 = calloc(M * s->top_k, sizeof(int64_t));
    if (!r->ids64)
        return false;
    fill_ids(w, c, rank, r->ids64);
    for (size_t i = 0; i < ids; i++) {
        if (c->ids_are_64)
            ((int64_t *)b[BUF_IDS].host)[i] = r->ids64[i];
        else
            ((int32_t *)b[BUF_IDS].host)[i] = (int32_t)r->ids64[i];
        ((float *)b[BUF_WEIGHTS].host)[i] =
            (float)(gpu_random(&seed) & 0xffff) / 65536.0f;
    }
    if (!w->config.opaque && !w->bench) {
        enum hdl_dtype t = w->config.combine_dtype;
        fill_pooled(t, b[BUF_EXPERT_OUT].host, w->config.layout.take_rows, s->hidden,
                    own + 1, false, c->wide_values);
        fill_pooled(t, b[BUF_BIAS].host, M, s->hidden, own + 2, false, false);
        fill_pooled(t, b[BUF_RESULT].host, M, s->hidden, own + 3, false, false);
        memcpy(b[BUF_RESULT].want, b[BUF_RESULT].host, b[BUF_RESULT].bytes);
    }
    *(uint32_t *)b[BUF_TOKENS].host = c->tokens[rank];
    for (uint32_t i = 0; i < w->ranks; i++)
        ((int32_t *)b[BUF_ACTIVE].host)[i] = !(c->masked[rank] >> i & 1);
    return !r->gpu || gpu_world_put(r);
}

bool gpu_world_fill(struct gpu_world *w, const struct gpu_case *c)
{
    for (uint32_t i = 0; i < w->ranks; i++)
        if (!fill_rank(w, c, i))
            return say("fill");
    return true;
}

/* --------------------------------------------------------------------------- steps */

static void *at(const struct gpu_rank *r, enum gpu_buffer_kind kind)
{
    return (void *)r->buffer[kind].device;
}

struct moe_gpu_tokens gpu_tokens_of(const struct gpu_rank *r, const struct gpu_case *c,
                                    uint32_t rank)
{
    struct moe_gpu_tokens t = {
        .rows = at(r, BUF_ROWS),
        .scales = at(r, BUF_SCALES),
        .ids = at(r, BUF_IDS),
        .weights = c->late >> rank & 1 ? NULL : at(r, BUF_WEIGHTS),
        .num_tokens_at = (c->seed & 1) ? at(r, BUF_TOKENS) : NULL,
        .num_tokens = c->tokens[rank],
        .ids_are_64 = c->ids_are_64,
    };
    return t;
}

struct moe_gpu_received gpu_received_of(const struct gpu_world *w,
                                        const struct gpu_rank *r)
{
    bool by_rank = w->config.shape.order >= MOE_RANK_MAJOR;
    struct moe_gpu_received d = {
        .rows = at(r, BUF_OUT_ROWS),
        .scales = at(r, BUF_OUT_SCALES),
        .counts = at(r, BUF_COUNTS),
        .offsets = w->config.shape.order == MOE_EXPERT_3D ? NULL : at(r, BUF_OFFSETS),
        .row_numbers = at(r, BUF_ROW_NUMBERS),
        .source_token = at(r, BUF_SOURCE_TOKEN),
        .ranges = at(r, BUF_RANGES),
        .local_ids = by_rank ? at(r, BUF_LOCAL_IDS) : NULL,
        .weights = by_rank ? at(r, BUF_OUT_WEIGHTS) : NULL,
        .source_counts = at(r, BUF_SOURCE_COUNTS),
        .totals = at(r, BUF_TOTALS),
    };
    return d;
}

struct moe_gpu_result gpu_result_of(const struct gpu_world *w, const struct gpu_rank *r,
                                    const struct gpu_case *c)
{
    struct moe_gpu_result d = {
        .expert_out = at(r, BUF_EXPERT_OUT),
        .weights = c->late >> (r - w->rank) & 1 ? at(r, BUF_WEIGHTS) : NULL,
        .rows = at(r, BUF_RESULT),
        .bias = {c->bias ? at(r, BUF_BIAS) : NULL, NULL},
        .missing = at(r, BUF_MISSING),
        .accumulate = c->accumulate,
    };
    return d;
}

bool gpu_world_phase(struct gpu_world *w, const struct gpu_case *c, uint32_t lane,
                     uint32_t phase, bool combine)
{
    for (uint32_t i = 0; i < w->ranks; i++) {
        struct gpu_rank *r = &w->rank[i];
        if (!r->gpu)
            continue;
        struct moe_gpu_call call = {.lane = lane,
                                    .phase = phase,
                                    .active = c->masked[i] ? at(r, BUF_ACTIVE) : NULL,
                                    .timeout_ns = w->timeout_ns,
                                    .stream = r->stream};
        struct moe_gpu_tokens tokens = gpu_tokens_of(r, c, i);
        struct moe_gpu_received received = gpu_received_of(w, r);
        struct moe_gpu_result result = gpu_result_of(w, r, c);
        if (combine ? moe_gpu_combine(r->gpu, &call, &result)
                    : moe_gpu_dispatch(r->gpu, &call, &tokens, &received))
            return say(combine ? "combine" : "dispatch");
    }
    for (uint32_t i = 0; c->split && i < w->ranks; i++)
        if (gpu_enter(&w->rank[i].gpu->device) ||
            gpu_check(w->rank[i].gpu->device.driver->stream_sync(w->rank[i].stream),
                      "phase"))
            return say("phase");
        else
            gpu_leave(&w->rank[i].gpu->device);
    return true;
}

bool gpu_world_fetch(struct gpu_rank *r)
{
    bool ok = !gpu_enter(&r->gpu->device) &&
              !gpu_check(r->gpu->device.driver->stream_sync(r->stream), "step");
    for (int k = BUF_OUT_ROWS; ok && k < BUF_COUNT; k++)
        if (r->buffer[k].host && k != BUF_EXPERT_OUT)
            ok = !gpu_check(r->gpu->device.driver->copy_out(r->buffer[k].host,
                                                            r->buffer[k].device,
                                                            r->buffer[k].bytes),
                            "copy out");
    gpu_leave(&r->gpu->device);
    return ok;
}

static bool run_half(struct gpu_world *w, const struct gpu_case *c, uint32_t lane,
                     bool combine)
{
    uint32_t both = MOE_GPU_SEND | MOE_GPU_RECV;
    if (combine && w->config.opaque)
        return true;
    return c->split ? gpu_world_phase(w, c, lane, MOE_GPU_SEND, combine) &&
                          gpu_world_phase(w, c, lane, MOE_GPU_RECV, combine)
                    : gpu_world_phase(w, c, lane, both, combine);
}

static bool fetch_all(struct gpu_world *w)
{
    for (uint32_t i = 0; i < w->ranks; i++)
        if (w->rank[i].gpu && !gpu_world_fetch(&w->rank[i]))
            return say("step");
    return true;
}

bool gpu_world_half(struct gpu_world *w, const struct gpu_case *c, uint32_t lane,
                    bool combine)
{
    return run_half(w, c, lane, combine) && fetch_all(w);
}

bool gpu_world_step(struct gpu_world *w, const struct gpu_case *c, uint32_t lane)
{
    return run_half(w, c, lane, false) && run_half(w, c, lane, true) && fetch_all(w);
}

/* ---------------------------------------------------------------------- comparison */

void gpu_world_expect(struct gpu_world *w, const struct gpu_case *c, uint32_t me)
{
    struct moe_reference_rank ranks[MOE_GPU_MAX_RANKS];
    int32_t active[MOE_GPU_MAX_RANKS][MOE_GPU_MAX_RANKS];
    memset(ranks, 0, sizeof(ranks));
    for (uint32_t i = 0; i < w->ranks; i++) {
        const struct gpu_buffer *b = w->rank[i].buffer;
        ranks[i].rows = b[BUF_ROWS].host;
        ranks[i].scales = b[BUF_SCALES].host;
        ranks[i].ids = w->rank[i].ids64;
        ranks[i].late = (const float *)b[BUF_WEIGHTS].host;
        ranks[i].weights = c->late >> i & 1 ? NULL : ranks[i].late;
        ranks[i].split = c->split;
        for (uint32_t j = 0; j < w->ranks; j++)
            active[i][j] = w->present[j] && !(c->masked[i] >> j & 1);
        ranks[i].tokens = c->tokens[i];
        ranks[i].active = active[i];
        ranks[i].outputs = b[BUF_EXPERT_OUT].host;
    }
    struct gpu_buffer *b = w->rank[me].buffer;
    bool by_rank = w->config.shape.order >= MOE_RANK_MAJOR;
    struct hdl_moe_received d = {
        .size = sizeof(d),
        .rows = b[BUF_OUT_ROWS].want,
        .scales = b[BUF_OUT_SCALES].want,
        .counts = (int32_t *)b[BUF_COUNTS].want,
        .offsets = w->config.shape.order == MOE_EXPERT_3D
                       ? NULL
                       : (int64_t *)b[BUF_OFFSETS].want,
        .row_numbers =
            b[BUF_ROW_NUMBERS].bytes ? (int64_t *)b[BUF_ROW_NUMBERS].want : NULL,
        .source_token = (int32_t *)b[BUF_SOURCE_TOKEN].want,
        .ranges = (int64_t *)b[BUF_RANGES].want,
        .local_ids = by_rank ? (int32_t *)b[BUF_LOCAL_IDS].want : NULL,
        .weights = by_rank ? (float *)b[BUF_OUT_WEIGHTS].want : NULL,
        .source_counts = (int32_t *)b[BUF_SOURCE_COUNTS].want,
    };
    moe_reference_dispatch(&w->config, ranks, me, &d);
    ((int64_t *)b[BUF_TOTALS].want)[0] = d.num_rows;
    ((int64_t *)b[BUF_TOTALS].want)[1] = d.num_pairs;
    struct hdl_moe_result result = {
        .size = sizeof(result),
        .rows = b[BUF_RESULT].want,
        .bias = {c->bias ? b[BUF_BIAS].host : NULL, NULL},
        .accumulate = c->accumulate,
        .missing = b[BUF_MISSING].want,
    };
    if (!w->config.opaque && !moe_reference_combine(&w->config, ranks, me, &result))
        fprintf(stderr, "no memory for the oracle\n");
}

static const char *const names[BUF_COUNT] = {
    "rows",       "scales",    "ids",         "weights",       "out rows",
    "out scales", "counts",    "offsets",     "row numbers",   "source token",
    "ranges",     "local ids", "out weights", "source counts", "totals",
    "expert out", "result",    "bias",        "missing",       "tokens",
    "active"};

/* The bits of a NaN that a sum gives depend on the processor: all of them are equal here.
 */
static void unify_nan(const struct gpu_world *w, unsigned char *rows, size_t bytes)
{
    size_t size = base_dtype_size(w->config.combine_dtype);
    for (size_t i = 0; i < bytes / size; i++) {
        float x = moe_load(w->config.combine_dtype, rows, i);
        if (x != x)
            memset(rows + i * size, 0xff, size);
    }
}

static int compare_rank(struct gpu_world *w, const struct gpu_case *c, uint32_t me,
                        enum gpu_outputs of)
{
    int bad = 0;
    gpu_world_expect(w, c, me);
    if (!w->config.opaque) {
        struct gpu_buffer *r = &w->rank[me].buffer[BUF_RESULT];
        unify_nan(w, r->host, r->bytes);
        unify_nan(w, r->want, r->bytes);
    }
    for (int k = BUF_OUT_ROWS; k < BUF_TOKENS; k++) {
        struct gpu_buffer *b = &w->rank[me].buffer[k];
        bool combined = k == BUF_RESULT || k == BUF_MISSING;
        if (!b->bytes || k == BUF_EXPERT_OUT || k == BUF_BIAS ||
            !(of & (combined ? OF_COMBINE : OF_DISPATCH)) ||
            memcmp(b->host, b->want, b->bytes) == 0)
            continue;
        size_t i = 0, n = 0;
        while (b->host[i] == b->want[i])
            i++;
        for (size_t j = i; j < b->bytes; j++)
            n += b->host[j] != b->want[j];
        fprintf(stderr,
                "rank %u: %s differ in %zu of %zu bytes, first at %zu: %02x not %02x\n",
                me, names[k], n, b->bytes, i, b->host[i], b->want[i]);
        for (size_t j = i & ~(size_t)15; getenv("MOE_SHOW") && j < i + 64 && j < b->bytes;
             j++)
            fprintf(stderr, "%02x/%02x ", b->host[j], b->want[j]);
        bad++;
    }
    return bad;
}

int gpu_world_compare(struct gpu_world *w, const struct gpu_case *c, enum gpu_outputs of)
{
    int bad = 0;
    for (uint32_t i = 0; i < w->ranks; i++)
        if (w->rank[i].gpu)
            bad += compare_rank(w, c, i, of);
    return bad;
}
