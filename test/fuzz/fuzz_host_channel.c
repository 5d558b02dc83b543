/* SPDX-License-Identifier: Apache-2.0 */
/* What a stranger, or an authentic peer gone wild, may send to a control socket. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "host/channel.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void init(struct host_channel *channel, bool server)
{
    uint8_t key[HOST_KEY_BYTES] = {7}, nonce[HOST_NONCE_BYTES] = {9};
    struct host_channel_opts opts = {.server = server,
                                     .purpose = server ? 1u << HOST_PURPOSE_AGENT |
                                                             1u << HOST_PURPOSE_WATCH
                                                       : HOST_PURPOSE_AGENT,
                                     .max_frame = 1024,
                                     .key = key,
                                     .nonce = nonce};
    host_channel_init(channel, &opts);
}

static void check(bool condition)
{
    if (!condition)
        abort();
}

/* Everything the channel says must lie inside what it was given. */
static void feed(struct host_channel *channel, const uint8_t *data, size_t size)
{
    struct host_channel_out out;
    for (;;) {
        uint64_t before = channel->num_received;
        enum host_channel_result result = host_channel_input(channel, data, size, &out);
        check(out.used <= size && out.reply_size <= sizeof(out.reply));
        if (result == HOST_CHANNEL_MORE)
            check(out.used == 0 && out.need > size && out.need <= 1024 + 80);
        if (result == HOST_CHANNEL_MORE || result == HOST_CHANNEL_BAD)
            return;
        if (result == HOST_CHANNEL_FRAME) {
            check(out.payload >= data && out.payload + out.payload_size <= data + size);
            check(channel->num_received == before + 1);
        }
        check(out.used > 0);
        data += out.used;
        size -= out.used;
    }
}

/* A server and a client that have found each other. */
static void open_both(struct host_channel *client, struct host_channel *server)
{
    struct host_channel_out hello, challenge, proof;
    init(client, false);
    init(server, true);
    host_channel_start(client, &hello);
    (void)host_channel_input(server, hello.reply, hello.reply_size, &challenge);
    (void)host_channel_input(client, challenge.reply, challenge.reply_size, &proof);
    (void)host_channel_input(server, proof.reply, proof.reply_size, &hello);
    check(client->state == HOST_CHANNEL_READY && server->state == HOST_CHANNEL_READY);
}

/* {length, bytes}... as sealed frames: all must come out. */
static void feed_sealed(struct host_channel *from, struct host_channel *to,
                        const uint8_t *data, size_t size)
{
    uint8_t frame[HOST_FRAME_OVERHEAD + 255];
    struct host_channel_out out;
    while (size > 0 && (size_t)data[0] + 1 <= size) {
        size_t length = data[0];
        memcpy(frame + HOST_LENGTH_BYTES, data + 1, length);
        host_channel_seal(from, frame + HOST_LENGTH_BYTES, length, frame,
                          frame + HOST_LENGTH_BYTES + length);
        check(host_channel_input(to, frame, HOST_FRAME_OVERHEAD + length, &out) ==
              HOST_CHANNEL_FRAME);
        data += length + 1;
        size -= length + 1;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct host_channel client, server;
    if (size == 0)
        return 0;
    uint8_t way = data[0] & 7;
    if (way == 0 || way == 1) {
        init(&server, way == 0);
        feed(&server, data + 1, size - 1);
        return 0;
    }
    open_both(&client, &server);
    if (way >= 4)
        feed_sealed(&client, &server, data + 1, size - 1);
    else
        feed(way == 2 ? &server : &client, data + 1, size - 1);
    return 0;
}
