/* SPDX-License-Identifier: Apache-2.0 */
/* A model of the data plane: chunks that are published, pulled or put, and returned. */
#include <stdlib.h>
#include <string.h>

#include "tools/sim/world.h"

/*
 * Every operation needs everybody's input on everybody, like all_reduce. A step of the
 * data thread does one thing, so that a freeze can fall between the reading of a chunk's
 * flags and the raising of `ready`, as it can in the library.
 *
 *     issued >= published >= ready >= done        counts of chunks over all operations
 */

/* In place of the hash of a failed set, or of who contributed. */
#define LINK_FAILED UINT64_C(0xe11e)
#define ROOT_LOST UINT64_C(0x7007)

bool sim_is_root_lost(uint64_t failed)
{
    return failed == ROOT_LOST;
}

uint64_t sim_op_of(const struct sim_world *w, uint64_t index)
{
    uint64_t op = 1;
    while (w->group->first_index[op + 1] <= index && op < w->options.ops)
        op++;
    return op;
}

uint64_t sim_x_of(const struct sim_world *w, uint64_t index)
{
    uint64_t op = sim_op_of(w, index);
    return ctl_x(op, index - w->group->first_index[op]);
}

static uint64_t count_upto(const struct sim_world *w, uint64_t x)
{
    uint64_t op = ctl_x_op(x);
    if (op == 0)
        return 0;
    if (op > w->options.ops)
        return w->group->num_chunks;
    uint64_t chunks = w->group->first_index[op + 1] - w->group->first_index[op];
    uint64_t count = ctl_x_chunk(x) + 1;
    return w->group->first_index[op] + (count < chunks ? count : chunks);
}

/* Position of the last of `count` chunks. */
static uint64_t position(const struct sim_world *w, uint64_t count)
{
    if (count == 0)
        return ctl_x_end(0);
    uint64_t op = sim_op_of(w, count - 1);
    return count == w->group->first_index[op + 1] ? ctl_x_end(op)
                                                  : sim_x_of(w, count - 1);
}

/* Counts the data threads of a slot that stand still: only these are looked for to wake.
 */
static void rest(struct sim_world *w, const struct sim_process *p, int by)
{
    uint32_t s = p->plane->slot;
    w->group->num_resting[s] += (uint32_t)by;
    uint64_t bit = UINT64_C(1) << s % 64;
    if (w->group->num_resting[s] > 0)
        w->group->resting[s / 64] |= bit;
    else
        w->group->resting[s / 64] &= ~bit;
}

bool sim_plane_init(struct sim_world *w, struct sim_process *p)
{
    struct sim_plane *plane = p->plane;
    size_t n = w->group->capacity;
    plane->fenced = calloc(n, sizeof(uint64_t));
    size_t sources = w->options.messaged ? n : 1;
    plane->in = calloc(sources, sizeof(struct sim_flag));
    plane->flag_from = calloc(sources, sizeof(uint64_t));
    size_t inputs = sources * w->options.window;
    plane->slots = calloc(inputs, sizeof(struct sim_flag));
    plane->slot_from = calloc(inputs, sizeof(uint64_t));
    plane->returned = calloc(w->group->num_chunks + 1, sizeof(uint64_t));
    plane->failed = calloc(w->options.ops + 2, sizeof(uint64_t));
    plane->link_failed = calloc(w->options.ops + 2, sizeof(bool));
    plane->wrote = calloc(w->options.window, sizeof(uint64_t));
    plane->ended = calloc(w->options.ops + 2, sizeof(bool));
    plane->peers = calloc(n, sizeof(struct sim_process *));
    if (plane->member)
        rest(w, p, 1);
    return plane->fenced && plane->in && plane->flag_from && plane->slots &&
           plane->slot_from && plane->returned && plane->failed && plane->link_failed &&
           plane->wrote && plane->ended && plane->peers;
}

void sim_plane_free(struct sim_plane *plane)
{
    ctl_view_unref(plane->view);
    free(plane->fenced);
    free(plane->in);
    free(plane->flag_from);
    free(plane->slots);
    free(plane->slot_from);
    free(plane->returned);
    free(plane->failed);
    free(plane->link_failed);
    free(plane->ended);
    free(plane->wrote);
    free(plane->peers);
}

static uint64_t own_end(const struct sim_world *w, const struct sim_process *p)
{
    uint64_t last = p->plane->view->slots[p->plane->slot].last;
    return last == CTL_X_FOREVER ? w->group->num_chunks : count_upto(w, last);
}

