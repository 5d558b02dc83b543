/* SPDX-License-Identifier: Apache-2.0 */
/* Receive phase of combine: waits for the contributions to the own tokens and adds them.
 */
#include <inttypes.h>
#include <string.h>

#include "moe/exchange.h"

struct taking {
    struct hdl_moe *m;
    struct moe_lane *lane;
    const struct hdl_moe_result *result;
    uint32_t token; /* wait_for_rows: the first one that may lack a row */
    uint32_t blocked_by;
    int64_t start; /* of the wait for lines, 0 = none yet */
};

/* m->pending: what is known of a rank's contributions. */
enum {
    TAKE_NOTHING = 0, /* no token chose it */
    TAKE_WAITING,
    TAKE_THERE,
    TAKE_MISSING
};

static const float *own_weights(const struct hdl_moe *m, const struct moe_lane *lane,
                                uint32_t token, const float *record)
{
    if (lane->weighted || !m->config.shape.late_weights)
        return record;
    return (const float *)(const void *)(m->peers->own +
                                         moe_weights(&m->config.layout, &m->config.shape,
                                                     lane->half, m->peers->self, token));
}

/* Routes of an own token, positions ascending. */
static uint32_t own_routes(struct hdl_moe *m, const struct moe_lane *lane, uint32_t token)
{
    const float *record = moe_record(m, lane->half, m->peers->self, token);
    return moe_resolve(&m->config, moe_record_ids(m, record),
                       own_weights(m, lane, token, record), m->peers->self, token,
                       lane->active, m->routes);
}

/* --------------------------------------------------------------------------- lines */

/* Replicas are chosen by the mask of the member of the DP group that was listened to. If
 * it counted on other ranks, the contribution may be for other experts than this rank's
 * routes say. */
static bool for_same_routes(const struct taking *t, const uint8_t *line)
{
    const struct hdl_moe *m = t->m;
    uint32_t dp = m->config.shape.dp, first = m->peers->self / dp * dp;
    if (!moe_says_source(m))
        return true;
    uint64_t from =
        *(const uint64_t *)(const void *)(line + sizeof(uint64_t)); /* untrusted */
    return from >= first && from < first + dp && t->lane->alike[from - first] &&
           t->lane->source[from].state == MOE_SOURCE_TAKEN;
}

static const uint8_t *part_at(const struct taking *t, uint32_t token, uint32_t rank,
                              uint32_t number)
{
    const struct moe_config *c = &t->m->config;
    uint32_t owner = t->m->peers->self / c->shape.dp * c->shape.dp;
    if (moe_mapped(t->m, rank))
        return moe_base(t->m, rank) +
               moe_give(&c->layout, &c->shape, t->lane->half, owner, token, number);
    return t->m->peers->own +
           moe_take_from(&c->layout, &c->shape, t->lane->half, rank, token, number);
}

static bool no_line_comes(const struct hdl_moe *m, const struct moe_lane *lane,
                          uint32_t rank)
{
    return moe_cut(m, lane, rank) || moe_silent(m, lane, rank);
}

/* Looks at a contributor's line; false while it says nothing of this step. */
static bool line_decided(const struct taking *t, uint32_t rank)
{
    struct hdl_moe *m = t->m;
    const struct moe_layout *l = &m->config.layout;
    uint8_t *base = moe_base(m, rank);
    size_t at = moe_mapped(m, rank) ? moe_line_out(l, t->lane->half, m->peers->self)
                                    : moe_line_in(l, t->lane->half, rank);
    uint64_t word = atomic_load_explicit(moe_word(base, at), memory_order_acquire);
    uint64_t flag = word & ~MOE_NOTE_MASK;
    if (flag < t->lane->flag && !no_line_comes(m, t->lane, rank))
        return false;
    uint64_t note = word & MOE_NOTE_MASK;
    /* Who counts this rank as gone may give a sum, which cannot be taken apart. */
    bool usable = note == MOE_GIVEN_EXACT || (note == MOE_GIVEN && !t->lane->exact);
    bool there = flag == t->lane->flag && usable && for_same_routes(t, base + at);
    m->pending[rank] = there ? TAKE_THERE : TAKE_MISSING;
    m->stale_drops += flag > t->lane->flag;
    m->needs[rank] = (uint32_t)note; /* the form it came in */
    if (there && moe_mapped(m, rank))
        moe_fetch_ahead(part_at(t, 0, rank, 0), t->lane->tokens * l->give_stride);
    return true;
}

