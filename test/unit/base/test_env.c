/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation through the env with overflow and failure, the log's gate, sink and clock.
 */
#include "unit.h"

#include <unistd.h>

#include "base/checked.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "faults.h"

static void test_alloc(void **state)
{
    struct base_env env;
    base_env_init(&env);
    uint8_t *bytes = base_alloc(&env, 100, 3);
    assert_non_null(bytes);
    for (size_t i = 0; i < 300; i++)
        assert_int_equal(bytes[i], 0);
    memset(bytes, 7, 300);
    bytes = base_grow(&env, bytes, 100, 200, 3);
    assert_int_equal(bytes[299], 7);
    assert_int_equal(bytes[300], 0);
    base_free(&env, bytes);
    void *nothing = base_alloc(&env, 0, 8);
    assert_non_null(nothing);
    base_free(&env, nothing);
    base_free(&env, NULL);
    base_free_aligned(&env, NULL);
}

static void test_overflow(void **state)
{
    struct base_env env;
    base_env_init(&env);
    assert_null(base_alloc(&env, SIZE_MAX / 2, 3));
    assert_detail("overflows");
    assert_null(base_alloc_aligned(&env, 64, SIZE_MAX, 1));
    assert_null(base_alloc_aligned(&env, 48, 1, 1));
    assert_detail("48");
}

static void test_aligned(void **state)
{
    struct faults faults;
    struct base_env env;
    faults_init(&faults, &env, -1);
    for (size_t align = 16; align <= 4096; align *= 2) {
        char *ptr = base_alloc_aligned(&env, align, 5, 13);
        assert_non_null(ptr);
        assert_int_equal((uintptr_t)ptr % align, 0);
        for (size_t i = 0; i < 65; i++)
            assert_int_equal(ptr[i], 0);
        memset(ptr, 1, 65);
        base_free_aligned(&env, ptr);
    }
    assert_int_equal(faults_live(&faults), 0);
}

static void test_failing_allocator(void **state)
{
    struct faults faults;
    struct base_env env;
    faults_init(&faults, &env, 1);
    char *copy = base_strdup(&env, "warp");
    assert_string_equal(copy, "warp");
    assert_null(base_grow(&env, copy, 5, 50, 1));
    assert_true(faults_hit(&faults));
    assert_detail("50 bytes");
    assert_string_equal(copy, "warp");
    assert_int_equal(faults_live(&faults), 1);
    base_free(&env, copy);
    assert_int_equal(faults_live(&faults), 0);
}

static void keep_line(void *user, enum base_log_level level, const char *line)
{
    strncpy(user, line, 63);
}

static int count_evaluation(int *count)
{
    return ++*count;
}

static void test_log(void **state)
{
    struct base_env env;
    char line[64] = "";
    int evaluated = 0;
    base_env_init(&env);
    env.log = keep_line;
    env.log_user = line;
    base_log_info(&env, "key %d", count_evaluation(&evaluated));
    assert_int_equal(evaluated, 0);
    assert_string_equal(line, "");
    base_log_warn(&env, "key %d", count_evaluation(&evaluated));
    assert_string_equal(line, "key 1");
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    env.log = NULL;
    env.log_rank = 2;
    env.log_fd = ends[1];
    base_log_error(&env, "to the default sink %d", 1);
    ssize_t length = read(ends[0], line, sizeof(line) - 1);
    assert_true(length > 0);
    line[length] = 0;
    assert_string_equal(line, "heddle error rank 2: to the default sink 1\n");
    (void)close(ends[0]);
    (void)close(ends[1]);
    assert_string_equal(base_log_level_name(BASE_LOG_INFO), "info");
}

static int64_t fixed_clock(void *user)
{
    return *(int64_t *)user;
}

static void test_clock(void **state)
{
    struct base_env env;
    int64_t time = 42;
    base_env_init(&env);
    assert_true(base_env_now(&env) > 0);
    env.now_ns = fixed_clock;
    env.now_user = &time;
    assert_int_equal(base_env_now(&env), 42);
    assert_true(base_deadline_ns(10, 5) == 15);
    assert_true(base_deadline_ns(10, -1) == BASE_FOREVER);
    assert_true(base_deadline_ns(10, BASE_FOREVER) == BASE_FOREVER);
    assert_true(base_deadline_ns(10, BASE_FOREVER - 11) == BASE_FOREVER - 1);
    assert_true(base_timeout_ns(3) == 3000);
    assert_true(base_timeout_ns(HDL_FOREVER) == BASE_FOREVER);
    int64_t longest = base_timeout_ns(INT64_MAX);
    assert_true(longest == base_timeout_ns(INT64_MAX / 1000) && longest > 0);
    assert_true(base_deadline_ns(INT64_MAX / 2, longest) == INT64_MAX / 2 + longest);
}

static void test_checked(void **state)
{
    size_t out = 7;
    assert_false(base_mul_size(SIZE_MAX, 2, &out));
    assert_false(base_add_size(SIZE_MAX, 1, &out));
    assert_false(base_align_up(SIZE_MAX - 3, 8, &out));
    assert_int_equal(out, 7);
    assert_true(base_align_up(65, 64, &out));
    assert_int_equal(out, 128);
    assert_true(base_align_up(0, 64, &out));
    assert_int_equal(out, 0);
    assert_int_equal(base_div_up(SIZE_MAX, 2), SIZE_MAX / 2 + 1);
    assert_true(base_is_power_of_2(4096));
    assert_false(base_is_power_of_2(0));
}

static void test_random(void **state)
{
    uint64_t a = 0;
    uint64_t b = 0;
    assert_ok(base_random_u64(&a));
    assert_ok(base_random_u64(&b));
    assert_true(a != 0 && a != b);
    uint64_t seed = 1234567;
    assert_true(base_splitmix_next(&seed) == UINT64_C(6457827717110365317));
    for (int i = 0; i < 1000; i++)
        assert_true(base_splitmix_below(&seed, 7) < 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alloc),   cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_aligned), cmocka_unit_test(test_failing_allocator),
        cmocka_unit_test(test_log),     cmocka_unit_test(test_clock),
        cmocka_unit_test(test_checked), cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
