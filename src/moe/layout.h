/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of a MoE arena in host memory: where everything lies, from the creation
 * parameters alone. */
#ifndef MOE_LAYOUT_H
#define MOE_LAYOUT_H

/* Every rank owns one arena. All arenas have the same offsets (those in device memory are
 * drawn in gpu_args.h):
 *
 *   0 +------------------------------------------------------------+
 *     | control    MOE_CONTROL_BYTES, for the owner of the arena   |
 *     +---- lane 0 ------------------------------------------------+
 *     | half 0  header   [R]        fixed part, T token records    |
 *     |         weights  [R][M][k]  f32, weights given to combine  |
 *     |         arrive   [R][M]     u64, flag of a dispatch row    |
 *     |         line_out [R]        combine line written for owner |
 *     |         line_in  [R]        combine line put by contributor|
 *     |         landed   [R][M]     u64, flag of a contribution    |
 *     |         slot     [R][M]     dispatch rows by source, token |
 *     |         give     [R][M][G]  contributions, by owner, token |
 *     |         take     [R][M][G]  the same, put by contributors  |
 *     | half 1  the same                                           |
 *     | buffer  rows for a combine without a copy                  |
 *     +---- lane 1 ------------------------------------------------+
 *     | ...                                                        |
 *
 * What source s writes for others lies at the offsets of s. A reader finds it in the
 * arena of s if that is mapped, else in its own, where s has put it: same offset, other
 * base. Contributions differ: a mapped contributor keeps them in its own arena by owner
 * (line_out, give), a messaged one puts them into the owner's by contributor (line_in,
 * take, landed).
 *
 * Flags carry (generation, step), are written by one rank each, only grow, and are never
 * cleared. Step s of a lane uses half s mod 2.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MOE_CONTROL_BYTES = 4096,
    MOE_LINE_BYTES = 64,   /* one flag line: a cache line of its own */
    MOE_SCALE_GROUP = 128, /* elements that share one FP8 scale */
    MOE_MAX_TOP_K = 64,
    MOE_MAX_EXPERTS = 4096,
    MOE_MAX_RANKS = 4096,
    MOE_MAX_LANES = 16,
    MOE_NO_EXPERT = 0xffff /* an empty routing entry in a header */
};

/* Where the rows of an output go; equal to enum hdl_moe_layout. */
enum moe_order {
    MOE_EXPERT_3D = 0,
    MOE_EXPERT_FLAT = 1,
    MOE_RANK_MAJOR = 2,
    MOE_INDEXED = 3
};

/* The creation parameters that geometry depends on, checked and completed by config.c.
 */
struct moe_shape {
    uint32_t ranks;         /* R, capacity of the group */
    uint32_t experts;       /* E */
    uint32_t local_experts; /* L, most experts on one rank */
    uint32_t top_k;         /* k */
    uint32_t hidden;        /* H */
    uint32_t max_tokens;    /* M */
    uint32_t dp;            /* g, ranks that hold the same tokens */
    uint32_t lanes;
    uint32_t order;      /* enum moe_order */
    uint32_t align;      /* EXPERT_FLAT: rows of an expert are rounded up to this */
    uint32_t row_elem;   /* bytes of an element of a dispatch row on the wire */
    uint32_t row_scales; /* bytes of the scales of a dispatch row on the wire */
    uint32_t give_elem;  /* bytes of an element of a contribution on the wire, 0 = none */
    uint32_t give_scales; /* bytes of the scales of a contribution on the wire */
    uint32_t take_elem;   /* bytes of an element of the rows given to combine */
    uint8_t exact;        /* contributions may come one per (token, expert) */
    uint8_t late_weights; /* weights may come with combine */
    uint8_t device;       /* the arenas are on GPUs */
};

/* Offsets in bytes. The regions of a half are relative to the half: use moe_half. */
struct moe_layout {
    size_t row_bytes; /* a dispatch row: elements, then scales */
    size_t row_stride;
    size_t scale_offset; /* of the scales inside a row, a multiple of 4 */
    size_t give_bytes;   /* a contribution */
    size_t give_stride;
    size_t give_scale_offset;
    size_t mask_words;   /* 64-bit words of a set of ranks */
    size_t header_fixed; /* bytes before the first token record */
    size_t token_stride; /* bytes of a token record: k f32 weights, k u16 expert ids */
    size_t header_stride;
    uint32_t sources; /* S = R / g, distinct sources of rows */
    uint32_t takes;   /* C, contributions that one token can get */
    uint32_t gives;   /* G, contributions of one rank to one token */

