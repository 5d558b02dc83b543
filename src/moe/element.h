/* SPDX-License-Identifier: Apache-2.0 */
/* One element of a row as float, and the FP8 scale of a group: the definition, in
 * scalars. */
#ifndef MOE_ELEMENT_H
#define MOE_ELEMENT_H

#include <math.h>

#include "heddle.h"

#include "base/half.h"
#include "moe/layout.h"

static inline float moe_load(enum hdl_dtype dtype, const void *row, size_t at)
{
    const uint8_t *p = row;
    uint16_t small;
    float value;
    switch (dtype) {
    case HDL_F8E4M3:
        return base_e4m3_to_float(p[at]);
    case HDL_BF16:
        memcpy(&small, p + 2 * at, 2);
        return base_bf16_to_float(small);
    case HDL_F16:
        memcpy(&small, p + 2 * at, 2);
        return base_f16_to_float(small);
    default:
        memcpy(&value, p + 4 * at, 4);
        return value;
    }
}

static inline void moe_store(enum hdl_dtype dtype, void *row, size_t at, float value)
{
    uint8_t *p = row;
    uint16_t small;
    switch (dtype) {
    case HDL_BF16:
        small = base_bf16_from_float(value);
        memcpy(p + 2 * at, &small, 2);
        break;
    case HDL_F16:
        small = base_f16_from_float(value);
        memcpy(p + 2 * at, &small, 2);
        break;
    default:
        memcpy(p + 4 * at, &value, 4);
        break;
    }
}

/* x times inverse, nearest even, saturated. NaN becomes the one NaN 0x7f. */
static inline uint8_t moe_e4m3(float x, float inverse)
{
    float scaled = x * inverse;
    if (isnan(scaled))
        return 0x7f;
    if (scaled > 448.0f)
        return 0x7e;
    if (scaled < -448.0f)
        return 0xfe;
    return base_e4m3_from_float(scaled);
}

struct moe_scale {
    float scale, inverse;
    uint8_t exponent; /* biased, of the scale rounded up to a power of two */
};

static inline struct moe_scale moe_scale_of(enum hdl_moe_format format, float amax)
{
    struct moe_scale s;
    float ratio = amax / 448.0f;
    uint32_t bits = base_float_bits(ratio);
    uint32_t exponent = (bits >> 23) + ((bits & 0x7fffff) != 0);
    s.exponent = (uint8_t)exponent;
    if (format == HDL_MOE_FP8) {
        s.scale = ratio;
        s.inverse = 448.0f / amax;
    } else {
        s.scale = base_float_from_bits(exponent << 23);
        s.inverse = base_float_from_bits((254 - exponent) << 23);
    }
    return s;
}

/* The smallest amax that a group may have. */
#define MOE_AMAX_FLOOR 1e-4f

/* Writes scale number `group` of a row: f32, or the exponent. */
static inline void moe_put_scale(enum hdl_moe_format format, void *scales, size_t group,
                                 struct moe_scale s)
{
    if (format == HDL_MOE_FP8_UE8M0)
        ((uint8_t *)scales)[group] = s.exponent;
    else
        memcpy((uint8_t *)scales + group * sizeof(float), &s.scale, sizeof(float));
}

#endif
