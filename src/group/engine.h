/* SPDX-License-Identifier: Apache-2.0 */
/* The engine of a context: its groups, the lock on the data path, progress and waiting.
 */
#ifndef GROUP_ENGINE_H
#define GROUP_ENGINE_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/env.h"
#include "base/list.h"
#include "group/op.h"
#include "group/stage.h"
#include "group/worker.h"
#include "heddle.h"

struct host;
struct host_thread;
struct net;
struct group_engine;

/*
 * One lock per context guards every operation, queue and flag of its own that is not
 * atomic. A thread that waits holds it and makes progress for all groups; it lets go when
 * somebody else asks (`contended`). The control thread never takes it.
 *
 * Waiting = spin, then yield, then sleep on the context's bell (net). The progress thread
 * sleeps while a caller waits or nothing is pending.
 */
struct group_engine {
    struct base_env *env;
    struct host *host;
    struct net *net;

    alignas(64) _Atomic uint32_t lock;
    _Atomic uint32_t contended; /* threads that ask for the lock */
    _Atomic uint32_t waiters;   /* threads inside a wait */
    _Atomic uint32_t pending;   /* operations with a handle that are not finished */

    alignas(64) struct base_list groups; /* of the context, by group->node */
    struct base_list free_ops;
    void *op_slabs;
    _Atomic uint64_t polls;       /* rounds of progress; written under the lock */
    uint32_t holder_waits;        /* 1 if the lock's holder is one of the waiters */
    _Atomic int64_t next_tick_ns; /* written under the lock, looked at without */
    /* Waits in a row that one yield ended, and when to move to another core: spread.c. */
    _Atomic uint32_t shared_waits;
    _Atomic int64_t spread_at_ns, spread_pause_ns;
    struct group_stages stages;
    int64_t spin_ns, yield_ns;
    uint32_t cores;

    struct group_worker attacher, notifier;
    pthread_mutex_t
        watch_lock;           /* never held while blocking: the control thread takes it */
    struct base_list watches; /* struct group_watch, of all groups */
    struct host_thread *thread;
    alignas(64) _Atomic uint32_t work; /* futex of the progress thread */
    _Atomic bool asleep;               /* it sleeps until it is kicked */
    _Atomic bool stop;
};

/* Starts the progress thread through `host`. The tests of this folder pass NULL for host
 * and net: there is then no progress thread and nobody sleeps. */
enum hdl_status group_engine_create(struct base_env *env, struct host *host,
                                    struct net *net, struct group_engine **engine);
/* All groups must be destroyed. NULL is legal. Frees the operation handles, too. */
void group_engine_destroy(struct group_engine *engine);

/* HDL_OK, or HDL_ENOTSUP in a forked child and in a process that is exiting: then no lock
 * may be taken and nothing can be waited for. */
enum hdl_status group_engine_check(const struct group_engine *engine);

/* Text of the last 64 operations of every group (hdl_context_dump); returns its length.
 */
size_t group_engine_describe(struct group_engine *engine, char *text, size_t room);

bool group_engine_try_lock(struct group_engine *engine);
void group_engine_lock(struct group_engine *engine);
void group_engine_unlock(struct group_engine *engine);

/* One round over all groups and the messaged transports; true if anything moved. Under
 * the lock. */
bool group_engine_progress(struct group_engine *engine);

/* Wakes threads of this context that sleep in a wait. Any thread, also the control
 * thread. */
void group_engine_wake(struct group_engine *engine);

/*
 * Waits until test(argument) is true, making progress meanwhile; test runs under the
 * lock. False when the deadline (base_now_ns scale; BASE_FOREVER) is over. Never on the
 * control thread. For waits on memory that peers write and ring for (moe).
 */
bool group_engine_wait(struct group_engine *engine, bool (*test)(void *argument),
                       void *argument, int64_t deadline_ns);

/* The same for what ranks of a group write. */
bool group_wait(struct hdl_group *group, bool (*test)(void *argument), void *argument,
                int64_t deadline_ns);

#endif
