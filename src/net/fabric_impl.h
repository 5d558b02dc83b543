/* SPDX-License-Identifier: Apache-2.0 */
/* The objects of the fabric transport, shared by its files. */
#ifndef NET_FABRIC_IMPL_H
#define NET_FABRIC_IMPL_H

#include "net/fabric.h"
#include "net/fabric_lib.h"
#include "net/fabric_wire.h"

/*
 *  remote (peer's window) --> link (peer's context) --> messages: numbered, kept until
 * acknowledged |                  [base .. post) handed to the provider | [post .. tail)
 * waiting
 *                                    +--> writes: payload too large for a message; the
 * put's signal follows as a message when the write is delivered, so a broken link cannot
 * part them
 *
 * All of it is guarded by fabric->lock.
 */

enum {
    FABRIC_LINK_WINDOW = 64, /* unacknowledged messages of a link */
    FABRIC_ACK_EVERY = 16,
    FABRIC_RECEIVES = 96,
    FABRIC_WRITES = 128,
    FABRIC_SMALL_PAYLOAD = 256,
    FABRIC_SLAB = 32,
    FABRIC_BUCKETS = 64
};

enum fabric_op_kind { FABRIC_OP_MESSAGE = 1, FABRIC_OP_RECEIVE, FABRIC_OP_WRITE };

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
    bool large;
    bool posted; /* the provider has it */
    bool acked;  /* free as soon as it is not posted */
    int64_t posted_at;
    void *desc;
    uint8_t *bytes;
};

struct fabric_receive {
    struct fabric_op op;
    bool posted;
    uint8_t *bytes;
};

enum fabric_write_state {
    FABRIC_WRITE_WAITING = 1,
    FABRIC_WRITE_POSTED,
    FABRIC_WRITE_DELIVERED
};

struct fabric_write {
    struct fabric_op op;
    struct base_list node;        /* of its link, or the free list */
    struct base_list remote_node; /* of its remote, in put order */
    struct fabric_link *link;
    struct net_fabric_remote *remote; /* NULL: it was closed */
    enum fabric_write_state state;
    const uint8_t *src;
    size_t bytes;
    size_t done; /* delivered */
    size_t part; /* being delivered */
    size_t offset;
    uint64_t mr_key;
    uint64_t mr_base;
    uint64_t ticket;
    struct net_wire_put signal;
    struct fid_mr *local; /* where the provider wants sources registered */
};

struct fabric_link {
    struct base_list node; /* all links */
    struct base_list busy; /* those that poll must look at */
    uint64_t net_id;
    uint64_t secret;
    uint8_t address[NET_MAX_ADDRESS];
    uint32_t address_length;
    fi_addr_t fi_addr;
    uint32_t users; /* remotes */

    struct fabric_message *ring[FABRIC_LINK_WINDOW];
    uint32_t base, post, tail;
    struct base_list writes;

    uint32_t expected; /* next number to arrive */
    uint32_t ack_owed;
    bool gap_seen;
    int64_t owed_since;

    int64_t down_since; /* 0 = up */
    int64_t retry_at;
    int64_t backoff;
    int64_t resend_after;
};

struct net_fabric_remote {
    struct fabric_link *link;
    struct hdl_peer_window *owner;
    uint64_t window_id;
    uint64_t key;
    struct net_exposed memory; /* the whole window */
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
    struct fid_ep *ep;
    int wait_fd;
    bool local_mr;
    bool held; /* test hook */
    char provider[NET_MAX_PROVIDER];
    char transport[NET_MAX_PROVIDER + 8];
    uint8_t address[NET_MAX_ADDRESS];
    uint32_t address_length;
    uint64_t secret;
    struct net_fabric_counters counters;
    uint64_t arrived; /* puts carried out */

    _Atomic uint32_t lock;
    _Atomic uint32_t num_windows;
    struct base_list links;
    struct base_list busy;
    struct base_list remotes;
    struct base_list windows[FABRIC_BUCKETS];

    struct base_list free_small, free_large, free_writes;
    struct base_list slabs;
    struct fabric_write *writes;
    struct fabric_receive *receives;
    uint8_t *receive_bytes;
    struct fid_mr *receive_mr;
};

/* fabric.c */
void fabric_lock(struct net_fabric *fabric);
bool fabric_trylock(struct net_fabric *fabric);
void fabric_unlock(struct net_fabric *fabric);
const char *fabric_error(const struct net_fabric *fabric, ssize_t error);

/* fabric_pool.c */
struct fabric_message *fabric_message_get(struct net_fabric *fabric, size_t payload);
void fabric_message_put(struct net_fabric *fabric, struct fabric_message *message);
/* Empty lists; create and free may then be called in any state. */
void fabric_pool_init(struct net_fabric *fabric);
enum hdl_status fabric_pool_create(struct net_fabric *fabric);
void fabric_pool_close(struct net_fabric *fabric); /* registrations, before the domain */
void fabric_pool_free(struct net_fabric *fabric);
struct fabric_write *fabric_write_get(struct net_fabric *fabric);
void fabric_write_free(struct net_fabric *fabric, struct fabric_write *write);

/* fabric_link.c */
struct fabric_link *fabric_link_find(struct net_fabric *fabric, uint64_t net_id);
enum hdl_status fabric_link_open(struct net_fabric *fabric, uint64_t net_id,
                                 uint64_t secret, const uint8_t *address,
                                 uint32_t address_length, struct fabric_link **link);
void fabric_link_free(struct net_fabric *fabric, struct fabric_link *link);
/* Room for `count` more messages, the HELLO counted? */
bool fabric_link_room(const struct fabric_link *link, uint32_t count);
/* A numbered message with its head filled, ready for a body of `body` bytes. NULL: no
 * memory. */
struct fabric_message *fabric_link_message(struct net_fabric *fabric,
                                           struct fabric_link *link,
                                           enum net_wire_kind kind, size_t body);
/* Queues it behind the others (and the HELLO, if it is the first), and posts what it can.
 */
bool fabric_link_send(struct net_fabric *fabric, struct fabric_link *link,
                      struct fabric_message *message);
void fabric_link_acknowledged(struct net_fabric *fabric, struct fabric_link *link,
                              uint32_t ack, bool resend);
void fabric_link_fail(struct net_fabric *fabric, struct fabric_link *link,
                      const char *what, ssize_t error);
void fabric_link_alive(struct net_fabric *fabric, struct fabric_link *link);
/* Posts, retries, acknowledges, resends: whatever is due. */
void fabric_link_attend(struct net_fabric *fabric, struct fabric_link *link, bool idle,
                        int64_t now);
void fabric_link_send_ack(struct net_fabric *fabric, struct fabric_link *link);
/* Earliest time something is due; BASE_FOREVER = nothing. */
int64_t fabric_link_timer(const struct fabric_link *link);
void fabric_message_done(struct net_fabric *fabric, struct fabric_message *message,
                         int error);
void fabric_write_done(struct net_fabric *fabric, struct fabric_write *write, int error);

/* fabric_receive.c */
void fabric_receive_post(struct net_fabric *fabric, struct fabric_receive *receive);
void fabric_receive_done(struct net_fabric *fabric, struct fabric_receive *receive,
                         size_t length);

#endif /* NET_FABRIC_IMPL_H */