bool sim_plane_finished(const struct sim_world *w, const struct sim_process *p)
{
    return p->plane->done >= own_end(w, p);
}

static void wake(struct sim_world *w, struct sim_process *p)
{
    if (p->plane->scheduled || !p->alive || !p->plane->running || p->plane->over)
        return;
    p->plane->scheduled = true;
    rest(w, p, -1);
    int64_t delay =
        p->slowness * (1000 + (int64_t)base_splitmix_below(&w->random, 20000));
    if ((w->options.faults & SIM_REORDER) && base_splitmix_below(&w->random, 16) == 0)
        delay *= 30;
    sim_push(w, w->now + delay,
             &(struct sim_event){.kind = EV_PLANE, .process = p->index});
}

static void wake_peers(struct sim_world *w, struct sim_process *p)
{
    for (uint32_t i = 0; i < (w->group->capacity + 63) / 64; i++) {
        for (uint64_t left = w->group->resting[i]; left != 0; left &= left - 1) {
            struct sim_process *q =
                p->plane->peers[i * 64 + (uint32_t)__builtin_ctzll(left)];
            if (q && q != p)
                wake(w, q);
        }
    }
}

/* The planted errors of the coordinator: a view with other boundaries, the same on all.
 */
static struct ctl_view *spoil(struct sim_world *w, struct sim_process *p,
                              struct ctl_view *view)
{
    enum sim_defect defect = w->options.defect;
    bool boundary =
        defect == SIM_LAST_LOW || defect == SIM_LAST_HIGH || defect == SIM_PER_OPERATION;
    if (!boundary || view->num_attempts == 0)
        return ctl_view_ref(view);
    struct ctl_view *copy = ctl_view_new(&w->env, view->capacity, view->num_attempts);
    if (!copy)
        return ctl_view_ref(view);
    struct ctl_attempt *attempts = copy->attempts;
    *copy = *view;
    copy->references = 1;
    copy->attempts = attempts;
    memcpy(attempts, view->attempts, view->num_attempts * sizeof(*attempts));
    for (uint32_t s = 0; s < view->capacity; s++) {
        struct ctl_slot *slot = &copy->slots[s];
        *slot = view->slots[s];
        ctl_bytes_ref(slot->endpoint);
        const struct ctl_slot *before = p->plane->view ? &p->plane->view->slots[s] : NULL;
        if (before && before->absent && before->rank_epoch == slot->rank_epoch)
            slot->last = before->last;
        else if (slot->absent && slot->last != CTL_X_FOREVER) {
            uint64_t count = count_upto(w, slot->last);
            if (defect == SIM_LAST_LOW && count > 0)
                slot->last = position(w, count - 1);
            else if (defect == SIM_LAST_HIGH && count < w->group->num_chunks)
                slot->last = position(w, count + 1);
            else if (defect == SIM_PER_OPERATION)
                slot->last = ctl_x_end(ctl_x_op(slot->last));
            if (attempts[copy->num_attempts - 1].epoch == view->epoch)
                attempts[copy->num_attempts - 1].from = slot->last + 1;
        }
    }
    return copy;
}

static void take_view(struct sim_world *w, struct sim_process *p, struct ctl_view *view)
{
    struct sim_plane *plane = p->plane;
    uint64_t hash = sim_check_view(w, p, view);
    struct ctl_view *mine = spoil(w, p, view);
    ctl_view_unref(plane->view);
    plane->view = mine;
    plane->view_hash = mine == view ? hash : sim_view_hash(mine);
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        uint64_t rank_epoch = mine->slots[s].rank_epoch;
        if (rank_epoch == 0)
            plane->peers[s] = NULL;
        else if (!plane->peers[s] || plane->peers[s]->plane->rank_epoch != rank_epoch)
            plane->peers[s] = sim_by_epoch(w, rank_epoch);
    }
}

/* The own interval begins: the next call is the operation of its boundary. */
static void begin(struct sim_world *w, struct sim_process *p)
{
    struct sim_plane *plane = p->plane;
    uint64_t op = ctl_x_op(plane->view->slots[plane->slot].first);
    uint64_t start =
        op > w->options.ops ? w->group->num_chunks : w->group->first_index[op];
    plane->next = op;
    plane->issued = plane->published = plane->ready = plane->done = start;
    p->plane->user_waits = false;
    sim_push(w, w->now + sim_delay(w),
             &(struct sim_event){.kind = EV_USER, .process = p->index});
}

void sim_plane_start(struct sim_world *w, struct sim_process *p, struct ctl_view *view)
{
    struct sim_plane *plane = p->plane;
    if (plane->over)
        return;
    take_view(w, p, view);
    plane->running = true;
    sim_plan_faults(w);
    begin(w, p);
}

