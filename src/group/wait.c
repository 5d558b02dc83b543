/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for an operation or for memory, with deadlines and the line about slow waits.
 */
#include "group/wait.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/rankset.h"
#include "group/mapped.h"
#include "group/p2p.h"
#include "group/spread.h"
#include "net/net.h"

/* Nobody else ran in a yield that is shorter. */
#define YIELD_LONG_NS (3 * BASE_NS_PER_US)
/* Rounds of progress between two looks at the clock or two yields. A waiter spins for
 * spin_ns once; afterwards it offers its core between short looks, so that a peer that
 * shares the core can go on. */
enum { SPIN_ROUNDS = 32, YIELD_ROUNDS = 6, CROWDED_ROUNDS = 4 };

#define TICK_NS (10 * BASE_NS_PER_MS)
#define SLEEP_NS (100 * BASE_NS_PER_MS)
#define SLOW_NS (5 * BASE_NS_PER_S)

static void find_missing(const struct hdl_op *op, uint64_t *mask)
{
    if (op->number)
        op->group->path->missing(op, mask);
    else if (op->peer >= 0)
        base_mask_set(mask, (uint32_t)op->peer);
}

const char *group_missing_format(const struct hdl_op *op, char *text, size_t size)
{
    struct hdl_group *group = op->group;
    struct base_rank_set *set = base_rank_set_alloc(group->engine->env, group->capacity);
    if (!set) {
        snprintf(text, size, "?");
        return text;
    }
    find_missing(op, set->words);
    base_rank_set_format(set, text, size);
    base_rank_set_free(group->engine->env, set);
    return text;
}

static void describe(const struct hdl_op *op, char *text, size_t size)
{
    char desc[160];
    if (op->number)
        snprintf(text, size, "operation %llu, %s", (unsigned long long)op->number,
                 group_desc_format(&op->desc, desc, sizeof(desc)));
    else
        snprintf(text, size, "%s bytes %zu tag %d", group_kind_name(op->desc.kind),
                 op->bytes, op->tag);
}

/* Returns false when the operation's deadline is over; then the group is, too. */
static bool tick_op(struct hdl_op *op, int64_t now)
{
    struct hdl_group *group = op->group;
    char what[224], ranks[128], text[512];
    if (op->started_ns == 0)
        op->started_ns = now;
    if (now >= op->deadline_ns) {
        describe(op, what, sizeof(what));
        snprintf(text, sizeof(text), "%s: its timeout is over, missing ranks %s", what,
                 group_missing_format(op, ranks, sizeof(ranks)));
        group_end(group, HDL_ETIMEDOUT, text);
        return false;
    }
    if (!op->warned && now - op->started_ns >= SLOW_NS) {
        op->warned = true;
        describe(op, what, sizeof(what));
        base_log_warn(group->engine->env, "group %s %s has waited 5 s; missing ranks %s",
                      group->name ? group->name : "", what,
                      group_missing_format(op, ranks, sizeof(ranks)));
    }
    return true;
}

static void tick_list(struct base_list *head, int64_t now)
{
    base_list_each(node, after, head)
    {
        if (!tick_op(base_container_of(node, struct hdl_op, node), now))
            return;
    }
}

void group_engine_tick(struct group_engine *engine, int64_t now)
{
    engine->next_tick_ns = now + TICK_NS;
    base_list_each(node, after, &engine->groups)
    {
        struct hdl_group *group = base_container_of(node, struct hdl_group, node);
        if (atomic_load_explicit(&group->over, memory_order_relaxed) != HDL_OK)
            continue;
        if (group->path->tick)
            group->path->tick(group, now);
        tick_list(&group->queue, now);
        group_p2p_each(group, now, tick_op);
    }
}

/* What a thread waits for: an operation, or a test of the caller; and what it found. */
struct target {
    struct hdl_op *op;
    bool (*test)(void *argument);
    void *argument;
    struct hdl_group *group; /* whose ranks are waited for, NULL = not known */
    bool needs_core;         /* one of them needs this core, perhaps */
    enum group_crowding crowding;
    uint32_t yields;
};

static bool reached(const struct target *target)
{
    return target->op ? group_op_finished(target->op) : target->test(target->argument);
}

