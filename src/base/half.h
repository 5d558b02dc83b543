/* SPDX-License-Identifier: Apache-2.0 */
/* Conversions between float and the small floating-point types: to nearest, ties to even.
 *
 *     type   sign exponent fraction  bias  largest   beyond it
 *     f16      1      5       10      15    65504    infinity
 *     bf16     1      8        7     127    3.4e38   infinity
 *     e4m3     1      4        3       7      448    NaN (0x7f; the type has no infinity)
 *     e5m2     1      5        2      15    57344    infinity
 */
#ifndef BASE_HALF_H
#define BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t base_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float base_float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float base_bf16_to_float(uint16_t value)
{
    return base_float_from_bits((uint32_t)value << 16);
}

static inline uint16_t base_bf16_from_float(float value)
{
    uint32_t bits = base_float_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The magnitude bits of a float (not NaN, below the type's overflow) in a type with
 * `fraction_bits` and `bias`: one rounding for normal and subnormal results alike, and a
 * carry out of the fraction lands in the exponent, where it belongs. */
static inline uint32_t base_small_round(uint32_t magnitude, unsigned fraction_bits,
                                        int bias)
{
    int exponent = (int)(magnitude >> 23) - 127 + bias;
    unsigned drop = 23 - fraction_bits;
    if (exponent <= 0) {
        /* Subnormal: the leading bit becomes explicit and the fraction moves right. */
        if (exponent < -(int)fraction_bits)
            return 0;
        uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
        drop += (unsigned)(1 - exponent);
        uint32_t kept = mantissa >> drop;
        uint32_t rest = mantissa & ((UINT32_C(1) << drop) - 1);
        uint32_t half = UINT32_C(1) << (drop - 1);
        return kept + (rest > half || (rest == half && (kept & 1)));
    }
    uint32_t rebased = magnitude - ((uint32_t)(127 - bias) << 23);
    return (rebased + (UINT32_C(1) << (drop - 1)) - 1 + (rebased >> drop & 1)) >> drop;
}

/* A magnitude of a small type as float: exact for all four. */
static inline float base_small_expand(uint32_t magnitude, unsigned fraction_bits,
                                      int bias)
{
    uint32_t exponent = magnitude >> fraction_bits;
    uint32_t fraction = magnitude & ((UINT32_C(1) << fraction_bits) - 1);
    if (exponent == 0) {
        float unit =
            base_float_from_bits((uint32_t)(127 + 1 - bias - (int)fraction_bits) << 23);
        return (float)fraction * unit;
    }
    return base_float_from_bits((exponent + (uint32_t)(127 - bias)) << 23 |
                                fraction << (23 - fraction_bits));
}

static inline uint16_t base_f16_from_float(float value)
{
    uint32_t bits = base_float_bits(value);
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) /* 65520 rounds to 65536 */
        return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(sign | base_small_round(magnitude, 10, 15));
}

static inline float base_f16_to_float(uint16_t value)
{
    uint32_t sign = (uint32_t)(value & 0x8000) << 16;
    uint32_t magnitude = value & 0x7fff;
    if (magnitude >= 0x7c00)
        return base_float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return base_float_from_bits(sign |
                                base_float_bits(base_small_expand(magnitude, 10, 15)));
}

static inline uint8_t base_e5m2_from_float(float value)
{
    uint32_t bits = base_float_bits(value);
    uint32_t sign = bits >> 24 & 0x80;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint8_t)(sign | 0x7f);
    if (magnitude >= 0x47700000) /* 61440 rounds to 65536 */
        return (uint8_t)(sign | 0x7c);
    return (uint8_t)(sign | base_small_round(magnitude, 2, 15));
}

static inline float base_e5m2_to_float(uint8_t value)
{
    return base_f16_to_float((uint16_t)(value << 8));
}

static inline uint8_t base_e4m3_from_float(float value)
{
    uint32_t bits = base_float_bits(value);
    uint32_t sign = bits >> 24 & 0x80;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x43e80000) /* above 464, the tie that rounds to 448; NaN too */
        return (uint8_t)(sign | 0x7f);
    return (uint8_t)(sign | base_small_round(magnitude, 3, 7));
}

static inline float base_e4m3_to_float(uint8_t value)
{
    uint32_t sign = (uint32_t)(value & 0x80) << 24;
    uint32_t magnitude = value & 0x7f;
    if (magnitude == 0x7f)
        return base_float_from_bits(sign | 0x7fc00000);
    return base_float_from_bits(sign |
                                base_float_bits(base_small_expand(magnitude, 3, 7)));
}

#endif
