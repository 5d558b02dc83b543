/* SPDX-License-Identifier: Apache-2.0 */
/* Transports of a context: windows, peers' windows, put, signal, flush, polling,
 * sleeping. */
#ifndef HEDDLE_NET_NET_H
#define HEDDLE_NET_NET_H

#include "heddle.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 *     own process                                  a peer
 *     struct net --- struct hdl_window --pack--> handle --net_remote_open-->
 *         |          memfd, fabric key             struct hdl_peer_window
 *         |                                        self, shm (mapped), fabric (messaged)
 *         +--------- bell of all windows: how peers of the host wake this process
 *
 * Threads. Every function may be called from any thread. Mapped peers need no lock; calls
 * for messaged peers and net_poll take the fabric's lock, one uncontended
 * compare-and-swap when the engine's lock is held anyway.
 *
 * The window and peer window of the public interface are net's own objects: hdl_put and
 * the like (public.c) are thin loops around the functions here.
 */

struct base_env;
struct net;

#define NET_HANDLE_BYTES HDL_WINDOW_HANDLE_BYTES
#define NET_NO_SIGNAL SIZE_MAX
/* Payload up to here goes as one message on every provider: 4 KiB and a slot's header.
 * Some hold thousands of buffers for such messages, so a larger one costs every rank
 * megabytes. */
#define NET_EAGER_BYTES 4352
/* Payload up to here is copied by net_put at once: its source is free when it returns. */
#define NET_PIECE_BYTES ((size_t)256 * 1024)

/* What identifies this process to others, and how descriptors travel; filled by lib.c. */
struct net_exchange {
    void *user;
    uint8_t host_id[16];  /* equal = descriptors can be passed, memory shared */
    char socket_name[64]; /* of the control thread's unix socket, without leading 0 */
    int32_t pid;
    int32_t rank;                       /* of the job; -1 = unknown */
    uint64_t (*rank_epoch)(void *user); /* this process's now; NULL = 0 */
    char
        interface_address[64]; /* numeric address fabric listens on; "" = fabric is off */
    /* Asks the process behind socket_name for the descriptor it offers as (id, key).
     * HDL_EPEER: gone; HDL_EINVAL: no such id or key; HDL_ETIMEDOUT. Blocking. */
    enum hdl_status (*fetch)(void *user, const char *socket_name, uint64_t id,
                             uint64_t key, int64_t timeout_ns, int *fd);
    /* Makes fd available to peers until withdrawn; the descriptor stays the caller's. */
    enum hdl_status (*offer)(void *user, uint64_t id, uint64_t key, int fd);
    void (*withdraw)(void *user, uint64_t id);
};

enum net_transport { NET_AUTO = 0, NET_SHM, NET_FABRIC };

struct net_opts {
    /* NET_SHM: never fabric. NET_FABRIC: never shared memory (but self stays self). */
    enum net_transport transport;
    /* All ranks of the job are on this host: with NET_AUTO fabric is not started, which
     * saves tens of milliseconds and some memory. */
    bool single_host;
};

/* The exchange is copied; its functions must work until net_destroy returns. Fabric that
 * is not available is no error (net_fabric_reason says why) unless transport is
 * NET_FABRIC. */
enum hdl_status net_create(struct base_env *env, const struct net_exchange *exchange,
                           const struct net_opts *opts, struct net **net);
/* Closes what is left of windows and remotes; waits at most 500 ms for acknowledgements
 * of what was sent. NULL is legal. */
void net_destroy(struct net *net);
/* Provider in use ("tcp;ofi_rxm"), NULL if fabric is off; then the reason. */
const char *net_fabric_provider(const struct net *net);
const char *net_fabric_reason(const struct net *net);

/* --------------------------------------------------------------------- descriptors */

/* What a process of this host needs to get a descriptor of another; plain bytes. */
struct net_ticket {
    uint8_t host_id[16];
    char socket_name[64];
    uint64_t id, key; /* key 0 = none */
};

