/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine among processes: inputs with values worked out by hand, and
 * refusals.
 *
 * Rank r's token t is r * 16 + t + 1 in all elements, expert e gives (e + 1) * x, weights
 * are 0.5. What is received and the results are NaN before a call.
 *
 *     moe_cases CASE [STEPS]     STEPS: of soak; a million takes a minute or two */
#include <dirent.h>
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { MOST_TOKENS = 16, MOST_ROWS = 512, MOST_HIDDEN = 16 };

static struct rank self;
static struct hdl_moe *moe;
static int experts_total, top_k, hidden, soak_steps = 20000;
static bool late_weights; /* they come with combine */

static float rows[MOST_TOKENS * MOST_HIDDEN], weights[MOST_TOKENS * 4];
static float received_rows[MOST_ROWS * MOST_HIDDEN],
    result_rows[MOST_TOKENS * MOST_HIDDEN];
static int32_t counts[64], source_token[MOST_ROWS], active[8];
static uint8_t missing[MOST_TOKENS];
static int64_t ids[MOST_TOKENS * 4];

static struct hdl_moe_tokens tokens;
static struct hdl_moe_received received;
static struct hdl_moe_result result;
static struct hdl_moe_call call;

static struct hdl_moe_opts options(int experts, int k, int h, int max_tokens)
{
    experts_total = experts;
    top_k = k;
    hidden = h;
    return (struct hdl_moe_opts){.size = sizeof(struct hdl_moe_opts),
                                 .num_experts = experts,
                                 .top_k = k,
                                 .hidden = h,
                                 .max_tokens = max_tokens,
                                 .dtype = HDL_F32,
                                 .late_weights = late_weights};
}

static void create(int experts, int k, int h, int max_tokens)
{
    struct hdl_moe_opts opts = options(experts, k, h, max_tokens);
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
}

/* Fills everything for T tokens; the test then sets ids. */
static void prepare(int num_tokens)
{
    for (int t = 0; t < MOST_TOKENS; t++)
        for (int h = 0; h < hidden; h++)
            rows[t * hidden + h] = (float)(self.rank * 16 + t + 1);
    for (size_t i = 0; i < sizeof(weights) / 4; i++)
        weights[i] = 0.5f;
    memset(received_rows, 0xff, sizeof(received_rows));
    memset(result_rows, 0xff, sizeof(result_rows));
    memset(counts, 0xff, sizeof(counts));
    memset(missing, 0xff, sizeof(missing));
    for (int r = 0; r < 8; r++)
        active[r] = 1;
    tokens = (struct hdl_moe_tokens){.size = sizeof(tokens),
                                     .rows = rows,
                                     .topk_ids = ids,
                                     .weights = late_weights ? NULL : weights,
                                     .num_tokens = num_tokens,
                                     .ids_are_64 = true};
    received = (struct hdl_moe_received){.size = sizeof(received),
                                         .rows = received_rows,
                                         .counts = counts,
                                         .source_token = source_token};
    result = (struct hdl_moe_result){
        .size = sizeof(result), .rows = result_rows, .missing = missing};
    call = (struct hdl_moe_call){.size = sizeof(call), .active = active};
}

/* Expert e gives (e + 1) * x, in place. */
static void run_experts(int max_tokens)
{
    int local = hdl_moe_local_experts(moe);
    for (int e = 0; e < local; e++) {
        float *x = received_rows + (size_t)(e * self.size * max_tokens * hidden);
        for (int i = 0; i < counts[e] * hidden; i++)
            x[i] *= (float)(self.rank * local + e + 1);
    }
}

static enum hdl_status try_combine(const struct hdl_moe_handle *handle, int max_tokens)
{
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs),
                                            .rows = received_rows,
                                            .weights = late_weights ? weights : NULL};
    run_experts(max_tokens);
    return hdl_moe_combine(moe, handle, &outputs, &result, &call);
}

