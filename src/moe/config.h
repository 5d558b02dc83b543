/* SPDX-License-Identifier: Apache-2.0 */
/* Creation options of an exchange, checked and completed. */
#ifndef MOE_CONFIG_H
#define MOE_CONFIG_H

#include "moe/layout.h"
#include "moe/map.h"

struct moe_config {
    struct moe_shape shape;
    struct moe_layout layout;
    struct moe_map map;
    enum hdl_dtype dtype;
    enum hdl_dtype combine_dtype;
    enum hdl_moe_format format;
    enum hdl_moe_wire wire;
    enum hdl_moe_protocol protocol;
    size_t row_in_bytes; /* of a row as the caller gives it */
    bool exact;
    bool zero_padding;
    bool opaque;   /* no combine */
    bool quantise; /* dispatch makes FP8 of the rows */
    int64_t timeout_us;
};

/* Bytes of the scales of one row, 0 for HDL_MOE_PLAIN. */
size_t moe_scale_bytes(enum hdl_moe_format format, uint32_t hidden);

/* HDL_EINVAL with the offending values; then there is nothing to free. */
enum hdl_status moe_config_init(struct base_env *env, struct moe_config *config,
                                const struct hdl_moe_opts *opts, int32_t ranks);
void moe_config_free(struct base_env *env, struct moe_config *config);

/* The fields that all ranks must agree on, as name and value. */
enum { MOE_CONFIG_FIELDS = 18 };
struct moe_config_field {
    const char *name;
    int64_t value;
};
void moe_config_fields(const struct moe_config *config,
                       struct moe_config_field fields[MOE_CONFIG_FIELDS]);

#endif
