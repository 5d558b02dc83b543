/* SPDX-License-Identifier: Apache-2.0 */
/* Reading, writing and ending the control thread's sockets. */
#include "host/conn.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "ctl/bytes.h"
#include "host/fork.h"
#include "host/internal.h"

/* A peer that does not read is cut off before it eats our memory. */
#define CONN_OUT_MAX ((size_t)256 << 20)

static void on_ready(uv_poll_t *poll, int status, int events);

static void break_conn(struct host_conn *conn, enum host_refusal why, int error)
{
    if (conn->broken || conn->closed)
        return;
    conn->broken = true;
    conn->why = why;
    conn->error = error;
    (void)uv_poll_stop(&conn->poll);
    base_list_remove(&conn->node);
    base_list_push_back(&conn->host->broken, &conn->node);
    /* A client that meets a stranger looks elsewhere: no attack on this process. A reset
     * inside a frame is what a killed peer leaves. */
    bool reset = why == HOST_REFUSAL_TRUNCATED && error;
    if (why != HOST_REFUSAL_NONE && !reset && (conn->ops->purposes || conn->opened))
        host_refused(conn->host, conn->peer, why, conn->channel.peer_version);
}

/* Polls for what is needed: input always, output while something waits. */
static void arm(struct host_conn *conn)
{
    if (conn->broken || conn->closed)
        return;
    int events = conn->closing ? 0 : UV_READABLE;
    if (conn->connecting || !base_list_empty(&conn->out))
        events |= UV_WRITABLE;
    if (events == conn->events)
        return;
    conn->events = events;
    int error =
        events ? uv_poll_start(&conn->poll, events, on_ready) : uv_poll_stop(&conn->poll);
    if (error)
        break_conn(conn, HOST_REFUSAL_NONE, -error);
}

static void free_out(struct host_conn *conn, struct host_conn_out *out)
{
    base_list_remove(&out->node);
    ctl_bytes_unref(out->bytes);
    base_free(conn->host->env, out);
}

/* -------------------------------------------------------------------------- output */

/* The parts of an entry that are not written yet. */
static int out_parts(const struct host_conn_out *out, struct iovec parts[3])
{
    const struct iovec all[3] = {
        {.iov_base = (void *)(uintptr_t)(out->bytes ? out->length : out->edge),
         .iov_len = out->bytes ? HOST_LENGTH_BYTES : out->edge_size},
        {.iov_base = out->bytes ? out->bytes->data : NULL,
         .iov_len = out->bytes ? out->bytes->size : 0},
        {.iov_base = (void *)(uintptr_t)out->tag,
         .iov_len = out->bytes ? HOST_TAG_BYTES : 0}};
    size_t skip = out->done;
    int count = 0;
    for (int i = 0; i < 3; i++) {
        if (skip >= all[i].iov_len) {
            skip -= all[i].iov_len;
            continue;
        }
        parts[count].iov_base = (uint8_t *)all[i].iov_base + skip;
        parts[count].iov_len = all[i].iov_len - skip;
        skip = 0;
        count++;
    }
    return count;
}

