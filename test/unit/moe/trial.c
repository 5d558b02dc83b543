/* SPDX-License-Identifier: Apache-2.0 */
/* Draws exchanges, runs a rank's steps, compares every byte with the oracle. */
#include "trial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/random.h"
#include "moe/element.h"

enum { MOST_TOKENS = 129 };

static uint64_t pick(struct trial *t, uint64_t n)
{
    return base_splitmix_below(&t->seed, n);
}

/* -------------------------------------------------------------------------- drawing */

static void draw_map(struct trial *t)
{
    uint32_t experts = (uint32_t)t->opts.num_experts;
    bool held[64] = {false};
    uint32_t at = 0;
    for (uint32_t r = 0; r < t->ranks; r++) {
        t->map_counts[r] = 0;
        for (uint32_t e = 0; e < experts; e++) {
            bool last = r == t->ranks - 1 && !held[e];
            if (!last && pick(t, t->ranks) != 0)
                continue;
            held[e] = true;
            t->map_ids[at++] = (int32_t)e;
            t->map_counts[r]++;
        }
    }
    t->opts.expert_counts = t->map_counts;
    t->opts.expert_ids = t->map_ids;
}

static void draw_types(struct trial *t)
{
    static const enum hdl_dtype types[] = {HDL_BF16, HDL_BF16, HDL_F16,
                                           HDL_F32,  HDL_U8,   HDL_F8E4M3};
    struct hdl_moe_opts *o = &t->opts;
    o->dtype = types[pick(t, 6)];
    if (o->dtype != HDL_U8)
        o->format = (enum hdl_moe_format)(pick(t, 2) ? pick(t, 4) : 0);
    if (o->dtype == HDL_F8E4M3)
        o->combine_dtype = pick(t, 2) ? HDL_F16 : 0;
    o->combine_wire = (enum hdl_moe_wire)(pick(t, 2) ? pick(t, 3) : 0);
    o->layout = (enum hdl_moe_layout)pick(t, 4);
    o->exact = o->layout != HDL_MOE_RANK_MAJOR && pick(t, 4) == 0;
    o->align =
        o->layout == HDL_MOE_EXPERT_FLAT && pick(t, 2) ? (int32_t)(1 << pick(t, 8)) : 0;
    o->zero_padding = pick(t, 2);
}

/* Small in all, or large in one: all would take gigabytes. */
static void draw_sizes(struct trial *t)
{
    static const int hidden[] = {1, 7, 8, 16, 100, 127, 128, 129, 256, 300};
    static const int wide[] = {512, 2048, 2880, 4096, 5120, 7168, 8192, 16384};
    static const uint32_t many[] = {64, 128, 256, 288, 384};
    struct hdl_moe_opts *o = &t->opts;
    uint32_t experts = t->ranks * (1 + (uint32_t)pick(t, 4));
    uint64_t large = pick(t, 24);
    o->hidden = hidden[pick(t, 10)];
    o->max_tokens = 1 + (int32_t)pick(t, 12);
    if (large == 0) {
        o->max_tokens = (int32_t[]){31, 128, 129}[pick(t, 3)];
        o->hidden = 1 << pick(t, 4);
    } else if (large == 1) {
        o->hidden = wide[pick(t, 8)];
        o->max_tokens = 1 + (int32_t)pick(t, 16);
    } else if (large == 2) {
        experts = many[pick(t, 5)] / t->ranks * t->ranks;
        o->hidden = 8;
        o->max_tokens = 1 + (int32_t)pick(t, 4);
    }
    uint32_t most = experts < 9 ? experts : pick(t, 4) == 0 && experts > 32 ? 32 : 9;
    o->num_experts = (int32_t)experts;
    o->top_k = 1 + (int32_t)pick(t, most);
}

