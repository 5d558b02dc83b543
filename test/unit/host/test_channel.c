/* SPDX-License-Identifier: Apache-2.0 */
/* The handshake and the frames: what is accepted, and that nothing else is. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "ctl/msg.h"
#include "host/channel.h"

struct side {
    struct host_channel channel;
    uint8_t in[4096]; /* what the other side sent */
    size_t size;
};

struct pair {
    struct side client, server;
};

static void init_side(struct side *side, bool server, uint8_t key_byte, uint32_t version)
{
    uint8_t key[HOST_KEY_BYTES], nonce[HOST_NONCE_BYTES];
    memset(key, key_byte, sizeof(key));
    memset(nonce, server ? 's' : 'c', sizeof(nonce));
    struct host_channel_opts opts = {.server = server,
                                     .purpose = server ? 1u << HOST_PURPOSE_AGENT
                                                       : HOST_PURPOSE_AGENT,
                                     .version = version,
                                     .max_frame = 256,
                                     .key = key,
                                     .nonce = nonce};
    host_channel_init(&side->channel, &opts);
    side->size = 0;
}

static void put(struct side *to, const void *data, size_t size)
{
    assert_true(to->size + size <= sizeof(to->in));
    memcpy(to->in + to->size, data, size);
    to->size += size;
}

/* Feeds `feed` bytes at a time, as a slow network would. */
static enum host_channel_result turn(struct side *side, struct side *other, size_t feed)
{
    struct host_channel_out out;
    enum host_channel_result result = HOST_CHANNEL_MORE;
    for (size_t size = 0; result == HOST_CHANNEL_MORE && size < side->size;) {
        size = size + feed < side->size ? size + feed : side->size;
        result = host_channel_input(&side->channel, side->in, size, &out);
        put(other, out.reply, out.reply_size);
        if (result == HOST_CHANNEL_MORE)
            assert_true(out.need > size);
    }
    if (out.used > 0) {
        memmove(side->in, side->in + out.used, side->size - out.used);
        side->size -= out.used;
    }
    return result;
}

static void start(struct pair *pair)
{
    struct host_channel_out out;
    host_channel_start(&pair->client.channel, &out);
    put(&pair->server, out.reply, out.reply_size);
}

static void open_pair(struct pair *pair, size_t feed)
{
    init_side(&pair->client, false, 7, 0);
    init_side(&pair->server, true, 7, 0);
    start(pair);
    assert_int_equal(turn(&pair->server, &pair->client, feed), HOST_CHANNEL_STEP);
    assert_int_equal(turn(&pair->client, &pair->server, feed), HOST_CHANNEL_OPENED);
    assert_int_equal(turn(&pair->server, &pair->client, feed), HOST_CHANNEL_OPENED);
    assert_int_equal(pair->client.size, 0);
    assert_int_equal(pair->server.size, 0);
}

static void send_frame(struct side *from, struct side *to, const void *data, size_t size)
{
    uint8_t length[HOST_LENGTH_BYTES], tag[HOST_TAG_BYTES];
    host_channel_seal(&from->channel, data, size, length, tag);
    put(to, length, sizeof(length));
    put(to, data, size);
    put(to, tag, sizeof(tag));
}

static void expect_frame(struct side *side, const char *text)
{
    struct host_channel_out out;
    assert_int_equal(host_channel_input(&side->channel, side->in, side->size, &out),
                     HOST_CHANNEL_FRAME);
    assert_int_equal(out.payload_size, strlen(text));
    assert_memory_equal(out.payload, text, out.payload_size);
    memmove(side->in, side->in + out.used, side->size - out.used);
    side->size -= out.used;
}

static void expect_bad(struct side *side, enum host_refusal refusal)
{
    struct host_channel_out out;
    assert_int_equal(host_channel_input(&side->channel, side->in, side->size, &out),
                     HOST_CHANNEL_BAD);
    assert_int_equal(side->channel.refusal, refusal);
    /* And it stays so. */
    assert_int_equal(host_channel_input(&side->channel, side->in, side->size, &out),
                     HOST_CHANNEL_BAD);
}

static void frames_go_both_ways(void **state)
{
    (void)state;
    for (size_t feed = 1; feed < 100; feed = feed * 3 + 1) {
        struct pair pair;
        open_pair(&pair, feed);
        send_frame(&pair.client, &pair.server, "one", 3);
        send_frame(&pair.client, &pair.server, "", 0);
        send_frame(&pair.server, &pair.client, "answer", 6);
        expect_frame(&pair.server, "one");
        expect_frame(&pair.server, "");
        expect_frame(&pair.client, "answer");
    }
}

static void wrong_token_is_refused(void **state)
{
    (void)state;
    struct pair pair;
    init_side(&pair.client, false, 7, 0);
    init_side(&pair.server, true, 8, 0);
    start(&pair);
    assert_int_equal(turn(&pair.server, &pair.client, 1000), HOST_CHANNEL_STEP);
    expect_bad(&pair.client, HOST_REFUSAL_TOKEN);
    uint8_t guess[HOST_PROOF_BYTES] = {0};
    put(&pair.server, guess, sizeof(guess));
    expect_bad(&pair.server, HOST_REFUSAL_TOKEN);
}

static void versions_are_told_to_both(void **state)
{
    (void)state;
    struct pair pair;
    init_side(&pair.client, false, 7, CTL_WIRE_VERSION + 1);
    init_side(&pair.server, true, 7, 0);
    start(&pair);
    assert_int_equal(turn(&pair.server, &pair.client, 1000), HOST_CHANNEL_BAD);
    assert_int_equal(pair.server.channel.refusal, HOST_REFUSAL_VERSION);
    assert_int_equal(pair.server.channel.peer_version, CTL_WIRE_VERSION + 1);
    expect_bad(&pair.client, HOST_REFUSAL_VERSION);
    assert_int_equal(pair.client.channel.peer_version, CTL_WIRE_VERSION);
}

