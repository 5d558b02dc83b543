/* SPDX-License-Identifier: Apache-2.0 */
/* Unguessable numbers from the kernel. */
#include "base/random.h"

#include <errno.h>
#include <sys/random.h>

enum hdl_status base_random_bytes(void *out, size_t size)
{
    uint8_t *bytes = out;
    while (size > 0) {
        ssize_t got = getrandom(bytes, size, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return base_fail_errno(HDL_ESYSTEM, errno, "getrandom of %zu bytes", size);
        bytes += got;
        size -= (size_t)got;
    }
    return HDL_OK;
}

enum hdl_status base_random_u64(uint64_t *out)
{
    uint64_t value = 0;
    while (value == 0) {
        enum hdl_status status = base_random_bytes(&value, sizeof(value));
        if (status != HDL_OK)
            return status;
    }
    *out = value;
    return HDL_OK;
}
