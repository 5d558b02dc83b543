/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The world outside the process: control thread, job membership, descriptors from peers.
 *
 * A `struct host` owns the control thread of a context. It joins the job, runs the agent
 * (on job rank 0 also the coordinator), watches the other processes of this machine, and
 * carries out what the state machines of ctl decide. It never waits for user work.
 *
 * Life of a group:
 *
 *     host_group_register   blocks: all founders known, parameters equal; gives the view
 *     (caller opens and maps the peers' windows)
 *     host_group_connected  blocks: every founder has done that; operations may run
 *     hooks                 freeze, commit, fail, ... on the control thread
 *     host_group_leave      or host_group_abort: not part of the group any more
 *     host_group_close      no hook runs after it returns; frees
 */
#ifndef HOST_HOST_H
#define HOST_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/env.h"
#include "heddle.h"

struct host;
struct host_group;
struct host_thread;

/* ctl/view.h */
struct ctl_answer;
struct ctl_prepare;
struct ctl_view;
/* ctl/event.h */
struct ctl_param;

/* 0 or NULL = the default as heddle.h says it; strings are copied. The same fields as in
 * struct hdl_context_opts, times in nanoseconds. */
struct host_opts {
    int32_t rank; /* used if num_ranks > 0, else both come from the environment */
    int32_t num_ranks;
    const char *coordinator;
    const struct hdl_bootstrap *bootstrap; /* used during host_create only */
    const char *shared_dir;
    const char *token;
    const char *interface;
    int64_t timeout_ns;
    int64_t dead_after_ns;
    int64_t grace_ns;
    int64_t link_timeout_ns; /* 0 = HEDDLE_LINK_TIMEOUT */
    bool standalone; /* the coordinator is a process of its own, at an exact address */
    bool coordinator_only; /* this is that process: no rank, no groups */
};

/*
 * Starts the control thread and joins the job; blocks until this process is connected to
 * the coordinator or the timeout is over. HDL_EINVAL, HDL_ETIMEDOUT, HDL_ECONFIG (token
 * or wire version differs), HDL_ENOMEM, HDL_ESYSTEM. `env` must outlive the host.
 */
enum hdl_status host_create(struct base_env *env, const struct host_opts *opts,
                            struct host **host);
/* Leaves the job (job rank 0: when the others have left, at most 2 s), joins the control
 * thread, frees. All groups must be closed. NULL is legal. */
void host_destroy(struct host *host);

int32_t host_rank(const struct host *host);      /* in the job */
int32_t host_num_ranks(const struct host *host); /* of the job */

/* All ranks of the job are on this host, as far as the launcher or the coordinator's
 * address tell: true is sure, false is not. */
bool host_single_host(const struct host *host);

uint64_t host_rank_epoch(const struct host *host); /* newest; a fenced one gets another */

/* Of the other ranks, for windows that belong to no group; on the control thread. */
struct host_job_hooks {
    void *user;
    /* A process of this host ended without having left, or after the coordinator. */
    void (*ended)(void *user, int32_t rank, uint64_t rank_epoch);
    /* The coordinator is lost, or is there again: about other ranks nobody is told. */
    void (*alone)(void *user, bool alone);
};
/* NULL: nobody is told any more, when it returns. */
void host_set_job_hooks(struct host *host, const struct host_job_hooks *hooks);

/* Lines about job, coordinator, neighbours and counters; terminated, cut if too long.
 * Returns their length. Not on the control thread. */
size_t host_describe(struct host *host, char *text, size_t room);

/* HDL_OK, or HDL_ENOTSUP with a sentence when called in a forked child of the process
 * that made the host. One load; every public call that takes a context begins with it. */
enum hdl_status host_check(const struct host *host);

/* ------------------------------------------------------------------ identity,
 * descriptors */

enum { HOST_SOCKET_NAME_BYTES = 64, HOST_ADDRESS_BYTES = 64 };

struct host_identity {
    uint8_t host_id[16]; /* equal for processes that can share memory */
    char socket_name[HOST_SOCKET_NAME_BYTES]; /* abstract unix socket, without the leading
                                                 0 */
    char address[HOST_ADDRESS_BYTES]; /* numeric address of the chosen interface */
    int32_t pid;
    uint64_t incarnation; /* random, of this process start */
};
/* Constant after host_create. */
const struct host_identity *host_identity(const struct host *host);

/* Peers of this machine who know id and key get a duplicate of `fd`. The caller keeps fd
 * open until host_withdraw_fd has returned. HDL_EBUSY: the id is offered already. */
enum hdl_status host_offer_fd(struct host *host, uint64_t id, uint64_t key, int fd);
void host_withdraw_fd(struct host *host, uint64_t id);
/* Asks the process behind `socket_name` (may be this one) for a descriptor;
 * close-on-exec, the caller closes it. Blocks, not on the control thread. HDL_EPEER:
 * process gone; HDL_EINVAL: no such id or wrong key there; HDL_ETIMEDOUT; HDL_ENOTSUP:
 * another machine or user. */
enum hdl_status host_fetch_fd(struct host *host, const char *socket_name, uint64_t id,
                              uint64_t key, int64_t timeout_ns, int *fd);

/* ----------------------------------------------------------------------------- groups */

/*
 * What the control thread tells the data plane about a group. All run on the control
 * thread and must not block, take a lock that is held while waiting, or call a blocking
 * host function. `attach` and `closed` may be NULL.
 */
struct host_group_hooks {
    void *user;
    /* Set the freeze bit, then fill the answer. Its arrays are there already: published
     * [prepare->num_dead], open [CTL_OPEN_MAX]; ballot and num_dead are filled. Called
     * again in every later ballot until a commit. */
    void (*freeze)(void *user, const struct ctl_prepare *prepare,
                   struct ctl_answer *answer);
    /* A new view; ends the freeze. Take a reference to keep it. */
    void (*commit)(void *user, struct ctl_view *view);
    /* Call host_group_finished once the own `done` has reached x (now or later; a later
     * call replaces the earlier one). */
    void (*watch_done)(void *user, uint64_t x);
    /* Map or connect what is new in the view, elsewhere, then call host_group_attached.
     * Only for views after the one of host_group_register. */
    void (*attach)(void *user, struct ctl_view *view);
    /* The interval of this holder is closed: its windows may be unmapped. */
    void (*closed)(void *user, uint32_t slot, uint64_t rank_epoch);
    /* The group is over for this rank (HDL_ECOORD, HDL_EFENCED, ...); at most once. */
    void (*fail)(void *user, enum hdl_status status, const char *text);
};

struct host_group_opts {
    const char *name; /* identity together with capacity and creation number */
    uint32_t rank;    /* own slot */
    uint32_t num_founders;
    uint32_t capacity;
    const int32_t
        *ranks; /* job rank of each founder's slot [num_founders]; NULL = identity */
    const struct ctl_param *params; /* {name, value} texts; all ranks compare them */
    uint32_t num_params;
    const void
        *blob; /* what peers need to reach this rank; opaque here; <= CTL_ENDPOINT_MAX */
    size_t blob_bytes;
    bool auto_deactivate, auto_sync;
    /* Extends a group or takes a rank's place: register returns when the coordinator
     * knows this process, without a view; CTL_PROPOSE_JOIN leads to attach and commit. */
    bool join;
    bool found_only;    /* as in hdl_group_opts */
    int64_t timeout_ns; /* of the whole creation: register and connected together */
    /* Copied; may be called from the moment host_group_register is entered until
     * host_group_close returns (or register fails). */
    struct host_group_hooks hooks;
};

/*
 * Blocks until all founders are registered. *view belongs to the group and stays valid
 * until host_group_close; it has every founder's rank epoch (with its job rank) and blob
 * (endpoint). HDL_ETIMEDOUT lists the ranks not seen, HDL_ECONFIG the differing
 * parameter, HDL_EINVAL a rank that is out of range or in use, HDL_ECOORD loss of the
 * coordinator.
 */
enum hdl_status host_group_register(struct host *host, const struct host_group_opts *opts,
                                    struct host_group **group, struct ctl_view **view);
/* Tells that this rank has connected to all peers (or, with a failure status and text,
 * that it could not: then creation fails on all ranks with them); blocks until all are.
 * After a failure only host_group_close is legal. */
enum hdl_status host_group_connected(struct host_group *group, enum hdl_status status,
                                     const char *text);
/* Planned leave, after the own operations are finished: ballots may still ask (hooks), so
 * that the others' views say up to which operation this rank took part. Waits for that,
 * at most timeout_ns. */
void host_group_leave(struct host_group *group, int64_t timeout_ns);
/* Any thread, does not wait: the others see this rank as lost in this group. */
void host_group_abort(struct host_group *group);
/* Leaves by abort if host_group_leave was not called. When it returns no hook is running
 * or will run. Not on the control thread. NULL is legal. */
void host_group_close(struct host_group *group);

/* Not blocking, any thread. Evidence against a link, not against a peer: puts to the
 * holder of `rank_epoch` fail (up = false) or work again. */
void host_group_link(struct host_group *group, uint64_t rank_epoch, bool up);
/* Not blocking, any thread: answers to the hooks watch_done and attach. */
void host_group_finished(struct host_group *group, uint64_t x);
void host_group_attached(struct host_group *group, uint64_t epoch, enum hdl_status status,
                         const char *text);
/*
 * Asks the coordinator for a change and waits until the own view has it. `kind` is an
 * enum ctl_proposal_kind. *first (operation number from which it holds) may be NULL.
 */
enum hdl_status host_group_propose(struct host_group *group, int kind,
                                   const uint32_t *slots, uint32_t num_slots,
                                   int64_t timeout_ns, uint64_t *first);

struct host_group_stats {
    uint64_t views; /* committed */
    uint64_t reconnects;
    uint64_t evidence_exit, evidence_closed, evidence_silence;
    uint64_t refused; /* connections and frames, of the whole host */
    int64_t evidence_to_commit_ns;
};
void host_group_stats(const struct host_group *group, struct host_group_stats *stats);

/* --------------------------------------------------------------------------- threads */

/* A named thread with all signals blocked (those of faults excepted). */
enum hdl_status host_thread_start(struct host *host, const char *name,
                                  void (*run)(void *), void *argument,
                                  struct host_thread **thread);
/* Waits for its end, frees. In a forked child it only frees. NULL is legal. */
void host_thread_join(struct host_thread *thread);

#endif
