/* SPDX-License-Identifier: Apache-2.0 */
/* Finding the job: options first, then the environment; the record that rank 0 gives out.
 */
#include "host/boot.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <sodium.h>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/random.h"
#include "host/fork.h"
#include "host/internal.h"

#define RECORD_MAGIC UINT32_C(0x62646848) /* "Hhdb" */
enum { RECORD_BYTES = 256 };

/*
 * Contexts of one kind in a process are numbered, so that the second one of all ranks
 * meets at other keys than the first. Only a hash of the kind is kept; the oldest is
 * forgotten. One that could not be made gives its number back: it will be tried again.
 */
static pthread_mutex_t seen_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t hash;
    uint32_t count;
} seen[64];
static uint32_t oldest_seen;

static uint32_t find_seen(uint64_t hash)
{
    uint32_t at = 0;
    while (at < 64 && seen[at].hash != hash)
        at++;
    return at;
}

static void next_context(struct host_boot *boot, const void *kind, size_t size)
{
    uint8_t bytes[16];
    (void)crypto_generichash(bytes, sizeof(bytes), kind, size, NULL, 0);
    memcpy(&boot->kind, bytes, sizeof(boot->kind));
    (void)pthread_mutex_lock(&seen_lock);
    uint32_t at = find_seen(boot->kind);
    if (at == 64) {
        at = oldest_seen++ % 64;
        seen[at].hash = boot->kind;
        seen[at].count = 0;
    }
    boot->context = seen[at].count++;
    (void)pthread_mutex_unlock(&seen_lock);
}

void host_boot_failed(const struct host_boot *boot)
{
    if (boot->kind == 0)
        return;
    (void)pthread_mutex_lock(&seen_lock);
    uint32_t at = find_seen(boot->kind);
    if (at < 64 && seen[at].count == boot->context + 1)
        seen[at].count--;
    (void)pthread_mutex_unlock(&seen_lock);
}

static void number_context(struct host_boot *boot)
{
    uint8_t kind[512];
    struct base_writer writer;
    base_writer_init(&writer, kind, sizeof(kind));
    base_write_u32(&writer, (uint32_t)boot->rank);
    if (boot->mode == HOST_BOOT_CALLBACKS) {
        base_write_u64(&writer, (uint64_t)(uintptr_t)boot->callbacks->user);
        base_write_u64(&writer, (uint64_t)(uintptr_t)boot->callbacks->get);
    } else if (boot->mode == HOST_BOOT_DIRECTORY) {
        base_write_string(&writer, boot->directory);
    } else {
        base_write_string(&writer, boot->addr.host);
        base_write_u32(&writer, boot->addr.port);
    }
    /* At an exact address there is one coordinator, whoever comes. */
    if (boot->mode != HOST_BOOT_EXACT && boot->mode != HOST_BOOT_ALONE)
        next_context(boot, kind, writer.pos);
}

/* --------------------------------------------------------------------------- token */

static enum hdl_status parse_token(struct host_boot *boot, const char *text,
                                   const char *where)
{
    if (base_parse_hex(text, boot->token, HOST_TOKEN_BYTES) != HDL_OK)
        return base_fail(HDL_EINVAL, "%s is not 64 hexadecimal digits", where);
    boot->has_token = true;
    return HDL_OK;
}

static enum hdl_status read_token_file(struct host_boot *boot, const char *path)
{
    char text[128] = {0};
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return base_fail_errno(HDL_EINVAL, errno, "cannot open token file %s", path);
    ssize_t got = read(fd, text, sizeof(text) - 1);
    int error = got < 0 ? errno : 0;
    if (fstat(fd, &info) == 0 && (info.st_mode & 077) != 0)
        base_log_warn(boot->env, "token file %s can be read by others, mode %o", path,
                      (unsigned)info.st_mode & 0777);
    (void)close(fd);
    if (error)
        return base_fail_errno(HDL_EINVAL, error, "cannot read token file %s", path);
    text[strcspn(text, " \r\n")] = 0;
    enum hdl_status status = got > 0
                                 ? parse_token(boot, text, path)
                                 : base_fail(HDL_EINVAL, "token file %s is empty", path);
    sodium_memzero(text, sizeof(text));
    return status;
}

