/* SPDX-License-Identifier: Apache-2.0 */
/* An allocator for tests that fails at its n-th call and knows what was not released.
 *
 *     struct faults faults;
 *     for (long n = 0;; n++) {
 *         faults_init(&faults, &env, n);
 *         status = thing_create(&env, &thing);
 *         ... destroy it if HDL_OK ...
 *         assert_int_equal(faults_live(&faults), 0);
 *         if (!faults_hit(&faults))
 *             break;
 *         assert_status(status, HDL_ENOMEM);
 *     }
 */
#ifndef FAULTS_H
#define FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/env.h"

struct faults {
    _Atomic long
        countdown; /* calls that still succeed; negative: one has failed or none will */
    _Atomic long live;
    _Atomic bool hit;
};

/* May be called from any thread, as every allocator of an env. */
static inline void *faults_alloc(void *user, size_t size)
{
    struct faults *faults = user;
    if (atomic_fetch_sub(&faults->countdown, 1) == 0) {
        atomic_store(&faults->hit, true);
        return NULL;
    }
    void *ptr = malloc(size);
    if (ptr)
        atomic_fetch_add(&faults->live, 1);
    return ptr;
}

static inline void faults_release(void *user, void *ptr)
{
    struct faults *faults = user;
    if (ptr)
        atomic_fetch_sub(&faults->live, 1);
    free(ptr);
}

/* Fills `env` with defaults and this allocator: `after` calls succeed, the next one
 * fails, later ones succeed again. after < 0: none fails. */
static inline void faults_init(struct faults *faults, struct base_env *env, long after)
{
    atomic_init(&faults->countdown, after);
    atomic_init(&faults->live, 0);
    atomic_init(&faults->hit, false);
    base_env_init(env);
    env->alloc = faults_alloc;
    env->release = faults_release;
    env->alloc_user = faults;
}

/* Blocks that were not released. */
static inline long faults_live(struct faults *faults)
{
    return atomic_load(&faults->live);
}

/* Whether the failure has happened. */
static inline bool faults_hit(struct faults *faults)
{
    return atomic_load(&faults->hit);
}

#endif