static bool lines_decided(void *argument)
{
    struct taking *t = argument;
    struct hdl_moe *m = t->m;
    bool all = true;
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (m->pending[r] != TAKE_WAITING)
            continue;
        if (line_decided(t, r))
            moe_count_wait(m, r, t->start);
        else
            all = false;
    }
    return all || m->peers->ops->check(m->peers) != HDL_OK;
}

static void wait_for_lines(struct taking *t, struct moe_call *call)
{
    struct hdl_moe *m = t->m;
    memset(m->pending, TAKE_NOTHING, m->config.shape.ranks);
    for (uint32_t i = 0; i < t->lane->tokens; i++) {
        uint32_t n = own_routes(m, t->lane, i);
        for (uint32_t j = 0; j < n; j++) {
            uint32_t r = m->routes[j].rank;
            m->pending[r] = base_mask_test(m->mask, r) ? TAKE_WAITING : TAKE_MISSING;
        }
    }
    if (!lines_decided(t)) {
        t->start = base_now_ns();
        m->peers->ops->wait(m->peers, lines_decided, t, call->deadline_ns);
    }
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (m->pending[r] == TAKE_WAITING)
            moe_count_wait(m, r, t->start);
        bool silent = m->pending[r] == TAKE_MISSING && base_mask_test(m->mask, r) &&
                      no_line_comes(m, t->lane, r);
        if (m->pending[r] != TAKE_WAITING && !silent)
            continue;
        m->pending[r] = TAKE_MISSING;
        moe_call_lose(m, call, r);
    }
}

static bool came_exact(const struct hdl_moe *m, uint32_t rank)
{
    return m->needs[rank] == MOE_GIVEN_EXACT;
}

/* ------------------------------------------------------------------------ rows by put */

/* Rows that the routes say rank number j sends; 0 if an earlier route counted it. */
static uint32_t rows_from(const struct taking *t, const struct moe_route *routes,
                          uint32_t n, uint32_t j)
{
    uint32_t rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (routes[i].rank != routes[j].rank)
            continue;
        if (i < j)
            return 0;
        rows++;
    }
    return came_exact(t->m, routes[j].rank) ? rows : 1;
}

/* Looks at what a rank sends for the token: false if its run has not landed. */
static bool run_landed(struct taking *t, uint32_t rank, uint32_t rows)
{
    struct hdl_moe *m = t->m;
    const struct moe_config *c = &m->config;
    struct moe_run *run = &m->runs[rank];
    if (run->rows > 0 && run->token == t->token)
        return true; /* seen when another rank held up the token */
    bool joins = moe_run_joins(run, t->token, &m->give_runs);
    size_t at = moe_landed_from(&c->layout, &c->shape, t->lane->half, rank, t->token);
    if (!joins && atomic_load_explicit(moe_word(m->peers->own, at),
                                       memory_order_acquire) != t->lane->flag)
        return false;
    moe_run_add(run, t->token, rows, joins);
    return true;
}

/* Have all contributions of messaged ranks landed? */
static bool rows_landed(void *argument)
{
    struct taking *t = argument;
    struct hdl_moe *m = t->m;
    for (; t->token < t->lane->tokens; t->token++) {
        uint32_t n = own_routes(m, t->lane, t->token);
        for (uint32_t j = 0; j < n; j++) {
            uint32_t r = m->routes[j].rank, rows = rows_from(t, m->routes, n, j);
            if (rows == 0 || moe_mapped(m, r) || m->pending[r] != TAKE_THERE ||
                run_landed(t, r, rows))
                continue;
            t->blocked_by = r;
            if (!moe_gone(m, r))
                return m->peers->ops->check(m->peers) != HDL_OK;
            m->pending[r] = TAKE_MISSING;
        }
    }
    return true;
}