static enum hdl_status find_token(struct host_boot *boot, const struct host_opts *opts)
{
    const struct base_config *config = &boot->env->config;
    if (opts->token)
        return parse_token(boot, opts->token, "the token option");
    if (config->token.text[0])
        return parse_token(boot, config->token.text, "HEDDLE_TOKEN");
    if (config->token_file.text[0])
        return read_token_file(boot, config->token_file.text);
    if (boot->mode == HOST_BOOT_EXACT || boot->mode == HOST_BOOT_RANGE)
        host_boot_derive_token(boot);
    else if (boot->mode == HOST_BOOT_ALONE || boot->rank == 0) {
        boot->has_token = true;
        return base_random_bytes(boot->token, HOST_TOKEN_BYTES);
    }
    return HDL_OK;
}

/* ---------------------------------------------------------------------------- find */

static enum hdl_status find_place(struct host_boot *boot, const struct host_opts *opts)
{
    const struct base_config *config = &boot->env->config;
    const char *exact = opts->coordinator;
    const char *directory = opts->shared_dir;
    /* A coordinator of its own is where the environment says, also for those who bring a
     * store, as torch does. */
    if (!exact && ((!opts->bootstrap && !directory) || opts->standalone)) {
        if (config->coordinator.text[0])
            exact = config->coordinator.text;
        else if (config->shared_dir.text[0])
            directory = config->shared_dir.text;
    }
    /* A job of one needs none of it, but what is given must be right. */
    if (boot->num_ranks == 1 && !opts->standalone)
        return exact ? base_parse_addr(exact, &boot->addr) : HDL_OK;
    if (exact) {
        boot->mode = HOST_BOOT_EXACT;
        return base_parse_addr(exact, &boot->addr);
    }
    if (opts->bootstrap) {
        boot->mode = HOST_BOOT_CALLBACKS;
        boot->callbacks = opts->bootstrap;
        return HDL_OK;
    }
    if (directory) {
        boot->mode = HOST_BOOT_DIRECTORY;
        if (strlen(directory) >= sizeof(boot->directory))
            return base_fail(HDL_EINVAL, "shared directory name has %zu characters",
                             strlen(directory));
        (void)strcpy(boot->directory, directory);
        return HDL_OK;
    }
    return host_boot_place(boot);
}

enum hdl_status host_boot_find(struct base_env *env, const struct host_opts *opts,
                               struct host_boot *boot)
{
    memset(boot, 0, sizeof(*boot));
    boot->env = env;
    boot->rank = opts->rank;
    boot->num_ranks = opts->num_ranks;
    (void)strcpy(boot->source, "options");
    enum hdl_status status = HDL_OK;
    if (opts->num_ranks == 0)
        status = host_boot_ranks(boot);
    else
        host_boot_note_launcher(boot);
    if (status)
        return status;
    boot->standalone = opts->standalone;
    if (boot->num_ranks < 1 || boot->rank < 0 || boot->rank >= boot->num_ranks)
        return base_fail(HDL_EINVAL, "rank %d of %d ranks", boot->rank, boot->num_ranks);
    const char *interface =
        opts->interface ? opts->interface : env->config.interface.text;
    if (strlen(interface) >= sizeof(boot->interface))
        return base_fail(HDL_EINVAL, "interface setting has %zu characters",
                         strlen(interface));
    (void)strcpy(boot->interface, interface);
    status = host_identity_host(env, boot->host_id);
    if (status == HDL_OK)
        status = find_place(boot, opts);
    if (status == HDL_OK)
        status = find_token(boot, opts);
    if (status == HDL_OK)
        number_context(boot);
    return status;
}

/* -------------------------------------------------------------------------- listen */

/* -errno or a listening socket in the fork table; fills the port that was given. */
static int listen_at(struct sockaddr_storage *address)
{
    int fd = host_fork_socket(address->ss_family);
    if (fd < 0)
        return fd;
    int yes = 1;
    socklen_t size = sizeof(*address);
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, (struct sockaddr *)address, host_address_size(address)) == 0 &&
        listen(fd, SOMAXCONN) == 0 &&
        getsockname(fd, (struct sockaddr *)address, &size) == 0)
        return fd;
    int error = errno;
    host_fork_close(fd);
    return -error;
}

/* The first address of a name that is this machine's, the first port that is free. */
static int listen_among(struct host_addresses *addresses, uint32_t ports,
                        struct sockaddr_storage *out)
{
    int error = -EADDRNOTAVAIL;
    for (uint32_t i = 0; i < addresses->count; i++) {
        uint32_t first = host_address_port(&addresses->items[i]);
        for (uint32_t port = first; port < first + ports && port < 65536; port++) {
            *out = addresses->items[i];
            host_address_set_port(out, (uint16_t)port);
            int fd = listen_at(out);
            if (fd >= 0)
                return fd;
            error = fd;
            if (fd != -EADDRINUSE && fd != -EACCES)
                break; /* another address may be ours */
        }
    }
    return error;
}