static void combine(struct hdl_moe_handle *handle, int max_tokens, enum hdl_status wanted)
{
    CHECK_STATUS(try_combine(handle, max_tokens), wanted);
}

static void step(int max_tokens)
{
    struct hdl_moe_handle handle;
    CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle));
    combine(&handle, max_tokens, HDL_OK);
}

/* Results are values[t], the rest of the buffer is still NaN. */
static void expect(int num_tokens, const float *values)
{
    for (int t = 0; t < MOST_TOKENS; t++)
        for (int h = 0; h < hidden; h++) {
            float got = result_rows[t * hidden + h];
            if (t < num_tokens)
                CHECK(got == values[t], "token %d is %g, not %g", t, (double)got,
                      (double)values[t]);
            else
                CHECK(isnan(got), "token %d was written", t);
        }
}

static void expect_counts(const int *all)
{
    int local = hdl_moe_local_experts(moe);
    for (int e = 0; e < local; e++)
        CHECK(counts[e] == all[self.rank * local + e], "expert %d has %d rows, not %d",
              self.rank * local + e, counts[e], all[self.rank * local + e]);
}

/* ------------------------------------------------------------------------- two ranks */

static const int64_t basic_ids[2][6] = {{0, 1, 2, 3, 0, 3}, {1, 2, 3, 0, 2, 1}};
static const float basic_values[2][3] = {{1.5f, 7, 7.5f}, {42.5f, 45, 47.5f}};

static void prepare_basic(void)
{
    prepare(3);
    memcpy(ids, basic_ids[self.rank], sizeof(basic_ids[0]));
}

static void basic(void)
{
    create(4, 2, 8, 8);
    for (int i = 0; i < 100; i++) {
        prepare_basic();
        step(8);
        expect_counts((int[]){3, 3, 3, 3});
        expect(3, basic_values[self.rank]);
    }
    prepare_basic(); /* rank 0 chooses nothing: exactly 0 */
    for (int i = 0; self.rank == 0 && i < 6; i++)
        ids[i] = -1;
    step(8);
    expect(3, self.rank == 0 ? (float[]){0, 0, 0} : basic_values[1]);
    CHECK(self.rank != 0 || !signbit(result_rows[0]), "negative zero");
    int sum = counts[0] + counts[1];
    CHECK_OK(hdl_allreduce(self.group, &sum, &sum, 1, HDL_I32, HDL_SUM, NULL, NULL));
    CHECK(sum == 6, "%d pairs", sum);
    prepare(1); /* an expert named twice */
    ids[0] = ids[1] = self.rank == 0 ? 3 : -1;
    weights[0] = 0.25f;
    weights[1] = 0.75f;
    step(8);
    CHECK(self.rank == 0 || counts[1] == 1, "expert 3 has %d rows", counts[1]);
    expect(1, self.rank == 0 ? (float[]){4} : (float[]){0});
}

/* Rank 0 masks rank 1; rank 1 does not mask. */
static void masked(void)
{
    struct hdl_moe_handle handle;
    create(4, 2, 8, 8);
    prepare_basic();
    active[1] = self.rank != 0;
    CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle));
    combine(&handle, 8, HDL_INCOMPLETE);
    if (self.rank == 0) {
        expect(3, (float[]){1.5f, 0, 1.5f});
        CHECK(missing[0] == 0 && missing[1] == 1 && missing[2] == 1, "flags");
    }
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    prepare_basic();
    active[self.rank] = 0; /* the own rank: on both, so both refuse */
    CHECK_STATUS(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle), HDL_EINVAL);
    rank_check_text(hdl_error_detail(), "own rank", NULL);
    prepare_basic();
    step(8);
    expect(3, basic_values[self.rank]);
}

/* ------------------------------------------------------------------------ four ranks */

static const int uneven_tokens[4] = {5, 0, 3, 1};
static const float uneven_values[4][5] = {
    {3, 8, 15, 24, 15}, {0}, {165, 204, 105}, {294}};

