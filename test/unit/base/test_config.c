/* SPDX-License-Identifier: Apache-2.0 */
/* Environment knobs: defaults, values, bad values, their text. */
#include "unit.h"

#include <stdlib.h>

#include "base/config.h"
#include "base/log.h"

static void test_defaults_print_as_typed(void **state)
{
    struct base_config config;
    base_config_default(&config);
    for (size_t i = 0; i < base_knob_count(); i++) {
        char text[BASE_CONFIG_STRING_BYTES];
        const struct base_knob *knob = base_knob_at(i);
        base_knob_format(&config, knob, text, sizeof(text));
        assert_string_equal(text, knob->standard);
        assert_true(strncmp(knob->variable, "HEDDLE_", 7) == 0);
        assert_true(strlen(knob->help) > 10);
    }
    assert_null(base_knob_at(base_knob_count()));
}

static void test_load(void **state)
{
    struct base_config config;
    setenv("HEDDLE_DEAD_AFTER", "250ms", 1);
    setenv("HEDDLE_LOG", "debug", 1);
    setenv("HEDDLE_TRANSPORT", "", 1);
    setenv("HEDDLE_NOT_A_KNOB", "x", 1);
    assert_ok(base_config_load(&config));
    assert_int_equal(config.dead_after, 250000000);
    assert_int_equal(config.log, BASE_LOG_DEBUG);
    assert_string_equal(config.transport.text, "auto");
    unsetenv("HEDDLE_DEAD_AFTER");
    unsetenv("HEDDLE_LOG");
}

static void test_bad_value_names_the_variable(void **state)
{
    struct base_config config;
    memset(&config, 0x5a, sizeof(config));
    struct base_config before = config;
    setenv("HEDDLE_SLOT_SIZE", "256Q", 1);
    assert_status(base_config_load(&config), HDL_EINVAL);
    assert_detail("HEDDLE_SLOT_SIZE");
    assert_detail("256Q");
    assert_memory_equal(&config, &before, sizeof(config));
    unsetenv("HEDDLE_SLOT_SIZE");
}

static void test_set(void **state)
{
    struct base_config config;
    char text[300];
    base_config_default(&config);
    assert_ok(base_config_set(&config, "HEDDLE_SLOT_SIZE", "1M"));
    assert_int_equal(config.slot_size, 1 << 20);
    assert_status(base_config_set(&config, "HEDDLE_NOTHING", "1"), HDL_EINVAL);
    assert_detail("HEDDLE_NOTHING");
    memset(text, 'a', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    assert_status(base_config_set(&config, "HEDDLE_TRANSPORT", text), HDL_EINVAL);
    assert_status(base_config_set(&config, "HEDDLE_LOG", "loud"), HDL_EINVAL);
    assert_detail("loud");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_print_as_typed),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_bad_value_names_the_variable),
        cmocka_unit_test(test_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