/* A killed job's port is free a moment after its process. */
static int listen_named(const struct host_boot *boot, struct host_addresses *addresses,
                        struct sockaddr_storage *out)
{
    bool range = boot->mode == HOST_BOOT_RANGE;
    for (int turn = 0;; turn++) {
        int fd = listen_among(addresses, range ? HOST_PORTS : 1, out);
        if (fd != -EADDRINUSE || turn == 100)
            return fd;
        struct timespec pause = {.tv_nsec = 20 * 1000000};
        (void)nanosleep(&pause, NULL);
    }
}

enum hdl_status host_boot_listen(struct host_boot *boot, int *out,
                                 struct sockaddr_storage *address)
{
    int fd;
    enum hdl_status status;
    if (boot->mode == HOST_BOOT_EXACT || boot->mode == HOST_BOOT_RANGE) {
        struct host_addresses addresses;
        status = host_address_resolve(boot->addr.host, boot->addr.port, &addresses);
        if (status)
            return status;
        fd = listen_named(boot, &addresses, address);
        if (fd < 0)
            return base_fail_errno(HDL_ESYSTEM, -fd, "cannot listen on %s port %u%s",
                                   boot->addr.host, boot->addr.port,
                                   boot->mode == HOST_BOOT_RANGE ? " or the 15 after it"
                                                                 : "");
    } else {
        const char *interface = boot->interface;
        if (!interface[0] && boot->single_host)
            interface = "127.0.0.1";
        status = host_address_choose(interface, address);
        if (status)
            return status;
        fd = listen_at(address);
        if (fd < 0)
            return base_fail_errno(HDL_ESYSTEM, -fd, "cannot listen for the other ranks");
    }
    if (host_address_is_loopback(address))
        boot->single_host = true;
    *out = fd;
    return HDL_OK;
}

/* -------------------------------------------------------------------------- record */

/*
 *     magic u32, version u32, host id 16, nonce 16, token 32, port u16, address string
 */
static size_t write_record(const struct host_boot *boot,
                           const struct sockaddr_storage *address,
                           uint8_t record[RECORD_BYTES])
{
    char text[64];
    struct base_writer writer;
    host_address_numeric(address, text, sizeof(text));
    base_writer_init(&writer, record, RECORD_BYTES);
    base_write_u32(&writer, RECORD_MAGIC);
    base_write_u32(&writer, 1);
    base_write_bytes(&writer, boot->host_id, sizeof(boot->host_id));
    base_write_bytes(&writer, boot->nonce, sizeof(boot->nonce));
    base_write_bytes(&writer, boot->token, sizeof(boot->token));
    base_write_u16(&writer, host_address_port(address));
    base_write_string(&writer, text);
    return writer.pos;
}

static enum hdl_status read_record(struct host_boot *boot, const uint8_t *record,
                                   size_t size, struct host_addresses *candidates)
{
    struct base_reader reader;
    uint8_t host_id[16], nonce[16], token[HOST_TOKEN_BYTES];
    char text[64];
    base_reader_init(&reader, record, size);
    uint32_t magic = base_read_u32(&reader);
    uint32_t version = base_read_u32(&reader);
    base_read_bytes(&reader, host_id, sizeof(host_id));
    base_read_bytes(&reader, nonce, sizeof(nonce));
    base_read_bytes(&reader, token, sizeof(token));
    uint16_t port = base_read_u16(&reader);
    base_read_string(&reader, text, sizeof(text));
    if (!base_reader_done(&reader) || magic != RECORD_MAGIC || version != 1)
        return base_fail(HDL_EINVAL,
                         "the bootstrap's value of %zu bytes is no record of a "
                         "coordinator",
                         size);
    enum hdl_status status = host_address_parse(text, port, candidates);
    if (status)
        return status;
    candidates->count = 1;
    bool same_host = memcmp(host_id, boot->host_id, sizeof(host_id)) == 0;
    if (host_address_is_loopback(&candidates->items[0]) && !same_host)
        return base_fail(HDL_EINVAL,
                         "the coordinator listens on %s, which rank %d on another host "
                         "cannot reach: set HEDDLE_INTERFACE on rank 0",
                         text, boot->rank);
    boot->single_host =
        boot->single_host || host_address_is_loopback(&candidates->items[0]);
    memcpy(boot->nonce, nonce, sizeof(nonce));
    if (!boot->has_token || boot->token_from_record)
        memcpy(boot->token, token, sizeof(token));
    boot->token_from_record = boot->token_from_record || !boot->has_token;
    boot->has_token = true;
    sodium_memzero(token, sizeof(token));
    return HDL_OK;
}

