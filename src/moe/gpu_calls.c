/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls of an exchange on GPUs: checks what the host can, then launches. */
#include <inttypes.h>
#include <string.h>

#include "base/option.h"
#include "moe/gpu_link.h"

static enum hdl_status begin_call(struct hdl_moe *m, uint32_t phase,
                                  const struct hdl_moe_call *opts,
                                  struct moe_gpu_call *call)
{
    struct hdl_moe_call o;
    enum hdl_status status = m->peers->ops->check(m->peers);
    if (status == HDL_OK)
        status = base_option_copy("hdl_moe_call", opts, &o, sizeof(o));
    if (status != HDL_OK)
        return status;
    *call = (struct moe_gpu_call){
        .phase = phase,
        .active = o.active,
        .timeout_ns = o.timeout_us > 0 ? (uint64_t)base_timeout_ns(o.timeout_us) : 0,
        .stream = o.stream,
    };
    return HDL_OK;
}

/* A peer refused its call; that kernel went on as if it had no tokens. */
static enum hdl_status peer_refused(const struct hdl_moe *m, uint32_t rank, int64_t asked)
{
    const int64_t most = m->config.shape.max_tokens;
    if (asked >= MOE_GPU_NO_DATA && asked - MOE_GPU_NO_DATA <= most)
        return base_fail(HDL_EPEER,
                         "rank %u refused an earlier dispatch: data are NULL with "
                         "num_tokens %" PRId64,
                         rank, asked - MOE_GPU_NO_DATA);
    return base_fail(HDL_EPEER,
                     "rank %u refused an earlier dispatch: num_tokens %" PRId64
                     " exceeds max_tokens %" PRId64,
                     rank, asked, most);
}

/* What a kernel found wrong, taken over into the exchange's own record. */
static enum hdl_status take_error(struct hdl_moe *m, uint32_t lane)
{
    struct moe_gpu_state s;
    enum hdl_status status = moe_gpu_read_state(m->link->gpu, lane, &s);
    if (status == HDL_OK)
        status = moe_gpu_clear_error(m->link->gpu, lane);
    if (status != HDL_OK || s.error.first == UINT64_MAX)
        return status;
    uint64_t index = s.error.first >> 8;
    uint32_t k = m->config.shape.top_k;
    bool id = (s.error.first & 0xff) == MOE_GPU_ERR_ID;
    bool peer = (s.error.first & 0xff) == MOE_GPU_ERR_PEER;
    bool weights = (s.error.first & 0xff) == MOE_GPU_ERR_WEIGHTS;
    m->failed_steps++;
    m->last_error = peer || weights ? HDL_EPEER : HDL_EINVAL;
    m->error[0] = id ? (int64_t)(index / k) : -1;
    m->error[1] = id ? (int64_t)(index % k) : -1;
    m->error[2] = peer || weights ? -1 : s.error.value;
    if (weights) {
        const uint32_t first = (uint32_t)(index & ~MOE_GPU_PEER_ERROR);
        return base_fail(
            HDL_EPEER,
            "an earlier dispatch: of the ranks %u to %u, which hold the same "
            "tokens, some give weights with dispatch and some do not",
            first, first + m->config.shape.dp - 1);
    }
    if (peer)
        return peer_refused(m, (uint32_t)(index & ~MOE_GPU_PEER_ERROR), s.error.value);
    if (id)
        return base_fail(HDL_EINVAL,
                         "an earlier dispatch: token %" PRId64 " position %" PRId64
                         " names expert %" PRId64 " of %u",
                         m->error[0], m->error[1], m->error[2], m->config.shape.experts);
    return base_fail(HDL_EINVAL, "an earlier dispatch: %" PRId64 " tokens, max_tokens %u",
                     s.error.value, m->config.shape.max_tokens);
}

static enum hdl_status tell_errors(struct hdl_moe *m)
{
    for (uint32_t lane = 0; lane < m->config.shape.lanes; lane++) {
        enum hdl_status status =
            m->link->gpu->notice[lane] ? take_error(m, lane) : HDL_OK;
        if (status != HDL_OK)
            return status;
    }
    return HDL_OK;
}