static void prepare_uneven(void)
{
    int n = uneven_tokens[self.rank];
    prepare(n);
    for (int t = 0; t < n; t++) {
        ids[2 * t] = (self.rank + t) % 8;
        ids[2 * t + 1] = (self.rank + t + 4) % 8;
    }
}

/* Does token t of rank r go to rank `to`? */
static bool goes_to(int r, int t, int to)
{
    return (r + t) % 8 / 2 == to || (r + t + 4) % 8 / 2 == to;
}

/* Rows once to each rank that needs them, sums back: no more between mapped ranks, only
 * headers, lines and weights besides between others. */
static void check_bytes(uint64_t steps)
{
    uint64_t sent[4];
    struct hdl_moe_state state = {.size = sizeof(state), .bytes_sent = sent};
    CHECK_OK(hdl_moe_status(moe, &state));
    for (int r = 0; r < 4; r++) {
        uint64_t rows_to = 0;
        for (int t = 0; t < 5 && r != self.rank; t++)
            rows_to += (t < uneven_tokens[self.rank] && goes_to(self.rank, t, r)) +
                       (t < uneven_tokens[r] && goes_to(r, t, self.rank));
        uint64_t least = steps * rows_to * (uint64_t)hidden * sizeof(float);
        const char *path = r == self.rank ? "" : hdl_group_transport(self.group, r);
        bool mapped = !path || strncmp(path, "fabric", 6) != 0;
        CHECK(mapped ? sent[r] == least : sent[r] >= least,
              "%llu bytes to rank %d by %s, least is %llu", (unsigned long long)sent[r],
              r, path, (unsigned long long)least);
    }
}

static void uneven(void)
{
    int32_t small[MOST_TOKENS * 2];
    create(8, 2, 8, 8);
    for (int i = 0; i < 4; i++) {
        prepare_uneven();
        for (int j = 0; j < MOST_TOKENS * 2; j++)
            small[j] = (int32_t)ids[j];
        if (i % 2) {
            tokens.topk_ids = small;
            tokens.ids_are_64 = false;
        }
        step(8);
        expect_counts((int[]){3, 1, 2, 3, 3, 1, 2, 3});
        expect(uneven_tokens[self.rank], uneven_values[self.rank]);
    }
    check_bytes(4);
}

static void nobody(void)
{
    create(8, 2, 8, 8);
    for (int i = 0; i < 1000; i++) {
        prepare(0);
        tokens.rows = tokens.topk_ids = tokens.weights = NULL;
        step(8);
        expect_counts((int[]){0, 0, 0, 0, 0, 0, 0, 0});
        expect(0, NULL);
        CHECK(isnan(received_rows[0]), "something was received");
    }
}

/* Rank 1 refuses; the others hear of it, with the values; the next step works. */
static void refused(const char *text, const char *value)
{
    struct hdl_moe_handle handle;
    enum hdl_status wanted = self.rank == 1 ? HDL_EINVAL : HDL_EPEER;
    CHECK_STATUS(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle), wanted);
    rank_check_text(hdl_error_detail(), text, value, NULL);
    CHECK(self.rank == 1 || strstr(hdl_error_detail(), "rank 1"), "%s",
          hdl_error_detail());
    CHECK(isnan(received_rows[0]), "something was received");
    prepare_uneven();
    if (uneven_tokens[self.rank] > 4)
        tokens.num_tokens = 4;
    step(4);
    expect((int)tokens.num_tokens, uneven_values[self.rank]);
}

/* T tokens on all ranks; token t goes to experts 2 t and 2 t + 1. */
static void prepare_full(int num_tokens)
{
    prepare(num_tokens);
    for (int i = 0; i < 8; i++)
        ids[i] = i;
}

static void expect_full(void)
{
    float values[4];
    for (int t = 0; t < 4; t++)
        values[t] = 0.5f * (float)(4 * t + 3) * (float)(self.rank * 16 + t + 1);
    expect(4, values);
}