static void draw_options(struct trial *t)
{
    struct hdl_moe_opts *o = &t->opts;
    *o = (struct hdl_moe_opts){.size = sizeof(*o)};
    draw_sizes(t);
    draw_types(t);
    o->lanes = pick(t, 2) ? 0 : 1 + (int32_t)pick(t, 3);
    o->dp_size = pick(t, 4) == 0 ? 1 + (int32_t)pick(t, t->ranks) : 0;
    if (o->dp_size && t->ranks % (uint32_t)o->dp_size)
        o->dp_size = 0;
    if (o->num_experts <= 32 && pick(t, 3) == 0)
        draw_map(t);
    o->late_weights = pick(t, 3) == 0;
    t->late = o->late_weights && o->dtype != HDL_U8 && pick(t, 2);
    t->ids32 = pick(t, 2);
    t->zero_copy = pick(t, 2);
    t->num_bias = (int)pick(t, 3);
    t->accumulate = pick(t, 3) == 0;
    t->kind = (enum crowd_kind)pick(t, 3);
    t->pairs = o->lanes != 1 && pick(t, 2);
}

static void *block(size_t bytes, int fill)
{
    void *memory = malloc(bytes + 64);
    memset(memory, fill, bytes + 64);
    return memory;
}

/* Values that depend on everything, so that a wrong row or a stale one is seen. `wild`:
 * with infinities, NaN, zeros and subnormals. */
static void draw_row(struct trial *t, enum hdl_dtype dtype, void *to, size_t n, bool wild)
{
    static const float special[] = {INFINITY, -INFINITY, NAN, -0.0f, 1e-40f, -1e38f};
    for (size_t i = 0; i < n; i++) {
        uint64_t r = base_splitmix_next(&t->seed);
        if (base_dtype_size(dtype) == 1) {
            ((uint8_t *)to)[i] = (uint8_t)r;
            continue;
        }
        float x = (float)(int32_t)r / 0x1p31f;
        x = r >> 60 == 0 ? 0.0f : ldexpf(x, (int)(r >> 40 & 7) - 4);
        if (wild && r >> 56 % 32 == 0)
            x = special[(r >> 32) % 6];
        moe_store(dtype, to, i, x);
    }
}

enum routing {
    UNIFORM,
    WITH_NOTHING,
    ALL_NOTHING,
    HOT_EXPERT,
    HOT_RANK,
    LOCAL,
    REMOTE,
    ZIPF,
    GROUPED, /* experts of half of the ranks */
    DIAGONAL,
    SPREAD, /* to as many ranks as there are */
    NAMED_TWICE,
    NUM_ROUTINGS
};

/* Any expert of a rank; of all if it has none. */
static int64_t expert_of(struct trial *t, uint64_t rank)
{
    const struct moe_map *map = &t->config.map;
    uint32_t first = map->first[rank], n = map->first[rank + 1] - first;
    return n ? map->list[first + pick(t, n)] : pick(t, (uint64_t)t->opts.num_experts);
}

static int64_t draw_id(struct trial *t, enum routing routing, uint32_t rank, size_t i,
                       uint64_t hot)
{
    uint64_t experts = (uint64_t)t->opts.num_experts, k = (uint64_t)t->opts.top_k;
    uint64_t ranks = t->ranks;
    switch (routing) {
    case WITH_NOTHING:
        return pick(t, 2) ? -1 : (int64_t)pick(t, experts);
    case ALL_NOTHING:
        return -1;
    case HOT_EXPERT:
        return (int64_t)(pick(t, 2) ? hot : pick(t, experts));
    case HOT_RANK:
        return expert_of(t, pick(t, 4) ? hot % ranks : pick(t, ranks));
    case LOCAL:
        return expert_of(t, rank);
    case REMOTE:
        return expert_of(t, ranks > 1 ? (rank + 1 + pick(t, ranks - 1)) % ranks : 0);
    case ZIPF: /* 1 / n, nearly */
        return (int64_t)(pick(t, experts) * pick(t, experts) / experts);
    case GROUPED:
        return expert_of(t, (hot + pick(t, (ranks + 1) / 2)) % ranks);
    case DIAGONAL:
        return (int64_t)((experts * 64 - 1 - i / k - i % k) % experts);
    case SPREAD:
        return expert_of(t, (rank + i % k) % ranks);
    default:
        return (int64_t)pick(t, experts);
    }
}

