/* SPDX-License-Identifier: Apache-2.0 */
/* Life of an exchange: memory, handles, masks of calls, counters. */
#include "moe/exchange.h"

#include <inttypes.h>
#include <string.h>

#include "base/option.h"
#include "base/random.h"
#include "net/net.h"

#define MOE_MAGIC UINT64_C(0x656f6d6c6464)

/* Rows of one put: as many as fill this. In vain between them is at most what describes
 * another put. */
enum { MOE_RUN_BYTES = NET_PIECE_BYTES, MOE_GAP_BYTES = 64 };

/* -------------------------------------------------------------------------- memory */

/* Arrays of one size after another in one block; a NULL block only counts. */
struct carve {
    uint8_t *block;
    size_t bytes;
};

static void *carve(struct carve *c, size_t count, size_t size)
{
    void *at = c->block ? c->block + c->bytes : NULL;
    c->bytes += (count * size + 63) / 64 * 64;
    return at;
}

static void carve_lane(struct carve *c, struct hdl_moe *m, struct moe_lane *lane)
{
    const struct moe_shape *s = &m->config.shape;
    const struct moe_layout *l = &m->config.layout;
    size_t pairs = (size_t)l->sources * s->max_tokens;
    size_t most = s->top_k < s->local_experts ? s->top_k : s->local_experts;
    lane->active = carve(c, l->mask_words, sizeof(uint64_t));
    lane->seen = carve(c, s->ranks, 1);
    lane->free = carve(c, s->ranks, 1);
    lane->marks[0] = carve(c, s->ranks, sizeof(uint64_t));
    lane->marks[1] = carve(c, s->ranks, sizeof(uint64_t));
    lane->source = carve(c, s->ranks, sizeof(struct moe_source));
    lane->listen = carve(c, l->sources, sizeof(uint32_t));
    lane->alike = carve(c, s->dp, 1);
    if (s->device)
        return; /* its items are on the device */
    lane->items = carve(c, pairs, sizeof(struct moe_item));
    lane->entries = carve(c, pairs * most, sizeof(struct moe_entry));
}

static void carve_all(struct carve *c, struct hdl_moe *m, struct moe_lane *lanes)
{
    const struct moe_shape *s = &m->config.shape;
    const struct moe_layout *l = &m->config.layout;
    m->mask = carve(c, l->mask_words, sizeof(uint64_t));
    m->pending = carve(c, s->ranks, 1);
    m->cursor = carve(c, m->local + 1, sizeof(uint32_t));
    m->needs = carve(c, s->ranks, sizeof(uint32_t));
    m->runs = carve(c, s->ranks, sizeof(struct moe_run));
    m->routes = carve(c, s->top_k + 1, sizeof(struct moe_route));
    m->parts = carve(c, s->top_k + 1, sizeof(void *));
    m->part_weights = carve(c, s->top_k + 1, sizeof(float));
    m->places = carve(c, s->top_k + 1, sizeof(void *));
    m->copies = carve(c, l->takes, l->give_stride);
    m->sum = carve(c, s->hidden, sizeof(float));
    /* On a GPU an update may bring any number of experts. */
    m->expert_rows = carve(c, (s->device ? s->experts : m->local) + 1, sizeof(uint64_t));
    m->wait_ns = carve(c, s->ranks, sizeof(uint64_t));
    m->bytes_sent = carve(c, s->ranks, sizeof(uint64_t));
    m->bytes_received = carve(c, s->ranks, sizeof(uint64_t));
    for (uint32_t i = 0; i < s->lanes; i++)
        carve_lane(c, m, &lanes[i]);
}

static enum hdl_status allocate(struct hdl_moe *m)
{
    struct carve c = {NULL, 0};
    m->lanes = base_alloc(m->env, m->config.shape.lanes, sizeof(struct moe_lane));
    if (!m->lanes)
        return HDL_ENOMEM;
    carve_all(&c, m, m->lanes);
    c.block = base_alloc_aligned(m->env, 64, c.bytes, 1);
    if (!c.block) {
        base_free(m->env, m->lanes);
        return HDL_ENOMEM;
    }
    c.bytes = 0;
    carve_all(&c, m, m->lanes);
    return HDL_OK;
}