static void record_key(const struct host_boot *boot, char *key, size_t size)
{
    (void)snprintf(key, size, "heddle/coordinator/%u", boot->context);
}

enum hdl_status host_boot_publish(struct host_boot *boot,
                                  const struct sockaddr_storage *address)
{
    uint8_t record[RECORD_BYTES];
    char key[64];
    if (boot->mode != HOST_BOOT_CALLBACKS && boot->mode != HOST_BOOT_DIRECTORY)
        return HDL_OK;
    enum hdl_status status = base_random_bytes(boot->nonce, sizeof(boot->nonce));
    if (status)
        return status;
    size_t size = write_record(boot, address, record);
    boot->address = *address;
    boot->published = true;
    record_key(boot, key, sizeof(key));
    if (boot->mode == HOST_BOOT_DIRECTORY)
        status = host_boot_dir_put(boot, record, size);
    else
        status = boot->callbacks->put(boot->callbacks->user, key, record, size);
    if (status && boot->mode == HOST_BOOT_CALLBACKS)
        status = base_fail(status, "bootstrap put of %s failed", key);
    sodium_memzero(record, sizeof(record));
    return status;
}

void host_boot_unpublish(struct host_boot *boot)
{
    uint8_t record[RECORD_BYTES];
    if (!boot->published || boot->mode != HOST_BOOT_DIRECTORY)
        return;
    size_t size = write_record(boot, &boot->address, record);
    host_boot_dir_remove(boot, record, size);
    sodium_memzero(record, sizeof(record));
}

static enum hdl_status lookup_callbacks(struct host_boot *boot, int64_t deadline_ns,
                                        uint8_t *record, size_t *size)
{
    char key[64];
    size_t room = *size;
    record_key(boot, key, sizeof(key));
    int64_t left = deadline_ns - base_env_now(boot->env);
    enum hdl_status status = boot->callbacks->get(
        boot->callbacks->user, key, record, size, left > 0 ? left / BASE_NS_PER_US : 0);
    if (status)
        return base_fail(status, "bootstrap get of %s failed", key);
    if (*size > room)
        return base_fail(HDL_EINVAL,
                         "bootstrap get of %s says %zu bytes, there is room "
                         "for %zu",
                         key, *size, room);
    return HDL_OK;
}

static enum hdl_status lookup_directory(struct host_boot *boot, int64_t deadline_ns,
                                        uint8_t *record, size_t *size)
{
    size_t room = *size;
    for (long pause_ms = 1;; pause_ms = pause_ms < 20 ? pause_ms * 2 : 20) {
        *size = room;
        enum hdl_status status = host_boot_dir_get(boot, record, size);
        if (status != HDL_PENDING)
            return status;
        if (base_env_now(boot->env) >= deadline_ns)
            return base_fail(HDL_ETIMEDOUT, "rank 0 has written nothing into %s",
                             boot->directory);
        struct timespec pause = {.tv_nsec = pause_ms * 1000000};
        (void)nanosleep(&pause, NULL);
    }
}

static enum hdl_status lookup_named(struct host_boot *boot, struct host_addresses *out)
{
    struct host_addresses found;
    enum hdl_status status =
        host_address_resolve(boot->addr.host, boot->addr.port, &found);
    if (status)
        return status;
    uint32_t ports = boot->mode == HOST_BOOT_RANGE ? HOST_PORTS : 1;
    out->count = 0;
    for (uint32_t i = 0; i < ports; i++)
        for (uint32_t j = 0; j < found.count && j < 3; j++) {
            if (boot->addr.port + i > 65535)
                continue;
            out->items[out->count] = found.items[j];
            host_address_set_port(&out->items[out->count++],
                                  (uint16_t)(boot->addr.port + i));
        }
    if (host_address_is_loopback(&found.items[0]))
        boot->single_host = true;
    return HDL_OK;
}

enum hdl_status host_boot_lookup(struct host_boot *boot, int64_t deadline_ns,
                                 struct host_addresses *candidates)
{
    uint8_t record[RECORD_BYTES];
    size_t size = sizeof(record);
    enum hdl_status status;
    if (boot->mode == HOST_BOOT_EXACT || boot->mode == HOST_BOOT_RANGE)
        return lookup_named(boot, candidates);
    if (boot->mode == HOST_BOOT_CALLBACKS)
        status = lookup_callbacks(boot, deadline_ns, record, &size);
    else
        status = lookup_directory(boot, deadline_ns, record, &size);
    if (status == HDL_OK)
        status = read_record(boot, record, size, candidates);
    sodium_memzero(record, sizeof(record));
    return status;
}
