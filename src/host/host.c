/* SPDX-License-Identifier: Apache-2.0 */
/* Joining a job and leaving it: the life of a host, on the caller's thread. */
#include "host/host.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <sodium.h>

#include "base/clock.h"
#include "base/futex.h"
#include "base/log.h"
#include "base/random.h"
#include "host/fork.h"
#include "host/internal.h"

#define JOIN_TIMEOUT_NS (60 * BASE_NS_PER_S)
#define DEAD_AFTER_MIN_NS (200 * BASE_NS_PER_MS)
#define HANDSHAKE_NS (5 * BASE_NS_PER_S)
/* Whoever waits for the coordinator is told once, as with operations. */
#define SLOW_NS (5 * BASE_NS_PER_S)
/* A record that leads nowhere is read again so often. */
#define LOOKUP_AGAIN_NS (100 * BASE_NS_PER_MS)

enum hdl_status host_check(const struct host *host)
{
    if (host->generation != host_fork_generation())
        return base_fail(HDL_ENOTSUP, "called in a forked child: only the process that "
                                      "created the context can use it");
    if (atomic_load_explicit(&host->exiting, memory_order_relaxed))
        return base_fail(HDL_ENOTSUP, "the process is exiting");
    return HDL_OK;
}

int32_t host_rank(const struct host *host)
{
    return host->rank;
}

uint64_t host_rank_epoch(const struct host *host)
{
    return atomic_load(&host->rank_epoch);
}

int32_t host_num_ranks(const struct host *host)
{
    return host->num_ranks;
}

const struct host_identity *host_identity(const struct host *host)
{
    return &host->identity;
}

bool host_single_host(const struct host *host)
{
    return (host->num_ranks == 1 && host->boot.mode == HOST_BOOT_ALONE) ||
           (host->boot.single_host && host->env->config.host.text[0] == 0);
}

/* ------------------------------------------------------------------------------- join */

static enum hdl_status fill_options(const struct base_env *env,
                                    const struct host_opts *opts, struct host_opts *full)
{
    *full = *opts;
    if (full->timeout_ns == 0)
        full->timeout_ns = JOIN_TIMEOUT_NS;
    if (full->dead_after_ns == 0)
        full->dead_after_ns = env->config.dead_after;
    if (full->grace_ns == 0)
        full->grace_ns = env->config.grace;
    if (full->link_timeout_ns == 0)
        full->link_timeout_ns = env->config.link_timeout;
    full->standalone = full->standalone || env->config.standalone;
    if (full->dead_after_ns < DEAD_AFTER_MIN_NS)
        return base_fail(HDL_EINVAL, "dead_after is %lld us, at least 200000 are needed",
                         (long long)(full->dead_after_ns / BASE_NS_PER_US));
    return HDL_OK;
}

static enum hdl_status make_identity(struct host *host)
{
    memcpy(host->identity.host_id, host->boot.host_id, sizeof(host->identity.host_id));
    host->identity.pid = (int32_t)getpid();
    enum hdl_status status = base_random_u64(&host->identity.incarnation);
    if (status == HDL_OK && host->boot.interface[0]) {
        struct sockaddr_storage own;
        status = host_address_choose(host->boot.interface, &own);
        if (status == HDL_OK)
            host_address_numeric(&own, host->identity.address,
                                 sizeof(host->identity.address));
    }
    return status ? status : host_local_open(host);
}

/* The coordinator lives in this process. */
static bool has_hub(const struct host *host)
{
    return host->coordinator_only || (host->rank == 0 && !host->standalone);
}

enum { PLACE_BYTES = BASE_HOST_BYTES + 32 };

/* Where the coordinator is looked for. */
static void format_place(const struct host_boot *boot, char *place, size_t size)
{
    if (boot->mode == HOST_BOOT_EXACT || boot->mode == HOST_BOOT_RANGE)
        (void)snprintf(place, size, "%s port %u%s", boot->addr.host, boot->addr.port,
                       boot->mode == HOST_BOOT_RANGE ? " or the 15 after it" : "");
    else
        (void)snprintf(place, size, "the address in %s",
                       boot->mode == HOST_BOOT_DIRECTORY ? boot->directory
                                                         : "the bootstrap's store");
}

static void warn_waiting(struct host *host)
{
    char place[PLACE_BYTES], refusal[sizeof(host->last_refusal)];
    format_place(&host->boot, place, sizeof(place));
    host->join_warned = true;
    (void)pthread_mutex_lock(&host->state_lock);
    bool reached = host->reached;
    memcpy(refusal, host->last_refusal, sizeof(refusal));
    (void)pthread_mutex_unlock(&host->state_lock);
    base_log_warn(host->env, "%s coordinator at %s (rank %d of %d)%s%s",
                  reached ? "not yet admitted by the" : "still looking for a", place,
                  host->rank, host->num_ranks, refusal[0] ? ", last: " : "", refusal);
}

