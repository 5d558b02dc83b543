/* SPDX-License-Identifier: Apache-2.0 */
/* A group: its members' memory, operation numbers, queue of open operations, views. */
#ifndef GROUP_GROUP_H
#define GROUP_GROUP_H

#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "group/engine.h"
#include "group/op.h"
#include "group/segment.h"
#include "group/view.h"
#include "group/worker.h"

struct host_group;
struct hdl_window;
struct hdl_peer_window;
struct group_p2p;

/* Another slot as this rank reaches it. */
struct group_peer {
    struct group_reach *reach; /* of a rank that joined: owned by the view; else NULL */
    void *segment;             /* mapped; NULL if messaged or vacant */
    struct group_slot *slots;
    char *data;
    char *pieces;
    struct hdl_peer_window *remote;
    uint64_t rank_epoch;
    uint64_t done; /* newest that was read */
    bool fresh;    /* installed, its stream is not open yet */
};

/* The present ranks of a rank's host, as long as the view has that many: a host adds up
 * its inputs before they cross to others. A mapped group is one host: all zero. */
struct group_neighbours {
    uint32_t first; /* lowest rank, says which host it is */
    uint32_t index; /* ranks of the host below this one */
    uint32_t count;
};

/*
 * How collectives of a group move: mapped or messaged. Functions run under the engine's
 * lock except sample, and wait for nothing.
 */
struct group_path {
    const char *name;
    bool messaged;
    /* After every peer is open; before the first operation. May block. */
    enum hdl_status (*open)(struct hdl_group *group);
    void (*close)(struct hdl_group *group);
    /* A new operation is at the end of group->queue. Optional. */
    void (*start)(struct hdl_group *group, struct hdl_op *op);
    /* Advances the operations of group->queue; true if anything moved. Not called while
     * the group is frozen. */
    bool (*progress)(struct hdl_group *group);
    /* group->view is newer than the last one seen here (group->seen). */
    void (*adopt)(struct hdl_group *group, const struct group_view *older);
    /* Control thread, after the freeze bit is set: `published` of a dead rank. */
    uint64_t (*sample)(struct hdl_group *group, uint32_t rank);
    /* Every few milliseconds while anybody waits or works. Optional. */
    void (*tick)(struct hdl_group *group, int64_t now_ns);
    /* Sets bits of the ranks that the operation waits for now. */
    void (*missing)(const struct hdl_op *op, uint64_t *mask);
};

/* Before admission: this rank alone, in memory that nobody else sees. */
extern const struct group_path group_path_isolated;
extern const struct group_path group_path_mapped;
extern const struct group_path group_path_messaged;

/*
 * `ready` and the freeze bit in one word, which only this process touches:
 *
 *     63      62            52 51                   20 19        0
 *    +--------+---------------+-----------------------+-----------+
 *    | frozen | number of     | low 32 bits of the    |   chunk   |
 *    |        | freezes       | op number             |           |
 *    +--------+---------------+-----------------------+-----------+
 *
 * The high bits of the op number are those of `next`, which is less than 2^31 ahead.
 */
#define GROUP_READY_FROZEN (UINT64_C(1) << 63)
#define GROUP_READY_COUNT (UINT64_C(1) << 52)
#define GROUP_READY_X_MASK (GROUP_READY_COUNT - 1)

enum { GROUP_TRACE = 64, GROUP_ISSUES = 128 };

/* What the control thread must know of an issued operation; valid if number is the one
 * asked for before and after reading. */
struct group_issue {
    _Atomic uint64_t number;
    _Atomic uint64_t num_chunks;
};

/* One line of the dump: the last operations, by number. */
struct group_trace {
    uint64_t number;
    struct group_desc desc;
    int32_t status;
    int32_t peer;
};

struct group_counters {
    _Atomic uint64_t ops_issued, ops_done, ops_failed;
    _Atomic uint64_t bytes_sent, bytes_received;
    _Atomic uint64_t views, redone_chunks, stale_drops;
};

typedef void group_view_callback(void *user, struct hdl_group *group, uint64_t epoch);

struct hdl_group {
    /* read by every operation */
    uint64_t magic;
    struct group_engine *engine;
    _Atomic(const struct group_path *) path; /* also read by threads without the lock */
    uint32_t rank;
    uint32_t capacity;
    _Atomic(struct group_view *) view;       /* newest, never NULL */
    _Atomic(const struct group_view *) seen; /* the one that progress has adopted */
    struct group_shape shape;
    void *segment; /* own */
    struct group_head *head;
    struct group_slot *slots;
    char *data;
    char *pieces;
    struct group_peer *peer;   /* [capacity]; the own entry points at the own segment */
    _Atomic uint64_t *writers; /* [capacity] rank epochs that may put here; the own one */
    _Atomic int over;          /* HDL_OK, or why the group is over for this rank */

