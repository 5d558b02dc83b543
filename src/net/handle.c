/* SPDX-License-Identifier: Apache-2.0 */
/* Packed window handles: the bytes that ranks give each other. Pure; fuzzed. */
#include "net/internal.h"

#include "base/bytes.h"

#include <string.h>

/*
 *  u32 magic  u16 version  u16 flags
 *  host id[16]  string socket name  u32 pid  u32 rank
 *  u64 rank epoch  u64 context id  u64 window id  u64 key  u64 bytes
 *  u64 bell id  u64 bell key
 *  string provider  u16 length, address   u64 secret
 *  of device memory: CUDA's handle[64], u64 offset
 *  u32 checksum of all before it (against accidents; keys are what protects)
 */
enum {
    HANDLE_MAGIC = 0x57444c48,
    HANDLE_VERSION = 2,
    HANDLE_HAS_EVENT = 1,
    HANDLE_LONG = 2,
    HANDLE_OF_DEVICE = 4
};

static uint32_t handle_checksum(const uint8_t *data, size_t length)
{
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ data[i]) * 16777619u;
    return hash;
}

enum hdl_status net_handle_pack(const struct net_handle *handle, void *out,
                                size_t *length)
{
    struct base_writer writer;
    base_writer_init(&writer, out, *length);
    base_write_u32(&writer, HANDLE_MAGIC);
    base_write_u16(&writer, HANDLE_VERSION);
    base_write_u16(&writer, (handle->has_event ? HANDLE_HAS_EVENT : 0) |
                                (handle->long_messages ? HANDLE_LONG : 0) |
                                (handle->of_device ? HANDLE_OF_DEVICE : 0));
    base_write_bytes(&writer, handle->host_id, sizeof(handle->host_id));
    base_write_string(&writer, handle->socket_name);
    base_write_u32(&writer, (uint32_t)handle->pid);
    base_write_u32(&writer, (uint32_t)handle->rank);
    base_write_u64(&writer, handle->rank_epoch);
    base_write_u64(&writer, handle->net_id);
    base_write_u64(&writer, handle->window_id);
    base_write_u64(&writer, handle->key);
    base_write_u64(&writer, handle->bytes);
    base_write_u64(&writer, handle->bell_id);
    base_write_u64(&writer, handle->bell_key);
    base_write_string(&writer, handle->provider);
    base_write_u16(&writer, (uint16_t)handle->address_length);
    base_write_bytes(&writer, handle->address, handle->address_length);
    base_write_u64(&writer, handle->secret);
    if (handle->of_device) {
        base_write_bytes(&writer, handle->shared.ipc.bytes, sizeof(handle->shared.ipc));
        base_write_u64(&writer, handle->shared.offset);
    }
    if (!writer.failed)
        base_write_u32(&writer, handle_checksum(out, writer.pos));
    if (writer.failed)
        return base_fail(HDL_EINVAL, "no room for a window handle in %zu bytes", *length);
    *length = writer.pos;
    return HDL_OK;
}

enum hdl_status net_handle_unpack(const void *data, size_t length,
                                  struct net_handle *handle)
{
    struct base_reader reader;
    base_reader_init(&reader, data, length);
    memset(handle, 0, sizeof(*handle));
    uint32_t magic = base_read_u32(&reader);
    uint16_t version = base_read_u16(&reader);
    if (reader.failed || magic != HANDLE_MAGIC)
        return base_fail(HDL_EINVAL, "%zu bytes are not a window handle", length);
    if (version != HANDLE_VERSION)
        return base_fail(HDL_EINVAL, "window handle of version %u, this library has %u",
                         version, HANDLE_VERSION);
    uint16_t flags = base_read_u16(&reader);
    handle->has_event = flags & HANDLE_HAS_EVENT;
    handle->long_messages = flags & HANDLE_LONG;
    handle->of_device = flags & HANDLE_OF_DEVICE;
    base_read_bytes(&reader, handle->host_id, sizeof(handle->host_id));
    base_read_string(&reader, handle->socket_name, sizeof(handle->socket_name));
    handle->pid = (int32_t)base_read_u32(&reader);
    handle->rank = (int32_t)base_read_u32(&reader);
    handle->rank_epoch = base_read_u64(&reader);
    handle->net_id = base_read_u64(&reader);
    handle->window_id = base_read_u64(&reader);
    handle->key = base_read_u64(&reader);
    handle->bytes = base_read_u64(&reader);
    handle->bell_id = base_read_u64(&reader);
    handle->bell_key = base_read_u64(&reader);
    base_read_string(&reader, handle->provider, sizeof(handle->provider));
    uint32_t address_length = base_read_u16(&reader);
    if (address_length > sizeof(handle->address))
        return base_fail(HDL_EINVAL, "window handle with an address of %u bytes",
                         address_length);
    handle->address_length = address_length;
    base_read_bytes(&reader, handle->address, address_length);
    handle->secret = base_read_u64(&reader);
    if (handle->of_device) {
        base_read_bytes(&reader, handle->shared.ipc.bytes, sizeof(handle->shared.ipc));
        handle->shared.offset = base_read_u64(&reader);
    }
    size_t covered = reader.pos;
    uint32_t checksum = base_read_u32(&reader);
    /* A tail is legal: handles travel in fixed-size fields. */
    if (reader.failed || checksum != handle_checksum(data, covered))
        return base_fail(HDL_EINVAL, "window handle of %zu bytes is damaged", length);
    if (handle->bytes == 0 || handle->bytes > INT64_MAX)
        return base_fail(HDL_EINVAL, "window handle of %llu bytes",
                         (unsigned long long)handle->bytes);
    return HDL_OK;
}
