/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads over plain shared memory, with a coordinator that the test plays. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/status.h"

_Noreturn void harness_fail(const char *file, int line, const char *text)
{
    fprintf(stderr, "%s:%d: %s (detail: %s)\n", file, line, text, base_detail());
    abort();
}

static struct ctl_view *first_view(struct harness *h)
{
    struct ctl_view *view = ctl_view_new(&h->env, h->capacity, 0);
    CHECK(view);
    view->epoch = h->epoch;
    for (uint32_t r = 0; r < h->num_ranks; r++)
        view->slots[r] = (struct ctl_slot){
            .rank_epoch = ctl_rank_epoch(r, 1), .last = CTL_X_FOREVER, .active = true};
    ctl_view_count(view);
    return view;
}

void harness_init(struct harness *h, uint32_t num_ranks, uint32_t capacity,
                  uint32_t window_chunks, size_t chunk_bytes)
{
    memset(h, 0, sizeof(*h));
    h->num_ranks = num_ranks;
    h->capacity = capacity;
    h->epoch = ctl_epoch(1, 1);
    base_env_init(&h->env);
    CHECK(group_shape_init(&h->shape, capacity, window_chunks ? window_chunks : 4,
                           chunk_bytes ? chunk_bytes : 4096, 0) == HDL_OK);
    h->stride = h->shape.bytes;
    h->memory = mmap(NULL, h->stride * num_ranks, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(h->memory != MAP_FAILED);
    h->view = first_view(h);
}

void harness_open_rank(struct harness *h, uint32_t rank)
{
    struct harness_rank *me = &h->ranks[rank];
    me->harness = h;
    me->rank = rank;
    base_env_init(&me->env);
    if (getenv("HEDDLE_TEST_PIECES"))
        strcpy(me->env.config.algorithm.text, "allreduce=pieces,reduce=pieces");
    CHECK(group_engine_create(&me->env, NULL, NULL, &me->engine) == HDL_OK);
    me->group = base_alloc_aligned(&me->env, 64, 1, sizeof(*me->group));
    CHECK(me->group);
    CHECK(group_init(me->group, me->engine, &h->shape, rank, h->memory + rank * h->stride,
                     h->view) == HDL_OK);
}

void harness_connect_rank(struct harness *h, uint32_t rank)
{
    struct harness_rank *me = &h->ranks[rank];
    for (uint32_t r = 0; r < h->num_ranks; r++)
        CHECK(group_peer_map(me->group, r, h->memory + r * h->stride) == HDL_OK);
    CHECK(group_open(me->group, &group_path_mapped) == HDL_OK);
}

void harness_close_rank(struct harness *h, uint32_t rank)
{
    struct harness_rank *me = &h->ranks[rank];
    group_stop(me->group);
    group_free_parts(me->group);
    base_free_aligned(&me->env, me->group);
    group_engine_destroy(me->engine);
}

void harness_open(struct harness *h, uint32_t num_ranks, uint32_t capacity,
                  uint32_t window_chunks, size_t chunk_bytes)
{
    harness_init(h, num_ranks, capacity, window_chunks, chunk_bytes);
    for (uint32_t r = 0; r < num_ranks; r++)
        harness_open_rank(h, r);
    for (uint32_t r = 0; r < num_ranks; r++)
        harness_connect_rank(h, r);
}

void harness_close(struct harness *h)
{
    for (uint32_t r = 0; r < h->num_ranks; r++)
        harness_close_rank(h, r);
    ctl_view_unref(h->view);
    munmap(h->memory, h->stride * h->num_ranks);
}

static void *thread_main(void *argument)
{
    struct harness_rank *me = argument;
    me->body(me, me->argument);
    return NULL;
}

void harness_start(struct harness *h,
                   void (*body)(struct harness_rank *me, void *argument), void *argument)
{
    for (uint32_t r = 0; r < h->num_ranks; r++) {
        struct harness_rank *me = &h->ranks[r];
        if (me->dead)
            continue;
        me->body = body;
        me->argument = argument;
        CHECK(pthread_create(&me->thread, NULL, thread_main, me) == 0);
    }
}

void harness_join(struct harness *h)
{
    for (uint32_t r = 0; r < h->num_ranks; r++)
        if (!h->ranks[r].dead)
            pthread_join(h->ranks[r].thread, NULL);
}

void harness_run(struct harness *h, void (*body)(struct harness_rank *me, void *argument),
                 void *argument)
{
    harness_start(h, body, argument);
    harness_join(h);
}

/* Asks every living rank: the largest `published` and `next`, the chunks of the operation
 * that `published` lies in. */
struct sum {
    uint64_t last, next, chunks;
};

static struct sum ask(struct harness *h, uint32_t dead)
{
    struct sum sum = {0};
    struct ctl_open_op open[CTL_OPEN_MAX];
    struct ctl_prepare prepare = {.ballot = h->epoch, .num_dead = 1, .dead = &dead};
    for (int round = 0; round < 2; round++) {
        for (uint32_t r = 0; r < h->num_ranks; r++) {
            uint64_t published = 0;
            struct ctl_answer answer = {.published = &published, .open = open};
            if (h->ranks[r].dead)
                continue;
            group_freeze(h->ranks[r].group, &prepare, &answer);
            sum.last = published > sum.last ? published : sum.last;
            sum.next = answer.next > sum.next ? answer.next : sum.next;
            for (uint32_t i = 0; i < answer.num_open; i++)
                if (open[i].op == ctl_x_op(sum.last) && open[i].num_chunks)
                    sum.chunks = open[i].num_chunks;
        }
    }
    return sum;
}

void harness_lose(struct harness *h, uint32_t dead, bool deactivate)
{
    h->epoch++;
    h->ranks[dead].dead = true;
    struct sum sum = ask(h, dead);
    uint64_t last = sum.last, lacking = ctl_x_op(last);
    if (sum.chunks == 0 || ctl_x_chunk(last) + 1 >= sum.chunks)
        lacking++;
    struct ctl_view *view = ctl_view_new(&h->env, h->capacity, 1);
    CHECK(view);
    for (uint32_t i = 0; i < h->capacity; i++)
        view->slots[i] = h->view->slots[i];
    view->epoch = h->epoch;
    view->attempts[0] = (struct ctl_attempt){.from = last + 1, .epoch = h->epoch};
    struct ctl_slot *slot = &view->slots[dead];
    slot->absent = true;
    slot->active = !deactivate;
    slot->last = last;
    slot->reported = CTL_OP_FOREVER;
    if (deactivate)
        slot->reported = sum.next - 1 > lacking ? sum.next - 1 : lacking;
    ctl_view_count(view);
    for (uint32_t r = 0; r < h->num_ranks; r++)
        if (!h->ranks[r].dead)
            group_commit(h->ranks[r].group, view);
    ctl_view_unref(h->view);
    h->view = view;
}
