/* SPDX-License-Identifier: Apache-2.0 */
/* Loops over the elements of rows: copy, quantise, weight, add; vectorised for the
 * processor. */
#ifndef MOE_ROWS_H
#define MOE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heddle.h"

/*
 * Pure functions; pointers need the alignment of an element at most, and none overlap.
 * The bytes are those of moe/reference.c on every processor. `stream` writes past the
 * cache, for results that will not be read soon; moe_rows_fence orders such stores before
 * later flags.
 */

/* One source row to n places. */
void moe_rows_copy(void *const *dst, size_t n, const void *src, size_t bytes,
                   bool stream);
void moe_rows_fence(void);

/* A row as FP8 with the scales of `format` (not PLAIN); UE8M0's bytes are padded with 0.
 */
void moe_rows_quantise(enum hdl_moe_format format, enum hdl_dtype dtype, const void *src,
                       uint32_t hidden, uint8_t *data, void *scales);

/* How a contribution looks on the wire. */
struct moe_wire {
    enum hdl_moe_wire kind;
    enum hdl_dtype dtype; /* of the rows given and of the result */
    uint32_t hidden;
    size_t scale_offset; /* FP8: of the scales in a contribution */
};

/* dst = sum of weights[i] * srcs[i] by fmaf from +0 in order, as a contribution; weights
 * NULL: n is 1 and the row is only converted. */
void moe_rows_give(const struct moe_wire *wire, void *dst, const void *const *srcs,
                   const float *weights, size_t n, bool stream);

/* What the owner adds up: contributions, then biases, then the old result. */
struct moe_take {
    const void *const *parts; /* [n] contributions on the wire */
    const float *weights;     /* [n] fmaf with these; NULL = plain sum */
    size_t n;
    const void *bias[2]; /* rows of the result's type, or NULL */
    bool accumulate;     /* add what dst holds */
};
void moe_rows_take(const struct moe_wire *wire, void *dst, const struct moe_take *take,
                   bool stream);

/* For tests: "avx512", "avx2" or "plain"; false if the processor or the build does not
 * have it. */
bool moe_rows_use(const char *variant);

#endif
