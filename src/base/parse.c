/* SPDX-License-Identifier: Apache-2.0 */
/* Parsers of what people type. */
#include "base/parse.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static int hex_value(char c)
{
    if (is_digit(c))
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Reads digits of `base` and moves *text behind them; false if there are none or too
 * many. */
static bool take_number(const char **text, unsigned base, uint64_t *out)
{
    const char *p = *text;
    uint64_t value = 0;
    for (;;) {
        int digit = hex_value(*p);
        if (digit < 0 || (unsigned)digit >= base)
            break;
        if (__builtin_mul_overflow(value, base, &value) ||
            __builtin_add_overflow(value, (uint64_t)digit, &value))
            return false;
        p++;
    }
    if (p == *text)
        return false;
    *text = p;
    *out = value;
    return true;
}

enum hdl_status base_parse_u64(const char *text, uint64_t *out)
{
    const char *p = text;
    unsigned base = 10;
    if (p[0] == '0' && (p[1] == 'x' || p[1] == 'X')) {
        base = 16;
        p += 2;
    }
    uint64_t value;
    if (!take_number(&p, base, &value) || *p)
        return base_fail(HDL_EINVAL, "'%.64s' is not a number below 2^64", text);
    *out = value;
    return HDL_OK;
}

enum hdl_status base_parse_u32(const char *text, uint32_t *out)
{
    uint64_t value = 0;
    if (base_parse_u64(text, &value) != HDL_OK || value > UINT32_MAX)
        return base_fail(HDL_EINVAL, "'%.64s' is not a number below 2^32", text);
    *out = (uint32_t)value;
    return HDL_OK;
}

/* Reads "", K, KB, KiB, M, ... and moves *text behind it; false for another letter. */
static bool take_unit(const char **text, unsigned *shift)
{
    static const char letters[] = "KMGT";
    const char *p = *text;
    *shift = 0;
    if (*p == '\0' || *p == ',')
        return true;
    char upper = *p >= 'a' && *p <= 'z' ? (char)(*p - 'a' + 'A') : *p;
    const char *letter = strchr(letters, upper);
    if (letter && upper) {
        *shift = 10 * (unsigned)(letter - letters + 1);
        p++;
        if (p[0] == 'i' && p[1] == 'B')
            p++;
    }
    if (*p == 'B')
        p++;
    *text = p;
    return *p == '\0' || *p == ',';
}

/* One size up to the end or a comma. */
static bool take_size(const char **text, uint64_t *out)
{
    uint64_t value;
    unsigned shift;
    if (!take_number(text, 10, &value) || !take_unit(text, &shift))
        return false;
    if (value > UINT64_MAX >> shift)
        return false;
    *out = value << shift;
    return true;
}

enum hdl_status base_parse_size(const char *text, uint64_t *out)
{
    const char *p = text;
    uint64_t value;
    if (!take_size(&p, &value) || *p)
        return base_fail(HDL_EINVAL, "'%.64s' is not a size such as 8, 4K or 1M", text);
    *out = value;
    return HDL_OK;
}

enum hdl_status base_parse_size_list(const char *text, uint64_t *out, size_t max,
                                     size_t *count)
{
    size_t found = 0;
    const char *p = text;
    for (;;) {
        uint64_t value;
        if (!take_size(&p, &value))
            return base_fail(HDL_EINVAL, "'%.64s' is not a list of sizes such as 8,4K,1M",
                             text);
        if (found == max)
            return base_fail(HDL_EINVAL, "'%.64s' has more than %zu sizes", text, max);
        out[found++] = value;
        if (*p == '\0')
            break;
        p++;
    }
    *count = found;
    return HDL_OK;
}

/* ns of one unit of time; 0 if unknown. */
static uint64_t unit_ns(const char *unit)
{
    static const struct {
        const char *name;
        uint64_t ns;
    } units[] = {
        {"", 1000000000}, {"s", 1000000000}, {"ms", 1000000},
        {"us", 1000},     {"ns", 1},         {"min", 60000000000},
    };
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcmp(unit, units[i].name) == 0)
            return units[i].ns;
    }
    return 0;
}

