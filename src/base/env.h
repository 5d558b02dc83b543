/* SPDX-License-Identifier: Apache-2.0 */
/* What a context injects into every layer: allocator, log sink, clock, knobs. */
#ifndef BASE_ENV_H
#define BASE_ENV_H

#include <stddef.h>
#include <stdint.h>

#include "base/config.h"
#include "base/status.h"

enum base_log_level {
    BASE_LOG_ERROR = 0,
    BASE_LOG_WARN = 1,
    BASE_LOG_INFO = 2,
    BASE_LOG_DEBUG = 3,
};

/* A NULL function pointer means the default: malloc/free, stderr, CLOCK_MONOTONIC. Filled
 * once before the first use and not changed afterwards; its functions may be called from
 * any thread. */
struct base_env {
    void *(*alloc)(void *user, size_t size);
    void (*release)(void *user, void *ptr);
    void *alloc_user;

    void (*log)(void *user, enum base_log_level level, const char *line);
    void *log_user;
    int log_level; /* lines above it are not formatted */
    int log_rank;  /* prefix of the default sink; -1 = none */
    int log_fd;    /* where the default sink writes */

    int64_t (*now_ns)(void *user);
    void *now_user;

    struct base_config config;
};

/* All defaults, with the knobs' default values: does not read the environment. */
void base_env_init(struct base_env *env);

int64_t base_env_now(const struct base_env *env);

/* `count` * `size` zeroed bytes aligned for any type. NULL with HDL_ENOMEM's detail text
 * on failure or overflow. A product of 0 gives a valid pointer. */
void *base_alloc(struct base_env *env, size_t count, size_t size);

/* The same at a multiple of `align`, a power of 2 from 16 to 4096. */
void *base_alloc_aligned(struct base_env *env, size_t align, size_t count, size_t size);

/* A copy of a string; NULL with detail text on failure. */
char *base_strdup(struct base_env *env, const char *text);

/* A larger (or smaller) copy of `ptr`, which is released; new bytes are zero. On failure
 * NULL, and `ptr` stays valid. */
void *base_grow(struct base_env *env, void *ptr, size_t old_count, size_t count,
                size_t size);

/* Release what base_alloc / base_alloc_aligned gave; NULL is accepted. */
void base_free(struct base_env *env, void *ptr);
void base_free_aligned(struct base_env *env, void *ptr);

#endif
