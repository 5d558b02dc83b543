/* SPDX-License-Identifier: Apache-2.0 */
/* Asking another process of this host for a descriptor: the blocking client side. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/random.h"
#include "host/channel.h"
#include "host/fork.h"
#include "host/internal.h"

/* One conversation with a peer's control thread. */
struct fetch {
    int socket;
    int64_t deadline_ns;
    struct host_channel channel;
    uint8_t data[HOST_HANDSHAKE_BYTES];
    size_t size;
    int fd;    /* that came beside the bytes */
    bool lost; /* one came for which this process had no number */
    const char *name;
};

static enum hdl_status wait_ready(struct fetch *fetch, short events)
{
    for (;;) {
        int64_t left = fetch->deadline_ns - base_now_ns();
        if (left <= 0)
            return base_fail(HDL_ETIMEDOUT, "no answer from %s for a descriptor",
                             fetch->name);
        int64_t ms = left / BASE_NS_PER_MS + 1;
        struct pollfd poll_fd = {.fd = fetch->socket, .events = events};
        int ready = poll(&poll_fd, 1, ms > 1000000 ? 1000000 : (int)ms);
        if (ready > 0)
            return HDL_OK;
        if (ready < 0 && errno != EINTR)
            return base_fail_errno(HDL_ESYSTEM, errno, "poll");
    }
}

static enum hdl_status fetch_connect(struct fetch *fetch)
{
    for (;;) {
        int fd = host_local_connect(fetch->name);
        if (fd >= 0) {
            fetch->socket = fd;
            break;
        }
        if (fd == -ECONNREFUSED || fd == -ENOENT)
            return base_fail(HDL_EPEER, "the process behind %s is gone", fetch->name);
        if (fd != -EAGAIN && fd != -EINTR)
            return base_fail_errno(HDL_ESYSTEM, -fd, "cannot reach %s", fetch->name);
        if (base_now_ns() >= fetch->deadline_ns)
            return base_fail(HDL_ETIMEDOUT, "%s accepts no connection", fetch->name);
        /* Its queue is full: it is busy with others. */
        struct timespec pause = {.tv_nsec = 1000000};
        (void)nanosleep(&pause, NULL);
    }
    if (!host_local_same_user(fetch->socket))
        return base_fail(HDL_ENOTSUP, "%s belongs to another user", fetch->name);
    return HDL_OK;
}

static enum hdl_status fetch_write(struct fetch *fetch, const uint8_t *data, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(fetch->socket, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            data += sent;
            size -= (size_t)sent;
            continue;
        }
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return base_fail_errno(HDL_EPEER, errno, "connection to %s", fetch->name);
        enum hdl_status status = wait_ready(fetch, POLLOUT);
        if (status)
            return status;
    }
    return HDL_OK;
}

static void take_fds(struct fetch *fetch, struct msghdr *msg)
{
    for (struct cmsghdr *head = CMSG_FIRSTHDR(msg); head; head = CMSG_NXTHDR(msg, head)) {
        if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof(int), sizeof(fd));
            if (fetch->fd < 0)
                fetch->fd = fd;
            else
                (void)close(fd);
        }
    }
}

/* Until `need` bytes are there. */
static enum hdl_status fetch_read(struct fetch *fetch, size_t need)
{
    if (need > sizeof(fetch->data))
        return base_fail(HDL_EPEER, "%s sent a frame that is too long", fetch->name);
    while (fetch->size < need) {
        union {
            struct cmsghdr align;
            char bytes[CMSG_SPACE(4 * sizeof(int))];
        } control;
        struct iovec part = {fetch->data + fetch->size, need - fetch->size};
        struct msghdr msg = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};
        ssize_t got = recvmsg(fetch->socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got > 0) {
            fetch->size += (size_t)got;
            take_fds(fetch, &msg);
            fetch->lost |= (msg.msg_flags & MSG_CTRUNC) != 0;
            continue;
        }
        if (got == 0)
            return base_fail(HDL_EPEER, "%s closed the connection", fetch->name);
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK)
            return base_fail_errno(HDL_EPEER, errno, "connection to %s", fetch->name);
        enum hdl_status status = wait_ready(fetch, POLLIN);
        if (status)
            return status;
    }
    return HDL_OK;
}

