/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: creation, lock, one round of progress, its state as text. */
#include "group/engine.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/rankset.h"
#include "group/group.h"
#include "group/p2p.h"
#include "group/wait.h"
#include "host/host.h"
#include "net/net.h"

enum { LOCK_SPINS = 100, POLLS_PER_CLOCK = 64, GROUP_TEXT_BYTES = 1024 };

static uint32_t usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0)
        return (uint32_t)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

enum hdl_status group_engine_check(const struct group_engine *engine)
{
    return engine->host ? host_check(engine->host) : HDL_OK;
}

enum hdl_status group_engine_create(struct base_env *env, struct host *host,
                                    struct net *net, struct group_engine **out)
{
    struct group_engine *engine = base_alloc_aligned(env, 64, 1, sizeof(*engine));
    if (!engine)
        return HDL_ENOMEM;
    engine->env = env;
    engine->host = host;
    engine->net = net;
    base_list_init(&engine->groups);
    base_list_init(&engine->free_ops);
    engine->spin_ns = env->config.spin;
    engine->yield_ns = env->config.yield;
    engine->cores = usable_cores();
    base_list_init(&engine->watches);
    (void)pthread_mutex_init(&engine->watch_lock, NULL);
    group_worker_init(&engine->attacher, host, "hdl-attach");
    group_worker_init(&engine->notifier, host, "hdl-notify");
    enum hdl_status status = group_thread_start(engine);
    if (status != HDL_OK) {
        group_worker_destroy(&engine->attacher);
        group_worker_destroy(&engine->notifier);
        (void)pthread_mutex_destroy(&engine->watch_lock);
        base_free_aligned(env, engine);
        return status;
    }
    *out = engine;
    return HDL_OK;
}

void group_engine_destroy(struct group_engine *engine)
{
    if (!engine)
        return;
    group_worker_destroy(&engine->attacher);
    group_worker_destroy(&engine->notifier);
    (void)pthread_mutex_destroy(&engine->watch_lock);
    group_thread_stop(engine);
    group_op_pool_destroy(engine);
    base_free_aligned(engine->env, engine);
}

bool group_engine_try_lock(struct group_engine *engine)
{
    uint32_t expected = 0;
    return atomic_load_explicit(&engine->lock, memory_order_relaxed) == 0 &&
           atomic_compare_exchange_strong_explicit(
               &engine->lock, &expected, 1, memory_order_acquire, memory_order_relaxed);
}

static void lock_slow(struct group_engine *engine)
{
    atomic_fetch_add_explicit(&engine->contended, 1, memory_order_relaxed);
    for (uint32_t tries = 1; !group_engine_try_lock(engine); tries++) {
        if (tries % LOCK_SPINS == 0)
            sched_yield();
        else
            base_cpu_relax();
    }
    atomic_fetch_sub_explicit(&engine->contended, 1, memory_order_relaxed);
}

void group_engine_lock(struct group_engine *engine)
{
    if (!group_engine_try_lock(engine))
        lock_slow(engine);
}

void group_engine_unlock(struct group_engine *engine)
{
    atomic_store_explicit(&engine->lock, 0, memory_order_release);
}

bool group_engine_progress(struct group_engine *engine)
{
    bool moved = false;
    base_list_each(node, after, &engine->groups)
    {
        struct hdl_group *group = base_container_of(node, struct hdl_group, node);
        moved |= group_progress(group);
    }
    if (engine->net && net_needs_poll(engine->net))
        moved |= net_poll(engine->net) > 0;
    uint64_t polls = atomic_load_explicit(&engine->polls, memory_order_relaxed) + 1;
    atomic_store_explicit(&engine->polls, polls, memory_order_relaxed);
    if (polls % POLLS_PER_CLOCK == 0) {
        int64_t now = base_now_ns();
        if (now >= engine->next_tick_ns)
            group_engine_tick(engine, now);
    }
    return moved;
}

void group_engine_wake(struct group_engine *engine)
{
    if (engine->net)
        net_wake(engine->net);
}

static size_t describe_ops(char *text, size_t room, struct hdl_group *group)
{
    size_t n = 0;
    uint64_t first =
        group->num_traced > GROUP_TRACE ? group->num_traced - GROUP_TRACE : 0;
    char desc[160];
    for (uint64_t i = first; i < group->num_traced && n < room; i++) {
        const struct group_trace *line = &group->trace[i % GROUP_TRACE];
        n += (size_t)snprintf(text + n, room - n, "  op %llu %s: %s\n",
                              (unsigned long long)line->number,
                              group_desc_format(&line->desc, desc, sizeof(desc)),
                              base_status_name((enum hdl_status)line->status));
    }
    base_list_each(node, after, &group->queue)
    {
        struct hdl_op *op = base_container_of(node, struct hdl_op, node);
        char ranks[128];
        if (n >= room)
            break;
        n += (size_t)snprintf(
            text + n, room - n,
            "  op %llu %s: open, chunk %llu (published %llu, pieces %llu) of %llu, "
            "missing ranks %s\n",
            (unsigned long long)op->number,
            group_desc_format(&op->desc, desc, sizeof(desc)),
            (unsigned long long)op->pulled, (unsigned long long)op->published,
            (unsigned long long)op->pieces, (unsigned long long)op->num_chunks,
            group_missing_format(op, ranks, sizeof(ranks)));
    }
    return n < room ? n : room;
}

static size_t describe_group(char *text, size_t room, struct hdl_group *group)
{
    char active[128] = "?", absent[128] = "?", chunk[32] = "";
    const struct group_view *view = group->seen;
    struct base_rank_set *set = base_rank_set_alloc(group->engine->env, group->capacity);
    if (set && view) {
        memcpy(set->words, view->active, sizeof(uint64_t) * view->num_words);
        base_rank_set_format(set, active, sizeof(active));
        memcpy(set->words, view->absent, sizeof(uint64_t) * view->num_words);
        base_rank_set_format(set, absent, sizeof(absent));
    }
    base_rank_set_free(group->engine->env, set);
    if (GROUP_X_CHUNK(group->done) != CTL_CHUNK_MAX)
        snprintf(chunk, sizeof(chunk), " chunk %llu",
                 (unsigned long long)GROUP_X_CHUNK(group->done));
    int n = snprintf(text, room,
                     "group %s rank %u capacity %u path %s: %s; view %llu, active %s, "
                     "absent %s%s; next op %llu, done up to op %llu%s\n",
                     group->name ? group->name : "", group->rank, group->capacity,
                     group->path->name,
                     base_status_name((enum hdl_status)atomic_load(&group->over)),
                     (unsigned long long)(view ? view->ctl->epoch : 0), active, absent,
                     group_frozen(group) ? ", frozen until the coordinator commits" : "",
                     (unsigned long long)group->next,
                     (unsigned long long)GROUP_X_OP(group->done), chunk);
    return (size_t)n < room ? (size_t)n : room;
}

size_t group_engine_describe(struct group_engine *engine, char *text, size_t room)
{
    size_t n = 0;
    group_engine_lock(engine);
    base_list_each(node, after, &engine->groups)
    {
        struct hdl_group *group = base_container_of(node, struct hdl_group, node);
        if (n + GROUP_TEXT_BYTES > room)
            break;
        n += describe_group(text + n, room - n, group);
        n += describe_ops(text + n, room - n, group);
        n += group_p2p_describe(group, text + n, room - n);
    }
    group_engine_unlock(engine);
    return n;
}
