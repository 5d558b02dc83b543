/* SPDX-License-Identifier: Apache-2.0 */
/* A socket of the control thread, TCP or unix, with its authenticated channel. */
#ifndef HOST_CONN_H
#define HOST_CONN_H

#include <netinet/in.h>
#include <sys/socket.h>
#include <uv.h>

#include "base/list.h"
#include "host/channel.h"

struct ctl_bytes;
struct host;
struct host_conn;

/* Run on the control thread. In all of them the connection may be closed by the callee.
 */
struct host_conn_ops {
    uint32_t purposes; /* served (mask of 1 << purpose); 0 = client */
    size_t max_frame;
    void (*opened)(struct host_conn *conn); /* authentic, frames may be sent */
    void (*frame)(struct host_conn *conn, const void *data, size_t size);
    /* The peer or the network ended it, or it was refused. `error` is an errno or 0. The
     * connection is freed after the call. Never called after host_conn_close. */
    void (*closed)(struct host_conn *conn, enum host_refusal refusal, int error);
};

/* What could not be written at once. */
struct host_conn_out {
    struct base_list node;
    size_t done;
    struct ctl_bytes *bytes; /* NULL = only `edge`, a step of the handshake */
    size_t edge_size;
    uint8_t length[HOST_LENGTH_BYTES];
    uint8_t tag[HOST_TAG_BYTES];
    uint8_t edge[HOST_HANDSHAKE_BYTES];
};

struct host_conn {
    struct base_list node; /* in host->conns */
    struct host *host;
    const struct host_conn_ops *ops;
    void *owner;
    uint64_t id; /* the owner's */
    int fd;
    bool connecting;
    bool opened;  /* was authentic once */
    bool broken;  /* `closed` is due */
    bool closing; /* by us, once the output is written; nothing is read any more */
    bool shut;    /* our direction is shut down */
    bool closed;
    enum host_refusal why;
    int error;
    int events;
    int64_t opened_by_ns; /* deadline of the handshake */
    uv_poll_t poll;
    struct host_channel channel;
    uint8_t
        early[HOST_HANDSHAKE_BYTES]; /* all the input there is before authentication */
    size_t early_size;
    uint8_t *held; /* the front part of a frame */
    size_t held_size;
    size_t held_capacity;
    struct base_list out;
    size_t out_bytes;
    char peer[80]; /* for log lines */
};

/* Takes over a non-blocking socket that is in the fork table, also on failure. A client's
 * socket may be connecting. */
enum hdl_status host_conn_create(struct host *host, int fd,
                                 const struct host_conn_ops *ops, uint32_t purpose,
                                 bool connecting, void *owner, struct host_conn **conn);
/* Queues one frame; the bytes are referenced as long as needed. A failure breaks the
 * connection, which `closed` tells later. */
void host_conn_send(struct host_conn *conn, struct ctl_bytes *bytes);
/* Frees without a call of `closed`, at once or after what was sent before is written. */
void host_conn_close(struct host_conn *conn);
void host_conn_close_after_output(struct host_conn *conn);
/* No more output after what was sent before; the peer sees the end. Input goes on. */
void host_conn_shutdown(struct host_conn *conn);
/* Reads and handles what has arrived, now: before a late timer or an exit is judged. */
void host_conn_read_now(struct host_conn *conn);
/* Calls `closed` of broken connections: run after every event. */
void host_conns_reap(struct host *host);
/* Ends handshakes that take too long. */
void host_conns_expire(struct host *host, int64_t now);

#endif