    alignas(64) _Atomic uint64_t ready; /* see above */
    _Atomic uint64_t next;              /* lowest op number not issued */
    uint64_t done;                      /* x; copy in the segment's head */
    uint64_t done_all;         /* lowest done of the present peers that was read */
    uint64_t open_chunks;      /* published and not pulled */
    struct base_list queue;    /* open collectives, by number */
    struct hdl_op *reserve;    /* for a call that memory lacks for */
    struct hdl_op *publishing; /* first that has chunks to publish, or NULL */
    uint32_t num_open;
    uint32_t window_mask;  /* W - 1 if W is a power of 2, else 0 */
    bool crowded;          /* more ranks of the group on this host than cores */
    _Atomic uint32_t late; /* operations in a row that did not end in the first spin */
    uint32_t late_probes;
    uint32_t ahead;      /* chunks of large operations published before they are pulled */
    size_t stream_bytes; /* outputs from here on are written past the cache */
    uint64_t long_chunks; /* of operations of several, until the slots are enlarged */
    struct group_job enlarge_job;
    const void **sources;                /* [capacity], for reductions */
    struct group_neighbours *neighbours; /* [capacity] */
    uint32_t num_hosts;                  /* 0 if mapped */
    bool adds_up; /* there are several hosts, one of them with several ranks */

    struct base_list node; /* in the engine's list */
    struct base_list receives, unexpected;
    struct group_p2p *p2p;
    void *path_state; /* of group->path */

    _Atomic uint32_t view_readers;
    _Atomic uint32_t view_lock; /* held while a view is replaced */

    /* This rank's own interval: its first x once operations have those numbers, and the
     * last operation that it takes part in. */
    _Atomic uint64_t entered;
    uint64_t last_op;

    /* joining, attach.c */
    bool joining;                         /* created to join: isolated until admitted */
    void *shelter;                        /* memory of operations over {self} */
    const struct group_path *joined_path; /* how it will move, known when attached */
    struct group_reach *
        *arrived;             /* [capacity] opened, not in a view yet; under view_lock */
    _Atomic uint64_t *closed; /* [capacity] rank epoch whose interval is closed */
    _Atomic uint64_t closings;
    uint64_t seen_closings;
    atomic_bool attach_stopped;
    _Atomic(struct ctl_view *) attaching; /* view to attach to, not answered */
    struct group_job attach_job, notify_job;
    _Atomic uint64_t *ready_epoch; /* [capacity] rank epoch of a joiner that is reached */
    _Atomic(group_view_callback *) on_view;
    void *on_view_user;
    uint64_t notified;

    /* control thread only: what was answered about dead ranks since the last commit */
    uint64_t *fence;             /* [capacity], GROUP_FOREVER = not asked */
    _Atomic uint64_t watch_done; /* tell the host when done has reached it; 0 = nothing */
    struct group_issue *issues;  /* [GROUP_ISSUES], by op number */

    char *over_text;
    char *name;
    struct hdl_group_opts opts; /* complete; `ranks` is owned */
    int64_t op_timeout_ns;      /* BASE_FOREVER = none */
    bool completion_local, manual_deactivate, manual_sync;
    struct hdl_window *window;
    struct host_group *host_group;
    struct group_counters counters;
    struct group_trace trace[GROUP_TRACE];
    uint64_t num_traced;
};

#define GROUP_MAGIC UINT64_C(0x70756f7267)

/* Everything but host and net: memory, lists, counters. `segment` is the own one. */
enum hdl_status group_init(struct hdl_group *group, struct group_engine *engine,
                           const struct group_shape *shape, uint32_t rank, void *segment,
                           struct ctl_view *view);
/* Memory that a rank made for this group, by its handle; HDL_EPEER if it is not offered
 * any more. */
enum hdl_status group_open_memory(struct hdl_group *group, uint32_t rank,
                                  const void *handle, size_t length, unsigned access,
                                  struct hdl_peer_window **remote);
/* Is the mapped memory a segment of that rank, of the same shape? */
enum hdl_status group_segment_check(const struct hdl_group *group, uint32_t rank,
                                    const void *segment);
/* The path that a member's segment says, or `otherwise` if it is not mapped. */
const struct group_path *group_segment_path(const void *segment,
                                            const struct group_path *otherwise);
/* Points a peer at its mapped segment, after checking that it is of the same shape. */
enum hdl_status group_peer_map(struct hdl_group *group, uint32_t rank, void *segment);
/* Opens the path and lets operations run: adds the group to the engine. */
enum hdl_status group_open(struct hdl_group *group, const struct group_path *path);
/* The opposites: fails what is open, removes it from the engine; frees all but `group`.
 */
