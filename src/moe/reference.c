/* SPDX-License-Identifier: Apache-2.0 */
/* The oracle: loops over everything, no tables, no cleverness, no code shared with the
 * implementation but the expert map and the conversion of single elements. */
#include "moe/reference.h"

#include <stdlib.h>
#include <string.h>

#include "moe/element.h"

struct world {
    const struct moe_config *config;
    const struct moe_reference_rank *ranks;
    uint64_t all[MOE_MAX_RANKS / 64];
};

static void set_active(uint64_t *words, const struct moe_reference_rank *rank,
                       uint32_t ranks)
{
    memset(words, 0, MOE_MAX_RANKS / 8);
    for (uint32_t r = 0; r < ranks; r++) {
        if (!rank->active || rank->active[r])
            base_mask_set(words, r);
    }
}

/* Does rank `me` count on `other`? */
static bool counts_on(const struct world *w, uint32_t me, uint32_t other)
{
    return !w->ranks[me].active || w->ranks[me].active[other];
}

/* The member of DP group `group` whose rows `to` takes, or -1: the first in turn that it
 * does not mask and that itself finds nobody before it. */
static int64_t member_for(const struct world *w, uint32_t group, uint32_t to)
{
    uint32_t dp = w->config->shape.dp;
    for (uint32_t i = 0; i < dp; i++) {
        uint32_t member = group * dp + (to + i) % dp;
        bool first = counts_on(w, to, member);
        for (uint32_t j = 0; j < i; j++)
            first = first && !counts_on(w, member, group * dp + (to + j) % dp);
        if (first)
            return member;
    }
    return -1;
}

/* Where entry (token, j) of `source` goes; rank -1 = nowhere. */
static struct moe_place place_of(const struct world *w, uint32_t source, int64_t token,
                                 uint32_t j)
{
    uint64_t active[MOE_MAX_RANKS / 64];
    int64_t id = w->ranks[source].ids[token * w->config->shape.top_k + j];
    if (id < 0)
        return (struct moe_place){UINT32_MAX, UINT32_MAX};
    set_active(active, &w->ranks[source], w->config->shape.ranks);
    return moe_map_place(&w->config->map, w->config->shape.dp, (uint32_t)id, source,
                         (uint32_t)token, active);
}

/* Position of the first entry of the token for local expert `local` of `me`, or -1. */
static int first_entry(const struct world *w, uint32_t source, int64_t token, uint32_t me,
                       uint32_t local)
{
    for (uint32_t j = 0; j < w->config->shape.top_k; j++) {
        struct moe_place p = place_of(w, source, token, j);
        if (p.rank == me && p.local == local)
            return (int)j;
    }
    return -1;
}

static bool chose_rank(const struct world *w, uint32_t source, int64_t token, uint32_t me)
{
    for (uint32_t j = 0; j < w->config->shape.top_k; j++) {
        if (place_of(w, source, token, j).rank == me)
            return true;
    }
    return false;
}

/* Sum of the weights of all entries that name the expert of entry j, first to last. */
static float weight_of(const struct world *w, uint32_t source, int64_t token, uint32_t j)
{
    uint32_t k = w->config->shape.top_k;
    const struct moe_reference_rank *s = &w->ranks[source];
    const float *weights = (s->weights ? s->weights : s->late) + token * k;
    const int64_t *ids = s->ids + token * k;
    float sum = weights[j];
    for (uint32_t i = j + 1; i < k; i++) {
        if (ids[i] == ids[j])
            sum += weights[i];
    }
    return sum;
}

/* ------------------------------------------------------------------------ dispatch */