/* -------------------------------------------------------------------------- dispatch */

static enum hdl_status check_tokens(const struct hdl_moe *m,
                                    const struct hdl_moe_tokens *t)
{
    const struct moe_shape *s = &m->config.shape;
    if (t->num_tokens < 0 || t->num_tokens > s->max_tokens)
        return base_fail(HDL_EINVAL, "dispatch: %" PRId64 " tokens, max_tokens %u",
                         t->num_tokens, s->max_tokens);
    if (t->num_tokens == 0 && !t->num_tokens_at)
        return HDL_OK;
    bool needs_weights = !m->config.opaque && !s->late_weights;
    const char *missing = !t->rows                       ? "rows"
                          : !t->topk_ids                 ? "topk_ids"
                          : !t->weights && needs_weights ? "weights"
                                                         : NULL;
    if (!missing && m->config.dtype == HDL_F8E4M3 && s->row_scales && !t->scales)
        missing = "scales";
    if (missing)
        return base_fail(HDL_EINVAL, "dispatch: %s are NULL with %" PRId64 " tokens",
                         missing, t->num_tokens);
    return HDL_OK;
}

static void count_step(struct hdl_moe *m, struct moe_lane *lane)
{
    m->next++;
    m->turn++;
    lane->step++;
}

/*
 * The failed check of tokens is a step all the same: the others learn of it instead of
 * waiting for this rank, in dispatch and in combine.
 */
static enum hdl_status refuse(struct hdl_moe *m, struct moe_lane *lane,
                              struct moe_gpu_call *call, const struct hdl_moe_tokens *t)
{
    enum { MOST = MOE_GPU_NO_DATA - 1 };
    char text[BASE_DETAIL_BYTES];
    memcpy(text, base_detail(), sizeof(text));
    int64_t asked = t->num_tokens;
    asked = asked < -1 ? -1 : asked > MOST ? MOST : asked;
    if (asked >= 0 && asked <= m->config.shape.max_tokens)
        asked += MOE_GPU_NO_DATA;
    const struct moe_gpu_tokens tokens = {.num_tokens = (uint32_t)asked};
    const struct moe_gpu_result result = {0};
    call->active = NULL;
    call->alone = true;
    call->phase = MOE_GPU_SEND | MOE_GPU_RECV;
    enum hdl_status status = moe_gpu_dispatch(m->link->gpu, call, &tokens, NULL);
    call->phase = MOE_GPU_SEND;
    if (status == HDL_OK && !m->config.opaque)
        status = moe_gpu_combine(m->link->gpu, call, &result);
    if (status != HDL_OK)
        return status;
    count_step(m, lane);
    m->failed_steps++;
    m->last_error = HDL_EINVAL;
    m->error[0] = m->error[1] = m->error[2] = -1;
    return base_fail(HDL_EINVAL, "%s", text);
}

static enum hdl_status open_dispatch(struct hdl_moe *m, struct hdl_moe_handle *handle,
                                     struct moe_lane **lane)
{
    if (!handle)
        return base_fail(HDL_EINVAL, "dispatch: handle is NULL");
    *lane = &m->lanes[m->turn % m->config.shape.lanes];
    if ((*lane)->phase != MOE_IDLE)
        return base_fail(HDL_EBUSY,
                         "step %" PRIu64 " of lane %u has not ended: %u lanes are open",
                         (*lane)->step, (*lane)->number, m->config.shape.lanes);
    return tell_errors(m);
}

