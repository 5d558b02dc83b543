/* SPDX-License-Identifier: Apache-2.0 */
/* What every unit test includes: cmocka with what it wants before it, and checks of
 * statuses. */
#ifndef UNIT_H
#define UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/status.h"

/* Fails with the names of both statuses and the detail text. */
static inline void unit_check_status(enum hdl_status got, enum hdl_status expected,
                                     const char *what, const char *file, int line)
{
    if (got != expected) {
        print_error("%s: %s, not %s (%s)\n", what, base_status_name(got),
                    base_status_name(expected), base_detail());
        _fail(file, line);
    }
}

#define assert_status(call, expected)                                                    \
    unit_check_status((call), (expected), #call, __FILE__, __LINE__)
#define assert_ok(call) assert_status(call, HDL_OK)

/* The detail text contains `part`. */
static inline void unit_check_detail(const char *part, const char *file, int line)
{
    if (!strstr(base_detail(), part)) {
        print_error("detail text '%s' lacks '%s'\n", base_detail(), part);
        _fail(file, line);
    }
}

#define assert_detail(part) unit_check_detail((part), __FILE__, __LINE__)

#endif
