/* SPDX-License-Identifier: Apache-2.0 */
/* Rank sets at capacities around the word size, against an array of bools. */
#include "unit.h"

#include "base/random.h"
#include "base/rankset.h"
#include "faults.h"

static const uint32_t capacities[] = {1, 3, 63, 64, 65, 128, 200};
enum { NUM_CAPACITIES = sizeof(capacities) / sizeof(capacities[0]), MAX_CAPACITY = 200 };

static struct base_env env;
static struct faults faults;

static int set_up(void **state)
{
    faults_init(&faults, &env, -1);
    return 0;
}

static int tear_down(void **state)
{
    return faults_live(&faults) != 0;
}

static void check_against(const struct base_rank_set *set, const bool *model)
{
    for (uint32_t r = 0; r < set->capacity; r++)
        assert_int_equal(base_rank_set_test(set, r), model[r]);
    uint32_t expected = UINT32_MAX;
    for (uint32_t r = set->capacity; r-- > 0;) {
        expected = model[r] ? r : expected;
        assert_int_equal(base_rank_set_next(set, r), expected);
    }
    assert_int_equal(base_rank_set_next(set, set->capacity), UINT32_MAX);
    assert_false(base_rank_set_test(set, set->capacity));
}

static void test_random_changes(void **state)
{
    uint64_t seed = 11;
    for (size_t c = 0; c < NUM_CAPACITIES; c++) {
        bool model[MAX_CAPACITY] = {false};
        struct base_rank_set *set = base_rank_set_alloc(&env, capacities[c]);
        for (int step = 0; step < 100; step++) {
            uint32_t rank = (uint32_t)base_splitmix_below(&seed, capacities[c]);
            bool value = base_splitmix_next(&seed) % 2;
            model[rank] = value;
            if (value)
                base_rank_set_set(set, rank);
            else
                base_rank_set_clear(set, rank);
            check_against(set, model);
        }
        base_rank_set_set(set, capacities[c]);
        base_rank_set_set(set, UINT32_MAX);
        base_rank_set_clear(set, UINT32_MAX);
        check_against(set, model);
        base_rank_set_clear_all(set);
        assert_true(base_rank_set_next(set, 0) == UINT32_MAX);
        base_rank_set_free(&env, set);
    }
}

static void check_format(const struct base_rank_set *set, size_t size,
                         const char *expected)
{
    char text[64];
    memset(text, 'x', sizeof(text));
    base_rank_set_format(set, text, size);
    assert_string_equal(text, expected);
    assert_true(strlen(text) < size);
}

static void test_format(void **state)
{
    struct base_rank_set *set = base_rank_set_alloc(&env, 200);
    check_format(set, 64, "none");
    for (uint32_t r = 0; r < 3; r++)
        base_rank_set_set(set, r);
    check_format(set, 64, "0-2");
    base_rank_set_set(set, 5);
    base_rank_set_set(set, 6);
    base_rank_set_set(set, 199);
    check_format(set, 64, "0-2,5,6,199");
    check_format(set, 12, "0-2,5,6,199");
    check_format(set, 11, "0-2,5,6...");
    check_format(set, 8, "0-2...");
    check_format(set, 4, "...");
    check_format(set, 1, "");
    base_rank_set_free(&env, set);
}

static void test_alloc_fails(void **state)
{
    struct faults once;
    struct base_env failing;
    faults_init(&once, &failing, 0);
    assert_null(base_rank_set_alloc(&failing, 64));
    assert_true(faults_hit(&once));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_changes),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_alloc_fails),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
