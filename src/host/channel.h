/* SPDX-License-Identifier: Apache-2.0 */
/* One authenticated byte stream: mutual proof of the token, then frames. No socket in it.
 */
#ifndef HOST_CHANNEL_H
#define HOST_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/*
 *   client                                                    server
 *   HELLO      "HEDDLE\r\n" version purpose client_nonce  -->
 *         <--  "HEDDLE\r\n" version 0 server_nonce proof(server)  CHALLENGE
 *   PROOF      proof(client)                               -->
 *   frames                                                <->  frames
 *
 *   frame      +------------+---------+--------------------------------------------+
 *              | u32 length | payload | tag: keyed hash of number, length, payload |
 *              +------------+---------+--------------------------------------------+
 *
 * proof(role) = keyed hash of role, version, purpose and both nonces; its key is the
 * job's. Each direction hashes with a key of its own, made from the job's key and the
 * nonces, and numbers its frames from 0 without sending the number: a frame that is
 * repeated, left out, moved or taken from another connection has a wrong tag. Magic and
 * version keep their place in every version, so that a stranger can be told which
 * versions met.
 */
enum {
    HOST_KEY_BYTES = 32,
    HOST_NONCE_BYTES = 32,
    HOST_PROOF_BYTES = 32,
    HOST_TAG_BYTES = 16,
    HOST_LENGTH_BYTES = 4,
    HOST_HELLO_BYTES = 16 + HOST_NONCE_BYTES,
    HOST_CHALLENGE_BYTES = 16 + HOST_NONCE_BYTES + HOST_PROOF_BYTES,
    HOST_HANDSHAKE_BYTES = HOST_CHALLENGE_BYTES, /* the longest step */
    HOST_FRAME_OVERHEAD = HOST_LENGTH_BYTES + HOST_TAG_BYTES
};

enum host_purpose {
    HOST_PURPOSE_AGENT = 1, /* TCP: agent to coordinator */
    HOST_PURPOSE_WATCH = 2, /* unix: closing it is evidence */
    HOST_PURPOSE_FETCH = 3  /* unix: asks for descriptors */
};

/* Why a stream was given up. */
enum host_refusal {
    HOST_REFUSAL_NONE = 0,
    HOST_REFUSAL_MAGIC,   /* not a Heddle process */
    HOST_REFUSAL_VERSION, /* another wire version */
    HOST_REFUSAL_PURPOSE, /* not served on this socket */
    HOST_REFUSAL_TOKEN,   /* the peer does not know the job's token */
    HOST_REFUSAL_TAG,     /* forged, repeated or damaged frame */
    HOST_REFUSAL_OVERSIZED,
    HOST_REFUSAL_TRUNCATED, /* ended inside a step or frame */
    HOST_REFUSAL_UNPROVEN,  /* hung up instead of proving that it knows the token */
    HOST_REFUSAL_SLOW,      /* handshake not finished in time */
    HOST_REFUSAL_USER       /* unix socket of another user */
};
const char *host_refusal_text(enum host_refusal refusal);

enum host_channel_state {
    HOST_CHANNEL_WAIT_HELLO,     /* server */
    HOST_CHANNEL_WAIT_CHALLENGE, /* client */
    HOST_CHANNEL_WAIT_PROOF,     /* server */
    HOST_CHANNEL_READY,          /* frames */
    HOST_CHANNEL_REFUSED
};

struct host_channel_opts {
    bool server;
    uint32_t purpose;     /* client: the one; server: bit mask of 1 << purpose */
    uint32_t version;     /* 0 = CTL_WIRE_VERSION; tests pretend others */
    size_t max_frame;     /* longest payload accepted */
    const uint8_t *key;   /* [HOST_KEY_BYTES], copied */
    const uint8_t *nonce; /* [HOST_NONCE_BYTES] own, fresh, copied */
};

/* Plain memory: no destructor but host_channel_wipe. */
struct host_channel {
    enum host_channel_state state;
    enum host_refusal refusal;
    bool server;
    uint32_t purpose; /* after the hello: the one in use */
    uint32_t purposes;
    uint32_t version;
    uint32_t peer_version;
    size_t max_frame;
    uint64_t num_sent;
    uint64_t num_received;
    uint8_t key[HOST_KEY_BYTES];
    uint8_t client_nonce[HOST_NONCE_BYTES];
    uint8_t server_nonce[HOST_NONCE_BYTES];
    uint8_t send_key[HOST_KEY_BYTES];
    uint8_t receive_key[HOST_KEY_BYTES];
};

void host_channel_init(struct host_channel *channel,
                       const struct host_channel_opts *opts);
void host_channel_wipe(struct host_channel *channel);

enum host_channel_result {
    HOST_CHANNEL_MORE,   /* nothing used: `need` bytes must be there in all */
    HOST_CHANNEL_STEP,   /* a step of the handshake was used */
    HOST_CHANNEL_OPENED, /* the last step was used: frames may be sent */
    HOST_CHANNEL_FRAME, /* a frame was used: `payload`, `payload_size` inside the input */
    HOST_CHANNEL_BAD    /* channel->refusal says why; nothing more will be accepted */
};

struct host_channel_out {
    size_t used; /* bytes taken from the front of the input */
    size_t need;
    const uint8_t *payload;
    size_t payload_size;
    uint8_t reply[HOST_HANDSHAKE_BYTES]; /* to be sent, also with BAD */
    size_t reply_size;
};

/* The client's first bytes: HELLO. A server has none. */
void host_channel_start(const struct host_channel *channel, struct host_channel_out *out);
/* Looks at the front of what has arrived and takes at most one step or frame. */
enum host_channel_result host_channel_input(struct host_channel *channel,
                                            const void *data, size_t size,
                                            struct host_channel_out *out);
/* Length and tag to be sent before and after the payload; numbers the frame. */
void host_channel_seal(struct host_channel *channel, const void *payload, size_t size,
                       uint8_t length[HOST_LENGTH_BYTES], uint8_t tag[HOST_TAG_BYTES]);

/* Key of one context of a job, from the token. */
void host_channel_job_key(const uint8_t token[HOST_KEY_BYTES], uint32_t context,
                          uint8_t key[HOST_KEY_BYTES]);

#endif
