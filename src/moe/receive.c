/* SPDX-License-Identifier: Apache-2.0 */
/* Receive phase of dispatch: waits for headers, plans, waits for rows and delivers them.
 */
#include <inttypes.h>
#include <string.h>

#include "moe/exchange.h"

struct waiting {
    struct hdl_moe *m;
    struct moe_lane *lane;
    uint32_t num_waiting;
    uint32_t ready; /* a source whose rows are there, or UINT32_MAX */
    int64_t start;  /* of the wait for headers, 0 = none yet */
};

/* ------------------------------------------------------------------------- headers */

/* Tokens that choose as many experts as there are ranks go to nearly all of them. */
static bool comes_here(const struct hdl_moe *m, uint32_t rank)
{
    return rank != m->peers->self && moe_mapped(m, rank) &&
           m->config.shape.top_k >= m->config.shape.ranks;
}

/* A header of a small step came, and so did its rows: what the plan will read, and what
 * it will find to be read. */
static void fetch_source(const struct hdl_moe *m, const struct moe_lane *lane,
                         uint32_t rank)
{
    const struct moe_layout *l = &m->config.layout;
    size_t tokens = moe_line(m, lane->half, rank)->tokens; /* untrusted */
    if (!comes_here(m, rank))
        return;
    moe_fetch_ahead(moe_base(m, rank) + moe_token(l, lane->half, rank, 0),
                    tokens * l->token_stride);
    moe_fetch_ahead(moe_base(m, rank) +
                        moe_slot(l, &m->config.shape, lane->half, rank, 0),
                    tokens * l->row_stride);
}

/* While headers are waited for: the lines of contributions, should others have as many
 * tokens as this rank. */
static void own_contributions(const struct hdl_moe *m, const struct moe_lane *lane)
{
    const struct moe_shape *s = &m->config.shape;
    const struct moe_layout *l = &m->config.layout;
    for (uint32_t r = 0; r < s->ranks; r++) {
        size_t at = moe_give(l, s, lane->half, r / s->dp * s->dp, 0, 0);
        if (!comes_here(m, r))
            continue;
        moe_own_ahead(m->peers->own + at, lane->tokens * l->gives * l->give_stride);
        moe_own_ahead(m->peers->own + moe_line_out(l, lane->half, r), MOE_LINE_BYTES);
    }
}

/* Looks at the header flag of a source; true when there is nothing more to wait for. */
static bool header_decided(struct hdl_moe *m, struct moe_lane *lane, uint32_t rank)
{
    struct moe_source *s = &lane->source[rank];
    struct moe_header_line *line = moe_line(m, lane->half, rank);
    uint64_t flag = atomic_load_explicit(&line->flag, memory_order_acquire);
    if (flag == lane->flag) {
        s->state = moe_cut(m, lane, rank) ? MOE_SOURCE_LOST : MOE_SOURCE_CAME;
        lane->seen[rank] = 1;
        fetch_source(m, lane, rank);
    } else if (flag > lane->flag) { /* this rank was left behind */
        s->state = MOE_SOURCE_LOST;
        m->stale_drops++;
    } else if (moe_silent(m, lane, rank)) {
        s->state = MOE_SOURCE_LOST;
    }
    return s->state != MOE_SOURCE_WAITING;
}

static bool headers_decided(void *argument)
{
    struct waiting *w = argument;
    struct hdl_moe *m = w->m;
    for (uint32_t r = 0; w->num_waiting > 0 && r < m->config.shape.ranks; r++) {
        if (w->lane->source[r].state != MOE_SOURCE_WAITING ||
            !header_decided(m, w->lane, r))
            continue;
        moe_count_wait(m, r, w->start);
        w->num_waiting--;
    }
    return w->num_waiting == 0 || m->peers->ops->check(m->peers) != HDL_OK;
}