static void limits(void)
{
    static const int64_t bad[] = {8, 9, -2, INT32_MAX, INT64_MIN};
    create(8, 2, 8, 4);
    prepare_full(4);
    step(4);
    expect_full();
    prepare_full(self.rank == 1 ? 5 : 4);
    refused("num_tokens 5", "max_tokens 4");
    prepare_full(4);
    step(4);
    expect_full();
    prepare(1);
    tokens.rows = self.rank == 1 ? NULL : rows;
    refused("rows are NULL", "num_tokens 1");
    for (int i = 0; i < 5; i++) {
        char text[64];
        prepare(2);
        for (int j = 0; j < 4; j++)
            ids[j] = j;
        if (self.rank == 1)
            ids[3] = bad[i];
        snprintf(text, sizeof(text), "expert %lld", (long long)bad[i]);
        refused("token 1 position 1", text);
    }
    struct hdl_moe_state state = {.size = sizeof(state)};
    CHECK_OK(hdl_moe_status(moe, &state));
    CHECK(state.failed_steps == 7 && state.steps == 16, "%llu of %llu steps failed",
          (unsigned long long)state.failed_steps, (unsigned long long)state.steps);
    CHECK(self.rank != 1 || (state.error_token == 1 && state.error_value == INT64_MIN),
          "error record");
}

static void handles(void)
{
    struct hdl_moe_handle a, b, c;
    struct hdl_moe *other, *first;
    struct hdl_moe_opts opts = options(8, 2, 8, 8);
    struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = received_rows};
    CHECK_OK(hdl_moe_create(self.group, &opts, &other));
    create(8, 2, 8, 8);
    first = moe;
    prepare_uneven();
    CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &a));
    CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &b));
    CHECK_STATUS(hdl_moe_dispatch(moe, &tokens, &received, &call, &c), HDL_EBUSY);
    CHECK_STATUS(hdl_moe_combine(other, &a, &outputs, &result, &call), HDL_EINVAL);
    rank_check_text(hdl_error_detail(), "another exchange", NULL);
    combine(&b, 8, HDL_OK); /* combines come in any order */
    expect(uneven_tokens[self.rank], uneven_values[self.rank]);
    CHECK_STATUS(hdl_moe_combine(moe, &b, &outputs, &result, &call), HDL_ESTALE);
    CHECK_OK(hdl_moe_combine(moe, &a, &outputs, &result, &call));
    expect(uneven_tokens[self.rank], uneven_values[self.rank]);
    CHECK_STATUS(hdl_moe_combine(moe, &a, &outputs, &result, &call), HDL_ESTALE);
    c = a;
    c.word[2] += 2;
    CHECK_STATUS(hdl_moe_combine(moe, &c, &outputs, &result, &call), HDL_EINVAL);
    for (int i = 0; i < 5000; i++) { /* two at a time */
        prepare_uneven();
        CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &a));
        CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &b));
        combine(&a, 8, HDL_OK);
        expect(uneven_tokens[self.rank], uneven_values[self.rank]);
        CHECK_OK(hdl_moe_combine(moe, &b, &outputs, &result, &call));
        expect(uneven_tokens[self.rank], uneven_values[self.rank]);
    }
    hdl_moe_destroy(other);
    moe = first;
}

/* What a process holds: pages of memory, and open files. */
struct held {
    long pages;
    int files;
};

static struct held holds(void)
{
    struct held h = {0, 0};
    FILE *file = fopen("/proc/self/statm", "re");
    DIR *files = opendir("/proc/self/fd");
    CHECK(file && fscanf(file, "%*d %ld", &h.pages) == 1, "no statm");
    while (files && readdir(files))
        h.files++;
    closedir(files);
    fclose(file);
    return h;
}

