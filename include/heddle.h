/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole host interface of Heddle, elastic communication for distributed AI.
 *
 * Conventions
 *   Objects are opaque; names are hdl_<object>_<verb>; outputs come last and are written
 *   on success only. Calls return enum hdl_status; hdl_error_detail() has the text, with
 *   the offending values.
 *   Option structs start with `size` = sizeof the struct as the caller was compiled.
 *   NULL = all defaults, a zero field = its default, an unknown non-zero tail is
 *   HDL_EINVAL. Unless a comment says otherwise a function may be called from any thread.
 *   Sizes are in bytes, counts in elements, times in microseconds.
 */
#ifndef HEDDLE_H
#define HEDDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) || defined(__clang__)
#define HDL_API __attribute__((visibility("default")))
#define HDL_MUST_CHECK __attribute__((warn_unused_result))
#else
#define HDL_API
#define HDL_MUST_CHECK
#endif

#define HDL_VERSION_MAJOR 0
#define HDL_VERSION_MINOR 1
#define HDL_VERSION_PATCH 0

/* As a timeout of an operation, step or wait: none, as is any negative one (creations and
 * agreements refuse it). 0 of hdl_op_wait and hdl_window_wait means "test once". */
#define HDL_FOREVER INT64_C(-1)
/* Receive from whichever rank sends first, and with whichever tag. */
#define HDL_ANY_SOURCE (-1)
#define HDL_ANY_TAG (-1)

enum hdl_status {
    HDL_OK = 0,
    HDL_PENDING = 1,    /* not finished yet */
    HDL_INCOMPLETE = 2, /* finished without some ranks: hdl_op_failed says which */
    /* this call */
    HDL_EINVAL = -1,
    HDL_ENOMEM = -2,
    HDL_ENOTSUP = -3,
    HDL_EBUSY = -4,
    HDL_ETIMEDOUT = -5,
    HDL_ESYSTEM = -6,
    HDL_EGPU = -7,
    HDL_EINTERNAL = -8,
    /* one peer */
    HDL_EPEER = -20,
    HDL_ELINK = -21,
    /* the group */
    HDL_ESTALE = -40,
    HDL_ENOTMEMBER = -41,
    HDL_EORDER = -42,
    HDL_ECONFIG = -43,
    HDL_EFENCED = -44,
    HDL_ECOORD = -45,
    HDL_EABORTED = -46
};

enum hdl_dtype {
    HDL_I8 = 0,
    HDL_U8,
    HDL_I16,
    HDL_U16,
    HDL_I32,
    HDL_U32,
    HDL_I64,
    HDL_U64,
    HDL_BOOL,
    HDL_F16,
    HDL_BF16,
    HDL_F32,
    HDL_F64,
    HDL_C64,    /* pairs of f32: movement, SUM, AVG, PREMUL_SUM by a real scalar */
    HDL_C128,   /* pairs of f64 */
    HDL_F8E4M3, /* movement; SUM, AVG, MIN, MAX through f32 */
    HDL_F8E5M2
};

/*
 * f16, bf16 and fp8 accumulate in f32, rounded once. Ranks combine ascending, from 64 KiB
 * on host by host: the same bytes on all, and in every run that has ranks placed alike.
 */
enum hdl_redop {
    HDL_SUM = 0,
    HDL_AVG, /* sum divided by the number of ranks that took part; integers truncate */
    HDL_PROD,
    HDL_MIN,
    HDL_MAX,
    HDL_BAND,
    HDL_BOR,
    HDL_BXOR,
    HDL_PREMUL_SUM /* every rank's input times its own scalar (hdl_call.scalar), then the
                      sum */
};

struct hdl_context;
struct hdl_group;
struct hdl_op;
struct hdl_window;
struct hdl_peer_window;

/* ------------------------------------------------------------------ errors, version */

/* Constant name ("HDL_EINVAL") and one-line meaning of a status; never NULL. */
HDL_API const char *hdl_status_name(enum hdl_status status);
HDL_API const char *hdl_status_text(enum hdl_status status);
/* Text of the calling thread's last call that failed or ended HDL_INCOMPLETE, "" if none.
 * Valid until its next one. */
HDL_API const char *hdl_error_detail(void);
/* "0.1.0 ..." : version and build options. */
HDL_API const char *hdl_version(void);
/* Bytes of one element, 0 for an unknown type; names, "unknown" for unknown ones. */
HDL_API size_t hdl_dtype_size(enum hdl_dtype dtype);
HDL_API const char *hdl_dtype_name(enum hdl_dtype dtype);
HDL_API const char *hdl_redop_name(enum hdl_redop redop);

/* -------------------------------------------------------------------------- context */

/*
 * How the ranks of a job find each other: a small key-value store that the user brings.
 * `put` stores a value; `get` waits until the key is there or `timeout_us` is over, and
 * writes the value's length to *length (at most *length on entry). Both are called on the
 * thread that calls hdl_context_create, return HDL_OK or an error, and must not call
 * back.
 */
struct hdl_bootstrap {
    void *user;
    enum hdl_status (*put)(void *user, const char *key, const void *value, size_t length);
    enum hdl_status (*get)(void *user, const char *key, void *value, size_t *length,
                           int64_t timeout_us);
};

enum hdl_log_level {
    HDL_LOG_DEFAULT = 0,
    HDL_LOG_ERROR,
    HDL_LOG_WARN,
    HDL_LOG_INFO,
    HDL_LOG_DEBUG
};

/* Memory comes from here if given; both must be given, be thread safe and 16-byte
 * aligned. */
struct hdl_allocator {
    void *user;
    void *(*alloc)(void *user, size_t bytes);
    void (*release)(void *user, void *memory);
};