/* -------------------------------------------------------------------- participants */

static bool takes_part(const struct sim_plane *plane, uint32_t s, uint64_t x)
{
    return ctl_slot_takes_part(&plane->view->slots[s], x);
}

static void put_to(struct sim_world *w, struct sim_process *p, uint32_t s, uint64_t index,
                   bool ready)
{
    struct sim_process *q = p->plane->peers[s];
    if (!q || q == p)
        return;
    struct sim_event event = {.kind = EV_PUT, .process = q->index};
    event.put =
        (struct sim_put){.from_slot = p->plane->slot,
                         .from = p->plane->rank_epoch,
                         .attempt = ctl_view_attempt(p->plane->view, sim_x_of(w, index)),
                         .index = index,
                         .ready = ready};
    int64_t time = w->now + sim_delay(w) * w->data_scale / 8;
    for (uint32_t i = 0; i < w->num_links; i++) {
        const struct sim_link *link = &w->links[i];
        bool mine = (link->ends[0] == p && link->ends[1] == q) ||
                    (link->ends[0] == q && link->ends[1] == p);
        if (mine && time < link->until)
            time = link->until + sim_delay(w);
    }
    sim_push(w, time, &event);
}

/* To all that take part and are not absent. */
static void put_all(struct sim_world *w, struct sim_process *p, uint64_t index,
                    bool ready)
{
    uint64_t x = sim_x_of(w, index);
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        if (s != p->plane->slot && takes_part(p->plane, s, x) &&
            !p->plane->view->slots[s].absent)
            put_to(w, p, s, index, ready);
    }
}

static bool newer(const struct sim_flag *a, const struct sim_flag *b)
{
    return a->attempt != b->attempt ? a->attempt > b->attempt : a->count > b->count;
}

void sim_plane_put(struct sim_world *w, struct sim_process *p, const struct sim_put *put)
{
    struct sim_plane *plane = p->plane;
    if (plane->over)
        return;
    uint32_t s = put->from_slot;
    bool known = plane->view && plane->view->slots[s].rank_epoch == put->from;
    bool ahead = !plane->view || put->attempt > plane->view->epoch;
    if (!known && !ahead && w->options.defect != SIM_STALE_MESSAGE)
        return; /* of an old rank epoch */
    if (ahead && w->options.defect == SIM_DROP_NEWER)
        return;
    struct sim_flag flag = {put->attempt, put->index + 1};
    uint32_t at =
        put->ready ? s
                   : s * w->options.window + (uint32_t)(put->index % w->options.window);
    struct sim_flag *place = put->ready ? &plane->in[at] : &plane->slots[at];
    uint64_t *from = put->ready ? &plane->flag_from[at] : &plane->slot_from[at];
    /* A predecessor's memory is not the successor's: what is older changes nothing. */
    if (!newer(&flag, place) && (*from == put->from || flag.attempt < place->attempt))
        return;
    *place = flag;
    *from = put->from;
    wake(w, p);
}

static bool peer_is_ready(const struct sim_world *w, const struct sim_plane *plane,
                          uint32_t s, uint64_t index)
{
    const struct sim_flag *flag = &plane->in[s];
    if (plane->flag_from[s] != plane->view->slots[s].rank_epoch ||
        flag->count < index + 1)
        return false;
    if (plane->fenced[s] != 0 && index + 1 > plane->fenced[s] - 1)
        return false;
    if (w->options.defect == SIM_STALE_READY)
        return true;
    uint64_t x = sim_x_of(w, flag->count - 1);
    return ctl_attempt_tag(flag->attempt) ==
           ctl_attempt_tag(ctl_view_attempt(plane->view, x));
}

/* Whether chunk `index` of slot s can be read now. */
static bool input_is_there(const struct sim_world *w, const struct sim_plane *plane,
                           uint32_t s, uint64_t index)
{
    if (w->options.messaged) {
        uint32_t at = s * w->options.window + (uint32_t)(index % w->options.window);
        bool fresh =
            plane->slot_from[at] == plane->view->slots[s].rank_epoch &&
            plane->slots[at].attempt == ctl_view_attempt(plane->view, sim_x_of(w, index));
        return (fresh || w->options.defect == SIM_STALE_MESSAGE) &&
               plane->slots[at].count == index + 1;
    }
    const struct sim_process *q = plane->peers[s];
    uint64_t published = q ? q->plane->published : 0;
    if (plane->fenced[s] != 0 && plane->fenced[s] - 1 < published)
        published = plane->fenced[s] - 1;
    return published > index;
}