/* True when the entry is written to its end. */
static bool write_out(struct host_conn *conn, struct host_conn_out *out)
{
    struct iovec parts[3];
    for (;;) {
        int count = out_parts(out, parts);
        if (count == 0)
            return true;
        struct msghdr msg = {.msg_iov = parts, .msg_iovlen = (size_t)count};
        ssize_t sent = sendmsg(conn->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            atomic_fetch_add(&conn->host->control_bytes, (uint64_t)sent);
            out->done += (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            break_conn(conn, HOST_REFUSAL_NONE, errno);
        return false;
    }
}

static void finish_output(struct host_conn *conn)
{
    if (conn->shut && !conn->closing)
        (void)shutdown(conn->fd, SHUT_WR);
    if (conn->closing)
        host_conn_close(conn);
}

static void flush_output(struct host_conn *conn)
{
    struct base_list *node;
    while (!conn->broken && (node = base_list_first(&conn->out)) != NULL) {
        struct host_conn_out *out = base_container_of(node, struct host_conn_out, node);
        size_t before = out->done;
        bool finished = write_out(conn, out);
        conn->out_bytes -= out->done - before;
        if (!finished)
            break;
        free_out(conn, out);
    }
    if (!conn->broken && base_list_empty(&conn->out) && (conn->shut || conn->closing))
        finish_output(conn);
    arm(conn);
}

/* Writes at once if nothing waits before it; memory is needed only for a rest. */
static void send_out(struct host_conn *conn, struct host_conn_out *out)
{
    if (conn->broken || conn->closed)
        return;
    if (base_list_empty(&conn->out) && !conn->connecting && write_out(conn, out))
        return;
    if (conn->broken)
        return;
    struct host_conn_out *rest = base_alloc(conn->host->env, 1, sizeof(*rest));
    size_t size = (out->bytes ? out->bytes->size + HOST_FRAME_OVERHEAD : out->edge_size) -
                  out->done;
    if (!rest || conn->out_bytes + size > CONN_OUT_MAX) {
        base_free(conn->host->env, rest);
        break_conn(conn, HOST_REFUSAL_NONE, ENOMEM);
        return;
    }
    *rest = *out;
    (void)ctl_bytes_ref(rest->bytes);
    base_list_push_back(&conn->out, &rest->node);
    conn->out_bytes += size;
    arm(conn);
}

void host_conn_send(struct host_conn *conn, struct ctl_bytes *bytes)
{
    if (conn->broken || conn->closed || conn->closing || conn->shut)
        return;
    struct host_conn_out out = {.bytes = bytes};
    host_channel_seal(&conn->channel, bytes->data, bytes->size, out.length, out.tag);
    send_out(conn, &out);
}

static void send_step(struct host_conn *conn, const struct host_channel_out *step)
{
    if (step->reply_size == 0)
        return;
    struct host_conn_out out = {.edge_size = step->reply_size};
    memcpy(out.edge, step->reply, step->reply_size);
    send_out(conn, &out);
}

/* --------------------------------------------------------------------------- input */

static void tell_opened(struct host_conn *conn)
{
    conn->opened = true;
    if (conn->ops->opened)
        conn->ops->opened(conn);
}

/* Handles what is at the front; returns the bytes used. */
static size_t take_input(struct host_conn *conn, const uint8_t *data, size_t size)
{
    struct host_channel_out out;
    size_t used = 0;
    while (!conn->broken && !conn->closed && !conn->closing) {
        enum host_channel_result result =
            host_channel_input(&conn->channel, data + used, size - used, &out);
        send_step(conn, &out);
        used += out.used;
        if (result == HOST_CHANNEL_MORE)
            break;
        if (result == HOST_CHANNEL_BAD)
            break_conn(conn, conn->channel.refusal, 0);
        else if (result == HOST_CHANNEL_OPENED && !conn->broken)
            tell_opened(conn);
        else if (result == HOST_CHANNEL_FRAME)
            conn->ops->frame(conn, out.payload, out.payload_size);
    }
    return used;
}

/* Keeps the unfinished front part of a frame. */
static bool hold_input(struct host_conn *conn, const uint8_t *data, size_t size)
{
    struct base_env *env = conn->host->env;
    size_t total = conn->held_size + size;
    if (total > conn->held_capacity) {
        size_t capacity = conn->held_capacity ? conn->held_capacity : 1024;
        while (capacity < total)
            capacity *= 2;
        uint8_t *held = base_grow(env, conn->held, conn->held_capacity, capacity, 1);
        if (!held) {
            break_conn(conn, HOST_REFUSAL_NONE, ENOMEM);
            return false;
        }
        conn->held = held;
        conn->held_capacity = capacity;
    }
    memcpy(conn->held + conn->held_size, data, size);
    conn->held_size = total;
    return true;
}

static void drop_held(struct host_conn *conn, size_t used)
{
    conn->held_size -= used;
    if (conn->held_size > 0) {
        memmove(conn->held, conn->held + used, conn->held_size);
        return;
    }
    base_free(conn->host->env, conn->held);
    conn->held = NULL;
    conn->held_capacity = 0;
}

static void input_frames(struct host_conn *conn, const uint8_t *data, size_t size)
{
    if (conn->held_size > 0) {
        if (!hold_input(conn, data, size))
            return;
        size_t used = take_input(conn, conn->held, conn->held_size);
        if (!conn->closed)
            drop_held(conn, used);
        return;
    }
    size_t used = take_input(conn, data, size);
    if (!conn->closed && !conn->broken && used < size)
        (void)hold_input(conn, data + used, size - used);
}

static void input_early(struct host_conn *conn, size_t size)
{
    conn->early_size += size;
    size_t used = take_input(conn, conn->early, conn->early_size);
    if (conn->closed)
        return;
    conn->early_size -= used;
    memmove(conn->early, conn->early + used, conn->early_size);
}

/* Bytes that the current step lacks: never more, so that frames stay in the socket. */
static size_t early_room(const struct host_conn *conn)
{
    switch (conn->channel.state) {
    case HOST_CHANNEL_WAIT_HELLO:
        return HOST_HELLO_BYTES - conn->early_size;
    case HOST_CHANNEL_WAIT_CHALLENGE:
        return HOST_CHALLENGE_BYTES - conn->early_size;
    case HOST_CHANNEL_WAIT_PROOF:
        return HOST_PROOF_BYTES - conn->early_size;
    default:
        return 0;
    }
}

static void end_of_input(struct host_conn *conn, int error)
{
    enum host_refusal why = HOST_REFUSAL_NONE;
    if (conn->held_size > 0 || conn->early_size > 0)
        why = HOST_REFUSAL_TRUNCATED;
    else if (conn->channel.state == HOST_CHANNEL_WAIT_HELLO ||
             conn->channel.state == HOST_CHANNEL_WAIT_PROOF)
        why = HOST_REFUSAL_UNPROVEN;
    break_conn(conn, why, error);
}

/* One read; false when there is no more to read now. */
static bool read_once(struct host_conn *conn)
{
    struct host *host = conn->host;
    size_t room = early_room(conn);
    bool early = room > 0;
    void *buffer =
        early ? (void *)(conn->early + conn->early_size) : (void *)host->scratch;
    ssize_t got =
        recv(conn->fd, buffer, early ? room : sizeof(host->scratch), MSG_DONTWAIT);
    if (got < 0) {
        if (errno == EINTR)
            return true;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            end_of_input(conn, errno);
        return false;
    }
    if (got == 0) {
        end_of_input(conn, 0);
        return false;
    }
    atomic_fetch_add(&host->control_bytes, (uint64_t)got);
    if (early)
        input_early(conn, (size_t)got);
    else
        input_frames(conn, host->scratch, (size_t)got);
    return early || (size_t)got == sizeof(host->scratch);
}

void host_conn_read_now(struct host_conn *conn)
{
    /* Bounded, so that one busy peer does not keep the others waiting. */
    for (int turns = 0; turns < 16; turns++) {
        if (conn->connecting || conn->broken || conn->closed || conn->closing)
            return;
        if (!read_once(conn))
            return;
    }
}

/* -------------------------------------------------------------------------- events */

static void start_channel(struct host_conn *conn)
{
    struct host_channel_out out;
    host_channel_start(&conn->channel, &out);
    send_step(conn, &out);
    arm(conn);
}

static void finish_connect(struct host_conn *conn)
{
    int error = 0;
    socklen_t size = sizeof(error);
    if (getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0)
        error = errno;
    conn->connecting = false;
    if (error)
        break_conn(conn, HOST_REFUSAL_NONE, error);
    else
        start_channel(conn);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct host_conn *conn = poll->data;
    struct host *host = conn->host;
    if (conn->connecting && (status < 0 || (events & UV_WRITABLE)))
        finish_connect(conn);
    else if (status < 0)
        host_conn_read_now(conn); /* reading tells the error */
    if (!conn->broken && !conn->closed && (events & UV_WRITABLE))
        flush_output(conn);
    if (!conn->broken && !conn->closed && (events & UV_READABLE))
        host_conn_read_now(conn);
    host_pump(host);
}

static void describe_peer(struct host_conn *conn)
{
    struct sockaddr_storage addr;
    socklen_t size = sizeof(addr);
    if (getpeername(conn->fd, (struct sockaddr *)&addr, &size) == 0 &&
        (addr.ss_family == AF_INET || addr.ss_family == AF_INET6))
        host_address_format(&addr, conn->peer, sizeof(conn->peer));
    else if (conn->peer[0] == 0)
        (void)strcpy(conn->peer, "unix socket");
}

enum hdl_status host_conn_create(struct host *host, int fd,
                                 const struct host_conn_ops *ops, uint32_t purpose,
                                 bool connecting, void *owner, struct host_conn **out)
{
    uint8_t nonce[HOST_NONCE_BYTES];
    enum hdl_status status = base_random_bytes(nonce, sizeof(nonce));
    struct host_conn *conn = status ? NULL : base_alloc(host->env, 1, sizeof(*conn));
    if (!conn) {
        host_fork_close(fd);
        return status ? status : HDL_ENOMEM;
    }
    int error = uv_poll_init(&host->loop, &conn->poll, fd);
    if (error) {
        host_fork_close(fd);
        base_free(host->env, conn);
        return base_fail(HDL_ESYSTEM, "cannot poll a socket: %s", uv_strerror(error));
    }
    conn->host = host;
    conn->ops = ops;
    conn->owner = owner;
    conn->fd = fd;
    conn->connecting = connecting;
    conn->opened_by_ns = base_env_now(host->env) + host->handshake_ns;
    conn->poll.data = conn;
    base_list_init(&conn->out);
    base_list_push_back(&host->conns, &conn->node);
    struct host_channel_opts opts = {.server = ops->purposes != 0,
                                     .purpose = ops->purposes ? ops->purposes : purpose,
                                     .max_frame = ops->max_frame,
                                     .key = host->key,
                                     .nonce = nonce};
    host_channel_init(&conn->channel, &opts);
    describe_peer(conn);
    host_handshake_started(host);
    if (connecting || ops->purposes)
        arm(conn);
    else
        start_channel(conn);
    *out = conn;
    return HDL_OK;
}

/* ----------------------------------------------------------------------------- end */

static void free_conn(uv_handle_t *handle)
{
    struct host_conn *conn = handle->data;
    struct base_env *env = conn->host->env;
    base_free(env, conn->held);
    host_channel_wipe(&conn->channel);
    base_free(env, conn);
}

void host_conn_close(struct host_conn *conn)
{
    if (conn->closed)
        return;
    conn->closed = true;
    base_list_remove(&conn->node);
    base_list_each(node, after, &conn->out)
        free_out(conn, base_container_of(node, struct host_conn_out, node));
    (void)uv_poll_stop(&conn->poll);
    uv_close((uv_handle_t *)&conn->poll, free_conn);
    host_fork_close(conn->fd);
}

void host_conn_close_after_output(struct host_conn *conn)
{
    if (conn->closed || conn->broken || base_list_empty(&conn->out)) {
        host_conn_close(conn);
        return;
    }
    conn->closing = true;
    arm(conn);
}

void host_conn_shutdown(struct host_conn *conn)
{
    if (conn->closed || conn->broken || conn->shut)
        return;
    conn->shut = true;
    if (base_list_empty(&conn->out))
        finish_output(conn);
}

void host_conns_reap(struct host *host)
{
    struct base_list *node;
    while ((node = base_list_first(&host->broken)) != NULL) {
        struct host_conn *conn = base_container_of(node, struct host_conn, node);
        base_list_remove(node);
        if (conn->ops->closed)
            conn->ops->closed(conn, conn->why, conn->error);
        host_conn_close(conn);
    }
}

void host_conns_expire(struct host *host, int64_t now)
{
    base_list_each(node, after, &host->conns)
    {
        struct host_conn *conn = base_container_of(node, struct host_conn, node);
        if (conn->channel.state != HOST_CHANNEL_READY && now >= conn->opened_by_ns)
            break_conn(conn, conn->connecting ? HOST_REFUSAL_NONE : HOST_REFUSAL_SLOW,
                       ETIMEDOUT);
    }
}
