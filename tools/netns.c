/* SPDX-License-Identifier: Apache-2.0 */
/* Several "hosts" on one machine.
 *
 *     namespace "switch":    bridge heddle  --- port1 --- port2 --- ...
 *                                                 |         |
 *     namespaces of hosts:                    heddle0 heddle0    10.77.0.1, 10.77.0.2
 */
#include "tools/netns.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"

enum { MAX_HOSTS = 200, ADDR_BYTES = 16, MAX_RANKS = 4096 };

struct netns {
    int num_hosts;
    int switch_fd;
    int host_fds[MAX_HOSTS];
    char host_addrs[MAX_HOSTS][ADDR_BYTES];
    int *rank_fds;
    const char **rank_addrs;
};

static bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t written = write(fd, text, strlen(text));
    close(fd);
    return written == (ssize_t)strlen(text);
}

/* Gives a user who is not root the right to make namespaces, where the machine allows it:
 * from then on this process and its children appear as root inside a user namespace. */
static enum hdl_status become_root(void)
{
    char uid_map[48];
    char gid_map[48];
    if (geteuid() == 0)
        return HDL_OK;
    snprintf(uid_map, sizeof(uid_map), "0 %u 1", (unsigned)geteuid());
    snprintf(gid_map, sizeof(gid_map), "0 %u 1", (unsigned)getegid());
    if (unshare(CLONE_NEWUSER) != 0 || !write_text("/proc/self/setgroups", "deny") ||
        !write_text("/proc/self/uid_map", uid_map) ||
        !write_text("/proc/self/gid_map", gid_map))
        return base_fail_errno(HDL_ENOTSUP, errno,
                               "network namespaces need root or user namespaces");
    return HDL_OK;
}

/* A new namespace; this process stays in its own. */
static enum hdl_status make_namespace(int *out)
{
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (own < 0)
        return base_fail_errno(HDL_ENOTSUP, errno, "/proc/self/ns/net");
    if (unshare(CLONE_NEWNET) != 0) {
        base_fail_errno(HDL_ENOTSUP, errno, "a network namespace");
        close(own);
        return HDL_ENOTSUP;
    }
    int made = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int error = errno;
    if (setns(own, CLONE_NEWNET) != 0) {
        base_fail_errno(HDL_ESYSTEM, errno, "return to the own network namespace");
        close(own);
        if (made >= 0)
            close(made);
        return HDL_ESYSTEM;
    }
    close(own);
    if (made < 0)
        return base_fail_errno(HDL_ESYSTEM, error, "/proc/self/ns/net");
    *out = made;
    return HDL_OK;
}

/* Runs a shell command inside a namespace. */
static enum hdl_status run_inside(int fd, const char *command)
{
    pid_t pid = fork();
    if (pid < 0)
        return base_fail_errno(HDL_ESYSTEM, errno, "fork");
    if (pid == 0) {
        if (setns(fd, CLONE_NEWNET) != 0)
            _exit(126);
        setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    int wstatus;
    while (waitpid(pid, &wstatus, 0) < 0) {
        if (errno != EINTR)
            return base_fail_errno(HDL_ESYSTEM, errno, "wait for '%s'", command);
    }
    if (!WIFEXITED(wstatus) || WEXITSTATUS(wstatus) != 0)
        return base_fail(HDL_ENOTSUP, "'%s' failed in a network namespace", command);
    return HDL_OK;
}

static enum hdl_status make_switch(struct netns *netns)
{
    enum hdl_status status = make_namespace(&netns->switch_fd);
    if (status != HDL_OK)
        return status;
    return run_inside(netns->switch_fd, "ip link add heddle type bridge && "
                                        "ip link set heddle up && ip link set lo up");
}

static enum hdl_status make_host(struct netns *netns, int h)
{
    char command[512];
    char *addr = netns->host_addrs[h];
    enum hdl_status status = make_namespace(&netns->host_fds[h]);
    if (status != HDL_OK)
        return status;
    snprintf(addr, ADDR_BYTES, "10.77.0.%u", (unsigned)(h + 1) % 256);
    snprintf(command, sizeof(command),
             "ip link add port%d type veth peer name heddle0 netns /proc/%d/fd/%d && "
             "ip link set port%d master heddle up",
             h, (int)getpid(), netns->host_fds[h], h);
    status = run_inside(netns->switch_fd, command);
    if (status != HDL_OK)
        return status;
    snprintf(
        command, sizeof(command),
        "ip link set lo up && ip addr add %s/24 dev heddle0 && ip link set heddle0 up",
        addr);
    return run_inside(netns->host_fds[h], command);
}

/* Ranks in blocks: the first num_ranks / num_hosts (rounded up where uneven) on the
 * first. */
static void place_ranks(struct netns *netns, int num_ranks)
{
    for (int r = 0; r < num_ranks; r++) {
        int host = (int)((long)r * netns->num_hosts / num_ranks);
        netns->rank_fds[r] = netns->host_fds[host];
        netns->rank_addrs[r] = netns->host_addrs[host];
    }
}

enum hdl_status netns_create(int num_hosts, int num_ranks, struct netns **out)
{
    if (num_hosts < 1 || num_hosts > MAX_HOSTS || num_ranks < num_hosts ||
        num_ranks > MAX_RANKS)
        return base_fail(HDL_EINVAL, "%d ranks on %d hosts: 1 to %d hosts, no host empty",
                         num_ranks, num_hosts, MAX_HOSTS);
    struct netns *netns = calloc(1, sizeof(*netns));
    if (!netns)
        return base_fail(HDL_ENOMEM, "no memory for %d hosts", num_hosts);
    netns->num_hosts = num_hosts;
    netns->switch_fd = -1;
    memset(netns->host_fds, 0xff, sizeof(netns->host_fds));
    netns->rank_fds = calloc((size_t)num_ranks, sizeof(netns->rank_fds[0]));
    netns->rank_addrs = calloc((size_t)num_ranks, sizeof(netns->rank_addrs[0]));
    enum hdl_status status = HDL_OK;
    if (!netns->rank_fds || !netns->rank_addrs)
        status = base_fail(HDL_ENOMEM, "no memory for %d ranks", num_ranks);
    if (status == HDL_OK)
        status = become_root();
    if (status == HDL_OK)
        status = make_switch(netns);
    for (int h = 0; status == HDL_OK && h < num_hosts; h++)
        status = make_host(netns, h);
    if (status != HDL_OK) {
        netns_destroy(netns);
        return status;
    }
    place_ranks(netns, num_ranks);
    *out = netns;
    return HDL_OK;
}

const int *netns_rank_fds(const struct netns *netns)
{
    return netns->rank_fds;
}

const char *const *netns_rank_addrs(const struct netns *netns)
{
    return netns->rank_addrs;
}

void netns_destroy(struct netns *netns)
{
    if (!netns)
        return;
    for (int h = 0; h < netns->num_hosts; h++) {
        if (netns->host_fds[h] >= 0)
            close(netns->host_fds[h]);
    }
    if (netns->switch_fd >= 0)
        close(netns->switch_fd);
    free(netns->rank_fds);
    free(netns->rank_addrs);
    free(netns);
}