static bool waits_for(const struct hdl_op *op, uint32_t rank)
{
    return op->number ? mapped_lacks(op, rank) : op->peer == (int32_t)rank;
}

/* Does it wait for inputs of ranks, or for one rank? Otherwise for pieces, a free slot or
 * any source, and who keeps it waiting is not looked for. */
static bool knows_whom(const struct hdl_op *op)
{
    return op->number ? !op->use_pieces && op->pulled < op->published : op->peer >= 0;
}

/* Which ranks are on this core: too many of those that are awake? And does the operation
 * wait for one of them, or one that may be? If not, nothing is won by giving up the core;
 * also if all came while this thread looked elsewhere. Under the lock; before every
 * yield, so one pass, which mostly reads one flag. */
static void look_at_cores(struct target *target)
{
    struct hdl_group *group = target->group;
    if (!group || group->path->messaged)
        return;
    const struct hdl_op *op = group->crowded ? target->op : NULL;
    struct group_awake awake = {0};
    uint32_t core = group_spread_show(group);
    bool known = op && knows_whom(op), near = false, far = false;
    for (uint32_t r = 0, n = group->capacity; r < n; r++) {
        uint32_t there = group_spread_core(group, r);
        awake.all += there != 0;
        awake.here += there == core;
        awake.below += there == core && r < group->rank;
        if (there != 0 && there != core) {
            if (op && !known && !far)
                far = waits_for(op, r);
        } else if (op && !near) {
            near = waits_for(op, r);
        }
    }
    target->needs_core = near || (op && !known && !far);
    target->crowding = group_spread_crowding(group, &awake);
}

/* A short spin under the lock; sets *moved. */
static bool spin(struct group_engine *engine, struct target *target, int rounds,
                 bool *moved)
{
    if (!group_engine_try_lock(engine)) {
        base_cpu_relax();
        return target->op && group_op_finished(target->op);
    }
    bool done = false;
    engine->holder_waits = 1;
    struct hdl_group *group = target->op ? target->op->group : NULL;
    for (int i = 0; !(done = reached(target)) && i < rounds; i++) {
        bool step =
            i % 32 != 31 && group ? group_progress(group) : group_engine_progress(engine);
        *moved |= step;
        if (atomic_load_explicit(&engine->contended, memory_order_relaxed))
            break;
        if (!step)
            base_cpu_relax();
    }
    if (!done)
        look_at_cores(target);
    engine->holder_waits = 0;
    group_engine_unlock(engine);
    return done;
}

/* One full round of progress if the lock is free. */
static bool round_once(struct group_engine *engine, const struct target *target,
                       bool *moved)
{
    bool done;
    if (!group_engine_try_lock(engine))
        return target->op && group_op_finished(target->op);
    engine->holder_waits = 1;
    done = reached(target);
    if (!done) {
        *moved |= group_engine_progress(engine);
        done = reached(target);
    }
    engine->holder_waits = 0;
    group_engine_unlock(engine);
    return done;
}

static bool sleep_once(struct group_engine *engine, const struct target *target,
                       int64_t deadline, bool *moved)
{
    int64_t now = base_now_ns();
    if (now >= engine->next_tick_ns && group_engine_try_lock(engine)) {
        group_engine_tick(engine, now);
        group_engine_unlock(engine);
    }
    int64_t timeout = deadline - now < SLEEP_NS ? deadline - now : SLEEP_NS;
    if (timeout <= 0)
        return false;
    if (!engine->net) {
        struct timespec nap = {.tv_nsec = 50 * BASE_NS_PER_US};
        nanosleep(&nap, NULL);
        return round_once(engine, target, moved);
    }
    uint32_t ticket = net_sleep_begin(engine->net);
    if (round_once(engine, target, moved)) {
        net_sleep_cancel(engine->net);
        return true;
    }
    if (*moved) {
        net_sleep_cancel(engine->net);
        return false;
    }
    if (target->group)
        group_spread_hide(target->group);
    net_sleep(engine->net, ticket, timeout, 0);
    return false;
}

/* A peer on another host may be a process of this machine all the same. It shares the
 * core if it is what runs whenever this thread yields. */
