/* SPDX-License-Identifier: Apache-2.0 */
/* What the programs that run as rank trees share: checks, joining, values of every type.
 */
#ifndef RANKS_RANK_H
#define RANKS_RANK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "heddle.h"

/* Bounds of time are as many times as long in a build with sanitizers. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { RANK_SLOW = 5 };
#else
enum { RANK_SLOW = 1 };
#endif

struct rank {
    struct hdl_context *context;
    struct hdl_group *group;
    int rank;
    int size;
};

/* Ends the process with code 1 and a line that says where, what and why. */
_Noreturn void rank_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define CHECK(condition, ...)                                                            \
    do {                                                                                 \
        if (!(condition))                                                                \
            rank_fail(__FILE__, __LINE__, __VA_ARGS__);                                  \
    } while (0)

/* The status of a call, with the library's text when it is another. */
#define CHECK_STATUS(call, wanted) rank_check(__FILE__, __LINE__, #call, (call), (wanted))
#define CHECK_OK(call) CHECK_STATUS(call, HDL_OK)

void rank_check(const char *file, int line, const char *call, enum hdl_status got,
                enum hdl_status wanted);
/* The text (of hdl_error_detail, hdl_op_detail) contains each of the words, NULL at the
 * end. */
void rank_check_text(const char *text, ...);

/* Context and group "world" of all ranks, with default options. */
void rank_join(struct rank *rank);
void rank_leave(struct rank *rank);
/* Number of a launcher's variable, -1 if it is not set. */
int rank_env(const char *name);
/* Joins as rank `rank` of `size` by options instead of the environment. */
struct hdl_context *rank_context(int rank, int size);
struct hdl_group *rank_group(struct hdl_context *context, const char *name);

/* All ranks add up ones, `count` times. */
void rank_sums(const struct rank *rank, int count);
/* The failed set of the last blocking operation is exactly {lost} (-1 = empty). */
void rank_check_failed(int lost);
/* One line on stdout at once, for the runner's hooks. */
void rank_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void rank_sleep_ms(int ms);
/* Until the runner sends SIGCONT, which is blocked at the first call: call it with `wait`
 * false before the line can be printed that makes the runner send it. */
void rank_await_cont(bool wait);
double rank_now(void);

/* Element `i` of an array of any type, as a number (complex: the real part, imag = 2 *
 * real). */
void rank_put(void *array, enum hdl_dtype dtype, size_t i, double value);
double rank_get(const void *array, enum hdl_dtype dtype, size_t i);
bool rank_complex_ok(const void *array, enum hdl_dtype dtype, size_t i);

#endif