struct hdl_context_opts {
    size_t size;
    /*
     * Place in the job. num_ranks 0 = take both from the environment: RANK and WORLD_SIZE
     * (torchrun, `heddle run`), OMPI_COMM_WORLD_*, PMIX_RANK/PMI_*, SLURM_*; without any
     * of them a job of one rank.
     */
    int32_t rank;
    int32_t num_ranks;
    /*
     * How to find the coordinator, the first that is given: `coordinator` ("host:port"),
     * `bootstrap`, `shared_dir` (a directory that all ranks see), the environment
     * (HEDDLE_COORDINATOR, HEDDLE_SHARED_DIR, MASTER_ADDR and MASTER_PORT, the
     * launcher's).
     */
    const char *coordinator;
    const struct hdl_bootstrap *bootstrap;
    const char *shared_dir;
    /* 32-byte job token as 64 hex digits; NULL = HEDDLE_TOKEN, HEDDLE_TOKEN_FILE, or made
     * by rank 0 and given out through the bootstrap. */
    const char *token;
    /* Interface name, address or "^name,name" to exclude; NULL = HEDDLE_INTERFACE, else
     * the address on the route to the coordinator. */
    const char *interface;
    /* "auto", "shm" or "fabric" (never shared memory, even on one host). */
    const char *transport;
    int64_t timeout_us;    /* for joining the job; default 60 s */
    int64_t dead_after_us; /* silence that means death; default 5 s, >= 200 ms */
    int64_t grace_us;      /* for a closed connection between hosts; default 500 ms */
    enum hdl_log_level log_level;
    void (*log)(void *user, enum hdl_log_level level,
                const char *line); /* NULL = stderr; any thread, must not call back */
    void *log_user;
    const struct hdl_allocator *allocator;
    int64_t
        link_timeout_us; /* a link between live ranks that stays down so long is given
                            up; default 5 s; what rank 0 or the coordinator says counts */
    bool standalone; /* the coordinator is a process of its own (`heddle coordinator`) at
                        the address `coordinator` or HEDDLE_COORDINATOR, which survives
                        every rank, or HEDDLE_STANDALONE=1 */
    int log_fd; /* without `log`: descriptor for the lines, one write each; 0 = stderr. A
                   full non-blocking one loses lines, nobody waits for it */
};

/*
 * Joins the job: starts the control thread, on job rank 0 also the coordinator, and
 * connects. Several contexts in a process are legal. Descriptors 0 to 2, where closed,
 * become /dev/null and stay so. Errors: HDL_EINVAL (options),
 * HDL_ETIMEDOUT (coordinator not found in time), HDL_ECONFIG (wire version or token
 * differs), HDL_ENOMEM, HDL_ESYSTEM.
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_context_create(const struct hdl_context_opts *opts, struct hdl_context **context);
/* Destroys what is left of its groups and windows, leaves the job. NULL is legal. Takes
 * at most 2 s for each group that still has live peers, and on job rank 0 at most 2 s
 * more for the others to leave too: who is still there then has lost the coordinator
 * (HDL_ECOORD).
 */
HDL_API void hdl_context_destroy(struct hdl_context *context);
/* Writes the last 64 operations of every group (number, kind, state, ranks missing),
 * links and counters as text to a file descriptor. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_context_dump(struct hdl_context *context,
                                                        int fd);

/* --------------------------------------------------------------------------- groups */

struct hdl_group_opts {
    size_t size;
    const char *name;       /* identity together with capacity; NULL = "world"; at most 63
                               bytes, no control characters */
    int32_t rank;           /* this process's slot; used if num_ranks > 0 */
    int32_t num_ranks;      /* founders; 0 = all ranks of the job, rank = job rank */
    int32_t capacity;       /* slots; 0 = num_ranks */
    const int32_t *ranks;   /* job rank of each slot [num_ranks], none twice; NULL =
                               0,1,2,... */
    int64_t timeout_us;     /* for creation; default 60 s */
    int64_t op_timeout_us;  /* deadline of every operation; 0 = none; see hdl_call */
    uint32_t window_chunks; /* chunks that may be open at once; default 16 */
    size_t chunk_bytes;     /* size of a chunk; default 256 KiB, a multiple of 4 KiB */
    bool completion_local;  /* redo nothing after a loss: a rank that lacks data gets
                               HDL_EPEER. Default: uniform completion */
    bool manual_deactivate; /* a lost rank stays active until it is removed */
    bool manual_sync;       /* wait() does not wait for the new view */
    /*
     * This process extends a group that exists, or takes the place of a rank that is lost
     * or was removed. Not a collective: the group is there when the call returns, and
     * hdl_group_join makes this process a member; until then its collectives run over
     * {rank} alone. num_ranks and ranks as the founders gave them; rank may be any slot.
     */
    bool join;
    /* Of a founder: HDL_EBUSY if the group runs already and this process was never in it,
     * so that it may come with `join` instead of waiting for founders of another one. */
    bool found_only;
};

/*
 * Collective among the founders. All compare their options: a difference is HDL_ECONFIG
 * on all ranks, naming the field, both values and both ranks. HDL_ETIMEDOUT lists the
 * ranks that were not seen; for a joiner, that there is no such group with an active
 * member yet. HDL_EINVAL: rank outside the capacity, or in use by a live process;
 * manual_deactivate without manual_sync.
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_create(struct hdl_context *context,
                                                        const struct hdl_group_opts *opts,
                                                        struct hdl_group **group);
/* Waits up to 2 s for own operations, leaves, frees; no other call may be inside then.
 * NULL is legal. Operation handles stay valid (finished) until hdl_op_free. */
HDL_API void hdl_group_destroy(struct hdl_group *group);
/* Leaves without waiting, from any thread, within 100 ms: blocked and later calls return
 * HDL_EABORTED, the others see this rank as lost. hdl_group_destroy is still needed.
 * HDL_EINVAL: not a group. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_abort(struct hdl_group *group);

/* One committed view. Bit r of a mask = slot r, word r / 64. */
struct hdl_view {
    uint64_t epoch;     /* grows with every committed view, with gaps */
    int32_t rank;       /* own slot */
    int32_t capacity;   /* slots */
    int32_t size;       /* highest active slot + 1; a lost one counts while reported */
    int32_t num_active; /* active slots */
    int32_t num_absent; /* of the active ones, those agreed to be lost */
    int32_t mask_words; /* in: words at `active` and `absent`; out: words needed */
    uint64_t *active;   /* in: memory of the caller or NULL; out: filled */
    uint64_t *absent;   /* likewise */
};
/* Consistent snapshot of the newest view; wait-free. HDL_EINVAL if masks are given and
 * mask_words is too small (mask_words then says the size needed). */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_view(const struct hdl_group *group,
                                                      struct hdl_view *view);
/* Own slot, and highest active slot + 1 at the next operation; -1 if it is no group. */
HDL_API int32_t hdl_group_rank(const struct hdl_group *group);
HDL_API int32_t hdl_group_size(const struct hdl_group *group);

/* ------------------------------------------------------------ changes of membership */

