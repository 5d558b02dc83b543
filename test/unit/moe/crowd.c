/* SPDX-License-Identifier: Apache-2.0 */
/* Threads as ranks. Puts are kept back and delivered out of order if there is a seed. */
#include "crowd.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/list.h"
#include "base/random.h"

struct held_put {
    uint32_t rank;
    struct moe_put put;
};

struct crowd_peers {
    struct moe_peers base;
    struct crowd *crowd;
    uint64_t seed;
    bool held;
    size_t num_held, room;
    struct held_put *puts;
    uint64_t issued;
};

static void deliver(struct crowd_peers *p, size_t i)
{
    struct moe_put put = p->puts[i].put;
    uint8_t *to = p->crowd->arena[p->puts[i].rank];
    p->puts[i] = p->puts[--p->num_held];
    if (put.bytes > 0)
        memcpy(to + put.offset, put.src, put.bytes);
    atomic_store_explicit(moe_word(to, put.signal), put.flag, memory_order_release);
}

static void deliver_some(struct crowd_peers *p, bool all)
{
    while (!p->held && p->num_held > 0 &&
           (all || !p->seed || base_splitmix_below(&p->seed, 3) > 0))
        deliver(p, p->seed ? base_splitmix_below(&p->seed, p->num_held) : 0);
}

/* Lets others run for a random while. */
static void delay(struct crowd_peers *p)
{
    uint64_t turns = p->seed ? base_splitmix_below(&p->seed, 8) : 0;
    for (; turns > 5; turns--)
        sched_yield();
}

static bool peers_wait(struct moe_peers *peers, bool (*test)(void *), void *argument,
                       int64_t deadline)
{
    struct crowd_peers *p = base_container_of(peers, struct crowd_peers, base);
    while (!test(argument)) {
        deliver_some(p, false);
        if (deadline != BASE_FOREVER && base_now_ns() > deadline)
            return test(argument);
        sched_yield();
    }
    return true;
}

static enum hdl_status peers_check(struct moe_peers *peers)
{
    return HDL_OK;
}

static enum moe_presence peers_presence(struct moe_peers *peers, uint32_t rank)
{
    struct crowd_peers *p = base_container_of(peers, struct crowd_peers, base);
    return (enum moe_presence)atomic_load(&p->crowd->presence[rank]);
}

static void peers_ring(struct moe_peers *peers, uint32_t rank)
{
    delay(base_container_of(peers, struct crowd_peers, base));
}

static enum hdl_status peers_put(struct moe_peers *peers, uint32_t rank,
                                 const struct moe_put *put)
{
    struct crowd_peers *p = base_container_of(peers, struct crowd_peers, base);
    if (p->num_held == p->room) {
        p->room = 2 * p->room + 64;
        p->puts = realloc(p->puts, p->room * sizeof(*p->puts));
    }
    p->puts[p->num_held++] = (struct held_put){rank, *put};
    p->issued++;
    deliver_some(p, !p->seed);
    delay(p);
    return HDL_OK;
}

static uint64_t peers_mark(struct moe_peers *peers, uint32_t rank)
{
    return base_container_of(peers, struct crowd_peers, base)->issued;
}

static bool peers_settled(struct moe_peers *peers, uint32_t rank, uint64_t mark)
{
    struct crowd_peers *p = base_container_of(peers, struct crowd_peers, base);
    for (size_t i = 0; i < p->num_held; i++) {
        if (p->puts[i].rank == rank)
            return false;
    }
    return true;
}

static void peers_destroy(struct moe_peers *peers)
{
    struct crowd_peers *p = base_container_of(peers, struct crowd_peers, base);
    free(p->puts);
    free(p->base.base);
    free(p);
}

static const struct moe_peers_ops crowd_ops = {
    .wait = peers_wait,
    .check = peers_check,
    .presence = peers_presence,
    .ring = peers_ring,
    .put = peers_put,
    .mark = peers_mark,
    .settled = peers_settled,
    .destroy = peers_destroy,
};

