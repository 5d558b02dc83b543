/* SPDX-License-Identifier: Apache-2.0 */
/* Parsers of what people type: numbers, sizes, durations, lists, addresses. The whole
 * text must match; on failure HDL_EINVAL with the text and the reason, and the output is
 * untouched. */
#ifndef BASE_PARSE_H
#define BASE_PARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { BASE_HOST_BYTES = 256 };

/* A name or a numeric address, without the brackets of IPv6. */
struct base_addr {
    char host[BASE_HOST_BYTES];
    uint16_t port;
};

/* Decimal, or hexadecimal with 0x. */
enum hdl_status base_parse_u64(const char *text, uint64_t *out);
enum hdl_status base_parse_u32(const char *text, uint32_t *out);

/* A number with an optional K, M, G or T (powers of 1024), also written KiB or KB. */
enum hdl_status base_parse_size(const char *text, uint64_t *out);

/* "8,4K,1M" into at most `max` numbers. */
enum hdl_status base_parse_size_list(const char *text, uint64_t *out, size_t max,
                                     size_t *count);

/* A number with ns, us, ms, s or min, decimals allowed ("0.5s"); without a unit seconds.
 */
enum hdl_status base_parse_duration(const char *text, int64_t *out_ns);

/* 1, yes, true, on, 0, no, false, off. */
enum hdl_status base_parse_bool(const char *text, bool *out);

/* "host:port" or "[v6]:port"; "" as host is refused, port 1 to 65535. */
enum hdl_status base_parse_addr(const char *text, struct base_addr *out);

/* Exactly 2 * size hexadecimal digits. */
enum hdl_status base_parse_hex(const char *text, uint8_t *out, size_t size);

/* The inverses; always terminated. "64M" if exact, else the plain number; "500ms". */
void base_format_size(uint64_t value, char *text, size_t size);
void base_format_duration(int64_t ns, char *text, size_t size);
/* 2 * size digits and the terminator go into text. */
void base_format_hex(const uint8_t *bytes, size_t size, char *text);

#endif