void moe_reference_quantise(enum hdl_moe_format format, enum hdl_dtype dtype,
                            const void *row, uint32_t hidden, uint8_t *data, void *scales)
{
    memset(scales, 0, moe_scale_bytes(format, hidden));
    for (uint32_t g = 0; g < moe_scale_groups(hidden); g++) {
        uint32_t begin = g * MOE_SCALE_GROUP;
        uint32_t end =
            begin + MOE_SCALE_GROUP < hidden ? begin + MOE_SCALE_GROUP : hidden;
        float amax = MOE_AMAX_FLOOR;
        for (uint32_t h = begin; h < end; h++) {
            float x = fabsf(moe_load(dtype, row, h));
            if (isfinite(x) && x > amax)
                amax = x;
        }
        struct moe_scale s = moe_scale_of(format, amax);
        for (uint32_t h = begin; h < end; h++)
            data[h] = moe_e4m3(moe_load(dtype, row, h), s.inverse);
        moe_put_scale(format, scales, g, s);
    }
}

/* Delivers the row of (source, token) as output row number `row`. */
static void deliver(const struct world *w, uint32_t source, int64_t token, int64_t row,
                    const struct hdl_moe_received *out)
{
    const struct moe_config *c = w->config;
    const struct moe_reference_rank *s = &w->ranks[source];
    size_t bytes = (size_t)c->shape.hidden * c->shape.row_elem;
    const uint8_t *in = (const uint8_t *)s->rows + (size_t)token * c->row_in_bytes;
    uint8_t *to = (uint8_t *)out->rows + (size_t)row * bytes;
    uint8_t *scales =
        out->scales ? (uint8_t *)out->scales + (size_t)row * c->shape.row_scales : NULL;
    if (c->quantise)
        moe_reference_quantise(c->format, c->dtype, in, c->shape.hidden, to, scales);
    else
        memcpy(to, in, bytes);
    if (!c->quantise && c->shape.row_scales)
        memcpy(scales, (const uint8_t *)s->scales + (size_t)token * c->shape.row_scales,
               c->shape.row_scales);
    if (out->source_token)
        out->source_token[row] = (int32_t)token;
}

static int64_t padded(const struct moe_config *c, int64_t rows)
{
    int64_t align = c->shape.align;
    return (rows + align - 1) / align * align;
}

static void pad_expert(const struct moe_config *c, int64_t from, int64_t to,
                       const struct hdl_moe_received *out)
{
    size_t bytes = (size_t)c->shape.hidden * c->shape.row_elem;
    if (!c->zero_padding)
        return;
    memset((uint8_t *)out->rows + (size_t)from * bytes, 0, (size_t)(to - from) * bytes);
    if (out->scales)
        memset((uint8_t *)out->scales + (size_t)from * c->shape.row_scales, 0,
               (size_t)(to - from) * c->shape.row_scales);
}

/* EXPERT_3D and EXPERT_FLAT: expert by expert. */
static void dispatch_experts(const struct world *w, uint32_t me,
                             struct hdl_moe_received *out)
{
    const struct moe_config *c = w->config;
    uint32_t local = moe_map_local_experts(&c->map, me);
    bool flat = c->shape.order == MOE_EXPERT_FLAT;
    int64_t base = 0;
    for (uint32_t e = 0; e < local; e++) {
        int64_t row = flat ? base : (int64_t)e * c->layout.sources * c->shape.max_tokens;
        int64_t first = row, begin = flat ? base : first;
        for (uint32_t g = 0; g < c->layout.sources; g++) {
            int64_t source = member_for(w, g, me), from = row;
            for (int64_t t = 0; source >= 0 && t < w->ranks[source].tokens; t++) {
                if (first_entry(w, (uint32_t)source, t, me, e) >= 0)
                    deliver(w, (uint32_t)source, t, row++, out);
            }
            if (out->ranges)
                out->ranges[(size_t)e * c->layout.sources + g] =
                    from << 32 | (row - from);
        }
        if (out->counts)
            out->counts[e] = (int32_t)(row - first);
        out->num_pairs += row - first;
        base = begin + padded(c, row - first);
        if (flat)
            pad_expert(c, row, base, out);
        if (flat && out->offsets)
            out->offsets[e] = first;
    }
    if (flat && out->offsets)
        out->offsets[local] = base;
    out->num_rows = flat ? base : out->num_pairs;
}

