/* SPDX-License-Identifier: Apache-2.0 */
/* The exchange as it is done with collectives alone: a permutation by expert, then counts
 * and all_to_all_v; or a dense all_to_all with room for every token at every expert. */
#include "tools/perf/moe.h"

#include <stdlib.h>
#include <string.h>

#include "moe/rows.h"

static void *memory(size_t bytes)
{
    void *block = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (block)
        memset(block, 0, (bytes + 64) / 64 * 64);
    return block;
}

bool moe_usual_open(struct moe_usual *u, const struct moe_bench *b, bool dense)
{
    size_t entries = (size_t)(b->tokens * b->topk), ranks = (size_t)b->ranks;
    size_t dense_rows = (size_t)(b->experts * b->tokens);
    size_t worst = (size_t)(b->tokens * b->ranks) *
                   (size_t)(b->topk < b->local ? b->topk : b->local);
    *u = (struct moe_usual){.dense = dense, .out_bytes = b->row_bytes};
    if (b->format != HDL_MOE_PLAIN) /* a row and its scales travel together */
        u->out_bytes = b->sizes.row_bytes + b->sizes.scale_bytes;
    u->packed = memory(u->out_bytes);
    u->send = memory((dense ? dense_rows : entries) * b->row_bytes);
    u->receive = memory((dense ? dense_rows : worst) * b->row_bytes);
    u->sorted = memory((dense ? 0 : worst) * b->row_bytes);
    u->order = memory(entries * sizeof(int64_t));
    u->counts = memory((size_t)b->experts * sizeof(int64_t));
    u->their = memory((size_t)b->experts * sizeof(int64_t));
    u->send_counts = memory(ranks * sizeof(size_t));
    u->send_displs = memory(ranks * sizeof(size_t));
    u->receive_counts = memory(ranks * sizeof(size_t));
    u->receive_displs = memory(ranks * sizeof(size_t));
    return u->packed && u->send && u->receive && u->sorted && u->order && u->counts &&
           u->their && u->send_counts && u->send_displs && u->receive_counts &&
           u->receive_displs;
}

void moe_usual_close(struct moe_usual *u)
{
    void *all[] = {u->packed,      u->send,           u->receive,       u->sorted,
                   u->order,       u->counts,         u->their,         u->send_counts,
                   u->send_displs, u->receive_counts, u->receive_displs};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        free(all[i]);
}

/* A row as it travels. */
static const unsigned char *out_row(const struct moe_usual *u, const struct moe_bench *b,
                                    int64_t token)
{
    const unsigned char *row = b->rows + (size_t)token * b->row_bytes;
    if (b->format == HDL_MOE_PLAIN)
        return row;
    moe_rows_quantise(b->format, b->dtype, row, (uint32_t)b->hidden, u->packed,
                      u->packed + b->sizes.row_bytes);
    return u->packed;
}

/* Places of the entries sorted by expert (dense: in its block), and the rows copied
 * there. */
static void permute(struct moe_usual *u, const struct moe_bench *b)
{
    int64_t at = 0, begin[4096];
    memset(u->counts, 0, (size_t)b->experts * sizeof(int64_t));
    for (int64_t i = 0; i < b->tokens * b->topk; i++)
        u->counts[b->ids[i]]++;
    for (int64_t e = 0; e < b->experts; e++) {
        begin[e] = u->dense ? e * b->tokens : at;
        at += u->counts[e];
    }
    for (int64_t t = 0; t < b->tokens; t++) {
        const unsigned char *row = out_row(u, b, t);
        for (int64_t i = t * b->topk; i < (t + 1) * b->topk; i++) {
            u->order[i] = begin[b->ids[i]]++;
            memcpy(u->send + (size_t)u->order[i] * u->out_bytes, row, u->out_bytes);
        }
    }
}

