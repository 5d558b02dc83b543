/* SPDX-License-Identifier: Apache-2.0 */
/* Which ranks share a host, who receives for it, and where each rank's slots are read. */
#include "group/messaged.h"

#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "base/clock.h"
#include "ctl/bytes.h"
#include "host/host.h"
#include "net/net.h"

enum { PAGE = 4096 };
#define OWN_HOST UINT32_MAX
#define NO_HOST (UINT32_MAX - 1)

static bool shape_init(struct messaged_shape *shape, uint32_t window_chunks,
                       size_t chunk_bytes)
{
    size_t end = PAGE;
    if (!group_area(&end, window_chunks, sizeof(struct group_slot), &shape->slots) ||
        !group_area(&end, window_chunks, chunk_bytes, &shape->data) ||
        !group_area(&end, window_chunks, chunk_bytes, &shape->pieces) ||
        !group_area(&end, 1, sizeof(struct group_intake), &shape->intake) ||
        !group_area(&end, GROUP_CELLS, sizeof(struct group_cell), &shape->cells) ||
        !group_area(&end, GROUP_FRAGMENTS, GROUP_FRAGMENT_BYTES, &shape->bulk))
        return false;
    shape->bytes = end;
    return true;
}

size_t group_messaged_bytes(uint32_t capacity, uint32_t window_chunks, size_t chunk_bytes)
{
    struct messaged_shape shape;
    size_t bytes;
    if (!shape_init(&shape, window_chunks, chunk_bytes) ||
        !base_mul_size(shape.bytes, capacity, &bytes))
        return SIZE_MAX;
    return bytes;
}

/* The mirror of `source` in the memory of a rank of this host. */
static char *mirror_at(const struct hdl_group *group, uint32_t receiver, uint32_t source)
{
    const struct messaged *m = messaged_of(group);
    char *segment = group->peer[receiver].segment;
    return segment + group->shape.messaged + (size_t)source * m->shape.bytes;
}

/* --------------------------------------------------------------------------- hosts */

static const struct ctl_bytes *endpoint_of(const struct hdl_group *group, uint32_t rank)
{
    const struct ctl_slot *slot = &group->seen->ctl->slots[rank];
    return slot->rank_epoch != 0 ? slot->endpoint : NULL;
}

static bool on_own_host(struct hdl_group *group, uint32_t rank)
{
    const struct ctl_bytes *handle = endpoint_of(group, rank);
    return rank == group->rank ||
           net_handle_mapped(group->engine->net, handle->data, handle->size);
}

/* The target of a host, known by the handle of any of its ranks; else an unused one. */
static struct messaged_target *find_target(struct hdl_group *group,
                                           struct ctl_bytes *handle)
{
    struct messaged *m = messaged_of(group);
    struct messaged_target *unused = NULL;
    for (uint32_t t = 0; t < m->num_targets; t++) {
        struct messaged_target *target = &m->targets[t];
        if (net_handles_mapped(group->engine->net, target->handle->data,
                               target->handle->size, handle->data, handle->size))
            return target;
        if (target->num_ranks == 0 && target->receiver < 0)
            unused = target;
    }
    if (!unused)
        unused = &m->targets[m->num_targets++];
    ctl_bytes_unref(unused->handle);
    unused->handle = ctl_bytes_ref(handle);
    unused->receiver = -1;
    return unused;
}

/* Puts every rank of the view where it lives: a new process may live elsewhere. */
static void sort_ranks(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    m->num_own_host = 0;
    for (uint32_t t = 0; t < m->num_targets; t++)
        m->targets[t].num_ranks = 0;
    for (uint32_t r = 0; r < group->capacity; r++) {
        m->host[r] = NO_HOST;
        if (!endpoint_of(group, r))
            continue;
        if (on_own_host(group, r)) {
            m->host[r] = OWN_HOST;
            m->own_host[m->num_own_host++] = r;
            continue;
        }
        struct messaged_target *target =
            find_target(group, group->seen->ctl->slots[r].endpoint);
        m->host[r] = (uint32_t)(target - m->targets);
        if (target->num_ranks == 0)
            target->low = r;
        target->high = r;
        target->ranks[target->num_ranks++] = r;
    }
}

/* All ranks find the same, so only present ones count: of others they may know of
 * different views. */
static void count_neighbours(struct hdl_group *group)
{
    const struct messaged *m = messaged_of(group);
    struct group_neighbours *neighbours = group->neighbours;
    group->num_hosts = 0;
    group->adds_up = false;
    memset(neighbours, 0, group->capacity * sizeof(*neighbours));
    for (uint32_t r = 0; r < group->capacity; r++) {
        if (!group_view_present(group->seen, r) || neighbours[r].count > 0)
            continue;
        uint32_t count = 0;
        for (uint32_t i = r; i < group->capacity; i++)
            if (m->host[i] == m->host[r] && group_view_present(group->seen, i))
                neighbours[i] = (struct group_neighbours){.first = r, .index = count++};
        for (uint32_t i = r; i < group->capacity; i++)
            if (m->host[i] == m->host[r] && group_view_present(group->seen, i))
                neighbours[i].count = count;
        group->num_hosts++;
        group->adds_up |= count > 1;
    }
    group->adds_up &= group->num_hosts > 1;
}

