/* SPDX-License-Identifier: Apache-2.0 */
/* The map of numbers to pointers against a plain array. */
#include "unit.h"

#include "base/env.h"
#include "base/random.h"
#include "ctl/map.h"

enum { KEYS = 512 };

static void test_against_array(void **state)
{
    struct base_env env;
    struct ctl_map map = {0};
    static char things[KEYS];
    void *expected[KEYS] = {0};
    uint64_t random = 7;
    base_env_init(&env);
    assert_null(ctl_map_get(&map, 1));
    ctl_map_remove(&map, 1);
    for (int step = 0; step < 20000; step++) {
        uint64_t key = 1 + base_splitmix_below(&random, KEYS - 1);
        if (base_splitmix_below(&random, 3) > 0) {
            expected[key] = &things[base_splitmix_below(&random, KEYS)];
            assert_true(ctl_map_put(&env, &map, key, expected[key]));
        } else {
            expected[key] = NULL;
            ctl_map_remove(&map, key);
        }
        key = 1 + base_splitmix_below(&random, KEYS - 1);
        assert_ptr_equal(ctl_map_get(&map, key), expected[key]);
    }
    size_t count = 0;
    for (uint64_t key = 1; key < KEYS; key++) {
        assert_ptr_equal(ctl_map_get(&map, key), expected[key]);
        count += expected[key] != NULL;
    }
    assert_int_equal(map.count, count);
    assert_null(ctl_map_get(&map, 0));
    ctl_map_free(&env, &map);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_array)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