/*
 * Members change at an operation number, the same on all ranks. An admitted rank takes
 * part from operation `first` on; a removed one up to the last operation that it has
 * called. The others' operations go on meanwhile. hdl_group_view shows a change to a
 * caller from that operation on, a loss at once.
 *
 * If every member calls hdl_group_admit at the same place of its program, `first` is
 * that place: its next operation. Otherwise it is one that nobody has called yet, and the
 * application says where it is, usually by a broadcast as the first operation.
 *
 * All of these block, at most timeout_us (0 = 20 s, hdl_group_join 300 s; HDL_FOREVER is
 * refused), and return when the own view has the change. They are idempotent: several
 * ranks may ask for the same; who comes late is told that it is done. Not from a view
 * callback.
 *
 *   HDL_ETIMEDOUT  not agreed in time; the text says what is missing, for which rank. The
 *                  state is as before the call, which may be made again
 *   HDL_EINVAL     a rank outside the capacity, no ranks, not a member (admit, evict)
 *   HDL_ENOTMEMBER this rank was removed meanwhile
 *   HDL_ECOORD     there is no coordinator; the group goes on if nothing else fails
 *   HDL_EABORTED, HDL_EFENCED  the group is over for this rank
 */

/* Waits until every change that was noticed or proposed before is decided and in the own
 * view. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_sync(struct hdl_group *group,
                                                      int64_t timeout_us);
/* Members admit ranks, which call hdl_group_join, before or after. *first (may be NULL)
 * is the number of the first operation of the last of them. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_group_admit(struct hdl_group *group, const int32_t *ranks, int32_t num_ranks,
                int64_t timeout_us, uint64_t *first);
/* Removes ranks as planned (nobody reports them as failed), or deactivates lost ones. The
 * own rank may be among them. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_evict(struct hdl_group *group,
                                                       const int32_t *ranks,
                                                       int32_t num_ranks,
                                                       int64_t timeout_us);
/* Becomes a member once a member admits this rank: after hdl_group_create with `join`, or
 * again after a removal, or after HDL_EFENCED, or after HDL_ECOORD once the coordinator
 * is reached again (for these two no other call may be inside the group). The next call
 * of a collective is operation *first (may be NULL) of the members. Operations that are
 * open over {rank} are finished before. HDL_ECONFIG: options differ from the members';
 * HDL_EPEER: all members are gone, or one went meanwhile: call again. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_group_join(struct hdl_group *group, int64_t timeout_us, uint64_t *first);
/* Removes the own rank: collectives then return HDL_ENOTMEMBER, hdl_group_join comes
 * back, hdl_group_destroy works. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_leave(struct hdl_group *group,
                                                       int64_t timeout_us);
/* Number that the next collective called here gets. Operations count from 1. */
HDL_API uint64_t hdl_group_next(const struct hdl_group *group);

/* Called after views were committed, on a thread of the library, one call at a time;
 * several views may be one call. `epoch` is the newest. It may call everything but the
 * blocking functions of the group and hdl_group_destroy. A later call replaces callback
 * and user, NULL ends it; when it returns, the earlier callback is not running. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_group_on_view(struct hdl_group *group,
                  void (*callback)(void *user, struct hdl_group *group, uint64_t epoch),
                  void *user);

/* What is known of a process. */
enum hdl_process_state {
    HDL_PROCESS_NONE = 0, /* no process in the slot */
    HDL_PROCESS_LIVE,
    HDL_PROCESS_LOST /* agreed to be dead or unreachable */
};
/* What it is to the group. */
enum hdl_member_state {
    HDL_MEMBER_NONE = 0,
    HDL_MEMBER_READY,   /* registered, connected with this rank, may be admitted */
    HDL_MEMBER_ACTIVE,  /* also a lost rank that nobody has deactivated */
    HDL_MEMBER_INACTIVE /* was removed, or is lost and deactivated */
};
struct hdl_member {
    size_t size;
    enum hdl_process_state process;
    enum hdl_member_state member;
    int32_t job_rank;    /* -1 = none */
    uint64_t rank_epoch; /* one registration of one process; 0 = none */
    uint64_t first;      /* operations in which it takes part */
    uint64_t last;       /* UINT64_MAX = open */
};
/* By the newest view, changes that lie ahead included. HDL_EINVAL: rank outside the
 * capacity. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_group_member(const struct hdl_group *group, int32_t rank, struct hdl_member *member);

/* Counters of a group, since its creation. */
struct hdl_group_stats {
    size_t size;
    uint64_t ops_issued, ops_done, ops_failed;
    uint64_t bytes_sent, bytes_received;
    uint64_t views;         /* committed */
    uint64_t redone_chunks; /* restarted after a view change */
    uint64_t stale_drops;   /* messages of an older attempt or rank epoch, dropped */
    uint64_t reconnects;    /* of links between ranks and to the coordinator */
    /* Seen by this process; the silence of ranks by the one that has the coordinator. */
    uint64_t evidence_exit, evidence_closed, evidence_silence;
    uint64_t refused_frames; /* control connections or frames that were not authentic */
    int64_t evidence_to_commit_us; /* of the last loss; 0 = none yet */
};
/* Fills *stats; `size` in it says how much. HDL_EINVAL: not a group, or no struct. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_stats(const struct hdl_group *group,
                                                       struct hdl_group_stats *stats);

/* Path to a peer: "self", "shm" or "fabric:<provider>"; NULL for a vacant slot. */
HDL_API const char *hdl_group_transport(const struct hdl_group *group, int32_t rank);

/* ----------------------------------------------------------------------- operations */

/* Options of one call; NULL = defaults. */
struct hdl_call {
    size_t size;
    int64_t timeout_us; /* the operation's deadline: on expiry the group is aborted on
                           this rank, HDL_ETIMEDOUT names operation, number and ranks
                           missing. 0 = the group's default */
    double scalar;      /* of HDL_PREMUL_SUM */
};