static enum hdl_status launch_dispatch(struct hdl_moe *m, const struct moe_gpu_call *call,
                                       const struct hdl_moe_tokens *t,
                                       const struct hdl_moe_received *r)
{
    const struct moe_gpu_tokens tokens = {.rows = t->rows,
                                          .scales = t->scales,
                                          .ids = t->topk_ids,
                                          .weights = t->weights,
                                          .num_tokens_at = t->num_tokens_at,
                                          .num_tokens = (uint32_t)t->num_tokens,
                                          .ids_are_64 = t->ids_are_64};
    const struct moe_gpu_received received = {.rows = r->rows,
                                              .scales = r->scales,
                                              .counts = r->counts,
                                              .offsets = r->offsets,
                                              .row_numbers = r->row_numbers,
                                              .source_token = r->source_token,
                                              .ranges = r->ranges,
                                              .local_ids = r->local_ids,
                                              .weights = r->weights,
                                              .source_counts = r->source_counts,
                                              .totals = r->totals};
    return moe_gpu_dispatch(m->link->gpu, call, &tokens, &received);
}

enum hdl_status moe_gpu_call_dispatch(struct hdl_moe *m, uint32_t phase,
                                      const struct hdl_moe_tokens *tokens,
                                      struct hdl_moe_received *received,
                                      const struct hdl_moe_call *opts,
                                      struct hdl_moe_handle *handle)
{
    struct moe_gpu_call call;
    struct moe_lane *lane;
    struct hdl_moe_tokens t = {0};
    struct hdl_moe_received r = {0};
    bool sends = phase & MOE_GPU_SEND, receives = phase & MOE_GPU_RECV;
    enum hdl_status status = begin_call(m, phase, opts, &call);
    if (status == HDL_OK && sends)
        status = base_option_copy("hdl_moe_tokens", tokens, &t, sizeof(t));
    if (status == HDL_OK && receives)
        status = moe_received_open(m, received, &r);
    if (status == HDL_OK)
        status = sends ? open_dispatch(m, handle, &lane)
                       : moe_handle_open(m, handle, MOE_SENT, &lane);
    if (status != HDL_OK)
        return status;
    call.lane = lane->number;
    if (sends && check_tokens(m, &t) != HDL_OK)
        return refuse(m, lane, &call, &t);
    status = launch_dispatch(m, &call, &t, &r);
    if (status != HDL_OK)
        return status;
    if (sends) {
        count_step(m, lane);
        lane->weighted = t.weights || (t.num_tokens == 0 && !t.num_tokens_at);
    }
    lane->phase = receives ? MOE_RECEIVED : MOE_SENT;
    if (sends)
        moe_handle_make(m, lane, handle);
    if (receives)
        moe_received_close(received, -1, -1);
    return HDL_OK;
}

/* --------------------------------------------------------------------------- combine */

enum hdl_status moe_gpu_call_combine(struct hdl_moe *m, uint32_t phase,
                                     const struct hdl_moe_handle *handle,
                                     const struct hdl_moe_outputs *outputs,
                                     const struct hdl_moe_result *result,
                                     const struct hdl_moe_call *opts)
{
    struct moe_gpu_call call;
    struct moe_lane *lane;
    struct hdl_moe_outputs o = {0};
    struct hdl_moe_result r = {0};
    bool sends = phase & MOE_GPU_SEND, receives = phase & MOE_GPU_RECV;
    enum hdl_status status = begin_call(m, phase, opts, &call);
    if (status == HDL_OK && m->config.opaque)
        status = base_fail(HDL_ENOTSUP, "combine: opaque rows cannot be summed");
    if (status == HDL_OK && sends)
        status = base_option_copy("hdl_moe_outputs", outputs, &o, sizeof(o));
    if (status == HDL_OK && sends && !o.rows)
        status = base_fail(HDL_EINVAL, "combine: rows are NULL");
    if (status == HDL_OK && receives)
        status = base_option_copy("hdl_moe_result", result, &r, sizeof(r));
    if (status == HDL_OK && receives && !r.rows)
        status = base_fail(HDL_EINVAL, "combine: result rows are NULL");
    if (status == HDL_OK)
        status = moe_handle_open(m, handle, sends ? MOE_RECEIVED : MOE_COMBINING, &lane);
    if (status == HDL_OK && sends && !lane->weighted && !o.weights)
        status = base_fail(HDL_EINVAL, "combine: no weights, and dispatch had none");
    if (status != HDL_OK)
        return status;
    const struct moe_gpu_result to = {.expert_out = o.rows,
                                      .weights = lane->weighted ? NULL : o.weights,
                                      .rows = r.rows,
                                      .bias = {r.bias[0], r.bias[1]},
                                      .missing = r.missing,
                                      .accumulate = r.accumulate};
    call.lane = lane->number;
    status = moe_gpu_combine(m->link->gpu, &call, &to);
    if (status == HDL_OK)
        lane->phase = receives ? MOE_IDLE : MOE_COMBINING;
    return status;
}

