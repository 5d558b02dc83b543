/* SPDX-License-Identifier: Apache-2.0 */
/* Checks creation options, fills in defaults, derives geometry and expert map. */
#include "moe/config.h"

#include <string.h>

#include "base/dtype.h"
#include "base/option.h"

static enum hdl_status check_range(const char *name, int64_t value, int64_t low,
                                   int64_t high)
{
    if (value < low || value > high)
        return base_fail(HDL_EINVAL, "%s %lld is outside %lld to %lld", name,
                         (long long)value, (long long)low, (long long)high);
    return HDL_OK;
}

static enum hdl_status check_ranges(const struct hdl_moe_opts *o, int32_t ranks)
{
    const struct {
        const char *name;
        int64_t value, low, high;
    } rows[] = {
        {"number of ranks", ranks, 1, MOE_MAX_RANKS},
        {"num_experts", o->num_experts, 1, MOE_MAX_EXPERTS},
        {"top_k", o->top_k, 1, MOE_MAX_TOP_K},
        {"hidden", o->hidden, 1, INT32_MAX},
        {"max_tokens", o->max_tokens, 1, INT32_MAX},
        {"format", o->format, HDL_MOE_PLAIN, HDL_MOE_FP8_UE8M0},
        {"combine_wire", o->combine_wire, HDL_MOE_WIRE_ROW, HDL_MOE_WIRE_FP8},
        {"layout", o->layout, HDL_MOE_EXPERT_3D, HDL_MOE_INDEXED},
        {"align", o->align, 0, 1 << 20},
        {"lanes", o->lanes, 0, MOE_MAX_LANES},
        {"dp_size", o->dp_size, 0, ranks},
        {"timeout_us", o->timeout_us, 0, INT64_MAX},
        {"memory", o->memory, HDL_MOE_HOST, HDL_MOE_CUDA},
        {"cuda_device", o->cuda_device, 0, INT32_MAX},
        {"cuda_blocks", o->cuda_blocks, 0, INT32_MAX},
        {"protocol", o->protocol, HDL_MOE_AUTO, HDL_MOE_BULK},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        enum hdl_status status =
            check_range(rows[i].name, rows[i].value, rows[i].low, rows[i].high);
        if (status != HDL_OK)
            return status;
    }
    if (o->top_k > o->num_experts)
        return base_fail(HDL_EINVAL, "top_k %d exceeds num_experts %d", o->top_k,
                         o->num_experts);
    if (o->dp_size > 0 && ranks % o->dp_size != 0)
        return base_fail(HDL_EINVAL, "%d ranks do not divide into groups of dp_size %d",
                         ranks, o->dp_size);
    return HDL_OK;
}

static bool is_float(enum hdl_dtype dtype)
{
    return dtype == HDL_BF16 || dtype == HDL_F16 || dtype == HDL_F32;
}

/* Row types: what comes in, what travels, what combine takes. */
static enum hdl_status check_types(struct moe_config *c, const struct hdl_moe_opts *o)
{
    c->dtype = o->dtype == 0 ? HDL_BF16 : o->dtype;
    c->format = o->format;
    c->wire = o->combine_wire;
    c->opaque = c->dtype == HDL_U8;
    if (!is_float(c->dtype) && c->dtype != HDL_F8E4M3 && !c->opaque)
        return base_fail(HDL_EINVAL, "rows of type %d (%s) are not supported",
                         (int)c->dtype, base_dtype_name(c->dtype));
    if (c->opaque && c->format != HDL_MOE_PLAIN)
        return base_fail(HDL_EINVAL, "opaque rows have no FP8 format, format is %d",
                         (int)c->format);
    c->combine_dtype = o->combine_dtype;
    if (c->combine_dtype == 0)
        c->combine_dtype = is_float(c->dtype) ? c->dtype : HDL_BF16;
    if (!is_float(c->combine_dtype))
        return base_fail(HDL_EINVAL, "combine of type %d (%s) is not supported",
                         (int)c->combine_dtype, base_dtype_name(c->combine_dtype));
    c->exact = o->exact;
    if (c->exact && o->layout == HDL_MOE_RANK_MAJOR)
        return base_fail(HDL_EINVAL, "exact needs rows of experts, layout RANK_MAJOR has "
                                     "rows that the caller has summed");
    c->quantise = is_float(c->dtype) && c->format != HDL_MOE_PLAIN;
    c->zero_padding = o->zero_padding;
    return HDL_OK;
}

size_t moe_scale_bytes(enum hdl_moe_format format, uint32_t hidden)
{
    size_t groups = moe_scale_groups(hidden);
    switch (format) {
    case HDL_MOE_PLAIN:
        return 0;
    case HDL_MOE_FP8_UE8M0:
        return (groups + 3) / 4 * 4;
    default:
        return groups * sizeof(float);
    }
}

