/* SPDX-License-Identifier: Apache-2.0 */
/* Data, calls and checks of one shape of dispatch and combine. */
#include "tools/perf/moe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/random.h"

static float get(const struct moe_bench *b, const unsigned char *rows, size_t at)
{
    uint16_t small;
    float value;
    if (b->dtype == HDL_BF16) {
        memcpy(&small, rows + 2 * at, 2);
        return base_bf16_to_float(small);
    }
    memcpy(&value, rows + 4 * at, 4);
    return value;
}

static void put(const struct moe_bench *b, unsigned char *rows, size_t at, float value)
{
    uint16_t small = base_bf16_from_float(value);
    if (b->dtype == HDL_BF16)
        memcpy(rows + 2 * at, &small, 2);
    else
        memcpy(rows + 4 * at, &value, 4);
}

/* What all elements of a token are: exact in bf16 and in e4m3, different for neighbours.
 */
static float row_value(int rank, int64_t token)
{
    return (float)(1 + (rank * 5 + token) % 7) * (token % 2 ? 1.0f : -1.0f);
}

static float constant_of(int64_t expert)
{
    return (float)(1 + expert % 8);
}

/* ------------------------------------------------------------------------- routing */

/* Ids follow 1 / (rank of the id)^1.2. */
static int64_t zipf(uint64_t *seed, int64_t experts)
{
    double sum = 0, part = (double)(base_splitmix_next(seed) >> 11) * 0x1p-53;
    for (int64_t e = 0; e < experts; e++)
        sum += pow((double)(e + 1), -1.2);
    part *= sum;
    for (int64_t e = 0; e < experts; e++) {
        part -= pow((double)(e + 1), -1.2);
        if (part < 0)
            return e;
    }
    return experts - 1;
}

static int64_t draw_expert(const struct moe_bench *b, uint64_t *seed, int64_t position)
{
    if (strcmp(b->routing, "zipf") == 0)
        return zipf(seed, b->experts);
    if (strcmp(b->routing, "hot") == 0 && position == 0)
        return 0;
    if (strcmp(b->routing, "local") == 0 && position < b->local)
        return b->rank * b->local +
               (int64_t)base_splitmix_below(seed, (uint64_t)b->local);
    return (int64_t)base_splitmix_below(seed, (uint64_t)b->experts);
}

void moe_bench_route(struct moe_bench *b)
{
    uint64_t seed = 77 + (uint64_t)b->rank;
    for (int64_t t = 0; t < b->tokens; t++) {
        int32_t *ids = b->ids + t * b->topk;
        bool seen[1024] = {false};
        for (int64_t j = 0; j < b->topk;) {
            int32_t id = (int32_t)draw_expert(b, &seed, j);
            bool again = false;
            for (int64_t i = 0; i < j; i++)
                again = again || ids[i] == id;
            if (again)
                continue;
            ids[j] = id;
            b->weights[t * b->topk + j] = (float)(1 + (t + j) % 4) / 8.0f;
            int64_t to = id / b->local;
            b->pairs += !seen[to];
            b->remote += !seen[to] && to != b->rank;
            if (b->for_rank)
                b->for_rank[to] += !seen[to];
            seen[to] = true;
            j++;
        }
    }
}

/* -------------------------------------------------------------------------- memory */

/* Poisoned unless it is so large that most of it will never be used. */
static void *memory(size_t bytes)
{
    void *block = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (block && bytes < 16 << 20)
        memset(block, 0xff, (bytes + 64) / 64 * 64);
    return block;
}

bool moe_bench_open(struct moe_bench *b)
{
    size_t tokens = (size_t)b->tokens, k = (size_t)b->topk;
    b->row_bytes = (size_t)b->hidden * (b->dtype == HDL_BF16 ? 2 : 4);
    b->local = b->experts / b->ranks;
    b->pairs = b->remote = 0;
    b->rows = memory(tokens * b->row_bytes);
    b->results = memory(tokens * b->row_bytes);
    b->ids = memory(tokens * k * sizeof(int32_t));
    b->weights = memory(tokens * k * sizeof(float));
    if (!b->rows || !b->results || !b->ids || !b->weights)
        return false;
    moe_bench_route(b);
    for (size_t t = 0; t < tokens; t++)
        for (size_t h = 0; h < (size_t)b->hidden; h++)
            put(b, b->rows, t * (size_t)b->hidden + h, row_value(b->rank, (int64_t)t));
    return true;
}