/*
 * All operations below: `op` NULL = wait and return the final status; else the call
 * returns HDL_OK at once with a handle that hdl_op_free must get, and hdl_op_wait or
 * hdl_op_test tell the status. Any number may be outstanding. Collectives must be called
 * in the same order by all ranks of the group. Buffers belong to the library until the
 * operation is finished; src == dst is in place where the two have the same size
 * (all_gather: src at its place in dst, reduce_scatter: dst at its place in src). Zero
 * counts are legal, pointers may then be NULL.
 *
 * Status of a finished operation:
 *   HDL_OK          every byte is in place
 *   HDL_INCOMPLETE  finished over the ranks that are present; the others' data is missing
 *                   (their parts of dst are untouched; reductions leave them out). A
 *                   result of several chunks may hold a lost rank's data up to some
 *                   chunk, the same on all
 *   HDL_EPEER       the root, or the peer of a send or receive, is lost
 *   HDL_EORDER      another rank called another operation at this place (both are named)
 *   HDL_EINVAL      same operation with another count, type, operator or root; or a
 *                   bad argument. Buffers are untouched, the next call works
 *   HDL_ELINK       the link between two live ranks stayed down
 *   HDL_ENOTMEMBER  this rank was removed before this operation; no number was taken
 *   HDL_ENOMEM      no memory for the call; it took its number, the others end
 *                   HDL_EINVAL
 *   HDL_ETIMEDOUT, HDL_EABORTED, HDL_ECOORD, HDL_EFENCED   the group is over here
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_barrier(struct hdl_group *group, const struct hdl_call *call, struct hdl_op **op);
/* src on the root -> dst on all; src is not read elsewhere. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_broadcast(struct hdl_group *group, const void *src, void *dst, size_t count,
              enum hdl_dtype dtype, int32_t root, const struct hdl_call *call,
              struct hdl_op **op);
/* dst is written on the root only. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_reduce(struct hdl_group *group, const void *src, void *dst, size_t count,
           enum hdl_dtype dtype, enum hdl_redop redop, int32_t root,
           const struct hdl_call *call, struct hdl_op **op);
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_allreduce(struct hdl_group *group, const void *src, void *dst, size_t count,
              enum hdl_dtype dtype, enum hdl_redop redop, const struct hdl_call *call,
              struct hdl_op **op);
/* dst [size][count], by rank. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_allgather(struct hdl_group *group, const void *src, void *dst, size_t count,
              enum hdl_dtype dtype, const struct hdl_call *call, struct hdl_op **op);
/* dst: counts[r] elements of rank r at displs[r]; both arrays [size], equal on all. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_allgatherv(struct hdl_group *group, const void *src, void *dst, const size_t *counts,
               const size_t *displs, enum hdl_dtype dtype, const struct hdl_call *call,
               struct hdl_op **op);
/* src [size][count]; dst gets the reduced block of the own rank. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_reduce_scatter(struct hdl_group *group, const void *src, void *dst, size_t count,
                   enum hdl_dtype dtype, enum hdl_redop redop,
                   const struct hdl_call *call, struct hdl_op **op);
/* src: blocks of counts[r] elements one after another, counts [size] equal on all. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_reduce_scatterv(struct hdl_group *group, const void *src, void *dst,
                    const size_t *counts, enum hdl_dtype dtype, enum hdl_redop redop,
                    const struct hdl_call *call, struct hdl_op **op);
/* src and dst [size][count]; block d of rank s goes to block s of rank d. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_alltoall(struct hdl_group *group, const void *src, void *dst, size_t count,
             enum hdl_dtype dtype, const struct hdl_call *call, struct hdl_op **op);
/* The block for rank r: src_counts[r] elements at src_displs[r]; from rank r:
 * dst_counts[r] at dst_displs[r]. A pair whose two counts differ ends HDL_EINVAL on all,
 * naming both ranks. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_alltoallv(struct hdl_group *group, const void *src, const size_t *src_counts,
              const size_t *src_displs, void *dst, const size_t *dst_counts,
              const size_t *dst_displs, enum hdl_dtype dtype, const struct hdl_call *call,
              struct hdl_op **op);
/* dst [size][count], on the root only. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_gather(struct hdl_group *group, const void *src, void *dst, size_t count,
           enum hdl_dtype dtype, int32_t root, const struct hdl_call *call,
           struct hdl_op **op);
/* counts and displs [size] equal on all (displs used on the root only). */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_gatherv(struct hdl_group *group, const void *src, void *dst, const size_t *counts,
            const size_t *displs, enum hdl_dtype dtype, int32_t root,
            const struct hdl_call *call, struct hdl_op **op);
/* src [size][count], read on the root only. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_scatter(struct hdl_group *group, const void *src, void *dst, size_t count,
            enum hdl_dtype dtype, int32_t root, const struct hdl_call *call,
            struct hdl_op **op);
/* counts [size] equal on all; displs [size] used on the root only. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_scatterv(struct hdl_group *group, const void *src, const size_t *counts,
             const size_t *displs, void *dst, enum hdl_dtype dtype, int32_t root,
             const struct hdl_call *call, struct hdl_op **op);
/*
 * Ordered per pair and tag (tag >= 0); independent of collectives and of views. A send
 * may finish before its receive is posted (the message is then in the library's memory).
 * Lengths that differ: HDL_EINVAL at the receiver, at the sender unless it had completed.
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_send(struct hdl_group *group, const void *src, size_t count, enum hdl_dtype dtype,
         int32_t peer, int32_t tag, const struct hdl_call *call, struct hdl_op **op);
/* peer may be HDL_ANY_SOURCE (HDL_EPEER: no other rank is left), tag HDL_ANY_TAG:
 * hdl_op_source says what came. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_recv(struct hdl_group *group, void *dst, size_t count, enum hdl_dtype dtype,
         int32_t peer, int32_t tag, const struct hdl_call *call, struct hdl_op **op);

/* Makes progress; HDL_PENDING or the final status. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_test(struct hdl_op *op);
/* Waits; HDL_PENDING when timeout_us (HDL_FOREVER = none) is over: it goes on. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_wait(struct hdl_op *op, int64_t timeout_us);
/* Text of one that failed or is HDL_INCOMPLETE, with values and ranks; "" otherwise. */
HDL_API const char *hdl_op_detail(const struct hdl_op *op);
/* Slots whose data is missing or that caused the failure: bit r of mask[r / 64], `words`
 * words are written. Returns how many there are; 0 while pending. */
HDL_API int32_t hdl_op_failed(const struct hdl_op *op, uint64_t *mask, size_t words);
/* After a receive: who sent, with which tag. Any pointer may be NULL. HDL_PENDING,
 * HDL_OK, HDL_EINVAL (not a receive). */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_source(const struct hdl_op *op,
                                                     int32_t *rank, int32_t *tag);