static void fill_shape(struct moe_config *c, const struct hdl_moe_opts *o, int32_t ranks)
{
    struct moe_shape *s = &c->shape;
    bool fp8_wire = c->wire == HDL_MOE_WIRE_FP8;
    size_t given = base_dtype_size(c->dtype), take = base_dtype_size(c->combine_dtype);
    size_t give = fp8_wire ? 1 : c->wire == HDL_MOE_WIRE_F32 ? 4 : take;
    s->ranks = (uint32_t)ranks;
    s->experts = (uint32_t)o->num_experts;
    s->local_experts = c->map.max_local;
    s->top_k = (uint32_t)o->top_k;
    s->hidden = (uint32_t)o->hidden;
    s->max_tokens = (uint32_t)o->max_tokens;
    s->dp = o->dp_size > 0 ? (uint32_t)o->dp_size : 1;
    s->lanes = o->lanes > 0 ? (uint32_t)o->lanes : 2;
    s->order = (uint32_t)o->layout;
    s->align = o->align > 0 ? (uint32_t)o->align : 1;
    s->row_elem = c->quantise ? 1 : (uint32_t)given;
    s->row_scales = (uint32_t)moe_scale_bytes(c->format, s->hidden);
    s->give_elem = c->opaque ? 0 : (uint32_t)give;
    s->give_scales =
        !c->opaque && fp8_wire ? (uint32_t)moe_scale_bytes(HDL_MOE_FP8, s->hidden) : 0;
    s->take_elem = c->opaque ? 0 : (uint32_t)take;
    s->late_weights = o->late_weights;
    s->exact = o->exact || (o->late_weights && o->layout != HDL_MOE_RANK_MAJOR);
    s->device = o->memory == HDL_MOE_CUDA;
    c->protocol = o->protocol;
    c->row_in_bytes = (size_t)s->hidden * given;
    c->timeout_us = o->timeout_us ? o->timeout_us : 60000000;
}

enum hdl_status moe_config_init(struct base_env *env, struct moe_config *config,
                                const struct hdl_moe_opts *opts, int32_t ranks)
{
    struct hdl_moe_opts o;
    memset(config, 0, sizeof(*config));
    enum hdl_status status = base_option_copy("hdl_moe_opts", opts, &o, sizeof(o));
    if (status == HDL_OK)
        status = check_ranges(&o, ranks);
    if (status == HDL_OK)
        status = check_types(config, &o);
    if (status != HDL_OK)
        return status;
    status = moe_map_init(env, &config->map, (uint32_t)ranks, (uint32_t)o.num_experts,
                          o.expert_counts, o.expert_ids);
    if (status != HDL_OK)
        return status;
    fill_shape(config, &o, ranks);
    if (!moe_layout_init(&config->layout, &config->shape)) {
        moe_map_free(env, &config->map);
        return base_fail(
            HDL_EINVAL,
            "sizes overflow: %d ranks, max_tokens %d, hidden %d, num_experts "
            "%d, top_k %d, lanes %u",
            ranks, o.max_tokens, o.hidden, o.num_experts, o.top_k, config->shape.lanes);
    }
    return HDL_OK;
}

void moe_config_free(struct base_env *env, struct moe_config *config)
{
    moe_map_free(env, &config->map);
}

/* Order-dependent sum of the map, so that two maps that differ almost never agree. */
static int64_t map_digest(const struct moe_map *map)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (uint32_t r = 0; r < map->ranks; r++) {
        for (uint32_t i = map->first[r]; i < map->first[r + 1]; i++)
            h = (h ^ ((uint64_t)r << 32 | map->list[i])) * UINT64_C(0x100000001b3);
    }
    return (int64_t)(h >> 1);
}

void moe_config_fields(const struct moe_config *c,
                       struct moe_config_field fields[MOE_CONFIG_FIELDS])
{
    const struct moe_config_field all[MOE_CONFIG_FIELDS] = {
        {"num_experts", c->shape.experts},
        {"top_k", c->shape.top_k},
        {"hidden", c->shape.hidden},
        {"max_tokens", c->shape.max_tokens},
        {"dtype", c->dtype},
        {"format", c->format},
        {"combine_dtype", c->combine_dtype},
        {"combine_wire", c->wire},
        {"layout", c->shape.order},
        {"align", c->shape.align},
        {"zero_padding", c->zero_padding},
        {"exact", c->exact},
        {"late_weights", c->shape.late_weights},
        {"lanes", c->shape.lanes},
        {"dp_size", c->shape.dp},
        {"memory", c->shape.device},
        {"protocol", c->protocol},
        {"expert map", map_digest(&c->map)},
    };
    memcpy(fields, all, sizeof(all));
}
