/* SPDX-License-Identifier: Apache-2.0 */
/* One shape of dispatch and combine that `heddle perf` measures, and the usual ways
 * beside it. */
#ifndef TOOLS_PERF_MOE_H
#define TOOLS_PERF_MOE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heddle.h"

/* One rank's data for one number of tokens. */
struct moe_bench {
    struct hdl_group *group;
    int rank, ranks;
    int64_t tokens, hidden, topk, experts, local; /* local: experts of a rank */
    enum hdl_dtype dtype;                         /* of rows and results: bf16 or f32 */
    size_t row_bytes;
    enum hdl_moe_format format;
    enum hdl_moe_layout layout;
    bool split;
    const char *routing;

    unsigned char *rows, *outputs, *results;
    int32_t *ids;
    float *weights;
    int64_t pairs;     /* distinct (token, rank) pairs, own ones included */
    int64_t remote;    /* without those of this rank */
    int64_t *for_rank; /* [ranks] pairs of each rank, if not NULL */

    struct hdl_moe *moe;
    struct hdl_moe_handle handle;
    struct hdl_moe_received received;
    struct hdl_moe_sizes sizes;
};

/* Fills ids and weights, and counts pairs. */
void moe_bench_route(struct moe_bench *b);
/* Routing, rows, memory. False when memory is short. */
bool moe_bench_open(struct moe_bench *b);
void moe_bench_close(struct moe_bench *b);
enum hdl_status moe_bench_create(struct moe_bench *b);

enum hdl_status moe_bench_dispatch(struct moe_bench *b);
enum hdl_status moe_bench_combine(struct moe_bench *b);
/* Wrong rows of what the last dispatch brought, and wrong results of the last combine. */
int64_t moe_bench_check_rows(const struct moe_bench *b);
int64_t moe_bench_check_results(const struct moe_bench *b, bool weighted);
/* Each expert gives its own constant in all elements: a row of a local expert's output,
 * or all rows. */
void moe_bench_output(const struct moe_bench *b, int64_t expert, unsigned char *row);
void moe_bench_fill_outputs(struct moe_bench *b);

/* ------------------------------------------------------------------- the usual way */

/* How users move tokens with collectives alone. */
struct moe_usual {
    bool dense; /* every expert's share padded to all tokens; else counts and all_to_all_v
                 */
    size_t out_bytes;              /* of a row of dispatch on the way */
    unsigned char *packed;         /* such a row */
    unsigned char *send, *receive; /* rows on the way, and as they come */
    unsigned char *sorted;         /* by expert */
    int64_t *order;                /* [T * k] place of each entry in send */
    int64_t *counts, *their;       /* [E] rows for each expert; [R][L] from each rank */
    size_t *send_counts, *send_displs, *receive_counts, *receive_displs;
};

bool moe_usual_open(struct moe_usual *u, const struct moe_bench *b, bool dense);
void moe_usual_close(struct moe_usual *u);
enum hdl_status moe_usual_dispatch(struct moe_usual *u, struct moe_bench *b);
/* What the experts give, for a combine that is checked. */
void moe_usual_fill(struct moe_usual *u, const struct moe_bench *b);
enum hdl_status moe_usual_combine(struct moe_usual *u, struct moe_bench *b);

#endif
