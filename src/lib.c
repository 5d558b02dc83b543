/* SPDX-License-Identifier: Apache-2.0 */
/* The library's public entry points that belong to no layer. */
#include "heddle.h"

#include "base/dtype.h"
#include "base/status.h"

#define TEXT(value) #value
#define VERSION(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *hdl_version(void)
{
    return VERSION(HDL_VERSION_MAJOR, HDL_VERSION_MINOR, HDL_VERSION_PATCH);
}

const char *hdl_status_name(enum hdl_status status)
{
    return base_status_name(status);
}

const char *hdl_status_text(enum hdl_status status)
{
    return base_status_text(status);
}

const char *hdl_error_detail(void)
{
    return base_detail();
}

size_t hdl_dtype_size(enum hdl_dtype dtype)
{
    return base_dtype_size(dtype);
}

const char *hdl_dtype_name(enum hdl_dtype dtype)
{
    return base_dtype_name(dtype);
}

const char *hdl_redop_name(enum hdl_redop redop)
{
    return base_redop_name(redop);
}