enum hdl_status base_parse_duration(const char *text, int64_t *out_ns)
{
    const char *p = text;
    uint64_t whole;
    uint64_t fraction = 0;
    uint64_t scale = 1;
    bool valid = take_number(&p, 10, &whole);
    if (valid && *p == '.') {
        const char *first = ++p;
        valid = take_number(&p, 10, &fraction) && p - first <= 9;
        for (; valid && first < p; first++)
            scale *= 10;
    }
    uint64_t unit = valid ? unit_ns(p) : 0;
    if (unit == 0 || whole > (uint64_t)INT64_MAX / unit - 1)
        return base_fail(HDL_EINVAL, "'%.64s' is not a duration such as 500ms or 5s",
                         text);
    /* fraction < scale <= 10^9 and unit <= 6 * 10^10: the product needs more than 64
     * bits. */
    unsigned __int128 part = (unsigned __int128)fraction * unit / scale;
    *out_ns = (int64_t)(whole * unit + (uint64_t)part);
    return HDL_OK;
}

enum hdl_status base_parse_bool(const char *text, bool *out)
{
    static const char *const names[] = {"0",     "1",    "no",  "yes",
                                        "false", "true", "off", "on"};
    for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = i % 2 == 1;
            return HDL_OK;
        }
    }
    return base_fail(HDL_EINVAL, "'%.64s' is none of 0, 1, no, yes, false, true, off, on",
                     text);
}

/* The host part without brackets: its first byte, length, and what follows it. */
static bool split_host(const char *text, const char **host, size_t *length,
                       const char **rest)
{
    if (text[0] == '[') {
        const char *close = strchr(text, ']');
        if (!close)
            return false;
        *host = text + 1;
        *length = (size_t)(close - text - 1);
        *rest = close + 1;
        return true;
    }
    *host = text;
    *length = strcspn(text, ":");
    *rest = text + *length;
    return true;
}

enum hdl_status base_parse_addr(const char *text, struct base_addr *out)
{
    const char *host;
    const char *rest;
    size_t length;
    if (!split_host(text, &host, &length, &rest) || rest[0] != ':')
        return base_fail(HDL_EINVAL, "'%.64s' is not an address host:port", text);
    if (length == 0 || length >= BASE_HOST_BYTES)
        return base_fail(HDL_EINVAL, "'%.64s' has a host of %zu bytes, not 1 to %d", text,
                         length, BASE_HOST_BYTES - 1);
    const char *p = rest + 1;
    uint64_t port;
    if (!take_number(&p, 10, &port) || *p || port < 1 || port > UINT16_MAX)
        return base_fail(HDL_EINVAL, "'%.64s' has no port from 1 to 65535", text);
    memset(out, 0, sizeof(*out));
    memcpy(out->host, host, length);
    out->port = (uint16_t)port;
    return HDL_OK;
}

enum hdl_status base_parse_hex(const char *text, uint8_t *out, size_t size)
{
    size_t length = strlen(text);
    size_t digits = strspn(text, "0123456789abcdefABCDEF");
    if (length != digits || length / 2 != size || length % 2)
        return base_fail(HDL_EINVAL,
                         "%zu hexadecimal digits expected, %zu of %zu bytes are",
                         2 * size, digits, length);
    for (size_t i = 0; i < size; i++)
        out[i] = (uint8_t)(hex_value(text[2 * i]) * 16 + hex_value(text[2 * i + 1]));
    return HDL_OK;
}

void base_format_size(uint64_t value, char *text, size_t size)
{
    static const char letters[] = "KMGT";
    unsigned unit = 0;
    while (unit < 4 && value != 0 && value % 1024 == 0) {
        value /= 1024;
        unit++;
    }
    if (unit == 0)
        snprintf(text, size, "%" PRIu64, value);
    else
        snprintf(text, size, "%" PRIu64 "%c", value, letters[unit - 1]);
}

void base_format_duration(int64_t ns, char *text, size_t size)
{
    if (ns == 0 || ns % BASE_NS_PER_S == 0)
        snprintf(text, size, "%" PRId64 "s", ns / BASE_NS_PER_S);
    else if (ns % BASE_NS_PER_MS == 0)
        snprintf(text, size, "%" PRId64 "ms", ns / BASE_NS_PER_MS);
    else if (ns % BASE_NS_PER_US == 0)
        snprintf(text, size, "%" PRId64 "us", ns / BASE_NS_PER_US);
    else
        snprintf(text, size, "%" PRId64 "ns", ns);
}

void base_format_hex(const uint8_t *bytes, size_t size, char *text)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < size; i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    text[2 * size] = '\0';
}
