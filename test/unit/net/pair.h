/* SPDX-License-Identifier: Apache-2.0 */
/* Two processes joined by a transport: a fake exchange over memory shared before fork. */
#ifndef TEST_NET_PAIR_H
#define TEST_NET_PAIR_H

#include "base/clock.h"
#include "base/env.h"
#include "base/random.h"
#include "net/internal.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            fprintf(stderr, "%s:%d: %s [%s]\n", __FILE__, __LINE__, #condition,          \
                    base_detail());                                                      \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

enum { PAIR_OFFERS = 256 };

struct pair_offer {
    _Atomic uint64_t id;
    uint64_t key;
    int32_t pid;
    int32_t fd;
};

/* Shared by both processes. */
struct pair_shared {
    struct pair_offer offers[PAIR_OFFERS];
    _Atomic uint32_t steps[2];
    struct {
        _Atomic uint32_t ready;
        size_t length;
        uint8_t bytes[NET_HANDLE_BYTES];
    } handles[2][8];
    _Atomic uint64_t numbers[16];
};

struct pair {
    struct pair_shared *shared;
    struct base_env env;
    struct net *net;
    int side;
    uint32_t step;
    enum net_transport transport;
    const char *address;
};

static enum hdl_status pair_offer(void *user, uint64_t id, uint64_t key, int fd)
{
    struct pair_shared *shared = ((struct pair *)user)->shared;
    for (size_t i = 0; i < PAIR_OFFERS; i++) {
        uint64_t none = 0;
        struct pair_offer *offer = &shared->offers[i];
        if (atomic_load(&offer->id) != 0 ||
            !atomic_compare_exchange_strong(&offer->id, &none, 1))
            continue;
        offer->key = key;
        offer->pid = getpid();
        offer->fd = fd;
        atomic_store(&offer->id, id);
        return HDL_OK;
    }
    return HDL_ENOMEM;
}

static void pair_withdraw(void *user, uint64_t id)
{
    struct pair_shared *shared = ((struct pair *)user)->shared;
    for (size_t i = 0; i < PAIR_OFFERS; i++) {
        if (atomic_load(&shared->offers[i].id) == id)
            atomic_store(&shared->offers[i].id, 0);
    }
}

static enum hdl_status pair_fetch(void *user, const char *socket_name, uint64_t id,
                                  uint64_t key, int64_t timeout_ns, int *fd)
{
    struct pair_shared *shared = ((struct pair *)user)->shared;
    for (size_t i = 0; i < PAIR_OFFERS; i++) {
        struct pair_offer *offer = &shared->offers[i];
        if (atomic_load(&offer->id) != id)
            continue;
        if (offer->key != key)
            return base_fail(HDL_EINVAL, "wrong key");
        int pidfd = (int)syscall(SYS_pidfd_open, offer->pid, 0);
        if (pidfd < 0)
            return base_fail(HDL_EPEER, "pid %d is gone", offer->pid);
        *fd = (int)syscall(SYS_pidfd_getfd, pidfd, offer->fd, 0);
        close(pidfd);
        return *fd >= 0 ? HDL_OK : base_fail(HDL_ESYSTEM, "pidfd_getfd");
    }
    return base_fail(HDL_EPEER, "no such offer");
}

/* Word `index` of a list in the environment (test/netns.sh makes it); false if there is
 * none. */
static bool pair_word(const char *variable, int index, char *out, size_t room)
{
    const char *text = getenv(variable);
    for (; text && index > 0; index--) {
        text = strchr(text, ' ');
        text = text ? text + 1 : NULL;
    }
    if (!text)
        return false;
    snprintf(out, room, "%.*s", (int)strcspn(text, " "), text);
    return true;
}