/* Many steps of 8 tokens, each with other rows and routes; nothing grows. */
static void soak(void)
{
    struct held before = {0, 0};
    create(16, 2, 8, 8);
    for (int i = 0; i < soak_steps; i++) {
        float values[8];
        prepare(8);
        for (int t = 0; t < 8; t++) {
            float x = (float)(i % 1009 * 64 + self.rank * 8 + t + 1);
            for (int h = 0; h < hidden; h++)
                rows[t * hidden + h] = x;
            ids[2 * t] = (i + t * 5 + self.rank) % 16;
            ids[2 * t + 1] = (i / 16 + t * 3) % 16;
            if (ids[2 * t] == ids[2 * t + 1]) /* named twice: the weights add up to 1 */
                values[t] = (float)(ids[2 * t] + 1) * x;
            else
                values[t] = 0.5f * (float)(ids[2 * t] + ids[2 * t + 1] + 2) * x;
        }
        step(8);
        expect(8, values);
        if (i == 1000)
            before = holds();
    }
    struct held after = holds();
    CHECK_OK(hdl_barrier(self.group, NULL, NULL)); /* a peer that leaves is closed */
    /* Sanitizers keep pages of their own. */
    CHECK((RANK_SLOW > 1 || after.pages <= before.pages + 64) &&
              after.files <= before.files,
          "%ld pages and %d files grew to %ld and %d", before.pages, before.files,
          after.pages, after.files);
    if (self.rank == 0)
        rank_say("%d steps, %ld pages", soak_steps, after.pages);
}

/* With late weights every rank chooses whether it combines in phases, also in a DP group.
 */
static void phases(void)
{
    struct hdl_moe_opts opts = options(8, 2, 8, 8);
    struct hdl_moe_handle handle;
    struct hdl_moe_outputs outputs = {
        .size = sizeof(outputs), .rows = received_rows, .weights = weights};
    opts.dp_size = 2;
    opts.late_weights = true;
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    for (int i = 0; i < 32; i++) {
        prepare(2);
        tokens.weights = NULL;
        for (int j = 0; j < 4; j++) /* a rank of each group holds them */
            ids[j] = 2 * j;
        for (int t = 0; t < 2; t++)
            for (int h = 0; h < hidden; h++)
                rows[t * hidden + h] = (float)(self.rank / 2 * 16 + t + 1);
        CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle));
        run_experts(8 / 2); /* half as many sources as ranks */
        if (i >> self.rank & 1) {
            CHECK_OK(hdl_moe_combine_send(moe, &handle, &outputs, &call));
            CHECK_OK(hdl_moe_combine_recv(moe, &handle, &result, &call));
        } else {
            CHECK_OK(hdl_moe_combine(moe, &handle, &outputs, &result, &call));
        }
        expect(2, (float[]){2 * rows[0], 6 * rows[hidden]});
    }
}

/* A rank that refuses does not wait. In its next step it must not overtake those who are
 * still in the step before, also in phases. */
static void overtake(void)
{
    struct hdl_moe_opts opts = options(2, 1, 8, 2);
    struct hdl_moe_handle handle;
    struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = received_rows};
    opts.lanes = 1;
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    for (int i = 0; i < 60; i++) {
        bool refuses = i % 3 != 0;
        prepare(refuses && self.rank == 1 ? 3 : 2);
        ids[0] = ids[1] = !self.rank;
        enum hdl_status status = hdl_moe_dispatch_send(moe, &tokens, &call, &handle);
        if (refuses && self.rank == 1) {
            CHECK_STATUS(status, HDL_EINVAL);
            continue;
        }
        CHECK_OK(status);
        status = hdl_moe_dispatch_recv(moe, &handle, &received, &call);
        CHECK_STATUS(status, refuses ? HDL_EPEER : HDL_OK);
        if (refuses)
            continue;
        if (self.rank == 0)
            rank_sleep_ms(2);
        run_experts(2);
        CHECK_OK(hdl_moe_combine_send(moe, &handle, &outputs, &call));
        if (self.rank == 0)
            rank_sleep_ms(2);
        CHECK_OK(hdl_moe_combine_recv(moe, &handle, &result, &call));
        float factor = self.rank ? 0.5f : 1.0f;
        expect(2, (float[]){factor * rows[0], factor * rows[hidden]});
    }
}