/* One step or frame of the channel; `out` points into fetch->data. */
static enum hdl_status fetch_step(struct fetch *fetch, enum host_channel_result want,
                                  struct host_channel_out *out)
{
    for (;;) {
        enum host_channel_result result =
            host_channel_input(&fetch->channel, fetch->data, fetch->size, out);
        if (result == HOST_CHANNEL_BAD)
            return base_fail(HDL_EPEER, "%s: %s", fetch->name,
                             host_refusal_text(fetch->channel.refusal));
        if (result == HOST_CHANNEL_MORE) {
            enum hdl_status status = fetch_read(fetch, out->need);
            if (status)
                return status;
            continue;
        }
        fetch->size = 0; /* nothing beyond `need` was read */
        enum hdl_status status = fetch_write(fetch, out->reply, out->reply_size);
        if (status || result == want)
            return status;
    }
}

static enum hdl_status fetch_handshake(struct fetch *fetch, const struct host *host)
{
    uint8_t nonce[HOST_NONCE_BYTES];
    enum hdl_status status = base_random_bytes(nonce, sizeof(nonce));
    if (status)
        return status;
    struct host_channel_opts opts = {.purpose = HOST_PURPOSE_FETCH,
                                     .max_frame = HOST_FETCH_BYTES,
                                     .key = host->key,
                                     .nonce = nonce};
    host_channel_init(&fetch->channel, &opts);
    struct host_channel_out out;
    host_channel_start(&fetch->channel, &out);
    status = fetch_write(fetch, out.reply, out.reply_size);
    return status ? status : fetch_step(fetch, HOST_CHANNEL_OPENED, &out);
}

static enum hdl_status fetch_ask(struct fetch *fetch, uint64_t id, uint64_t key)
{
    uint8_t frame[HOST_LENGTH_BYTES + HOST_FETCH_BYTES + HOST_TAG_BYTES];
    uint8_t *payload = frame + HOST_LENGTH_BYTES;
    struct base_writer writer;
    base_writer_init(&writer, payload, HOST_FETCH_BYTES);
    base_write_u64(&writer, id);
    base_write_u64(&writer, key);
    host_channel_seal(&fetch->channel, payload, HOST_FETCH_BYTES, frame,
                      payload + HOST_FETCH_BYTES);
    enum hdl_status status = fetch_write(fetch, frame, sizeof(frame));
    if (status)
        return status;
    struct host_channel_out out;
    status = fetch_step(fetch, HOST_CHANNEL_FRAME, &out);
    if (status)
        return status;
    struct base_reader reader;
    base_reader_init(&reader, out.payload, out.payload_size);
    int32_t answer = (int32_t)base_read_u32(&reader);
    if (fetch->lost)
        return base_fail(HDL_ESYSTEM,
                         "no descriptor is free here for the one that %s gave",
                         fetch->name);
    if (!base_reader_done(&reader) || (answer == HDL_OK) != (fetch->fd >= 0))
        return base_fail(HDL_EPEER, "%s gave a malformed answer", fetch->name);
    if (answer == HDL_ESYSTEM)
        return base_fail(HDL_ESYSTEM, "%s has no descriptor free to give its memory",
                         fetch->name);
    if (answer != HDL_OK)
        return base_fail((enum hdl_status)answer, "%s does not offer descriptor %llu",
                         fetch->name, (unsigned long long)id);
    return HDL_OK;
}

enum hdl_status host_fetch_fd(struct host *host, const char *socket_name, uint64_t id,
                              uint64_t key, int64_t timeout_ns, int *fd)
{
    enum hdl_status status = host_check(host);
    if (status)
        return status;
    if (strcmp(socket_name, host->identity.socket_name) == 0)
        return host_offer_take(host, id, key, fd);
    struct fetch fetch = {.socket = -1,
                          .fd = -1,
                          .name = socket_name,
                          .deadline_ns = base_deadline_ns(base_now_ns(), timeout_ns)};
    status = fetch_connect(&fetch);
    if (status == HDL_OK)
        status = fetch_handshake(&fetch, host);
    if (status == HDL_OK)
        status = fetch_ask(&fetch, id, key);
    host_fork_close(fetch.socket);
    host_channel_wipe(&fetch.channel);
    if (status == HDL_OK)
        *fd = fetch.fd;
    else if (fetch.fd >= 0)
        (void)close(fetch.fd);
    return status;
}