static void release(struct hdl_moe *m)
{
    base_free_aligned(m->env, m->mask); /* the first array of the block */
    base_free(m->env, m->lanes);
}

/* ------------------------------------------------------------------------ creation */

void moe_exchange_start_at(struct hdl_moe *m, uint64_t step)
{
    for (uint32_t i = 0; i < m->config.shape.lanes; i++) {
        m->lanes[i].first_step = step;
        m->lanes[i].step = step - 1;
        m->lanes[i].flag = moe_flag(m->generation, step - 1);
        m->lanes[i].half = moe_half(&m->config.layout, i, step - 1);
    }
}

static struct moe_run_limits limit_runs(uint32_t places, size_t stride)
{
    size_t token = places * stride;
    return (struct moe_run_limits){
        .places = places,
        .most = token > 0 && token < MOE_RUN_BYTES
                    ? (uint32_t)(MOE_RUN_BYTES / token) * places
                    : places,
        .gap = stride > 0 ? (uint32_t)(MOE_GAP_BYTES / stride) : 0,
    };
}

static void fill_exchange(struct hdl_moe *m)
{
    const struct moe_config *c = &m->config;
    m->magic = MOE_MAGIC;
    m->wire = (struct moe_wire){c->wire, c->combine_dtype, c->shape.hidden,
                                c->layout.give_scale_offset};
    m->row_runs = limit_runs(1, c->layout.row_stride);
    m->give_runs = limit_runs(c->layout.gives, c->layout.give_stride);
    m->error[0] = m->error[1] = m->error[2] = -1;
    for (uint32_t i = 0; i < c->shape.lanes; i++)
        m->lanes[i].number = i;
    moe_exchange_start_at(m, 1);
}

enum hdl_status moe_exchange_create(struct base_env *env, struct moe_config *config,
                                    struct moe_peers *peers, struct hdl_moe **moe)
{
    struct hdl_moe *m = base_alloc(env, 1, sizeof(*m));
    enum hdl_status status = m ? HDL_OK : HDL_ENOMEM;
    if (status == HDL_OK) {
        m->env = env;
        m->config = *config;
        m->peers = peers;
        m->local = moe_map_local_experts(&config->map, peers->self);
        status = base_random_u64(&m->id);
    }
    if (status == HDL_OK)
        status = allocate(m);
    if (status != HDL_OK) {
        base_free(env, m);
        moe_config_free(env, config);
        if (peers->ops->destroy)
            peers->ops->destroy(peers);
        return status;
    }
    fill_exchange(m);
    *moe = m;
    return HDL_OK;
}

void moe_exchange_replace(struct hdl_moe *m, struct hdl_moe *fresh)
{
    struct hdl_moe old = *m;
    uint32_t ranks = old.config.shape.ranks;
    *m = *fresh;
    m->id = old.id;
    m->next = old.next;
    m->failed_steps = old.failed_steps;
    m->incomplete_calls = old.incomplete_calls;
    m->stale_drops = old.stale_drops;
    m->last_error = old.last_error;
    memcpy(m->error, old.error, sizeof(m->error));
    memcpy(m->wait_ns, old.wait_ns, ranks * sizeof(uint64_t));
    memcpy(m->bytes_sent, old.bytes_sent, ranks * sizeof(uint64_t));
    memcpy(m->bytes_received, old.bytes_received, ranks * sizeof(uint64_t));
    if (old.peers->ops->destroy)
        old.peers->ops->destroy(old.peers);
    release(&old);
    moe_config_free(old.env, &old.config);
    base_free(old.env, fresh);
}

enum hdl_status moe_exchange_check(const struct hdl_moe *m)
{
    if (!m || m->magic != MOE_MAGIC)
        return base_fail(HDL_EINVAL, "not an exchange");
    return HDL_OK;
}

