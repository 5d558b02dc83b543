/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of the fabric transport, shared by its files. */
#ifndef NET_FABRIC_IMPL_H
#define NET_FABRIC_IMPL_H

#include "net/fabric.h"
#include "net/fabric_lib.h"
#include "net/fabric_wire.h"

/*
 *  remote (peer's window) --> link (peer's context)
 *                               messages  numbered, kept until acknowledged:
 *                                         [base .. post) handed to the provider,
 *                                         [post .. tail) waiting
 *                               writes    puts too large for a message; cut into pieces
 *                               offers    pieces on their way: copies of the payload that
 *                                         the peer reads
 *                               arrivals  the peer's offers, being read, in their order
 *
 * The provider never sees memory but that of this transport, so a put that ends early
 * leaves nobody in the application's memory, on neither side. All of it is guarded by
 * fabric->lock.
 */

enum {
    FABRIC_LINK_WINDOW = 64, /* unacknowledged messages of a link */
    FABRIC_ACK_EVERY = 16,
    FABRIC_TELL_LAZY = 4,   /* lazy offers that are told of at once */
    FABRIC_TELL_LARGE = 4,  /* large messages that are */
    FABRIC_MOST_LARGE = 16, /* unacknowledged ones of a link */
    FABRIC_RECEIVES = 96,
    FABRIC_WRITES = 128,
    FABRIC_OFFERS = 8, /* of a link, not taken yet */
    FABRIC_SMALL_PAYLOAD = 256,
    FABRIC_BUCKETS = 64
};

/* Buffers of messages come in three sizes, by payload: up to FABRIC_SMALL_PAYLOAD,
 * NET_EAGER_BYTES, and what the provider takes. */
enum fabric_size { FABRIC_SMALL, FABRIC_MEDIUM, FABRIC_LARGE, FABRIC_SIZES };

enum fabric_op_kind { FABRIC_OP_MESSAGE = 1, FABRIC_OP_RECEIVE, FABRIC_OP_READ };

/* First member of everything posted: the provider's context, and what it is. */
struct fabric_op {
    struct fi_context2 context;
    enum fabric_op_kind kind;
};

struct fabric_message {
    struct fabric_op op;
    struct base_list node; /* in a free list */
    struct fabric_link *link;
    uint32_t seq;
    uint32_t length;
    enum fabric_size size;
    bool open;   /* parts may be added: the provider never had it */
    bool offers; /* has an offer */
    bool posted; /* the provider has it */
    bool acked;  /* free as soon as it is not posted */
    int64_t posted_at;
    void *desc;
    uint8_t *bytes;
};

struct fabric_receive {
    struct fabric_op op;
    uint8_t *bytes;
};

struct fabric_write {
    struct base_list node;        /* of its link, or the free list */
    struct base_list remote_node; /* of its remote, in put order */
    struct fabric_link *link;
    struct net_fabric_remote *remote;
    const uint8_t *src;
    size_t bytes;
    size_t offered;
    size_t taken;
    uint64_t ticket;
    bool lazy;
    struct net_wire_put put;
};

enum fabric_piece_state {
    FABRIC_PIECE_WAITING = 1,
    FABRIC_PIECE_POSTED,
    FABRIC_PIECE_READ
};

/* Memory for one piece and the stamp behind it: the copy that is offered to a peer, or
 * what is read from one. */
struct fabric_piece {
    struct fabric_op op;
    struct base_list node; /* offers or arrivals of a link, or the free list */
    struct base_list all;
    uint8_t *bytes;
    struct fid_mr *mr;
    struct fabric_link *link; /* NULL: nobody waits for the read any more */
    struct net_wire_offer offer;
    size_t length;
    struct fabric_write *write;   /* offered: NULL if its remote was closed */
    struct net_wire_put put;      /* arriving: where it goes, */
    struct net_wire_offer wanted; /* and comes from */
    enum fabric_piece_state state;
};

struct fabric_link {
    struct base_list node; /* all links */
    struct base_list busy; /* those that poll must look at */
    uint64_t net_id;
    uint64_t secret;
    fi_addr_t fi_addr;
    uint32_t users; /* remotes */
    bool opened;    /* had users: without any it is over */