/* All powers of two (each contribution shows in the bits), any, or one that is tiny. */
static float draw_weight(struct trial *t, uint64_t style)
{
    if (style == 0)
        return ldexpf(1.0f, (int)pick(t, 8) - 6);
    float weight = (float)(1 + pick(t, 1000)) / 1024.0f;
    return style == 1 && pick(t, 8) == 0 ? weight * 0x1p-20f : weight;
}

static void draw_ids(struct trial *t, struct input *in, uint32_t rank, size_t tokens)
{
    uint64_t k = (uint64_t)t->opts.top_k, hot = pick(t, (uint64_t)t->opts.num_experts);
    uint64_t weights = pick(t, 3);
    enum routing routing = (enum routing)pick(t, NUM_ROUTINGS);
    for (size_t i = 0; i < tokens * k; i++) {
        bool twice = routing == NAMED_TWICE && i % k > 0 && pick(t, 4) == 0;
        in->ids[i] = twice ? in->ids[i - 1] : draw_id(t, routing, rank, i, hot);
        in->ids32[i] = (int32_t)in->ids[i];
        in->weights[i] = draw_weight(t, weights);
    }
}

static void draw_input(struct trial *t, int step, uint32_t rank)
{
    const struct moe_config *c = &t->config;
    struct input *in = &t->inputs[step][rank];
    struct moe_reference_rank *r = &t->ranks_of[step][rank];
    size_t m = c->shape.max_tokens, h = c->shape.hidden, tokens = pick(t, m + 1);
    if (pick(t, 4) == 0)
        tokens = m;
    in->memory = block(m * c->row_in_bytes, 0xff);
    in->rows =
        (uint8_t *)in->memory + base_dtype_size(c->dtype); /* aligned to an element */
    draw_row(t, c->dtype, in->rows, m * h, pick(t, 4) == 0);
    in->scales = block(m * c->shape.row_scales, 0xff);
    for (size_t i = 0; i < m * c->shape.row_scales; i++)
        in->scales[i] = (uint8_t)pick(t, 256);
    in->ids = block(m * c->shape.top_k * 8, 0);
    in->ids32 = block(m * c->shape.top_k * 4, 0);
    in->weights = block(m * c->shape.top_k * 4, 0);
    draw_ids(t, in, rank, tokens);
    size_t out = c->layout.take_rows * h;
    in->outputs = block(out * 4, 0);
    draw_row(t, c->combine_dtype, in->outputs, out, false);
    for (int b = 0; b < 2; b++) {
        in->bias[b] = block(m * h * 4, 0);
        draw_row(t, c->combine_dtype, in->bias[b], m * h, false);
    }
    in->old = block(m * h * 4, 0);
    draw_row(t, c->combine_dtype, in->old, m * h, false);
    *r = (struct moe_reference_rank){.rows = in->rows,
                                     .scales = in->scales,
                                     .ids = in->ids,
                                     .weights = t->late || c->opaque ? NULL : in->weights,
                                     .late = t->late ? in->weights : NULL,
                                     .tokens = (int64_t)tokens,
                                     .outputs = in->outputs,
                                     .split = t->split[step][rank]};
    if (c->opaque)
        r->weights = in->weights;
}

/* The members of a DP group hold the same tokens. */
static void copy_group(struct trial *t, int step, uint32_t rank)
{
    const struct moe_config *c = &t->config;
    uint32_t first = rank - rank % c->shape.dp;
    struct moe_reference_rank *own = &t->ranks_of[step][rank];
    const struct moe_reference_rank *other = &t->ranks_of[step][first];
    struct input *to = &t->inputs[step][rank];
    const struct input *from = &t->inputs[step][first];
    size_t entries = c->shape.max_tokens * (size_t)c->shape.top_k;
    if (first == rank)
        return;
    memcpy(to->rows, from->rows, c->shape.max_tokens * c->row_in_bytes);
    memcpy(to->scales, from->scales, c->shape.max_tokens * (size_t)c->shape.row_scales);
    memcpy(to->ids, from->ids, entries * 8);
    memcpy(to->ids32, from->ids32, entries * 4);
    memcpy(to->weights, from->weights, entries * 4);
    own->tokens = other->tokens;
}

