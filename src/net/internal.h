/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of net share: the operation table of a transport, the objects, the bell.
 */
#ifndef NET_INTERNAL_H
#define NET_INTERNAL_H

#include "net/net.h"

#include "base/clock.h"
#include "base/env.h"
#include "base/list.h"
#include "gpu/ipc.h"

#include <pthread.h>

struct net_fabric;

/*
 * The bell page: one per context, a memfd that peers of the host map writable. Its owner
 * says that it sleeps, a peer that stored a flag looks and rings.
 *
 *     owner:  sleepers += 1; barrier; flag set? else sleep until count has changed
 *     peer:   flag = 1;      barrier; sleepers? then count += 1, wake
 *
 * The peer's barrier would be paid on every operation, so the owner pays for both where
 * the kernel allows it: membarrier orders every registered process on this machine.
 */
struct net_bell {
    _Atomic uint32_t sleepers;
    _Atomic uint32_t count;
    _Atomic uint32_t polling; /* of the sleepers, in poll(): need the eventfd too */
    _Atomic uint32_t fenced;  /* the owner cannot membarrier: the peer must fence */
};

enum { NET_BELL_BYTES = 4096, NET_MAX_ADDRESS = 128, NET_MAX_PROVIDER = 32 };

/* What a handle says, unpacked. See handle.c for the bytes. */
struct net_handle {
    uint8_t host_id[16];
    char socket_name[64];
    int32_t pid;
    int32_t rank;        /* of the job, -1 = unknown */
    uint64_t rank_epoch; /* when it was packed */
    uint64_t net_id;     /* random, of the context */
    uint64_t window_id;
    uint64_t key;
    uint64_t bytes;
    uint64_t bell_id; /* bell_id + 1 is its eventfd, 0 = no eventfd is used */
    uint64_t bell_key;
    bool has_event;
    /* Fabric: address_length 0 = none. */
    char provider[NET_MAX_PROVIDER];
    uint32_t address_length;
    uint8_t address[NET_MAX_ADDRESS];
    uint64_t secret; /* every message to this context carries it */
    bool long_messages;
    bool of_device; /* memory of a GPU that a user brought */
    struct gpu_shared shared;
};

enum hdl_status net_handle_pack(const struct net_handle *handle, void *out,
                                size_t *length);
enum hdl_status net_handle_unpack(const void *data, size_t length,
                                  struct net_handle *handle);

/*
 * A transport lists what it has; the rest gets the answers of a mapped peer.
 *   open    required; caller's thread, may block; fills remote->data/bell or its own
 *           state
 *   close   optional; never blocks
 *   drop    optional; forgets the sources of puts that are not over
 *   put     optional: NULL = copy to remote->data, signal there, ring
 *   done    optional: NULL = everything is done at once
 *   down_since  optional: NULL = never down
 *   greet   optional: NULL = there is no link to make
 */
struct net_ops {
    const char *name;
    enum hdl_status (*open)(struct hdl_peer_window *remote,
                            const struct net_handle *handle);
    void (*close)(struct hdl_peer_window *remote);
    void (*drop)(struct hdl_peer_window *remote);
    enum hdl_status (*put)(struct hdl_peer_window *remote,
                           const struct net_block blocks[2], size_t signal_offset,
                           uint64_t value, enum hdl_signal_op op, unsigned hints);
    enum hdl_status (*put_exposed)(struct hdl_peer_window *remote,
                                   const struct net_exposed *exposed, size_t offset,
                                   const void *src, size_t bytes);
    uint64_t (*done)(const struct hdl_peer_window *remote);
    bool (*delivered)(const struct hdl_peer_window *remote);
    int64_t (*down_since)(const struct hdl_peer_window *remote);
    bool (*greet)(struct hdl_peer_window *remote);
};

extern const struct net_ops net_self_ops;
extern const struct net_ops net_shm_ops;
extern const struct net_ops net_cuda_ops;
extern const struct net_ops net_fabric_ops;

