/* SPDX-License-Identifier: Apache-2.0 */
/* Bounds-checked cursors over bytes: little-endian numbers, counted strings. The first
 * read or write that does not fit sets `failed`, and from then on reads give 0 and writes
 * do nothing: so a message is decoded straight through and checked once at its end. */
#ifndef BASE_BYTES_H
#define BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct base_reader {
    const uint8_t *data;
    size_t size;
    size_t pos;
    bool failed;
};

struct base_writer {
    uint8_t *data;
    size_t size;
    size_t pos;
    bool failed;
};

void base_reader_init(struct base_reader *reader, const void *data, size_t size);
uint8_t base_read_u8(struct base_reader *reader);
uint16_t base_read_u16(struct base_reader *reader);
uint32_t base_read_u32(struct base_reader *reader);
uint64_t base_read_u64(struct base_reader *reader);
/* Copies `size` bytes; on failure `out` is zeroed. */
void base_read_bytes(struct base_reader *reader, void *out, size_t size);
/* A pointer to `size` bytes inside the data, or NULL. */
const uint8_t *base_read_view(struct base_reader *reader, size_t size);
/* A u16 length and that many bytes, without a 0 among them, into a buffer of `size`,
 * terminated. Fails if it does not fit; then out is "". */
void base_read_string(struct base_reader *reader, char *out, size_t size);
static inline size_t base_reader_left(const struct base_reader *reader)
{
    return reader->failed ? 0 : reader->size - reader->pos;
}
/* No failure, and every byte read: a message with a tail is malformed. */
static inline bool base_reader_done(const struct base_reader *reader)
{
    return !reader->failed && reader->pos == reader->size;
}

void base_writer_init(struct base_writer *writer, void *data, size_t size);
void base_write_u8(struct base_writer *writer, uint8_t value);
void base_write_u16(struct base_writer *writer, uint16_t value);
void base_write_u32(struct base_writer *writer, uint32_t value);
void base_write_u64(struct base_writer *writer, uint64_t value);
void base_write_bytes(struct base_writer *writer, const void *bytes, size_t size);
/* A u16 length and the bytes; fails above 65535. */
void base_write_string(struct base_writer *writer, const char *text);

#endif
