/* SPDX-License-Identifier: Apache-2.0 */
/* Checks, joining, and values of every type for the rank programs. */
#include "rank.h"

#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/half.h"

int rank_env(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : -1;
}

void rank_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    char text[2048];
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    const char *name = strrchr(file, '/');
    fflush(stdout);
    fprintf(stderr, "%s:%d: rank %d: %s\n", name ? name + 1 : file, line,
            rank_env("RANK"), text);
    fflush(stderr);
    _exit(1);
}

void rank_check(const char *file, int line, const char *call, enum hdl_status got,
                enum hdl_status wanted)
{
    if (got != wanted)
        rank_fail(file, line, "%s is %s, not %s: %s", call, hdl_status_name(got),
                  hdl_status_name(wanted), hdl_error_detail());
}

void rank_check_text(const char *text, ...)
{
    va_list args;
    va_start(args, text);
    for (const char *word = va_arg(args, const char *); word;
         word = va_arg(args, const char *))
        if (!strstr(text, word))
            rank_fail(__FILE__, __LINE__, "'%s' is not in the text: %s", word, text);
    va_end(args);
}

struct hdl_context *rank_context(int rank, int size)
{
    struct hdl_context_opts opts = {
        .size = sizeof(opts), .rank = rank, .num_ranks = size};
    struct hdl_context *context;
    CHECK_OK(hdl_context_create(&opts, &context));
    return context;
}

struct hdl_group *rank_group(struct hdl_context *context, const char *name)
{
    struct hdl_group_opts opts = {.size = sizeof(opts), .name = name};
    struct hdl_group *group;
    CHECK_OK(hdl_group_create(context, &opts, &group));
    return group;
}

void rank_join(struct rank *rank)
{
    memset(rank, 0, sizeof(*rank));
    CHECK_OK(hdl_context_create(NULL, &rank->context));
    rank->group = rank_group(rank->context, NULL);
    rank->rank = hdl_group_rank(rank->group);
    rank->size = hdl_group_size(rank->group);
    CHECK(rank->rank == rank_env("RANK") && rank->size == rank_env("WORLD_SIZE"),
          "rank %d of %d", rank->rank, rank->size);
}

void rank_leave(struct rank *rank)
{
    hdl_group_destroy(rank->group);
    hdl_context_destroy(rank->context);
}

void rank_sums(const struct rank *rank, int count)
{
    for (int i = 0; i < count; i++) {
        int32_t one = 1;
        CHECK_OK(hdl_allreduce(rank->group, &one, &one, 1, HDL_I32, HDL_SUM, NULL, NULL));
        CHECK(one == rank->size, "sum %d", one);
    }
}

void rank_check_failed(int lost)
{
    uint64_t mask = 0;
    int count = hdl_last_failed(&mask, 1);
    uint64_t wanted = lost < 0 ? 0 : UINT64_C(1) << lost;
    CHECK(mask == wanted && count == (lost >= 0), "failed set %#llx (%d), not %#llx",
          (unsigned long long)mask, count, (unsigned long long)wanted);
}

void rank_say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

void rank_sleep_ms(int ms)
{
    struct timespec time = {ms / 1000, (long)(ms % 1000) * 1000000};
    while (nanosleep(&time, &time) != 0)
        continue;
}

void rank_await_cont(bool wait)
{
    sigset_t set;
    int got;
    sigemptyset(&set);
    sigaddset(&set, SIGCONT);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0, "no mask");
    CHECK(!wait || sigwait(&set, &got) == 0, "no signal");
}

double rank_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Arrays may be misaligned: every access copies. */
#define PUT(type)                                                                        \
    do {                                                                                 \
        type element = (type)value;                                                      \
        memcpy((char *)array + i * sizeof(type), &element, sizeof(type));                \
    } while (0)

#define GET(type)                                                                        \
    do {                                                                                 \
        type element;                                                                    \
        memcpy(&element, (const char *)array + i * sizeof(type), sizeof(type));          \
        value = (double)element;                                                         \
    } while (0)

