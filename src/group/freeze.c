/* SPDX-License-Identifier: Apache-2.0 */
/* What the control thread does to a group: freeze and answer, commit a view, end it. */
#include <string.h>

#include "base/clock.h"
#include "base/env.h"
#include "group/group.h"
#include "group/wait.h"
#include "host/host.h"
#include "net/net.h"

/* The freezes counted in the word wrap around inside their field. */
static uint64_t frozen_word(uint64_t word)
{
    uint64_t count =
        (word + GROUP_READY_COUNT) & ~GROUP_READY_X_MASK & ~GROUP_READY_FROZEN;
    return GROUP_READY_FROZEN | count | (word & GROUP_READY_X_MASK);
}

uint64_t group_ready_x(const struct hdl_group *group, uint64_t word)
{
    uint64_t next = atomic_load_explicit(&group->next, memory_order_seq_cst);
    uint32_t low = (uint32_t)((word & GROUP_READY_X_MASK) >> GROUP_CHUNK_BITS);
    uint64_t number = next - (uint32_t)((uint32_t)next - low);
    return GROUP_X(number, GROUP_X_CHUNK(word));
}

static void set_frozen(struct hdl_group *group)
{
    uint64_t word = atomic_load(&group->ready);
    while (!(word & GROUP_READY_FROZEN) &&
           !atomic_compare_exchange_weak(&group->ready, &word, frozen_word(word)))
        ;
}

/* Number of chunks of an issued operation; false if it is not known here. */
static bool issued_chunks(struct hdl_group *group, uint64_t number, uint64_t *chunks)
{
    struct group_issue *issue = &group->issues[number % GROUP_ISSUES];
    if (atomic_load_explicit(&issue->number, memory_order_acquire) != number)
        return false;
    *chunks = atomic_load_explicit(&issue->num_chunks, memory_order_acquire);
    return atomic_load_explicit(&issue->number, memory_order_acquire) == number;
}

static void fill_open(struct hdl_group *group, struct ctl_answer *answer)
{
    uint64_t last = answer->ready;
    for (uint32_t i = 0; i < answer->num_dead; i++)
        if (answer->published[i] > last)
            last = answer->published[i];
    answer->num_open = 0;
    for (uint64_t n = GROUP_X_OP(answer->ready);
         n <= GROUP_X_OP(last) && answer->num_open < CTL_OPEN_MAX; n++) {
        uint64_t chunks = 0;
        if (n == 0)
            continue;
        (void)issued_chunks(group, n, &chunks);
        answer->open[answer->num_open++] = (struct ctl_open_op){
            .op = n, .num_chunks = (uint32_t)chunks, .messaged = answer->messaged};
    }
}

/* A member whose data threads have not seen yet that it is one answers as a fresh one. */
static bool has_entered(struct hdl_group *group, uint64_t *before)
{
    const struct group_view *view = atomic_load(&group->view);
    const struct ctl_slot *own = &view->ctl->slots[group->rank];
    if (!own->active || own->first == 0 || own->first == atomic_load(&group->entered))
        return true;
    *before = GROUP_X_END(GROUP_X_OP(own->first) - 1);
    return false;
}

static uint64_t own_done(struct hdl_group *group)
{
    uint64_t before;
    if (!has_entered(group, &before))
        return before;
    return atomic_load(&group_segment_head(group->segment)->done);
}

/* The chunk behind x. */
static uint64_t chunk_after(struct hdl_group *group, uint64_t x)
{
    uint64_t chunks = 0;
    if (issued_chunks(group, GROUP_X_OP(x), &chunks) && GROUP_X_CHUNK(x) + 1 < chunks)
        return x + 1;
    return GROUP_X(GROUP_X_OP(x) + 1, 0);
}

/*
 * What the rank has published, as the newest view says where its memory is (the data
 * threads may be behind); not beyond what is complete here if it has written over the
 * next chunk. It can only have done so by a commit that left this rank out and that went
 * with those who had it: nothing of it is readable here any more.
 */
