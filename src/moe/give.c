/* SPDX-License-Identifier: Apache-2.0 */
/* Send phase of combine: weights that come late, then this rank's contributions to every
 * owner, and a line that says how they are. */
#include <inttypes.h>
#include <string.h>

#include "moe/exchange.h"

struct giving {
    struct hdl_moe *m;
    struct moe_lane *lane;
    const uint8_t *rows; /* expert outputs */
    bool fused;
    uint32_t ready;     /* a group whose weights are there, or UINT32_MAX */
    struct moe_run run; /* rows that are written and not put yet */
    enum moe_note note; /* how they are */
    bool told;          /* the messaged members of the group were told so */
};

/* ----------------------------------------------------------------------- late weights */

static void publish_weights(struct hdl_moe *m, struct moe_lane *lane,
                            const float *weights)
{
    size_t bytes = (size_t)lane->tokens * m->config.shape.top_k * sizeof(float);
    size_t at =
        moe_weights(&m->config.layout, &m->config.shape, lane->half, m->peers->self, 0);
    if (bytes > 0)
        memcpy(m->peers->own + at, weights, bytes);
    moe_tell_weights(m, lane, bytes, lane->exact ? MOE_GIVEN_EXACT : MOE_GIVEN);
}

/* Weights of the entries of a source that sent none with its header. */
static void read_weights(struct hdl_moe *m, struct moe_lane *lane, uint32_t source)
{
    uint32_t k = m->config.shape.top_k;
    const struct moe_source *s = &lane->source[source];
    for (uint32_t i = 0; i < s->count; i++) {
        const struct moe_item *item = &lane->items[s->first + i];
        const uint16_t *ids =
            moe_record_ids(m, moe_record(m, lane->half, source, item->token));
        const float *weights =
            (const float *)(const void *)(moe_base(m, source) +
                                          moe_weights(&m->config.layout, &m->config.shape,
                                                      lane->half, source, item->token));
        for (uint32_t e = 0; e < item->entries; e++) {
            struct moe_entry *entry = &lane->entries[item->entry + e];
            entry->weight = weights[entry->position];
            for (uint32_t j = entry->position + 1u; j < k; j++) {
                if (ids[j] == ids[entry->position])
                    entry->weight += weights[j];
            }
        }
    }
}

/* ------------------------------------------------------------------- contributions */

/* Does it come without weights, which its combine gives? */
static bool has_late_weights(const struct giving *g, uint32_t source)
{
    const struct moe_source *s = &g->lane->source[source];
    return s->state == MOE_SOURCE_TAKEN && !s->weighted &&
           g->m->config.shape.order != MOE_RANK_MAJOR;
}

static bool has_no_late_weights(const struct giving *g, uint32_t source)
{
    return !has_late_weights(g, source);
}

/* What a source said with its late weights: the step's flag and a note; older, nothing.
 */
static uint64_t said_with_weights(const struct giving *g, uint32_t source)
{
    return atomic_load_explicit(&moe_line(g->m, g->lane->half, source)->weights,
                                memory_order_acquire);
}

/* Has it said what it wants, if it is to, or is it gone? */
static bool has_spoken(const struct giving *g, uint32_t source)
{
    return !has_late_weights(g, source) ||
           said_with_weights(g, source) >= g->lane->flag || moe_gone(g->m, source);
}

/* Can a source do with one contribution for all its experts here? */
static bool takes_sum(const struct giving *g, uint32_t source)
{
    const struct moe_source *s = &g->lane->source[source];
    if (s->state == MOE_SOURCE_TAKEN && s->weighted)
        return true;
    return g->fused && (said_with_weights(g, source) == (g->lane->flag | MOE_GIVEN) ||
                        moe_gone(g->m, source));
}

typedef bool (*source_test)(const struct giving *g, uint32_t source);

static bool all_members(const struct giving *g, uint32_t group, source_test test)
{
    uint32_t dp = g->m->config.shape.dp, r = group * dp;
    while (r < (group + 1) * dp && test(g, r))
        r++;
    return r == (group + 1) * dp;
}

/* One contribution for each expert? With late weights, if this rank does not wait for
 * them, or unless all who get it, the members of a DP group, can do with a sum: it cannot
 * be taken apart. */
static bool gives_exact(const struct giving *g, uint32_t group)
{
    const struct moe_config *c = &g->m->config;
    if (c->exact || !c->shape.late_weights || c->shape.order == MOE_RANK_MAJOR)
        return c->exact;
    return !all_members(g, group, takes_sum);
}

