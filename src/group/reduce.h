/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise reduction of several ranks' inputs, vectorised; pure functions. */
#ifndef GROUP_REDUCE_H
#define GROUP_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "heddle.h"

/* Whether the operator is defined for the type: bitwise ones for integers and bool;
 * complex SUM, AVG and PREMUL_SUM; fp8 SUM, AVG, MIN and MAX; bool everything but AVG,
 * PREMUL_SUM. */
bool group_reduce_supported(enum hdl_dtype dtype, enum hdl_redop redop);

/*
 * dst[i] = srcs[0][i] op srcs[1][i] op ... op srcs[n-1][i], in this order, for `count`
 * elements, n >= 1. AVG divides by n. f16, bf16 and fp8 accumulate in f32 and are rounded
 * once. MIN and MAX of a NaN are NaN. Integers wrap. dst may be one of the sources; other
 * overlaps are not allowed. No pointer needs alignment. `stream` writes dst past the
 * cache, for results that are larger than it. PREMUL_SUM is SUM of inputs that went
 * through group_premultiply.
 */
void group_reduce(void *dst, const void *const *srcs, size_t n, size_t count,
                  enum hdl_dtype dtype, enum hdl_redop redop, bool stream);

/* Do results of parts of the inputs combine to that of all of them? Not where a sum is
 * rounded once. */
bool group_reduce_splits(enum hdl_dtype dtype, enum hdl_redop redop);

/* What AVG does to the sum of n ranks' inputs; not for narrow types. */
void group_divide(void *dst, size_t count, enum hdl_dtype dtype, size_t n);

/* dst[i] = src[i] * scalar, in the element's type (f16, bf16 through f32). */
void group_premultiply(void *dst, const void *src, size_t count, enum hdl_dtype dtype,
                       double scalar);

/* "avx512", "avx2" or "plain": the variant that this processor runs. */
const char *group_reduce_variant(void);

#endif
