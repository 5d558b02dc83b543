/* SPDX-License-Identifier: Apache-2.0 */
/* Moving a waiting thread off a core that it shares with the peer it waits for. */
#include "group/spread.h"

#include <sched.h>

#include "base/clock.h"
#include "base/random.h"
#include "group/group.h"

/*
 * Two ranks that yield to each other look busy and fresh in the cache to the scheduler,
 * which then leaves them on one core for seconds while another would take one of them.
 * Each rank shows in its segment where it is. Leaving the core out of the thread's mask
 * for a moment moves it; the mask is then as it was. If all moved they would meet on the
 * next core: the highest ranks leave at once, and where they do not (their mask has one
 * core), or nobody knows who is who, chance decides.
 */
#define PAUSE_FIRST (2 * BASE_NS_PER_MS)
#define PAUSE_MOST (50 * BASE_NS_PER_MS)
#define PAUSE_FORGET (500 * BASE_NS_PER_MS)
enum { WAITS_LEAVE = 4, WAITS_MANY = 32 };

static void move_thread(void)
{
    cpu_set_t mask;
    int core = sched_getcpu();
    if (core < 0 || core >= CPU_SETSIZE ||
        sched_getaffinity(0, sizeof(mask), &mask) != 0 || CPU_COUNT(&mask) < 2)
        return;
    cpu_set_t others = mask;
    CPU_CLR((size_t)core, &others);
    if (sched_setaffinity(0, sizeof(others), &others) == 0)
        (void)sched_setaffinity(0, sizeof(mask), &mask);
}

uint32_t group_spread_show(struct hdl_group *group)
{
    struct group_head *head = group_segment_head(group->segment);
    uint32_t core = (uint32_t)sched_getcpu() + 1;
    if (atomic_load_explicit(&head->core, memory_order_relaxed) != core)
        atomic_store_explicit(&head->core, core, memory_order_relaxed);
    return core;
}

void group_spread_hide(struct hdl_group *group)
{
    struct group_head *head = group_segment_head(group->segment);
    atomic_store_explicit(&head->core, 0, memory_order_relaxed);
}

bool group_spread_same_core(const struct hdl_group *group, uint32_t rank)
{
    const struct group_head *own = group_segment_head(group->segment);
    const struct group_head *head = group->peer[rank].segment;
    return group->crowded && head &&
           atomic_load_explicit(&head->core, memory_order_relaxed) ==
               atomic_load_explicit(&own->core, memory_order_relaxed);
}

enum group_crowding group_spread_crowding(const struct hdl_group *group,
                                          const struct group_awake *awake)
{
    uint32_t cores = group->engine->cores;
    if (awake->here * cores <= awake->all + cores - 1)
        return GROUP_CORE_FREE;
    uint32_t share = (awake->all + cores - 1) / cores;
    return awake->below >= share ? GROUP_CORE_LEAVE : GROUP_CORE_SHARED;
}

void group_spread(struct group_engine *engine, enum group_crowding crowding)
{
    uint32_t waits = atomic_load_explicit(&engine->shared_waits, memory_order_relaxed);
    if (crowding == GROUP_CORE_FREE) {
        if (waits)
            atomic_store_explicit(&engine->shared_waits, 0, memory_order_relaxed);
        return;
    }
    if (waits < (crowding == GROUP_CORE_LEAVE ? WAITS_LEAVE : WAITS_MANY)) {
        atomic_store_explicit(&engine->shared_waits, waits + 1, memory_order_relaxed);
        return;
    }
    int64_t now = base_now_ns();
    if (!engine->env->config.spread ||
        now < atomic_load_explicit(&engine->spread_at_ns, memory_order_relaxed))
        return;
    /* Moves soon after each other do not help: then they become rare. */
    int64_t last = atomic_load_explicit(&engine->spread_at_ns, memory_order_relaxed);
    int64_t pause = atomic_load_explicit(&engine->spread_pause_ns, memory_order_relaxed);
    pause = pause < PAUSE_FIRST || now - last > PAUSE_FORGET ? PAUSE_FIRST : pause;
    atomic_store_explicit(&engine->spread_at_ns, now + pause, memory_order_relaxed);
    pause = 2 * pause < PAUSE_MOST ? 2 * pause : PAUSE_MOST;
    atomic_store_explicit(&engine->spread_pause_ns, pause, memory_order_relaxed);
    atomic_store_explicit(&engine->shared_waits, 0, memory_order_relaxed);
    uint64_t seed = (uint64_t)now ^ (uint64_t)(uintptr_t)engine;
    if (crowding == GROUP_CORE_LEAVE || base_splitmix_below(&seed, 2))
        move_thread();
}
