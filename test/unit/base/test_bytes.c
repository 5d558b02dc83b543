/* SPDX-License-Identifier: Apache-2.0 */
/* Cursors over bytes: what is written comes back, and nothing reaches beyond the end. */
#include "unit.h"

#include "base/bytes.h"

static size_t write_all(uint8_t *data, size_t size)
{
    struct base_writer writer;
    base_writer_init(&writer, data, size);
    base_write_u8(&writer, 0xa1);
    base_write_u16(&writer, 0xb1b2);
    base_write_u32(&writer, 0xc1c2c3c4);
    base_write_u64(&writer, UINT64_C(0xd1d2d3d4d5d6d7d8));
    base_write_string(&writer, "loom");
    base_write_bytes(&writer, "xyz", 3);
    return writer.failed ? 0 : writer.pos;
}

static void test_round_trip(void **state)
{
    uint8_t data[64];
    char text[8];
    size_t size = write_all(data, sizeof(data));
    struct base_reader reader;
    assert_int_equal(size, 1 + 2 + 4 + 8 + 6 + 3);
    assert_int_equal(data[1], 0xb2); /* little endian */
    base_reader_init(&reader, data, size);
    assert_int_equal(base_read_u8(&reader), 0xa1);
    assert_int_equal(base_read_u16(&reader), 0xb1b2);
    assert_int_equal(base_read_u32(&reader), 0xc1c2c3c4);
    assert_true(base_read_u64(&reader) == UINT64_C(0xd1d2d3d4d5d6d7d8));
    base_read_string(&reader, text, sizeof(text));
    assert_string_equal(text, "loom");
    assert_int_equal(base_reader_left(&reader), 3);
    assert_false(base_reader_done(&reader));
    base_read_bytes(&reader, text, 3);
    assert_memory_equal(text, "xyz", 3);
    assert_true(base_reader_done(&reader));
}

/* Every shorter message fails, whatever it is cut in. */
static void test_every_truncation_fails(void **state)
{
    uint8_t data[64];
    char text[8];
    size_t size = write_all(data, sizeof(data));
    for (size_t cut = 0; cut < size; cut++) {
        struct base_reader reader;
        base_reader_init(&reader, data, cut);
        base_read_u8(&reader);
        base_read_u16(&reader);
        base_read_u32(&reader);
        base_read_u64(&reader);
        base_read_string(&reader, text, sizeof(text));
        base_read_bytes(&reader, text, 3);
        assert_true(reader.failed);
        assert_false(base_reader_done(&reader));
        assert_int_equal(base_reader_left(&reader), 0);
        uint8_t small[64];
        assert_int_equal(write_all(small, cut), 0);
    }
}

static void test_failure_is_sticky(void **state)
{
    const uint8_t data[4] = {1, 2, 3, 4};
    uint8_t out[8] = {9, 9, 9, 9, 9, 9, 9, 9};
    struct base_reader reader;
    base_reader_init(&reader, data, sizeof(data));
    assert_true(base_read_u64(&reader) == 0);
    assert_int_equal(base_read_u8(&reader), 0);
    base_read_bytes(&reader, out, sizeof(out));
    assert_int_equal(out[0], 0);
    assert_null(base_read_view(&reader, 1));
    assert_null(base_read_view(&reader, SIZE_MAX));
}

static void read_string_of(const char *bytes, size_t size, char *out, size_t out_size,
                           bool fails)
{
    struct base_reader reader;
    base_reader_init(&reader, bytes, size);
    memset(out, 'p', out_size);
    base_read_string(&reader, out, out_size);
    assert_int_equal(reader.failed, fails);
    if (fails)
        assert_string_equal(out, "");
}

static void test_bad_strings(void **state)
{
    char out[4];
    read_string_of("\3\0abc", 5, out, sizeof(out), false);
    assert_string_equal(out, "abc");
    read_string_of("\4\0abcd", 6, out, sizeof(out), true);
    read_string_of("\3\0a\0c", 5, out, sizeof(out), true);
    read_string_of("\3\0ab", 4, out, sizeof(out), true);
    read_string_of("\3", 1, out, sizeof(out), true);
    read_string_of("\0\0", 2, out, sizeof(out), false);
    assert_string_equal(out, "");
}

static void test_writer_limits(void **state)
{
    static char text[70000];
    static uint8_t data[80000];
    struct base_writer writer;
    memset(text, 'a', sizeof(text) - 1);
    base_writer_init(&writer, data, sizeof(data));
    base_write_string(&writer, text);
    assert_true(writer.failed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_every_truncation_fails),
        cmocka_unit_test(test_failure_is_sticky),
        cmocka_unit_test(test_bad_strings),
        cmocka_unit_test(test_writer_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
