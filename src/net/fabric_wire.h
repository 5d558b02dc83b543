/* SPDX-License-Identifier: Apache-2.0 */
/* Messages between the fabric transports of two contexts, and the check of what arrives.
 */
#ifndef NET_FABRIC_WIRE_H
#define NET_FABRIC_WIRE_H

#include "net/internal.h"

#include <assert.h>

/*
 *  | net_wire 32 B | body by kind                                  |
 *                  | HELLO: secret, address of the sender          |
 *                  | PUT:   one or more parts, each a net_wire_put |
 *                  |        72 B and its payloads, or an offer:    |
 *                  |        net_wire_put, net_wire_offer, for a    |
 *                  |        payload that waits to be read; at most |
 *                  |        one offer in a message                 |
 *                  | ACK:   nothing; not in the sequence (seq 0)   |
 *                  | PING:  nothing; asks for an ACK               |
 *                  | PROBE: nothing; seq is that of the next one:  |
 *                  |        says what must have arrived            |
 *
 * Messages of a link (a pair of contexts, one direction) are numbered from 1, kept by the
 * sender until acknowledged, sent again after a broken connection and dropped by the
 * receiver if it has had them. Number 1 is always the HELLO, also each time they wrap. A
 * sender that gave up what was not acknowledged goes on with a HELLO flagged RESTART.
 * Little-endian, as both hosts are.
 */
enum net_wire_kind {
    NET_WIRE_HELLO = 1,
    NET_WIRE_PUT = 2,
    NET_WIRE_ACK = 3,
    NET_WIRE_PING = 4,
    NET_WIRE_PROBE = 5
};
enum {
    NET_WIRE_RESEND = 1, /* flag of ACK: a gap was seen */
    NET_WIRE_RESTART = 1 /* flag of HELLO: the numbers before it will not come */
};

#define NET_WIRE_MAGIC UINT32_C(0x32444c48)
#define NET_WIRE_OFFERED UINT32_C(0x80000000) /* with `op`: an offer follows */

struct net_wire {
    uint32_t magic;
    uint8_t kind;
    uint8_t flags;
    uint16_t taken;  /* the last offer carried out: low bits of its number */
    uint64_t source; /* id of the sending context */
    uint64_t secret; /* of the receiving context, from one of its handles */
    uint32_t seq;
    uint32_t ack; /* all up to here have arrived */
};
static_assert(sizeof(struct net_wire) == 32, "wire format");

struct net_wire_hello {
    uint64_t secret; /* of the sender, for what is sent back */
    uint32_t address_length;
    uint32_t reserved;
    uint8_t address[NET_MAX_ADDRESS];
};
static_assert(sizeof(struct net_wire_hello) == 16 + NET_MAX_ADDRESS, "wire format");

struct net_wire_put {
    uint64_t window_id;
    uint64_t key;
    uint64_t offset;
    uint64_t signal_offset; /* UINT64_MAX = none */
    uint64_t value;
    uint32_t bytes;
    uint32_t op;
    uint64_t offset2; /* a second block, its payload behind the first */
    uint32_t bytes2;
    uint32_t slot;   /* of the writer, */
    uint64_t writer; /* who must be the one admitted there */
};
static_assert(sizeof(struct net_wire_put) == 72, "wire format");

/* Where the sender's copy of the payload lies, followed by the stamp: if that is another,
 * the sender has given the offer up and uses the memory for something else. */
struct net_wire_offer {
    uint64_t address;
    uint64_t mr_key;
    uint64_t stamp;
    uint32_t number;
    uint32_t lazy; /* the sender need not know at once that it was taken */
};
static_assert(sizeof(struct net_wire_offer) == 32, "wire format");

/* Payload of a message where the provider puts what arrives straight into the buffer that
 * was posted for it: 64 KiB, and what describes it. */
#define NET_LONG_BYTES 69632
enum {
    NET_WIRE_HEADS = (int)(sizeof(struct net_wire) + sizeof(struct net_wire_put)),
    NET_WIRE_MAX = NET_WIRE_HEADS + NET_EAGER_BYTES,
    NET_WIRE_LONG = NET_WIRE_HEADS + NET_LONG_BYTES
};

struct net_wire_part {
    struct net_wire_put put;
    bool offered;
    const uint8_t *payload;      /* not offered */
    struct net_wire_offer offer; /* offered */
};

/* A message that may be looked at: lengths agree with the kind, the secret is right. */
struct net_wire_view {
    struct net_wire head;
    const struct net_wire_hello *hello;
    const uint8_t *parts; /* of a PUT */
    size_t parts_bytes;
    struct net_wire_part offered; /* the one part that is, if `offered` in it */
};
bool net_wire_parse(const void *data, size_t length, uint64_t secret,
                    struct net_wire_view *view);
/* The next part of a PUT. False if there is none, or none that is well formed. */
bool net_wire_next(const uint8_t **at, size_t *left, struct net_wire_part *part);
/* Is the put inside a window of `bytes`, its signal aligned, its operator known? */
bool net_wire_put_fits(const struct net_wire_put *put, size_t bytes);

#endif /* NET_FABRIC_WIRE_H */