/* A rank whose combine is refused tells those who wait for its weights. */
static void withdrawn(void)
{
    struct hdl_moe_opts opts = options(2, 2, 8, 2);
    opts.late_weights = true;
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    for (int i = 0; i < 20; i++) {
        struct hdl_moe_handle handle;
        struct hdl_moe_outputs outputs = {
            .size = sizeof(outputs), .rows = received_rows, .weights = weights};
        prepare(2);
        tokens.weights = NULL;
        for (int j = 0; j < 4; j++)
            ids[j] = j % 2;
        CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle));
        run_experts(2);
        bool refused_here = i % 2 && self.rank == 1;
        if (refused_here)
            outputs.weights = NULL;
        CHECK_STATUS(hdl_moe_combine(moe, &handle, &outputs, &result, &call),
                     refused_here ? HDL_EINVAL
                     : i % 2      ? HDL_INCOMPLETE
                                  : HDL_OK);
        float factor = i % 2 ? 0.5f : 1.5f;
        if (!refused_here)
            expect(2, (float[]){factor * rows[0], factor * rows[hidden]});
        CHECK(refused_here || (missing[0] == i % 2 && missing[1] == i % 2), "missing");
    }
}

/* One rank's options differ: all fail, naming field, values and ranks. */
static void differ_in(const char *field, struct hdl_moe_opts a, struct hdl_moe_opts b,
                      const char *value_a, const char *value_b)
{
    CHECK_STATUS(hdl_moe_create(self.group, self.rank == 1 ? &b : &a, &moe), HDL_ECONFIG);
    rank_check_text(hdl_error_detail(), field, value_a, value_b, "rank 0", "rank 1",
                    NULL);
}

/* Field, its value on rank 1, how both values are named. */
#define DIFFERENCES(X)                                                                   \
    X(max_tokens, 8, "4", "8")                                                           \
    X(num_experts, 16, "8", "16")                                                        \
    X(hidden, 9, "8", "9")                                                               \
    X(top_k, 3, "2", "3")                                                                \
    X(dtype, HDL_BF16, "f32", "bf16")                                                    \
    X(layout, HDL_MOE_INDEXED, "0", "3")                                                 \
    X(exact, true, "0", "1")                                                             \
    X(lanes, 3, "2", "3")                                                                \
    X(format, HDL_MOE_FP8, "0", "1")                                                     \
    X(combine_dtype, HDL_F16, "f32", "f16")                                              \
    X(combine_wire, HDL_MOE_WIRE_FP8, "0", "2")                                          \
    X(align, 16, "1", "16")                                                              \
    X(zero_padding, true, "0", "1")                                                      \
    X(late_weights, true, "0", "1")                                                      \
    X(dp_size, 2, "1", "2")                                                              \
    X(memory, HDL_MOE_CUDA, "0", "1")                                                    \
    X(protocol, HDL_MOE_LL, "0", "1")

