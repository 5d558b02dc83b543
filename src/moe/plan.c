/* SPDX-License-Identifier: Apache-2.0 */
/* From headers to rows: which rows come from whom, and where each of them goes.
 *
 * The headers of mapped peers are read once, into items and entries, so that a peer that
 * overwrites its header meanwhile can spoil the step's result (which is then dropped) but
 * never an index.
 */
#include <string.h>

#include "moe/exchange.h"

/* Appends the entry so that local experts ascend among those from `first` on. */
static void insert_entry(struct moe_lane *lane, uint32_t first,
                         const struct moe_route *route)
{
    uint32_t at = lane->num_entries++;
    while (at > first && lane->entries[at - 1].local > route->local) {
        lane->entries[at] = lane->entries[at - 1];
        at--;
    }
    lane->entries[at] = (struct moe_entry){.local = (uint16_t)route->local,
                                           .position = (uint16_t)route->position,
                                           .weight = route->weight};
}

/* Of the first few rows: what will be read next, and where their sum will be written.
 * With more rows one read hides the time of another. */
enum { FEW = 4 };

static void ask_ahead(const struct hdl_moe *m, const struct moe_lane *lane,
                      uint32_t source, uint32_t token)
{
    const struct moe_layout *l = &m->config.layout;
    const struct moe_shape *s = &m->config.shape;
    size_t half = lane->half;
    uint32_t owner = source / s->dp * s->dp;
    moe_fetch_ahead(moe_base(m, source) + moe_slot(l, s, half, source, token),
                    l->row_bytes);
    moe_own_ahead(m->peers->own + moe_give(l, s, half, owner, token, 0), l->give_bytes);
    moe_own_ahead(m->peers->own + moe_line_out(l, half, source), MOE_LINE_BYTES);
}

static void read_token(struct hdl_moe *m, struct moe_lane *lane, uint32_t source,
                       uint32_t token, const uint64_t *active)
{
    uint32_t self = m->peers->self, first = lane->num_entries;
    uint32_t k = m->config.shape.top_k, most = k < m->local ? k : m->local;
    const float *record = moe_record(m, lane->half, source, token);
    uint32_t n = moe_resolve(&m->config, moe_record_ids(m, record), record, source, token,
                             active, m->routes);
    /* More than `most` can only be of a header that is being overwritten. */
    for (uint32_t j = 0; j < n && lane->num_entries - first < most; j++) {
        if (m->routes[j].rank == self)
            insert_entry(lane, first, &m->routes[j]);
    }
    if (lane->num_entries == first)
        return;
    if (lane->num_items < FEW && moe_mapped(m, source) && source != self)
        ask_ahead(m, lane, source, token);
    lane->items[lane->num_items++] = (struct moe_item){
        .token = token,
        .entry = first,
        .entries = (uint16_t)(lane->num_entries - first),
    };
}

static const uint64_t *active_of(const struct hdl_moe *m, const struct moe_lane *lane,
                                 uint32_t source)
{
    return (const uint64_t *)(const void *)(moe_line(m, lane->half, source) + 1);
}

static void read_source(struct hdl_moe *m, struct moe_lane *lane, uint32_t source)
{
    const struct moe_header_line *line = moe_line(m, lane->half, source);
    const uint64_t *active = active_of(m, lane, source);
    struct moe_source *s = &lane->source[source];
    uint32_t tokens = line->tokens;
    s->first = lane->num_items;
    for (uint32_t t = 0; t < tokens && t < m->config.shape.max_tokens; t++)
        read_token(m, lane, source, t, active);
    s->count = lane->num_items - s->first;
    s->arrived = 0;
}

/* ------------------------------------------------------------------------- numbers */

static void count_experts(struct hdl_moe *m, const struct moe_lane *lane,
                          struct hdl_moe_received *out)
{
    uint32_t *count = m->cursor;
    memset(count, 0, m->local * sizeof(uint32_t));
    for (uint32_t i = 0; i < lane->num_entries; i++)
        count[lane->entries[i].local]++;
    out->num_pairs = lane->num_entries;
    for (uint32_t e = 0; e < m->local; e++) {
        if (out->counts)
            out->counts[e] = (int32_t)count[e];
        m->expert_rows[e] += count[e];
    }
}

static void zero_rows(const struct hdl_moe *m, const struct hdl_moe_received *out,
                      size_t from, size_t to)
{
    const struct moe_shape *s = &m->config.shape;
    size_t bytes = (size_t)s->hidden * s->row_elem;
    memset((uint8_t *)out->rows + from * bytes, 0, (to - from) * bytes);
    if (out->scales && s->row_scales)
        memset((uint8_t *)out->scales + from * s->row_scales, 0,
               (to - from) * s->row_scales);
}

/* Turns the counts in m->cursor into the number of each expert's first row (INDEXED:
 * entry).
 */
