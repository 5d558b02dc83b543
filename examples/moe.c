/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture-of-experts layer in small: heddle run -n 4 -- moe */
#include <stdio.h>
#include <stdlib.h>

#include "heddle.h"

enum { TOKENS = 3, HIDDEN = 4, TOP_K = 2 };

static void must(enum hdl_status status)
{
    if (status == HDL_OK)
        return;
    fprintf(stderr, "%s: %s\n", hdl_status_name(status), hdl_error_detail());
    exit(1);
}

/* Token t is full of t + 1, and goes to experts t and rank + t + 1. */
static void make_tokens(int rank, int experts, float x[TOKENS][HIDDEN],
                        int32_t ids[TOKENS][TOP_K], float weights[TOKENS][TOP_K])
{
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < HIDDEN; h++)
            x[t][h] = (float)(t + 1);
        ids[t][0] = t % experts;
        ids[t][1] = (rank + t + 1) % experts;
        weights[t][0] = 0.75f;
        weights[t][1] = 0.25f;
    }
}

int main(void)
{
    struct hdl_context *context;
    struct hdl_group *group;
    struct hdl_moe *moe;
    must(hdl_context_create(NULL, &context));
    must(hdl_group_create(context, NULL, &group));
    int rank = hdl_group_rank(group), size = hdl_group_size(group);

    /* Two experts on each rank; all ranks give the same options. */
    struct hdl_moe_opts opts = {.size = sizeof(opts),
                                .num_experts = 2 * size,
                                .top_k = TOP_K,
                                .hidden = HIDDEN,
                                .max_tokens = TOKENS,
                                .dtype = HDL_F32};
    struct hdl_moe_sizes sizes = {.size = sizeof(sizes)};
    must(hdl_moe_size_hint(&opts, size, &sizes));
    must(hdl_moe_create(group, &opts, &moe));

    float x[TOKENS][HIDDEN], y[TOKENS][HIDDEN], weights[TOKENS][TOP_K];
    int32_t ids[TOKENS][TOP_K], counts[2];
    make_tokens(rank, 2 * size, x, ids, weights);

    /* Dispatch: [2 experts][size * TOKENS rows][HIDDEN], the rows of an expert in front.
     */
    float *rows = malloc(sizes.out_rows * sizes.row_bytes);
    struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                    .rows = x,
                                    .topk_ids = ids,
                                    .weights = &weights[0][0],
                                    .num_tokens = TOKENS};
    struct hdl_moe_received received = {
        .size = sizeof(received), .rows = rows, .counts = counts};
    struct hdl_moe_handle step;
    must(hdl_moe_dispatch(moe, &tokens, &received, NULL, &step));

    /* Expert e multiplies by e + 1. */
    for (int e = 0; e < 2; e++)
        for (int i = 0; i < counts[e] * HIDDEN; i++)
            rows[e * size * TOKENS * HIDDEN + i] *= (float)(2 * rank + e + 1);

    /* Combine: the weighted sums are back where the tokens are. */
    struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = rows};
    struct hdl_moe_result result = {.size = sizeof(result), .rows = y};
    must(hdl_moe_combine(moe, &step, &outputs, &result, NULL));
    for (int t = 0; t < TOKENS; t++) {
        float sum = 0.75f * (float)(ids[t][0] + 1) + 0.25f * (float)(ids[t][1] + 1);
        printf("rank %d token %d: %g, expected %g\n", rank, t, (double)y[t][0],
               (double)(sum * (float)(t + 1)));
    }

    free(rows);
    hdl_moe_destroy(moe);
    hdl_group_destroy(group);
    hdl_context_destroy(context);
    return 0;
}