void group_stop(struct hdl_group *group);
void group_free_parts(struct hdl_group *group);

/* For a few instructions: views and `arrived` are replaced by several threads. */
void group_lock_view(struct hdl_group *group);
void group_unlock_view(struct hdl_group *group);

/* Hooks of the control thread (struct ctl_*: ctl/view.h). */
void group_freeze(void *group, const struct ctl_prepare *prepare,
                  struct ctl_answer *answer);
void group_commit(void *group, struct ctl_view *view);
/* The view that registration gave, unless a commit was faster. */
enum hdl_status group_first_view(struct hdl_group *group, struct ctl_view *view);
void group_watch_done(void *group, uint64_t x);
void group_fail(void *group, enum hdl_status status, const char *text);

void group_attach(void *group, struct ctl_view *view);
void group_closed(void *group, uint32_t slot, uint64_t rank_epoch);

/* attach.c: what waits for the new memory of other ranks. */
void group_attach_run(struct group_job *job);
/* Puts the slots into large pages (mapped.c). */
void group_enlarge_run(struct group_job *job);
/* Looks again at what waits for a former holder. */
void group_attach_again(struct hdl_group *group);
/* Ends it; nothing of the group runs there afterwards. */
void group_attach_stop(struct hdl_group *group);

/* isolated.c: a joiner before its admission, and its entry; under the lock. */
enum hdl_status group_isolate(struct hdl_group *group);
void group_enter(struct hdl_group *group, const struct group_view *view);
void group_unshelter(struct hdl_group *group);
/* From now on this rank epoch, and no other, may put as the rank: here, in the segment
 * and the arenas. 0 = nobody. */
void group_admit_writer(struct hdl_group *group, uint32_t rank, uint64_t rank_epoch);
/* Points the own slots at a segment. */
void group_point_self(struct hdl_group *group, void *segment);

/* member.c */
void group_notify(struct hdl_group *group);
void group_notify_run(struct group_job *job);
void group_notify_stop(struct hdl_group *group);

/* hdl_group_destroy for what is left of the engine's groups. */
void group_destroy_all(struct group_engine *engine);
/* Joins as `opts` says (hdl_group_create); blocking. */
enum hdl_status group_create(struct group_engine *engine,
                             const struct hdl_group_opts *opts, struct hdl_group **group);

/* After HDL_EFENCED: the same group anew, registered to join. */
enum hdl_status group_restart(struct hdl_group *group);

/* Detail text and status if the group cannot be used (NULL, destroyed, over). */
enum hdl_status group_check(const struct hdl_group *group);
/* The group is over for this rank: pending and later calls end with `status`, the others
 * see it as lost. Any thread, also the control thread; the first call counts. */
void group_end(struct hdl_group *group, enum hdl_status status, const char *text);
/* The same without telling the others: who tells us knows. False if it was over already.
 */
bool group_end_here(struct hdl_group *group, enum hdl_status status, const char *text);

/* ---------------------------------------------------------------------- for the paths */

static inline bool group_frozen(struct hdl_group *group)
{
    return (atomic_load_explicit(&group->ready, memory_order_relaxed) &
            GROUP_READY_FROZEN) != 0;
}

/* First half of finishing x: taken before the view and the peers' flags are read. */
static inline uint64_t group_ready_begin(struct hdl_group *group)
{
    return atomic_load_explicit(&group->ready, memory_order_seq_cst);
}

/* Second half: raises `ready` to x unless a freeze began since; then nothing of x may be
 * used and the caller tries again after the commit. */
static inline bool group_ready_raise(struct hdl_group *group, uint64_t begin, uint64_t x)
{
    if (begin & GROUP_READY_FROZEN)
        return false;
    uint64_t value = (begin & ~GROUP_READY_X_MASK) | (x & GROUP_READY_X_MASK);
    return atomic_compare_exchange_strong_explicit(
        &group->ready, &begin, value, memory_order_seq_cst, memory_order_relaxed);
}

/* The x of a ready word. */
uint64_t group_ready_x(const struct hdl_group *group, uint64_t word);

/* Raises `done` for the peers to see. */
static inline void group_done(struct hdl_group *group, uint64_t x)
{
    group->done = x;
    atomic_store_explicit(&group->head->done, x, memory_order_release);
}

/* A rank that was removed and is through with its last operation, as it says itself or
 * the coordinator does. */
static inline bool group_reads_no_more(const struct hdl_group *group,
                                       const struct group_view *view, uint32_t rank)
{
    const struct ctl_slot *slot = &view->ctl->slots[rank];
    return group->peer[rank].done >= slot->last ||
           atomic_load(&group->closed[rank]) == slot->rank_epoch;
}

