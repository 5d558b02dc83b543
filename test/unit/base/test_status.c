/* SPDX-License-Identifier: Apache-2.0 */
/* Statuses, their names, and the thread's detail text. */
#include "unit.h"

#include <errno.h>
#include <pthread.h>

#include "base/dtype.h"
#include "heddle.h"

static void test_names(void **state)
{
    assert_string_equal(base_status_name(HDL_OK), "HDL_OK");
    assert_string_equal(base_status_name(HDL_EABORTED), "HDL_EABORTED");
    assert_string_equal(hdl_status_name(HDL_EINVAL), "HDL_EINVAL");
    assert_string_equal(hdl_status_text(HDL_EINVAL), "invalid argument");
    assert_string_equal(base_status_name((enum hdl_status)77), "HDL_UNKNOWN");
    assert_string_equal(base_status_text((enum hdl_status)77), "unknown status");
}

static void test_version(void **state)
{
    assert_memory_equal(hdl_version(), "0.1.0", 5); /* kind of build may follow */
}

static void test_detail(void **state)
{
    assert_status(base_fail(HDL_EINVAL, "count %d exceeds %d", 5, 4), HDL_EINVAL);
    assert_string_equal(base_detail(), "count 5 exceeds 4");
    assert_string_equal(hdl_error_detail(), "count 5 exceeds 4");
    base_fail(HDL_EPEER, "group %s: %s", "world", base_detail());
    assert_string_equal(base_detail(), "group world: count 5 exceeds 4");
    base_fail_append(" on rank %d", 3);
    assert_string_equal(base_detail(), "group world: count 5 exceeds 4 on rank 3");
    base_fail_errno(HDL_ESYSTEM, ENOENT, "open of %s", "x");
    assert_string_equal(base_detail(), "open of x: No such file or directory");
}

static void test_long_detail_is_cut(void **state)
{
    char text[2 * BASE_DETAIL_BYTES];
    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    base_fail(HDL_EINVAL, "%s", text);
    assert_int_equal(strlen(base_detail()), BASE_DETAIL_BYTES - 1);
    base_fail_append("%s", text);
    assert_int_equal(strlen(base_detail()), BASE_DETAIL_BYTES - 1);
}

static void *fail_in_thread(void *arg)
{
    base_fail(HDL_EINVAL, "of the other thread");
    return NULL;
}

static void test_detail_is_per_thread(void **state)
{
    pthread_t thread;
    base_fail(HDL_EINVAL, "mine");
    assert_int_equal(pthread_create(&thread, NULL, fail_in_thread, NULL), 0);
    pthread_join(thread, NULL);
    assert_string_equal(base_detail(), "mine");
}

static void test_dtypes(void **state)
{
    size_t sum = 0;
    for (unsigned i = 0; i < BASE_NUM_DTYPES; i++) {
        enum hdl_dtype dtype = (enum hdl_dtype)i;
        assert_non_null(base_dtype_name(dtype));
        assert_int_equal(hdl_dtype_size(dtype), base_dtype_size(dtype));
        sum += base_dtype_size(dtype);
    }
    assert_int_equal(sum, 2 * (1 + 2 + 4 + 8) + 1 + 2 + 2 + 4 + 8 + 8 + 16 + 1 + 1);
    assert_int_equal(base_dtype_size((enum hdl_dtype)BASE_NUM_DTYPES), 0);
    assert_int_equal(base_dtype_size((enum hdl_dtype) - 1), 0);
    assert_string_equal(base_dtype_name((enum hdl_dtype)99), "unknown");
    assert_string_equal(hdl_dtype_name(HDL_BF16), "bf16");
}

static void test_redops(void **state)
{
    for (unsigned i = 0; i < BASE_NUM_REDOPS; i++)
        assert_non_null(base_redop_name((enum hdl_redop)i));
    assert_string_equal(hdl_redop_name(HDL_PREMUL_SUM), "premul_sum");
    assert_string_equal(base_redop_name((enum hdl_redop) - 1), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_detail),
        cmocka_unit_test(test_long_detail_is_cut),
        cmocka_unit_test(test_detail_is_per_thread),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_redops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