static bool alloc_targets(struct hdl_group *group, struct messaged *m)
{
    struct base_env *env = group->engine->env;
    uint32_t capacity = group->capacity, chunks = group->shape.window_chunks;
    m->targets = base_alloc(env, 2 * (size_t)capacity, sizeof(*m->targets));
    m->host = base_alloc(env, capacity, sizeof(*m->host));
    m->heads = base_alloc(env, capacity, sizeof(*m->heads));
    m->own_host = base_alloc(env, capacity, sizeof(*m->own_host));
    m->link_down = base_alloc(env, capacity, sizeof(*m->link_down));
    m->entries = base_alloc(env, MESSAGED_ENTRIES * (size_t)chunks, sizeof(*m->entries));
    if (!m->targets || !m->host || !m->heads || !m->own_host || !m->link_down ||
        !m->entries)
        return false;
    for (uint32_t t = 0; t < 2 * capacity; t++) {
        m->targets[t].receiver = -1;
        m->targets[t].ranks = base_alloc(env, capacity, sizeof(uint32_t));
        m->targets[t].tickets = base_alloc(env, chunks, sizeof(uint64_t));
        if (!m->targets[t].ranks || !m->targets[t].tickets)
            return false;
    }
    return true;
}

enum hdl_status messaged_hosts_open(struct hdl_group *group)
{
    struct messaged *m = base_alloc(group->engine->env, 1, sizeof(*m));
    if (!m)
        return HDL_ENOMEM;
    group->path_state = m;
    size_t needed;
    if (!alloc_targets(group, m) ||
        !shape_init(&m->shape, group->shape.window_chunks, group->shape.chunk_bytes)) {
        messaged_hosts_close(group);
        return HDL_ENOMEM;
    }
    if (!base_mul_size(m->shape.bytes, group->capacity, &needed) ||
        needed > group->shape.messaged_bytes) {
        messaged_hosts_close(group);
        return base_fail(HDL_ENOTSUP, "rank %u has no memory for ranks of other hosts",
                         group->rank);
    }
    messaged_hosts_adopt(group);
    return HDL_OK;
}

void messaged_hosts_close(struct hdl_group *group)
{
    struct base_env *env = group->engine->env;
    struct messaged *m = messaged_of(group);
    if (!m)
        return;
    for (uint32_t t = 0; m->targets && t < 2 * group->capacity; t++) {
        ctl_bytes_unref(m->targets[t].handle);
        base_free(env, m->targets[t].ranks);
        base_free(env, m->targets[t].tickets);
    }
    base_free(env, m->targets);
    base_free(env, m->host);
    base_free(env, (void *)m->heads);
    base_free(env, m->own_host);
    base_free(env, m->link_down);
    base_free(env, m->entries);
    base_free(env, m);
    group->path_state = NULL;
    group->num_hosts = 0;
    group->adds_up = false;
    memset(group->neighbours, 0, group->capacity * sizeof(*group->neighbours));
}

struct group_head *messaged_mirror_head(struct hdl_group *group, uint32_t rank)
{
    return (struct group_head *)(void *)mirror_at(group, group->rank, rank);
}

void messaged_mirror_clean(struct hdl_group *group, uint32_t rank)
{
    const struct messaged_shape *shape = &messaged_of(group)->shape;
    char *mirror = mirror_at(group, group->rank, rank);
    memset(mirror, 0, sizeof(struct group_head));
    memset(mirror + shape->slots, 0,
           group->shape.window_chunks * sizeof(struct group_slot));
    memset(mirror + shape->intake, 0, sizeof(struct group_intake));
    memset(mirror + shape->cells, 0, GROUP_CELLS * sizeof(struct group_cell));
}

void messaged_say_left(struct hdl_group *group)
{
    size_t at = messaged_mirror_offset(group) + offsetof(struct group_head, left);
    for (uint32_t r = 0; r < group->capacity; r++)
        if (r != group->rank && group->peer[r].remote && !group->peer[r].segment &&
            group_view_present(group->seen, r))
            (void)net_signal(group->peer[r].remote, at, 1, HDL_SIGNAL_SET);
}

/* --------------------------------------------------------------------- receivers */

/* Who of `ranks` receives the slots of `source`: all ranks find the same, and the loss of
 * one receiver moves only what it received. -1: nobody is left. */