    struct fabric_message **ring; /* FABRIC_LINK_WINDOW; NULL while nobody needs it */
    uint32_t base, post, tail;
    uint32_t num_large; /* of them, in large buffers */
    bool restart;       /* messages were given up: the next one is a HELLO that says so */
    struct base_list writes;
    struct base_list offers;
    uint32_t num_offers, last_offer;
    struct base_list arrivals;
    uint32_t num_arrivals, taken, taken_told;

    uint32_t expected; /* next number to arrive */
    uint32_t ack_owed;
    bool gap_seen;
    int64_t owed_since;

    int64_t down_since; /* 0 = up */
    int64_t retry_at;
    int64_t backoff;
    int64_t resend_after;
    int64_t probed_at;
    uint32_t unsaid;  /* probes in a row that found no room */
    int64_t heard_at; /* last message, or question why there is none; 0 = not looked at */
    uint32_t address_length;
    uint8_t address[];
};

struct net_fabric_remote {
    struct fabric_link *link;
    struct hdl_peer_window *owner;
    uint64_t window_id;
    uint64_t key;
    struct base_list writes;
    _Atomic uint64_t done;
    _Atomic int64_t down_since;
    struct base_list node; /* remotes of the fabric */
};

struct net_fabric {
    struct net *net;
    struct base_env *env;
    struct net_fabric_lib lib;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *endpoint;
    int wait_fd;
    size_t eager; /* payload of a message: NET_LONG_BYTES or NET_EAGER_BYTES */
    /* libfabric before 1.12: connections of ofi_rxm do not show in the queue's
     * descriptor, and one that breaks while the peer reads from here crashes it. */
    bool hidden, reads;
    int64_t nap;    /* of the one thread that sleeps for all */
    uint64_t heard; /* `arrived` at the last nap */
    /* test hooks */
    bool held;
    uint32_t lose;
    struct fabric_link *lose_link;
    char provider[NET_MAX_PROVIDER];
    char transport[NET_MAX_PROVIDER + 8];
    uint8_t address[NET_MAX_ADDRESS];
    uint32_t address_length;
    uint64_t secret;
    struct net_fabric_counters counters;
    uint64_t arrived; /* puts carried out */
    uint64_t stamp;   /* of the last offer */
    int64_t ask_at;   /* all peers, without a control plane */

    _Atomic uint32_t lock;
    _Atomic uint32_t num_windows;
    struct base_list links;
    struct base_list busy;
    struct base_list remotes;
    struct base_list windows[FABRIC_BUCKETS];

    struct base_list free_messages[FABRIC_SIZES];
    struct base_list free_writes, free_pieces;
    struct base_list slabs, pieces;
    struct fabric_write *writes;
    struct fabric_receive *receives;
    uint8_t *receive_bytes;
    size_t receive_stride;
    struct fid_mr *receive_mr;
};

/* fabric.c */
void fabric_lock(struct net_fabric *fabric);
void fabric_unlock(struct net_fabric *fabric);
const char *fabric_error(const struct net_fabric *fabric, ssize_t error);
/* Under a key that nobody guesses, unless the provider insists on its own. */
enum hdl_status fabric_register(struct net_fabric *fabric, void *data, size_t bytes,
                                uint64_t access, struct fid_mr **mr);

/* fabric_pool.c */
size_t fabric_message_room(const struct net_fabric *fabric, enum fabric_size size);
struct fabric_message *fabric_message_get(struct net_fabric *fabric, size_t payload);
void fabric_message_put(struct net_fabric *fabric, struct fabric_message *message);
/* Empty lists; create and free may then be called in any state. */
void fabric_pool_init(struct net_fabric *fabric);
enum hdl_status fabric_pool_create(struct net_fabric *fabric);
void fabric_pool_close(struct net_fabric *fabric); /* registrations, before the domain */
void fabric_pool_free(struct net_fabric *fabric);
/* NULL: no memory. */
struct fabric_piece *fabric_piece_get(struct net_fabric *fabric);
/* Its payload may be overwritten from now on; who still reads it finds out. */
void fabric_piece_put(struct net_fabric *fabric, struct fabric_piece *piece);