/* Planted: a rank leaves out whom it believes dead, without a commit. */
static bool left_out(const struct sim_world *w, const struct sim_plane *plane, uint32_t s)
{
    return w->options.defect == SIM_OWN_EVIDENCE && plane->peers[s] &&
           !plane->peers[s]->alive;
}

/* --------------------------------------------------------------------------- steps */

/*
 * What ranks of one view find out about a mapped chunk is the same for all, and what is
 * there stays: they share how far they have looked. NULL if this one looks for itself.
 */
static struct sim_look *shared_look(struct sim_world *w, const struct sim_plane *plane,
                                    uint64_t index)
{
    if (w->options.messaged || w->options.apart || w->options.defect != SIM_NO_DEFECT)
        return NULL;
    uint64_t epoch = plane->view->epoch;
    struct sim_look *look = &w->group->looks[2 * index + epoch % 2];
    if (look->epoch != epoch)
        *look = (struct sim_look){.epoch = epoch};
    return look;
}

/* Planted: a freeze that does not freeze. */
static bool goes_on(const struct sim_world *w)
{
    return w->options.defect == SIM_NO_FREEZE || w->options.defect == SIM_NO_FENCE;
}

static bool may_publish(struct sim_world *w, const struct sim_process *p)
{
    const struct sim_plane *plane = p->plane;
    uint64_t index = plane->published;
    uint64_t end = plane->issued < own_end(w, p) ? plane->issued : own_end(w, p);
    if (index >= end)
        return false;
    bool starts = index == w->group->first_index[sim_op_of(w, index)];
    if (plane->frozen && starts && !goes_on(w))
        return false;
    uint64_t held = plane->wrote[index % w->options.window];
    if (held == 0)
        return true;
    uint64_t old = held - 1;
    uint64_t x = sim_x_of(w, old);
    struct sim_look own = {0}, *look = shared_look(w, plane, old);
    look = look ? look : &own;
    for (; look->done < w->group->capacity; look->done++) {
        uint32_t s = look->done;
        if (!takes_part(plane, s, x) || plane->view->slots[s].absent || !plane->peers[s])
            continue;
        if (plane->peers[s]->plane->done <= old && !plane->peers[s]->plane->left)
            return false;
    }
    return true;
}

static bool try_publish(struct sim_world *w, struct sim_process *p)
{
    if (!may_publish(w, p))
        return false;
    uint64_t index = p->plane->published++;
    p->plane->wrote[index % w->options.window] = index + 1;
    if (w->group->most_published < index + 1)
        w->group->most_published = index + 1;
    if (w->options.messaged)
        put_all(w, p, index, false);
    else
        wake_peers(w, p);
    return true;
}

/* Whose inputs the rank waits for: of everybody, of the root, or of nobody. Descriptors,
 * which come with chunk 0, are compared by all but the root, and by it if messaged. */
static bool needs(const struct sim_world *w, const struct sim_plane *plane, uint32_t s,
                  uint64_t index)
{
    uint64_t op = sim_op_of(w, index);
    uint32_t root = w->group->root[op];
    bool first = index == w->group->first_index[op];
    if (root == UINT32_MAX)
        return true;
    if (first && (w->options.messaged || root != plane->slot))
        return true;
    return s == root;
}

static bool all_inputs(struct sim_world *w, const struct sim_process *p, uint64_t index)
{
    const struct sim_plane *plane = p->plane;
    uint64_t x = sim_x_of(w, index);
    uint32_t root = w->group->root[sim_op_of(w, index)];
    struct sim_look own = {0}, *look = &own;
    uint32_t end = w->group->capacity;
    if (needs(w, plane, root == 0, index)) { /* one that is not the root: so all */
        look = shared_look(w, plane, index);
        look = look ? look : &own;
    } else {
        own.inputs = root;
        end = root + 1;
    }
    for (; look->inputs < end; look->inputs++) {
        uint32_t s = look->inputs;
        if (s == plane->slot || !takes_part(plane, s, x) || left_out(w, plane, s))
            continue;
        if (!input_is_there(w, plane, s, index))
            return false;
    }
    return true;
}

/*
 * A peer has written over a chunk that is needed here: it left this rank out, by a commit
 * that is on its way, or lost with those who had it. This rank's part ends. Without a
 * restart of the coordinator that can only happen to one that is out already.
 */
