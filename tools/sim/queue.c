/* SPDX-License-Identifier: Apache-2.0 */
/* The simulator's queue: a binary heap in the order of (time, order of insertion). */
#include <stdlib.h>

#include "tools/sim/world.h"

static bool before(const struct sim_event *a, const struct sim_event *b)
{
    return a->time != b->time ? a->time < b->time : a->order < b->order;
}

static void insert(struct sim_world *w, int64_t time, const struct sim_event *event,
                   bool again)
{
    struct sim_queue *queue = &w->queue;
    if (queue->count == queue->capacity) {
        size_t capacity = queue->capacity ? 2 * queue->capacity : 256;
        struct sim_event *heap = realloc(queue->heap, capacity * sizeof(*heap));
        if (!heap) {
            sim_fail(w, "out of memory: %zu events", capacity);
            return;
        }
        queue->heap = heap;
        queue->capacity = capacity;
    }
    struct sim_event item = *event;
    item.time = time < w->now ? w->now : time;
    item.group = w->group->index;
    if (!again)
        item.order = queue->order++;
    size_t at = queue->count++;
    while (at > 0 && before(&item, &queue->heap[(at - 1) / 2])) {
        queue->heap[at] = queue->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    queue->heap[at] = item;
}

void sim_push(struct sim_world *w, int64_t time, const struct sim_event *event)
{
    insert(w, time, event, false);
}

void sim_push_again(struct sim_world *w, int64_t time, const struct sim_event *event)
{
    insert(w, time, event, true);
}

bool sim_pop(struct sim_world *w, struct sim_event *event)
{
    struct sim_queue *queue = &w->queue;
    if (queue->count == 0)
        return false;
    *event = queue->heap[0];
    struct sim_event item = queue->heap[--queue->count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= queue->count)
            break;
        if (child + 1 < queue->count &&
            before(&queue->heap[child + 1], &queue->heap[child]))
            child++;
        if (before(&item, &queue->heap[child]))
            break;
        queue->heap[at] = queue->heap[child];
        at = child;
    }
    if (queue->count > 0)
        queue->heap[at] = item;
    return true;
}