#define DIFFER(field, value, value_a, value_b)                                           \
    b = a;                                                                               \
    b.field = value;                                                                     \
    differ_in(#field, a, b, value_a, value_b);

/* Where no GPU can be used all ranks learn so, and what was in the way here. */
static void no_gpu(struct hdl_moe_opts a)
{
    a.memory = HDL_MOE_CUDA;
    a.cuda_device = 4096; /* also where there is one */
    enum hdl_status status = hdl_moe_create(self.group, &a, &moe);
    CHECK(status == HDL_ENOTSUP || status == HDL_EINVAL, "%s", hdl_status_name(status));
    CHECK(strstr(hdl_error_detail(), "CUDA driver") ||
              strstr(hdl_error_detail(), "device 4096 of"),
          "%s", hdl_error_detail());
}

static void disagree(void)
{
    static const int32_t held[4] = {2, 2, 2, 2}, ids_of[8] = {0, 2, 1, 3, 4, 5, 6, 7};
    struct hdl_moe_opts a = options(8, 2, 8, 4), b;
    DIFFERENCES(DIFFER)
    b = a;
    b.expert_counts = held;
    b.expert_ids = ids_of;
    differ_in("expert map", a, b, "rank", "rank");
    b = a;
    b.num_experts = 10; /* does not divide among 4 ranks */
    CHECK_STATUS(hdl_moe_create(self.group, self.rank == 1 ? &b : &a, &moe),
                 self.rank == 1 ? HDL_EINVAL : HDL_EPEER);
    no_gpu(a);
    CHECK_OK(hdl_moe_create(self.group, &a, &moe)); /* and the next one works */
}

/* The second that was waited for rank 3, and little for the others. */
static void check_waits(void)
{
    uint64_t waited[4];
    struct hdl_moe_state state = {.size = sizeof(state), .wait_ns = waited};
    CHECK_OK(hdl_moe_status(moe, &state));
    for (int r = 0; r < 4; r++)
        CHECK(r == 3 ? waited[r] > 950000000 : waited[r] < 700000000u * RANK_SLOW,
              "waited %.3f s for rank %d", (double)waited[r] / 1e9, r);
    CHECK(waited[self.rank] == 0, "waited for itself");
}

/* Of the uneven step if ranks 0 to 2 lack rank 3, and rank 3 them. */
static const float values_without_3[4][5] = {
    {3, 8, 4.5f, 8, 15}, {0}, {49.5f, 68, 105}, {196}};

/* Rank 3 is late: the others go on without it, and take it back in the next step. */
static void late(void)
{
    struct hdl_moe_handle handle;
    create(8, 2, 8, 8);
    prepare_uneven();
    step(8);
    prepare_uneven();
    double start = rank_now();
    if (self.rank == 3)
        rank_sleep_ms(5000);
    else
        call.timeout_us = 1000000;
    CHECK_STATUS(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle),
                 self.rank == 3 ? HDL_OK : HDL_INCOMPLETE);
    if (self.rank != 3) {
        double took = rank_now() - start;
        CHECK(took > 0.95 && took < 2 * RANK_SLOW, "took %g s", took);
        for (int r = 0; r < 4; r++)
            CHECK(active[r] == (r != 3), "mask of rank %d is %d", r, active[r]);
        check_waits();
    }
    combine(&handle, 8, self.rank == 1 ? HDL_OK : HDL_INCOMPLETE);
    expect(uneven_tokens[self.rank], values_without_3[self.rank]);
    CHECK_OK(hdl_barrier(self.group, NULL, NULL)); /* rank 3 has caught up */
    for (int i = 0; i < 3; i++) {
        prepare_uneven();
        step(8);
        expect(uneven_tokens[self.rank], uneven_values[self.rank]);
    }
}

/* Rank 3 is killed between dispatch and combine. */
static void dead(void)
{
    struct hdl_moe_handle handle;
    create(8, 2, 8, 8);
    prepare_uneven();
    step(8);
    prepare_uneven();
    CHECK_OK(hdl_moe_dispatch(moe, &tokens, &received, &call, &handle));
    if (self.rank == 3) {
        CHECK_OK(hdl_barrier(self.group, NULL, NULL));
        raise(SIGKILL);
    }
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (self.rank == 1) { /* has no tokens; sees the loss sooner or later */
        enum hdl_status seen = try_combine(&handle, 8);
        CHECK(seen == HDL_OK || seen == HDL_INCOMPLETE, "%s", hdl_error_detail());
    } else {
        combine(&handle, 8, HDL_INCOMPLETE);
        expect(uneven_tokens[self.rank], values_without_3[self.rank]);
    }
    prepare_uneven();
    double start = rank_now();
    enum hdl_status status = HDL_OK;
    while (status == HDL_OK) { /* until the loss is in the view */
        CHECK(rank_now() - start < 5, "the loss was not seen");
        status = hdl_moe_dispatch(moe, &tokens, &received, &call, &handle);
        if (status != HDL_OK)
            break;
        status = try_combine(&handle, 8);
        prepare_uneven();
    }
    CHECK(status == HDL_INCOMPLETE, "%s", hdl_error_detail());
}

