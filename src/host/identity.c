/* SPDX-License-Identifier: Apache-2.0 */
/* Which processes share a host: boot id and namespaces, never the hostname. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <sodium.h>

#include "host/boot.h"

static void add_file(crypto_generichash_state *state, const char *path)
{
    char text[64] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof(text));
    if (fd >= 0)
        (void)close(fd);
    (void)crypto_generichash_update(state, (const uint8_t *)text,
                                    got > 0 ? (unsigned long long)got : 0);
}

/* "net:[4026531840]": the namespace's identity. */
static void add_link(crypto_generichash_state *state, const char *path)
{
    char text[64];
    ssize_t got = readlink(path, text, sizeof(text));
    (void)crypto_generichash_update(state, (const uint8_t *)text,
                                    got > 0 ? (unsigned long long)got : 0);
}

enum hdl_status host_identity_host(struct base_env *env, uint8_t id[16])
{
    crypto_generichash_state state;
    (void)crypto_generichash_init(&state, NULL, 0, 16);
    add_file(&state, "/proc/sys/kernel/random/boot_id");
    /* Abstract sockets belong to the network namespace, uids to the user namespace. */
    add_link(&state, "/proc/self/ns/net");
    add_link(&state, "/proc/self/ns/user");
    const char *label = env->config.host.text;
    (void)crypto_generichash_update(&state, (const uint8_t *)label, strlen(label));
    (void)crypto_generichash_final(&state, id, 16);
    return HDL_OK;
}
