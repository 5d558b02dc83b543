/* SPDX-License-Identifier: Apache-2.0 */
/* Option structs of any version: `size` first, what the caller lacks is zero. */
#ifndef BASE_OPTION_H
#define BASE_OPTION_H

#include <stddef.h>
#include <string.h>

#include "base/status.h"

/* Copies the struct at `given` (NULL = all defaults), whose first member is its size_t
 * size, into `out` of `bytes`. HDL_EINVAL if it is too small to be one, or longer than
 * this library knows with something in the tail. */
static inline enum hdl_status base_option_copy(const char *name, const void *given,
                                               void *out, size_t bytes)
{
    size_t size = 0;
    memset(out, 0, bytes);
    memcpy(out, &bytes, sizeof(bytes));
    if (!given)
        return HDL_OK;
    memcpy(&size, given, sizeof(size));
    if (size < sizeof(size))
        return base_fail(HDL_EINVAL, "struct %s has size %zu: set it to its sizeof", name,
                         size);
    for (size_t i = bytes; i < size; i++) {
        if (((const unsigned char *)given)[i] != 0)
            return base_fail(
                HDL_EINVAL,
                "struct %s of %zu bytes sets byte %zu, this library knows %zu", name,
                size, i, bytes);
    }
    memcpy(out, given, size < bytes ? size : bytes);
    memcpy(out, &bytes, sizeof(bytes));
    return HDL_OK;
}

#endif