/* Makes fd available to whoever has the ticket, until withdrawn; it stays open and the
 * caller's. HDL_ENOTSUP without a host, HDL_EBUSY. */
enum hdl_status net_descriptor_offer(struct net *net, int fd, struct net_ticket *ticket);
void net_descriptor_withdraw(struct net *net, const struct net_ticket *ticket);
/* Close-on-exec, the caller closes it; blocks. HDL_ENOTSUP: of another host; HDL_EPEER:
 * its process is gone; HDL_EINVAL, HDL_ETIMEDOUT. */
enum hdl_status net_descriptor_fetch(struct net *net, const struct net_ticket *ticket,
                                     int64_t timeout_ns, int *fd);

/* ------------------------------------------------------------------------- windows */

/* Zeroed shared memory (memfd, page-aligned), registered with fabric if that is in use.
 */
enum hdl_status net_window_create(struct net *net, size_t bytes,
                                  struct hdl_window **window);
/* Device memory of the caller, see hdl_window_adopt. */
enum hdl_status net_window_adopt(struct net *net, void *memory, size_t bytes,
                                 struct hdl_window **window);
void net_window_destroy(struct hdl_window *window);
void *net_window_data(const struct hdl_window *window);
size_t net_window_bytes(const struct hdl_window *window);
/* Puts its first bytes into large pages, for all who map it; what was never touched takes
 * memory from then on. Milliseconds; the window may be in use. False: the kernel cannot
 * (before Linux 6.1, no free memory in one piece), and nothing has changed. */
bool net_window_enlarge(struct hdl_window *window, size_t bytes);
/*
 * Who may put there over fabric: only who comes as one of `writers` (by slot; 0 =
 * nobody). Before the handle is given away; the words stay the caller's. Without this
 * whoever has the handle may. The words are changed by net_set_writer alone: when it
 * returns, no put of the former writer is being carried out, and none ever will be.
 */
void net_window_set_writers(struct hdl_window *window, const _Atomic uint64_t *writers,
                            uint32_t num_writers);
void net_set_writer(struct net *net, _Atomic uint64_t *word, uint64_t writer);
/* *length in: room (NET_HANDLE_BYTES always suffices), out: used. */
enum hdl_status net_window_pack(const struct hdl_window *window, void *handle,
                                size_t *length);

/* ------------------------------------------------------------------------- remotes */

enum net_access {
    NET_READ = 1,
    NET_WRITE = 2,
    NET_GROUP =
        4 /* belongs to a group, whose views say when it is lost: not net_rank_lost */
};

/*
 * Opens a peer's window. NET_READ alone maps it read-only on mapped transports (net_put
 * is then HDL_EINVAL); messaged peers need NET_WRITE. Blocks for the descriptor, at most
 * 5 s. HDL_EINVAL: not a handle; HDL_EPEER: its process is gone; HDL_ENOTSUP: not
 * reachable.
 */
enum hdl_status net_remote_open(struct net *net, const void *handle, size_t length,
                                unsigned access, struct hdl_peer_window **remote);
/* What is queued for it is dropped. Never blocks. NULL is legal. */
void net_remote_close(struct hdl_peer_window *remote);
/* Puts from now on are made as the writer in the slot: what *writer says then. */
void net_remote_write_as(struct hdl_peer_window *remote, uint32_t slot,
                         const _Atomic uint64_t *writer);
/* Memory of the peer's window, NULL if messaged. */
void *net_remote_map(const struct hdl_peer_window *remote);
/* "self", "shm", "cuda" or "fabric:<provider>". */
const char *net_remote_transport(const struct hdl_peer_window *remote);
/* Do two handles belong to processes that map each other's memory? Asks nobody. False for
 * a bad handle, and always if transport is NET_FABRIC and the processes differ. */
bool net_handles_mapped(const struct net *net, const void *a, size_t a_length,
                        const void *b, size_t b_length);