static void wait_for_headers(struct hdl_moe *m, struct moe_lane *lane,
                             struct moe_call *call)
{
    struct waiting w = {.m = m, .lane = lane};
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        bool waits = base_mask_test(m->mask, r);
        lane->source[r].state = waits ? MOE_SOURCE_WAITING : MOE_SOURCE_MASKED;
        lane->source[r].count = 0;
        w.num_waiting += waits;
    }
    own_contributions(m, lane);
    if (!headers_decided(&w)) {
        w.start = base_now_ns();
        m->peers->ops->wait(m->peers, headers_decided, &w, call->deadline_ns);
    }
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (lane->source[r].state == MOE_SOURCE_WAITING) {
            lane->source[r].state = MOE_SOURCE_LOST;
            moe_count_wait(m, r, w.start);
        }
        if (lane->source[r].state == MOE_SOURCE_LOST)
            moe_call_lose(m, call, r);
    }
}

/* Is what was read in the source's arena of this step? Its owner may have gone on to the
 * next step in this half, and left this rank behind. */
static bool is_of_step(const struct hdl_moe *m, const struct moe_lane *lane,
                       uint32_t rank)
{
    if (!moe_mapped(m, rank))
        return true;
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&moe_line(m, lane->half, rank)->begun,
                                memory_order_relaxed) == lane->flag;
}

static void lose_source(struct hdl_moe *m, struct moe_lane *lane, uint32_t rank,
                        struct moe_call *call)
{
    m->stale_drops++;
    lane->source[rank].state = MOE_SOURCE_LOST;
    moe_call_lose(m, call, rank);
}

/* Headers of sources that refused: the step is over. */
static enum hdl_status check_refusals(struct hdl_moe *m, struct moe_lane *lane,
                                      struct moe_call *call)
{
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        const struct moe_header_line *line = moe_line(m, lane->half, r);
        char text[160];
        if (lane->source[r].state != MOE_SOURCE_CAME || line->refusal == MOE_ACCEPTED)
            continue;
        moe_refusal_text(line->refusal, line->value, text, sizeof(text));
        if (!is_of_step(m, lane, r)) {
            lose_source(m, lane, r, call);
            continue;
        }
        m->last_error = HDL_EPEER;
        m->error[0] = m->error[1] = m->error[2] = -1;
        moe_step_fail(m, lane);
        return base_fail(HDL_EPEER, "rank %u refused its dispatch: %s", r, text);
    }
    return HDL_OK;
}

/* ---------------------------------------------------------------------------- rows */

/* Are all runs of a messaged source there? Remembers how far it looked. */
static bool runs_arrived(struct hdl_moe *m, struct moe_lane *lane, uint32_t rank)
{
    const struct moe_config *c = &m->config;
    struct moe_source *s = &lane->source[rank];
    while (s->arrived < s->count) {
        const struct moe_item *item = &lane->items[s->first + s->arrived];
        size_t at = moe_arrive(&c->layout, &c->shape, lane->half, rank, item->token);
        if (atomic_load_explicit(moe_word(m->peers->own, at), memory_order_acquire) !=
            lane->flag)
            return false;
        struct moe_run run = {item->token, item->token, 1};
        uint32_t n = 1;
        for (; s->arrived + n < s->count &&
               moe_run_joins(&run, item[n].token, &m->row_runs);
             n++)
            moe_run_add(&run, item[n].token, 1, true);
        s->arrived += n;
    }
    return true;
}

/* Looks whether the rows of a source are there, or will never come. */
static bool rows_decided(struct hdl_moe *m, struct moe_lane *lane, uint32_t rank)
{
    struct moe_header_line *line = moe_line(m, lane->half, rank);
    struct moe_source *s = &lane->source[rank];
    if (!moe_mapped(m, rank)) {
        if (runs_arrived(m, lane, rank))
            return true;
    } else {
        uint64_t rows = atomic_load_explicit(&line->rows, memory_order_acquire);
        if (rows == lane->flag)
            return true;
        if (rows > lane->flag) {
            s->state = MOE_SOURCE_LOST;
            return true;
        }
    }
    if (!moe_gone(m, rank))
        return false;
    s->state = MOE_SOURCE_LOST;
    return true;
}