static uint64_t sample(struct hdl_group *group, uint32_t rank, uint64_t complete)
{
    const struct group_view *view = atomic_load(&group->view);
    const struct group_reach *reach = view->reach[rank];
    if (!group->path)
        return GROUP_X_END(0);
    bool fresh = reach && reach->segment;
    uint64_t newest = fresh ? group_segment_newest(&group->shape, reach->segment)
                            : group->path->sample(group, rank);
    const struct group_slot *slots =
        fresh ? group_segment_slot(&group->shape, reach->segment, 0)
              : group->peer[rank].slots;
    if (group->path->messaged || !slots)
        return newest;
    uint64_t next = chunk_after(group, complete);
    uint32_t index = group_slot_of(group, GROUP_X_OP(next), GROUP_X_CHUNK(next));
    return atomic_load(&slots[index].seq) > next ? complete : newest;
}

void group_freeze(void *user, const struct ctl_prepare *prepare,
                  struct ctl_answer *answer)
{
    struct hdl_group *group = user;
    set_frozen(group);
    answer->ballot = prepare->ballot;
    answer->messaged = group->path && group->path->messaged;
    answer->done = own_done(group);
    if (!has_entered(group, &answer->ready)) {
        answer->next = GROUP_X_OP(answer->ready) + 1;
    } else {
        answer->ready = group_ready_x(group, atomic_load(&group->ready));
        answer->next = atomic_load(&group->next);
    }
    answer->num_dead = prepare->num_dead;
    uint64_t complete = answer->ready > answer->done ? answer->ready : answer->done;
    for (uint32_t i = 0; i < prepare->num_dead; i++) {
        uint32_t rank = prepare->dead[i];
        if (rank >= group->capacity)
            continue;
        /* The first reading since the last commit is kept. */
        if (group->fence[rank] == GROUP_FOREVER)
            group->fence[rank] = sample(group, rank, complete);
        answer->published[i] = group->fence[rank];
    }
    fill_open(group, answer);
}

/* Takes retired views off the list that nobody can be reading: older than the one that
 * progress uses, and no reader is inside. Under view_lock. */
static struct group_view *take_retired(struct hdl_group *group, struct group_view *newest)
{
    const struct group_view *seen = atomic_load(&group->seen);
    uint64_t next = atomic_load(&group->next);
    if (atomic_load(&group->view_readers) != 0)
        return NULL;
    struct group_view *keep = newest, *shown = newest;
    while (keep && keep != seen)
        keep = keep->older;
    while (keep && shown && shown->visible_from > next)
        shown = shown->older;
    if (!keep || !shown)
        return NULL;
    /* The older of the two. */
    for (struct group_view *view = keep->older; view; view = view->older)
        if (view == shown)
            keep = shown;
    struct group_view *retired = keep->older;
    keep->older = NULL;
    return retired;
}

/* Messaged chunks from the change on start again, so `ready` falls back; what was mapped
 * and ready stays. */
static void set_thawed(struct hdl_group *group, const struct ctl_view *ctl)
{
    uint64_t before, from = ctl_view_changed_from(ctl);
    bool falls = group->path && group->path->messaged && has_entered(group, &before);
    uint64_t word = atomic_load(&group->ready), thawed;
    do {
        uint64_t x = group_ready_x(group, word);
        if (falls && from > 0 && x >= from)
            x = from - 1;
        uint64_t frozen = word & GROUP_READY_FROZEN ? word : frozen_word(word);
        thawed = (frozen & ~GROUP_READY_X_MASK & ~GROUP_READY_FROZEN) |
                 (x & GROUP_READY_X_MASK);
    } while (!atomic_compare_exchange_weak(&group->ready, &word, thawed));
}

void group_lock_view(struct hdl_group *group)
{
    while (atomic_exchange(&group->view_lock, 1))
        base_cpu_relax();
}

void group_unlock_view(struct hdl_group *group)
{
    atomic_store(&group->view_lock, 0);
}

/* How each rank of the view is reached: as before, or as the worker has found out. Under
 * view_lock. */