/* Under test/netns.sh each side is a host of its own. */
static void pair_enter_namespace(struct pair *pair)
{
    static char address[64];
    char name[64], path[128];
    if (!pair_word("NETNS_NAMES", pair->side, name, sizeof(name)))
        return;
    CHECK(pair_word("NETNS_ADDRESSES", pair->side, address, sizeof(address)));
    snprintf(path, sizeof(path), "/var/run/netns/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    pair->address = address;
}

static void pair_open(struct pair *pair)
{
    struct net_exchange exchange = {
        .user = pair,
        .host_id = "one host",
        .socket_name = "none",
        .pid = getpid(),
        .rank = pair->side,
        .fetch = pair_fetch,
        .offer = pair_offer,
        .withdraw = pair_withdraw,
    };
    snprintf(exchange.interface_address, sizeof(exchange.interface_address), "%s",
             pair->address);
    if (getenv("NETNS_NAMES"))
        exchange.host_id[15] = (uint8_t)pair->side;
    struct net_opts opts = {.transport = pair->transport};
    base_env_init(&pair->env);
    CHECK(base_config_load(&pair->env.config) == HDL_OK);
    pair->env.log_level = pair->env.config.log;
    CHECK(net_create(&pair->env, &exchange, &opts, &pair->net) == HDL_OK);
}

/* Both sides reach this place. */
static void pair_meet(struct pair *pair)
{
    uint32_t step = ++pair->step;
    atomic_store(&pair->shared->steps[pair->side], step);
    while (atomic_load(&pair->shared->steps[!pair->side]) < step) {
        net_poll(pair->net);
        sched_yield();
    }
}

/* A window of mine, its handle given to the other side as number `slot`. */
static struct hdl_window *pair_window(struct pair *pair, int slot, size_t bytes)
{
    struct hdl_window *window;
    CHECK(net_window_create(pair->net, bytes, &window) == HDL_OK);
    size_t length = NET_HANDLE_BYTES;
    CHECK(net_window_pack(window, pair->shared->handles[pair->side][slot].bytes,
                          &length) == HDL_OK);
    pair->shared->handles[pair->side][slot].length = length;
    atomic_store(&pair->shared->handles[pair->side][slot].ready, 1);
    return window;
}

static struct hdl_peer_window *pair_remote(struct pair *pair, int slot, unsigned access)
{
    while (!atomic_load(&pair->shared->handles[!pair->side][slot].ready))
        sched_yield();
    struct hdl_peer_window *remote;
    CHECK(net_remote_open(pair->net, pair->shared->handles[!pair->side][slot].bytes,
                          pair->shared->handles[!pair->side][slot].length, access,
                          &remote) == HDL_OK);
    return remote;
}

/* What the transports of this machine say of themselves. */
static inline const char *pair_description(void)
{
    static char text[1024];
    struct base_env env;
    base_env_init(&env);
    if (!text[0])
        net_describe(&env, text, sizeof(text));
    return text;
}

static inline bool pair_has_fabric(void)
{
    return strstr(pair_description(), "\"provider\"") != NULL;
}

/* Can a link that breaks be made again? Not with ofi_rxm of libfabric before 1.12. */
static inline bool pair_relinks(void)
{
    unsigned major = 0, minor = 0;
    const char *version = strstr(pair_description(), "\"libfabric\":\"");
    return version && sscanf(version + 13, "%u.%u", &major, &minor) == 2 &&
           (major > 1 || minor >= 12);
}

/* Runs a body on both sides, each in its own process, with a time limit. 0 = both fine.
 * One that ends itself by SIGTERM plays a killed process. */
typedef void pair_body(struct pair *pair);

static int pair_run(enum net_transport transport, pair_body *body)
{
    struct pair_shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    pid_t pids[2];
    fflush(NULL);
    for (int side = 0; side < 2; side++) {
        pids[side] = fork();
        if (pids[side] == 0) {
            alarm(40);
            struct pair pair = {.shared = shared,
                                .side = side,
                                .transport = transport,
                                .address = "127.0.0.1"};
            pair_enter_namespace(&pair);
            pair_open(&pair);
            body(&pair);
            net_destroy(pair.net);
            exit(0);
        }
    }
    int failures = 0;
    for (int i = 0; i < 2; i++) {
        int state = 0;
        pid_t pid = wait(&state);
        if (state != 0 && !(WIFSIGNALED(state) && WTERMSIG(state) == SIGTERM)) {
            failures++;
            fprintf(stderr, "side %d: wait status %d\n", pid == pids[1], state);
            /* The other one waits for it. */
            kill(pid == pids[0] ? pids[1] : pids[0], SIGKILL);
        }
    }
    munmap(shared, sizeof(*shared));
    return failures;
}

#endif
