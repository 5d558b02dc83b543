/* SPDX-License-Identifier: Apache-2.0 */
/* Test hooks: cutting a link as a cable would be cut, and keeping it cut. */
#include "net/fabric_impl.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static bool address_is(const struct sockaddr_storage *have, const uint8_t *wanted,
                       uint32_t length, bool with_port)
{
    struct sockaddr_in want;
    if (have->ss_family != AF_INET || length < sizeof(want))
        return false;
    memcpy(&want, wanted, sizeof(want));
    const struct sockaddr_in *in = (const struct sockaddr_in *)(const void *)have;
    return in->sin_addr.s_addr == want.sin_addr.s_addr &&
           (!with_port || in->sin_port == want.sin_port);
}

/* Connections that we made end at the peer's address; those it made end at ours. */
static bool belongs_to_link(int fd, const struct net_fabric *fabric,
                            const struct fabric_link *link)
{
    struct sockaddr_storage local, peer;
    socklen_t local_length = sizeof(local), peer_length = sizeof(peer);
    if (getsockname(fd, (struct sockaddr *)&local, &local_length) != 0 ||
        getpeername(fd, (struct sockaddr *)&peer, &peer_length) != 0)
        return false;
    if (address_is(&peer, link->address, link->address_length, true))
        return true;
    return address_is(&local, fabric->address, fabric->address_length, true) &&
           address_is(&peer, link->address, link->address_length, false);
}

static int break_link(struct net_fabric *fabric, struct fabric_link *link)
{
    DIR *dir = opendir("/proc/self/fd");
    if (!dir)
        return 0;
    int broken = 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        int fd = atoi(entry->d_name);
        if (belongs_to_link(fd, fabric, link) && shutdown(fd, SHUT_RDWR) == 0)
            broken++;
    }
    closedir(dir);
    return broken;
}

int net_test_break_link(struct hdl_peer_window *remote)
{
    if (!remote->fabric)
        return 0;
    struct net_fabric *fabric = remote->net->fabric;
    struct fabric_link *link = remote->fabric->link;
    fabric_lock(fabric);
    int broken = break_link(fabric, link);
    /* The provider may replace a connection silently; this break is to be counted. */
    if (broken)
        fabric_link_fail(fabric, link, "cut by a test", FI_ECONNABORTED);
    fabric_unlock(fabric);
    return broken;
}

void net_test_lose(struct net *net, uint32_t n, struct hdl_peer_window *broken)
{
    fabric_lock(net->fabric);
    net->fabric->lose = n;
    net->fabric->lose_link = broken ? broken->fabric->link : NULL;
    fabric_unlock(net->fabric);
}

bool fabric_test_loses(struct net_fabric *fabric, struct fabric_op *op)
{
    if (fabric->lose == 0 || --fabric->lose > 0)
        return false;
    if (fabric->lose_link)
        return break_link(fabric, fabric->lose_link) < 0;
    if (op->kind == FABRIC_OP_RECEIVE)
        fabric_receive_post(fabric, (struct fabric_receive *)op);
    if (op->kind == FABRIC_OP_READ)
        fabric_read_done(fabric, (struct fabric_piece *)op, FI_EIO);
    return true;
}

void net_test_hold_links(struct net *net, bool held)
{
    if (!net->fabric)
        return;
    fabric_lock(net->fabric);
    net->fabric->held = held;
    fabric_unlock(net->fabric);
}