/* Would net_remote_open of this handle be mapped? Asks nobody. False for a bad handle. */
bool net_handle_mapped(const struct net *net, const void *handle, size_t length);
/* Has the window's process a fabric address? False for a bad handle. */
bool net_handle_has_fabric(const void *handle, size_t length);

/* ---------------------------------------------------------------------------- data */

/*
 * Writes `bytes` at `offset`, then raises the word at signal_offset (8-byte aligned;
 * NET_NO_SIGNAL = none): whoever sees the signal sees the block. Signals of puts with at
 * most NET_EAGER_BYTES to one peer arrive in call order; larger ones may be overtaken.
 * HDL_OK: queued or done. HDL_PENDING: no room now, call again after net_poll (messaged
 * only). HDL_EINVAL: out of bounds. A broken link is no error: it is reconnected and the
 * put retried until the remote is closed.
 * The source is looked at by the caller and in net_poll, never by the provider: when it
 * is free (below, or when the remote was closed) nothing reads it any more.
 */
enum hdl_status net_put(struct hdl_peer_window *remote, size_t offset, const void *src,
                        size_t bytes, size_t signal_offset, uint64_t value,
                        enum hdl_signal_op op);
enum net_put_hint {
    /* Another put to the peer follows at once: they may go as one message. This one goes
     * with net_poll at the latest. */
    NET_PUT_MORE = 1,
    /* Nobody waits until it is delivered: net_put_done may count it late. */
    NET_PUT_LAZY = 2
};
enum hdl_status net_put_hinted(struct hdl_peer_window *remote, size_t offset,
                               const void *src, size_t bytes, size_t signal_offset,
                               uint64_t value, enum hdl_signal_op op, unsigned hints);
/* Two blocks under one signal. Together at most NET_EAGER_BYTES they go as one message;
 * else the first, at most NET_EAGER_BYTES, goes ahead. After HDL_PENDING both are to be
 * given again. */
struct net_block {
    size_t offset;
    const void *src;
    size_t bytes;
};
enum hdl_status net_put_two(struct hdl_peer_window *remote,
                            const struct net_block blocks[2], size_t signal_offset,
                            uint64_t value, enum hdl_signal_op op);
enum hdl_status net_signal(struct hdl_peer_window *remote, size_t signal_offset,
                           uint64_t value, enum hdl_signal_op op);
/* Puts so far, and how many of the first of them are over: the source of the put that
 * made net_put_count n is free once net_put_done >= n, and if it was larger than
 * NET_EAGER_BYTES it has been delivered. Equal at once if mapped. */
uint64_t net_put_count(const struct hdl_peer_window *remote);
uint64_t net_put_done(const struct hdl_peer_window *remote);
/*
 * Memory of the application that one messaged peer may write for a while: a large message
 * then goes straight to where it belongs. HDL_ENOTSUP if there is no fabric.
 */
struct net_exposed {
    uint64_t key; /* what the peer must know; travels as these three words */
    uint64_t window;
    uint64_t bytes;
};
enum hdl_status net_expose(struct net *net, void *data, size_t bytes,
                           struct net_exposed *exposed, struct hdl_window **registration);
/* When it returns nothing writes there any more. */
void net_unexpose(struct net *net, struct hdl_window *registration);
/* As net_put without a signal, into memory that the peer exposed; it counts as a put of
 * `remote`, any window of that peer. Delivered when net_put_done says so. */
enum hdl_status net_put_exposed(struct hdl_peer_window *remote,
                                const struct net_exposed *exposed, size_t offset,
                                const void *src, size_t bytes);

/* Has everything put so far arrived, signals included? Always true if mapped. */
bool net_remote_delivered(const struct hdl_peer_window *remote);
/* Makes the link to the peer before it is needed; true once the peer has answered. Always
 * true if mapped. */