/* Frees the handle; a pending operation goes on without it. NULL is legal. */
HDL_API void hdl_op_free(struct hdl_op *op);

/* The failed set of the calling thread's last blocking operation (op == NULL), as
 * hdl_op_failed gives it. At most 65536 slots. */
HDL_API int32_t hdl_last_failed(uint64_t *mask, size_t words);

/* -------------------------------------------------------------------------- windows */

/* Memory that peers write and read: put, signal, wait. Create a window, give its packed
 * handle to peers (with hdl_allgather, say), open theirs. */
#define HDL_WINDOW_HANDLE_BYTES 512

enum hdl_window_kind { HDL_WINDOW_HOST = 0 };

enum hdl_signal_op {
    HDL_SIGNAL_SET = 0, /* store the value */
    HDL_SIGNAL_ADD      /* add it, atomic among all writers */
};

/* `bytes` of zeroed, page-aligned memory owned by the window. HDL_EINVAL: no bytes;
 * HDL_ENOTSUP: another kind; HDL_ENOMEM, HDL_ESYSTEM: no memory or descriptor. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_create(struct hdl_context *context,
                                                         size_t bytes,
                                                         enum hdl_window_kind kind,
                                                         struct hdl_window **window);
/* Device memory of the caller (of cudaMalloc or cuMemAlloc), who frees it after the
 * window. Who opens it, on this host and with a CUDA context current, gets an address for
 * kernels (hdl_peer_window_map, heddle_device.cuh), and no put, signal or wait. It is
 * gone with its process: kernels must not touch it then. HDL_EINVAL: not device memory or
 * beyond its allocation; HDL_ENOTSUP: no driver, or an allocator that cannot share. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_adopt(struct hdl_context *context,
                                                        void *memory, size_t bytes,
                                                        struct hdl_window **window);
/* Frees the window and its memory; peers' later puts have no effect. NULL is legal. */
HDL_API void hdl_window_destroy(struct hdl_window *window);
/* Its memory, valid until it is destroyed, and its size. */
HDL_API void *hdl_window_data(const struct hdl_window *window);
HDL_API size_t hdl_window_bytes(const struct hdl_window *window);
/* Handle for peers: at most HDL_WINDOW_HANDLE_BYTES, *length in: room, out: used.
 * HDL_EINVAL: too little room. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_pack(const struct hdl_window *window,
                                                       void *handle, size_t *length);
/* HDL_EINVAL: not a handle; HDL_EPEER: its process is gone; HDL_ENOTSUP: unreachable. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_open(struct hdl_context *context,
                                                       const void *handle, size_t length,
                                                       struct hdl_peer_window **peer);
/* Puts under way may be lost: close when the peer has seen them. NULL is legal. */
HDL_API void hdl_window_close(struct hdl_peer_window *peer);
/* Memory of the peer if it is mapped (load and store), NULL if it is messaged. */
HDL_API void *hdl_peer_window_map(const struct hdl_peer_window *peer);
/*
 * Writes `bytes` at `offset` of the peer's window, then raises the 64-bit word at
 * `signal_offset` (8-byte aligned; SIZE_MAX = no signal) there: whoever sees the signal
 * sees the whole block. No order between puts. src may be reused after hdl_flush. Waits
 * while too much to that peer is under way. HDL_EINVAL: beyond the window, or a signal
 * that is not aligned; HDL_EPEER, HDL_ECOORD as hdl_window_wait; HDL_ENOMEM.
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_put(struct hdl_peer_window *peer, size_t offset, const void *src, size_t bytes,
        size_t signal_offset, uint64_t value, enum hdl_signal_op signal_op);
/* A put of no bytes. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_signal(struct hdl_peer_window *peer,
                                                  size_t signal_offset, uint64_t value,
                                                  enum hdl_signal_op signal_op);
/* Waits until the word at `offset` of the own window is >= value. `from` (may be NULL)
 * ends the wait with HDL_EPEER when that peer is lost, with HDL_ECOORD when it is silent
 * and so is the coordinator. HDL_ETIMEDOUT; HDL_EINVAL: offset not aligned or beyond. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_wait(struct hdl_window *window,
                                                       size_t offset, uint64_t value,
                                                       const struct hdl_peer_window *from,
                                                       int64_t timeout_us);
/* Until all earlier puts to this peer have left their sources. HDL_ETIMEDOUT after
 * timeout_us; HDL_EPEER, HDL_ECOORD as hdl_window_wait. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_flush(struct hdl_peer_window *peer,
                                                 int64_t timeout_us);

/* --------------------------------------------------------------- mixture of experts */

/*
 * Exchange of token rows with the ranks that hold their experts.
 *
 *   R  capacity of the group           T  tokens of this rank in this step, 0 to M
 *   E  num_experts                     M  max_tokens
 *   L  experts of this rank            k  top_k
 *   S  sources of rows, R / dp_size    H  hidden
 *
 * A step is dispatch, the caller's expert computation, combine. All ranks take part in
 * every step, also without tokens. A row crosses between two ranks once, however many of
 * its experts live there. Same inputs give the same bytes in the same order, on every
 * transport and device. Steps take no op numbers and are independent of collectives.
 *
 * Arrays are dense, the last index fastest; sizes are in elements or rows, times in
 * microseconds, and pointers need the alignment of one element only. Memory that a call
 * is given may be used again when the call returns.
 *
 * Threads: any thread may call, one at a time for one exchange; different exchanges are
 * independent. Calls of dispatch and combine allocate nothing, and make no system calls
 * but those of waiting (over fabric, libfabric makes its own). Not from the library's
 * callbacks, and not in a forked child.
 *
 * Errors that every function may return, and that are not named again below:
 *   HDL_EINVAL    moe is not an exchange; a struct has a wrong size, or sets bytes that
 *                 this version does not know
 *   HDL_EABORTED, HDL_ECOORD, HDL_EFENCED, HDL_ELINK: the group has ended so; destroying
 *                 is all that is left
 */
struct hdl_moe;

/* Order of the rows that dispatch delivers; sources, then tokens ascending everywhere. */
enum hdl_moe_layout {
    HDL_MOE_EXPERT_3D = 0, /* [L][S*M][H], the rows of each expert packed at the front */
    HDL_MOE_EXPERT_FLAT,   /* [rows][H], each expert begins at a multiple of `align` */
    HDL_MOE_RANK_MAJOR, /* one row for each (source, token) that chose experts of mine */
    HDL_MOE_INDEXED     /* as RANK_MAJOR, with the row numbers of each expert */
};