enum hdl_status moe_gpu_call_buffer(struct hdl_moe *m,
                                    const struct hdl_moe_handle *handle, void **rows)
{
    struct moe_lane *lane;
    uint64_t address;
    enum hdl_status status = moe_handle_open_early(m, handle, &lane);
    if (status == HDL_OK)
        status = moe_gpu_buffer(m->link->gpu, lane->number, &address);
    if (status == HDL_OK)
        *rows = (void *)address;
    return status;
}

/* ---------------------------------------------------------------------------- status */

static void clear_counters(struct hdl_moe *m)
{
    memset(m->expert_rows, 0, m->local * sizeof(uint64_t));
    m->stale_drops = 0;
    for (uint32_t r = 0; r < m->config.shape.ranks; r++)
        m->wait_ns[r] = m->bytes_sent[r] = m->bytes_received[r] = 0;
}

/* Adds what a lane counted. Bytes are those of lines, as they cross. */
static void add_counters(struct hdl_moe *m, const struct moe_gpu_counters *c)
{
    const struct moe_gpu_geometry *g = &m->link->gpu->geo;
    const uint64_t header = (uint64_t)g->packets * MOE_GPU_PACKET;
    const uint32_t self = m->peers->self;
    for (uint32_t e = 0; e < m->local; e++)
        m->expert_rows[e] += c->expert[e].rows;
    for (uint32_t r = 0; r < g->ranks; r++) {
        if (r == self)
            continue;
        m->wait_ns[r] += c->wait_ns[r];
        m->stale_drops += c->stale[r];
        m->bytes_sent[r] += c->tokens[self] * header + c->rows_sent[r] * g->row.crosses +
                            c->given[r] * g->give.crosses;
        const uint64_t whole = m->config.shape.dp == 1 ? c->rows_sent[r] : c->taken[r];
        m->bytes_received[r] += c->tokens[r] * header +
                                c->rows_received[r] * g->row.crosses +
                                (whole + c->more[r]) * g->give.crosses;
    }
}

/* Counters live in the device; the record of errors is the exchange's. */
enum hdl_status moe_gpu_call_status(struct hdl_moe *m)
{
    struct moe_gpu_state s;
    uint64_t steps = m->first_next, incomplete = 0;
    enum hdl_status status = HDL_OK;
    struct moe_gpu_counters *counters = base_alloc(
        m->env, 1, sizeof(*counters) + m->local * sizeof(struct moe_gpu_expert_count));
    if (!counters)
        return HDL_ENOMEM;
    (void)tell_errors(m);
    clear_counters(m);
    for (uint32_t lane = 0; status == HDL_OK && lane < m->config.shape.lanes; lane++) {
        status = moe_gpu_read_state(m->link->gpu, lane, &s);
        if (status == HDL_OK)
            status = moe_gpu_read_counters(m->link->gpu, lane, counters, m->local);
        if (status != HDL_OK)
            break;
        steps += s.step[0] - (uint32_t)m->lanes[lane].first_step;
        incomplete += s.incomplete_calls;
        add_counters(m, counters);
    }
    base_free(m->env, counters);
    if (status != HDL_OK)
        return status;
    m->next = steps;
    m->incomplete_calls = incomplete;
    for (int i = 0; i < 2; i++)
        m->protocol[i] = moe_gpu_protocol(m->link->gpu, i);
    return HDL_OK;
}
