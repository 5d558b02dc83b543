/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the job: rank, number of ranks, token, where the coordinator listens. */
#ifndef HOST_BOOT_H
#define HOST_BOOT_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/env.h"
#include "base/parse.h"

struct host_opts;

enum { HOST_ADDRESSES_MAX = 48, HOST_TOKEN_BYTES = 32, HOST_PORTS = 16 };

struct host_addresses {
    uint32_t count;
    struct sockaddr_storage items[HOST_ADDRESSES_MAX];
};

enum host_boot_mode {
    HOST_BOOT_ALONE,     /* a job of one: no socket */
    HOST_BOOT_EXACT,     /* host:port is the coordinator's */
    HOST_BOOT_RANGE,     /* host:port, or one of the ports after it: found by handshake */
    HOST_BOOT_CALLBACKS, /* the user's store */
    HOST_BOOT_DIRECTORY  /* a file in a shared directory */
};

/*
 * Filled by host_boot_find from options and environment:
 *
 *     mode        rank 0                               others
 *     EXACT       binds address                        connect there
 *     RANGE       binds the first free port            try all, the handshake decides
 *     CALLBACKS   binds any port, puts address, token  get them, connect, else get again
 *     DIRECTORY   the same through a file              the same
 *
 * A stale value of an earlier job never does harm: its address refuses the connection or
 * fails the handshake, and the value is read again.
 */
struct host_boot {
    struct base_env *env;
    enum host_boot_mode mode;
    int32_t rank;
    int32_t num_ranks;
    uint32_t context; /* how many of this kind the process made before */
    uint64_t kind;    /* hash; 0 = not numbered */
    struct base_addr addr;
    bool standalone;  /* who decides is none of the ranks, and knows nothing of them */
    bool single_host; /* the launcher says so, or the coordinator's address */
    bool has_token;
    bool token_from_record; /* a newer record's token replaces it */
    uint8_t token[HOST_TOKEN_BYTES];
    char source[32]; /* "torchrun", "Open MPI", ... for messages */
    char directory[256];
    const struct hdl_bootstrap *callbacks;
    char interface[64];
    uint8_t host_id[16];
    uint8_t nonce[16]; /* of rank 0's record */
    bool published;
    struct sockaddr_storage address; /* as published */
};

enum hdl_status host_boot_find(struct base_env *env, const struct host_opts *opts,
                               struct host_boot *boot);

/* Rank 0: a listening socket (in the fork table) on the chosen address. */
enum hdl_status host_boot_listen(struct host_boot *boot, int *fd,
                                 struct sockaddr_storage *address);
/* Rank 0: tells the others where. Makes the token if there is none yet: call it before
 * the listening socket is served. */
enum hdl_status host_boot_publish(struct host_boot *boot,
                                  const struct sockaddr_storage *address);
/* Rank 0: takes back what would outlive the job. */
void host_boot_unpublish(struct host_boot *boot);
/* Others: candidates, and the token in the modes that give it. Blocks until there is a
 * value or the deadline (HDL_ETIMEDOUT). */
enum hdl_status host_boot_lookup(struct host_boot *boot, int64_t deadline_ns,
                                 struct host_addresses *candidates);

/* boot_env.c. Rank and number of ranks as the launcher says; a job of one without one. */
enum hdl_status host_boot_ranks(struct host_boot *boot);
/* For ranks that came by options: a launcher of as many may say that all are local. */
void host_boot_note_launcher(struct host_boot *boot);
/* MASTER_ADDR and MASTER_PORT, else what the launcher gives. */
enum hdl_status host_boot_place(struct host_boot *boot);
/* A token from what all ranks of the job, and whoever guesses it, know. */
void host_boot_derive_token(struct host_boot *boot);

/* boot_dir.c: one record in a directory, replaced atomically. */
enum hdl_status host_boot_dir_put(struct host_boot *boot, const void *record,
                                  size_t size);
enum hdl_status host_boot_dir_get(struct host_boot *boot, void *record, size_t *size);
void host_boot_dir_remove(struct host_boot *boot, const void *record, size_t size);

/* address.c */
enum hdl_status host_address_resolve(const char *name, uint16_t port,
                                     struct host_addresses *out);
/* The same for numeric addresses only: asks nobody. */
enum hdl_status host_address_parse(const char *text, uint16_t port,
                                   struct host_addresses *out);
/* The address meant by an interface setting: a name, an address or "^a,b"; "" = the one
 * on the default route, else loopback. */
enum hdl_status host_address_choose(const char *interface, struct sockaddr_storage *out);
bool host_address_is_loopback(const struct sockaddr_storage *addr);
void host_address_set_port(struct sockaddr_storage *addr, uint16_t port);
uint16_t host_address_port(const struct sockaddr_storage *addr);
socklen_t host_address_size(const struct sockaddr_storage *addr);
/* "10.0.0.1", without port. */
void host_address_numeric(const struct sockaddr_storage *addr, char *text, size_t size);

/* identity.c: equal for processes that can pass descriptors and share memory. */
enum hdl_status host_identity_host(struct base_env *env, uint8_t id[16]);

/* The context could not be made: the next one has its number. */
void host_boot_failed(const struct host_boot *boot);

#endif
