/* SPDX-License-Identifier: Apache-2.0 */
/* A user who makes mistakes: random calls in any order, each perhaps with something
 * wrong, and what each must answer. Right steps in between have right sums.
 *
 * HEDDLE_TEST_SEED and HEDDLE_TEST_TRIALS choose the first seed and the number of users.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/random.h"
#include "crowd.h"

enum { MOST = 6, HIDDEN = 5, EXPERTS = 4, TOP_K = 2, HANDLES = 12, CALLS = 400 };

enum mistake {
    NONE = 0,
    NO_EXCHANGE,
    CALL_SIZE,
    CALL_TAIL,
    STRUCT_SIZE, /* of the struct that the call is about */
    NO_HANDLE,
    SPOILED_HANDLE,
    FOREIGN_HANDLE,
    SELF_MASKED,
    NO_OUTPUT,
    TOO_MANY,
    NEGATIVE,
    NO_ROWS,
    NO_IDS,
    NO_WEIGHTS,
    BAD_ID,
    MISTAKES
};

/* The model: what a lane waits for, and which handle names its step. */
struct user {
    uint64_t seed;
    struct hdl_moe *moe, *other;
    uint32_t lanes;
    uint64_t turn;
    enum moe_phase phase[MOE_MAX_LANES];
    uint64_t step[MOE_MAX_LANES];
    int tokens[MOE_MAX_LANES];
    float sum[MOE_MAX_LANES][MOST];
    struct {
        struct hdl_moe_handle handle;
        uint32_t lane;
        uint64_t step;
    } handles[HANDLES];
    uint32_t made;
    uint64_t failed;
    float rows[MOST * HIDDEN], weights[MOST * TOP_K];
    int32_t ids[MOST * TOP_K];
    float received[MOE_MAX_LANES][EXPERTS * MOST * HIDDEN], result[MOST * HIDDEN];
    enum mistake mistake;
};

static uint64_t pick(struct user *u, uint64_t n)
{
    return base_splitmix_below(&u->seed, n);
}

static struct hdl_moe *exchange_of(const struct user *u)
{
    return u->mistake == NO_EXCHANGE ? NULL : u->moe;
}

/* Larger than the library's structs, so that a tail can be set. */
struct roomy_call {
    struct hdl_moe_call call;
    uint64_t tail;
};

static const struct hdl_moe_call *call_of(const struct user *u, struct roomy_call *room)
{
    static int32_t nobody[1] = {0};
    *room = (struct roomy_call){.call = {.size = sizeof(struct hdl_moe_call)}};
    if (u->mistake == CALL_SIZE)
        room->call.size = 3;
    if (u->mistake == CALL_TAIL) {
        room->call.size = sizeof(*room);
        room->tail = 1;
    }
    if (u->mistake == SELF_MASKED)
        room->call.active = nobody;
    return &room->call;
}

/* Mistakes that are seen before anything is done. */
static bool refused_at_once(const struct user *u)
{
    return u->mistake == NO_EXCHANGE || u->mistake == CALL_SIZE ||
           u->mistake == CALL_TAIL || u->mistake == STRUCT_SIZE;
}

static void expect(const struct user *u, const char *what, enum hdl_status got,
                   enum hdl_status wanted)
{
    if (got != wanted || (got < HDL_OK && base_detail()[0] == '\0'))
        fail_msg("%s with mistake %d: %s, not %s: %s", what, (int)u->mistake,
                 hdl_status_name(got), hdl_status_name(wanted), base_detail());
}

/* ------------------------------------------------------------------------ dispatch */

static struct hdl_moe_tokens draw_tokens(struct user *u, uint32_t lane)
{
    int n = (int)pick(u, MOST + 1);
    if (u->mistake >= NO_ROWS)
        n = n ? n : 1;
    for (int t = 0; t < n; t++) {
        u->sum[lane][t] = 0;
        for (int h = 0; h < HIDDEN; h++)
            u->rows[t * HIDDEN + h] = (float)(1 + pick(u, 100));
        for (int j = 0; j < TOP_K; j++) {
            u->ids[t * TOP_K + j] = (int32_t)pick(u, EXPERTS + 1) - 1;
            u->weights[t * TOP_K + j] = (float)pick(u, 8) / 8;
        }
    }
    struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                    .rows = u->rows,
                                    .topk_ids = u->ids,
                                    .weights = u->weights,
                                    .num_tokens = n};
    if (u->mistake == STRUCT_SIZE)
        tokens.size = 1;
    if (u->mistake == TOO_MANY)
        tokens.num_tokens = pick(u, 2) ? MOST + 1 : INT64_MAX;
    if (u->mistake == NEGATIVE)
        tokens.num_tokens = -1;
    if (u->mistake == NO_ROWS)
        tokens.rows = NULL;
    if (u->mistake == NO_IDS)
        tokens.topk_ids = NULL;
    if (u->mistake == NO_WEIGHTS)
        tokens.weights = NULL;
    if (u->mistake == BAD_ID)
        u->ids[(int)pick(u, (uint64_t)(n * TOP_K))] = pick(u, 2) ? EXPERTS : INT32_MIN;
    return tokens;
}

