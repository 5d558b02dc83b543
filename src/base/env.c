/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation through the injected allocator, and the defaults of an env. */
#include "base/env.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"

void base_env_init(struct base_env *env)
{
    memset(env, 0, sizeof(*env));
    env->log_level = BASE_LOG_WARN;
    env->log_rank = -1;
    env->log_fd = STDERR_FILENO;
    base_config_default(&env->config);
}

int64_t base_env_now(const struct base_env *env)
{
    return env->now_ns ? env->now_ns(env->now_user) : base_now_ns();
}

static void *alloc_bytes(struct base_env *env, size_t size)
{
    void *ptr = env->alloc ? env->alloc(env->alloc_user, size) : malloc(size);
    if (!ptr)
        base_fail(HDL_ENOMEM, "allocation of %zu bytes failed", size);
    return ptr;
}

void *base_alloc(struct base_env *env, size_t count, size_t size)
{
    size_t bytes;
    if (!base_mul_size(count, size, &bytes)) {
        base_fail(HDL_ENOMEM, "allocation of %zu x %zu bytes overflows", count, size);
        return NULL;
    }
    void *ptr = alloc_bytes(env, base_max_size(bytes, 1));
    if (ptr)
        memset(ptr, 0, bytes);
    return ptr;
}

/* The injected allocator promises no more than the alignment of malloc, so an aligned
 * block is cut from a larger one whose address is kept in the word before it. */
void *base_alloc_aligned(struct base_env *env, size_t align, size_t count, size_t size)
{
    size_t bytes;
    size_t padded;
    if (align < 16 || align > 4096 || !base_is_power_of_2(align)) {
        base_fail(HDL_EINTERNAL, "alignment %zu is not a power of 2 from 16 to 4096",
                  align);
        return NULL;
    }
    if (!base_mul_size(count, size, &bytes) ||
        !base_add_size(bytes, align + sizeof(void *), &padded)) {
        base_fail(HDL_ENOMEM, "allocation of %zu x %zu bytes overflows", count, size);
        return NULL;
    }
    char *raw = alloc_bytes(env, padded);
    if (!raw)
        return NULL;
    uintptr_t first = (uintptr_t)raw + sizeof(void *);
    size_t skip = sizeof(void *) + (size_t)(-first & (align - 1));
    char *ptr = raw + skip;
    memcpy(ptr - sizeof(void *), &raw, sizeof(void *));
    memset(ptr, 0, bytes);
    return ptr;
}

char *base_strdup(struct base_env *env, const char *text)
{
    size_t length = strlen(text);
    char *copy = base_alloc(env, length + 1, 1);
    if (copy)
        memcpy(copy, text, length + 1);
    return copy;
}

void *base_grow(struct base_env *env, void *ptr, size_t old_count, size_t count,
                size_t size)
{
    void *larger = base_alloc(env, count, size);
    if (!larger)
        return NULL;
    if (ptr) {
        memcpy(larger, ptr, base_min_size(old_count, count) * size);
        base_free(env, ptr);
    }
    return larger;
}

void base_free(struct base_env *env, void *ptr)
{
    if (!ptr)
        return;
    if (env->release)
        env->release(env->alloc_user, ptr);
    else
        free(ptr);
}

void base_free_aligned(struct base_env *env, void *ptr)
{
    if (!ptr)
        return;
    void *raw;
    memcpy(&raw, (char *)ptr - sizeof(void *), sizeof(void *));
    base_free(env, raw);
}
