/* SPDX-License-Identifier: Apache-2.0 */
/* An exchange before and after a rank is removed, its experts are moved, and it comes
 * back.
 *
 * Rank r's token t is r * 16 + t + 1 in all elements, expert e gives (e + 1) * x, weights
 * are 0.5; token t of rank r goes to experts r + t and r + t + 4, modulo 8. */
#include <math.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "rank.h"

enum {
    RANKS = 4,
    EXPERTS = 8,
    TOP_K = 2,
    HIDDEN = 8,
    MOST = 8,
    ROWS = EXPERTS * RANKS * MOST
};

static struct rank self;
static struct hdl_moe *moe;
static const int32_t *held; /* own experts */

static const int num_tokens[RANKS] = {5, 0, 3, 1};
static const float whole[RANKS][5] = {{3, 8, 15, 24, 15}, {0}, {165, 204, 105}, {294}};

static const int32_t even_counts[RANKS] = {2, 2, 2, 2};
static const int32_t even_ids[EXPERTS] = {0, 1, 2, 3, 4, 5, 6, 7};
static const int32_t moved_counts[RANKS] = {3, 3, 0, 2};
static const int32_t moved_ids[EXPERTS] = {0, 1, 4, 2, 3, 5, 6, 7};

static float received_rows[ROWS * HIDDEN], result_rows[MOST * HIDDEN];
static int32_t counts[EXPERTS];
static uint8_t missing[MOST];
static int32_t taken[RANKS];
static const struct hdl_moe_call call = {.size = sizeof(call), .active = taken};

static struct hdl_moe_opts options(void)
{
    return (struct hdl_moe_opts){.size = sizeof(struct hdl_moe_opts),
                                 .num_experts = EXPERTS,
                                 .top_k = TOP_K,
                                 .hidden = HIDDEN,
                                 .max_tokens = MOST,
                                 .dtype = HDL_F32,
                                 .expert_counts = even_counts,
                                 .expert_ids = even_ids};
}

static enum hdl_status dispatch(struct hdl_moe_handle *handle)
{
    float rows[MOST * HIDDEN], weights[MOST * TOP_K];
    int32_t ids[MOST * TOP_K];
    for (int i = 0; i < MOST * HIDDEN; i++)
        rows[i] = (float)(self.rank * 16 + i / HIDDEN + 1);
    for (int i = 0; i < MOST * TOP_K; i++) {
        weights[i] = 0.5f;
        ids[i] = (self.rank + i / TOP_K + 4 * (i % TOP_K)) % EXPERTS;
    }
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = rows,
                                          .topk_ids = ids,
                                          .weights = weights,
                                          .num_tokens = num_tokens[self.rank]};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = received_rows, .counts = counts};
    for (int r = 0; r < RANKS; r++)
        taken[r] = 1;
    memset(received_rows, 0xff, sizeof(received_rows));
    memset(result_rows, 0xff, sizeof(result_rows));
    return hdl_moe_dispatch(moe, &tokens, &received, &call, handle);
}

static enum hdl_status combine(struct hdl_moe_handle *handle)
{
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs),
                                            .rows = received_rows};
    const struct hdl_moe_result result = {
        .size = sizeof(result), .rows = result_rows, .missing = missing};
    for (int e = 0; e < hdl_moe_local_experts(moe); e++)
        for (int i = 0; i < counts[e] * HIDDEN; i++)
            received_rows[e * RANKS * MOST * HIDDEN + i] *= (float)(held[e] + 1);
    return hdl_moe_combine(moe, handle, &outputs, &result, NULL);
}

static void expect(const float *values)
{
    for (int t = 0; t < num_tokens[self.rank]; t++)
        for (int h = 0; h < HIDDEN; h++)
            CHECK(result_rows[t * HIDDEN + h] == values[t], "token %d is %g, not %g", t,
                  (double)result_rows[t * HIDDEN + h], (double)values[t]);
}

static void step(void)
{
    struct hdl_moe_handle handle;
    CHECK_OK(dispatch(&handle));
    CHECK_OK(combine(&handle));
    expect(whole[self.rank]);
}