/*
 * What a row becomes on the way. FP8 = e4m3 with one scale for 128 elements (the last
 * group may be short): amax over the finite elements, at least 1e-4; scale = amax / 448,
 * data = x * (448 / amax), nearest even, saturated. POW2: scale rounded up to a power of
 * two. UE8M0: that power as its biased exponent, one byte. dtype HDL_F8E4M3 = the rows
 * are quantised already: PLAIN has no scales, FP8 and POW2 carry f32, UE8M0 bytes,
 * unchanged.
 */
enum hdl_moe_format {
    HDL_MOE_PLAIN = 0,
    HDL_MOE_FP8,
    HDL_MOE_FP8_POW2,
    HDL_MOE_FP8_UE8M0
};

/* Type of a contribution between ranks in combine. */
enum hdl_moe_wire {
    HDL_MOE_WIRE_ROW = 0, /* combine_dtype */
    HDL_MOE_WIRE_F32,
    HDL_MOE_WIRE_FP8 /* as HDL_MOE_FP8, scale division included */
};

/*
 * Where the memory of calls lies. HDL_MOE_CUDA: every array that a call is given is
 * memory that opts.cuda_device can access (its own, or pinned host memory), and the call
 * only puts work into hdl_moe_call.stream: it waits for nothing, returns HDL_OK once the
 * work is queued, and may be captured into a graph, whose replays are steps like any
 * others. All ranks then are processes of one host, one for each GPU, in any order, and
 * may each see their own device only. What such a call does otherwise:
 *   - memory that it was given may be used again once its work in the stream is done
 *   - work of one lane goes to streams in the order of its calls, dispatch before combine
 *   - who did not come is found in hdl_moe_call.active, hdl_moe_result.missing and
 *     hdl_moe_status; the status of the call cannot say so
 *   - ids out of range act as -1, T > M as T = 0: hdl_moe_status or the next dispatch,
 *     which then does nothing, names the first offence once, also a peer's (HDL_EPEER)
 */
enum hdl_moe_memory { HDL_MOE_HOST = 0, HDL_MOE_CUDA };

/* How rows cross between GPUs; the results are the same in all bits. */
enum hdl_moe_protocol {
    HDL_MOE_AUTO = 0, /* by the size of a step */
    HDL_MOE_LL,       /* flags inside the data: small batches */
    HDL_MOE_CHUNK,    /* rows, then a flag for some of them */
    HDL_MOE_BULK      /* the same by the copy engine, for large batches */
};

struct hdl_moe_opts {
    size_t size;
    int32_t num_experts; /* E, 1 to 4096 */
    int32_t top_k;       /* k, 1 to 64, at most E */
    int32_t hidden;      /* H >= 1; for opaque rows their bytes */
    int32_t max_tokens;  /* M >= 1, equal on all ranks */
    /* Of the rows given: HDL_BF16 (also 0), HDL_F16, HDL_F32, HDL_F8E4M3, or HDL_U8 =
     * opaque bytes, which have no combine */
    enum hdl_dtype dtype;
    enum hdl_moe_format format;
    enum hdl_dtype combine_dtype; /* of expert outputs and results: HDL_BF16, HDL_F16,
                                     HDL_F32; 0 = dtype, for HDL_F8E4M3 HDL_BF16 */
    enum hdl_moe_wire combine_wire;
    enum hdl_moe_layout layout;
    int32_t align;     /* EXPERT_FLAT: default 1 */
    bool zero_padding; /* EXPERT_FLAT: padding rows are set to zero */
    bool exact;        /* one contribution per (token, expert), summed by the owner */
    bool late_weights; /* weights may come with combine instead of dispatch */
    int32_t lanes;     /* steps that may be open at once, default 2, at most 16 */
    int32_t dp_size;   /* g neighbours hold the same tokens; default 1, R % g == 0 */
    /* Which experts a rank holds: expert_counts [R], expert_ids the lists one after
     * another, each ascending. An expert may have several holders; a rank may have none.
     * NULL = E / R each, contiguous. */
    const int32_t *expert_counts;
    const int32_t *expert_ids;
    int64_t timeout_us; /* of creation; 0 = 60 s */
    enum hdl_moe_memory memory;
    int32_t cuda_device;            /* HDL_MOE_CUDA: its number in this process */
    int32_t cuda_blocks;            /* multiprocessors that a call may take; 0 = all */
    enum hdl_moe_protocol protocol; /* HDL_MOE_CUDA */
};

/* What an exchange needs and how large its outputs are. */
struct hdl_moe_sizes {
    size_t size;
    uint64_t arena_bytes; /* shared memory of a rank, combine buffers included; with
                             HDL_MOE_CUDA device memory without them */
    uint64_t combine_buffer_bytes; /* of one lane: next_combine_buffer */
    uint64_t combine_buffer_elements;
    uint64_t out_rows;      /* capacity of hdl_moe_received.rows in rows */
    uint64_t index_entries; /* capacity of hdl_moe_received.row_numbers */
    uint64_t row_elements;  /* H */
    uint64_t row_bytes;     /* of one delivered row */
    uint64_t scale_bytes;   /* of the scales of one delivered row, 0 = none */
};

/*
 * Fills *sizes for a group of capacity `num_ranks`. Exact; allocates nothing, needs no
 * group, any thread.
 *   HDL_EINVAL    as for hdl_moe_create; a size beyond 63 bits (the parameters are named,
 *                 a value never wraps); sizes is NULL
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_moe_size_hint(const struct hdl_moe_opts *opts,
                                                         int32_t num_ranks,
                                                         struct hdl_moe_sizes *sizes);

/*
 * Makes an exchange. A collective of the group: all active ranks call it with equal
 * options, in the order of their other collectives. It exists on all afterwards (who is
 * lost meanwhile is missing), or on none: then *moe stays. The group must outlive it.
 *   HDL_EINVAL    on this rank a value is out of range, k > E, E % R != 0 without a map,
 *                 an expert has no holder, ids of a rank do not ascend
 *   HDL_EPEER     another rank got such an error (it is named), or was lost meanwhile
 *   HDL_ECONFIG   options differ: field, both values and both ranks are named, the same
 *                 on all ranks
 *   HDL_ENOMEM, HDL_ESYSTEM: no memory of arena_bytes, or no descriptor for it
 *   HDL_ETIMEDOUT timeout_us of the options is over
 *   HDL_ENOTSUP   HDL_MOE_CUDA: no driver, device or kernels here; an option that kernels
 *                 do not have; a rank on another host. The text says which
 *   HDL_EGPU      the driver failed; its call and error are named
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_moe_create(struct hdl_group *group,
                                                      const struct hdl_moe_opts *opts,
                                                      struct hdl_moe **moe);
/* Frees it. Local, any thread, no other call on it may be running; open steps are
 * dropped. NULL is legal. Peers that are still in a step wait for this rank until their
 * deadline, so ranks usually finish their steps first. */
