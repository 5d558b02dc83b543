/* SPDX-License-Identifier: Apache-2.0 */
/* Size arithmetic that reports overflow instead of wrapping. */
#ifndef BASE_CHECKED_H
#define BASE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Each returns false on overflow and then leaves *out alone. */
static inline bool base_mul_size(size_t a, size_t b, size_t *out)
{
    size_t result;
    if (__builtin_mul_overflow(a, b, &result))
        return false;
    *out = result;
    return true;
}

static inline bool base_add_size(size_t a, size_t b, size_t *out)
{
    size_t result;
    if (__builtin_add_overflow(a, b, &result))
        return false;
    *out = result;
    return true;
}

static inline bool base_is_power_of_2(size_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

/* Rounds up to a multiple of `align`, a power of 2. */
static inline bool base_align_up(size_t value, size_t align, size_t *out)
{
    size_t sum;
    if (!base_add_size(value, align - 1, &sum))
        return false;
    *out = sum & ~(align - 1);
    return true;
}

static inline size_t base_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t base_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Quotient rounded up, without the overflow of (a + b - 1) / b. */
static inline size_t base_div_up(size_t a, size_t b)
{
    return a / b + (a % b != 0);
}

#endif