/* Does it matter to a live peer that a put has not left yet? */
static bool all_settled(void *argument)
{
    struct hdl_moe *m = argument;
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (!moe_mapped(m, r) && !moe_gone(m, r) &&
            !m->peers->ops->settled(m->peers, r, m->peers->ops->mark(m->peers, r)))
            return false;
    }
    return true;
}

void hdl_moe_destroy(struct hdl_moe *m)
{
    if (!m || m->magic != MOE_MAGIC)
        return;
    if (m->peers->messaged && m->peers->ops->check(m->peers) == HDL_OK && !all_settled(m))
        m->peers->ops->wait(m->peers, all_settled, m, base_now_ns() + 2 * BASE_NS_PER_S);
    if (m->peers->ops->destroy)
        m->peers->ops->destroy(m->peers);
    m->magic = 0;
    release(m);
    moe_config_free(m->env, &m->config);
    base_free(m->env, m);
}

int32_t hdl_moe_local_experts(const struct hdl_moe *m)
{
    return moe_exchange_check(m) == HDL_OK ? (int32_t)m->local : 0;
}

/* --------------------------------------------------------------- calls and handles */

void moe_call_lose(struct hdl_moe *m, struct moe_call *call, uint32_t rank)
{
    base_mask_clear(m->mask, rank);
    if (call->active)
        call->active[rank] = 0;
    call->lost++;
    call->latest = rank;
}

enum hdl_status moe_call_begin(struct hdl_moe *m, const struct hdl_moe_call *opts,
                               struct moe_call *call)
{
    struct hdl_moe_call o;
    enum hdl_status status = moe_exchange_check(m);
    if (status == HDL_OK)
        status = m->peers->ops->check(m->peers);
    if (status == HDL_OK)
        status = base_option_copy("hdl_moe_call", opts, &o, sizeof(o));
    if (status != HDL_OK)
        return status;
    call->active = o.active;
    call->lost = 0;
    call->deadline_ns =
        o.timeout_us > 0 ? base_deadline_ns(base_now_ns(), base_timeout_ns(o.timeout_us))
                         : BASE_FOREVER;
    memset(m->mask, 0, m->config.layout.mask_words * sizeof(uint64_t));
    for (uint32_t r = 0; r < m->config.shape.ranks; r++) {
        if (o.active && o.active[r] == 0)
            continue;
        if (m->peers->ops->presence(m->peers, r) != MOE_NO_MEMBER)
            base_mask_set(m->mask, r);
    }
    return HDL_OK;
}

enum hdl_status moe_call_end(struct hdl_moe *m, const struct moe_call *call, bool missing)
{
    if (call->lost == 0 && !missing)
        return HDL_OK;
    m->incomplete_calls++;
    if (call->lost == 0)
        return base_fail(HDL_INCOMPLETE,
                         "contributions of masked or lost ranks are missing");
    return base_fail(HDL_INCOMPLETE, "%u ranks were not there: rank %u%s", call->lost,
                     call->latest, call->lost > 1 ? " and others" : "");
}

enum hdl_status moe_received_open(const struct hdl_moe *m,
                                  const struct hdl_moe_received *received,
                                  struct hdl_moe_received *copy)
{
    enum hdl_status status =
        base_option_copy("hdl_moe_received", received, copy, sizeof(*copy));
    if (status != HDL_OK)
        return status;
    if (!copy->rows)
        return base_fail(HDL_EINVAL, "dispatch: rows to receive into are NULL");
    if (!copy->scales && m->config.shape.row_scales)
        return base_fail(HDL_EINVAL, "dispatch: scales to receive into are NULL");
    return HDL_OK;
}

void moe_received_close(struct hdl_moe_received *received, int64_t num_rows,
                        int64_t num_pairs)
{
    if (received->size < offsetof(struct hdl_moe_received, totals))
        return;
    received->num_rows = num_rows;
    received->num_pairs = num_pairs;
}

