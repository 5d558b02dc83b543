/* SPDX-License-Identifier: Apache-2.0 */
/* Every parser of text, and the cursors over bytes, on arbitrary input. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/config.h"
#include "base/parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A parsed size or duration must survive the way to text and back. */
static void check_round_trip(const char *text)
{
    char again[64];
    uint64_t size;
    uint64_t size_again;
    if (base_parse_size(text, &size) == HDL_OK) {
        base_format_size(size, again, sizeof(again));
        if (base_parse_size(again, &size_again) != HDL_OK || size_again != size)
            abort();
    }
    int64_t ns;
    int64_t ns_again;
    if (base_parse_duration(text, &ns) == HDL_OK) {
        base_format_duration(ns, again, sizeof(again));
        if (ns < 0 || base_parse_duration(again, &ns_again) != HDL_OK || ns_again != ns)
            abort();
    }
}

static void parse_text(const char *text)
{
    uint64_t list[4];
    size_t count;
    uint64_t u64;
    uint32_t u32;
    bool boolean;
    uint8_t bytes[8];
    struct base_addr addr;
    check_round_trip(text);
    if (base_parse_size_list(text, list, 4, &count) == HDL_OK && (count < 1 || count > 4))
        abort();
    base_parse_u64(text, &u64);
    base_parse_u32(text, &u32);
    base_parse_bool(text, &boolean);
    base_parse_hex(text, bytes, sizeof(bytes));
    if (base_parse_addr(text, &addr) == HDL_OK && (addr.port == 0 || !addr.host[0]))
        abort();
    struct base_config config;
    base_config_default(&config);
    for (size_t i = 0; i < base_knob_count(); i++)
        base_config_set(&config, base_knob_at(i)->variable, text);
}

/* The first half of the input says what to read from the second. */
static void read_bytes(const uint8_t *data, size_t size)
{
    struct base_reader reader;
    char text[16];
    base_reader_init(&reader, data + size / 2, size - size / 2);
    for (size_t i = 0; i < size / 2; i++) {
        if (data[i] % 6 == 0)
            base_read_u8(&reader);
        else if (data[i] % 6 == 1)
            base_read_u16(&reader);
        else if (data[i] % 6 == 2)
            base_read_u32(&reader);
        else if (data[i] % 6 == 3)
            base_read_u64(&reader);
        else if (data[i] % 6 == 4)
            base_read_string(&reader, text, sizeof(text));
        else
            base_read_bytes(&reader, text, data[i] % sizeof(text));
        if (reader.pos > reader.size)
            abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text)
        return 0;
    if (size > 0)
        memcpy(text, data, size);
    text[size] = '\0';
    parse_text(text);
    free(text);
    read_bytes(data, size);
    return 0;
}
