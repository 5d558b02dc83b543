/* SPDX-License-Identifier: Apache-2.0 */
/* Send phase of dispatch: header and rows into the own arena, and from there to messaged
 * ranks. Waits for nobody, except that an unsplit call, or one after a refusal, lets slow
 * peers finish with the half. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "moe/exchange.h"

void moe_refusal_text(enum moe_refusal refusal, const int64_t *v, char *text, size_t size)
{
    switch (refusal) {
    case MOE_TOO_MANY_TOKENS:
        snprintf(text, size, "num_tokens %" PRId64 " exceeds max_tokens %" PRId64, v[0],
                 v[1]);
        break;
    case MOE_NO_ROWS:
        snprintf(text, size, "rows are NULL with num_tokens %" PRId64, v[0]);
        break;
    case MOE_NO_IDS:
        snprintf(text, size, "topk_ids are NULL with num_tokens %" PRId64, v[0]);
        break;
    case MOE_NO_SCALES:
        snprintf(text, size, "scales are NULL with num_tokens %" PRId64, v[0]);
        break;
    case MOE_NO_WEIGHTS:
        snprintf(text, size,
                 "weights are NULL with num_tokens %" PRId64 ", late_weights is not set",
                 v[0]);
        break;
    case MOE_BAD_EXPERT:
        snprintf(text, size,
                 "token %" PRId64 " position %" PRId64 " names expert %" PRId64
                 ", which does not exist",
                 v[0], v[1], v[2]);
        break;
    default:
        snprintf(text, size, "the mask excludes its own rank %" PRId64, v[0]);
        break;
    }
}

/* ------------------------------------------------------------------------ the half */

struct sign_wait {
    struct hdl_moe *m;
    struct moe_lane *lane;
    size_t before; /* half of the step before */
    uint64_t flag; /* of the step before */
};

/* Is everybody that takes part done with what the half held? That it began the step
 * before says so. */
static bool signs_came(void *argument)
{
    struct sign_wait *w = argument;
    struct hdl_moe *m = w->m;
    bool all = true;
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (w->lane->free[r])
            continue;
        struct moe_header_line *line = moe_line(m, w->before, r);
        w->lane->free[r] =
            atomic_load_explicit(&line->flag, memory_order_acquire) >= w->flag ||
            atomic_load_explicit(&line->rows, memory_order_acquire) >= w->flag;
        all = all && (w->lane->free[r] || !base_mask_test(m->mask, r) || moe_gone(m, r));
    }
    return all || m->peers->ops->check(m->peers) != HDL_OK;
}

/* Have the puts from the half, two steps ago, left it? */
static bool puts_left(void *argument)
{
    struct sign_wait *w = argument;
    struct hdl_moe *m = w->m;
    const uint64_t *marks = w->lane->marks[w->lane->step & 1];
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (!moe_mapped(m, r) && !moe_gone(m, r) &&
            !m->peers->ops->settled(m->peers, r, marks[r]))
            return false;
    }
    return true;
}

/* What mapped ranks read is written past the cache from this size on: its lines may be in
 * the cache of a core that is far away, which gives them back five times slower than
 * memory takes the bytes. Where the core is near it costs a twentieth. */
enum { MOE_PAST_BYTES = 512 << 10 };

/* Asks for the lines that will be written. */
static void own_half(const struct hdl_moe *m, struct moe_lane *lane, int64_t tokens)
{
    const struct moe_layout *l = &m->config.layout;
    uint32_t self = m->peers->self, k = m->config.shape.top_k;
    size_t n = tokens > 0 && tokens <= m->config.shape.max_tokens ? (size_t)tokens : 0;
    lane->past = n * l->row_bytes * k > MOE_PAST_BYTES && !m->peers->messaged;
    moe_own_ahead(m->peers->own + moe_header(l, lane->half, self),
                  l->header_fixed + n * l->token_stride);
    if (!lane->past)
        moe_own_ahead(m->peers->own + moe_slot(l, &m->config.shape, lane->half, self, 0),
                      n * l->row_stride);
}

