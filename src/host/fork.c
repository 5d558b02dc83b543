/* SPDX-License-Identifier: Apache-2.0 */
/* The table of open descriptors and the handlers that run around fork. */
#include "host/fork.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

/* Of the process, not of a context: it must be reachable from a handler without argument.
 */
static struct {
    pthread_mutex_t lock;
    int *fds;
    size_t count;
    size_t capacity;
    atomic_uint generation;
    int install_error;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER};

static pthread_once_t install_once = PTHREAD_ONCE_INIT;

void host_fork_hold(void)
{
    (void)pthread_mutex_lock(&table.lock);
}

void host_fork_release(void)
{
    (void)pthread_mutex_unlock(&table.lock);
}

/* Only what is safe between fork and exec: close and plain stores. */
static void in_child(void)
{
    for (size_t i = 0; i < table.count; i++)
        (void)close(table.fds[i]);
    table.count = 0;
    atomic_fetch_add_explicit(&table.generation, 1, memory_order_relaxed);
    (void)pthread_mutex_unlock(&table.lock);
}

static void install(void)
{
    table.install_error = pthread_atfork(host_fork_hold, host_fork_release, in_child);
}

enum hdl_status host_fork_install(void)
{
    (void)pthread_once(&install_once, install);
    if (table.install_error)
        return base_fail_errno(HDL_ENOMEM, table.install_error, "pthread_atfork");
    return HDL_OK;
}

enum hdl_status host_fork_note(int fd)
{
    if (table.count == table.capacity) {
        size_t capacity = table.capacity ? 2 * table.capacity : 64;
        int *fds = realloc(table.fds, capacity * sizeof(*fds));
        if (!fds)
            return base_fail(HDL_ENOMEM, "no memory for a table of %zu descriptors",
                             capacity);
        table.fds = fds;
        table.capacity = capacity;
    }
    table.fds[table.count++] = fd;
    return HDL_OK;
}

int host_fork_keep(int fd)
{
    if (fd < 0 || host_fork_note(fd) == HDL_OK)
        return fd;
    (void)close(fd);
    errno = ENOMEM;
    return -1;
}

int host_fork_socket(int family)
{
    host_fork_hold();
    int fd =
        host_fork_keep(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = errno;
    host_fork_release();
    return fd < 0 ? -error : fd;
}

int host_fork_accept(int listener)
{
    host_fork_hold();
    int fd = host_fork_keep(accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK));
    int error = errno;
    host_fork_release();
    return fd < 0 ? -error : fd;
}

static void forget_locked(int fd)
{
    for (size_t i = 0; i < table.count; i++) {
        if (table.fds[i] != fd)
            continue;
        table.fds[i] = table.fds[--table.count];
        break;
    }
    if (table.count == 0) {
        free(table.fds);
        table.fds = NULL;
        table.capacity = 0;
    }
}

void host_fork_forget(int fd)
{
    host_fork_hold();
    forget_locked(fd);
    host_fork_release();
}

void host_fork_close(int fd)
{
    if (fd < 0)
        return;
    host_fork_hold();
    forget_locked(fd);
    (void)close(fd);
    host_fork_release();
}

unsigned host_fork_generation(void)
{
    return atomic_load_explicit(&table.generation, memory_order_relaxed);
}
