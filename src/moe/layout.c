/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes and offsets of a MoE arena, with every product and sum checked. */
#include "moe/layout.h"

/* A running size that remembers an overflow. */
struct extent {
    size_t bytes;
    bool overflow;
};

static size_t product(struct extent *e, size_t a, size_t b)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r) || r > (size_t)INT64_MAX) {
        e->overflow = true;
        return 0;
    }
    return r;
}

static size_t sum(struct extent *e, size_t a, size_t b)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r) || r > (size_t)INT64_MAX) {
        e->overflow = true;
        return 0;
    }
    return r;
}

static size_t round_up(struct extent *e, size_t a, size_t unit)
{
    return sum(e, a, unit - 1) / unit * unit;
}

/* Appends count * stride bytes, rounded up to 128, and returns where they begin. */
static size_t append(struct extent *e, size_t count, size_t stride)
{
    size_t at = e->bytes;
    e->bytes = sum(e, e->bytes, round_up(e, product(e, count, stride), 128));
    return at;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void size_rows(struct moe_layout *l, const struct moe_shape *s, struct extent *e)
{
    l->scale_offset = round_up(e, product(e, s->hidden, s->row_elem), 4);
    l->row_bytes = s->row_scales ? sum(e, l->scale_offset, s->row_scales)
                                 : product(e, s->hidden, s->row_elem);
    l->row_stride = round_up(e, l->row_bytes, MOE_LINE_BYTES);
    l->give_scale_offset = round_up(e, product(e, s->hidden, s->give_elem), 4);
    l->give_bytes = s->give_scales ? sum(e, l->give_scale_offset, s->give_scales)
                                   : product(e, s->hidden, s->give_elem);
    l->give_stride = round_up(e, l->give_bytes, MOE_LINE_BYTES);
}

static void size_header(struct moe_layout *l, const struct moe_shape *s, struct extent *e)
{
    size_t record = product(e, s->top_k, sizeof(float) + sizeof(uint16_t));
    l->mask_words = ((size_t)s->ranks + 63) / 64;
    l->header_fixed =
        sum(e, MOE_LINE_BYTES, round_up(e, l->mask_words * 8, MOE_LINE_BYTES));
    l->token_stride = round_up(e, record, sizeof(float));
    l->header_stride = round_up(
        e, sum(e, l->header_fixed, product(e, s->max_tokens, l->token_stride)), 128);
}

/* Rows that the output of dispatch can hold. False on overflow. */
static bool count_rows(const struct moe_shape *s, size_t *out_rows, size_t *map_entries)
{
    struct extent e = {0, false};
    size_t pairs = product(&e, s->ranks / s->dp, s->max_tokens);
    size_t most = product(&e, pairs, smaller(s->top_k, s->local_experts));
    *map_entries = s->order == MOE_INDEXED ? most : 0;
    switch (s->order) {
    case MOE_EXPERT_3D:
        *out_rows = product(&e, pairs, s->local_experts);
        break;
    case MOE_EXPERT_FLAT:
        *out_rows = sum(&e, most, product(&e, s->local_experts, s->align - 1));
        break;
    default:
        *out_rows = pairs;
        break;
    }
    return !e.overflow;
}

/* The regions of one half, in the order of the drawing. */
static size_t place_half(struct moe_layout *l, const struct moe_shape *s, bool *overflow)
{
    struct extent e = {0, false};
    size_t pairs = product(&e, s->ranks, s->max_tokens);
    size_t gives = product(&e, pairs, l->gives);
    size_t late = s->late_weights ? product(&e, pairs, s->top_k) : 0;
    l->header = append(&e, s->ranks, l->header_stride);
    l->weights = append(&e, late, sizeof(float));
    l->arrive = append(&e, pairs, sizeof(uint64_t));
    l->line_out = append(&e, s->ranks, MOE_LINE_BYTES);
    l->line_in = append(&e, s->ranks, MOE_LINE_BYTES);
    l->landed = append(&e, l->gives ? pairs : 0, sizeof(uint64_t));
    l->slot = append(&e, pairs, l->row_stride);
    l->give = append(&e, gives, l->give_stride);
    l->take = append(&e, gives, l->give_stride);
    *overflow = *overflow || e.overflow;
    return round_up(&e, e.bytes, 4096);
}

bool moe_layout_init(struct moe_layout *l, const struct moe_shape *s)
{
    struct extent e = {0, false};
    size_rows(l, s, &e);
    size_header(l, s, &e);
    l->sources = s->ranks / s->dp;
    l->takes = s->give_elem ? (s->exact ? s->top_k : smaller(s->ranks, s->top_k)) : 0;
    l->gives = s->give_elem ? (s->exact ? smaller(s->top_k, s->local_experts) : 1) : 0;
    if (!count_rows(s, &l->out_rows, &l->map_entries))
        return false;
    l->take_rows = s->order == MOE_INDEXED ? l->map_entries : l->out_rows;
    l->half_bytes = place_half(l, s, &e.overflow);
    l->buffer = product(&e, 2, l->half_bytes);
    l->buffer_bytes = product(&e, product(&e, l->take_rows, s->hidden), s->take_elem);
    l->lane_bytes = sum(&e, l->buffer, round_up(&e, l->buffer_bytes, 4096));
    l->total_bytes = sum(&e, MOE_CONTROL_BYTES, product(&e, s->lanes, l->lane_bytes));
    return !e.overflow;
}