static void place_experts(struct hdl_moe *m, struct hdl_moe_received *out)
{
    const struct moe_shape *s = &m->config.shape;
    size_t stride = (size_t)m->config.layout.sources * s->max_tokens, at = 0;
    bool flat = s->order == MOE_EXPERT_FLAT;
    bool offsets = out->offsets && (flat || s->order == MOE_INDEXED);
    for (uint32_t e = 0; e < m->local; e++) {
        size_t count = m->cursor[e], begin = s->order == MOE_EXPERT_3D ? e * stride : at;
        if (offsets)
            out->offsets[e] = (int64_t)begin;
        m->cursor[e] = (uint32_t)begin;
        at = begin + count;
        if (flat)
            at = (at + s->align - 1) / s->align * s->align;
        if (flat && m->config.zero_padding)
            zero_rows(m, out, begin + count, at);
    }
    if (offsets)
        out->offsets[m->local] = (int64_t)at;
    if (flat)
        out->num_rows = (int64_t)at;
}

static void number_item(struct hdl_moe *m, struct moe_lane *lane, struct moe_item *item,
                        uint32_t row, struct hdl_moe_received *out)
{
    bool indexed = m->config.shape.order == MOE_INDEXED;
    item->row = row;
    for (uint32_t i = 0; i < item->entries; i++) {
        struct moe_entry *entry = &lane->entries[item->entry + i];
        entry->row = m->cursor[entry->local]++;
        if (indexed && out->row_numbers)
            out->row_numbers[entry->row] = row;
    }
}

/* begin << 32 | count of a source's rows for each expert; `end` false: the begin. */
static void note_ranges(const struct hdl_moe *m, struct hdl_moe_received *out,
                        uint32_t group, bool end)
{
    for (uint32_t e = 0; out->ranges && e < m->local; e++) {
        int64_t *range = &out->ranges[(size_t)e * m->config.layout.sources + group];
        int64_t at = m->cursor[e];
        *range = end ? *range << 32 | (at - *range) : at;
    }
}

static void number_rows(struct hdl_moe *m, struct moe_lane *lane,
                        struct hdl_moe_received *out)
{
    uint32_t dp = m->config.shape.dp, row = 0;
    for (uint32_t g = 0; g < m->config.layout.sources; g++) {
        int32_t rows = 0;
        note_ranges(m, out, g, false);
        for (uint32_t r = g * dp; r < (g + 1) * dp; r++) {
            const struct moe_source *s = &lane->source[r];
            for (uint32_t i = 0; i < s->count; i++)
                number_item(m, lane, &lane->items[s->first + i], row++, out);
            rows += (int32_t)s->count;
        }
        note_ranges(m, out, g, true);
        if (out->source_counts)
            out->source_counts[g] = rows;
    }
    if (m->config.shape.order == MOE_RANK_MAJOR || m->config.shape.order == MOE_INDEXED)
        out->num_rows = row;
    else if (m->config.shape.order == MOE_EXPERT_3D)
        out->num_rows = out->num_pairs;
}

/* The first member of a DP group that came and says that it serves this rank. Members may
 * disagree on who is there, and then perhaps none does: the one whose turn it is. */
static uint32_t choose_member(const struct hdl_moe *m, const struct moe_lane *lane,
                              uint32_t group)
{
    uint32_t dp = m->config.shape.dp, self = m->peers->self;
    for (uint32_t i = 0; i < dp; i++) {
        uint32_t r = group * dp + (self + i) % dp;
        if (lane->source[r].state == MOE_SOURCE_CAME &&
            moe_dp_member(dp, group, self, active_of(m, lane, r)) == r)
            return r;
    }
    return group * dp + self % dp;
}

/* Who of the own DP group chooses the same replicas? */
static void compare_members(struct hdl_moe *m, struct moe_lane *lane)
{
    uint32_t dp = m->config.shape.dp, first = m->peers->self / dp * dp;
    size_t bytes = m->config.layout.mask_words * sizeof(uint64_t);
    for (uint32_t i = 0; i < dp; i++)
        lane->alike[i] = lane->source[first + i].state == MOE_SOURCE_CAME &&
                         memcmp(active_of(m, lane, first + i), lane->active, bytes) == 0;
}

void moe_plan(struct hdl_moe *m, struct moe_lane *lane, struct hdl_moe_received *out)
{
    uint32_t dp = m->config.shape.dp;
    lane->num_items = lane->num_entries = 0;
    for (uint32_t g = 0; g < m->config.layout.sources; g++) {
        uint32_t from = choose_member(m, lane, g);
        lane->listen[g] = from;
        for (uint32_t r = g * dp; r < (g + 1) * dp; r++) {
            struct moe_source *s = &lane->source[r];
            s->count = 0;
            s->weighted =
                s->state == MOE_SOURCE_CAME && moe_line(m, lane->half, r)->weighted;
        }
        if (lane->source[from].state == MOE_SOURCE_CAME)
            read_source(m, lane, from);
    }
    if (moe_says_source(m))
        compare_members(m, lane);
    count_experts(m, lane, out);
    place_experts(m, out);
    number_rows(m, lane, out);
}
