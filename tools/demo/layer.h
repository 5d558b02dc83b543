/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture-of-experts layer with fixed weights over the words of a text, in plain loops.
 */
#ifndef TOOLS_DEMO_LAYER_H
#define TOOLS_DEMO_LAYER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 *   word --hash--> vector x --gate--> the top_k experts with the largest scores, softmax
 *   expert e:  y = W2[e] * relu(W1[e] * x)      output:  sum over them of weight * y
 *
 * Rows are bf16, arithmetic is f32 in a fixed order, so that results are equal in all
 * bits wherever they are computed.
 */
struct layer {
    int experts, top_k, hidden, inner;
    float *gate;   /* [experts][hidden] */
    float *first;  /* [experts][inner][hidden] */
    float *second; /* [experts][hidden][inner] */
};

bool layer_open(struct layer *layer, int experts, int top_k, int hidden, int inner);
void layer_close(struct layer *layer);

/* The vector of a word after `before` (NULL = none). */
void layer_embed(const struct layer *layer, const char *word, const char *before,
                 uint16_t *row);
void layer_route(const struct layer *layer, const uint16_t *row, int32_t *ids,
                 float *weights);
void layer_expert(const struct layer *layer, int expert, const uint16_t *row,
                  uint16_t *out);
/* The whole layer for one token, as `ranks` ranks add it up; owner [experts]. */
void layer_token(const struct layer *layer, const uint16_t *row, int ranks,
                 const int *owner, uint16_t *out);

#endif