static void remember(struct user *u, uint32_t lane, const struct hdl_moe_handle *handle,
                     const struct hdl_moe_tokens *tokens)
{
    uint32_t at = u->made++ % HANDLES;
    u->handles[at].handle = *handle;
    u->handles[at].lane = lane;
    u->handles[at].step = ++u->step[lane];
    u->tokens[lane] = (int)tokens->num_tokens;
    for (int t = 0; t < u->tokens[lane]; t++) {
        float weight = 0;
        for (int j = 0; j < TOP_K; j++)
            weight += u->ids[t * TOP_K + j] >= 0 ? u->weights[t * TOP_K + j] : 0;
        u->sum[lane][t] = weight * u->rows[t * HIDDEN];
    }
}

static void dispatch(struct user *u, bool fused)
{
    struct roomy_call room;
    struct hdl_moe_handle handle;
    uint32_t lane = (uint32_t)(u->turn % u->lanes);
    bool busy = u->phase[lane] != MOE_IDLE;
    struct hdl_moe_tokens tokens;
    struct hdl_moe_received r = {.size = sizeof(r), .rows = u->received[lane]};
    if (!busy)
        tokens = draw_tokens(u, lane);
    else
        tokens = (struct hdl_moe_tokens){
            .size = u->mistake == STRUCT_SIZE ? 1 : sizeof(tokens)};
    if (u->mistake == NO_OUTPUT)
        r.rows = NULL;
    struct hdl_moe_handle *to = u->mistake == NO_HANDLE ? NULL : &handle;
    const struct hdl_moe_call *call = call_of(u, &room);
    bool at_once = refused_at_once(u) || !to || (fused && !r.rows);
    bool wrong = u->mistake == SELF_MASKED || u->mistake >= TOO_MANY;
    enum hdl_status wanted = at_once ? HDL_EINVAL : busy ? HDL_EBUSY : HDL_OK;
    if (wanted == HDL_OK && wrong)
        wanted = HDL_EINVAL;
    enum hdl_status got = fused
                              ? hdl_moe_dispatch(exchange_of(u), &tokens, &r, call, to)
                              : hdl_moe_dispatch_send(exchange_of(u), &tokens, call, to);
    expect(u, fused ? "dispatch" : "dispatch_send", got, wanted);
    if (at_once || busy)
        return;
    u->turn++;
    if (wanted == HDL_OK) {
        u->phase[lane] = fused ? MOE_RECEIVED : MOE_SENT;
        remember(u, lane, &handle, &tokens);
    } else {
        u->step[lane]++;
        u->failed++;
    }
}

/* ------------------------------------------------------------------- with a handle */

struct choice {
    struct hdl_moe_handle *handle;
    uint32_t lane;
    bool current; /* of the lane's newest step */
};

static struct choice choose(struct user *u, struct hdl_moe_handle *copy)
{
    uint32_t most = u->made < HANDLES ? u->made : HANDLES, at = (uint32_t)pick(u, most);
    struct choice c = {copy, u->handles[at].lane, false};
    *copy = u->handles[at].handle;
    c.current = u->handles[at].step == u->step[c.lane];
    if (u->mistake == NO_HANDLE)
        c.handle = NULL;
    if (u->mistake == SPOILED_HANDLE)
        copy->word[pick(u, 4)] ^= UINT64_C(1) << pick(u, 64);
    return c;
}

/* What a call in `phase` says of the handle. */
static enum hdl_status answer(const struct user *u, const struct choice *c,
                              enum moe_phase phase)
{
    enum moe_phase is = u->phase[c->lane];
    if (refused_at_once(u) || u->mistake == NO_HANDLE || u->mistake == SPOILED_HANDLE ||
        u->mistake == FOREIGN_HANDLE)
        return HDL_EINVAL;
    if (!c->current || is == MOE_IDLE || is > phase)
        return HDL_ESTALE;
    return is < phase || u->mistake == SELF_MASKED ? HDL_EINVAL : HDL_OK;
}

static struct hdl_moe *asked(const struct user *u)
{
    return u->mistake == FOREIGN_HANDLE ? u->other : exchange_of(u);
}

