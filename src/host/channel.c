/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake and the frames of an authenticated stream, as a pure state machine. */
#include "host/channel.h"

#include <string.h>

#include <sodium.h>

#include "base/bytes.h"
#include "ctl/msg.h"

static const uint8_t channel_magic[8] = {'H', 'E', 'D', 'D', 'L', 'E', '\r', '\n'};

const char *host_refusal_text(enum host_refusal refusal)
{
    switch (refusal) {
    case HOST_REFUSAL_NONE:
        return "closed";
    case HOST_REFUSAL_MAGIC:
        return "not a heddle process";
    case HOST_REFUSAL_VERSION:
        return "another wire version";
    case HOST_REFUSAL_PURPOSE:
        return "purpose not served here";
    case HOST_REFUSAL_TOKEN:
        return "token differs";
    case HOST_REFUSAL_TAG:
        return "frame not authentic";
    case HOST_REFUSAL_OVERSIZED:
        return "frame too long";
    case HOST_REFUSAL_TRUNCATED:
        return "ended inside a frame";
    case HOST_REFUSAL_UNPROVEN:
        return "hung up in the handshake, of another job or with another token";
    case HOST_REFUSAL_SLOW:
        return "handshake too slow";
    case HOST_REFUSAL_USER:
        return "socket of another user";
    }
    return "unknown reason";
}

void host_channel_init(struct host_channel *channel, const struct host_channel_opts *opts)
{
    memset(channel, 0, sizeof(*channel));
    channel->server = opts->server;
    channel->state = opts->server ? HOST_CHANNEL_WAIT_HELLO : HOST_CHANNEL_WAIT_CHALLENGE;
    channel->purpose = opts->server ? 0 : opts->purpose;
    channel->purposes = opts->server ? opts->purpose : 1u << opts->purpose;
    channel->version = opts->version ? opts->version : CTL_WIRE_VERSION;
    channel->max_frame = opts->max_frame;
    memcpy(channel->key, opts->key, HOST_KEY_BYTES);
    memcpy(opts->server ? channel->server_nonce : channel->client_nonce, opts->nonce,
           HOST_NONCE_BYTES);
}

void host_channel_wipe(struct host_channel *channel)
{
    sodium_memzero(channel, sizeof(*channel));
}

/* Everything both sides must agree on goes into every derived value. */
static void derive(const struct host_channel *channel, const char *role,
                   uint8_t out[HOST_KEY_BYTES])
{
    uint8_t text[16 + 8 + 2 * HOST_NONCE_BYTES];
    struct base_writer writer;
    base_writer_init(&writer, text, sizeof(text));
    uint8_t label[16] = {0};
    memcpy(label, role, strlen(role));
    base_write_bytes(&writer, label, sizeof(label));
    base_write_u32(&writer, channel->version);
    base_write_u32(&writer, channel->purpose);
    base_write_bytes(&writer, channel->client_nonce, HOST_NONCE_BYTES);
    base_write_bytes(&writer, channel->server_nonce, HOST_NONCE_BYTES);
    (void)crypto_generichash(out, HOST_KEY_BYTES, text, sizeof(text), channel->key,
                             HOST_KEY_BYTES);
}

static void open_channel(struct host_channel *channel)
{
    derive(channel, channel->server ? "from server" : "from client", channel->send_key);
    derive(channel, channel->server ? "from client" : "from server",
           channel->receive_key);
    channel->state = HOST_CHANNEL_READY;
}

static enum host_channel_result refuse(struct host_channel *channel,
                                       enum host_refusal refusal)
{
    channel->state = HOST_CHANNEL_REFUSED;
    channel->refusal = refusal;
    return HOST_CHANNEL_BAD;
}

static void write_head(const struct host_channel *channel, struct base_writer *writer,
                       uint32_t purpose)
{
    base_write_bytes(writer, channel_magic, sizeof(channel_magic));
    base_write_u32(writer, channel->version);
    base_write_u32(writer, purpose);
}