/* Makes the half of the lane's next step writable. */
static void take_half(struct hdl_moe *m, struct moe_lane *lane,
                      const struct moe_call *call, bool fused, int64_t tokens)
{
    struct sign_wait w = {m, lane, lane->half, lane->flag};
    bool fresh = lane->step + 1 < lane->first_step + 2;
    lane->step++;
    lane->flag = moe_flag(m->generation, lane->step);
    lane->half = moe_half(&m->config.layout, lane->number, lane->step);
    own_half(m, lane, tokens);
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        lane->free[r] = fresh || lane->seen[r] || r == m->peers->self;
        lane->seen[r] = 0;
    }
    if (!signs_came(&w) && (fused || lane->refused))
        m->peers->ops->wait(m->peers, signs_came, &w, call->deadline_ns);
    lane->refused = false;
    /* A put that is stuck ends when its link or its rank does. */
    if (m->peers->messaged && !puts_left(&w))
        m->peers->ops->wait(m->peers, puts_left, &w, BASE_FOREVER);
    struct moe_header_line *line = moe_line(m, lane->half, m->peers->self);
    atomic_store_explicit(&line->begun, lane->flag, memory_order_relaxed);
    /* Before any byte of the step, also those that go past the cache, which the first
     * fence does not order on x86. (Large steps of messaged groups store contributions
     * so: behind the fence of dispatch's rows.) */
    atomic_thread_fence(memory_order_release);
    if (lane->past)
        moe_rows_fence();
}

/* -------------------------------------------------------------------------- header */

static enum moe_refusal refuse(struct moe_header_line *line, enum moe_refusal refusal,
                               int64_t a, int64_t b, int64_t c)
{
    line->refusal = (uint16_t)refusal;
    line->value[0] = a;
    line->value[1] = b;
    line->value[2] = c;
    line->tokens = 0;
    return refusal;
}

static enum moe_refusal check_tokens(const struct hdl_moe *m,
                                     const struct hdl_moe_tokens *t,
                                     struct moe_header_line *line)
{
    int64_t n = t->num_tokens;
    if (n < 0 || n > m->config.shape.max_tokens)
        return refuse(line, MOE_TOO_MANY_TOKENS, n, m->config.shape.max_tokens, 0);
    if (n > 0 && !t->rows)
        return refuse(line, MOE_NO_ROWS, n, 0, 0);
    if (n > 0 && !t->topk_ids)
        return refuse(line, MOE_NO_IDS, n, 0, 0);
    if (n > 0 && !t->scales && !m->config.quantise && m->config.shape.row_scales)
        return refuse(line, MOE_NO_SCALES, n, 0, 0);
    if (n > 0 && !t->weights && !m->config.shape.late_weights && !m->config.opaque)
        return refuse(line, MOE_NO_WEIGHTS, n, 0, 0);
    return MOE_ACCEPTED;
}

/* The token records; stops at an id that is no expert. */
static enum moe_refusal write_records(struct hdl_moe *m, struct moe_lane *lane,
                                      const struct hdl_moe_tokens *t,
                                      struct moe_header_line *line)
{
    uint32_t k = m->config.shape.top_k, experts = m->config.shape.experts;
    const int32_t *ids32 = t->topk_ids;
    const int64_t *ids64 = t->topk_ids;
    for (uint32_t i = 0; i < t->num_tokens; i++) {
        float *weights = (float *)(uintptr_t)moe_record(m, lane->half, m->peers->self, i);
        uint16_t *ids = (uint16_t *)(void *)(weights + k);
        if (t->weights)
            memcpy(weights, t->weights + (size_t)i * k, k * sizeof(float));
        else
            memset(weights, 0, k * sizeof(float));
        for (uint32_t j = 0; j < k; j++) {
            size_t at = (size_t)i * k + j;
            int64_t id = t->ids_are_64 ? ids64[at] : ids32[at];
            if (id < -1 || id >= experts)
                return refuse(line, MOE_BAD_EXPERT, i, j, id);
            ids[j] = id < 0 ? MOE_NO_EXPERT : (uint16_t)id;
        }
    }
    return MOE_ACCEPTED;
}