/* Everybody masks the same ranks among the others, or each has a mask of its own. */
static void draw_masks(struct trial *t, int step)
{
    uint64_t out = pick(t, UINT64_C(1) << t->ranks);
    bool own = pick(t, 2);
    t->masked[step] = pick(t, 4) == 0;
    for (uint32_t r = 0; r < t->ranks; r++) {
        if (own)
            out = pick(t, UINT64_C(1) << t->ranks);
        for (uint32_t p = 0; p < t->ranks; p++)
            t->active[step][r][p] = p == r || (out >> p & 1) == 0;
        if (t->masked[step])
            t->ranks_of[step][r].active = t->active[step][r];
    }
}

/* Who calls the phases apart: nobody, all, or any. */
static void draw_phases(struct trial *t, int step)
{
    uint64_t bits = pick(t, 3) ? (pick(t, 2) ? UINT64_MAX : 0) : pick(t, UINT64_MAX);
    for (uint32_t r = 0; r < t->ranks; r++)
        t->split[step][r] = bits >> r & 1;
}

/* Inputs of all steps for options that are set. */
bool trial_draw_steps(struct trial *t)
{
    struct base_env env;
    base_env_init(&env);
    if (moe_config_init(&env, &t->config, &t->opts, (int32_t)t->ranks) != HDL_OK)
        return false;
    for (int s = 0; s < TRIAL_STEPS; s++) {
        draw_phases(t, s);
        for (uint32_t r = 0; r < t->ranks; r++)
            draw_input(t, s, r);
        for (uint32_t r = 0; r < t->ranks; r++)
            copy_group(t, s, r);
        draw_masks(t, s);
    }
    return true;
}

bool trial_draw_for(struct trial *t, uint64_t seed, uint32_t ranks)
{
    memset(t, 0, sizeof(*t));
    t->seed = seed;
    t->ranks = ranks ? ranks : 1 + (uint32_t)pick(t, 8);
    draw_options(t);
    return trial_draw_steps(t);
}

bool trial_draw(struct trial *t, uint64_t seed)
{
    return trial_draw_for(t, seed, 0);
}

const uint32_t trial_ranks[TRIAL_NUM_RANKS] = {1, 2, 3, 5, 6, 7, 8, 17, 18};

enum { NUM_TOP_K = 8, NUM_HIDDEN = 12, NUM_SIZES = 3 * NUM_TOP_K, NUM_TYPES = 4 };

/* Number `n` of all, also of those that do not go together: false. */
static bool set_shape(struct hdl_moe_opts *o, uint32_t ranks, int n)
{
    static const int top_k[NUM_TOP_K] = {1, 2, 8, 9, 16, 32, 33, 64}, times[] = {1, 2, 7};
    static const int hidden[NUM_HIDDEN] = {1,   7,   16,  100,  127,  128,
                                           129, 130, 256, 1000, 2880, 7168};
    static const enum hdl_moe_format format[NUM_TYPES] = {HDL_MOE_PLAIN, HDL_MOE_PLAIN,
                                                          HDL_MOE_FP8, HDL_MOE_FP8_UE8M0};
    bool sizes = n < NUM_SIZES;
    int type = (n - NUM_SIZES) % NUM_TYPES;
    *o = (struct hdl_moe_opts){.size = sizeof(*o),
                               .num_experts =
                                   (int)ranks * times[sizes ? n / NUM_TOP_K : 1],
                               .top_k = top_k[sizes ? n % NUM_TOP_K : 1],
                               .hidden = sizes ? 8 : hidden[(n - NUM_SIZES) / NUM_TYPES],
                               .max_tokens = 3,
                               .dtype = !sizes && type % 2 ? HDL_F32 : HDL_BF16,
                               .format = sizes ? HDL_MOE_PLAIN : format[type]};
    return sizes ? o->top_k <= o->num_experts : ranks == 2;
}

bool trial_draw_shape(struct trial *t, uint32_t ranks, int i)
{
    struct hdl_moe_opts opts;
    int n = 0;
    for (; n < NUM_SIZES + NUM_HIDDEN * NUM_TYPES; n++) {
        if (set_shape(&opts, ranks, n) && i-- == 0)
            break;
    }
    if (i >= 0)
        return false;
    memset(t, 0, sizeof(*t));
    t->seed = ranks * 1000u + (uint64_t)n;
    t->ranks = ranks;
    t->kind = (enum crowd_kind)(n % 3);
    t->opts = opts;
    t->opts.layout = (enum hdl_moe_layout)(n / 2 % 4);
    return trial_draw_steps(t);
}