static void tell_member(struct giving *g, uint32_t rank, bool rows)
{
    if (moe_mapped(g->m, rank) || !g->told)
        moe_tell(g->m, g->lane, rank, g->note, rows);
}

/* Puts the open run to the messaged members of the group; more: another one follows. */
static void end_run(struct giving *g, uint32_t group, bool more)
{
    struct hdl_moe *m = g->m;
    const struct moe_config *c = &m->config;
    const struct moe_layout *l = &c->layout;
    uint32_t dp = c->shape.dp, self = m->peers->self;
    if (g->run.rows == 0)
        return;
    size_t half = g->lane->half;
    size_t from = moe_give(l, &c->shape, half, group * dp, g->run.first, 0);
    const struct moe_put put = {
        .offset = moe_take_from(l, &c->shape, half, self, g->run.first, 0),
        .src = m->peers->own + from,
        .bytes = moe_run_bytes(&g->run, &m->give_runs, l->give_stride, l->give_bytes),
        .signal = moe_landed_from(l, &c->shape, half, self, g->run.first),
        .flag = g->lane->flag,
        .more = more};
    for (uint32_t r = group * dp; r < (group + 1) * dp; r++) {
        if (!moe_reachable(m, g->lane, r))
            continue;
        tell_member(g, r, true);
        moe_send(m, r, &put);
    }
    g->told = true;
    g->run.rows = 0;
}

/* The rows of a token are written: they go with their neighbours. */
static void pass_on(struct giving *g, uint32_t group, uint32_t token, uint32_t rows)
{
    struct hdl_moe *m = g->m;
    uint32_t dp = m->config.shape.dp;
    bool joins = moe_run_joins(&g->run, token, &m->give_runs);
    if (!joins)
        end_run(g, group, true);
    moe_run_add(&g->run, token, rows, joins);
    for (uint32_t r = group * dp; r < (group + 1) * dp; r++) {
        if (r != m->peers->self && moe_mapped(m, r))
            m->bytes_sent[r] += rows * m->config.layout.give_bytes;
    }
}

static const uint8_t *output_row(const struct giving *g, uint32_t row)
{
    const struct moe_shape *s = &g->m->config.shape;
    return g->rows + (size_t)row * s->hidden * s->take_elem;
}

/* Do contributions to a group go past the cache? */
static bool past(const struct giving *g, uint32_t group)
{
    const struct hdl_moe *m = g->m;
    return g->lane->stream ||
           (g->lane->past && group != m->peers->self / m->config.shape.dp);
}

/* One row for all experts of the item. */
static void give_sum(struct giving *g, uint32_t group, const struct moe_item *item)
{
    struct hdl_moe *m = g->m;
    const struct moe_config *c = &m->config;
    bool summed = c->shape.order == MOE_RANK_MAJOR;
    size_t at = moe_give(&c->layout, &c->shape, g->lane->half, group * c->shape.dp,
                         item->token, 0);
    uint32_t n = summed ? 1 : item->entries;
    for (uint32_t i = 0; i < n; i++) {
        const struct moe_entry *entry = &g->lane->entries[item->entry + i];
        m->parts[i] = output_row(g, summed ? item->row : entry->row);
        m->part_weights[i] = entry->weight;
    }
    moe_rows_give(&m->wire, m->peers->own + at, m->parts, summed ? NULL : m->part_weights,
                  n, past(g, group));
    pass_on(g, group, item->token, 1);
}

/* One row for each expert of the item. */
static void give_each(struct giving *g, uint32_t group, const struct moe_item *item)
{
    struct hdl_moe *m = g->m;
    const struct moe_config *c = &m->config;
    for (uint32_t i = 0; i < item->entries; i++) {
        const struct moe_entry *entry = &g->lane->entries[item->entry + i];
        const void *row = output_row(g, entry->row);
        size_t at = moe_give(&c->layout, &c->shape, g->lane->half, group * c->shape.dp,
                             item->token, i);
        moe_rows_give(&m->wire, m->peers->own + at, &row, NULL, 1, past(g, group));
    }
    pass_on(g, group, item->token, item->entries);
}

static void tell_group(struct giving *g, uint32_t group)
{
    uint32_t dp = g->m->config.shape.dp;
    for (uint32_t r = group * dp; r < (group + 1) * dp; r++)
        tell_member(g, r, false);
}

static void drop_group(struct giving *g, uint32_t group)
{
    g->note = MOE_DROPPED;
    g->told = false;
    tell_group(g, group);
}