/* Row numbers of expert `local`, appended from entry `at` on; returns the end. */
static int64_t index_expert(const struct world *w, uint32_t me, uint32_t local,
                            int64_t at, struct hdl_moe_received *out)
{
    const struct moe_config *c = w->config;
    int64_t row = 0;
    for (uint32_t g = 0; g < c->layout.sources; g++) {
        int64_t source = member_for(w, g, me), from = at;
        for (int64_t t = 0; source >= 0 && t < w->ranks[source].tokens; t++) {
            if (first_entry(w, (uint32_t)source, t, me, local) >= 0) {
                if (out->row_numbers && c->shape.order == MOE_INDEXED)
                    out->row_numbers[at] = row;
                at++;
            }
            row += chose_rank(w, (uint32_t)source, t, me);
        }
        if (out->ranges)
            out->ranges[(size_t)local * c->layout.sources + g] = from << 32 | (at - from);
    }
    return at;
}

static void local_entries(const struct world *w, uint32_t me, uint32_t source,
                          int64_t token, int64_t row, struct hdl_moe_received *out)
{
    uint32_t k = w->config->shape.top_k;
    bool weighted = w->ranks[source].weights != NULL;
    for (uint32_t j = 0; j < k; j++) {
        struct moe_place p = place_of(w, source, token, j);
        bool here = p.rank == me && first_entry(w, source, token, me, p.local) == (int)j;
        if (out->local_ids)
            out->local_ids[row * k + j] = here ? (int32_t)p.local : -1;
        if (out->weights)
            out->weights[row * k + j] =
                here && weighted ? weight_of(w, source, token, j) : 0.0f;
    }
}

/* RANK_MAJOR and INDEXED: row by row. */
static void dispatch_rows(const struct world *w, uint32_t me,
                          struct hdl_moe_received *out)
{
    const struct moe_config *c = w->config;
    uint32_t local = moe_map_local_experts(&c->map, me);
    for (uint32_t g = 0; g < c->layout.sources; g++) {
        int64_t source = member_for(w, g, me);
        for (int64_t t = 0; source >= 0 && t < w->ranks[source].tokens; t++) {
            if (!chose_rank(w, (uint32_t)source, t, me))
                continue;
            deliver(w, (uint32_t)source, t, out->num_rows, out);
            local_entries(w, me, (uint32_t)source, t, out->num_rows, out);
            out->num_rows++;
        }
    }
    for (uint32_t e = 0; e < local; e++) {
        int64_t from = out->num_pairs;
        out->num_pairs = index_expert(w, me, e, from, out);
        if (out->counts)
            out->counts[e] = (int32_t)(out->num_pairs - from);
        if (out->offsets && c->shape.order == MOE_INDEXED)
            out->offsets[e] = from;
    }
    if (out->offsets && c->shape.order == MOE_INDEXED)
        out->offsets[local] = out->num_pairs;
}

void moe_reference_dispatch(const struct moe_config *config,
                            const struct moe_reference_rank *ranks, uint32_t me,
                            struct hdl_moe_received *out)
{
    struct world w = {.config = config, .ranks = ranks};
    out->num_rows = out->num_pairs = 0;
    for (uint32_t g = 0; out->source_counts && g < config->layout.sources; g++) {
        int64_t source = member_for(&w, g, me);
        out->source_counts[g] = 0;
        for (int64_t t = 0; source >= 0 && t < ranks[source].tokens; t++)
            out->source_counts[g] += chose_rank(&w, (uint32_t)source, t, me);
    }
    if (config->shape.order == MOE_EXPERT_3D || config->shape.order == MOE_EXPERT_FLAT)
        dispatch_experts(&w, me, out);
    else
        dispatch_rows(&w, me, out);
}

/* ------------------------------------------------------------------------- combine */

/* Number of the row, among those that `holder` gives to combine, for (group, token,
 * local). */