static uint16_t put16(enum hdl_dtype dtype, double value)
{
    return dtype == HDL_F16 ? base_f16_from_float((float)value)
                            : base_bf16_from_float((float)value);
}

void rank_put(void *array, enum hdl_dtype dtype, size_t i, double value)
{
    size_t bytes = hdl_dtype_size(dtype);
    uint16_t small;
    uint8_t tiny;
    switch (dtype) {
    case HDL_I8:
        PUT(int8_t);
        break;
    case HDL_U8:
    case HDL_BOOL:
        PUT(uint8_t);
        break;
    case HDL_I16:
        PUT(int16_t);
        break;
    case HDL_U16:
        PUT(uint16_t);
        break;
    case HDL_I32:
        PUT(int32_t);
        break;
    case HDL_U32:
        PUT(uint32_t);
        break;
    case HDL_I64:
        PUT(int64_t);
        break;
    case HDL_U64:
        PUT(uint64_t);
        break;
    case HDL_F16:
    case HDL_BF16:
        small = put16(dtype, value);
        memcpy((char *)array + i * bytes, &small, bytes);
        break;
    case HDL_F32:
        PUT(float);
        break;
    case HDL_F64:
        PUT(double);
        break;
    case HDL_C64:
    case HDL_C128:
        rank_put(array, dtype == HDL_C64 ? HDL_F32 : HDL_F64, 2 * i, value);
        rank_put(array, dtype == HDL_C64 ? HDL_F32 : HDL_F64, 2 * i + 1, 2 * value);
        break;
    case HDL_F8E4M3:
    case HDL_F8E5M2:
        tiny = dtype == HDL_F8E4M3 ? base_e4m3_from_float((float)value)
                                   : base_e5m2_from_float((float)value);
        memcpy((char *)array + i, &tiny, 1);
        break;
    }
}

static double get_small(const void *array, enum hdl_dtype dtype, size_t i)
{
    uint16_t small;
    uint8_t tiny = ((const uint8_t *)array)[i];
    if (dtype == HDL_F8E4M3)
        return base_e4m3_to_float(tiny);
    if (dtype == HDL_F8E5M2)
        return base_e5m2_to_float(tiny);
    memcpy(&small, (const char *)array + 2 * i, 2);
    return dtype == HDL_F16 ? base_f16_to_float(small) : base_bf16_to_float(small);
}

double rank_get(const void *array, enum hdl_dtype dtype, size_t i)
{
    double value = 0;
    switch (dtype) {
    case HDL_I8:
        GET(int8_t);
        break;
    case HDL_U8:
    case HDL_BOOL:
        GET(uint8_t);
        break;
    case HDL_I16:
        GET(int16_t);
        break;
    case HDL_U16:
        GET(uint16_t);
        break;
    case HDL_I32:
        GET(int32_t);
        break;
    case HDL_U32:
        GET(uint32_t);
        break;
    case HDL_I64:
        GET(int64_t);
        break;
    case HDL_U64:
        GET(uint64_t);
        break;
    case HDL_F32:
        GET(float);
        break;
    case HDL_F64:
        GET(double);
        break;
    case HDL_C64:
        i *= 2;
        GET(float);
        break;
    case HDL_C128:
        i *= 2;
        GET(double);
        break;
    case HDL_F16:
    case HDL_BF16:
    case HDL_F8E4M3:
    case HDL_F8E5M2:
        value = get_small(array, dtype, i);
        break;
    }
    return value;
}

bool rank_complex_ok(const void *array, enum hdl_dtype dtype, size_t i)
{
    enum hdl_dtype part = dtype == HDL_C64 ? HDL_F32 : HDL_F64;
    if (dtype != HDL_C64 && dtype != HDL_C128)
        return true;
    return rank_get(array, part, 2 * i + 1) == 2 * rank_get(array, part, 2 * i);
}
