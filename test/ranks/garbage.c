/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Strangers at every socket that a rank listens on, TCP and unix: nothing at all,
 * garbage, another protocol, huge lengths, cut frames, floods of connections. They are
 * refused and counted, and the ranks' work is not disturbed.
 */
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rank.h"

enum { MOST = 32, ROUNDS = 20 };

struct listener {
    struct sockaddr_storage address;
    socklen_t length;
};

static struct rank self;
static struct listener listeners[MOST];
static int num_listeners, num_tcp;

/* What this process listens on, found among its descriptors. */
static void find_listeners(void)
{
    for (int fd = 3; fd < 1024 && num_listeners < MOST; fd++) {
        struct listener *l = &listeners[num_listeners];
        int accepts = 0;
        socklen_t length = sizeof(accepts);
        l->length = sizeof(l->address);
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) != 0 ||
            !accepts || getsockname(fd, (struct sockaddr *)&l->address, &l->length) != 0)
            continue;
        struct sockaddr_in *in = (struct sockaddr_in *)&l->address;
        if (l->address.ss_family == AF_INET) {
            CHECK(in->sin_addr.s_addr != htonl(INADDR_ANY), "listens on every interface");
            num_tcp++;
        }
        num_listeners++;
    }
}

static int dial(const struct listener *listener)
{
    int fd = socket(listener->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = 2};
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(fd, (const struct sockaddr *)&listener->address, listener->length) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static void say(const struct listener *listener, const void *bytes, size_t length)
{
    int fd = dial(listener);
    char answer[4096];
    if (fd < 0)
        return;
    if (send(fd, bytes, length, MSG_NOSIGNAL) > 0)
        (void)!recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
    close(fd);
}

/* Says what a server says first, back to it. */
static void echo(const struct listener *listener)
{
    int fd = dial(listener);
    char answer[4096];
    if (fd < 0)
        return;
    ssize_t got = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
    rank_sleep_ms(20);
    if (got <= 0)
        got = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
    for (int i = 0; got > 0 && i < 3; i++)
        (void)!send(fd, answer, (size_t)got, MSG_NOSIGNAL);
    close(fd);
}

static void *strangers(void *argument)
{
    static const char web[] = "GET / HTTP/1.1\r\nHost: heddle\r\n\r\n";
    static unsigned char bytes[100000];
    static const unsigned char lengths[][8] = {
        {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
        {0, 0, 0, 0x80, 0, 0, 0, 0},
        {0, 0, 0, 0, 0, 0, 0, 0},
    };
    unsigned seed = (unsigned)self.rank;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < num_listeners; i++) {
            for (size_t k = 0; k < sizeof(bytes); k++)
                bytes[k] = (unsigned char)rand_r(&seed);
            say(&listeners[i], "", 0);
            say(&listeners[i], web, sizeof(web));
            say(&listeners[i], bytes, (size_t)(1 + rand_r(&seed) % 300));
            say(&listeners[i], bytes, sizeof(bytes));
            say(&listeners[i], lengths[round % 3], 8);
            echo(&listeners[i]);
        }
    }
    return argument;
}

/* Connections that stay open and say nothing. */
static void flood(void)
{
    int fds[200], count = 0;
    for (int i = 0; i < num_listeners; i++)
        for (int k = 0; k < 60 && count < 200; k++) {
            int fd = dial(&listeners[i]);
            if (fd >= 0)
                fds[count++] = fd;
        }
    rank_sleep_ms(300);
    while (count > 0)
        close(fds[--count]);
}

/* Another user of the machine. */
static void *other_user(void *argument)
{
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        if (setgid(65534) == 0 && setuid(65534) == 0)
            for (int i = 0; i < num_listeners; i++)
                say(&listeners[i], "hello", 5);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0,
          "the other user ended with %#x", status);
    return argument;
}

int main(void)
{
    pthread_t thread;
    rank_join(&self);
    rank_sums(&self, 10);
    find_listeners();
    CHECK(num_listeners > 0 && (self.rank != 0 || num_tcp > 0),
          "%d listening sockets, %d of TCP", num_listeners, num_tcp);
    CHECK(pthread_create(&thread, NULL, strangers, NULL) == 0, "no thread");
    for (int i = 0; i < 200; i++) {
        rank_sums(&self, 10);
        rank_sleep_ms(2);
    }
    CHECK(pthread_join(thread, NULL) == 0, "no join");
    flood();
    if (geteuid() == 0)
        other_user(NULL);
    rank_sums(&self, 100);
    /* A group can be made while strangers are about. */
    CHECK(pthread_create(&thread, NULL, strangers, NULL) == 0, "no thread");
    struct hdl_group *more = rank_group(self.context, "more");
    CHECK_OK(hdl_barrier(more, NULL, NULL));
    CHECK(pthread_join(thread, NULL) == 0, "no join");
    hdl_group_destroy(more);
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(self.rank != 0 || stats.refused_frames > 0, "no refusal was counted");
    CHECK(view.num_absent == 0 && view.num_active == self.size, "somebody was lost");
    rank_sums(&self, 10);
    rank_leave(&self);
    return 0;
}
