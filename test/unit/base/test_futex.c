/* SPDX-License-Identifier: Apache-2.0 */
/* Sleeping on a word: a changed word, a wake-up and the time limit. */
#include "unit.h"

#include <pthread.h>

#include "base/clock.h"
#include "base/futex.h"

static uint32_t word;

static void *wake_later(void *arg)
{
    __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    base_futex_wake(&word, 1, *(bool *)arg);
    return NULL;
}

static void wait_for_thread(bool shared)
{
    pthread_t thread;
    __atomic_store_n(&word, 0, __ATOMIC_RELEASE);
    assert_int_equal(pthread_create(&thread, NULL, wake_later, &shared), 0);
    while (__atomic_load_n(&word, __ATOMIC_ACQUIRE) == 0)
        base_futex_wait(&word, 0, -1, shared);
    pthread_join(thread, NULL);
}

static void test_wake(void **state)
{
    for (int i = 0; i < 100; i++) {
        wait_for_thread(false);
        wait_for_thread(true);
    }
}

static void test_word_differs(void **state)
{
    uint32_t own = 5;
    assert_true(base_futex_wait(&own, 4, -1, false));
}

static void test_timeout(void **state)
{
    uint32_t own = 5;
    int64_t start = base_now_ns();
    assert_false(base_futex_wait(&own, 5, 20 * BASE_NS_PER_MS, true));
    assert_true(base_now_ns() - start >= 20 * BASE_NS_PER_MS);
    assert_false(base_futex_wait(&own, 5, 0, true));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wake),
        cmocka_unit_test(test_word_differs),
        cmocka_unit_test(test_timeout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
