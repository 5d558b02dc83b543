/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping on a 32-bit word, within a process or across processes. */
#ifndef BASE_FUTEX_H
#define BASE_FUTEX_H

#include <stdbool.h>
#include <stdint.h>

/* Sleeps while *word == expected, at most timeout_ns (negative or BASE_FOREVER: no
 * limit). Returns true when woken, when the word differs or on a spurious wake-up; false
 * only when the time is over. `shared`: the word lies in memory of several processes. */
bool base_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, bool shared);

/* Wakes up to `count` sleepers. */
void base_futex_wake(uint32_t *word, int count, bool shared);

#endif
