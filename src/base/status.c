/* SPDX-License-Identifier: Apache-2.0 */
/* Status names and the thread's detail text. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define BASE_STATUS(name, value, text)                                                   \
    static_assert((int)name == (value), "status.def and heddle.h differ: " #name);
#include <assert.h>
#include "base/status.def"
#undef BASE_STATUS

static _Thread_local char detail[BASE_DETAIL_BYTES];

BASE_PRINTF(2, 0)
static enum hdl_status vfail(enum hdl_status status, const char *format, va_list args)
{
    char text[BASE_DETAIL_BYTES];
    int length = vsnprintf(text, sizeof(text), format, args);
    if (length < 0)
        text[0] = '\0';
    memcpy(detail, text, sizeof(detail));
    return status;
}

enum hdl_status base_fail(enum hdl_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfail(status, format, args);
    va_end(args);
    return status;
}

enum hdl_status base_fail_errno(enum hdl_status status, int error, const char *format,
                                ...)
{
    va_list args;
    va_start(args, format);
    vfail(status, format, args);
    va_end(args);
    char text[128];
    base_fail_append(": %s", strerror_r(error, text, sizeof(text)));
    return status;
}

void base_fail_append(const char *format, ...)
{
    size_t used = strnlen(detail, sizeof(detail) - 1);
    va_list args;
    va_start(args, format);
    int length = vsnprintf(detail + used, sizeof(detail) - used, format, args);
    va_end(args);
    if (length < 0)
        detail[used] = '\0';
}

const char *base_detail(void)
{
    return detail;
}

const char *base_status_name(enum hdl_status status)
{
    switch ((int)status) {
#define BASE_STATUS(name, value, text)                                                   \
    case value:                                                                          \
        return #name;
#include "base/status.def"
#undef BASE_STATUS
    default:
        return "HDL_UNKNOWN";
    }
}

const char *base_status_text(enum hdl_status status)
{
    switch ((int)status) {
#define BASE_STATUS(name, value, text)                                                   \
    case value:                                                                          \
        return text;
#include "base/status.def"
#undef BASE_STATUS
    default:
        return "unknown status";
    }
}