static enum moe_refusal write_header(struct hdl_moe *m, struct moe_lane *lane,
                                     const struct hdl_moe_tokens *t, bool self_masked)
{
    struct moe_header_line *line = moe_line(m, lane->half, m->peers->self);
    uint64_t *mask = (uint64_t *)(void *)(line + 1);
    memcpy(lane->active, m->mask, m->config.layout.mask_words * sizeof(uint64_t));
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (base_mask_test(m->mask, r) && moe_gone(m, r))
            base_mask_clear(lane->active, r); /* replicas elsewhere take its tokens */
    }
    memcpy(mask, lane->active, m->config.layout.mask_words * sizeof(uint64_t));
    line->refusal = MOE_ACCEPTED;
    line->weighted = t->weights != NULL || m->config.opaque;
    line->tokens = 0;
    memset(line->value, 0, sizeof(line->value));
    enum moe_refusal refusal = self_masked
                                   ? refuse(line, MOE_SELF_MASKED, m->peers->self, 0, 0)
                                   : check_tokens(m, t, line);
    if (refusal == MOE_ACCEPTED)
        refusal = write_records(m, lane, t, line);
    lane->tokens = refusal == MOE_ACCEPTED ? (uint32_t)t->num_tokens : 0;
    lane->weighted = line->weighted;
    line->tokens = lane->tokens;
    return refusal;
}

static void ring_all(struct hdl_moe *m)
{
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (r != m->peers->self && moe_mapped(m, r))
            m->peers->ops->ring(m->peers, r);
    }
}

/* To a messaged rank, unless it has it already; rows: some follow at once. */
static void put_header(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
                       bool rows)
{
    const struct moe_layout *l = &m->config.layout;
    size_t at = moe_header(l, lane->half, m->peers->self);
    size_t bytes = l->header_fixed - MOE_HEADER_BLOCK + lane->tokens * l->token_stride;
    bool cut = moe_cut(m, lane, rank);
    size_t flag = cut ? offsetof(struct moe_header_line, rows)
                      : offsetof(struct moe_header_line, flag);
    const struct moe_put put = {.offset = at + MOE_HEADER_BLOCK,
                                .src = m->peers->own + at + MOE_HEADER_BLOCK,
                                .bytes = cut ? 0 : bytes,
                                .signal = at + flag,
                                .flag = lane->flag,
                                .more = rows};
    if (m->pending[rank])
        moe_send(m, rank, &put);
    m->pending[rank] = 0;
}

/* What is due to every messaged rank, the next one first. */
static void put_headers(struct hdl_moe *m, const struct moe_lane *lane)
{
    uint32_t ranks = m->config.shape.ranks;
    for (uint32_t i = 1; m->peers->messaged && i < ranks; i++)
        put_header(m, lane, (m->peers->self + i) % ranks, false);
}

/* ---------------------------------------------------------------------------- rows */

static void stage_row(struct hdl_moe *m, const struct moe_lane *lane,
                      const struct hdl_moe_tokens *t, uint32_t token)
{
    const struct moe_config *c = &m->config;
    uint8_t *slot = m->peers->own +
                    moe_slot(&c->layout, &c->shape, lane->half, m->peers->self, token);
    const uint8_t *row = (const uint8_t *)t->rows + token * c->row_in_bytes;
    if (c->quantise) {
        moe_rows_quantise(c->format, c->dtype, row, c->shape.hidden, slot,
                          slot + c->layout.scale_offset);
        return;
    }
    moe_rows_copy((void *[]){slot}, 1, row, c->row_in_bytes, lane->past);
    if (c->shape.row_scales)
        memcpy(slot + c->layout.scale_offset,
               (const uint8_t *)t->scales + (size_t)token * c->shape.row_scales,
               c->shape.row_scales);
}

/* Puts the run that is open for `rank`; more: another one follows. */
static void put_run(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
                    bool more)
{
    const struct moe_config *c = &m->config;
    struct moe_run *run = &m->runs[rank];
    if (run->rows == 0)
        return;
    uint32_t self = m->peers->self;
    size_t at = moe_slot(&c->layout, &c->shape, lane->half, self, run->first);
    const struct moe_put put = {
        .offset = at,
        .src = m->peers->own + at,
        .bytes =
            moe_run_bytes(run, &m->row_runs, c->layout.row_stride, c->layout.row_bytes),
        .signal = moe_arrive(&c->layout, &c->shape, lane->half, self, run->first),
        .flag = lane->flag,
        .more = more};
    run->rows = 0;
    put_header(m, lane, rank, true);
    moe_send(m, rank, &put);
}