static void receive(struct user *u)
{
    struct roomy_call room;
    struct hdl_moe_handle handle;
    struct choice c = choose(u, &handle);
    struct hdl_moe_received r = {.size = u->mistake == STRUCT_SIZE ? 7 : sizeof(r),
                                 .rows = u->received[c.lane]};
    enum hdl_status wanted = answer(u, &c, MOE_SENT);
    if (u->mistake == NO_OUTPUT) {
        r.rows = NULL;
        wanted = HDL_EINVAL;
    }
    expect(u, "dispatch_recv",
           hdl_moe_dispatch_recv(asked(u), c.handle, &r, call_of(u, &room)), wanted);
    if (wanted == HDL_OK)
        u->phase[c.lane] = MOE_RECEIVED;
}

static void check_sums(const struct user *u, uint32_t lane)
{
    for (int t = 0; t < u->tokens[lane]; t++)
        if (u->result[t * HIDDEN] != u->sum[lane][t])
            fail_msg("token %d is %g, not %g", t, (double)u->result[t * HIDDEN],
                     (double)u->sum[lane][t]);
}

/* phase: MOE_RECEIVED = combine_send, or both if fused; MOE_COMBINING = combine_recv. */
static void combine(struct user *u, enum moe_phase phase, bool fused)
{
    struct roomy_call room;
    struct hdl_moe_handle handle;
    struct choice c = choose(u, &handle);
    size_t size = u->mistake == STRUCT_SIZE ? 0 : sizeof(struct hdl_moe_outputs);
    struct hdl_moe_outputs o = {.size = size, .rows = u->received[c.lane]};
    struct hdl_moe_result r = {.size = size ? sizeof(r) : 0, .rows = u->result};
    const struct hdl_moe_call *call = call_of(u, &room);
    enum hdl_status wanted = answer(u, &c, phase), got;
    bool takes = fused || phase == MOE_COMBINING;
    if (u->mistake == NO_OUTPUT && takes)
        r.rows = NULL;
    bool over = wanted == HDL_OK && !r.rows && u->tokens[c.lane] > 0;
    if (over)
        wanted = HDL_EINVAL;
    if (fused)
        got = hdl_moe_combine(asked(u), c.handle, &o, &r, call);
    else if (phase == MOE_RECEIVED)
        got = hdl_moe_combine_send(asked(u), c.handle, &o, call);
    else
        got = hdl_moe_combine_recv(asked(u), c.handle, &r, call);
    expect(u, fused ? "combine" : takes ? "combine_recv" : "combine_send", got, wanted);
    u->failed += over;
    if (wanted == HDL_OK || over)
        u->phase[c.lane] = takes ? MOE_IDLE : MOE_COMBINING;
    if (wanted == HDL_OK && takes)
        check_sums(u, c.lane);
}

static void look(struct user *u)
{
    struct hdl_moe_state state = {.size = u->mistake == STRUCT_SIZE ? 2 : sizeof(state)};
    bool wrong =
        u->mistake == NO_EXCHANGE || u->mistake == STRUCT_SIZE || u->mistake == NO_OUTPUT;
    expect(u, "status",
           hdl_moe_status(exchange_of(u), u->mistake == NO_OUTPUT ? NULL : &state),
           wrong ? HDL_EINVAL : HDL_OK);
    if (!wrong && (state.steps != u->turn || state.failed_steps != u->failed))
        fail_msg("%llu steps and %llu failures counted, not %llu and %llu",
                 (unsigned long long)state.steps, (unsigned long long)state.failed_steps,
                 (unsigned long long)u->turn, (unsigned long long)u->failed);
}

static void one_call(struct user *u)
{
    uint64_t which = pick(u, u->made ? 8 : 2);
    u->mistake = pick(u, 3) ? NONE : (enum mistake)pick(u, MISTAKES);
    if (which < 2)
        dispatch(u, which);
    else if (which == 2)
        receive(u);
    else if (which < 5)
        combine(u, MOE_RECEIVED, which == 4);
    else if (which < 7)
        combine(u, MOE_COMBINING, false);
    else
        look(u);
}

static uint64_t from_environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