static void take_reach(struct hdl_group *group, struct group_view *view,
                       const struct group_view *older)
{
    for (uint32_t r = 0; r < group->capacity; r++) {
        uint64_t rank_epoch = view->ctl->slots[r].rank_epoch;
        struct group_reach *arrived = group->arrived[r];
        if (rank_epoch == 0)
            continue;
        if (arrived && arrived->rank_epoch == rank_epoch) {
            view->reach[r] = arrived;
            group->arrived[r] = NULL;
        } else if (older->reach[r] && older->reach[r]->rank_epoch == rank_epoch) {
            view->reach[r] = group_reach_ref(older->reach[r]);
        }
    }
}

static void replace_view(struct hdl_group *group, struct group_view *view)
{
    struct group_view *dropped = view;
    group_lock_view(group);
    struct group_view *older = atomic_load(&group->view);
    if (view->ctl->epoch > older->ctl->epoch) {
        take_reach(group, view, older);
        group_view_follow(view, older);
        view->older = older;
        atomic_store(&group->view, view);
        dropped = take_retired(group, view);
    }
    group_unlock_view(group);
    while (dropped) {
        struct group_view *next = dropped->older;
        group_view_free(group->engine->env, dropped);
        dropped = next;
    }
}

/* Waits for windows of ranks that this view has lost end. */
static void tell_net(struct hdl_group *group, const struct group_view *view)
{
    if (!group->engine->net)
        return;
    for (uint32_t r = 0; r < group->capacity; r++)
        if (group_view_absent(view, r) && r != group->rank)
            net_rank_lost(group->engine->net,
                          (int32_t)ctl_rank_epoch_rank(view->ctl->slots[r].rank_epoch),
                          view->ctl->slots[r].rank_epoch);
}

/* A removed rank comes back with its rank epoch: its new interval is not closed. Who is
 * a member is no candidate any more. */
static void forget_closed(struct hdl_group *group, const struct ctl_view *ctl)
{
    for (uint32_t i = 0; i < group->capacity; i++) {
        if (ctl->slots[i].active)
            atomic_store(&group->ready_epoch[i], 0);
        if (ctl->slots[i].rank_epoch == atomic_load(&group->closed[i]) &&
            ctl->slots[i].last == CTL_X_FOREVER)
            atomic_store(&group->closed[i], 0);
    }
}

void group_commit(void *user, struct ctl_view *ctl)
{
    struct hdl_group *group = user;
    struct group_view *view = group_view_create(group->engine->env, ctl, group->rank);
    if (!view) {
        group_end(group, HDL_ENOMEM, "no memory for a new view");
        return;
    }
    /* A commit without a PREPARE here would be a fault of the control plane; freezing
     * first keeps a data thread from finishing a chunk with the old view in any case. */
    set_frozen(group);
    for (uint32_t i = 0; i < group->capacity; i++)
        group->fence[i] = GROUP_FOREVER;
    forget_closed(group, ctl);
    tell_net(group, view);
    replace_view(group, view);
    group_count(&group->counters.views, 1);
    set_thawed(group, ctl);
    group_attach_again(group);
    group_notify(group);
    group_engine_wake(group->engine);
}

/* No operation runs yet, and a freeze that came meanwhile stays. */
enum hdl_status group_first_view(struct hdl_group *group, struct ctl_view *ctl)
{
    struct group_view *view = group_view_create(group->engine->env, ctl, group->rank);
    if (!view)
        return HDL_ENOMEM;
    replace_view(group, view);
    atomic_store(&group->entered, ctl->slots[group->rank].first);
    return HDL_OK;
}

void group_watch_done(void *user, uint64_t x)
{
    struct hdl_group *group = user;
    uint64_t done = own_done(group);
    if (done >= x) {
        atomic_store(&group->watch_done, 0);
        if (group->host_group)
            host_group_finished(group->host_group, done);
        return;
    }
    atomic_store(&group->watch_done, x);
    group_thread_kick(group->engine);
}

void group_fail(void *user, enum hdl_status status, const char *text)
{
    (void)group_end_here(user, status, text);
}