static void yield(struct group_engine *engine, int64_t now)
{
    sched_yield();
    if (engine->net && net_needs_poll(engine->net))
        group_spread(engine, base_now_ns() - now > YIELD_LONG_NS ? GROUP_CORE_SHARED
                                                                 : GROUP_CORE_FREE);
}

/* May ranks that the operation waits for need this core? */
static bool outnumbered(const struct hdl_group *group)
{
    return group && group->crowded && !group->path->messaged;
}

bool group_op_spin(struct hdl_op *op, int rounds)
{
    for (int i = 0; i < rounds && !group_op_finished(op); i++) {
        if (group_progress(op->group))
            i = 0;
        else
            base_cpu_relax();
        if (atomic_load_explicit(&op->engine->contended, memory_order_relaxed))
            break;
    }
    return group_op_finished(op);
}

bool group_op_yield(struct hdl_op *op)
{
    struct hdl_group *group = op->group;
    struct group_engine *engine = op->engine;
    struct target target = {.op = op, .group = group};
    if (!outnumbered(group))
        return false;
    look_at_cores(&target);
    if (target.needs_core) {
        group_engine_unlock(engine);
        sched_yield();
        group_spread(engine, target.crowding);
        group_engine_lock(engine);
    }
    return group_op_spin(op, target.needs_core ? 1 : SPIN_ROUNDS);
}

static bool wait_until(struct group_engine *engine, struct target *target,
                       int64_t deadline, bool crowded)
{
    int64_t since = 0;
    bool few_cores = target->op && outnumbered(target->group);
    int rounds = few_cores ? 1 : crowded ? CROWDED_ROUNDS : SPIN_ROUNDS;
    for (;;) {
        bool moved = false;
        if (spin(engine, target, rounds, &moved))
            return true;
        int64_t now = base_now_ns();
        if (moved || since == 0)
            since = now;
        if (now >= deadline)
            return false;
        int64_t idle = now - since;
        if (few_cores)
            rounds = target->needs_core ? 1 : SPIN_ROUNDS;
        else if (target->crowding != GROUP_CORE_FREE)
            rounds = 1;
        if (idle < engine->spin_ns && rounds == SPIN_ROUNDS)
            continue;
        if (!crowded || rounds == SPIN_ROUNDS)
            rounds = YIELD_ROUNDS;
        moved = false;
        target->yields++;
        if (idle < engine->yield_ns)
            yield(engine, now);
        else if (sleep_once(engine, target, deadline, &moved))
            return true;
        if (moved)
            since = 0;
    }
}

/* Waits; then moves off a core that too many ranks share. */
static bool wait_for(struct group_engine *engine, struct target *target, int64_t deadline,
                     bool crowded)
{
    atomic_fetch_add_explicit(&engine->waiters, 1, memory_order_seq_cst);
    bool done = wait_until(engine, target, deadline, crowded);
    if (target->yields && target->group && !target->group->path->messaged)
        group_spread(engine, target->crowding);
    atomic_fetch_sub_explicit(&engine->waiters, 1, memory_order_relaxed);
    return done;
}

void group_op_wait(struct hdl_op *op, int64_t deadline_ns)
{
    struct group_engine *engine = op->engine;
    struct hdl_group *group = op->group;
    struct target target = {.op = op, .group = group};
    if (!group_op_finished(op)) {
        (void)wait_for(engine, &target, deadline_ns,
                       group && (group->crowded || group->late > 0));
        /* Messaged peers go on without this thread. */
        if (engine->net && net_needs_poll(engine->net))
            group_thread_kick(engine);
    }
}

bool group_engine_wait(struct group_engine *engine, bool (*test)(void *argument),
                       void *argument, int64_t deadline_ns)
{
    struct target target = {.test = test, .argument = argument};
    return wait_for(engine, &target, deadline_ns, false);
}

bool group_wait(struct hdl_group *group, bool (*test)(void *argument), void *argument,
                int64_t deadline_ns)
{
    struct target target = {.test = test, .argument = argument, .group = group};
    return wait_for(group->engine, &target, deadline_ns, group->crowded);
}