/* In two parts, the first until it is time to warn. */
static enum hdl_status look_up(struct host *host, int64_t deadline_ns)
{
    int64_t first_ns = deadline_ns < host->warn_at_ns ? deadline_ns : host->warn_at_ns;
    enum hdl_status status = host_boot_lookup(&host->boot, first_ns, &host->candidates);
    int64_t now = base_env_now(host->env);
    if (status == HDL_OK || now < host->warn_at_ns || now >= deadline_ns)
        return status;
    warn_waiting(host);
    return host_boot_lookup(&host->boot, deadline_ns, &host->candidates);
}

/* Rank 0 listens and tells where, the others find out; both then know the token. */
static enum hdl_status meet(struct host *host, int64_t deadline_ns, int *listen_fd)
{
    struct host_boot *boot = &host->boot;
    if (boot->mode == HOST_BOOT_ALONE)
        return HDL_OK;
    if (!has_hub(host))
        return look_up(host, deadline_ns);
    struct sockaddr_storage address;
    enum hdl_status status = host_boot_listen(boot, listen_fd, &address);
    if (status)
        return status;
    if (host->identity.address[0] == 0)
        host_address_numeric(&address, host->identity.address,
                             sizeof(host->identity.address));
    char text[80];
    host_address_format(&address, text, sizeof(text));
    base_log_info(host->env, "coordinator listens on %s for %d ranks", text,
                  boot->num_ranks);
    return host_boot_publish(boot, &address);
}

static void make_key(struct host *host)
{
    host_channel_job_key(host->boot.token, host->boot.context, host->key);
}

static void update_candidates(struct host *host, struct host_command *command)
{
    (void)command;
    if (host->connecting && !host->reached) {
        make_key(host);
        host_connector_stop(host);
        host_connector_start(host);
    }
    __atomic_store_n(&host->update_pending, 0, __ATOMIC_RELEASE);
}

/* A newer record replaces one that leads nowhere. The token comes with it; the control
 * thread takes it over itself, and until then `boot` is left alone. */
static void look_again(struct host *host)
{
    struct host_addresses candidates;
    uint8_t nonce[16];
    if (__atomic_load_n(&host->update_pending, __ATOMIC_ACQUIRE))
        return;
    memcpy(nonce, host->boot.nonce, sizeof(nonce));
    int64_t soon = base_env_now(host->env) + LOOKUP_AGAIN_NS;
    if (host_boot_lookup(&host->boot, soon, &candidates) != HDL_OK ||
        memcmp(nonce, host->boot.nonce, sizeof(nonce)) == 0)
        return;
    (void)pthread_mutex_lock(&host->state_lock);
    if (!host->reached)
        host->candidates = candidates;
    (void)pthread_mutex_unlock(&host->state_lock);
    __atomic_store_n(&host->update_pending, 1, __ATOMIC_RELEASE);
    host->update_command.run = update_candidates;
    host_command_post(host, &host->update_command);
}

static enum hdl_status not_reached(struct host *host, int64_t timeout_ns)
{
    char place[PLACE_BYTES];
    format_place(&host->boot, place, sizeof(place));
    (void)pthread_mutex_lock(&host->state_lock);
    enum hdl_status status =
        base_fail(host->mismatched[0] ? HDL_ECONFIG : HDL_ETIMEDOUT,
                  "rank %d of %d %s coordinator at %s within %lld ms%s%s", host->rank,
                  host->num_ranks, host->reached ? "was not admitted by the" : "found no",
                  place, (long long)(timeout_ns / BASE_NS_PER_MS),
                  host->last_refusal[0] ? ", last: " : "", host->last_refusal);
    (void)pthread_mutex_unlock(&host->state_lock);
    return status;
}

static enum hdl_status wait_joined(struct host *host, int64_t deadline_ns,
                                   int64_t timeout_ns)
{
    bool records =
        host->boot.mode == HOST_BOOT_CALLBACKS || host->boot.mode == HOST_BOOT_DIRECTORY;
    for (;;) {
        (void)pthread_mutex_lock(&host->state_lock);
        uint32_t turn = __atomic_load_n(&host->state_turn, __ATOMIC_ACQUIRE);
        enum host_stage stage = host->stage;
        enum hdl_status status = host->stage_status;
        bool reached = host->reached;
        if (stage == HOST_REFUSED || stage == HOST_LOST)
            status = base_fail(status, "%s", host->stage_text);
        (void)pthread_mutex_unlock(&host->state_lock);
        if (stage != HOST_JOINING)
            return status;
        int64_t now = base_env_now(host->env), left = deadline_ns - now;
        if (left <= 0)
            return not_reached(host, timeout_ns);
        if (!host->join_warned && now >= host->warn_at_ns)
            warn_waiting(host);
        if (!host->join_warned && left > host->warn_at_ns - now)
            left = host->warn_at_ns - now;
        bool again = records && host->rank != 0 && !reached;
        if (again && left > LOOKUP_AGAIN_NS)
            left = LOOKUP_AGAIN_NS;
        if (!base_futex_wait(&host->state_turn, turn, left, false) && again)
            look_again(host);
    }
}

