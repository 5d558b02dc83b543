/* SPDX-License-Identifier: Apache-2.0 */
/* The futex system call, which has no wrapper in libc. */
#include "base/futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

bool base_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, bool shared)
{
    int op = shared ? FUTEX_WAIT : FUTEX_WAIT | FUTEX_PRIVATE_FLAG;
    struct timespec limit = {0};
    struct timespec *limit_ptr = NULL;
    if (timeout_ns >= 0 && timeout_ns != BASE_FOREVER) {
        limit.tv_sec = (time_t)(timeout_ns / BASE_NS_PER_S);
        limit.tv_nsec = (long)(timeout_ns % BASE_NS_PER_S);
        limit_ptr = &limit;
    }
    long rc = syscall(SYS_futex, word, op, expected, limit_ptr, NULL, 0);
    return rc == 0 || errno != ETIMEDOUT;
}

void base_futex_wake(uint32_t *word, int count, bool shared)
{
    int op = shared ? FUTEX_WAKE : FUTEX_WAKE | FUTEX_PRIVATE_FLAG;
    syscall(SYS_futex, word, op, count, NULL, NULL, 0);
}