HDL_API void hdl_moe_destroy(struct hdl_moe *moe);
/*
 * After a change of membership, or to move experts. A collective of the present members,
 * in which a new member calls hdl_moe_create with the same options and the new map. Links
 * all members in a new generation. expert_counts [R] and expert_ids as in the options,
 * with 0 experts where no member is; NULL = the map stays. Steps that are open end: their
 * handles are HDL_ESTALE. Memory of hdl_moe_next_combine_buffer is gone, counters go on.
 * With HDL_MOE_CUDA it waits until the device is idle, and memory stays where it is:
 * captured graphs stay valid and follow the map; their arrays must have room for it.
 *   errors        as for hdl_moe_create; after one the exchange is as it was
 *   HDL_ENOTSUP   it had 65535 updates; a map of more experts than kernels have room for
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_moe_update(struct hdl_moe *moe,
                                                      const int32_t *expert_counts,
                                                      const int32_t *expert_ids);
/* L, experts of this rank; 0 if moe is not an exchange. */
HDL_API int32_t hdl_moe_local_experts(const struct hdl_moe *moe);

/* One step, from its dispatch to its combine: a value, copied freely, used once. */
struct hdl_moe_handle {
    uint64_t word[4];
};

/* Options of one call; NULL = defaults. */
struct hdl_moe_call {
    size_t size;
    /* [R], 1 = take part, 0 = masked: not waited for, its rows and contributions count as
     * missing. A source that does not come by the deadline, or is absent in the view,
     * gets its entry set to 0 and the call ends HDL_INCOMPLETE. NULL = all. The own entry
     * must not be 0. A mask says what is waited for and taken, not what is sent; replicas
     * on masked ranks are passed over. It holds for this call; but between hosts two
     * ranks of which one went on without the other may lack each other in the next step,
     * too, if its send phase begins before the other one's step did. */
    int32_t *active;
    int64_t timeout_us; /* 0 or HDL_FOREVER = none: only an absent rank ends it */
    /* HDL_MOE_CUDA: CUstream or cudaStream_t of the device's primary context, which
     * CUDA's runtime uses too; NULL = its default stream. `active` is device memory here,
     * read when the work begins and written when it ends. */
    void *stream;
};

/* The own tokens of a step. Memory may be reused when the call returns. */
struct hdl_moe_tokens {
    size_t size;
    const void *rows;   /* [T][H] of dtype, any alignment of an element; NULL if T = 0 */
    const void *scales; /* dtype HDL_F8E4M3: [T][ceil(H/128)] f32, or bytes for UE8M0 with
                           rows of them padded to a multiple of 4; else NULL */
    const void *topk_ids; /* [T][k], expert or -1 = nothing */
    const float *weights; /* [T][k]; NULL = they come with combine (late_weights) */
    int64_t num_tokens;   /* T, 0 to M */
    bool ids_are_64;      /* topk_ids is int64_t, else int32_t */
    const int32_t *num_tokens_at; /* HDL_MOE_CUDA: device word with T, read when the work
                                     begins; NULL = num_tokens */
};

/*
 * Where dispatch delivers. Every pointer but rows (and scales, if the format has them)
 * may be NULL. Only rows that exist are written; everything else stays as it was.
 */
struct hdl_moe_received {
    size_t size;
    void *rows;             /* out_rows of size_hint, by layout */
    void *scales;           /* [row][ceil(H/128)] f32; UE8M0: bytes, padded to 4 a row */
    int32_t *counts;        /* [L] distinct (token, expert) pairs, no padding */
    int64_t *offsets;       /* [L+1] EXPERT_FLAT: first row of each expert, the end;
                               INDEXED: first entry in row_numbers */
    int64_t *row_numbers;   /* INDEXED: rows of expert 0, of expert 1, ... */
    int32_t *source_token;  /* [row] number at its source; -1 = did not come, zeros */
    int64_t *ranges;        /* [L][S] begin << 32 | count: rows of a source for an expert
                               (INDEXED: entries of row_numbers; RANK_MAJOR: as there) */
    int32_t *local_ids;     /* RANK_MAJOR, INDEXED: [row][k] expert 0 to L-1, or -1 */
    float *weights;         /* RANK_MAJOR, INDEXED: [row][k], 0 where local_ids is -1 */
    int32_t *source_counts; /* [S] rows of each source */
    /* filled by the library; with HDL_MOE_CUDA -1: see totals */
    int64_t num_rows;  /* rows delivered, for EXPERT_FLAT with padding */
    int64_t num_pairs; /* sum of counts */
    int64_t *totals;   /* HDL_MOE_CUDA: [2] num_rows, num_pairs on the device, or NULL */
};