/* Bytes that go to and come from each rank, with rows of that many. */
static void count_bytes(struct moe_usual *u, const struct moe_bench *b, size_t bytes)
{
    size_t out = 0, in = 0;
    for (int r = 0; r < b->ranks; r++) {
        u->send_displs[r] = out;
        u->receive_displs[r] = in;
        u->send_counts[r] = u->receive_counts[r] = 0;
        for (int64_t e = 0; e < b->local; e++) {
            u->send_counts[r] += (size_t)u->counts[r * b->local + e] * bytes;
            u->receive_counts[r] += (size_t)u->their[r * b->local + e] * bytes;
        }
        out += u->send_counts[r];
        in += u->receive_counts[r];
    }
}

/* From source order into expert order, or back. */
static void regroup(struct moe_usual *u, const struct moe_bench *b, size_t row_bytes,
                    bool back)
{
    unsigned char *sorted = u->sorted;
    for (int64_t e = 0; e < b->local; e++) {
        for (int r = 0; r < b->ranks; r++) {
            size_t at = u->receive_displs[r];
            for (int64_t before = 0; before < e; before++)
                at += (size_t)u->their[r * b->local + before] * row_bytes;
            size_t bytes = (size_t)u->their[r * b->local + e] * row_bytes;
            if (back)
                memcpy(u->receive + at, sorted, bytes);
            else
                memcpy(sorted, u->receive + at, bytes);
            sorted += bytes;
        }
    }
}

enum hdl_status moe_usual_dispatch(struct moe_usual *u, struct moe_bench *b)
{
    permute(u, b);
    if (u->dense)
        return hdl_alltoall(b->group, u->send, u->receive,
                            (size_t)(b->local * b->tokens) * u->out_bytes, HDL_U8, NULL,
                            NULL);
    enum hdl_status status = hdl_alltoall(b->group, u->counts, u->their, (size_t)b->local,
                                          HDL_I64, NULL, NULL);
    if (status != HDL_OK)
        return status;
    count_bytes(u, b, u->out_bytes);
    status = hdl_alltoallv(b->group, u->send, u->send_counts, u->send_displs, u->receive,
                           u->receive_counts, u->receive_displs, HDL_U8, NULL, NULL);
    if (status == HDL_OK)
        regroup(u, b, u->out_bytes, false);
    return status;
}

/* The weighted sum of each token's rows, the entries in list order. */
static void sum_rows(const struct moe_usual *u, struct moe_bench *b)
{
    const struct moe_wire wire = {.dtype = b->dtype, .hidden = (uint32_t)b->hidden};
    for (int64_t t = 0; t < b->tokens; t++) {
        const void *rows[64];
        for (int64_t j = 0; j < b->topk; j++)
            rows[j] = u->send + (size_t)u->order[t * b->topk + j] * b->row_bytes;
        moe_rows_give(&wire, b->results + (size_t)t * b->row_bytes, rows,
                      b->weights + t * b->topk, (size_t)b->topk, false);
    }
}

void moe_usual_fill(struct moe_usual *u, const struct moe_bench *b)
{
    unsigned char *row = u->dense ? u->receive : u->sorted;
    for (int r = 0; u->dense && r < b->ranks; r++)
        for (int64_t i = 0; i < b->local * b->tokens; i++, row += b->row_bytes)
            moe_bench_output(b, i / b->tokens, row);
    for (int64_t e = 0; !u->dense && e < b->local; e++)
        for (int r = 0; r < b->ranks; r++)
            for (int64_t i = 0; i < u->their[r * b->local + e]; i++, row += b->row_bytes)
                moe_bench_output(b, e, row);
}

enum hdl_status moe_usual_combine(struct moe_usual *u, struct moe_bench *b)
{
    enum hdl_status status;
    if (u->dense) {
        status = hdl_alltoall(b->group, u->receive, u->send,
                              (size_t)(b->local * b->tokens) * b->row_bytes, HDL_U8, NULL,
                              NULL);
    } else {
        count_bytes(u, b, b->row_bytes);
        regroup(u, b, b->row_bytes, true);
        status =
            hdl_alltoallv(b->group, u->receive, u->receive_counts, u->receive_displs,
                          u->send, u->send_counts, u->send_displs, HDL_U8, NULL, NULL);
    }
    if (status == HDL_OK)
        sum_rows(u, b);
    return status;
}
