/* SPDX-License-Identifier: Apache-2.0 */
/* Compiles the row loops for each processor variant and picks one at run time. */
#include "moe/rows.h"

#include <string.h>

#include "base/half.h"
#include "moe/element.h"
#include "moe/layout.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Elements that are worked on at a time: a multiple of the scale group. */
enum { ROWS_BLOCK = 512 };

struct rows_table {
    const char *name;
    void (*copy)(void *const *dst, size_t n, const uint8_t *src, size_t bytes,
                 bool stream);
    void (*quantise)(enum hdl_moe_format format, enum hdl_dtype dtype, const void *src,
                     uint32_t hidden, uint8_t *data, void *scales);
    void (*give)(const struct moe_wire *wire, void *dst, const void *const *srcs,
                 const float *weights, size_t n, bool stream);
    void (*take)(const struct moe_wire *wire, void *dst, const struct moe_take *take,
                 bool stream);
};

#define ROWS(name) rows_plain_##name
#define ROWS_NAME "plain"
#define ROWS_TARGET
#define ROWS_F16 0
#define ROWS_STREAM 0
#define ROWS_WIDTH 0
#include "moe/rows_body.h"
#undef ROWS
#undef ROWS_NAME
#undef ROWS_TARGET
#undef ROWS_F16
#undef ROWS_STREAM
#undef ROWS_WIDTH

#if defined(__x86_64__)
#define ROWS_F16 1
#define ROWS_STREAM 1

#define ROWS(name) rows_avx2_##name
#define ROWS_NAME "avx2"
#define ROWS_WIDTH 8
#define ROWS_TARGET __attribute__((target("avx2,fma,f16c")))
#include "moe/rows_body.h"
#undef ROWS
#undef ROWS_NAME
#undef ROWS_TARGET
#undef ROWS_WIDTH

/* The odd ones of 64 halves in two vectors. */
static const uint16_t rows_high_halves[32] __attribute__((aligned(64))) = {
    1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

#define ROWS(name) rows_avx512_##name
#define ROWS_NAME "avx512"
#define ROWS_WIDTH 16
#if defined(__clang__)
#define ROWS_TARGET                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define ROWS_TARGET                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,"            \
                          "prefer-vector-width=512")))
#endif
#include "moe/rows_body.h"
#undef ROWS
#undef ROWS_NAME
#undef ROWS_TARGET
#undef ROWS_WIDTH
#endif

/* Best first. */
static const struct rows_table *const tables[] = {
#if defined(__x86_64__)
    &rows_avx512_table,
    &rows_avx2_table,
#endif
    &rows_plain_table,
};
enum { NUM_TABLES = sizeof(tables) / sizeof(tables[0]) };

static bool runs_here(const struct rows_table *t)
{
    bool runs = true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    /* Every processor with AVX2 has f16c, whose name clang 14 does not know here. */
    if (t != &rows_plain_table)
        runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (t == &rows_avx512_table)
        runs = runs && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq");
#else
    (void)t;
#endif
    return runs;
}

static const struct rows_table *chosen;

/* Picked by the first call; a race is harmless, all find the same. */
static const struct rows_table *table(void)
{
    const struct rows_table *t = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    for (size_t i = 0; !t; i++) {
        if (runs_here(tables[i])) {
            t = tables[i];
            __atomic_store_n(&chosen, t, __ATOMIC_RELAXED);
        }
    }
    return t;
}

bool moe_rows_use(const char *variant)
{
    for (size_t i = 0; i < NUM_TABLES; i++) {
        if (strcmp(tables[i]->name, variant) == 0 && runs_here(tables[i])) {
            __atomic_store_n(&chosen, tables[i], __ATOMIC_RELAXED);
            return true;
        }
    }
    return false;
}

void moe_rows_copy(void *const *dst, size_t n, const void *src, size_t bytes, bool stream)
{
    table()->copy(dst, n, src, bytes, stream);
}

void moe_rows_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

void moe_rows_quantise(enum hdl_moe_format format, enum hdl_dtype dtype, const void *src,
                       uint32_t hidden, uint8_t *data, void *scales)
{
    size_t groups = moe_scale_groups(hidden);
    if (format == HDL_MOE_FP8_UE8M0)
        memset((uint8_t *)scales + groups, 0, (4 - groups % 4) % 4);
    table()->quantise(format, dtype, src, hidden, data, scales);
}

void moe_rows_give(const struct moe_wire *wire, void *dst, const void *const *srcs,
                   const float *weights, size_t n, bool stream)
{
    table()->give(wire, dst, srcs, weights, n, stream);
}

void moe_rows_take(const struct moe_wire *wire, void *dst, const struct moe_take *take,
                   bool stream)
{
    table()->take(wire, dst, take, stream);
}