/*
 * Dispatch: the ranks that hold a token's experts receive its row. Every active rank
 * calls it once a step, as one call or as its two phases; ranks need not choose alike.
 *
 *   dispatch        dispatch_send, then dispatch_recv
 *   dispatch_send   checks and sends the own tokens; waits for nobody (but after a step
 *                   of its lane that this rank refused, until the others came to that)
 *   dispatch_recv   waits for the headers and rows of all sources, delivers them
 *
 * Steps use lanes in turn, in the order of these calls. *handle names the step for the
 * calls that follow; it is written also when the result is HDL_INCOMPLETE. `received` is
 * filled by HDL_OK and HDL_INCOMPLETE.
 *
 *   HDL_INCOMPLETE  a source did not come in time, is absent or was left behind: its
 *                   entry in call->active is 0 now. Rows that it announced and that did
 *                   not come are zeros, with source token -1
 *   HDL_EBUSY       the lane of this step has not had its combine: nothing was done
 *   HDL_EINVAL      T > M, NULL data with T > 0, an id < -1 or >= E (token, position and
 *                   value are named), own rank masked, no weights without late_weights.
 *                   Peers were told; the step is over on all ranks, the next one works
 *   HDL_EPEER       a peer refused its arguments so; it and its values are named. The
 *                   step is over
 *   HDL_ESTALE      (recv) the handle was used, or is older than an update
 *   HDL_EINVAL      (recv) the handle is of another exchange or of none; rows to receive
 *                   into are NULL. The step stays open
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_dispatch(struct hdl_moe *moe, const struct hdl_moe_tokens *tokens,
                 struct hdl_moe_received *received, const struct hdl_moe_call *call,
                 struct hdl_moe_handle *handle);
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_dispatch_send(struct hdl_moe *moe, const struct hdl_moe_tokens *tokens,
                      const struct hdl_moe_call *call, struct hdl_moe_handle *handle);
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_dispatch_recv(struct hdl_moe *moe, const struct hdl_moe_handle *handle,
                      struct hdl_moe_received *received, const struct hdl_moe_call *call);

/* Expert outputs, in the place of the rows that dispatch delivered. */
struct hdl_moe_outputs {
    size_t size;
    const void *rows; /* of combine_dtype. EXPERT_3D and FLAT: as dispatch; INDEXED: one
                         row per entry of row_numbers; RANK_MAJOR: one row per received
                         row, weighted and summed by the caller. May be the pointer of
                         hdl_moe_next_combine_buffer */
    const float *weights; /* [T][k] if dispatch got none, else NULL */
};

/* Where the sums go. */
struct hdl_moe_result {
    size_t size;
    void *rows;          /* [T][H] of combine_dtype */
    const void *bias[2]; /* [T][H] of combine_dtype, added in this order; NULL = none */
    bool accumulate;     /* add what rows holds, last */
    uint8_t *missing;    /* [T], set to 1 where a contribution is missing, else 0 */
};

/*
 * Combine: for every own token the sum over its valid entries of weight * expert output.
 * Every active rank calls it once a step, after its dispatch, as one call or as its two
 * phases; the steps of two lanes may be combined in any order, the same on all ranks.
 *
 *   combine        combine_send, then combine_recv; with late weights it exchanges them
 *                  first
 *   combine_send   sends what the own experts made; waits for nobody
 *   combine_recv   waits for the contributions to the own tokens and adds them
 *
 * The sums have one defined order, hence one value in all bits. A holder
 * adds fmaf(weight, x, acc) from +0 in f32, its experts ascending, and rounds to the wire
 * type; the owner adds contributions in f32, ranks ascending, then biases, then the old
 * output, and rounds once. With `exact`, or in a split combine with late weights, the
 * owner adds fmaf(weight, x, acc) over positions ascending. Without a valid entry: +0,
 * then biases. The owner's call decides how its tokens are summed: other ranks may call
 * the phases apart or not, in the same step.
 *
 *   HDL_INCOMPLETE  a token lacks a contribution (`missing` says which), or a rank was
 *                   dropped (its entry in call->active is 0 now). The step is over. With
 *                   dp_size and replicas also what was made for another rank with the
 *                   same tokens, if that one counts on other ranks (masks, losses)
 *   HDL_EINVAL      rows are NULL where some were received; result rows are NULL with
 *                   T > 0; no weights although dispatch had none: the step is over, peers
 *                   lack this rank's part. Own rank masked, a handle of another exchange
 *                   or of none, or before dispatch_recv: nothing was done
 *   HDL_ESTALE      the handle was used, or is older than an update
 *   HDL_ENOTSUP     opaque rows
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_combine(struct hdl_moe *moe, const struct hdl_moe_handle *handle,
                const struct hdl_moe_outputs *outputs,
                const struct hdl_moe_result *result, const struct hdl_moe_call *call);
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_combine_send(struct hdl_moe *moe, const struct hdl_moe_handle *handle,
                     const struct hdl_moe_outputs *outputs,
                     const struct hdl_moe_call *call);
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_combine_recv(struct hdl_moe *moe, const struct hdl_moe_handle *handle,
                     const struct hdl_moe_result *result,
                     const struct hdl_moe_call *call);

/*
 * *rows = registered memory shaped like the input of combine (combine_buffer_bytes of
 * size_hint), one for each lane: what lies there crosses without a copy. Valid from
 * dispatch_send to the end of that step's combine; contents are not kept between steps.
 * HDL_MOE_CUDA: device memory, allocated by the first call; all device memory crosses
 * without a copy there.
 *   HDL_ESTALE, HDL_EINVAL, HDL_ENOTSUP as for combine
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_moe_next_combine_buffer(struct hdl_moe *moe, const struct hdl_moe_handle *handle,
                            void **rows);

/* Counters since creation (they pass over updates, except expert_rows: an update may move
 * experts), and the last failure. */
struct hdl_moe_state {
    size_t size;
    uint64_t generation;
    uint64_t steps;        /* dispatches begun */
    uint64_t failed_steps; /* ended with an error */
    uint64_t incomplete_calls;
    uint64_t stale_drops; /* headers, rows or lines of another step that were ignored */
    enum hdl_status last_error; /* of the last failed step, HDL_OK if none */
    /* its token, position and value where an id was wrong, else -1 */
    int64_t error_token, error_position, error_value;
    /* HDL_MOE_CUDA: stale_drops, wait_ns of headers alone; bytes with flags among them */
    uint64_t *expert_rows; /* in: [L] or NULL: rows received, by own expert */
    uint64_t *wait_ns;     /* in: [R] or NULL: time that this rank waited for each */
    uint64_t *bytes_sent;  /* in: [R] or NULL: rows, contributions and headers by peer */
    uint64_t *bytes_received;                                  /* in: [R] or NULL */
    enum hdl_moe_protocol dispatch_protocol, combine_protocol; /* HDL_MOE_CUDA: in use */
};
/* Fills *state. Local; HDL_EINVAL if state is NULL. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_moe_status(const struct hdl_moe *moe,
                                                      struct hdl_moe_state *state);

/* ----------------------------------------------------------------------- inspection */

/* What this build and machine can do, as one JSON object (transports with the reason
 * where one is not available, libfabric provider, devices, topology, algorithm table,
 * knobs). *length in: room, out: bytes needed with the final 0. HDL_EINVAL if the room is
 * too small. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_info(char *json, size_t *length);

#ifdef __cplusplus
}
#endif

#endif /* HEDDLE_H */
