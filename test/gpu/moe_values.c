/* SPDX-License-Identifier: Apache-2.0 */
/* Every value of BF16 and F16, and F32 of every exponent, through FP8 and back on a GPU,
 * against the oracle. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe/element.h"
#include "ranks.h"

/*
 * One rank with one expert sends its rows to itself: dispatch quantises, combine takes
 * outputs of the same values over the FP8 wire. Values follow each other, so that those
 * of a scale's group are alike, or are mixed, or have 448 beside them and none above it,
 * so that they are converted as they are.
 */
enum { VALUES = 1 << 16, MOST_TOKENS = 2048, GROUP = 128 };
enum order { FOLLOWING, MIXED, UNSCALED, ORDERS };

static const int32_t hiddens[] = {128, 129, 1, 7, 100, 127, 1000, 7168};
static const enum hdl_dtype types[] = {HDL_BF16, HDL_F16, HDL_F32};
static const enum hdl_moe_format formats[] = {HDL_MOE_FP8, HDL_MOE_FP8_POW2,
                                              HDL_MOE_FP8_UE8M0};
#define COUNT(x) (sizeof(x) / sizeof((x)[0]))

static float value(enum hdl_dtype type, uint32_t number)
{
    const uint32_t bits = number % VALUES;
    float x;
    if (type != HDL_F32)
        return moe_load(type, &bits, 0);
    /* Sign, exponent, and fractions near what rounds. */
    uint64_t random = number;
    const uint32_t kind = bits >> 9 & 7, exponent = bits >> 1 & 0xff,
                   part = (uint32_t)gpu_random(&random) & 0x7fffff,
                   tie = (part & 0x700000) | 0x80000;
    const uint32_t fraction = kind == 0   ? 0
                              : kind == 1 ? 0x7fffff
                              : kind == 2 ? tie
                              : kind == 3 ? tie + 1
                              : kind == 4 ? tie - 1
                                          : part;
    const uint32_t word = (uint32_t)(bits & 1) << 31 | exponent << 23 | fraction;
    memcpy(&x, &word, sizeof(x));
    return x;
}

static void put_values(enum hdl_dtype type, void *rows, size_t tokens, size_t hidden,
                       enum order order)
{
    for (size_t i = 0; i < tokens * hidden; i++) {
        const uint32_t number = (uint32_t)(order == MIXED ? i * 40503 : i) % VALUES;
        float x = value(type, number);
        if (order == UNSCALED && i % hidden % GROUP == 0)
            x = 448;
        if (order == UNSCALED && (x > 448 || x < -448))
            x = 1 / x;
        moe_store(type, rows, i, x);
    }
}

/* Buffers that differ. */
static int check(enum hdl_dtype type, enum hdl_moe_format format, int32_t hidden)
{
    struct gpu_case c;
    struct gpu_world *w = calloc(1, sizeof(*w));
    int bad = 0;
    gpu_case_defaults(&c);
    c.ranks = 1;
    c.tokens[0] = (uint32_t)(VALUES / hidden + 1);
    if (c.tokens[0] > MOST_TOKENS)
        c.tokens[0] = MOST_TOKENS;
    c.opts.max_tokens = (int32_t)c.tokens[0];
    c.opts.hidden = hidden;
    c.opts.num_experts = c.opts.top_k = 1;
    c.opts.dtype = type;
    c.opts.format = format;
    c.opts.combine_wire = HDL_MOE_WIRE_FP8;
    if (!w || !gpu_world_open(w, &c.opts, 1, 1, 0))
        exit(1);
    for (enum order order = FOLLOWING; order < ORDERS; order++) {
        struct gpu_rank *r = &w->rank[0];
        if (!gpu_world_fill(w, &c))
            exit(1);
        put_values(type, r->buffer[BUF_ROWS].host, c.tokens[0], (size_t)hidden, order);
        put_values(type, r->buffer[BUF_EXPERT_OUT].host, c.tokens[0], (size_t)hidden,
                   order);
        if (!gpu_world_put(r) || !gpu_world_step(w, &c, 0))
            exit(1);
        const int differ = gpu_world_compare(w, &c, OF_BOTH);
        if (differ)
            fprintf(stderr, "dtype %d format %d hidden %d order %d: %d buffers differ\n",
                    (int)type, (int)format, hidden, (int)order, differ);
        bad += differ;
    }
    gpu_world_close(w);
    free(w);
    return bad;
}

int main(void)
{
    int bad = 0;
    if (gpu_count() == 0) {
        printf("skipped: %s\n", base_detail());
        return 77;
    }
    for (size_t t = 0; t < COUNT(types); t++)
        for (size_t f = 0; f < COUNT(formats); f++)
            for (size_t h = 0; h < (f ? 2 : COUNT(hiddens)); h++)
                bad += check(types[t], formats[f], hiddens[h]);
    printf("FP8 of every value, %zu types, %zu formats, up to %zu sizes of rows: %d "
           "differ\n",
           COUNT(types), COUNT(formats), COUNT(hiddens), bad);
    return bad != 0;
}
