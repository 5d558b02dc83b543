/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets that this process listens on, for tests that knock there. */
#ifndef RANKS_LISTENERS_H
#define RANKS_LISTENERS_H

#include <sys/socket.h>

struct listener {
    struct sockaddr_storage address;
    socklen_t length;
};

/* Returns how many there are, at most `most`. */
int listeners_find(struct listener *found, int most);
/* A connection that waits `seconds` at most; -1 if there is none. */
int listeners_dial(const struct listener *listener, int seconds);

#endif