static bool overtaken(struct sim_world *w, struct sim_process *p, uint64_t index)
{
    struct sim_plane *plane = p->plane;
    if (w->options.messaged || w->group->most_published <= index + w->options.window)
        return false;
    uint64_t x = sim_x_of(w, index);
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        const struct sim_process *q = plane->peers[s];
        if (s == plane->slot || !q || !takes_part(plane, s, x) ||
            !needs(w, plane, s, index) ||
            q->plane->wrote[index % w->options.window] <= index + 1)
            continue;
        if (sim_counts(w, p) && w->result->restarts == 0)
            sim_fail(w,
                     "invariant 5: rank %u reads chunk %llu of rank %u from a slot that "
                     "holds a later one",
                     plane->slot, (unsigned long long)index, s);
        sim_trace(w, "rank %u: rank %u has gone on without it", plane->slot, s);
        w->result->overtaken++;
        plane->over = true;
        plane->why = HDL_EFENCED;
        plane->over_at = w->now;
        plane->left_sent = true;
        sim_agent(w, p,
                  &(struct ctl_agent_event){.kind = CTL_AGENT_ABORT, .key = sim_key(w)});
        return true;
    }
    return false;
}

static bool try_ready(struct sim_world *w, struct sim_process *p)
{
    struct sim_plane *plane = p->plane;
    uint64_t index = plane->ready;
    if (index >= plane->published || index >= own_end(w, p))
        return false;
    bool stopped = plane->frozen && !goes_on(w);
    if (!plane->reading) {
        if (stopped || !all_inputs(w, p, index) || overtaken(w, p, index))
            return false;
        plane->reading = true;
        plane->reading_epoch = plane->view->epoch;
        return true;
    }
    plane->reading = false;
    if (stopped || plane->reading_epoch != plane->view->epoch)
        return true; /* the compare-and-swap fails; the flags are read again */
    plane->ready++;
    if (w->options.messaged)
        put_all(w, p, index, true);
    return true;
}

static uint64_t mix(uint64_t value)
{
    value ^= value >> 31;
    value *= UINT64_C(0x9e3779b97f4a7c15);
    return value ^ value >> 29;
}

/* Chunks that the commit has decided are finished first. */
static bool link_failed(const struct sim_world *w, const struct sim_plane *plane,
                        uint64_t index)
{
    return plane->link_failed[sim_op_of(w, index)] &&
           index >= count_upto(w, plane->view->settled);
}

static bool may_finish(const struct sim_world *w, const struct sim_process *p)
{
    const struct sim_plane *plane = p->plane;
    uint64_t index = plane->done;
    if (index >= plane->ready || link_failed(w, plane, index))
        return false;
    if (!w->options.messaged)
        return true;
    if (index < count_upto(w, plane->view->settled))
        return true;
    if (plane->frozen && index >= plane->answered && !goes_on(w))
        return false;
    uint64_t x = sim_x_of(w, index);
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        if (s == plane->slot || !takes_part(plane, s, x) ||
            plane->view->slots[s].absent || left_out(w, plane, s))
            continue;
        if (!peer_is_ready(w, plane, s, index))
            return false;
    }
    return true;
}

/* Hash of who contributed; what is read must still be in the windows. */
static uint64_t contributors(struct sim_world *w, struct sim_process *p, uint64_t index)
{
    const struct sim_plane *plane = p->plane;
    uint64_t x = sim_x_of(w, index);
    bool counts = sim_counts(w, p);
    struct sim_look *look = counts ? shared_look(w, plane, index) : NULL;
    if (look && look->contributors != 0)
        return look->contributors;
    uint64_t hash = 1;
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        bool root = w->group->root[sim_op_of(w, index)] == s;
        if (!takes_part(plane, s, x) || left_out(w, plane, s) ||
            (w->group->root[sim_op_of(w, index)] != UINT32_MAX && !root))
            continue;
        const struct sim_process *q = plane->peers[s];
        uint64_t rank_epoch = plane->view->slots[s].rank_epoch;
        uint32_t at = s * w->options.window + (uint32_t)(index % w->options.window);
        hash += mix(rank_epoch + 1);
        if (w->options.messaged && q != p && plane->slots[at].count == index + 1 &&
            plane->slot_from[at] != rank_epoch)
            sim_fail(w, "invariant 5: rank %u reads chunk %llu of an old rank %u",
                     plane->slot, (unsigned long long)index, s);
        if (w->options.messaged || q == p || !q || !counts)
            continue;
        if (q->plane->published <= index)
            sim_fail(w, "rank %u reads chunk %llu of rank %u, which never published it",
                     plane->slot, (unsigned long long)index, s);
    }
    if (look)
        look->contributors = hash;
    return hash;
}

