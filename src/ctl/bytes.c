/* SPDX-License-Identifier: Apache-2.0 */
/* Shared immutable bytes with an atomic reference count. */
#include "ctl/bytes.h"

#include <string.h>

#include "base/checked.h"
#include "base/env.h"

struct ctl_bytes *ctl_bytes_new(struct base_env *env, const void *data, size_t size)
{
    size_t total;
    if (!base_add_size(sizeof(struct ctl_bytes), size, &total)) {
        (void)base_fail(HDL_ENOMEM, "%zu bytes are too many", size);
        return NULL;
    }
    struct ctl_bytes *bytes = base_alloc(env, 1, total);
    if (!bytes)
        return NULL;
    bytes->env = env;
    bytes->references = 1;
    bytes->size = size;
    if (data && size > 0)
        memcpy(bytes->data, data, size);
    return bytes;
}

struct ctl_bytes *ctl_bytes_ref(struct ctl_bytes *bytes)
{
    if (bytes)
        __atomic_fetch_add(&bytes->references, 1, __ATOMIC_RELAXED);
    return bytes;
}

void ctl_bytes_unref(struct ctl_bytes *bytes)
{
    if (bytes && __atomic_sub_fetch(&bytes->references, 1, __ATOMIC_ACQ_REL) == 0)
        base_free(bytes->env, bytes);
}