static bool some_rows_decided(void *argument)
{
    struct waiting *w = argument;
    struct hdl_moe *m = w->m;
    uint32_t ranks = m->config.shape.ranks;
    for (uint32_t i = 0; i < ranks; i++) { /* the own first: it is never waited for */
        uint32_t r = (m->peers->self + i) % ranks;
        if (m->pending[r] && rows_decided(m, w->lane, r)) {
            w->ready = r;
            return true;
        }
    }
    return m->peers->ops->check(m->peers) != HDL_OK;
}

/* The row of an item, and its scales, as it lies in its source's slot. */
static const uint8_t *slot_of(const struct hdl_moe *m, const struct moe_lane *lane,
                              uint32_t rank, uint32_t token, const uint8_t **scales)
{
    const struct moe_config *c = &m->config;
    if (rank == m->peers->self && lane->in_place) {
        *scales =
            lane->scales ? lane->scales + (size_t)token * c->shape.row_scales : NULL;
        return lane->rows + token * c->row_in_bytes;
    }
    const uint8_t *slot =
        moe_base(m, rank) + moe_slot(&c->layout, &c->shape, lane->half, rank, token);
    *scales = slot + c->layout.scale_offset;
    return slot;
}

/* Output rows of an item; returns how many. */
static uint32_t rows_of(const struct hdl_moe *m, const struct moe_lane *lane,
                        const struct moe_item *item, uint32_t *rows)
{
    if (m->config.shape.order == MOE_RANK_MAJOR || m->config.shape.order == MOE_INDEXED) {
        rows[0] = item->row;
        return 1;
    }
    for (uint32_t i = 0; i < item->entries; i++)
        rows[i] = lane->entries[item->entry + i].row;
    return item->entries;
}

static void describe_row(const struct hdl_moe *m, const struct moe_lane *lane,
                         const struct moe_item *item, const struct hdl_moe_received *out)
{
    uint32_t k = m->config.shape.top_k;
    size_t at = (size_t)item->row * k;
    for (uint32_t j = 0; j < k; j++) {
        if (out->local_ids)
            out->local_ids[at + j] = -1;
        if (out->weights)
            out->weights[at + j] = 0.0f;
    }
    for (uint32_t i = 0; i < item->entries; i++) {
        const struct moe_entry *entry = &lane->entries[item->entry + i];
        if (out->local_ids)
            out->local_ids[at + entry->position] = entry->local;
        if (out->weights)
            out->weights[at + entry->position] = entry->weight;
    }
}

static void deliver(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
                    const struct moe_item *item, const struct hdl_moe_received *out)
{
    const struct moe_shape *s = &m->config.shape;
    size_t bytes = (size_t)s->hidden * s->row_elem;
    uint32_t rows[MOE_MAX_TOP_K], n = rows_of(m, lane, item, rows);
    const uint8_t *scales, *slot = slot_of(m, lane, rank, item->token, &scales);
    for (uint32_t i = 0; i < n; i++)
        m->places[i] = (uint8_t *)out->rows + rows[i] * bytes;
    moe_rows_copy(m->places, n, slot, bytes, lane->stream);
    for (uint32_t i = 0; i < n; i++) {
        if (s->row_scales)
            memcpy((uint8_t *)out->scales + (size_t)rows[i] * s->row_scales, scales,
                   s->row_scales);
        if (out->source_token)
            out->source_token[rows[i]] = (int32_t)item->token;
    }
    if (s->order == MOE_RANK_MAJOR || s->order == MOE_INDEXED)
        describe_row(m, lane, item, out);
}