/* fabric_link.c */
struct fabric_link *fabric_link_find(struct net_fabric *fabric, uint64_t net_id);
enum hdl_status fabric_link_open(struct net_fabric *fabric, uint64_t net_id,
                                 uint64_t secret, const uint8_t *address,
                                 uint32_t address_length, struct fabric_link **link);
void fabric_link_free(struct net_fabric *fabric, struct fabric_link *link);
/* Payload of a message now. */
size_t fabric_link_most(const struct net_fabric *fabric, const struct fabric_link *link);
/* Without users and messages it keeps its numbers only. */
void fabric_link_rest(struct net_fabric *fabric, struct fabric_link *link);
/*
 * Room of `bytes` for a part of a PUT: in the newest message if that has not gone, else
 * in a new one. To be filled before the lock is given away; fabric_link_go posts it, or
 * the next poll. NULL: no memory.
 */
uint8_t *fabric_link_add(struct net_fabric *fabric, struct fabric_link *link,
                         size_t bytes, bool offer);
void fabric_link_go(struct net_fabric *fabric, struct fabric_link *link);
/* Room for `count` more messages, the HELLO counted? */
bool fabric_link_room(const struct fabric_link *link, uint32_t count);
void fabric_link_acknowledged(struct net_fabric *fabric, struct fabric_link *link,
                              uint32_t ack, bool resend);
void fabric_link_fail(struct net_fabric *fabric, struct fabric_link *link,
                      const char *what, ssize_t error);
/* Has something to send, or an acknowledgement to give. */
void fabric_link_set_busy(struct net_fabric *fabric, struct fabric_link *link);
void fabric_link_alive(struct net_fabric *fabric, struct fabric_link *link);
/* Without a control plane, now and then: whether the peers of open windows live. */
void fabric_links_ask(struct net_fabric *fabric);
/* Posts, retries, acknowledges, resends: whatever is due. */
void fabric_link_attend(struct net_fabric *fabric, struct fabric_link *link, bool idle,
                        int64_t now);
void fabric_link_ping(struct net_fabric *fabric, struct fabric_link *link);
void fabric_link_send_ack(struct net_fabric *fabric, struct fabric_link *link);
/* Earliest time something is due; BASE_FOREVER = nothing. */
int64_t fabric_link_timer(const struct fabric_link *link);
void fabric_message_done(struct net_fabric *fabric, struct fabric_message *message,
                         int error);

/* fabric_piece.c: payloads that the peer reads. */
/* Could a put of so many bytes, a piece at most, go out now behind `before` more
 * messages?
 */
bool fabric_offer_room(const struct net_fabric *fabric, const struct fabric_link *link,
                       size_t bytes, uint32_t before);
/* Offers what there is room for. */
void fabric_offer_writes(struct net_fabric *fabric, struct fabric_link *link);
void fabric_offers_taken(struct net_fabric *fabric, struct fabric_link *link,
                         uint16_t taken);
/* Forgets puts that are not over: none of their sources is looked at again. */
void fabric_offers_drop(struct net_fabric *fabric, struct net_fabric_remote *remote);
/* The peer is gone: what was offered may be overwritten, what it offered is not read. */
void fabric_pieces_give_up(struct net_fabric *fabric, struct fabric_link *link);
/* False: no memory. */
bool fabric_arrival_add(struct net_fabric *fabric, struct fabric_link *link,
                        const struct net_wire_part *offered);
/* Posts reads, `most` at most. */
void fabric_arrivals_attend(struct net_fabric *fabric, struct fabric_link *link,
                            uint32_t most);
/* The link is back: what the provider still holds is read again. */
void fabric_arrivals_again(struct net_fabric *fabric, struct fabric_link *link);
void fabric_read_done(struct net_fabric *fabric, struct fabric_piece *piece, int error);

/* hooks.c: true if a test has the completion disappear. */
bool fabric_test_loses(struct net_fabric *fabric, struct fabric_op *op);

/* fabric_receive.c */
/* Checks the put, carries it out with its payload. */
void fabric_carry_out(struct net_fabric *fabric, const struct net_wire_put *put,
                      const uint8_t *payload);
void fabric_receive_post(struct net_fabric *fabric, struct fabric_receive *receive);
void fabric_receive_done(struct net_fabric *fabric, struct fabric_receive *receive,
                         size_t length);

#endif /* NET_FABRIC_IMPL_H */
