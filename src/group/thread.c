/* SPDX-License-Identifier: Apache-2.0 */
/* The progress thread: moves what nobody waits for, and otherwise stays out of the way.
 */
#include <sched.h>

#include "base/clock.h"
#include "base/futex.h"
#include "group/group.h"
#include "group/wait.h"
#include "host/host.h"
#include "net/net.h"

/*
 *     asleep --kick--> napping --pending, nobody waits--> moving
 *        ^--idle for LINGER_NS--'  ^--------nothing left--------'
 *
 * A kick is a system call only while the thread is asleep, so a loop of submit and wait
 * pays for it once. A nap is short enough for an application that computes instead of
 * waiting.
 */
#define NAP_NS (1 * BASE_NS_PER_MS)
#define LONG_NAP_NS (64 * BASE_NS_PER_MS)
#define LINGER_NS (200 * BASE_NS_PER_MS)
#define BELL_NS (100 * BASE_NS_PER_MS)

enum { MOVING_YIELDS = 20 };

static bool has_work(struct group_engine *engine)
{
    return atomic_load_explicit(&engine->pending, memory_order_seq_cst) > 0 ||
           (engine->net && net_needs_poll(engine->net));
}

static bool waited_for(struct group_engine *engine)
{
    return atomic_load_explicit(&engine->waiters, memory_order_relaxed) > 0;
}

static bool round_once(struct group_engine *engine)
{
    if (!group_engine_try_lock(engine))
        return true;
    bool moved = group_engine_progress(engine);
    int64_t now = base_now_ns();
    if (now >= engine->next_tick_ns)
        group_engine_tick(engine, now);
    group_engine_unlock(engine);
    return moved;
}

/* Moves operations until nothing is left or a caller waits. */
static void move(struct group_engine *engine)
{
    int idle = 0;
    while (has_work(engine) && !waited_for(engine) && !atomic_load(&engine->stop)) {
        if (round_once(engine)) {
            idle = 0;
            if (atomic_load_explicit(&engine->contended, memory_order_relaxed))
                sched_yield();
            continue;
        }
        if (++idle < MOVING_YIELDS) {
            sched_yield();
            continue;
        }
        uint32_t ticket = net_sleep_begin(engine->net);
        if (round_once(engine) || atomic_load(&engine->stop))
            net_sleep_cancel(engine->net);
        else
            net_sleep(engine->net, ticket, BELL_NS, NET_SLEEP_STANDBY);
    }
}

/* Naps get longer while the thread that waits sleeps, too: then there is no hurry. */
static void take_nap(struct group_engine *engine, uint32_t work, int64_t *nap,
                     uint64_t *polls)
{
    uint64_t now = atomic_load_explicit(&engine->polls, memory_order_relaxed);
    if (now - *polls > 2)
        *nap = NAP_NS;
    else if (*nap < LONG_NAP_NS)
        *nap *= 2;
    *polls = now;
    /* A long one is ended by the thread that waits when it leaves. */
    atomic_store(&engine->asleep, *nap > NAP_NS);
    base_futex_wait((uint32_t *)&engine->work, work, *nap, false);
    atomic_store(&engine->asleep, false);
}

static void progress_main(void *argument)
{
    struct group_engine *engine = argument;
    int64_t busy = base_now_ns(), nap = NAP_NS;
    uint64_t polls = 0;
    while (!atomic_load(&engine->stop)) {
        uint32_t work = atomic_load(&engine->work);
        bool working = has_work(engine);
        int64_t now = base_now_ns();
        if (working)
            busy = now;
        if (working && !waited_for(engine)) {
            move(engine);
            continue;
        }
        if (working || now - busy < LINGER_NS) {
            take_nap(engine, work, &nap, &polls);
            continue;
        }
        atomic_store(&engine->asleep, true);
        (void)round_once(engine);
        if (!has_work(engine))
            base_futex_wait((uint32_t *)&engine->work, work, BASE_FOREVER, false);
        atomic_store(&engine->asleep, false);
        busy = base_now_ns();
    }
}

enum hdl_status group_thread_start(struct group_engine *engine)
{
    if (!engine->host || !engine->net)
        return HDL_OK;
    return host_thread_start(engine->host, "hdl-progress", progress_main, engine,
                             &engine->thread);
}

void group_thread_stop(struct group_engine *engine)
{
    if (!engine->thread)
        return;
    atomic_store(&engine->stop, true);
    atomic_fetch_add(&engine->work, 1);
    base_futex_wake((uint32_t *)&engine->work, 1, false);
    net_wake(engine->net);
    host_thread_join(engine->thread);
    engine->thread = NULL;
}

void group_thread_kick(struct group_engine *engine)
{
    if (!atomic_load_explicit(&engine->asleep, memory_order_seq_cst))
        return;
    atomic_fetch_add(&engine->work, 1);
    base_futex_wake((uint32_t *)&engine->work, 1, false);
}
