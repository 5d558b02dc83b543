/* SPDX-License-Identifier: Apache-2.0 */
/* Parsers of what people type. */
#include "unit.h"

#include "base/parse.h"

static void test_numbers(void **state)
{
    uint64_t u = 7;
    uint32_t w = 7;
    assert_ok(base_parse_u64("18446744073709551615", &u));
    assert_true(u == UINT64_MAX);
    assert_ok(base_parse_u64("0xfF", &u));
    assert_true(u == 255);
    assert_ok(base_parse_u32("4294967295", &w));
    static const char *const bad[] = {
        "", "-", "1x", " 1", "1 ", "0x", "18446744073709551616"};
    for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++)
        assert_status(base_parse_u64(bad[k], &u), HDL_EINVAL);
    assert_status(base_parse_u32("4294967296", &w), HDL_EINVAL);
    assert_true(u == 255 && w == UINT32_MAX);
}

static void check_size(const char *text, uint64_t expected, const char *again)
{
    uint64_t size;
    char out[32];
    assert_ok(base_parse_size(text, &size));
    assert_true(size == expected);
    base_format_size(size, out, sizeof(out));
    assert_string_equal(out, again);
}

static void test_sizes(void **state)
{
    check_size("8", 8, "8");
    check_size("4K", 4096, "4K");
    check_size("4k", 4096, "4K");
    check_size("1MiB", 1 << 20, "1M");
    check_size("64MB", 64 << 20, "64M");
    check_size("1024", 1024, "1K");
    check_size("3G", UINT64_C(3) << 30, "3G");
    check_size("2T", UINT64_C(2) << 40, "2T");
    check_size("0", 0, "0");
    check_size("17B", 17, "17");
    uint64_t size = 1;
    static const char *const bad[] = {"",     "K",  "1Q",        "1KK",
                                      "1.5K", "-1", "16777216T", "4K,"};
    for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++) {
        assert_status(base_parse_size(bad[k], &size), HDL_EINVAL);
        assert_detail(bad[k]);
    }
    assert_true(size == 1);
}

static void test_lists(void **state)
{
    uint64_t list[4];
    size_t count = 0;
    assert_ok(base_parse_size_list("8,4K,1M,64M", list, 4, &count));
    assert_int_equal(count, 4);
    assert_int_equal(list[0], 8);
    assert_int_equal(list[3], 64 << 20);
    assert_ok(base_parse_size_list("1", list, 4, &count));
    assert_int_equal(count, 1);
    assert_status(base_parse_size_list("1,2,3,4,5", list, 4, &count), HDL_EINVAL);
    assert_detail("more than 4");
    assert_status(base_parse_size_list("1,,2", list, 4, &count), HDL_EINVAL);
    assert_status(base_parse_size_list("1,", list, 4, &count), HDL_EINVAL);
    assert_int_equal(count, 1);
}

static void check_duration(const char *text, int64_t expected, const char *again)
{
    int64_t ns;
    char out[32];
    assert_ok(base_parse_duration(text, &ns));
    assert_true(ns == expected);
    base_format_duration(ns, out, sizeof(out));
    assert_string_equal(out, again);
}

static void test_durations(void **state)
{
    check_duration("5", 5000000000, "5s");
    check_duration("5s", 5000000000, "5s");
    check_duration("500ms", 500000000, "500ms");
    check_duration("0.5s", 500000000, "500ms");
    check_duration("20us", 20000, "20us");
    check_duration("1.5us", 1500, "1500ns");
    check_duration("2min", 120000000000, "120s");
    check_duration("0", 0, "0s");
    check_duration("0.000000001", 1, "1ns");
    int64_t ns = 3;
    static const char *const bad[] = {"",   "s",   "5 s",         "5h",           "-1s",
                                      "1.", "1.s", "9223372037s", "1.0000000001s"};
    for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++)
        assert_status(base_parse_duration(bad[k], &ns), HDL_EINVAL);
    assert_true(ns == 3);
}

static void test_bools(void **state)
{
    bool value;
    assert_ok(base_parse_bool("yes", &value));
    assert_true(value);
    assert_ok(base_parse_bool("off", &value));
    assert_false(value);
    assert_status(base_parse_bool("maybe", &value), HDL_EINVAL);
}

static void test_addresses(void **state)
{
    struct base_addr addr;
    assert_ok(base_parse_addr("node-1.local:29500", &addr));
    assert_string_equal(addr.host, "node-1.local");
    assert_int_equal(addr.port, 29500);
    assert_ok(base_parse_addr("[fe80::1%eth0]:1", &addr));
    assert_string_equal(addr.host, "fe80::1%eth0");
    struct base_addr before = addr;
    static const char *const bad[] = {"",         "host",   ":80",    "[]:80",
                                      "[::1:80",  "host:",  "host:0", "host:65536",
                                      "host:80x", "::1:80", "[::1]80"};
    for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++)
        assert_status(base_parse_addr(bad[k], &addr), HDL_EINVAL);
    char text[400];
    memset(text, 'h', sizeof(text));
    memcpy(text + sizeof(text) - 4, ":80", 4);
    assert_status(base_parse_addr(text, &addr), HDL_EINVAL);
    assert_memory_equal(&addr, &before, sizeof(addr));
}

static void test_hex(void **state)
{
    uint8_t bytes[4] = {0};
    char text[9];
    assert_ok(base_parse_hex("00fFa510", bytes, 4));
    base_format_hex(bytes, 4, text);
    assert_string_equal(text, "00ffa510");
    assert_status(base_parse_hex("00ffa5", bytes, 4), HDL_EINVAL);
    assert_status(base_parse_hex("00ffa5100", bytes, 4), HDL_EINVAL);
    assert_status(base_parse_hex("00ffa51g", bytes, 4), HDL_EINVAL);
    assert_int_equal(bytes[3], 0x10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers), cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_lists),   cmocka_unit_test(test_durations),
        cmocka_unit_test(test_bools),   cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_hex),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
