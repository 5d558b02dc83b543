/* SPDX-License-Identifier: Apache-2.0 */
/* Status names and the thread's detail text, which says what was wrong with which values.
 */
#ifndef BASE_STATUS_H
#define BASE_STATUS_H

#include "heddle.h"

#define BASE_PRINTF(text, first) __attribute__((format(printf, text, first)))

/* Bytes of a detail text with its terminator; a longer text is cut. */
enum { BASE_DETAIL_BYTES = 512 };

/* Sets the calling thread's detail text and returns `status`. The format may use the old
 * text: base_detail() stays valid while it is formatted. */
enum hdl_status base_fail(enum hdl_status status, const char *format, ...)
    BASE_PRINTF(2, 3);

/* base_fail with ": <strerror(error)>" appended. */
enum hdl_status base_fail_errno(enum hdl_status status, int error, const char *format,
                                ...) BASE_PRINTF(3, 4);

/* Adds to the detail text: for callers that know more than the one who failed. */
void base_fail_append(const char *format, ...) BASE_PRINTF(1, 2);

/* The calling thread's detail text, "" if none; overwritten by its next failure. */
const char *base_detail(void);

/* "HDL_EINVAL", or "HDL_UNKNOWN". */
const char *base_status_name(enum hdl_status status);
/* "invalid argument", or "unknown status". */
const char *base_status_text(enum hdl_status status);

#endif