/* The row of `token` is staged: it goes to `rank` with its neighbours. */
static void put_row(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
                    uint32_t token)
{
    bool joins = moe_run_joins(&m->runs[rank], token, &m->row_runs);
    if (!joins)
        put_run(m, lane, rank, true);
    moe_run_add(&m->runs[rank], token, 1, joins);
}

/* Does this member of its DP group send to `rank`? */
static bool serves(const struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank)
{
    uint32_t dp = m->config.shape.dp;
    return dp == 1 ||
           moe_dp_member(dp, m->peers->self / dp, rank, lane->active) == m->peers->self;
}

/* The row of `token` goes to `rank`; the first expert there is enough. */
static void send_row(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
                     uint32_t token)
{
    if (moe_mapped(m, rank))
        m->bytes_sent[rank] += rank == m->peers->self ? 0 : m->config.layout.row_bytes;
    else if (moe_reachable(m, lane, rank))
        put_row(m, lane, rank, token);
}

static void send_rows(struct hdl_moe *m, struct moe_lane *lane,
                      const struct hdl_moe_tokens *t)
{
    uint32_t self = m->peers->self, ranks = m->config.shape.ranks;
    uint32_t *sent = m->needs; /* token + 1 that went to a rank last */
    memset(sent, 0, ranks * sizeof(uint32_t));
    memset(m->runs, 0, ranks * sizeof(struct moe_run));
    for (uint32_t i = 0; i < lane->tokens; i++) {
        const uint16_t *ids = moe_record_ids(m, moe_record(m, lane->half, self, i));
        uint32_t n = moe_resolve(&m->config, ids, NULL, self, i, lane->active, m->routes);
        bool staged = false;
        for (uint32_t j = 0; j < n; j++) {
            uint32_t to = m->routes[j].rank;
            if (sent[to] == i + 1 || (to == self && lane->in_place) ||
                !serves(m, lane, to))
                continue;
            if (!staged)
                stage_row(m, lane, t, i);
            staged = true;
            sent[to] = i + 1;
            send_row(m, lane, to, i);
        }
    }
    for (uint32_t r = 0; m->peers->messaged && r < ranks; r++)
        put_run(m, lane, r, false);
    if (lane->past)
        moe_rows_fence();
}

/* -------------------------------------------------------------------------- phases */

void moe_tell(struct hdl_moe *m, const struct moe_lane *lane, uint32_t rank,
              enum moe_note note, bool rows)
{
    const struct moe_layout *l = &m->config.layout;
    uint64_t flag = lane->flag | note;
    size_t at = moe_line_out(l, lane->half, rank), word = sizeof(uint64_t);
    size_t more = moe_says_source(m) ? word : 0;
    if (more) /* the member that was listened to */
        atomic_store_explicit(moe_word(m->peers->own, at + word),
                              lane->listen[rank / m->config.shape.dp],
                              memory_order_relaxed);
    if (rank == m->peers->self || moe_mapped(m, rank)) {
        atomic_store_explicit(moe_word(m->peers->own, at), flag, memory_order_release);
        if (rank != m->peers->self)
            m->peers->ops->ring(m->peers, rank);
    } else if (moe_reachable(m, lane, rank)) {
        size_t to = moe_line_in(l, lane->half, m->peers->self);
        const struct moe_put put = {.offset = to + word,
                                    .src = m->peers->own + at + word,
                                    .bytes = more,
                                    .signal = to,
                                    .flag = flag,
                                    .more = rows};
        moe_send(m, rank, &put);
    }
}

void moe_tell_weights(struct hdl_moe *m, const struct moe_lane *lane, size_t bytes,
                      enum moe_note note)
{
    const struct moe_layout *l = &m->config.layout;
    uint32_t self = m->peers->self;
    size_t at = moe_weights(l, &m->config.shape, lane->half, self, 0);
    size_t flag =
        moe_header(l, lane->half, self) + offsetof(struct moe_header_line, weights);
    const struct moe_put put = {.offset = at,
                                .src = m->peers->own + at,
                                .bytes = bytes,
                                .signal = flag,
                                .flag = lane->flag | note};
    atomic_store_explicit(moe_word(m->peers->own, flag), put.flag, memory_order_release);
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (r != self && moe_mapped(m, r))
            m->peers->ops->ring(m->peers, r);
        else if (moe_reachable(m, lane, r))
            moe_send(m, r, &put);
    }
}