/* So it never says with which weights. */
static void silent(void)
{
    late_weights = true;
    dead();
}

/* Ranks 0 and 1 have the same tokens, and so have 2 and 3 until 3 is killed. Whoever took
 * its rows must not wait for rank 2 to send them, which may not know of the loss yet. */
static void widowed(void)
{
    enum { M = 8, TOKENS = 4, STEPS = 35 };
    static const int64_t routes[TOKENS * 2] = {0, 5, 2, 4, 6, 1, 3, 0}; /* 6: rank 3 */
    struct hdl_moe_opts opts = options(8, 2, 8, M);
    struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = received_rows};
    struct hdl_moe_handle handle;
    bool lost[TOKENS];
    opts.dp_size = 2;
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    for (int i = 0; i < STEPS; i++) {
        prepare(TOKENS);
        memcpy(ids, routes, sizeof(routes));
        for (int j = 0; j < TOKENS * hidden; j++)
            rows[j] = (float)(self.rank / 2 * 16 + j / hidden + 1);
        if (self.rank == 3 && i == 5)
            raise(SIGKILL);
        enum hdl_status status =
            hdl_moe_dispatch(moe, &tokens, &received, &call, &handle);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_error_detail());
        for (int e = 0; e < 2; e++)
            for (int j = 0; j < counts[e] * hidden; j++)
                received_rows[e * 2 * M * hidden + j] *= (float)(self.rank * 2 + e + 1);
        for (int r = 0; r < 4; r++)
            active[r] = 1;
        status = hdl_moe_combine(moe, &handle, &outputs, &result, &call);
        CHECK(status == HDL_OK || status == HDL_INCOMPLETE, "%s", hdl_error_detail());
        for (int t = 0; t < TOKENS; t++) {
            float sum =
                0.5f * rows[t * hidden] * (float)(ids[2 * t] + ids[2 * t + 1] + 2);
            lost[t] = missing[t];
            CHECK(missing[t] || result_rows[t * hidden] == sum, "step %d token %d is %g",
                  i, t, (double)result_rows[t * hidden]);
        }
    }
    for (int t = 0; t < TOKENS; t++)
        CHECK(lost[t] == (t == 2), "token %d lost: %d", t, lost[t]);
}

/* The ways to peers are an option of the group that an exchange is made on. */
static void transport(void)
{
    const struct hdl_context_opts ways = {
        .size = sizeof(ways), .transport = rank_env("RANK") == 1 ? "shm" : "auto"};
    const struct hdl_group_opts opts = {.size = sizeof(opts)};
    CHECK_OK(hdl_context_create(&ways, &self.context));
    CHECK_STATUS(hdl_group_create(self.context, &opts, &self.group), HDL_ECONFIG);
    rank_check_text(hdl_error_detail(), "transport", "shm", "auto", NULL);
    CHECK(strstr(hdl_error_detail(), "rank 0") && strstr(hdl_error_detail(), "rank 1"),
          "%s", hdl_error_detail());
    hdl_context_destroy(self.context);
}

/* ---------------------------------------------------------------------------- main */

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"basic", basic},       {"masked", masked},       {"uneven", uneven},
    {"nobody", nobody},     {"limits", limits},       {"handles", handles},
    {"late", late},         {"dead", dead},           {"disagree", disagree},
    {"phases", phases},     {"soak", soak},           {"widowed", widowed},
    {"overtake", overtake}, {"withdrawn", withdrawn}, {"silent", silent},
};

int main(int argc, char **argv)
{
    if (argc > 2)
        soak_steps = atoi(argv[2]);
    if (argc > 1 && strcmp(argv[1], "transport") == 0) {
        transport();
        return 0;
    }
    rank_join(&self);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (argc > 1 && strcmp(argv[1], cases[i].name) == 0)
            cases[i].run();
    }
    hdl_moe_destroy(moe);
    rank_leave(&self);
    return 0;
}
