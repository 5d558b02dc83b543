/* SPDX-License-Identifier: Apache-2.0 */
/* The unix socket: watched by the processes of this host, hands out descriptors. */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/log.h"
#include "base/random.h"
#include "ctl/bytes.h"
#include "host/conn.h"
#include "host/fork.h"
#include "host/internal.h"

/*
 * The name is abstract and unguessable, the peer's uid is checked, and the stream is
 * authenticated with the job's token. Purposes:
 *
 *     WATCH   client sends nothing; server sends one 'g' before a proper end
 *     FETCH   client sends {u64 id, u64 key}, server answers {u32 status}, with the
 *             descriptor beside it if the status is 0
 */

struct host_offer {
    struct base_list node;
    uint64_t id;
    uint64_t key;
    int fd;
};

static socklen_t fill_name(struct sockaddr_un *addr, const char *name)
{
    memset(addr, 0, sizeof(*addr));
    addr->sun_family = AF_UNIX;
    size_t length = strnlen(name, sizeof(addr->sun_path) - 1);
    memcpy(addr->sun_path + 1, name, length);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length);
}

bool host_local_same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
           peer.uid == geteuid();
}

int host_local_connect(const char *name)
{
    int fd = host_fork_socket(AF_UNIX);
    if (fd < 0)
        return fd;
    struct sockaddr_un addr;
    socklen_t size = fill_name(&addr, name);
    if (connect(fd, (struct sockaddr *)&addr, size) == 0)
        return fd;
    int error = errno;
    host_fork_close(fd);
    return -error;
}

/* -------------------------------------------------------------------------- offers */

static struct host_offer *find_offer(struct host *host, uint64_t id)
{
    base_list_each(node, after, &host->offers)
    {
        struct host_offer *offer = base_container_of(node, struct host_offer, node);
        if (offer->id == id)
            return offer;
    }
    return NULL;
}

enum hdl_status host_offer_fd(struct host *host, uint64_t id, uint64_t key, int fd)
{
    struct host_offer *offer = base_alloc(host->env, 1, sizeof(*offer));
    if (!offer)
        return HDL_ENOMEM;
    offer->id = id;
    offer->key = key;
    offer->fd = fd;
    (void)pthread_mutex_lock(&host->offer_lock);
    bool taken = find_offer(host, id) != NULL;
    if (!taken)
        base_list_push_back(&host->offers, &offer->node);
    (void)pthread_mutex_unlock(&host->offer_lock);
    if (!taken)
        return HDL_OK;
    base_free(host->env, offer);
    return base_fail(HDL_EBUSY, "descriptor %llu is offered already",
                     (unsigned long long)id);
}

void host_withdraw_fd(struct host *host, uint64_t id)
{
    if (host_check(host))
        return;
    (void)pthread_mutex_lock(&host->offer_lock);
    struct host_offer *offer = find_offer(host, id);
    if (offer)
        base_list_remove(&offer->node);
    (void)pthread_mutex_unlock(&host->offer_lock);
    base_free(host->env, offer);
}

enum hdl_status host_offer_take(struct host *host, uint64_t id, uint64_t key, int *fd)
{
    (void)pthread_mutex_lock(&host->offer_lock);
    struct host_offer *offer = find_offer(host, id);
    int copy = -1;
    int error = 0;
    bool right = offer && offer->key == key;
    if (right) {
        copy = fcntl(offer->fd, F_DUPFD_CLOEXEC, 0);
        error = errno;
    }
    (void)pthread_mutex_unlock(&host->offer_lock);
    if (!right)
        return base_fail(HDL_EINVAL, "no descriptor %llu with this key",
                         (unsigned long long)id);
    if (copy < 0)
        return base_fail_errno(HDL_ESYSTEM, error, "cannot duplicate descriptor %llu",
                               (unsigned long long)id);
    *fd = copy;
    return HDL_OK;
}

/* --------------------------------------------------------------------- connections */

/* One sealed frame with a descriptor beside its first byte. The answer is the only thing
 * on its way to that peer, so it fits, or the peer does not read. */
static bool send_answer(struct host_conn *conn, enum hdl_status status, int fd)
{
    uint8_t payload[4], length[HOST_LENGTH_BYTES], tag[HOST_TAG_BYTES];
    struct base_writer writer;
    base_writer_init(&writer, payload, sizeof(payload));
    base_write_u32(&writer, (uint32_t)(int32_t)status);
    host_channel_seal(&conn->channel, payload, sizeof(payload), length, tag);
    struct iovec parts[3] = {
        {length, sizeof(length)}, {payload, sizeof(payload)}, {tag, sizeof(tag)}};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof(control));
    struct msghdr msg = {.msg_iov = parts, .msg_iovlen = 3};
    if (fd >= 0) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = sizeof(control.bytes);
        struct cmsghdr *head = CMSG_FIRSTHDR(&msg);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &fd, sizeof(int));
    }
    ssize_t sent = sendmsg(conn->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent == (ssize_t)(sizeof(length) + sizeof(payload) + sizeof(tag));
}