static uint64_t failed_set(struct sim_world *w, const struct sim_plane *plane,
                           uint64_t op)
{
    struct sim_look *look = shared_look(w, plane, w->group->first_index[op]);
    if (look && look->failed != 0)
        return look->failed;
    uint64_t hash = 1;
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        const struct ctl_slot *slot = &plane->view->slots[s];
        bool lacks = false;
        for (uint64_t k = w->group->first_index[op]; k < w->group->first_index[op + 1];
             k++)
            lacks |= !takes_part(plane, s, sim_x_of(w, k));
        if (slot->rank_epoch != 0 && lacks && ctl_slot_reports(slot, op))
            hash += mix(s + 1);
    }
    if (look)
        look->failed = hash;
    return hash;
}

static void finish_op(struct sim_world *w, struct sim_process *p, uint64_t op)
{
    p->plane->failed[op] = failed_set(w, p->plane, op);
    sim_trace(w, "rank %u finishes operation %llu, failed set %llx", p->plane->slot,
              (unsigned long long)op, (unsigned long long)p->plane->failed[op]);
    sim_check_op(w, p, op);
}

static void op_ended(struct sim_world *w, struct sim_process *p)
{
    if (p->plane->leaving)
        sim_push(w, w->now, &(struct sim_event){.kind = EV_LEAVE, .process = p->index});
    if (p->plane->user_waits)
        sim_push(w, w->now, &(struct sim_event){.kind = EV_USER, .process = p->index});
    p->plane->user_waits = false;
    sim_plane_watch(w, p, p->plane->watch);
}

/* The rest of the operation is nobody's wait. */
static void end_op(struct sim_world *w, struct sim_process *p, uint64_t op, uint64_t how)
{
    struct sim_plane *plane = p->plane;
    uint64_t end = w->group->first_index[op + 1];
    plane->done = end;
    plane->ready = plane->ready > end ? plane->ready : end;
    plane->published = plane->published > end ? plane->published : end;
    plane->reading = false;
    plane->ended[op] = true;
    plane->failed[op] = how;
    sim_check_op(w, p, op);
    op_ended(w, p);
    wake_peers(w, p);
}

static bool try_finish(struct sim_world *w, struct sim_process *p)
{
    if (!may_finish(w, p) || overtaken(w, p, p->plane->done))
        return false;
    struct sim_plane *plane = p->plane;
    uint64_t index = plane->done;
    uint64_t op = sim_op_of(w, index);
    uint32_t root = w->group->root[op];
    bool lost = root != UINT32_MAX && !takes_part(plane, root, sim_x_of(w, index));
    plane->returned[index] = lost ? ROOT_LOST : contributors(w, p, index);
    if (!lost)
        plane->done++;
    sim_check_chunk(w, p, index);
    if (lost) {
        sim_trace(w, "rank %u: operation %llu has lost its root", plane->slot,
                  (unsigned long long)op);
        end_op(w, p, op, ROOT_LOST);
        return true;
    }
    if (plane->done == w->group->first_index[op + 1]) {
        finish_op(w, p, op);
        op_ended(w, p);
    }
    sim_plane_watch(w, p, plane->watch);
    wake_peers(w, p);
    return true;
}

/* Operations that the view fails for a broken link end at once, and are no chunk's wait.
 */
static bool try_link_failure(struct sim_world *w, struct sim_process *p)
{
    struct sim_plane *plane = p->plane;
    if (plane->done >= plane->issued || plane->frozen)
        return false;
    uint64_t op = sim_op_of(w, plane->done);
    if (!link_failed(w, plane, plane->done))
        return false;
    sim_trace(w, "rank %u: operation %llu fails for a broken link", plane->slot,
              (unsigned long long)op);
    end_op(w, p, op, LINK_FAILED);
    return true;
}

void sim_plane_step(struct sim_world *w, struct sim_process *p)
{
    p->plane->scheduled = false;
    rest(w, p, 1);
    if (!p->plane->running || p->plane->over)
        return;
    bool moved = try_link_failure(w, p);
    moved |= try_publish(w, p);
    moved |= try_finish(w, p);
    moved |= try_ready(w, p);
    if (moved)
        wake(w, p);
}