static void wait_for_rows(struct taking *t, struct moe_call *call)
{
    struct hdl_moe *m = t->m;
    if (!m->peers->messaged)
        return;
    t->token = 0;
    memset(m->runs, 0, m->config.shape.ranks * sizeof(struct moe_run));
    while (!rows_landed(t)) {
        if (m->peers->ops->wait(m->peers, rows_landed, t, call->deadline_ns))
            break;
        m->pending[t->blocked_by] = TAKE_MISSING;
        moe_call_lose(m, call, t->blocked_by);
    }
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (m->pending[r] == TAKE_MISSING && base_mask_test(m->mask, r) && moe_gone(m, r))
            moe_call_lose(m, call, r); /* its line had come, its rows did not */
    }
}

/* ---------------------------------------------------------------------------- sums */

/* Number of a route among those of its token that go to the same rank, experts ascending.
 */
static uint32_t number_at_rank(const struct moe_route *routes, uint32_t n, uint32_t j)
{
    uint32_t number = 0;
    for (uint32_t i = 0; i < n; i++)
        number += routes[i].rank == routes[j].rank && routes[i].local < routes[j].local;
    return number;
}

/* Sorts routes by rank, then expert. */
static void by_place(struct moe_route *routes, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        struct moe_route route = routes[i];
        uint32_t at = i;
        for (; at > 0 &&
               (routes[at - 1].rank > route.rank || (routes[at - 1].rank == route.rank &&
                                                     routes[at - 1].local > route.local));
             at--)
            routes[at] = routes[at - 1];
        routes[at] = route;
    }
}

static void count_received(struct hdl_moe *m, uint32_t rank, uint32_t rows)
{
    if (rank != m->peers->self)
        m->bytes_received[rank] += rows * m->config.layout.give_bytes;
}

/* The sum that a rank did not make because its combine did not wait for the weights: what
 * it would have sent, in place of number `at`. */
static const uint8_t *sum_up(struct taking *t, uint32_t token, uint32_t at,
                             const struct moe_route *routes, uint32_t n)
{
    struct hdl_moe *m = t->m;
    const void *rows[MOE_MAX_TOP_K], *sum = m->sum;
    float weights[MOE_MAX_TOP_K];
    uint8_t *to = m->copies + at * m->config.layout.give_stride;
    struct moe_wire wire = m->wire;
    bool fp8 = wire.kind == HDL_MOE_WIRE_FP8;
    for (uint32_t i = 0; i < n; i++) {
        rows[i] = part_at(t, token, routes[i].rank, i);
        weights[i] = routes[i].weight;
    }
    if (wire.kind != HDL_MOE_WIRE_ROW)
        wire.dtype = HDL_F32;
    const struct moe_take take = {.parts = rows, .weights = weights, .n = n};
    moe_rows_take(&wire, fp8 ? (void *)m->sum : to, &take, false);
    if (fp8)
        moe_rows_give(&wire, to, &sum, NULL, 1, false);
    return to;
}

/* The contributions of all ranks to a token, ranks ascending; returns their number. */
static uint32_t collect_by_rank(struct taking *t, uint32_t token, uint32_t n,
                                bool *missing)
{
    struct hdl_moe *m = t->m;
    uint32_t found = 0, same;
    by_place(m->routes, n);
    for (uint32_t j = 0; j < n; j += same) {
        const struct moe_route *routes = &m->routes[j];
        uint32_t rank = routes->rank;
        for (same = 1; j + same < n && routes[same].rank == rank;)
            same++;
        if (m->pending[rank] != TAKE_THERE) {
            *missing = true;
            continue;
        }
        bool exact = came_exact(m, rank);
        m->parts[found] =
            exact ? sum_up(t, token, found, routes, same) : part_at(t, token, rank, 0);
        found++;
        count_received(m, rank, exact ? same : 1);
    }
    return found;
}

