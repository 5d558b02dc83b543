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
#include <sys/wait.h>
#include <unistd.h>

#include "listeners.h"
#include "rank.h"

enum { MOST = 32, ROUNDS = 20 };

static struct rank self;
static struct listener listeners[MOST];
static int num_listeners, num_tcp;

/* None of TCP is open to every interface. */
static void find_listeners(void)
{
    num_listeners = listeners_find(listeners, MOST);
    for (int i = 0; i < num_listeners; i++) {
        const struct sockaddr_in *in = (struct sockaddr_in *)&listeners[i].address;
        if (in->sin_family != AF_INET)
            continue;
        CHECK(in->sin_addr.s_addr != htonl(INADDR_ANY), "listens on every interface");
        num_tcp++;
    }
}

static void say(const struct listener *listener, const void *bytes, size_t length)
{
    int fd = listeners_dial(listener, 2);
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
    int fd = listeners_dial(listener, 2);
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
            int fd = listeners_dial(&listeners[i], 2);
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
