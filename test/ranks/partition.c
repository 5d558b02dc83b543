/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network between hosts fails for a while. Only the side with the coordinator goes on
 * and changes the membership, however small it is; the others are told HDL_ECOORD, or
 * HDL_EFENCED when it is back, until they join again. Then there is one view everywhere.
 *
 *     partition half      ranks 0 and 1 on one host, 2 and 3 on the other, whose
 *                         interface goes down
 *     partition small     each rank on its own host; the one of rank 0 goes down
 *     partition one_way   as half, but only what ranks 2 and 3 send is lost
 */
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "member.h"

enum { DEAD_AFTER_MS = 400, CUT_MS = 300, AFTER = 20 };

static const char *mode;

static bool is_mode(const char *name)
{
    return strcmp(mode, name) == 0;
}

static int control(unsigned long request, void *argument)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    int result = ioctl(fd, request, argument);
    close(fd);
    return result;
}

static void set_interface(bool up)
{
    struct ifreq request = {.ifr_name = "heddle0"};
    CHECK(control(SIOCGIFFLAGS, &request) == 0, "no interface heddle0");
    request.ifr_flags =
        (short)(up ? request.ifr_flags | IFF_UP : request.ifr_flags & ~IFF_UP);
    CHECK(control(SIOCSIFFLAGS, &request) == 0, "the interface cannot be changed");
}

/* A route that rejects what goes to the first host. */
static void set_route(bool open)
{
    struct rtentry route = {.rt_flags = RTF_UP | RTF_HOST | RTF_REJECT};
    struct sockaddr_in *to = (struct sockaddr_in *)(void *)&route.rt_dst;
    to->sin_family = AF_INET;
    to->sin_addr.s_addr = htonl(0x0a4d0001);
    CHECK(control(open ? SIOCDELRT : SIOCADDRT, &route) == 0, "no route");
}

static void cut(bool whole)
{
    if (is_mode("one_way"))
        set_route(whole);
    else
        set_interface(whole);
}

static void go_on(int own, int lost)
{
    double start = rank_now();
    member_sum_until(own, lost);
    CHECK(rank_now() - start < 3.0 * RANK_SLOW, "alone after %.2f s", rank_now() - start);
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == own, "not %#x", own);
    CHECK(member_active() == own, "active %#x", member_active());
}

static void be_cut_off(void)
{
    enum hdl_status status = HDL_OK;
    double start = rank_now();
    while (status >= 0) {
        int all = member_sum(&status);
        CHECK(status < 0 || all == (1 << self.size) - 1, "went on as %#x", all);
    }
    CHECK(status == HDL_ECOORD || status == HDL_EFENCED, "%s: %s",
          hdl_status_name(status), hdl_error_detail());
    CHECK(rank_now() - start < (3.0 + 1e-3 * DEAD_AFTER_MS) * RANK_SLOW,
          "told after %.2f s", rank_now() - start);
    int ready = self.rank;
    if (!is_mode("small") && ready == 2)
        rank_sleep_ms(CUT_MS);
}

/* Until the coordinator is reached again. */
static void come_back(void)
{
    enum hdl_status status = HDL_ECOORD;
    double start = rank_now();
    while ((status == HDL_ECOORD || status == HDL_EFENCED) &&
           rank_now() - start < 15 * RANK_SLOW) {
        status = hdl_group_join(self.group, CHANGE_US, NULL);
        if (status == HDL_ECOORD)
            rank_sleep_ms(20);
    }
    CHECK(status == HDL_OK, "%s: %s", hdl_status_name(status), hdl_error_detail());
}

int main(int argc, char **argv)
{
    const struct hdl_context_opts opts = {
        .size = sizeof(opts), .dead_after_us = DEAD_AFTER_MS * 1000 * RANK_SLOW};
    mode = argc > 1 ? argv[1] : "half";
    member_begin(&opts, false);
    member_found(self.size, self.size, false);
    int all = (1 << self.size) - 1, own = is_mode("small") ? 1 : 3;
    bool inside = own >> self.rank & 1;
    bool cuts = self.rank == (is_mode("small") ? 0 : 2);
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == all, "not all");
    if (cuts)
        cut(false);
    if (inside)
        go_on(own, all & ~own);
    else
        be_cut_off();
    if (cuts && inside)
        rank_sleep_ms(CUT_MS);
    if (cuts)
        cut(true);
    if (inside)
        for (int r = 0; r < self.size; r++)
            if (!(own >> r & 1))
                member_admit(r);
    if (!inside)
        come_back();
    member_sum_until(all, 0);
    for (int i = 0; i < AFTER; i++)
        CHECK(member_sum_ok() == all, "not all again");
    CHECK(member_active() == all, "active %#x", member_active());
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
    member_end();
    return 0;
}