/* One for each expert, positions ascending. */
static uint32_t collect_by_position(struct taking *t, uint32_t token, uint32_t n,
                                    bool *missing)
{
    struct hdl_moe *m = t->m;
    uint32_t found = 0;
    for (uint32_t j = 0; j < n; j++) {
        const struct moe_route *route = &m->routes[j];
        if (m->pending[route->rank] != TAKE_THERE) {
            *missing = true;
            continue;
        }
        m->parts[found] = part_at(t, token, route->rank, number_at_rank(m->routes, n, j));
        m->part_weights[found++] = route->weight;
        count_received(m, route->rank, 1);
    }
    return found;
}

/* Is every mapped contributor still in this step? Those that are not become missing. */
static bool still_there(struct taking *t)
{
    struct hdl_moe *m = t->m;
    bool all = true;
    atomic_thread_fence(memory_order_acquire);
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (m->pending[r] != TAKE_THERE || !moe_mapped(m, r))
            continue;
        if (atomic_load_explicit(&moe_line(m, t->lane->half, r)->begun,
                                 memory_order_relaxed) == t->lane->flag)
            continue;
        m->pending[r] = TAKE_MISSING;
        m->stale_drops++;
        all = false;
    }
    return all;
}

/* Copies what was collected, for sums that cannot be repeated. */
static void copy_parts(struct hdl_moe *m, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint8_t *to = m->copies + i * m->config.layout.give_stride;
        if (m->parts[i] != to)
            memcpy(to, m->parts[i], m->config.layout.give_bytes);
        m->parts[i] = to;
    }
}

static bool add_token(struct taking *t, uint32_t token)
{
    struct hdl_moe *m = t->m;
    const struct hdl_moe_result *r = t->result;
    size_t bytes = (size_t)m->config.shape.hidden * m->config.shape.take_elem;
    size_t at = token * bytes;
    bool missing = false;
    uint32_t n = own_routes(m, t->lane, token);
    n = t->lane->exact ? collect_by_position(t, token, n, &missing)
                       : collect_by_rank(t, token, n, &missing);
    if (r->accumulate) {
        copy_parts(m, n);
        if (!still_there(t))
            return add_token(t, token); /* without those */
    }
    struct moe_take take = {.parts = m->parts,
                            .weights = t->lane->exact ? m->part_weights : NULL,
                            .n = n,
                            .accumulate = r->accumulate};
    for (int b = 0; b < 2; b++)
        take.bias[b] = r->bias[b] ? (const uint8_t *)r->bias[b] + at : NULL;
    moe_rows_take(&m->wire, (uint8_t *)r->rows + at, &take, t->lane->stream);
    if (r->missing)
        r->missing[token] = missing;
    return missing;
}

static bool add_all(struct taking *t)
{
    bool missing = false;
    for (uint32_t i = 0; i < t->lane->tokens; i++)
        missing = add_token(t, i) || missing;
    return missing;
}

enum hdl_status moe_combine_finish(struct hdl_moe *m, struct moe_lane *lane,
                                   const struct hdl_moe_result *result,
                                   struct moe_call *call)
{
    struct taking t = {.m = m, .lane = lane, .result = result};
    if (lane->tokens > 0 && !result->rows) {
        lane->phase = MOE_IDLE;
        m->failed_steps++;
        m->last_error = HDL_EINVAL;
        return base_fail(HDL_EINVAL, "combine: result rows are NULL with %u tokens",
                         lane->tokens);
    }
    wait_for_lines(&t, call);
    wait_for_rows(&t, call);
    lane->phase = MOE_IDLE;
    enum hdl_status status = m->peers->ops->check(m->peers);
    if (status != HDL_OK) {
        m->failed_steps++;
        m->last_error = status;
        return status;
    }
    bool missing = add_all(&t);
    while (!result->accumulate && !still_there(&t))
        missing = add_all(&t); /* without those whose arena moved on */
    if (lane->stream)
        moe_rows_fence();
    return moe_call_end(m, call, missing);
}