/* -------------------------------------------------------------------------- running */

struct outputs {
    struct hdl_moe_received r;
    size_t rows, scales, tokens, ranges, ids;
};

static void make_outputs(const struct moe_config *c, uint32_t local, struct outputs *o)
{
    size_t n = c->layout.out_rows + 1, k = c->shape.top_k;
    o->rows = n * c->shape.hidden * c->shape.row_elem;
    o->scales = n * c->shape.row_scales;
    o->tokens = n * 4;
    o->ranges = (local + 1) * c->layout.sources * 8;
    o->ids = n * k * 4;
    o->r = (struct hdl_moe_received){.size = sizeof(o->r),
                                     .rows = block(o->rows, 0xff),
                                     .scales = block(o->scales, 0xff),
                                     .counts = block((local + 1) * 4, 0xff),
                                     .offsets = block((local + 2) * 8, 0xff),
                                     .row_numbers =
                                         block((c->layout.map_entries + 1) * 8, 0xff),
                                     .source_token = block(o->tokens, 0xff),
                                     .ranges = block(o->ranges, 0xff),
                                     .local_ids = block(o->ids, 0xff),
                                     .weights = block(o->ids, 0xff),
                                     .source_counts = block(c->layout.sources * 4, 0xff)};
}

static void drop_outputs(struct outputs *o)
{
    void *all[] = {o->r.rows,        o->r.scales,       o->r.counts, o->r.offsets,
                   o->r.row_numbers, o->r.source_token, o->r.ranges, o->r.local_ids,
                   o->r.weights,     o->r.source_counts};
    for (size_t i = 0; i < 10; i++)
        free(all[i]);
}

static void differ(struct trial *t, const char *what, int step, uint32_t rank)
{
    atomic_fetch_add(&t->failures, 1);
    fprintf(stderr, "step %d rank %u: %s differs\n", step, rank, what);
}

struct origin {
    int step;
    uint32_t rank;
    int64_t token;
};

/* An input row as dispatch delivers it. */
static const uint8_t *delivered(const struct trial *t, struct origin o, uint8_t *row,
                                uint8_t *scales)
{
    const struct moe_config *c = &t->config;
    const struct moe_reference_rank *in = &t->ranks_of[o.step][o.rank];
    const uint8_t *from = (const uint8_t *)in->rows + (size_t)o.token * c->row_in_bytes;
    if (c->quantise)
        moe_reference_quantise(c->format, c->dtype, from, c->shape.hidden, row, scales);
    else if (c->shape.row_scales)
        memcpy(scales,
               (const uint8_t *)in->scales + (size_t)o.token * c->shape.row_scales,
               c->shape.row_scales);
    return c->quantise ? row : from;
}

/* The input row that has these bytes from `at` on; false: none. */
static bool find_row(const struct trial *t, const uint8_t *part, size_t at, size_t n,
                     struct origin *o)
{
    static _Thread_local uint8_t row[1 << 15], scales[1 << 10];
    for (o->step = 0; o->step < TRIAL_STEPS; o->step++)
        for (o->rank = 0; o->rank < t->ranks; o->rank++)
            for (o->token = 0; o->token < t->ranks_of[o->step][o->rank].tokens;
                 o->token++)
                if (memcmp(delivered(t, *o, row, scales) + at, part, n) == 0)
                    return true;
    return false;
}