bool net_remote_greet(struct hdl_peer_window *remote);
/* Polls until net_put_done == net_put_count. HDL_ETIMEDOUT; timeout_ns < 0 = none.
 * HDL_EPEER: the peer is lost; all sources are free. */
enum hdl_status net_flush(struct hdl_peer_window *remote, int64_t timeout_ns);
/* Time (base_now_ns) since which the link to the peer is down, 0 while it is up. Retrying
 * goes on: only the control plane knows whether a peer is dead. It says so by
 * net_rank_lost (any thread), which ends waits for windows that were packed by this or
 * an earlier rank epoch of the rank. */
int64_t net_remote_down_since(const struct hdl_peer_window *remote);
void net_rank_lost(struct net *net, int32_t rank, uint64_t rank_epoch);
/* While `alone` no control plane is there to say so (any thread): links are asked whether
 * their peers live, and waits for windows end whose link is down for 2 s. */
void net_set_alone(struct net *net, bool alone);
/* Can it still be waited for? HDL_EPEER: its rank is lost; HDL_ECOORD: so it seems, and
 * nobody is there to decide. */
enum hdl_status net_remote_check(const struct hdl_peer_window *remote);
/* Reconnections of fabric links since creation; messages refused (bounds, key, format).
 */
uint64_t net_reconnects(const struct net *net);
uint64_t net_refused(const struct net *net);
/* Puts of former writers that were dropped; payload bytes put over fabric. */
uint64_t net_stale(const struct net *net);
uint64_t net_fabric_bytes(const struct net *net);

/* -------------------------------------------------------------- progress and sleep */

/* Progress of messaged transports: number of events, 0 if there were none (or they are
 * not in use, or another thread is polling). */
int net_poll(struct net *net);
/* Do messaged transports need somebody to poll? While true, and no caller waits, the
 * engine's progress thread must poll and sleep in net_sleep (NET_SLEEP_STANDBY). */
bool net_needs_poll(const struct net *net);

/*
 * Sleeping. A context has one bell, in memory shared with the peers of its host.
 *
 *     ticket = net_sleep_begin(net);      says "I am about to sleep"
 *     if (condition already true)         look again, after begin
 *         net_sleep_cancel(net);
 *     else
 *         net_sleep(net, ticket, timeout_ns, flags);    ends the begin, too
 *
 * Returns when rung, when fabric has something to poll, at the timeout (< 0 = none), or
 * for no reason. A ring between begin and sleep is never lost. Any number of threads may
 * sleep.
 */
enum net_sleep_flags {
    NET_SLEEP_STANDBY = 1 /* leave fabric's events alone while others poll */
};
uint32_t net_sleep_begin(struct net *net);
void net_sleep_cancel(struct net *net);
void net_sleep(struct net *net, uint32_t ticket, int64_t timeout_ns, unsigned flags);
/* Wakes all sleepers of the own context. */
void net_wake(struct net *net);
/* Wakes the sleepers of a mapped peer's context, after a flag store it may wait for;
 * cheap when nobody sleeps there. The store before it needs no more than release order.
 * Nothing to do for messaged peers: a message wakes. */
void net_ring(struct hdl_peer_window *remote);

/* --------------------------------------------------------------------- information */

/* {"self":{...},"shm":{...},"fabric":{...}} of this machine, with the reason where one is
 * not available; needs no context. Returns the length it has or would have without the 0.
 */
size_t net_describe(struct base_env *env, char *json, size_t room);

/* ------------------------------------------------------------------------- test hooks */

/* Shuts down the sockets between this process and the peer, as a cut cable would. Returns
 * how many there were. */
int net_test_break_link(struct hdl_peer_window *remote);
/* The n-th thing that fabric's provider hands over is lost (0 = nothing is), or with a
 * peer given the link to it is broken there. */
void net_test_lose(struct net *net, uint32_t n, struct hdl_peer_window *broken);
/* While set, no link is re-established. */
void net_test_hold_links(struct net *net, bool held);

#endif /* HEDDLE_NET_NET_H */
