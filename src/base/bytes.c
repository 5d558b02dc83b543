/* SPDX-License-Identifier: Apache-2.0 */
/* Bounds-checked cursors over bytes. */
#include "base/bytes.h"

#include <string.h>

void base_reader_init(struct base_reader *reader, const void *data, size_t size)
{
    reader->data = data;
    reader->size = size;
    reader->pos = 0;
    reader->failed = false;
}

const uint8_t *base_read_view(struct base_reader *reader, size_t size)
{
    if (reader->failed || size > reader->size - reader->pos) {
        reader->failed = true;
        return NULL;
    }
    const uint8_t *view = reader->data + reader->pos;
    reader->pos += size;
    return view;
}

static uint64_t read_number(struct base_reader *reader, size_t size)
{
    const uint8_t *bytes = base_read_view(reader, size);
    if (!bytes)
        return 0;
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++)
        value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

uint8_t base_read_u8(struct base_reader *reader)
{
    return (uint8_t)read_number(reader, 1);
}

uint16_t base_read_u16(struct base_reader *reader)
{
    return (uint16_t)read_number(reader, 2);
}

uint32_t base_read_u32(struct base_reader *reader)
{
    return (uint32_t)read_number(reader, 4);
}

uint64_t base_read_u64(struct base_reader *reader)
{
    return read_number(reader, 8);
}

void base_read_bytes(struct base_reader *reader, void *out, size_t size)
{
    const uint8_t *bytes = base_read_view(reader, size);
    if (size == 0)
        return;
    if (bytes)
        memcpy(out, bytes, size);
    else
        memset(out, 0, size);
}

void base_read_string(struct base_reader *reader, char *out, size_t size)
{
    size_t length = base_read_u16(reader);
    const uint8_t *bytes = base_read_view(reader, length);
    if (bytes && (length >= size || memchr(bytes, 0, length)))
        reader->failed = true;
    if (size == 0)
        return;
    if (!bytes || reader->failed)
        length = 0;
    if (length > 0)
        memcpy(out, bytes, length);
    out[length] = '\0';
}

void base_writer_init(struct base_writer *writer, void *data, size_t size)
{
    writer->data = data;
    writer->size = size;
    writer->pos = 0;
    writer->failed = false;
}

void base_write_bytes(struct base_writer *writer, const void *bytes, size_t size)
{
    if (writer->failed || size > writer->size - writer->pos) {
        writer->failed = true;
        return;
    }
    if (size > 0)
        memcpy(writer->data + writer->pos, bytes, size);
    writer->pos += size;
}

static void put_number(uint8_t *bytes, uint64_t value, size_t size)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> (8 * i));
}

static void write_number(struct base_writer *writer, uint64_t value, size_t size)
{
    uint8_t bytes[8];
    put_number(bytes, value, size);
    base_write_bytes(writer, bytes, size);
}

void base_write_u8(struct base_writer *writer, uint8_t value)
{
    write_number(writer, value, 1);
}

void base_write_u16(struct base_writer *writer, uint16_t value)
{
    write_number(writer, value, 2);
}

void base_write_u32(struct base_writer *writer, uint32_t value)
{
    write_number(writer, value, 4);
}

void base_write_u64(struct base_writer *writer, uint64_t value)
{
    write_number(writer, value, 8);
}

void base_write_string(struct base_writer *writer, const char *text)
{
    size_t length = strlen(text);
    if (length > UINT16_MAX) {
        writer->failed = true;
        return;
    }
    base_write_u16(writer, (uint16_t)length);
    base_write_bytes(writer, text, length);
}