static int64_t output_row(const struct world *w, uint32_t holder, uint32_t group,
                          int64_t token, uint32_t local)
{
    const struct moe_config *c = w->config;
    bool rank_major = c->shape.order == MOE_RANK_MAJOR;
    int64_t row = 0;
    if (c->shape.order == MOE_EXPERT_3D)
        row = (int64_t)local * c->layout.sources * c->shape.max_tokens;
    for (uint32_t e = rank_major || row > 0 ? local : 0; e <= local; e++) {
        int64_t first = row;
        for (uint32_t g = 0; g < c->layout.sources; g++) {
            int64_t source = member_for(w, g, holder);
            for (int64_t t = 0; source >= 0 && t < w->ranks[source].tokens; t++) {
                if (e == local && g == group && t == token)
                    return row;
                row += rank_major ? chose_rank(w, (uint32_t)source, t, holder)
                                  : first_entry(w, (uint32_t)source, t, holder, e) >= 0;
            }
        }
        if (c->shape.order == MOE_EXPERT_FLAT)
            row = first + padded(c, row - first);
    }
    return -1;
}

/* A row of f32 as it comes out of the wire type. */
static void through_wire(const struct moe_config *c, float *row)
{
    uint32_t hidden = c->shape.hidden;
    for (uint32_t h = 0; c->wire == HDL_MOE_WIRE_ROW && h < hidden; h++) {
        uint32_t stored[1];
        moe_store(c->combine_dtype, stored, 0, row[h]);
        row[h] = moe_load(c->combine_dtype, stored, 0);
    }
    for (uint32_t g = 0; c->wire == HDL_MOE_WIRE_FP8 && g < moe_scale_groups(hidden);
         g++) {
        uint8_t data[MOE_SCALE_GROUP];
        float scale, *part = row + g * MOE_SCALE_GROUP;
        uint32_t n = hidden - g * MOE_SCALE_GROUP;
        n = n < MOE_SCALE_GROUP ? n : MOE_SCALE_GROUP;
        moe_reference_quantise(HDL_MOE_FP8, HDL_F32, part, n, data, &scale);
        for (uint32_t h = 0; h < n; h++)
            part[h] = base_e4m3_to_float(data[h]) * scale;
    }
}

struct sums {
    float *total, *part, *row; /* [H] */
    bool missing;
};

static const uint8_t *output_at(const struct world *w, uint32_t holder, int64_t row)
{
    return (const uint8_t *)w->ranks[holder].outputs +
           (size_t)row * w->config->shape.hidden * w->config->shape.take_elem;
}

/* Whether what `holder` has for the tokens of `me` reaches `me`, and is for the experts
 * that `me` chose there: with replicas, that member's mask must be the same. */
static bool contributes(const struct world *w, uint32_t holder, uint32_t me)
{
    int64_t source = member_for(w, me / w->config->shape.dp, holder);
    bool reaches = counts_on(w, me, holder) && source >= 0;
    for (uint32_t r = 0;
         reaches && w->config->map.replicas > 1 && r < w->config->shape.ranks; r++)
        reaches = counts_on(w, me, r) == counts_on(w, (uint32_t)source, r);
    return reaches;
}

/* Does `holder` send its rows for the tokens of `me` apart, so that the owners sum them?
 * It does with late weights that it does not wait for, or if a member of the DP group
 * wants that, or does not say because the holder does not count on it. */
static bool gives_apart(const struct world *w, uint32_t holder, uint32_t me)
{
    uint32_t dp = w->config->shape.dp;
    bool apart = false;
    for (uint32_t r = me / dp * dp; r < (me / dp + 1) * dp; r++)
        apart = apart || !counts_on(w, holder, r) ||
                (!w->ranks[r].weights && (w->ranks[holder].split || w->ranks[r].split));
    return apart && w->config->shape.late_weights;
}