static bool is_active(int rank)
{
    uint64_t active = 0;
    struct hdl_view view = {.mask_words = 1, .active = &active};
    CHECK_OK(hdl_group_view(self.group, &view));
    return active >> rank & 1;
}

static void wait_for_removal(void)
{
    double start = rank_now();
    while (is_active(2)) {
        CHECK(rank_now() - start < 10, "never removed");
        rank_sleep_ms(5);
    }
}

/* Rank 2 waits to be removed, comes back, and makes the exchange anew. */
static void removed(void)
{
    struct hdl_moe_opts opts = options();
    wait_for_removal();
    hdl_moe_destroy(moe);
    CHECK_OK(hdl_group_join(self.group, 20000000, NULL));
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
}

/* The experts of rank 2 are lost until the others take them over. */
static void others(void)
{
    struct hdl_moe_handle handle;
    const int32_t two = 2;
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs),
                                            .rows = received_rows};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = result_rows};
    if (self.rank == 0)
        CHECK_OK(hdl_group_evict(self.group, &two, 1, 15000000));
    wait_for_removal();
    CHECK_STATUS(dispatch(&handle), HDL_INCOMPLETE);
    CHECK_STATUS(combine(&handle), self.rank == 0 ? HDL_INCOMPLETE : HDL_OK);
    if (self.rank == 0) { /* experts 4 and 5 gave nothing to tokens 0, 1 and 4 */
        static const float lacks[5] = {0.5f, 2, 15, 24, 2.5f};
        expect(lacks);
        CHECK(missing[0] && missing[1] && !missing[2] && !missing[3] && missing[4],
              "flags");
    } else {
        expect(whole[self.rank]); /* rank 3 chose none of them, rank 1 has no tokens */
    }
    CHECK_STATUS(dispatch(&handle), HDL_INCOMPLETE);
    held = self.rank == 0 ? moved_ids : self.rank == 1 ? moved_ids + 3 : moved_ids + 6;
    CHECK_OK(hdl_moe_update(moe, moved_counts, moved_ids));
    CHECK_STATUS(hdl_moe_combine(moe, &handle, &outputs, &result, NULL), HDL_ESTALE);
    rank_check_text(hdl_error_detail(), "generation", NULL);
    for (int i = 0; i < 20; i++)
        step();
    CHECK_OK(hdl_group_admit(self.group, &two, 1, 15000000, NULL));
    CHECK_OK(hdl_moe_update(moe, even_counts, even_ids));
}

/* Rank 3 dies as the others update: to them it is missing, not a slot without a member.
 */
static void lost(void)
{
    struct hdl_moe_handle handle;
    if (self.rank == 3)
        (void)kill(getpid(), SIGKILL);
    CHECK_OK(hdl_moe_update(moe, NULL, NULL));
    for (int i = 0; i < 3; i++) {
        CHECK_STATUS(dispatch(&handle), HDL_INCOMPLETE);
        CHECK(taken[0] && taken[1] && taken[2] && !taken[3], "its entry stays");
        /* Of tokens 2 and 3 of rank 0 and 0 and 1 of rank 2 it holds an expert. */
        CHECK_STATUS(combine(&handle), self.rank == 1 ? HDL_OK : HDL_INCOMPLETE);
    }
}

int main(int argc, char **argv)
{
    struct hdl_moe_opts opts = options();
    struct hdl_moe_state state = {.size = sizeof(state)};
    (void)argv;
    rank_join(&self);
    held = even_ids + 2 * self.rank;
    CHECK_OK(hdl_moe_create(self.group, &opts, &moe));
    for (int i = 0; i < 5; i++)
        step();
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    if (argc > 1) { /* lost */
        lost();
        hdl_moe_destroy(moe);
        rank_leave(&self);
        return 0;
    }
    if (self.rank == 2)
        removed();
    else
        others();
    held = even_ids + 2 * self.rank;
    for (int i = 0; i < 20; i++)
        step();
    CHECK_OK(hdl_moe_update(moe, NULL, NULL)); /* without any change */
    for (int i = 0; i < 20; i++)
        step();
    CHECK_OK(hdl_moe_status(moe, &state));
    CHECK(state.generation == 4, "generation %llu", (unsigned long long)state.generation);
    hdl_moe_destroy(moe);
    rank_leave(&self);
    return 0;
}