void trial_explain(const struct trial *t, const uint8_t *row, const uint8_t *scales,
                   char *text, size_t size)
{
    static _Thread_local uint8_t own_row[1 << 15], own_scales[1 << 10];
    const struct moe_shape *s = &t->config.shape;
    size_t bytes = (size_t)s->hidden * s->row_elem, n = bytes < 16 ? bytes : 16;
    struct origin a, b;
    bool begins = find_row(t, row, 0, n, &a);
    bool ends = find_row(t, row + bytes - n, bytes - n, n, &b);
    if (!begins && !ends)
        snprintf(text, size, "bytes of no row");
    else if (!begins || !ends || memcmp(&a, &b, sizeof(a)) != 0)
        snprintf(text, size, "a torn row");
    else
        snprintf(text, size, "token %d of rank %u of step %d", (int)a.token, a.rank,
                 a.step);
    if (!begins || !ends || !s->row_scales)
        return;
    delivered(t, a, own_row, own_scales);
    if (memcmp(own_scales, scales, s->row_scales) != 0)
        snprintf(text + strlen(text), size - strlen(text), " with the scales of another");
}

/* The first delivered row that differs, as names. */
static void explain_rows(const struct trial *t, const struct outputs *a,
                         const struct outputs *b)
{
    const struct moe_shape *s = &t->config.shape;
    size_t bytes = (size_t)s->hidden * s->row_elem, scales = s->row_scales;
    for (size_t i = 0; i < t->config.layout.out_rows; i++) {
        const uint8_t *got = (const uint8_t *)a->r.rows + i * bytes;
        const uint8_t *wanted = (const uint8_t *)b->r.rows + i * bytes;
        const uint8_t *got_scales = (const uint8_t *)a->r.scales + i * scales;
        const uint8_t *wanted_scales = (const uint8_t *)b->r.scales + i * scales;
        char text[2][128];
        if (memcmp(got, wanted, bytes) == 0 &&
            memcmp(got_scales, wanted_scales, scales) == 0)
            continue;
        trial_explain(t, got, got_scales, text[0], sizeof(text[0]));
        trial_explain(t, wanted, wanted_scales, text[1], sizeof(text[1]));
        fprintf(stderr, "row %zu is %s, not %s\n", i, text[0], text[1]);
        return;
    }
}

static void compare_received(struct trial *t, int step, uint32_t rank, uint32_t local,
                             struct outputs *a, struct outputs *b)
{
    const struct moe_config *c = &t->config;
    struct {
        const char *name;
        const void *a, *b;
        size_t bytes;
    } parts[] = {
        {"rows", a->r.rows, b->r.rows, a->rows},
        {"scales", a->r.scales, b->r.scales, a->scales},
        {"counts", a->r.counts, b->r.counts, (local + 1) * 4},
        {"offsets", a->r.offsets, b->r.offsets, (local + 2) * 8},
        {"row numbers", a->r.row_numbers, b->r.row_numbers,
         (c->layout.map_entries + 1) * 8},
        {"source tokens", a->r.source_token, b->r.source_token, a->tokens},
        {"ranges", a->r.ranges, b->r.ranges, a->ranges},
        {"local ids", a->r.local_ids, b->r.local_ids, a->ids},
        {"weights", a->r.weights, b->r.weights, a->ids},
        {"source counts", a->r.source_counts, b->r.source_counts, c->layout.sources * 4},
        {"number of rows", &a->r.num_rows, &b->r.num_rows, 8},
        {"number of pairs", &a->r.num_pairs, &b->r.num_pairs, 8},
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (memcmp(parts[i].a, parts[i].b, parts[i].bytes) != 0)
            differ(t, parts[i].name, step, rank);
    }
    explain_rows(t, a, b);
}

struct open_step {
    struct hdl_moe_handle handle;
    struct outputs got;
    enum hdl_status status;
    int32_t active[CROWD_MOST];
    struct hdl_moe_call call;
};

static void send(struct trial *t, struct crowd_rank *self, int step, struct open_step *o)
{
    struct moe_reference_rank *in = &t->ranks_of[step][self->rank];
    struct hdl_moe_tokens tokens = {
        .size = sizeof(tokens),
        .rows = in->rows,
        .scales = t->config.quantise || !t->config.shape.row_scales ? NULL : in->scales,
        .topk_ids = t->ids32 ? (const void *)t->inputs[step][self->rank].ids32 : in->ids,
        .weights = t->late ? NULL : in->weights,
        .num_tokens = in->tokens,
        .ids_are_64 = !t->ids32};
    make_outputs(&t->config, self->moe->local, &o->got);
    memcpy(o->active, t->active[step][self->rank], sizeof(o->active));
    o->call = (struct hdl_moe_call){.size = sizeof(o->call),
                                    .active = t->masked[step] ? o->active : NULL};
    if (t->split[step][self->rank])
        o->status = hdl_moe_dispatch_send(self->moe, &tokens, &o->call, &o->handle);
    else
        o->status = hdl_moe_dispatch(self->moe, &tokens, &o->got.r, &o->call, &o->handle);
}