static uint64_t handle_check(const struct hdl_moe_handle *h)
{
    uint64_t sum = h->word[0] * UINT64_C(0x9e3779b97f4a7c15) + h->word[1];
    return (sum ^ sum >> 29) * UINT64_C(0xbf58476d1ce4e5b9) + h->word[2];
}

/* id | generation, lane | step of the lane | check */
void moe_handle_make(const struct hdl_moe *m, const struct moe_lane *lane,
                     struct hdl_moe_handle *handle)
{
    handle->word[0] = m->id;
    handle->word[1] = m->generation << 32 | lane->number;
    handle->word[2] = lane->step;
    handle->word[3] = handle_check(handle);
}

enum hdl_status moe_handle_open(struct hdl_moe *m, const struct hdl_moe_handle *handle,
                                enum moe_phase phase, struct moe_lane **out)
{
    static const char *const called[] = {"", "dispatch_recv", "combine", "combine_recv"};
    if (!handle || handle->word[3] != handle_check(handle))
        return base_fail(HDL_EINVAL, "%s: not a handle of a step", called[phase]);
    if (handle->word[0] != m->id)
        return base_fail(HDL_EINVAL, "%s: the handle is of another exchange",
                         called[phase]);
    uint64_t generation = handle->word[1] >> 32;
    uint32_t number = (uint32_t)handle->word[1];
    if (generation != m->generation)
        return base_fail(HDL_ESTALE,
                         "%s: the handle is of generation %" PRIu64 ", now is %" PRIu64,
                         called[phase], generation, m->generation);
    if (number >= m->config.shape.lanes)
        return base_fail(HDL_EINVAL, "%s: the handle names lane %u of %u", called[phase],
                         number, m->config.shape.lanes);
    struct moe_lane *lane = &m->lanes[number];
    if (handle->word[2] != lane->step || lane->phase == MOE_IDLE || lane->phase > phase)
        return base_fail(HDL_ESTALE,
                         "%s: the handle of step %" PRIu64 " of lane %u was used already",
                         called[phase], handle->word[2], number);
    if (lane->phase < phase)
        return base_fail(HDL_EINVAL,
                         "%s: the step has not come so far: %s was not called",
                         called[phase], called[phase - 1]);
    *out = lane;
    return HDL_OK;
}

enum hdl_status moe_handle_open_early(struct hdl_moe *m,
                                      const struct hdl_moe_handle *handle,
                                      struct moe_lane **out)
{
    enum hdl_status status = moe_handle_open(m, handle, MOE_RECEIVED, out);
    if (status == HDL_EINVAL && moe_handle_open(m, handle, MOE_SENT, out) == HDL_OK)
        status = HDL_OK;
    return status;
}

/* ------------------------------------------------------------------------ counters */

static void copy_counters(uint64_t *to, const uint64_t *from, uint32_t n)
{
    if (to)
        memcpy(to, from, n * sizeof(uint64_t));
}

enum hdl_status moe_exchange_status(const struct hdl_moe *m, struct hdl_moe_state *state)
{
    struct hdl_moe_state s;
    enum hdl_status status = base_option_copy("hdl_moe_state", state, &s, sizeof(s));
    if (status != HDL_OK)
        return status;
    size_t size = state->size < sizeof(s) ? state->size : sizeof(s);
    s.size = state->size;
    s.generation = m->generation;
    s.steps = m->next;
    s.failed_steps = m->failed_steps;
    s.incomplete_calls = m->incomplete_calls;
    s.stale_drops = m->stale_drops;
    s.last_error = m->last_error;
    s.error_token = m->error[0];
    s.error_position = m->error[1];
    s.error_value = m->error[2];
    s.dispatch_protocol = m->protocol[0];
    s.combine_protocol = m->protocol[1];
    copy_counters(s.expert_rows, m->expert_rows, m->local);
    copy_counters(s.wait_ns, m->wait_ns, m->config.shape.ranks);
    copy_counters(s.bytes_sent, m->bytes_sent, m->config.shape.ranks);
    copy_counters(s.bytes_received, m->bytes_received, m->config.shape.ranks);
    memcpy(state, &s, size);
    return HDL_OK;
}