static inline uint32_t group_slot_of(const struct hdl_group *group, uint64_t number,
                                     uint64_t chunk)
{
    uint64_t sum = number + chunk;
    return group->window_mask ? (uint32_t)(sum & group->window_mask)
                              : (uint32_t)(sum % group->shape.window_chunks);
}

static inline struct hdl_op *group_next_open(struct hdl_group *group, struct hdl_op *op)
{
    return op->node.next == &group->queue
               ? NULL
               : base_container_of(op->node.next, struct hdl_op, node);
}

/* hdl_group_size, cheaper. */
uint32_t group_size_under_lock(struct hdl_group *group);
/* Gives the operation the next number and puts it at the end of the queue. */
void group_issue(struct hdl_group *group, struct hdl_op *op);
/* The number of chunks has become known later than at its issue. */
void group_issue_chunks(struct hdl_group *group, const struct hdl_op *op);
/* One round: failed groups, new views, open operations, messages. Under the lock. */
bool group_progress(struct hdl_group *group);
/* Ranks that the operation waits for: "1,3"; returns text. */
const char *group_missing_format(const struct hdl_op *op, char *text, size_t size);

/* Final status of an operation at the head of its queue: computes the failed set from the
 * view if status is HDL_OK, takes it off the queue, wakes its waiters. */
void group_op_finish(struct hdl_op *op, enum hdl_status status);
/* The same with a text and the slots that caused it (mask may be NULL). */
void group_op_fail(struct hdl_op *op, enum hdl_status status, const uint64_t *mask,
                   const char *format, ...) __attribute__((format(printf, 4, 5)));

/* The ranks of x have published descriptors that differ: the same status and text on all.
 */
void group_op_mismatch(struct hdl_op *op, uint64_t x,
                       const struct group_desc *(*desc_of)(struct hdl_op *op,
                                                           uint32_t rank));
/* Puts a slot into the failed set. */
void group_op_mark_failed(struct hdl_op *op, uint32_t rank);

/* Counters have one writer, under the lock, and any number of readers. */
static inline void group_count(_Atomic uint64_t *counter, uint64_t n)
{
    atomic_store_explicit(counter,
                          atomic_load_explicit(counter, memory_order_relaxed) + n,
                          memory_order_relaxed);
}

/* ----------------------------------------------------------- for moe and other users */

static inline uint32_t group_rank(const struct hdl_group *group)
{
    return group->rank;
}

static inline uint32_t group_capacity(const struct hdl_group *group)
{
    return group->capacity;
}

/* Agreed to be lost, by the newest view. Any thread, wait-free. */
bool group_rank_absent(struct hdl_group *group, uint32_t rank);
/* Active, by the newest view. */
bool group_rank_active(struct hdl_group *group, uint32_t rank);
/* Wakes sleepers of a mapped peer after a store that it may wait for; cheap if it is
 * awake. */
void group_ring(struct hdl_group *group, uint32_t rank);

/* A job of a group that runs after each change of its view, on the thread of users'
 * callbacks. */
struct group_watch {
    struct base_list node;
    const struct hdl_group *group;
    struct group_job job;
};
void group_watch_views(struct hdl_group *group, struct group_watch *watch,
                       void (*run)(struct group_job *job));
/* When it returns the job does not run and will not. A watch of zeros is legal. */
void group_unwatch_views(struct group_watch *watch);

/* A collective by which all ranks learn whether all could do `what`: a rank that failed
 * must not leave the others waiting. HDL_OK, the own failure, or HDL_EPEER. */
enum hdl_status group_agree(struct hdl_group *group, enum hdl_status own,
                            const char *what);
/* Instead of the first collective of something that this rank has no memory for: takes
 * its number, the others get HDL_EPEER from group_told. Returns HDL_ENOMEM. */
enum hdl_status group_decline(struct hdl_group *group, const char *what);
/* The status of a first collective whose own arguments are right. */
enum hdl_status group_told(enum hdl_status status);

/*
 * Symmetric memory: a window of the same size on every rank, open at every peer. Creation
 * is a collective of the group; destroy is local, after the peers stopped using it.
 */
struct group_arena;

enum hdl_status group_arena_create(struct hdl_group *group, size_t bytes,
                                   struct group_arena **arena);
void group_arena_destroy(struct group_arena *arena);
/* Own memory, zeroed. */
void *group_arena_data(const struct group_arena *arena);
/* A rank's memory if it is mapped (own rank included), else NULL. */
void *group_arena_map(const struct group_arena *arena, uint32_t rank);
/* For net_put; NULL for the own rank and for ranks that were vacant or lost at creation.
 */
struct hdl_peer_window *group_arena_remote(const struct group_arena *arena,
                                           uint32_t rank);

#endif