static void on_frame(struct host_conn *conn, const void *data, size_t size)
{
    struct base_reader reader;
    base_reader_init(&reader, data, size);
    uint64_t id = base_read_u64(&reader);
    uint64_t key = base_read_u64(&reader);
    if (conn->channel.purpose != HOST_PURPOSE_FETCH || !base_reader_done(&reader) ||
        !base_list_empty(&conn->out)) {
        host_refused(conn->host, conn->peer, HOST_REFUSAL_PURPOSE, 0);
        host_conn_close(conn);
        return;
    }
    int fd = -1;
    enum hdl_status status = host_offer_take(conn->host, id, key, &fd);
    if (!send_answer(conn, status, fd))
        host_conn_close(conn);
    if (fd >= 0)
        (void)close(fd);
}

static const struct host_conn_ops local_ops = {
    .purposes = 1u << HOST_PURPOSE_WATCH | 1u << HOST_PURPOSE_FETCH,
    .max_frame = HOST_FETCH_BYTES,
    .frame = on_frame,
};

static void on_acceptable(uv_poll_t *poll, int status, int events)
{
    struct host *host = poll->data;
    (void)events;
    while (status == 0) {
        int fd = host_fork_accept(host->local_fd), error = -fd;
        struct host_conn *conn;
        if (fd >= 0 && host_local_same_user(fd)) {
            (void)host_conn_create(host, fd, &local_ops, 0, false, NULL, &conn);
        } else if (fd >= 0) {
            host_fork_close(fd);
            host_refused(host, "unix socket", HOST_REFUSAL_USER, 0);
        } else if (error == EMFILE || error == ENFILE || error == ENOMEM) {
            /* The socket stays readable: look again with the handshakes' timer. */
            (void)uv_poll_stop(&host->local_poll);
            host_handshake_started(host);
            break;
        } else if (error != EINTR && error != ECONNABORTED) {
            break;
        }
    }
    host_pump(host);
}

void host_local_resume(struct host *host)
{
    if (host->local_polled && !host->leaving &&
        !uv_is_active((uv_handle_t *)&host->local_poll))
        (void)uv_poll_start(&host->local_poll, UV_READABLE, on_acceptable);
}

void host_local_say_goodbye(struct host *host)
{
    const char byte = HOST_GOODBYE_BYTE;
    struct ctl_bytes *bytes = ctl_bytes_new(host->env, &byte, 1);
    if (!bytes)
        return; /* then leaving looks like a death, which is survivable */
    base_list_each(node, after, &host->conns)
    {
        struct host_conn *conn = base_container_of(node, struct host_conn, node);
        if (conn->ops == &local_ops && conn->opened &&
            conn->channel.purpose == HOST_PURPOSE_WATCH)
            host_conn_send(conn, bytes);
    }
    ctl_bytes_unref(bytes);
}

/* ------------------------------------------------------------------ open and close */

enum hdl_status host_local_open(struct host *host)
{
    uint8_t random[16];
    enum hdl_status status = base_random_bytes(random, sizeof(random));
    if (status)
        return status;
    (void)strcpy(host->identity.socket_name, "heddle-");
    base_format_hex(random, sizeof(random), host->identity.socket_name + 7);
    int fd = host_fork_socket(AF_UNIX);
    if (fd < 0)
        return base_fail_errno(HDL_ESYSTEM, -fd, "cannot make a unix socket");
    struct sockaddr_un addr;
    socklen_t size = fill_name(&addr, host->identity.socket_name);
    if (bind(fd, (struct sockaddr *)&addr, size) < 0 || listen(fd, SOMAXCONN) < 0) {
        int error = errno;
        host_fork_close(fd);
        return base_fail_errno(HDL_ESYSTEM, error, "cannot listen on a unix socket");
    }
    host->local_fd = fd;
    return HDL_OK;
}

enum hdl_status host_local_listen(struct host *host)
{
    int error = uv_poll_init(&host->loop, &host->local_poll, host->local_fd);
    if (error)
        return base_fail(HDL_ESYSTEM, "cannot poll the unix socket: %s",
                         uv_strerror(error));
    host->local_poll.data = host;
    host->local_polled = true;
    host_local_resume(host);
    return HDL_OK;
}

void host_local_close(struct host *host)
{
    if (host->local_polled) {
        (void)uv_poll_stop(&host->local_poll);
        uv_close((uv_handle_t *)&host->local_poll, NULL);
        host->local_polled = false;
    }
    host_fork_close(host->local_fd);
    host->local_fd = -1;
}