    size_t header, weights, arrive, line_out, line_in, landed, slot, give, take;
    size_t half_bytes;
    size_t buffer; /* relative to the lane */
    size_t buffer_bytes;
    size_t lane_bytes;
    size_t total_bytes;

    size_t out_rows;    /* capacity of dispatch's output in rows */
    size_t map_entries; /* capacity of INDEXED's row numbers */
    size_t take_rows;   /* rows that combine reads at most */
};

/* Fills the layout. False if a size does not fit into 63 bits; the layout is then
 * unspecified. */
bool moe_layout_init(struct moe_layout *layout, const struct moe_shape *shape);

/* Groups of elements that have one FP8 scale each: the last one may be short. */
static inline uint32_t moe_scale_groups(uint32_t hidden)
{
    return (hidden + MOE_SCALE_GROUP - 1) / MOE_SCALE_GROUP;
}

static inline size_t moe_half(const struct moe_layout *l, uint32_t lane, uint64_t step)
{
    return (size_t)MOE_CONTROL_BYTES + lane * l->lane_bytes + (step & 1) * l->half_bytes;
}

static inline size_t moe_buffer(const struct moe_layout *l, uint32_t lane)
{
    return (size_t)MOE_CONTROL_BYTES + lane * l->lane_bytes + l->buffer;
}

/* The header of a source: line, set of ranks it counts on, token records. */
static inline size_t moe_header(const struct moe_layout *l, size_t half, uint32_t source)
{
    return half + l->header + source * l->header_stride;
}

static inline size_t moe_token(const struct moe_layout *l, size_t half, uint32_t source,
                               uint32_t token)
{
    return moe_header(l, half, source) + l->header_fixed + token * l->token_stride;
}

/* Weights that a source gives to combine: [M][k] f32. */
static inline size_t moe_weights(const struct moe_layout *l, const struct moe_shape *s,
                                 size_t half, uint32_t source, uint32_t token)
{
    return half + l->weights +
           ((size_t)source * s->max_tokens + token) * s->top_k * sizeof(float);
}

static inline size_t moe_arrive(const struct moe_layout *l, const struct moe_shape *s,
                                size_t half, uint32_t source, uint32_t token)
{
    return half + l->arrive + ((size_t)source * s->max_tokens + token) * sizeof(uint64_t);
}

static inline size_t moe_slot(const struct moe_layout *l, const struct moe_shape *s,
                              size_t half, uint32_t source, uint32_t token)
{
    return half + l->slot + ((size_t)source * s->max_tokens + token) * l->row_stride;
}

static inline size_t moe_line_out(const struct moe_layout *l, size_t half, uint32_t owner)
{
    return half + l->line_out + (size_t)owner * MOE_LINE_BYTES;
}

static inline size_t moe_line_in(const struct moe_layout *l, size_t half,
                                 uint32_t contributor)
{
    return half + l->line_in + (size_t)contributor * MOE_LINE_BYTES;
}

static inline size_t moe_landed_from(const struct moe_layout *l,
                                     const struct moe_shape *s, size_t half,
                                     uint32_t contributor, uint32_t token)
{
    return half + l->landed +
           ((size_t)contributor * s->max_tokens + token) * sizeof(uint64_t);
}

/* number: as for moe_give. */
static inline size_t moe_take_from(const struct moe_layout *l, const struct moe_shape *s,
                                   size_t half, uint32_t contributor, uint32_t token,
                                   uint32_t number)
{
    return half + l->take +
           (((size_t)contributor * s->max_tokens + token) * l->gives + number) *
               l->give_stride;
}

/* index: 0, or the number among the token's distinct experts on this rank if exact. */
static inline size_t moe_give(const struct moe_layout *l, const struct moe_shape *s,
                              size_t half, uint32_t owner, uint32_t token, uint32_t index)
{
    return half + l->give +
           (((size_t)owner * s->max_tokens + token) * l->gives + index) * l->give_stride;
}

#endif