static void garbage_is_refused_at_its_first_byte(void **state)
{
    (void)state;
    static const char *const garbage[] = {"GET / HTTP/1.1\r\n", "H", "HEDDLE\n\n",
                                          "\377\377"};
    struct side server;
    for (size_t i = 0; i < 4; i++) {
        init_side(&server, true, 7, 0);
        put(&server, garbage[i], strlen(garbage[i]));
        struct host_channel_out out;
        enum host_channel_result result =
            host_channel_input(&server.channel, server.in, server.size, &out);
        assert_int_equal(result, i == 1 ? HOST_CHANNEL_MORE : HOST_CHANNEL_BAD);
        assert_int_equal(out.reply_size, 0);
    }
}

static void foreign_purpose_is_refused(void **state)
{
    (void)state;
    struct pair pair;
    init_side(&pair.client, false, 7, 0);
    init_side(&pair.server, true, 7, 0);
    pair.client.channel.purpose = HOST_PURPOSE_FETCH;
    start(&pair);
    expect_bad(&pair.server, HOST_REFUSAL_PURPOSE);
}

static void every_flipped_bit_is_seen(void **state)
{
    (void)state;
    for (size_t bit = 0; bit < 8 * (HOST_FRAME_OVERHEAD + 5); bit++) {
        struct pair pair;
        open_pair(&pair, 1000);
        send_frame(&pair.client, &pair.server, "hello", 5);
        pair.server.in[bit / 8] ^= (uint8_t)(1u << bit % 8);
        struct host_channel_out out;
        /* A longer length may only make it wait for bytes that never come. */
        assert_int_not_equal(host_channel_input(&pair.server.channel, pair.server.in,
                                                pair.server.size, &out),
                             HOST_CHANNEL_FRAME);
    }
}

static void repeated_and_moved_frames_are_refused(void **state)
{
    (void)state;
    struct pair pair;
    open_pair(&pair, 1000);
    send_frame(&pair.client, &pair.server, "first", 5);
    uint8_t copy[64];
    size_t size = pair.server.size;
    memcpy(copy, pair.server.in, size);
    expect_frame(&pair.server, "first");
    put(&pair.server, copy, size);
    expect_bad(&pair.server, HOST_REFUSAL_TAG);

    /* Left out: the second without the first. */
    open_pair(&pair, 1000);
    send_frame(&pair.client, &pair.server, "first", 5);
    pair.server.size = 0;
    send_frame(&pair.client, &pair.server, "second", 6);
    expect_bad(&pair.server, HOST_REFUSAL_TAG);

    /* Reflected: one's own frame comes back. */
    open_pair(&pair, 1000);
    send_frame(&pair.client, &pair.client, "mine", 4);
    expect_bad(&pair.client, HOST_REFUSAL_TAG);
}

/* A recorded session means nothing to a server with a fresh nonce. */
static void replayed_session_is_refused(void **state)
{
    (void)state;
    struct pair pair, again;
    open_pair(&pair, 1000);
    init_side(&again.client, false, 7, 0);
    init_side(&again.server, true, 7, 0);
    memset(again.server.channel.server_nonce, 'S', HOST_NONCE_BYTES);
    start(&again);
    assert_int_equal(turn(&again.server, &again.client, 1000), HOST_CHANNEL_STEP);
    /* The proof of the first session: made by a client of the first server nonce. */
    struct host_channel_out out;
    struct side first_server;
    init_side(&first_server, true, 7, 0);
    init_side(&again.client, false, 7, 0);
    again.client.size = 0;
    host_channel_start(&again.client.channel, &out);
    put(&first_server, out.reply, out.reply_size);
    assert_int_equal(turn(&first_server, &again.client, 1000), HOST_CHANNEL_STEP);
    assert_int_equal(turn(&again.client, &again.server, 1000), HOST_CHANNEL_OPENED);
    expect_bad(&again.server, HOST_REFUSAL_TOKEN);
}

static void oversized_frames_are_refused_by_their_length(void **state)
{
    (void)state;
    struct pair pair;
    open_pair(&pair, 1000);
    uint8_t length[4] = {1, 1, 0, 0};
    put(&pair.server, length, sizeof(length));
    expect_bad(&pair.server, HOST_REFUSAL_OVERSIZED);
    open_pair(&pair, 1000);
    memset(length, 0xff, sizeof(length));
    put(&pair.server, length, sizeof(length));
    expect_bad(&pair.server, HOST_REFUSAL_OVERSIZED);
}

static void contexts_of_a_job_have_different_keys(void **state)
{
    (void)state;
    uint8_t token[HOST_KEY_BYTES] = {1}, a[HOST_KEY_BYTES], b[HOST_KEY_BYTES];
    host_channel_job_key(token, 0, a);
    host_channel_job_key(token, 1, b);
    assert_memory_not_equal(a, b, sizeof(a));
    host_channel_job_key(token, 0, b);
    assert_memory_equal(a, b, sizeof(a));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_go_both_ways),
        cmocka_unit_test(wrong_token_is_refused),
        cmocka_unit_test(versions_are_told_to_both),
        cmocka_unit_test(garbage_is_refused_at_its_first_byte),
        cmocka_unit_test(foreign_purpose_is_refused),
        cmocka_unit_test(every_flipped_bit_is_seen),
        cmocka_unit_test(repeated_and_moved_frames_are_refused),
        cmocka_unit_test(replayed_session_is_refused),
        cmocka_unit_test(oversized_frames_are_refused_by_their_length),
        cmocka_unit_test(contexts_of_a_job_have_different_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