static void give_group(struct giving *g, uint32_t group)
{
    struct moe_lane *lane = g->lane;
    const struct moe_source *s = &lane->source[lane->listen[group]];
    bool exact = gives_exact(g, group);
    g->note = exact ? MOE_GIVEN_EXACT : MOE_GIVEN;
    g->told = false;
    for (uint32_t i = 0; i < s->count; i++) {
        if (exact)
            give_each(g, group, &lane->items[s->first + i]);
        else
            give_sum(g, group, &lane->items[s->first + i]);
    }
    end_run(g, group, false);
    if (past(g, group))
        moe_rows_fence();
    tell_group(g, group);
}

/* --------------------------------------------------------------- waits for weights */

static bool needs_weights(const struct giving *g, uint32_t group)
{
    return g->fused && !g->m->config.exact &&
           g->lane->source[g->lane->listen[group]].count > 0 &&
           !all_members(g, group, has_no_late_weights);
}

/* A group whose weights are waited for and are there. */
static bool some_weights_came(void *argument)
{
    struct giving *g = argument;
    struct hdl_moe *m = g->m;
    for (uint32_t i = 0; i < m->config.layout.sources; i++) {
        if (m->pending[g->lane->listen[i]] && all_members(g, i, has_spoken)) {
            g->ready = i;
            return true;
        }
    }
    return m->peers->ops->check(m->peers) != HDL_OK;
}

static void give_late(struct giving *g, uint32_t group, struct moe_call *call)
{
    struct hdl_moe *m = g->m;
    uint32_t source = g->lane->listen[group];
    bool late = has_late_weights(g, source);
    uint64_t said = said_with_weights(g, source);
    m->pending[source] = 0;
    if (!late || said == (g->lane->flag | MOE_GIVEN) ||
        said == (g->lane->flag | MOE_GIVEN_EXACT)) {
        if (late)
            read_weights(m, g->lane, source);
        give_group(g, group);
    } else {
        drop_group(g, group);
        moe_call_lose(m, call, source);
    }
}

static void give_all(struct giving *g, struct moe_call *call)
{
    struct hdl_moe *m = g->m;
    uint32_t groups = m->config.layout.sources, left = 0;
    uint32_t own = m->peers->self / m->config.shape.dp;
    memset(m->pending, 0, m->config.shape.ranks);
    for (uint32_t i = 1; i <= groups; i++) { /* the own tokens last */
        uint32_t group = (own + i) % groups, source = g->lane->listen[group];
        if (g->lane->source[source].state != MOE_SOURCE_TAKEN) {
            drop_group(g, group);
        } else if (needs_weights(g, group)) {
            m->pending[source] = 1;
            left++;
        } else {
            give_group(g, group);
        }
    }
    for (; left > 0; left--) {
        g->ready = UINT32_MAX;
        if (!some_weights_came(g)) {
            int64_t start = base_now_ns();
            m->peers->ops->wait(m->peers, some_weights_came, g, call->deadline_ns);
            for (uint32_t r = 0; r < m->config.shape.ranks; r++)
                moe_count_wait(m, r, m->pending[r] ? start : 0);
        }
        if (g->ready == UINT32_MAX)
            break;
        give_late(g, g->ready, call);
    }
    for (uint32_t i = 0; left > 0 && i < groups; i++) {
        if (m->pending[g->lane->listen[i]])
            give_late(g, i, call);
    }
}

enum hdl_status moe_combine_begin(struct hdl_moe *m, struct moe_lane *lane,
                                  const struct hdl_moe_outputs *outputs,
                                  struct moe_call *call, bool fused)
{
    struct giving g = {.m = m, .lane = lane, .rows = outputs->rows, .fused = fused};
    bool unweighted = m->config.shape.order == MOE_RANK_MAJOR;
    if (lane->num_items > 0 && !outputs->rows) {
        moe_step_fail(m, lane);
        m->last_error = HDL_EINVAL;
        return base_fail(HDL_EINVAL, "combine: rows are NULL with %u rows received",
                         lane->num_items);
    }
    if (!lane->weighted && !unweighted && lane->tokens > 0 && !outputs->weights) {
        moe_step_fail(m, lane);
        m->last_error = HDL_EINVAL;
        return base_fail(
            HDL_EINVAL,
            "combine: dispatch of %u tokens had no weights, and there are none",
            lane->tokens);
    }
    lane->exact = m->config.exact || (!lane->weighted && !fused && !unweighted);
    if (!lane->weighted && m->config.shape.late_weights && !unweighted)
        publish_weights(m, lane, outputs->weights);
    give_all(&g, call);
    moe_mark_puts(m, lane);
    lane->phase = MOE_COMBINING;
    return m->peers->ops->check(m->peers);
}