void sim_plane_issue(struct sim_world *w, struct sim_process *p)
{
    struct sim_plane *plane = p->plane;
    if (!plane->running || plane->over || plane->next > w->options.ops ||
        p->plane->leaving || p->plane->left_sent || plane->issued >= own_end(w, p))
        return;
    uint64_t done_op = plane->done > 0 ? sim_op_of(w, plane->done - 1) : 0;
    p->plane->user_waits = plane->next > done_op + 3;
    if (p->plane->user_waits)
        return;
    plane->next++;
    plane->issued = w->group->first_index[plane->next];
    wake(w, p);
    sim_push(w, w->now + sim_delay(w) / 2,
             &(struct sim_event){.kind = EV_USER, .process = p->index});
}

void sim_plane_watch(struct sim_world *w, struct sim_process *p, uint64_t x)
{
    p->plane->watch = x;
    if (x == 0 || !p->plane->running || p->plane->done < count_upto(w, x) ||
        p->plane->next <= ctl_x_op(x))
        return;
    p->plane->watch = 0;
    sim_agent(
        w, p,
        &(struct ctl_agent_event){.kind = CTL_AGENT_FINISHED, .key = sim_key(w), .x = x});
}

/* --------------------------------------------------------------- freeze and commit */

static uint64_t sample(struct sim_world *w, struct sim_plane *plane, uint32_t s,
                       bool again)
{
    const struct sim_process *q = plane->peers[s];
    uint64_t seen = w->options.messaged ? plane->in[s].count
                    : q                 ? q->plane->published
                                        : 0;
    /* What is needed next is overwritten: the dead had gone on without this rank. */
    if (!w->options.messaged && q &&
        q->plane->wrote[plane->ready % w->options.window] > plane->ready + 1)
        seen = plane->ready;
    bool fences = w->options.defect != SIM_NO_FENCE;
    if (plane->fenced[s] == 0 && fences)
        plane->fenced[s] = seen + 1;
    uint64_t count = fences ? plane->fenced[s] - 1 : seen;
    if (w->options.defect == SIM_SAMPLE_FIRST && count > 0)
        count--;
    if (w->options.defect == SIM_STALE_ANSWER && again)
        count = 0;
    if (w->options.defect == SIM_LEAST_PUBLISHED) {
        if (w->group->least[s] == 0 || w->group->least[s] > count + 1)
            w->group->least[s] = count + 1;
        count = w->group->least[s] - 1;
    }
    return position(w, count);
}

static void fill_open(const struct sim_world *w, const struct sim_plane *plane,
                      struct ctl_answer *answer)
{
    uint64_t op = plane->ready > 0 ? sim_op_of(w, plane->ready - 1) : 1;
    for (; op < plane->next && answer->num_open < CTL_OPEN_MAX; op++) {
        answer->open[answer->num_open++] =
            (struct ctl_open_op){.op = op,
                                 .num_chunks = (uint32_t)(w->group->first_index[op + 1] -
                                                          w->group->first_index[op]),
                                 .messaged = w->options.messaged};
    }
}

void sim_plane_freeze(struct sim_world *w, struct sim_process *p,
                      const struct ctl_prepare *prepare)
{
    struct sim_plane *plane = p->plane;
    struct ctl_open_op open[CTL_OPEN_MAX];
    uint64_t *published = calloc(prepare->num_dead + 1, sizeof(uint64_t));
    if (!published || !plane->running) {
        free(published);
        return;
    }
    bool again = plane->frozen;
    plane->frozen = true;
    plane->ballot = prepare->ballot;
    plane->answered = plane->ready;
    plane->answered_next = plane->next;
    struct ctl_answer answer = {.ballot = prepare->ballot,
                                .ready = position(w, plane->ready),
                                .done = position(w, plane->done),
                                .next = plane->next,
                                .num_dead = prepare->num_dead,
                                .published = published,
                                .open = open,
                                .messaged = w->options.messaged};
    if (w->options.defect == SIM_NEXT_STARTED)
        answer.next = plane->published > 0 ? sim_op_of(w, plane->published - 1) + 1 : 1;
    for (uint32_t i = 0; i < prepare->num_dead; i++) {
        bool named = plane->fenced[prepare->dead[i]] != 0;
        published[i] = sample(w, plane, prepare->dead[i], again && !named);
    }
    fill_open(w, plane, &answer);
    sim_trace(w, "rank %u answers ballot %llx: ready %llu, next %llu", plane->slot,
              (unsigned long long)prepare->ballot, (unsigned long long)plane->ready,
              (unsigned long long)answer.next);
    sim_agent(w, p,
              &(struct ctl_agent_event){
                  .kind = CTL_AGENT_FROZEN, .key = sim_key(w), .answer = &answer});
    free(published);
}

