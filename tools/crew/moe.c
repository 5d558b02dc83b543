/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of a mixture-of-experts exchange whose rows say who made them, and when. */
#include "tools/crew/moe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/crew/crew.h"

/*
 * Token t of rank r in the step at operation n goes to expert (r + t + n) % E and to the
 * one after it, with weight 0.5; expert e gives (e + 1) * x. A row is
 *
 *     r, n % 4096, t, 5 r + 3 (n % 4096) + t, ...     all exact in f32
 *
 * so a row of another step, rank or place shows.
 */
enum { TOKENS = 3, TOP_K = 2, HIDDEN = 8, TURN = 4096 };

static struct hdl_moe *moe;
static float rows[2 * CREW_RANKS_MAX * CREW_RANKS_MAX * TOKENS * HIDDEN];
static int32_t source_token[2 * CREW_RANKS_MAX * TOKENS];
static uint64_t steps, incomplete;
static char problem[128];
/* All ranks make the same steps since a link; who fails in one makes no more. */
static bool linked;

static float element(int rank, uint64_t number, int token, int i)
{
    int n = (int)(number % TURN);
    int value[] = {rank, n, token, 5 * rank + 3 * n + token};
    return (float)value[i % 4];
}

static int expert_of(int rank, uint64_t number, int token, int k, int experts)
{
    return (int)(((uint64_t)(rank + token + k) + number) % (uint64_t)experts);
}

enum hdl_status crew_moe_link(struct hdl_group *group, int ranks)
{
    linked = false;
    if (moe) {
        enum hdl_status status = hdl_moe_update(moe, NULL, NULL);
        linked = status == HDL_OK;
        return status;
    }
    struct hdl_moe_opts opts = {.size = sizeof(opts),
                                .num_experts = 2 * ranks,
                                .top_k = TOP_K,
                                .hidden = HIDDEN,
                                .max_tokens = TOKENS,
                                .dtype = HDL_F32};
    enum hdl_status status = hdl_moe_create(group, &opts, &moe);
    linked = status == HDL_OK;
    return status;
}

void crew_moe_close(void)
{
    hdl_moe_destroy(moe);
    moe = NULL;
}

void crew_moe_count(uint64_t *all, uint64_t *lacking)
{
    *all = steps;
    *lacking = incomplete;
}

/* Is it the row of that token of its source in this step, and meant for the expert? */
static bool is_row(const float *row, uint64_t number, int ranks, int token, int expert)
{
    int source = (int)row[0];
    bool sound = source >= 0 && source < ranks && token >= 0 && token < TOKENS;
    for (int i = 0; sound && i < HIDDEN; i++)
        sound = row[i] == element(source, number, token, i);
    bool chosen = false;
    for (int k = 0; sound && k < TOP_K; k++)
        chosen |= expert_of(source, number, token, k, 2 * ranks) == expert;
    return chosen;
}

static bool is_zero(const float *row)
{
    for (int i = 0; i < HIDDEN; i++)
        if (row[i] != 0)
            return false;
    return true;
}

/* A row of an expert, which it then makes its output. Its source may be lost between its
 * header and this row: the place is then empty, and the call says that something lacks.
 */
static void take_row(float *row, uint64_t number, int ranks, int token, int expert,
                     enum hdl_status status)
{
    bool lacks = token == -1 && status == HDL_INCOMPLETE;
    if (lacks ? !is_zero(row) : !is_row(row, number, ranks, token, expert))
        snprintf(problem, sizeof(problem),
                 "dispatch %s: token %d of expert %d is %g of %g, token %g",
                 hdl_status_name(status), token, expert, (double)row[0], (double)row[1],
                 (double)row[2]);
    for (int i = 0; i < HIDDEN; i++)
        row[i] *= (float)(expert + 1);
}

/* All contributions, or some of them if the token is said to lack one. */
static bool is_sum(const float *row, int rank, uint64_t number, int token, int experts,
                   bool lacks)
{
    for (int set = (1 << TOP_K) - 1; set >= 0; set--) {
        float factor = 0;
        bool same = true;
        for (int k = 0; k < TOP_K; k++)
            if (set >> k & 1)
                factor += 0.5f * (float)(expert_of(rank, number, token, k, experts) + 1);
        for (int i = 0; i < HIDDEN; i++)
            same &= row[i] == factor * element(rank, number, token, i);
        if (same)
            return true;
        if (!lacks)
            break;
    }
    return false;
}

enum hdl_status crew_moe_step(int rank, int ranks, uint64_t number, const char **wrong)
{
    float tokens[TOKENS * HIDDEN], weights[TOKENS * TOP_K], sums[TOKENS * HIDDEN];
    int32_t ids[TOKENS * TOP_K], counts[2];
    uint8_t missing[TOKENS] = {0};
    struct hdl_moe_handle handle;
    if (!moe || !linked)
        return HDL_OK;
    linked = false;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++)
            tokens[t * HIDDEN + i] = element(rank, number, t, i);
        for (int k = 0; k < TOP_K; k++) {
            ids[t * TOP_K + k] = expert_of(rank, number, t, k, 2 * ranks);
            weights[t * TOP_K + k] = 0.5f;
        }
    }
    /* A rank that came later, or lost its exchange, does not answer. */
    const struct hdl_moe_call call = {.size = sizeof(call), .timeout_us = 100000};
    const struct hdl_moe_tokens give = {.size = sizeof(give),
                                        .rows = tokens,
                                        .topk_ids = ids,
                                        .weights = weights,
                                        .num_tokens = TOKENS};
    struct hdl_moe_received got = {.size = sizeof(got),
                                   .rows = rows,
                                   .counts = counts,
                                   .source_token = source_token};
    memset(rows, 0xff, sizeof(rows));
    problem[0] = 0;
    enum hdl_status status = hdl_moe_dispatch(moe, &give, &got, &call, &handle);
    if (status < 0)
        return status;
    for (int e = 0; e < 2; e++) {
        int first = e * ranks * TOKENS;
        for (int i = first; i < first + counts[e]; i++)
            take_row(rows + (size_t)i * HIDDEN, number, ranks, source_token[i],
                     2 * rank + e, status);
    }
    const struct hdl_moe_outputs out = {.size = sizeof(out), .rows = rows};
    const struct hdl_moe_result result = {
        .size = sizeof(result), .rows = sums, .missing = missing};
    enum hdl_status combined = hdl_moe_combine(moe, &handle, &out, &result, &call);
    if (combined < 0)
        return combined;
    for (int t = 0; t < TOKENS; t++)
        if ((missing[t] && combined == HDL_OK) ||
            !is_sum(sums + t * HIDDEN, rank, number, t, 2 * ranks, missing[t]))
            snprintf(problem, sizeof(problem), "combine %s: sum of token %d is %g of %g",
                     hdl_status_name(combined), t, (double)sums[t * HIDDEN],
                     (double)sums[t * HIDDEN + 1]);
    if (problem[0])
        *wrong = problem;
    linked = true;
    steps++;
    incomplete += status != HDL_OK || combined != HDL_OK;
    return HDL_OK;
}