void moe_bench_close(struct moe_bench *b)
{
    hdl_moe_destroy(b->moe);
    free(b->rows);
    free(b->results);
    free(b->ids);
    free(b->weights);
    free(b->outputs);
    free(b->received.rows);
    free(b->received.scales);
    free(b->received.counts);
    free(b->received.offsets);
    free(b->received.row_numbers);
    free(b->received.source_token);
    free(b->received.source_counts);
    free(b->received.local_ids);
}

static void options(const struct moe_bench *b, struct hdl_moe_opts *o)
{
    *o = (struct hdl_moe_opts){.size = sizeof(*o),
                               .num_experts = (int32_t)b->experts,
                               .top_k = (int32_t)b->topk,
                               .hidden = (int32_t)b->hidden,
                               .max_tokens = (int32_t)(b->tokens > 0 ? b->tokens : 1),
                               .dtype = b->dtype,
                               .format = b->format,
                               .layout = b->layout};
}

enum hdl_status moe_bench_create(struct moe_bench *b)
{
    struct hdl_moe_opts o;
    options(b, &o);
    b->sizes.size = sizeof(b->sizes);
    enum hdl_status status = hdl_moe_size_hint(&o, b->ranks, &b->sizes);
    if (status == HDL_OK)
        status = hdl_moe_create(b->group, &o, &b->moe);
    if (status != HDL_OK)
        return status;
    size_t n = b->sizes.out_rows, local = (size_t)b->local;
    b->received = (struct hdl_moe_received){
        .size = sizeof(b->received),
        .rows = memory(n * b->sizes.row_bytes),
        .scales = memory(n * b->sizes.scale_bytes),
        .counts = memory(local * sizeof(int32_t)),
        .offsets = memory((local + 1) * sizeof(int64_t)),
        .row_numbers = memory(b->sizes.index_entries * sizeof(int64_t)),
        .source_token = memory(n * sizeof(int32_t)),
        .source_counts = memory((size_t)b->ranks * sizeof(int32_t)),
        .local_ids = memory(n * (size_t)b->topk * sizeof(int32_t)),
    };
    b->outputs =
        memory(b->sizes.combine_buffer_elements * (b->dtype == HDL_BF16 ? 2 : 4));
    const struct hdl_moe_received *r = &b->received;
    return r->rows && r->scales && r->counts && r->offsets && r->row_numbers &&
                   r->source_token && r->source_counts && r->local_ids && b->outputs
               ? HDL_OK
               : HDL_ENOMEM;
}

/* --------------------------------------------------------------------------- calls */

enum hdl_status moe_bench_dispatch(struct moe_bench *b)
{
    const struct hdl_moe_tokens tokens = {.size = sizeof(tokens),
                                          .rows = b->rows,
                                          .topk_ids = b->ids,
                                          .weights = b->weights,
                                          .num_tokens = b->tokens};
    if (!b->split)
        return hdl_moe_dispatch(b->moe, &tokens, &b->received, NULL, &b->handle);
    enum hdl_status status = hdl_moe_dispatch_send(b->moe, &tokens, NULL, &b->handle);
    return status == HDL_OK
               ? hdl_moe_dispatch_recv(b->moe, &b->handle, &b->received, NULL)
               : status;
}

enum hdl_status moe_bench_combine(struct moe_bench *b)
{
    const struct hdl_moe_outputs outputs = {.size = sizeof(outputs), .rows = b->outputs};
    const struct hdl_moe_result result = {.size = sizeof(result), .rows = b->results};
    if (!b->split)
        return hdl_moe_combine(b->moe, &b->handle, &outputs, &result, NULL);
    enum hdl_status status = hdl_moe_combine_send(b->moe, &b->handle, &outputs, NULL);
    return status == HDL_OK ? hdl_moe_combine_recv(b->moe, &b->handle, &result, NULL)
                            : status;
}

/* -------------------------------------------------------------------------- checks */