void moe_mark_puts(struct hdl_moe *m, struct moe_lane *lane)
{
    for (uint32_t r = 0; m->peers->messaged && r < m->config.shape.ranks; r++) {
        if (!moe_mapped(m, r) && !moe_gone(m, r))
            lane->marks[lane->step & 1][r] = m->peers->ops->mark(m->peers, r);
    }
}

void moe_step_fail(struct hdl_moe *m, struct moe_lane *lane)
{
    for (uint32_t r = 0; r < m->config.shape.ranks; r++)
        moe_tell(m, lane, r, MOE_DROPPED, false);
    if (m->config.shape.late_weights)
        moe_tell_weights(m, lane, 0, MOE_DROPPED);
    moe_mark_puts(m, lane);
    lane->phase = MOE_IDLE;
    m->failed_steps++;
}

static enum hdl_status report_refusal(struct hdl_moe *m, struct moe_lane *lane,
                                      enum moe_refusal refusal)
{
    char text[160];
    const int64_t *value = moe_line(m, lane->half, m->peers->self)->value;
    moe_refusal_text(refusal, value, text, sizeof(text));
    m->last_error = HDL_EINVAL;
    for (int i = 0; i < 3; i++)
        m->error[i] = refusal == MOE_BAD_EXPERT ? value[i] : -1;
    moe_step_fail(m, lane);
    lane->refused = true;
    return base_fail(HDL_EINVAL, "dispatch step %" PRIu64 ": %s", m->next - 1, text);
}

/* Results that do not fit into the caches are written past them: sooner where messages
 * pass through the caches, too. */
enum {
    MOE_STREAM_BYTES = 4 << 20,
    MOE_STREAM_MESSAGED = 1 << 20,
    MOE_EARLY_BYTES = 64 << 10
};

enum hdl_status moe_dispatch_begin(struct hdl_moe *m, const struct hdl_moe_tokens *tokens,
                                   struct moe_call *call, bool fused,
                                   struct moe_lane **out)
{
    struct moe_lane *lane = &m->lanes[m->turn % m->config.shape.lanes];
    struct moe_header_line *line;
    bool self_masked = call->active && call->active[m->peers->self] == 0;
    if (lane->phase != MOE_IDLE)
        return base_fail(HDL_EBUSY,
                         "step %" PRIu64 " of lane %u has not ended: %u lanes are open",
                         lane->step, lane->number, m->config.shape.lanes);
    m->next++;
    m->turn++;
    take_half(m, lane, call, fused, tokens->num_tokens);
    line = moe_line(m, lane->half, m->peers->self);
    enum moe_refusal refusal = write_header(m, lane, tokens, self_masked);
    lane->in_place = fused && !m->config.quantise;
    lane->rows = tokens->rows;
    lane->scales = tokens->scales;
    size_t volume = lane->tokens * m->config.layout.row_bytes;
    lane->stream = volume * m->config.shape.top_k >
                   (m->peers->messaged ? MOE_STREAM_MESSAGED : MOE_STREAM_BYTES);
    bool early = volume > MOE_EARLY_BYTES || refusal != MOE_ACCEPTED;
    if (early) {
        atomic_store_explicit(&line->flag, lane->flag, memory_order_release);
        ring_all(m);
    }
    for (uint32_t r = 0; r < m->config.shape.ranks; r++)
        m->pending[r] = !moe_mapped(m, r) && !moe_gone(m, r);
    if (early)
        put_headers(m, lane);
    send_rows(m, lane, tokens);
    put_headers(m, lane);
    atomic_store_explicit(&line->rows, lane->flag, memory_order_release);
    atomic_store_explicit(&line->flag, lane->flag, memory_order_release);
    ring_all(m);
    moe_mark_puts(m, lane);
    lane->phase = MOE_SENT;
    *out = lane;
    if (refusal != MOE_ACCEPTED)
        return report_refusal(m, lane, refusal);
    return HDL_OK;
}