static void receive(struct trial *t, struct crowd_rank *self, int step,
                    struct open_step *o)
{
    struct outputs wanted;
    if (t->split[step][self->rank] && o->status == HDL_OK)
        o->status = hdl_moe_dispatch_recv(self->moe, &o->handle, &o->got.r, &o->call);
    crowd_flush(self);
    if (o->status != HDL_OK) {
        differ(t, hdl_error_detail(), step, self->rank);
    } else {
        make_outputs(&t->config, self->moe->local, &wanted);
        moe_reference_dispatch(&t->config, t->ranks_of[step], self->rank, &wanted.r);
        compare_received(t, step, self->rank, self->moe->local, &o->got, &wanted);
        drop_outputs(&wanted);
    }
    drop_outputs(&o->got);
}

static void compare_sums(struct trial *t, int step, uint32_t rank, const uint8_t *a,
                         const uint8_t *b)
{
    const struct moe_config *c = &t->config;
    for (size_t i = 0; i < c->shape.max_tokens * (size_t)c->shape.hidden; i++) {
        float x = moe_load(c->combine_dtype, a, i), y = moe_load(c->combine_dtype, b, i);
        if (base_float_bits(x) != base_float_bits(y)) {
            fprintf(stderr, "element %zu: %g, not %g\n", i, (double)x, (double)y);
            differ(t, "sum", step, rank);
            return;
        }
    }
}

static enum hdl_status call_combine(struct trial *t, struct crowd_rank *self, int step,
                                    struct open_step *o, struct hdl_moe_result *result)
{
    struct moe_reference_rank *in = &t->ranks_of[step][self->rank];
    struct hdl_moe_outputs outputs = {
        .size = sizeof(outputs), .rows = in->outputs, .weights = in->late};
    void *buffer;
    if (t->zero_copy) {
        if (hdl_moe_next_combine_buffer(self->moe, &o->handle, &buffer) != HDL_OK)
            return HDL_EINTERNAL;
        memcpy(buffer, in->outputs, t->config.layout.buffer_bytes);
        outputs.rows = buffer;
    }
    if (!t->split[step][self->rank])
        return hdl_moe_combine(self->moe, &o->handle, &outputs, result, &o->call);
    enum hdl_status status =
        hdl_moe_combine_send(self->moe, &o->handle, &outputs, &o->call);
    if (status != HDL_OK)
        return status;
    return hdl_moe_combine_recv(self->moe, &o->handle, result, &o->call);
}

static void combine(struct trial *t, struct crowd_rank *self, int step,
                    struct open_step *o)
{
    const struct moe_config *c = &t->config;
    struct input *in = &t->inputs[step][self->rank];
    size_t bytes = c->shape.max_tokens * (size_t)c->shape.hidden * 4;
    uint8_t *got = block(bytes, 0), *wanted = block(bytes, 0);
    uint8_t missing[2][MOST_TOKENS] = {{0}};
    struct hdl_moe_result r = {.size = sizeof(r),
                               .rows = got,
                               .accumulate = t->accumulate,
                               .missing = missing[0]};
    bool incomplete = false;
    memcpy(got, in->old, bytes);
    memcpy(wanted, in->old, bytes);
    for (int b = 0; b < t->num_bias; b++)
        r.bias[b] = in->bias[b];
    enum hdl_status status = call_combine(t, self, step, o, &r);
    crowd_flush(self);
    r.rows = wanted;
    r.missing = missing[1];
    if (!moe_reference_combine(c, t->ranks_of[step], self->rank, &r))
        abort();
    for (int i = 0; i < MOST_TOKENS; i++)
        incomplete = incomplete || missing[1][i];
    if (status != (incomplete ? HDL_INCOMPLETE : HDL_OK))
        differ(t, hdl_error_detail(), step, self->rank);
    if (memcmp(missing[0], missing[1], MOST_TOKENS) != 0)
        differ(t, "missing", step, self->rank);
    compare_sums(t, step, self->rank, got, wanted);
    free(got);
    free(wanted);
}