static void test_mistakes(void **state)
{
    static struct user u;
    uint64_t first = from_environment("HEDDLE_TEST_SEED", 1);
    uint64_t trials = from_environment("HEDDLE_TEST_TRIALS", 100);
    for (uint64_t seed = first; seed < first + trials; seed++) {
        memset(&u, 0, sizeof(u));
        u.seed = seed;
        u.lanes = 1 + (uint32_t)pick(&u, pick(&u, 2) ? 3 : MOE_MAX_LANES);
        const struct hdl_moe_opts opts = {.size = sizeof(opts),
                                          .num_experts = EXPERTS,
                                          .top_k = TOP_K,
                                          .hidden = HIDDEN,
                                          .max_tokens = MOST,
                                          .dtype = HDL_F32,
                                          .lanes = (int32_t)u.lanes};
        struct crowd *own = crowd_create(1, CROWD_MAPPED, &opts, 0);
        struct crowd *other = crowd_create(1, CROWD_MAPPED, &opts, 0);
        u.moe = own->rank[0].moe;
        u.other = other->rank[0].moe;
        for (int i = 0; i < CALLS; i++)
            one_call(&u);
        crowd_destroy(own);
        crowd_destroy(other);
    }
}

/* --------------------------------------------------------------------------- creation */

static void refuse(const struct hdl_moe_opts *o, int32_t ranks, const char *name,
                   const char *value)
{
    struct hdl_moe_sizes s = {.size = sizeof(s)};
    assert_int_equal(hdl_moe_size_hint(o, ranks, &s), HDL_EINVAL);
    if (!strstr(base_detail(), name) || !strstr(base_detail(), value))
        fail_msg("'%s' does not say %s and %s", base_detail(), name, value);
}

#define REFUSE(field, wrong, name, value)                                                \
    do {                                                                                 \
        struct hdl_moe_opts o = good;                                                    \
        o.field = wrong;                                                                 \
        refuse(&o, 4, name, value);                                                      \
    } while (0)

/* Each option out of range: its name and the value are in the text. */
static void test_options(void **state)
{
    static const int32_t counts[4] = {2, 2, 2, -1}, many[4] = {2, 2, 2, 9};
    static const int32_t even[4] = {2, 2, 2, 2}, twice[8] = {0, 1, 2, 3, 4, 4, 6, 7},
                         outside[8] = {0, 1, 2, 3, 4, 5, 6, 8};
    const struct hdl_moe_opts good = {
        .size = sizeof(good), .num_experts = 8, .top_k = 2, .hidden = 8, .max_tokens = 4};
    REFUSE(num_experts, 0, "num_experts", "0");
    REFUSE(num_experts, -8, "num_experts", "-8");
    REFUSE(num_experts, 4097, "num_experts", "4097");
    REFUSE(num_experts, 10, "10 experts", "4 ranks");
    REFUSE(top_k, 0, "top_k", "0");
    REFUSE(top_k, 65, "top_k", "65");
    REFUSE(top_k, 9, "top_k 9", "num_experts 8");
    REFUSE(hidden, 0, "hidden", "0");
    REFUSE(hidden, -1, "hidden", "-1");
    REFUSE(max_tokens, 0, "max_tokens", "0");
    REFUSE(dtype, HDL_I64, "type", "i64");
    REFUSE(dtype, (enum hdl_dtype)77, "type", "77");
    REFUSE(format, (enum hdl_moe_format)4, "format", "4");
    REFUSE(combine_dtype, HDL_I32, "combine", "i32");
    REFUSE(combine_dtype, (enum hdl_dtype)78, "combine", "78");
    REFUSE(combine_wire, (enum hdl_moe_wire)3, "combine_wire", "3");
    REFUSE(layout, (enum hdl_moe_layout)4, "layout", "4");
    REFUSE(align, -1, "align", "-1");
    REFUSE(lanes, 64, "lanes", "64");
    REFUSE(lanes, -1, "lanes", "-1");
    REFUSE(dp_size, 3, "dp_size", "3");
    REFUSE(dp_size, 5, "dp_size", "5");
    REFUSE(expert_counts, even, "expert_counts", "expert_ids");
    struct hdl_moe_opts o = good;
    o.expert_ids = twice;
    o.expert_counts = counts;
    refuse(&o, 4, "rank 3", "-1");
    o.expert_counts = many;
    refuse(&o, 4, "rank 3", "9");
    o.expert_counts = even;
    refuse(&o, 4, "rank 2", "4");
    o.expert_ids = outside;
    refuse(&o, 4, "rank 3", "8");
    refuse(&good, 0, "ranks", "0");
    refuse(&good, -3, "ranks", "-3");
    o = good;
    o.size = 2;
    refuse(&o, 4, "hdl_moe_opts", "2");
}

/* Calls that take no exchange at all. */
static void test_nothing(void **state)
{
    struct hdl_moe *moe;
    assert_int_equal(hdl_moe_create(NULL, NULL, &moe), HDL_EINVAL);
    assert_int_equal(hdl_moe_update(NULL, NULL, NULL), HDL_EINVAL);
    assert_int_equal(hdl_moe_local_experts(NULL), 0);
    hdl_moe_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
