/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses of this machine: which one is meant, which one peers can reach. */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host/boot.h"
#include "host/internal.h"

bool host_address_is_loopback(const struct sockaddr_storage *addr)
{
    if (addr->ss_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)addr;
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    }
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)addr;
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) != 0;
}

void host_address_set_port(struct sockaddr_storage *addr, uint16_t port)
{
    if (addr->ss_family == AF_INET)
        ((struct sockaddr_in *)(void *)addr)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)(void *)addr)->sin6_port = htons(port);
}

uint16_t host_address_port(const struct sockaddr_storage *addr)
{
    if (addr->ss_family == AF_INET)
        return ntohs(((const struct sockaddr_in *)(const void *)addr)->sin_port);
    return ntohs(((const struct sockaddr_in6 *)(const void *)addr)->sin6_port);
}

socklen_t host_address_size(const struct sockaddr_storage *addr)
{
    return addr->ss_family == AF_INET ? sizeof(struct sockaddr_in)
                                      : sizeof(struct sockaddr_in6);
}

void host_address_numeric(const struct sockaddr_storage *addr, char *text, size_t size)
{
    if (getnameinfo((const struct sockaddr *)addr, host_address_size(addr), text,
                    (socklen_t)size, NULL, 0, NI_NUMERICHOST) != 0)
        (void)snprintf(text, size, "?");
}

void host_address_format(const struct sockaddr_storage *addr, char *text, size_t size)
{
    char host[64];
    host_address_numeric(addr, host, sizeof(host));
    bool v6 = addr->ss_family == AF_INET6;
    (void)snprintf(text, size, "%s%.60s%s:%u", v6 ? "[" : "", host, v6 ? "]" : "",
                   host_address_port(addr));
}

static enum hdl_status look_up(const char *name, uint16_t port, int flags,
                               struct host_addresses *out)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags};
    struct addrinfo *list = NULL;
    int error = getaddrinfo(name, NULL, &hints, &list);
    if (error)
        return base_fail(error == EAI_MEMORY ? HDL_ENOMEM : HDL_EINVAL,
                         "cannot resolve host %s: %s", name, gai_strerror(error));
    out->count = 0;
    for (struct addrinfo *each = list; each && out->count < HOST_ADDRESSES_MAX;
         each = each->ai_next) {
        if (each->ai_family != AF_INET && each->ai_family != AF_INET6)
            continue;
        struct sockaddr_storage *addr = &out->items[out->count++];
        memset(addr, 0, sizeof(*addr));
        memcpy(addr, each->ai_addr, each->ai_addrlen);
        host_address_set_port(addr, port);
    }
    freeaddrinfo(list);
    if (out->count == 0)
        return base_fail(HDL_EINVAL, "host %s has no address", name);
    return HDL_OK;
}

enum hdl_status host_address_resolve(const char *name, uint16_t port,
                                     struct host_addresses *out)
{
    return look_up(name, port, 0, out);
}

enum hdl_status host_address_parse(const char *text, uint16_t port,
                                   struct host_addresses *out)
{
    return look_up(text, port, AI_NUMERICHOST, out);
}

/* ------------------------------------------------------------------------ choosing */

/* Is `name` an item of "a,b,c"? */
static bool listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (strncmp(at, name, length) == 0 && (at[length] == ',' || at[length] == 0))
            return true;
    return false;
}

static bool copy_ip(const struct sockaddr *from, struct sockaddr_storage *out)
{
    if (!from || (from->sa_family != AF_INET && from->sa_family != AF_INET6))
        return false;
    memset(out, 0, sizeof(*out));
    memcpy(out, from,
           from->sa_family == AF_INET ? sizeof(struct sockaddr_in)
                                      : sizeof(struct sockaddr_in6));
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)out;
    return out->ss_family == AF_INET || !IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr);
}

/* Higher is better; 0 = not wanted. */
static int rate(const struct ifaddrs *each, const char *interface, const char *address)
{
    struct sockaddr_storage addr;
    if (!(each->ifa_flags & IFF_UP) || !copy_ip(each->ifa_addr, &addr))
        return 0;
    int v4 = addr.ss_family == AF_INET ? 1 : 0;
    if (interface[0] == '^') {
        if (listed(interface + 1, each->ifa_name))
            return 0;
        return host_address_is_loopback(&addr) ? 1 + v4 : 3 + v4;
    }
    if (strcmp(each->ifa_name, interface) == 0)
        return 1 + v4;
    char text[64];
    host_address_numeric(&addr, text, sizeof(text));
    return strcmp(text, address) == 0 ? 1 : 0;
}

/* The address of the default route: a connected datagram socket sends nothing. */
static bool default_route(struct sockaddr_storage *out)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
    to.sin_addr.s_addr = htonl(0xc0000201u); /* 192.0.2.1, reserved for documentation */
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    socklen_t size = sizeof(*out);
    memset(out, 0, sizeof(*out));
    bool found = connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0 &&
                 getsockname(fd, (struct sockaddr *)out, &size) == 0;
    (void)close(fd);
    host_address_set_port(out, 0);
    return found;
}

enum hdl_status host_address_choose(const char *interface, struct sockaddr_storage *out)
{
    if (interface[0] == 0) {
        if (default_route(out))
            return HDL_OK;
        interface = "^"; /* excludes nothing */
    }
    /* An address may be typed in another form than the system prints it. */
    char address[64] = "";
    struct host_addresses typed;
    struct in6_addr scratch;
    if (interface[0] != '^' &&
        (inet_pton(AF_INET, interface, &scratch) == 1 ||
         inet_pton(AF_INET6, interface, &scratch) == 1) &&
        host_address_parse(interface, 0, &typed) == HDL_OK)
        host_address_numeric(&typed.items[0], address, sizeof(address));
    struct ifaddrs *list;
    if (getifaddrs(&list) != 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "cannot list interfaces");
    int best = 0;
    for (struct ifaddrs *each = list; each; each = each->ifa_next) {
        int rating = rate(each, interface, address);
        if (rating <= best)
            continue;
        best = rating;
        (void)copy_ip(each->ifa_addr, out);
    }
    freeifaddrs(list);
    if (best == 0)
        return base_fail(HDL_EINVAL, "no interface that is up matches \"%s\"", interface);
    host_address_set_port(out, 0);
    return HDL_OK;
}
