/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch and combine of all ranks in one process, straight from the definition: the
 * oracle. */
#ifndef MOE_REFERENCE_H
#define MOE_REFERENCE_H

#include "moe/config.h"

/* What one rank gives to a step. */
struct moe_reference_rank {
    const void *rows;
    const void *scales;
    const int64_t *ids;    /* [T][k] */
    const float *weights;  /* [T][k]; NULL = late */
    const float *late;     /* [T][k] weights that it gives to combine */
    int64_t tokens;        /* T */
    const int32_t *active; /* [R] in dispatch and combine; NULL = all */
    const void *outputs;   /* expert outputs that it gives to combine */
    bool split;            /* it combines in two phases */
};

/* What `me` receives. The pointers of `out` as for hdl_moe_dispatch_recv. */
void moe_reference_dispatch(const struct moe_config *config,
                            const struct moe_reference_rank *ranks, uint32_t me,
                            struct hdl_moe_received *out);

/* The sums of `me`. False if memory is short. */
bool moe_reference_combine(const struct moe_config *config,
                           const struct moe_reference_rank *ranks, uint32_t me,
                           const struct hdl_moe_result *out);

/* One row as FP8 with its scales, by the definition of hdl_moe_format. */
void moe_reference_quantise(enum hdl_moe_format format, enum hdl_dtype dtype,
                            const void *row, uint32_t hidden, uint8_t *data,
                            void *scales);

#endif