/* Bell of a peer context of this host, shared by all its windows that are open here. */
struct net_peer_bell {
    struct base_list node;
    uint64_t net_id;
    uint32_t users;
    int event_fd; /* -1 = none */
    struct net_bell *bell;
};

struct net {
    struct base_env *env;
    struct net_exchange exchange;
    struct net_opts opts;
    uint64_t id;
    atomic_bool alone;
    struct net_fabric *fabric; /* NULL = off */
    char fabric_reason[256];

    /* Guards the lists; never held on the data path. */
    pthread_mutex_t lock;
    struct base_list windows;
    struct base_list remotes;
    struct base_list peer_bells;
    uint64_t next_id;

    struct net_bell *bell;
    int bell_fd;
    int event_fd; /* -1 without fabric */
    uint64_t bell_id;
    uint64_t bell_key;
    bool can_membarrier;
    _Atomic uint32_t poll_leader; /* one thread at a time sleeps in poll() */
    _Atomic uint32_t polls;       /* by all threads, for NET_SLEEP_STANDBY */
    uint32_t standby_polls;       /* of others, as the standby thread last saw them */
};

struct hdl_window {
    struct net *net;
    struct base_list node;
    uint8_t *data;
    size_t bytes;
    int fd;
    uint64_t id;
    uint64_t key;
    /* Who may put here over fabric: by slot, 0 = nobody; NULL = who has the key. */
    const _Atomic uint64_t *writers;
    uint32_t num_writers;
    struct base_list fabric_node;
    bool of_device; /* the user's: `data` is no memory of the host */
    struct gpu_shared shared;
};

struct hdl_peer_window {
    struct net *net;
    const struct net_ops *ops;
    struct base_list node;
    uint8_t *data; /* mapped: the peer's memory; messaged: NULL */
    size_t bytes;
    unsigned access;
    int32_t rank;
    uint64_t rank_epoch;
    uint32_t slot; /* as whom puts over fabric are made */
    const _Atomic uint64_t *writer;
    _Atomic bool lost;
    /* Own or peer's bell, NULL = nobody to ring. */
    struct net_bell *bell;
    struct net_peer_bell *peer_bell;
    bool must_fence;
    _Atomic uint64_t puts;
    struct net_fabric_remote *fabric;
    struct gpu_ipc_map device;
};

/* window.c: memory of the own window that a handle names. HDL_EPEER: it is gone. */
enum hdl_status net_window_of(struct net *net, const struct net_handle *handle,
                              uint8_t **data);

/* memory.c: a sealed, zeroed memfd mapped shared; and mapping one that came from a peer.
 */
enum hdl_status net_memory_create(const char *name, size_t bytes, int *fd, void **data);
enum hdl_status net_memory_map(int fd, size_t bytes, bool writable, void **data);
void net_memory_unmap(void *data, size_t bytes);
/* See net_window_enlarge. */
bool net_memory_enlarge(void *data, size_t bytes);

/* net.c: grows while other threads than the caller poll. */
uint32_t net_polls_of_others(const struct net *net);

/* bell.c */
enum hdl_status net_bell_create(struct net *net);
void net_bell_destroy(struct net *net);
enum hdl_status net_bell_open(struct hdl_peer_window *remote,
                              const struct net_handle *handle);
void net_bell_close(struct hdl_peer_window *remote);
/* Something arrived in the own windows that peers of this host, who map them, may wait
 * for. */
void net_ring_host(struct net *net);

/* The store that a signal is, on mapped memory. */
static inline void net_raise(uint8_t *data, size_t offset, uint64_t value,
                             enum hdl_signal_op op)
{
    _Atomic uint64_t *word = (_Atomic uint64_t *)(void *)(data + offset);
    if (op == HDL_SIGNAL_ADD)
        atomic_fetch_add_explicit(word, value, memory_order_release);
    else
        atomic_store_explicit(word, value, memory_order_release);
}

#endif /* NET_INTERNAL_H */