/* A joiner's first operation is one that nobody had issued when it was admitted. */
static void check_boundaries(struct sim_world *w, struct sim_process *p,
                             const struct ctl_view *view)
{
    const struct sim_plane *plane = p->plane;
    for (uint32_t s = 0; plane->frozen && s < w->group->capacity; s++) {
        const struct ctl_slot *slot = &view->slots[s];
        if (slot->rank_epoch == 0 || slot->first == plane->view->slots[s].first)
            continue;
        if (ctl_x_op(slot->first) < plane->answered_next &&
            plane->view->slots[plane->slot].last == CTL_X_FOREVER)
            sim_fail(
                w, "rank %u joins at operation %llu, which rank %u had issued without it",
                s, (unsigned long long)ctl_x_op(slot->first), plane->slot);
    }
    const struct ctl_slot *mine = &view->slots[plane->slot];
    bool was_open = plane->view->slots[plane->slot].last == CTL_X_FOREVER;
    if (plane->frozen && was_open && mine->last != CTL_X_FOREVER && !mine->absent &&
        ctl_x_op(mine->last) + 1 < plane->answered_next)
        sim_fail(w, "rank %u is removed before an operation that it has issued",
                 plane->slot);
}

static bool same_ranks(const struct sim_world *w, const struct ctl_view *a,
                       const struct ctl_view *b, uint64_t index)
{
    uint64_t x = sim_x_of(w, index);
    for (uint32_t s = 0; s < w->group->capacity; s++) {
        if (ctl_slot_takes_part(&a->slots[s], x) != ctl_slot_takes_part(&b->slots[s], x))
            return false;
    }
    return true;
}

static void restart_chunks(struct sim_world *w, struct sim_process *p,
                           const struct ctl_view *older)
{
    uint64_t from = ctl_view_changed_from(p->plane->view);
    struct sim_plane *plane = p->plane;
    uint64_t keep = from == CTL_X_FOREVER || from == 0 ? w->group->num_chunks
                                                       : count_upto(w, from - 1);
    uint64_t first = ctl_x_op(plane->view->slots[plane->slot].first);
    uint64_t start =
        first > w->options.ops ? w->group->num_chunks : w->group->first_index[first];
    if (keep < start)
        keep = start; /* it never took part in what is before */
    while (keep < plane->done && plane->ended[sim_op_of(w, keep)])
        keep = w->group->first_index[sim_op_of(w, keep) + 1];
    /* Of a mapped operation with a root nothing but its data was used, and it stays; a
     * rank may be far beyond one that was to go. */
    while (!w->options.messaged && keep < plane->ready &&
           (w->group->root[sim_op_of(w, keep)] != UINT32_MAX ||
            same_ranks(w, older, plane->view, keep)))
        keep++;
    if (plane->done > keep && sim_counts(w, p))
        sim_fail(w, "invariant 3: rank %u has returned chunk %llu, which starts again",
                 plane->slot, (unsigned long long)keep);
    if (plane->ready > keep) {
        w->result->redone += plane->ready - keep;
        plane->ready = keep;
    }
    for (uint64_t k = plane->ready; w->options.messaged && k < plane->published; k++) {
        if (sim_x_of(w, k) >= from)
            put_all(w, p, k, false);
    }
}

void sim_plane_commit(struct sim_world *w, struct sim_process *p, struct ctl_view *view)
{
    struct sim_plane *plane = p->plane;
    if (!plane->running || plane->over)
        return;
    if (w->options.defect == SIM_SKIP_COMMIT && plane->slot == 1) {
        plane->frozen = false;
        wake(w, p);
        return;
    }
    for (uint64_t op = view->link_from; op <= view->link_to && op <= w->options.ops; op++)
        plane->link_failed[op] = true;
    check_boundaries(w, p, view);
    bool again = view->slots[plane->slot].first > plane->view->slots[plane->slot].first;
    struct ctl_view *older = ctl_view_ref(plane->view);
    take_view(w, p, view);
    if (again)
        begin(w, p);
    plane->frozen = false;
    plane->reading = false;
    memset(plane->fenced, 0, w->group->capacity * sizeof(uint64_t));
    memset(w->group->least, 0, w->group->capacity * sizeof(uint64_t));
    sim_trace(w, "rank %u commits view %llx, changed from %llx", plane->slot,
              (unsigned long long)view->epoch,
              (unsigned long long)ctl_view_changed_from(plane->view));
    restart_chunks(w, p, older);
    ctl_view_unref(older);
    if (p->plane->leaving) /* its last operations may not be its own any more */
        sim_push(w, w->now, &(struct sim_event){.kind = EV_LEAVE, .process = p->index});
    wake(w, p);
}