static bool maps(const struct crowd *c, uint32_t a, uint32_t b)
{
    uint32_t half = (c->ranks + 1) / 2;
    return a == b || c->kind == CROWD_MAPPED ||
           (c->kind == CROWD_MIXED && a / half == b / half);
}

static struct moe_peers *make_peers(struct crowd *c, uint32_t rank)
{
    struct crowd_peers *p = calloc(1, sizeof(*p));
    p->crowd = c;
    p->seed = c->seed ? c->seed * 64 + rank : 0;
    p->base.ranks = c->ranks;
    p->base.self = rank;
    p->base.own = c->arena[rank];
    p->base.ops = &crowd_ops;
    p->base.base = calloc(c->ranks, sizeof(uint8_t *));
    for (uint32_t r = 0; r < c->ranks; r++) {
        p->base.base[r] = maps(c, rank, r) ? c->arena[r] : NULL;
        p->base.messaged = p->base.messaged || !maps(c, rank, r);
    }
    return &p->base;
}

struct crowd *crowd_create(uint32_t ranks, enum crowd_kind kind,
                           const struct hdl_moe_opts *opts, uint64_t seed)
{
    struct crowd *c = calloc(1, sizeof(*c));
    struct moe_config config;
    base_env_init(&c->env);
    c->ranks = ranks;
    c->kind = kind;
    c->seed = seed;
    if (moe_config_init(&c->env, &config, opts, (int32_t)ranks) != HDL_OK) {
        free(c);
        return NULL;
    }
    c->arena_bytes = config.layout.total_bytes;
    moe_config_free(&c->env, &config);
    for (uint32_t r = 0; r < ranks; r++) {
        c->arena[r] = aligned_alloc(4096, (c->arena_bytes + 4095) / 4096 * 4096);
        memset(c->arena[r], 0, c->arena_bytes);
    }
    for (uint32_t r = 0; r < ranks; r++) {
        c->rank[r] = (struct crowd_rank){.crowd = c, .rank = r};
        if (moe_config_init(&c->env, &config, opts, (int32_t)ranks) != HDL_OK ||
            moe_exchange_create(&c->env, &config, make_peers(c, r), &c->rank[r].moe) !=
                HDL_OK)
            abort();
    }
    return c;
}

struct thread {
    pthread_t thread;
    struct crowd_rank *rank;
    void (*body)(struct crowd_rank *rank);
};

static void *thread_main(void *argument)
{
    struct thread *t = argument;
    t->body(t->rank);
    return NULL;
}

void crowd_run(struct crowd *c, void (*body)(struct crowd_rank *rank))
{
    struct thread threads[CROWD_MOST];
    for (uint32_t r = 0; r < c->ranks; r++) {
        threads[r] = (struct thread){.rank = &c->rank[r], .body = body};
        if (pthread_create(&threads[r].thread, NULL, thread_main, &threads[r]) != 0)
            abort();
    }
    for (uint32_t r = 0; r < c->ranks; r++)
        pthread_join(threads[r].thread, NULL);
}

void crowd_destroy(struct crowd *c)
{
    for (uint32_t r = 0; r < c->ranks; r++) {
        crowd_hold(&c->rank[r], false);
        crowd_flush(&c->rank[r]);
    }
    for (uint32_t r = 0; r < c->ranks; r++)
        hdl_moe_destroy(c->rank[r].moe);
    for (uint32_t r = 0; r < c->ranks; r++)
        free(c->arena[r]);
    free(c);
}

void crowd_flush(struct crowd_rank *rank)
{
    deliver_some(base_container_of(rank->moe->peers, struct crowd_peers, base), true);
}

void crowd_hold(struct crowd_rank *rank, bool held)
{
    base_container_of(rank->moe->peers, struct crowd_peers, base)->held = held;
}