static void give_up_step(struct crowd_rank *self)
{
    for (uint32_t i = 0; i < self->moe->config.shape.lanes; i++)
        self->moe->lanes[i].phase = MOE_IDLE; /* opaque rows have no combine */
}

/* A rank that is masked may be left behind, and then lacks more than the oracle knows of:
 * around steps with masks nobody runs ahead. */
static void meet(struct crowd_rank *self)
{
    const struct trial *t = self->user;
    bool any = false;
    for (int s = 0; s < TRIAL_STEPS; s++)
        any = any || t->masked[s];
    if (any)
        t->meet(self);
}

void trial_body(struct crowd_rank *self)
{
    struct trial *t = self->user;
    struct open_step open[2];
    bool opaque = t->config.opaque;
    for (int s = 0; s < TRIAL_STEPS; s += 2) {
        bool both = t->pairs && !opaque && t->split[s][self->rank] &&
                    t->split[s + 1][self->rank]; /* second send before first receive */
        send(t, self, s, &open[0]);
        if (!both)
            receive(t, self, s, &open[0]);
        if (opaque)
            give_up_step(self);
        else if (!t->pairs)
            combine(t, self, s, &open[0]);
        if (!t->pairs)
            meet(self);
        send(t, self, s + 1, &open[1]);
        receive(t, self, s + 1, &open[1]);
        if (both)
            receive(t, self, s, &open[0]);
        if (opaque)
            give_up_step(self);
        else
            combine(t, self, s + 1, &open[1]);
        if (t->pairs && !opaque)
            combine(t, self, s, &open[0]);
        meet(self);
    }
}

void trial_free(struct trial *t)
{
    struct base_env env;
    base_env_init(&env);
    for (int s = 0; s < TRIAL_STEPS; s++) {
        for (uint32_t r = 0; r < t->ranks; r++) {
            struct input *in = &t->inputs[s][r];
            free(in->memory);
            free(in->scales);
            free(in->ids);
            free(in->ids32);
            free(in->weights);
            free(in->outputs);
            free(in->bias[0]);
            free(in->bias[1]);
            free(in->old);
        }
    }
    moe_config_free(&env, &t->config);
}

uint64_t trial_axes(const struct trial *t)
{
    const struct hdl_moe_opts *o = &t->opts;
    const uint64_t axes[] = {t->ranks,
                             (uint64_t)t->kind,
                             (uint64_t)o->layout,
                             (uint64_t)o->dtype,
                             (uint64_t)o->format,
                             (uint64_t)o->combine_dtype,
                             (uint64_t)o->combine_wire,
                             o->exact,
                             t->late,
                             (uint64_t)o->dp_size,
                             (uint64_t)o->lanes,
                             o->expert_counts != NULL,
                             t->zero_copy,
                             (uint64_t)t->num_bias,
                             t->accumulate,
                             t->pairs,
                             (uint64_t)o->top_k,
                             (uint64_t)o->hidden,
                             (uint64_t)o->num_experts};
    uint64_t h = 0;
    for (size_t i = 0; i < sizeof(axes) / sizeof(axes[0]); i++)
        h = (h ^ axes[i]) * UINT64_C(0x9e3779b97f4a7c15);
    return h;
}

void trial_print(const struct trial *t, uint64_t seed, char *text, size_t size)
{
    snprintf(
        text, size,
        "seed %llu: ranks %u experts %d k %d hidden %d layout %d dtype %d format %d wire "
        "%d exact %d late %d dp %d kind %d lanes %d",
        (unsigned long long)seed, t->ranks, t->opts.num_experts, t->opts.top_k,
        t->opts.hidden, (int)t->opts.layout, (int)t->opts.dtype, (int)t->opts.format,
        (int)t->opts.combine_wire, t->opts.exact, t->late, t->opts.dp_size, (int)t->kind,
        t->opts.lanes);
}
