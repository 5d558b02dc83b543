/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control connection of a rank is cut, as by the network: it is made again,
 * operations end with HDL_OK, nobody is lost, and the counter of reconnections grows.
 */
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rank.h"

static struct rank self;

/* Shuts down the connected TCP sockets of this process; returns how many. */
static int cut(void)
{
    int cuts = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_storage addr;
        socklen_t length = sizeof(addr);
        int type = 0;
        socklen_t type_length = sizeof(type);
        if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_length) != 0 ||
            type != SOCK_STREAM ||
            getpeername(fd, (struct sockaddr *)&addr, &length) != 0 ||
            (addr.ss_family != AF_INET && addr.ss_family != AF_INET6))
            continue;
        cuts += shutdown(fd, SHUT_RDWR) == 0;
    }
    return cuts;
}

int main(void)
{
    rank_join(&self);
    rank_sums(&self, 10);
    if (self.rank == 1)
        CHECK(cut() > 0, "no connection to cut");
    rank_sums(&self, 1000);
    rank_sleep_ms(1500);
    rank_sums(&self, 1000);
    struct hdl_group_stats stats = {.size = sizeof(stats)};
    struct hdl_view view = {0};
    CHECK_OK(hdl_group_stats(self.group, &stats));
    CHECK_OK(hdl_group_view(self.group, &view));
    CHECK(self.rank != 1 || stats.reconnects >= 1, "no reconnection was counted");
    CHECK(view.num_absent == 0 && view.num_active == self.size, "somebody was lost");
    /* Who leaves changes the view of those who look later. */
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    rank_leave(&self);
    return 0;
}