/* The rows keep their places, without data. */
static void deliver_nothing(struct hdl_moe *m, const struct moe_lane *lane,
                            const struct moe_item *item,
                            const struct hdl_moe_received *out)
{
    const struct moe_shape *s = &m->config.shape;
    size_t bytes = (size_t)s->hidden * s->row_elem;
    uint32_t rows[MOE_MAX_TOP_K], n = rows_of(m, lane, item, rows);
    for (uint32_t i = 0; i < n; i++) {
        memset((uint8_t *)out->rows + rows[i] * bytes, 0, bytes);
        if (s->row_scales)
            memset((uint8_t *)out->scales + (size_t)rows[i] * s->row_scales, 0,
                   s->row_scales);
        if (out->source_token)
            out->source_token[rows[i]] = -1;
    }
    if (s->order == MOE_RANK_MAJOR || s->order == MOE_INDEXED)
        describe_row(m, lane, item, out);
}

/* Delivers what a source sent, unless its arena moved on to a later step meanwhile. */
static void take_source(struct hdl_moe *m, struct moe_lane *lane, uint32_t rank,
                        struct hdl_moe_received *out, struct moe_call *call)
{
    struct moe_source *s = &lane->source[rank];
    bool there = s->state == MOE_SOURCE_CAME;
    for (uint32_t i = 0; there && i < s->count; i++)
        deliver(m, lane, rank, &lane->items[s->first + i], out);
    if (there && is_of_step(m, lane, rank)) {
        s->state = MOE_SOURCE_TAKEN;
        if (rank != m->peers->self)
            m->bytes_received[rank] += s->count * m->config.layout.row_bytes;
        return;
    }
    for (uint32_t i = 0; i < s->count; i++)
        deliver_nothing(m, lane, &lane->items[s->first + i], out);
    lose_source(m, lane, rank, call);
}

static void take_rows(struct hdl_moe *m, struct moe_lane *lane,
                      struct hdl_moe_received *out, struct moe_call *call)
{
    struct waiting w = {.m = m, .lane = lane};
    uint32_t left = 0;
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        struct moe_source *s = &lane->source[r];
        m->pending[r] = s->state == MOE_SOURCE_CAME && s->count > 0;
        left += m->pending[r];
        if (s->state == MOE_SOURCE_CAME && s->count == 0)
            take_source(m, lane, r, out, call); /* was it the header of this step? */
    }
    while (left > 0) {
        w.ready = UINT32_MAX;
        if (!some_rows_decided(&w)) {
            int64_t start = base_now_ns();
            m->peers->ops->wait(m->peers, some_rows_decided, &w, call->deadline_ns);
            for (uint32_t r = 0; r < m->config.shape.ranks; r++)
                moe_count_wait(m, r, m->pending[r] ? start : 0);
        }
        if (w.ready == UINT32_MAX)
            break; /* deadline, or the group is over */
        m->pending[w.ready] = 0;
        left--;
        take_source(m, lane, w.ready, out, call);
    }
    for (uint32_t r = 0; left > 0 && r < m->config.shape.ranks; r++) {
        if (!m->pending[r])
            continue;
        lane->source[r].state = MOE_SOURCE_LOST;
        take_source(m, lane, r, out, call);
    }
    if (lane->stream)
        moe_rows_fence();
}

enum hdl_status moe_dispatch_finish(struct hdl_moe *m, struct moe_lane *lane,
                                    struct hdl_moe_received *out, struct moe_call *call)
{
    wait_for_headers(m, lane, call);
    enum hdl_status status = m->peers->ops->check(m->peers);
    if (status == HDL_OK)
        status = check_refusals(m, lane, call);
    if (status != HDL_OK)
        return status;
    out->num_rows = out->num_pairs = 0;
    moe_plan(m, lane, out);
    take_rows(m, lane, out, call);
    lane->phase = MOE_RECEIVED;
    status = m->peers->ops->check(m->peers);
    return status != HDL_OK ? status : moe_call_end(m, call, false);
}