/* Version and purpose of a first message; refuses as early as the bytes allow. */
static enum host_refusal check_head(struct host_channel *channel, const uint8_t *data,
                                    size_t size, uint32_t *purpose)
{
    size_t known = size < sizeof(channel_magic) ? size : sizeof(channel_magic);
    if (memcmp(data, channel_magic, known) != 0)
        return HOST_REFUSAL_MAGIC;
    if (size < 16)
        return HOST_REFUSAL_NONE;
    struct base_reader reader;
    base_reader_init(&reader, data + 8, 8);
    channel->peer_version = base_read_u32(&reader);
    *purpose = base_read_u32(&reader);
    return channel->peer_version == channel->version ? HOST_REFUSAL_NONE
                                                     : HOST_REFUSAL_VERSION;
}

void host_channel_start(const struct host_channel *channel, struct host_channel_out *out)
{
    memset(out, 0, sizeof(*out));
    if (channel->server)
        return;
    struct base_writer writer;
    base_writer_init(&writer, out->reply, sizeof(out->reply));
    write_head(channel, &writer, channel->purpose);
    base_write_bytes(&writer, channel->client_nonce, HOST_NONCE_BYTES);
    out->reply_size = writer.pos;
}

static void write_challenge(struct host_channel *channel, struct host_channel_out *out,
                            bool accepted)
{
    uint8_t proof[HOST_PROOF_BYTES] = {0};
    if (accepted)
        derive(channel, "server", proof);
    struct base_writer writer;
    base_writer_init(&writer, out->reply, sizeof(out->reply));
    write_head(channel, &writer, 0);
    base_write_bytes(&writer, channel->server_nonce, HOST_NONCE_BYTES);
    base_write_bytes(&writer, proof, sizeof(proof));
    out->reply_size = writer.pos;
}

static enum host_channel_result input_hello(struct host_channel *channel,
                                            const uint8_t *data, size_t size,
                                            struct host_channel_out *out)
{
    uint32_t purpose = 0;
    enum host_refusal refusal = check_head(channel, data, size, &purpose);
    if (refusal == HOST_REFUSAL_VERSION)
        write_challenge(channel, out, false);
    if (refusal != HOST_REFUSAL_NONE)
        return refuse(channel, refusal);
    out->need = HOST_HELLO_BYTES;
    if (size < HOST_HELLO_BYTES)
        return HOST_CHANNEL_MORE;
    if (purpose == 0 || purpose > 31 || (channel->purposes >> purpose & 1) == 0)
        return refuse(channel, HOST_REFUSAL_PURPOSE);
    channel->purpose = purpose;
    memcpy(channel->client_nonce, data + 16, HOST_NONCE_BYTES);
    write_challenge(channel, out, true);
    channel->state = HOST_CHANNEL_WAIT_PROOF;
    out->used = HOST_HELLO_BYTES;
    return HOST_CHANNEL_STEP;
}

static enum host_channel_result input_challenge(struct host_channel *channel,
                                                const uint8_t *data, size_t size,
                                                struct host_channel_out *out)
{
    uint32_t zero = 0;
    enum host_refusal refusal = check_head(channel, data, size, &zero);
    if (refusal != HOST_REFUSAL_NONE)
        return refuse(channel, refusal);
    out->need = HOST_CHALLENGE_BYTES;
    if (size < HOST_CHALLENGE_BYTES)
        return HOST_CHANNEL_MORE;
    memcpy(channel->server_nonce, data + 16, HOST_NONCE_BYTES);
    uint8_t proof[HOST_PROOF_BYTES];
    derive(channel, "server", proof);
    if (sodium_memcmp(proof, data + 16 + HOST_NONCE_BYTES, HOST_PROOF_BYTES) != 0)
        return refuse(channel, HOST_REFUSAL_TOKEN);
    derive(channel, "client", out->reply);
    out->reply_size = HOST_PROOF_BYTES;
    out->used = HOST_CHALLENGE_BYTES;
    open_channel(channel);
    return HOST_CHANNEL_OPENED;
}