static int32_t receiver_of(struct hdl_group *group, const uint32_t *ranks, uint32_t n,
                           uint32_t source)
{
    const struct group_view *view = group->seen;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rank = ranks[(source + i) % n];
        if (group_view_present(view, rank))
            return (int32_t)rank;
    }
    /* Only removed ones are left there, which may still be in their last operations: the
     * one that stays longest, until it is through with them. */
    int32_t latest = -1;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t rank = ranks[(source + i) % n];
        if (group_view_reading(view, rank) &&
            (latest < 0 || view->ctl->slots[rank].last > view->ctl->slots[latest].last))
            latest = (int32_t)rank;
    }
    bool through = latest >= 0 && atomic_load(&group->closed[latest]) ==
                                      view->ctl->slots[latest].rank_epoch;
    return through ? -1 : latest;
}

static void set_target(struct hdl_group *group, struct messaged_target *target)
{
    int32_t receiver = receiver_of(group, target->ranks, target->num_ranks, group->rank);
    struct hdl_peer_window *remote = receiver < 0 ? NULL : group->peer[receiver].remote;
    if (receiver == target->receiver && remote == target->remote)
        return;
    target->receiver = receiver;
    target->remote = remote;
    /* The new one has nothing of what is open: it is queued again. */
    target->ready_told = 0;
    target->done_told = 0;
    memset(target->tickets, 0, group->shape.window_chunks * sizeof(uint64_t));
}

/* Where this rank reads the slots and counters of `rank`. */
static void set_source(struct hdl_group *group, uint32_t rank)
{
    struct messaged *m = messaged_of(group);
    struct group_peer *peer = &group->peer[rank];
    if (m->host[rank] == OWN_HOST) {
        if (peer->segment)
            m->heads[rank] = group_segment_head(peer->segment);
        return;
    }
    int32_t receiver = receiver_of(group, m->own_host, m->num_own_host, rank);
    char *mirror =
        mirror_at(group, receiver < 0 ? group->rank : (uint32_t)receiver, rank);
    m->heads[rank] = (const struct group_head *)(const void *)mirror;
    peer->slots = (struct group_slot *)(void *)(mirror + m->shape.slots);
    peer->data = mirror + m->shape.data;
    peer->pieces = mirror + m->shape.pieces;
}

/* Nothing goes to a lost rank any more, and nobody need try to reach it. What it wrote
 * stays in the mirrors here, and nothing is added should it wake up. */
static void drop_absent(struct hdl_group *group)
{
    const struct messaged *m = messaged_of(group);
    const struct group_view *view = group->seen;
    for (uint32_t r = 0; r < group->capacity; r++) {
        if (m->host[r] == OWN_HOST || m->host[r] == NO_HOST ||
            !group_view_absent(view, r))
            continue;
        if (atomic_load(&group->writers[r]) == view->ctl->slots[r].rank_epoch)
            group_admit_writer(group, r, 0);
        if (!group->peer[r].reach)
            net_remote_close(group->peer[r].remote);
        group->peer[r].remote = NULL;
    }
}

void messaged_hosts_adopt(struct hdl_group *group)
{
    struct messaged *m = messaged_of(group);
    const struct group_view *view = group->seen;
    sort_ranks(group);
    count_neighbours(group);
    for (uint32_t r = 0; r < group->capacity; r++)
        if (m->host[r] != NO_HOST)
            set_source(group, r);
    for (uint32_t t = 0; t < m->num_targets; t++)
        set_target(group, &m->targets[t]);
    drop_absent(group);
    m->steady = 0;
    const struct ctl_view *ctl = view->ctl;
    for (uint32_t i = 0; i < ctl->num_attempts; i++)
        if (ctl->attempts[i].from > m->steady)
            m->steady = ctl->attempts[i].from;
    m->attempt = ctl_attempt_tag(ctl_view_attempt(ctl, CTL_X_FOREVER - 1));
}

/* A link that breaks is usually back at once: that is nobody's concern. */
static const int64_t link_patience_ns = 250 * BASE_NS_PER_MS;

void messaged_watch_links(struct hdl_group *group, int64_t now_ns)
{
    struct messaged *m = messaged_of(group);
    for (uint32_t r = 0; r < group->capacity; r++) {
        const struct group_peer *peer = &group->peer[r];
        if (m->host[r] == OWN_HOST || !peer->remote)
            continue;
        int64_t since = net_remote_down_since(peer->remote);
        bool down = since && now_ns - since > link_patience_ns;
        if (down == m->link_down[r])
            continue;
        m->link_down[r] = down;
        if (group->host_group)
            host_group_link(group->host_group, peer->rank_epoch, !down);
    }
}

uint16_t messaged_attempt(const struct hdl_group *group, uint64_t x)
{
    const struct messaged *m = messaged_of(group);
    if (x >= m->steady)
        return m->attempt;
    return ctl_attempt_tag(ctl_view_attempt(group->seen->ctl, x));
}

bool messaged_word_covers(const struct hdl_group *group, uint64_t word, uint64_t x)
{
    if (!messaged_word_reaches(word, x))
        return false;
    uint64_t ahead = (word - x) & ((UINT64_C(1) << MESSAGED_X_BITS) - 1);
    return (uint16_t)(word >> MESSAGED_X_BITS) == messaged_attempt(group, x + ahead);
}
