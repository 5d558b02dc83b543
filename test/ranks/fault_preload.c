/* SPDX-License-Identifier: Apache-2.0 */
/* Preloaded into one rank: its n-th call of one function of libc fails, or kills it.
 *
 *     HEDDLE_TEST_FAULT=RANK:FUNCTION:N     e.g. 1:mmap:3
 *
 * "kill_send" kills the rank before its message number (n + 1) / 2 to a socket for odd n,
 * after it for even n: a fault point on either side of every message of the control
 * plane.
 *
 * A call counts once the program has called fault_arm, in any thread, and once the n-th
 * has failed the later ones work. When it fails "[fault] FUNCTION N" goes to stderr;
 * without that line N was larger than the calls made.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static char function[32];
static atomic_long countdown = -1; /* the call that takes it from 0 fails */

void fault_arm(void);

/* The program calls it, found by dlsym, when the calls are to be counted. */
void fault_arm(void)
{
    const char *fault = getenv("HEDDLE_TEST_FAULT");
    const char *rank = getenv("RANK");
    int wanted;
    long count;
    if (!fault || !rank ||
        sscanf(fault, "%d:%31[a-z0-9_]:%ld", &wanted, function, &count) != 3)
        return;
    if (wanted == atoi(rank) && count > 0)
        atomic_store(&countdown, count - 1);
}

/* A program without fault_arm counts from its start if it is told to. */
static void __attribute__((constructor)) arm_at_start(void)
{
    if (getenv("HEDDLE_TEST_FAULT_NOW"))
        fault_arm();
}

static bool fails(const char *name, int error)
{
    if (atomic_load(&countdown) < 0 || strcmp(name, function) != 0)
        return false;
    if (atomic_fetch_sub(&countdown, 1) != 0)
        return false;
    char line[64];
    int length = snprintf(line, sizeof(line), "[fault] %s\n", name);
    ssize_t written = write(STDERR_FILENO, line, (size_t)length);
    (void)written;
    errno = error;
    return true;
}

/* The next definition of a function; a union because ISO C has no cast from void * to a
 * function. */
#define NEXT(name)                                                                       \
    union {                                                                              \
        void *symbol;                                                                    \
        __typeof__(name) *call;                                                          \
    } next = {dlsym(RTLD_NEXT, #name)}

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
void *malloc(size_t size);
void *calloc(size_t count, size_t size);

/* dlsym allocates, so these two call libc by its own names. */
void *malloc(size_t size)
{
    return fails("malloc", ENOMEM) ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails("malloc", ENOMEM) ? NULL : __libc_calloc(count, size);
}

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    NEXT(mmap);
    return fails("mmap", ENOMEM) ? MAP_FAILED
                                 : next.call(addr, length, prot, flags, fd, offset);
}

int socket(int domain, int type, int protocol)
{
    NEXT(socket);
    return fails("socket", EMFILE) ? -1 : next.call(domain, type, protocol);
}

int memfd_create(const char *name, unsigned flags)
{
    NEXT(memfd_create);
    return fails("memfd_create", EMFILE) ? -1 : next.call(name, flags);
}

int eventfd(unsigned value, int flags)
{
    NEXT(eventfd);
    return fails("eventfd", EMFILE) ? -1 : next.call(value, flags);
}

int epoll_create1(int flags)
{
    NEXT(epoll_create1);
    return fails("epoll_create1", EMFILE) ? -1 : next.call(flags);
}

int ftruncate(int fd, off_t length)
{
    NEXT(ftruncate);
    return fails("ftruncate", ENOSPC) ? -1 : next.call(fd, length);
}

int connect(int fd, const struct sockaddr *addr, socklen_t length)
{
    NEXT(connect);
    return fails("connect", EAGAIN) ? -1 : next.call(fd, addr, length);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *),
                   void *arg)
{
    NEXT(pthread_create);
    return fails("pthread_create", EAGAIN) ? EAGAIN : next.call(thread, attr, start, arg);
}

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    NEXT(sendmsg);
    if (fails("kill_send", 0))
        raise(SIGKILL);
    ssize_t sent = next.call(fd, msg, flags);
    int error = errno;
    if (fails("kill_send", 0))
        raise(SIGKILL);
    errno = error;
    return sent;
}

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    NEXT(send);
    if (fails("kill_send", 0))
        raise(SIGKILL);
    ssize_t sent = next.call(fd, data, size, flags);
    int error = errno;
    if (fails("kill_send", 0))
        raise(SIGKILL);
    errno = error;
    return sent;
}