/* The whole contribution of `holder` to (me, token) into s->part. */
static void contribution(const struct world *w, uint32_t holder, uint32_t me,
                         int64_t token, const struct sums *s)
{
    float *part = s->part, *row = s->row;
    const struct moe_config *c = w->config;
    uint32_t hidden = c->shape.hidden, group = me / c->shape.dp;
    bool apart = gives_apart(w, holder, me);
    memset(part, 0, hidden * sizeof(float));
    for (uint32_t e = 0; e < moe_map_local_experts(&c->map, holder); e++) {
        int j = first_entry(w, me, token, holder, e);
        if (j < 0)
            continue;
        const uint8_t *x = output_at(w, holder, output_row(w, holder, group, token, e));
        bool ready = c->shape.order == MOE_RANK_MAJOR;
        float weight = ready ? 1.0f : weight_of(w, me, token, (uint32_t)j);
        for (uint32_t h = 0; h < hidden; h++)
            row[h] = moe_load(c->combine_dtype, x, h);
        if (apart && !ready)
            through_wire(c, row);
        for (uint32_t h = 0; h < hidden; h++)
            part[h] = ready ? row[h] : fmaf(weight, row[h], part[h]);
        if (ready)
            break;
    }
    through_wire(c, part);
}

static void sum_by_rank(const struct world *w, uint32_t me, int64_t token, struct sums *s)
{
    for (uint32_t r = 0; r < w->config->shape.ranks; r++) {
        if (!chose_rank(w, me, token, r))
            continue;
        if (!contributes(w, r, me)) {
            s->missing = true;
            continue;
        }
        contribution(w, r, me, token, s);
        for (uint32_t h = 0; h < w->config->shape.hidden; h++)
            s->total[h] += s->part[h];
    }
}

static void sum_by_position(const struct world *w, uint32_t me, int64_t token,
                            struct sums *s)
{
    const struct moe_config *c = w->config;
    for (uint32_t j = 0; j < c->shape.top_k; j++) {
        struct moe_place p = place_of(w, me, token, j);
        if (p.rank == UINT32_MAX || first_entry(w, me, token, p.rank, p.local) != (int)j)
            continue;
        if (!contributes(w, p.rank, me)) {
            s->missing = true;
            continue;
        }
        int64_t row = output_row(w, p.rank, me / c->shape.dp, token, p.local);
        for (uint32_t h = 0; h < c->shape.hidden; h++)
            s->part[h] = moe_load(c->combine_dtype, output_at(w, p.rank, row), h);
        through_wire(c, s->part);
        float weight = weight_of(w, me, token, j);
        for (uint32_t h = 0; h < c->shape.hidden; h++)
            s->total[h] = fmaf(weight, s->part[h], s->total[h]);
    }
}

bool moe_reference_combine(const struct moe_config *config,
                           const struct moe_reference_rank *ranks, uint32_t me,
                           const struct hdl_moe_result *out)
{
    struct world w = {.config = config, .ranks = ranks};
    uint32_t hidden = config->shape.hidden;
    struct sums s = {.total = calloc((size_t)hidden * 3, sizeof(float))};
    bool late_split = !ranks[me].weights && ranks[me].split;
    bool exact = config->exact || (late_split && config->shape.order != MOE_RANK_MAJOR);
    if (!s.total)
        return false;
    s.part = s.total + hidden;
    s.row = s.part + hidden;
    for (int64_t t = 0; t < ranks[me].tokens; t++) {
        size_t at = (size_t)t * hidden;
        memset(s.total, 0, hidden * sizeof(float));
        s.missing = false;
        if (exact)
            sum_by_position(&w, me, t, &s);
        else
            sum_by_rank(&w, me, t, &s);
        for (uint32_t h = 0; h < hidden; h++) {
            for (int b = 0; b < 2; b++) {
                if (out->bias[b])
                    s.total[h] += moe_load(config->combine_dtype, out->bias[b], at + h);
            }
            if (out->accumulate)
                s.total[h] += moe_load(config->combine_dtype, out->rows, at + h);
            moe_store(config->combine_dtype, out->rows, at + h, s.total[h]);
        }
        if (out->missing)
            out->missing[t] = s.missing;
    }
    free(s.total);
    return true;
}
