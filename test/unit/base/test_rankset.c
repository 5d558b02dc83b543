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
    uint32_t count = 0;
    uint32_t size = 0;
    for (uint32_t r = 0; r < set->capacity; r++) {
        assert_int_equal(base_rank_set_test(set, r), model[r]);
        count += model[r];
        size = model[r] ? r + 1 : size;
    }
    assert_int_equal(base_rank_set_count(set), count);
    assert_int_equal(base_rank_set_size(set), size);
    assert_int_equal(base_rank_set_empty(set), count == 0);
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
        base_rank_set_free(&env, set);
    }
}

static void test_fill_and_words(void **state)
{
    for (size_t c = 0; c < NUM_CAPACITIES; c++) {
        uint32_t capacity = capacities[c];
        struct base_rank_set *set = base_rank_set_alloc(&env, capacity);
        uint64_t words[5];
        for (uint32_t n = 0; n <= capacity + 1; n++) {
            base_rank_set_fill(set, n);
            assert_int_equal(base_rank_set_count(set), n < capacity ? n : capacity);
        }
        memset(words, 0xff, sizeof(words));
        base_rank_set_clear_all(set);
        base_rank_set_from_words(set, words, 5);
        assert_int_equal(base_rank_set_count(set), capacity);
        base_rank_set_to_words(set, words, 5);
        assert_true(words[4] == 0);
        base_rank_set_from_words(set, words, 0);
        assert_true(base_rank_set_empty(set));
        base_rank_set_free(&env, set);
    }
}

static void test_algebra(void **state)
{
    struct base_rank_set *large = base_rank_set_alloc(&env, 130);
    struct base_rank_set *small = base_rank_set_alloc(&env, 5);
    base_rank_set_set(large, 3);
    base_rank_set_set(large, 6);
    base_rank_set_set(large, 129);
    assert_false(base_rank_set_intersects(small, large));
    base_rank_set_copy(small, large);
    assert_int_equal(base_rank_set_count(small), 1);
    assert_true(base_rank_set_intersects(large, small));
    assert_false(base_rank_set_equal(small, large));
    base_rank_set_subtract(large, small);
    assert_false(base_rank_set_test(large, 3));
    base_rank_set_union(small, large);
    assert_int_equal(small->words[0], 8);
    base_rank_set_union(large, small);
    base_rank_set_intersect(large, small);
    assert_true(base_rank_set_equal(small, large));
    base_rank_set_free(&env, large);
    base_rank_set_free(&env, small);
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
    base_rank_set_fill(set, 3);
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
        cmocka_unit_test(test_random_changes), cmocka_unit_test(test_fill_and_words),
        cmocka_unit_test(test_algebra),        cmocka_unit_test(test_format),
        cmocka_unit_test(test_alloc_fails),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
