/* SPDX-License-Identifier: Apache-2.0 */
/* Monotonic time and the pause of a spinning core. */
#ifndef BASE_CLOCK_H
#define BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define BASE_NS_PER_US INT64_C(1000)
#define BASE_NS_PER_MS INT64_C(1000000)
#define BASE_NS_PER_S INT64_C(1000000000)
/* "No deadline", for absolute times and for timeouts. */
#define BASE_FOREVER INT64_MAX

static inline int64_t base_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * BASE_NS_PER_S + now.tv_nsec;
}

/* now + timeout, saturating at BASE_FOREVER; a negative timeout means no deadline. */
static inline int64_t base_deadline_ns(int64_t now_ns, int64_t timeout_ns)
{
    if (timeout_ns < 0 || timeout_ns >= BASE_FOREVER - now_ns)
        return BASE_FOREVER;
    return now_ns + timeout_ns;
}

/* A caller's timeout: BASE_FOREVER if it is negative; at most 36 years, so that a time
 * can be added. */
static inline int64_t base_timeout_ns(int64_t timeout_us)
{
    const int64_t longest = INT64_MAX / 8;
    if (timeout_us < 0)
        return BASE_FOREVER;
    return timeout_us < longest / BASE_NS_PER_US ? timeout_us * BASE_NS_PER_US : longest;
}

static inline void base_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

#endif
