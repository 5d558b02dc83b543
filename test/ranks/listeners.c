/* SPDX-License-Identifier: Apache-2.0 */
/* Finds listening sockets among the descriptors, and connects to them. */
#include "listeners.h"

#include <sys/time.h>
#include <unistd.h>

int listeners_find(struct listener *found, int most)
{
    int count = 0;
    for (int fd = 3; fd < 1024 && count < most; fd++) {
        struct listener *l = &found[count];
        int accepts = 0;
        socklen_t length = sizeof(accepts);
        l->length = sizeof(l->address);
        count += getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &length) == 0 &&
                 accepts &&
                 getsockname(fd, (struct sockaddr *)&l->address, &l->length) == 0;
    }
    return count;
}

int listeners_dial(const struct listener *listener, int seconds)
{
    int fd = socket(listener->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = {.tv_sec = seconds};
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