static enum hdl_status start(struct host *host, const struct host_opts *opts,
                             int listen_fd)
{
    enum hdl_status status = host_loop_open(host);
    if (status) {
        host_fork_close(listen_fd);
        return status;
    }
    if (!host->coordinator_only)
        status = host_local_listen(host);
    if (has_hub(host) && status == HDL_OK)
        status = host_hub_open(host, listen_fd, opts);
    else
        host_fork_close(listen_fd);
    if (status == HDL_OK && !host->coordinator_only)
        status = host_agent_open(host, opts);
    if (status == HDL_OK)
        status = host_thread_start_env(host->env, "heddle-control", host_loop_run, host,
                                       &host->thread);
    return status;
}

static enum hdl_status join(struct host *host, const struct host_opts *opts)
{
    int64_t deadline_ns = base_deadline_ns(base_env_now(host->env), opts->timeout_ns);
    int listen_fd = -1;
    host->warn_at_ns = base_env_now(host->env) + SLOW_NS;
    enum hdl_status status = host_boot_find(host->env, opts, &host->boot);
    if (status)
        return status;
    host->rank = host->boot.rank;
    host->num_ranks = host->boot.num_ranks;
    host->env->log_rank = host->rank; /* no other thread has the environment yet */
    host->exact = host->boot.mode == HOST_BOOT_EXACT;
    if (host->standalone && !host->exact && host->boot.mode != HOST_BOOT_ALONE)
        return base_fail(HDL_EINVAL, "a coordinator of its own needs its address: set "
                                     "HEDDLE_COORDINATOR");
    status = make_identity(host);
    if (status == HDL_OK)
        status = meet(host, deadline_ns, &listen_fd);
    if (status) {
        host_fork_close(listen_fd);
        return status;
    }
    make_key(host);
    status = start(host, opts, listen_fd);
    if (status == HDL_OK && !host->coordinator_only)
        status = wait_joined(host, deadline_ns, opts->timeout_ns);
    return status;
}

/* -------------------------------------------------------------------------- create */

static void free_host(struct host *host)
{
    struct base_env *env = host->env;
    if (host->thread) {
        host_command_post(host, &host->leave_command);
        host_thread_join(host->thread);
    }
    if (host->loop_open) {
        host_watches_close(host);
        host_connector_stop(host);
        host_agent_close(host);
        host_hub_close(host);
    }
    host_local_close(host);
    host_loop_close(host);
    host_boot_unpublish(&host->boot);
    (void)pthread_mutex_destroy(&host->command_lock);
    (void)pthread_mutex_destroy(&host->state_lock);
    (void)pthread_mutex_destroy(&host->end_lock);
    (void)pthread_mutex_destroy(&host->offer_lock);
    sodium_memzero(host->key, sizeof(host->key));
    sodium_memzero(&host->boot, sizeof(host->boot));
    base_free(env, host);
}

enum hdl_status host_create(struct base_env *env, const struct host_opts *opts,
                            struct host **out)
{
    struct host_opts full;
    enum hdl_status status = fill_options(env, opts, &full);
    if (status)
        return status;
    if (sodium_init() < 0)
        return base_fail(HDL_ESYSTEM, "libsodium does not start");
    status = host_fork_install();
    struct host *host = status ? NULL : base_alloc(env, 1, sizeof(*host));
    if (!host)
        return status ? status : HDL_ENOMEM;
    host->env = env;
    host->generation = host_fork_generation();
    host->handshake_ns = HANDSHAKE_NS;
    host->standalone = full.standalone;
    host->coordinator_only = full.coordinator_only;
    host->local_fd = -1;
    host->leave_command.run = host_leave_begin;
    (void)pthread_mutex_init(&host->command_lock, NULL);
    (void)pthread_mutex_init(&host->state_lock, NULL);
    (void)pthread_mutex_init(&host->end_lock, NULL);
    (void)pthread_mutex_init(&host->offer_lock, NULL);
    base_list_init(&host->commands);
    base_list_init(&host->offers);
    base_list_init(&host->process_node);
    status = join(host, &full);
    if (status == HDL_OK)
        status = host_process_add(host);
    if (status) {
        host_boot_failed(&host->boot);
        free_host(host);
        return status;
    }
    *out = host;
    return HDL_OK;
}

void host_destroy(struct host *host)
{
    if (!host || host_check(host))
        return;
    host_process_remove(host);
    free_host(host);
}