/* First row of local expert e, as combine wants it. */
static int64_t first_row(const struct moe_bench *b, int64_t e)
{
    if (b->layout == HDL_MOE_EXPERT_3D)
        return e * b->ranks * (b->tokens > 0 ? b->tokens : 1);
    return b->received.offsets[e];
}

/* A row of one value. */
static void fill_row(const struct moe_bench *b, unsigned char *to, float value)
{
    size_t width = b->row_bytes / (size_t)b->hidden;
    put(b, to, 0, value);
    for (size_t done = width; done < b->row_bytes; done *= 2)
        memcpy(to + done, to, done < b->row_bytes - done ? done : b->row_bytes - done);
}

void moe_bench_output(const struct moe_bench *b, int64_t expert, unsigned char *row)
{
    fill_row(b, row, constant_of(b->rank * b->local + expert));
}

void moe_bench_fill_outputs(struct moe_bench *b)
{
    if (b->layout ==
        HDL_MOE_RANK_MAJOR) { /* summed by the caller: all weights are 1 here */
        for (int64_t i = 0; i < b->received.num_rows; i++) {
            float sum = 0;
            for (int64_t j = 0; j < b->topk; j++) {
                int32_t id = b->received.local_ids[i * b->topk + j];
                sum += id < 0 ? 0 : constant_of(b->rank * b->local + id);
            }
            fill_row(b, b->outputs + (size_t)i * b->row_bytes, sum);
        }
        return;
    }
    for (int64_t e = 0; e < b->local; e++)
        for (int64_t i = 0; i < b->received.counts[e]; i++)
            moe_bench_output(b, e,
                             b->outputs + (size_t)(first_row(b, e) + i) * b->row_bytes);
}

/* The first and last element of a received row, at its source. */
static bool row_is(const struct moe_bench *b, size_t row, float value)
{
    size_t h = (size_t)b->hidden;
    const unsigned char *rows = b->received.rows;
    if (b->format == HDL_MOE_PLAIN)
        return get(b, rows, row * h) == value && get(b, rows, row * h + h - 1) == value;
    float scale = 0;
    memcpy(&scale, (const unsigned char *)b->received.scales + row * b->sizes.scale_bytes,
           4);
    float got = base_e4m3_to_float(rows[row * h]) * scale;
    return b->format == HDL_MOE_FP8_UE8M0 || fabsf(got - value) <= 0.07f * fabsf(value);
}

int64_t moe_bench_check_rows(const struct moe_bench *b)
{
    const struct hdl_moe_received *r = &b->received;
    int64_t wrong = 0;
    if (b->layout == HDL_MOE_RANK_MAJOR || b->layout == HDL_MOE_INDEXED) {
        size_t row = 0;
        for (int s = 0; s < b->ranks; s++)
            for (int32_t i = 0; i < r->source_counts[s]; i++, row++)
                wrong += !row_is(b, row, row_value(s, r->source_token[row]));
        return wrong;
    }
    /* By expert, sources ascend: a token number that falls begins the next source, but a
     * source may bring nothing; so only what the row itself says can be compared. */
    for (int64_t e = 0; e < b->local; e++) {
        for (int32_t i = 0; i < r->counts[e]; i++) {
            size_t row = (size_t)(first_row(b, e) + i);
            bool any = false;
            for (int s = 0; s < b->ranks; s++)
                any = any || row_is(b, row, row_value(s, r->source_token[row]));
            wrong += !any;
        }
    }
    return wrong;
}

int64_t moe_bench_check_results(const struct moe_bench *b, bool weighted)
{
    int64_t wrong = 0;
    for (int64_t t = 0; t < b->tokens; t++) {
        float sum = 0;
        for (int64_t j = 0; j < b->topk; j++) {
            float weight = weighted ? b->weights[t * b->topk + j] : 1.0f;
            sum += weight * constant_of(b->ids[t * b->topk + j]);
        }
        float first = get(b, b->results, (size_t)(t * b->hidden));
        float last = get(b, b->results, (size_t)((t + 1) * b->hidden - 1));
        float room = sum / 64;
        wrong += !(fabsf(first - sum) <= room && fabsf(last - sum) <= room);
    }
    return wrong;
}