static enum host_channel_result input_proof(struct host_channel *channel,
                                            const uint8_t *data, size_t size,
                                            struct host_channel_out *out)
{
    out->need = HOST_PROOF_BYTES;
    if (size < HOST_PROOF_BYTES)
        return HOST_CHANNEL_MORE;
    uint8_t proof[HOST_PROOF_BYTES];
    derive(channel, "client", proof);
    if (sodium_memcmp(proof, data, HOST_PROOF_BYTES) != 0)
        return refuse(channel, HOST_REFUSAL_TOKEN);
    out->used = HOST_PROOF_BYTES;
    open_channel(channel);
    return HOST_CHANNEL_OPENED;
}

static void make_tag(const uint8_t key[HOST_KEY_BYTES], uint64_t number,
                     const uint8_t length[HOST_LENGTH_BYTES], const void *payload,
                     size_t size, uint8_t tag[HOST_TAG_BYTES])
{
    crypto_generichash_state state;
    uint8_t head[8];
    struct base_writer writer;
    base_writer_init(&writer, head, sizeof(head));
    base_write_u64(&writer, number);
    (void)crypto_generichash_init(&state, key, HOST_KEY_BYTES, HOST_TAG_BYTES);
    (void)crypto_generichash_update(&state, head, sizeof(head));
    (void)crypto_generichash_update(&state, length, HOST_LENGTH_BYTES);
    (void)crypto_generichash_update(&state, payload, size);
    (void)crypto_generichash_final(&state, tag, HOST_TAG_BYTES);
}

static enum host_channel_result input_frame(struct host_channel *channel,
                                            const uint8_t *data, size_t size,
                                            struct host_channel_out *out)
{
    out->need = HOST_FRAME_OVERHEAD;
    if (size < HOST_LENGTH_BYTES)
        return HOST_CHANNEL_MORE;
    struct base_reader reader;
    base_reader_init(&reader, data, size);
    size_t length = base_read_u32(&reader);
    if (length > channel->max_frame)
        return refuse(channel, HOST_REFUSAL_OVERSIZED);
    out->need = HOST_FRAME_OVERHEAD + length;
    if (size < out->need)
        return HOST_CHANNEL_MORE;
    uint8_t tag[HOST_TAG_BYTES];
    const uint8_t *payload = data + HOST_LENGTH_BYTES;
    make_tag(channel->receive_key, channel->num_received, data, payload, length, tag);
    if (sodium_memcmp(tag, payload + length, HOST_TAG_BYTES) != 0)
        return refuse(channel, HOST_REFUSAL_TAG);
    channel->num_received++;
    out->used = out->need;
    out->payload = payload;
    out->payload_size = length;
    return HOST_CHANNEL_FRAME;
}

enum host_channel_result host_channel_input(struct host_channel *channel,
                                            const void *data, size_t size,
                                            struct host_channel_out *out)
{
    out->used = out->need = out->payload_size = out->reply_size = 0;
    out->payload = NULL;
    switch (channel->state) {
    case HOST_CHANNEL_WAIT_HELLO:
        return input_hello(channel, data, size, out);
    case HOST_CHANNEL_WAIT_CHALLENGE:
        return input_challenge(channel, data, size, out);
    case HOST_CHANNEL_WAIT_PROOF:
        return input_proof(channel, data, size, out);
    case HOST_CHANNEL_READY:
        return input_frame(channel, data, size, out);
    case HOST_CHANNEL_REFUSED:
        break;
    }
    return HOST_CHANNEL_BAD;
}

void host_channel_seal(struct host_channel *channel, const void *payload, size_t size,
                       uint8_t length[HOST_LENGTH_BYTES], uint8_t tag[HOST_TAG_BYTES])
{
    struct base_writer writer;
    base_writer_init(&writer, length, HOST_LENGTH_BYTES);
    base_write_u32(&writer, (uint32_t)size);
    make_tag(channel->send_key, channel->num_sent++, length, payload, size, tag);
}

void host_channel_job_key(const uint8_t token[HOST_KEY_BYTES], uint32_t context,
                          uint8_t key[HOST_KEY_BYTES])
{
    uint8_t text[24] = "heddle job context";
    struct base_writer writer;
    base_writer_init(&writer, text + 20, 4);
    base_write_u32(&writer, context);
    (void)crypto_generichash(key, HOST_KEY_BYTES, text, sizeof(text), token,
                             HOST_KEY_BYTES);
}
