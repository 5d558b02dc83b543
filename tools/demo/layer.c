/* SPDX-License-Identifier: Apache-2.0 */
/* The layer of the demo: weights, gate, experts, and the run in one process. */
#include "tools/demo/layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/random.h"
#include "tools/demo/words.h"

enum { MOST_HIDDEN = 512, MOST_TOP_K = 16 };

/* Uniform between -scale and scale. */
static float draw(uint64_t *seed, float scale)
{
    return (float)((int64_t)(base_splitmix_next(seed) >> 40) - (1 << 23)) * 0x1p-23f *
           scale;
}

static float *draw_all(uint64_t seed, size_t count, float scale)
{
    float *values = malloc(count * sizeof(float));
    for (size_t i = 0; values && i < count; i++)
        values[i] = draw(&seed, scale);
    return values;
}

bool layer_open(struct layer *layer, int experts, int top_k, int hidden, int inner)
{
    size_t e = (size_t)experts, h = (size_t)hidden, n = (size_t)inner;
    *layer = (struct layer){experts, top_k, hidden, inner, NULL, NULL, NULL};
    layer->gate = draw_all(1, e * h, 1.0f);
    layer->first = draw_all(2, e * n * h, 2.0f / sqrtf((float)hidden));
    layer->second = draw_all(3, e * h * n, 2.0f / sqrtf((float)inner));
    return layer->gate && layer->first && layer->second;
}

void layer_close(struct layer *layer)
{
    free(layer->gate);
    free(layer->first);
    free(layer->second);
}

void layer_embed(const struct layer *layer, const char *word, const char *before,
                 uint16_t *row)
{
    uint64_t own = word_hash(word), other = before ? word_hash(before) : 0;
    for (int h = 0; h < layer->hidden; h++) {
        float x = draw(&own, 1.0f);
        if (before)
            x += draw(&other, 0.25f);
        row[h] = base_bf16_from_float(x);
    }
}

static float product(const float *weights, const float *x, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += weights[i] * x[i];
    return sum;
}

static void widen(const uint16_t *row, float *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = base_bf16_to_float(row[i]);
}

void layer_route(const struct layer *layer, const uint16_t *row, int32_t *ids,
                 float *weights)
{
    float x[MOST_HIDDEN], sum = 0;
    widen(row, x, layer->hidden);
    for (int k = 0; k < layer->top_k; k++)
        ids[k] = -1;
    for (int e = 0; e < layer->experts; e++) {
        float score =
            product(layer->gate + (size_t)(e * layer->hidden), x, layer->hidden);
        int k = layer->top_k;
        while (k > 0 && (ids[k - 1] < 0 || score > weights[k - 1]))
            k--;
        if (k == layer->top_k)
            continue;
        size_t moved = (size_t)(layer->top_k - 1 - k);
        memmove(&ids[k + 1], &ids[k], moved * sizeof(*ids));
        memmove(&weights[k + 1], &weights[k], moved * sizeof(*weights));
        ids[k] = e;
        weights[k] = score;
    }
    for (int k = layer->top_k - 1; k >= 0; k--) {
        weights[k] = expf(weights[k] - weights[0]);
        sum += weights[k];
    }
    for (int k = 0; k < layer->top_k; k++)
        weights[k] /= sum;
}

void layer_expert(const struct layer *layer, int expert, const uint16_t *row,
                  uint16_t *out)
{
    size_t weights = (size_t)(expert * layer->inner * layer->hidden);
    float x[MOST_HIDDEN], middle[MOST_HIDDEN];
    widen(row, x, layer->hidden);
    for (int i = 0; i < layer->inner; i++) {
        float y = product(layer->first + weights + (size_t)(i * layer->hidden), x,
                          layer->hidden);
        middle[i] = y > 0 ? y : 0;
    }
    for (int h = 0; h < layer->hidden; h++)
        out[h] = base_bf16_from_float(product(
            layer->second + weights + (size_t)(h * layer->inner), middle, layer->inner));
}

/* Adds what the experts of a rank contribute; false if nothing. */
static bool add_experts(const struct layer *layer, const uint16_t *row,
                        const int32_t *ids, const float *weights, const int *owner,
                        int rank, float *sum)
{
    uint16_t y[MOST_HIDDEN];
    bool any = false;
    for (int e = 0; e < layer->experts; e++) {
        if (owner[e] != rank)
            continue;
        for (int k = 0; k < layer->top_k; k++) {
            if (ids[k] != e)
                continue;
            any = true;
            layer_expert(layer, e, row, y);
            for (int h = 0; h < layer->hidden; h++)
                sum[h] = fmaf(weights[k], base_bf16_to_float(y[h]), sum[h]);
        }
    }
    return any;
}

void layer_token(const struct layer *layer, const uint16_t *row, int ranks,
                 const int *owner, uint16_t *out)
{
    int32_t ids[MOST_TOP_K];
    float weights[MOST_TOP_K], total[MOST_HIDDEN] = {0};
    layer_route(layer, row, ids, weights);
    for (int r = 0; r < ranks; r++) {
        float sum[MOST_HIDDEN] = {0};
        if (!add_experts(layer, row, ids, weights, owner, r, sum))
            continue;
        for (int h = 0; h < layer->hidden; h++) /* a rank rounds what it sends */
            total[h] += base_bf16_to_float(base_bf16_from_float(sum[h]));
    }
    for (int h = 0; h < layer->hidden; h++)
        out[h] = base_bf16_from_float(total[h]);
}
