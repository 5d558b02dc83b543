/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole host interface of Heddle, an elastic communication library for distributed AI.
 *
 * Conventions
 *   Objects are opaque; names are hdl_<object>_<verb>; outputs come last and are written
 *   on success only. Calls return enum hdl_status; hdl_error_detail() has the text, with
 *   the offending values, of the calling thread's last failure.
 *   Option structs start with `size` = sizeof the struct as the caller was compiled.
 *   NULL = all defaults, a zero field = its default, an unknown non-zero tail = HDL_EINVAL.
 *   Unless a comment says otherwise a function may be called from any thread.
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

/* No deadline. 0 as a timeout of hdl_op_wait or hdl_window_wait means "test once". */
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
 * f16, bf16 and fp8 accumulate in f32 and are rounded once. Ranks are always combined in
 * ascending order, so the same inputs give the same bytes on every rank and in every run.
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
    HDL_PREMUL_SUM /* every rank's input times its own scalar (hdl_call.scalar), then the sum */
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
/* Text of the calling thread's last failed call, "" if none. Valid until its next call. */
HDL_API const char *hdl_error_detail(void);
/* "0.1.0 ..." : version and build options. */
HDL_API const char *hdl_version(void);
/* Bytes of one element; 0 for an unknown type. */
HDL_API size_t hdl_dtype_size(enum hdl_dtype dtype);
HDL_API const char *hdl_dtype_name(enum hdl_dtype dtype);
HDL_API const char *hdl_redop_name(enum hdl_redop redop);

/* ---------------------------------------------------------------------------- context */

/*
 * How the ranks of a job find each other: a small key-value store that the user brings.
 * `put` stores a value; `get` waits until the key is there or `timeout_us` is over, and
 * writes the value's length to *length (at most *length on entry). Both are called on the
 * thread that calls hdl_context_create, return HDL_OK or an error, and must not call back.
 */
struct hdl_bootstrap {
    void *user;
    enum hdl_status (*put)(void *user, const char *key, const void *value, size_t length);
    enum hdl_status (*get)(void *user, const char *key, void *value, size_t *length,
                           int64_t timeout_us);
};

enum hdl_log_level { HDL_LOG_DEFAULT = 0, HDL_LOG_ERROR, HDL_LOG_WARN, HDL_LOG_INFO, HDL_LOG_DEBUG };

/* Memory comes from here if given; both must be given, be thread safe and 16-byte aligned. */
struct hdl_allocator {
    void *user;
    void *(*alloc)(void *user, size_t bytes);
    void (*release)(void *user, void *memory);
};

struct hdl_context_opts {
    size_t size;
    /*
     * Place in the job. num_ranks 0 = take both from the environment: RANK and WORLD_SIZE
     * (torchrun, `heddle run`), OMPI_COMM_WORLD_*, PMIX_RANK/PMI_*, SLURM_*; without any of
     * them a job of one rank.
     */
    int32_t rank;
    int32_t num_ranks;
    /*
     * How to find the coordinator, the first that is given: `coordinator` ("host:port"),
     * `bootstrap`, `shared_dir` (a directory that all ranks see), the environment
     * (HEDDLE_COORDINATOR, HEDDLE_SHARED_DIR, MASTER_ADDR and MASTER_PORT, the launcher's).
     */
    const char *coordinator;
    const struct hdl_bootstrap *bootstrap;
    const char *shared_dir;
    /* 32-byte job token as 64 hex digits; NULL = HEDDLE_TOKEN, HEDDLE_TOKEN_FILE, or made by
     * rank 0 and given out through the bootstrap. */
    const char *token;
    /* Interface name, address or "^name,name" to exclude; NULL = HEDDLE_INTERFACE, else the
     * address on the route to the coordinator. */
    const char *interface;
    /* "auto", "shm" or "fabric" (never shared memory, even on one host). */
    const char *transport;
    int64_t timeout_us;    /* for joining the job; default 60 s */
    int64_t dead_after_us; /* silence after which a rank is dead; default 5 s, >= 200 ms */
    int64_t grace_us;      /* for a closed connection between hosts; default 500 ms */
    enum hdl_log_level log_level;
    void (*log)(void *user, enum hdl_log_level level, const char *line); /* NULL = stderr */
    void *log_user;
    const struct hdl_allocator *allocator;
};

/*
 * Joins the job: starts the control thread, on job rank 0 also the coordinator, and connects.
 * Several contexts in a process are legal. Errors: HDL_EINVAL (options), HDL_ETIMEDOUT
 * (coordinator not found in time), HDL_ECONFIG (wire version or token differs),
 * HDL_ENOMEM, HDL_ESYSTEM.
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_context_create(const struct hdl_context_opts *opts,
                                                          struct hdl_context **context);
/* Destroys what is left of its groups and windows, leaves the job. NULL is legal. At most
 * 2 s for each group that still has live peers, and on job rank 0 until the others left. */
HDL_API void hdl_context_destroy(struct hdl_context *context);
/* Writes the last 64 operations of every group (number, kind, state, ranks missing), links
 * and counters as text to a file descriptor. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_context_dump(struct hdl_context *context, int fd);

/* ------------------------------------------------------------------------------ groups */

struct hdl_group_opts {
    size_t size;
    const char *name;  /* identity together with capacity; NULL = "world" */
    int32_t rank;      /* this process's slot; used if num_ranks > 0 */
    int32_t num_ranks; /* founders; 0 = all ranks of the job, rank = job rank */
    int32_t capacity;  /* slots; 0 = num_ranks */
    const int32_t *ranks; /* job rank of each founder's slot [num_ranks]; NULL = 0,1,2,... */
    int64_t timeout_us;   /* for creation; default 60 s */
    int64_t op_timeout_us; /* deadline of every operation; 0 = none; see hdl_call */
    uint32_t window_chunks; /* chunks of operations that may be open at once; default 16 */
    size_t chunk_bytes;     /* size of a chunk; default 256 KiB, a multiple of 4 KiB */
    bool completion_local;  /* redo nothing after a loss: a rank that lacks data gets
                               HDL_EPEER. Default: uniform completion */
    bool manual_deactivate; /* a lost rank stays active until the application removes it */
    bool manual_sync;       /* wait() does not wait for the new view */
};

/*
 * Collective among the founders. All compare their options: a difference is HDL_ECONFIG on
 * all ranks, naming the field, both values and both ranks. HDL_ETIMEDOUT lists the ranks
 * that were not seen. HDL_EINVAL: rank outside the capacity, or in use by a live process.
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_create(struct hdl_context *context,
                                                        const struct hdl_group_opts *opts,
                                                        struct hdl_group **group);
/* Waits up to 2 s for own unfinished operations, leaves, frees. NULL is legal. Operation
 * handles of the group stay valid (finished) until hdl_op_free. */
HDL_API void hdl_group_destroy(struct hdl_group *group);
/* Leaves without waiting, from any thread, within 100 ms: blocked and later calls return
 * HDL_EABORTED, the others see this rank as lost. hdl_group_destroy is still needed. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_abort(struct hdl_group *group);

/* One committed view. Bit r of a mask = slot r, word r / 64. */
struct hdl_view {
    uint64_t epoch;     /* grows with every committed view, with gaps */
    int32_t rank;       /* own slot */
    int32_t capacity;   /* slots */
    int32_t size;       /* highest active slot + 1 */
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
HDL_API int32_t hdl_group_rank(const struct hdl_group *group);
HDL_API int32_t hdl_group_size(const struct hdl_group *group);

/* Counters of a group, since its creation. */
struct hdl_group_stats {
    size_t size;
    uint64_t ops_issued, ops_done, ops_failed;
    uint64_t bytes_sent, bytes_received;
    uint64_t views;           /* committed */
    uint64_t redone_chunks;   /* restarted after a view change */
    uint64_t stale_drops;     /* messages of an older attempt or rank epoch, dropped */
    uint64_t reconnects;      /* of links between ranks and to the coordinator */
    uint64_t evidence_exit, evidence_closed, evidence_silence; /* reported by this rank */
    uint64_t refused_frames;  /* control connections or frames that were not authentic */
    int64_t evidence_to_commit_us; /* of the last loss; 0 = none yet */
};
HDL_API HDL_MUST_CHECK enum hdl_status hdl_group_stats(const struct hdl_group *group,
                                                       struct hdl_group_stats *stats);

/* Path to a peer: "self", "shm" or "fabric:<provider>"; NULL for a vacant slot. */
HDL_API const char *hdl_group_transport(const struct hdl_group *group, int32_t rank);

/* -------------------------------------------------------------------------- operations */

/* Options of one call; NULL = defaults. */
struct hdl_call {
    size_t size;
    int64_t timeout_us; /* the operation's deadline: on expiry the group is aborted on this
                           rank, HDL_ETIMEDOUT names operation, number and ranks missing.
                           0 = the group's default */
    double scalar;      /* of HDL_PREMUL_SUM */
};

/*
 * All operations below: `op` NULL = wait and return the final status; else the call returns
 * HDL_OK at once with a handle that hdl_op_free must get, and hdl_op_wait or hdl_op_test
 * tell the status. Any number may be outstanding. Collectives must be called in the same
 * order by all ranks of the group. Buffers belong to the library until the operation is
 * finished; src == dst is in place where the two have the same size (all_gather: src at its
 * place in dst, reduce_scatter: dst at its place in src). Zero counts are legal, pointers
 * may then be NULL.
 *
 * Status of a finished operation:
 *   HDL_OK          every byte is in place
 *   HDL_INCOMPLETE  finished over the ranks that are present; the others' data is missing
 *                   (their parts of dst are untouched; reductions leave them out); a result
 *                   of several chunks may hold a lost rank's data up to the same chunk on all
 *   HDL_EPEER       the root, or the peer of a send or receive, is lost
 *   HDL_EORDER      another rank called another operation at this place (both are named)
 *   HDL_EINVAL      same operation with another count, type, operator or root; or a
 *                   bad argument. Buffers are untouched, the next call works
 *   HDL_ETIMEDOUT, HDL_EABORTED, HDL_ECOORD, HDL_EFENCED   the group is over for this rank
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_barrier(struct hdl_group *group,
                                                   const struct hdl_call *call,
                                                   struct hdl_op **op);
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
/* dst: counts[r] elements of rank r at displs[r]; counts and displs [size], equal on all. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_allgatherv(struct hdl_group *group, const void *src, void *dst, const size_t *counts,
               const size_t *displs, enum hdl_dtype dtype, const struct hdl_call *call,
               struct hdl_op **op);
/* src [size][count]; dst gets the reduced block of the own rank. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_reduce_scatter(struct hdl_group *group, const void *src, void *dst, size_t count,
                   enum hdl_dtype dtype, enum hdl_redop redop, const struct hdl_call *call,
                   struct hdl_op **op);
/* src: blocks of counts[r] elements one after another, counts [size] equal on all. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_reduce_scatterv(struct hdl_group *group, const void *src, void *dst, const size_t *counts,
                    enum hdl_dtype dtype, enum hdl_redop redop, const struct hdl_call *call,
                    struct hdl_op **op);
/* src and dst [size][count]; block d of rank s goes to block s of rank d. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_alltoall(struct hdl_group *group, const void *src, void *dst, size_t count,
             enum hdl_dtype dtype, const struct hdl_call *call, struct hdl_op **op);
/* The block for rank r: src_counts[r] elements at src_displs[r]; from rank r: dst_counts[r] at
 * dst_displs[r]. A pair whose two counts differ ends HDL_EINVAL on all, naming both ranks. */
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
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_scatterv(struct hdl_group *group, const void *src, const size_t *counts,
             const size_t *displs, void *dst, enum hdl_dtype dtype, int32_t root,
             const struct hdl_call *call, struct hdl_op **op);
/*
 * Ordered per pair and tag (tag >= 0); independent of collectives and of views. A send may
 * finish before its receive is posted (the message is then in the library's memory).
 * HDL_EINVAL at the receiver if the lengths differ, at the sender unless it had completed.
 */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_send(struct hdl_group *group, const void *src, size_t count, enum hdl_dtype dtype,
         int32_t peer, int32_t tag, const struct hdl_call *call, struct hdl_op **op);
/* peer may be HDL_ANY_SOURCE, tag HDL_ANY_TAG: hdl_op_source says what came. */
HDL_API HDL_MUST_CHECK enum hdl_status
hdl_recv(struct hdl_group *group, void *dst, size_t count, enum hdl_dtype dtype, int32_t peer,
         int32_t tag, const struct hdl_call *call, struct hdl_op **op);

/* Makes progress; HDL_PENDING or the final status. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_test(struct hdl_op *op);
/* Waits; HDL_PENDING when timeout_us (HDL_FOREVER = none) is over: the operation goes on. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_wait(struct hdl_op *op, int64_t timeout_us);
/* Text of a failed operation, with the offending values and ranks; "" otherwise. */
HDL_API const char *hdl_op_detail(const struct hdl_op *op);
/* Slots whose data is missing or that caused the failure: bit r of mask[r / 64], `words`
 * words are written. Returns how many there are; 0 while pending. */
HDL_API int32_t hdl_op_failed(const struct hdl_op *op, uint64_t *mask, size_t words);
/* After a receive: who sent, with which tag. Any pointer may be NULL. HDL_PENDING, HDL_OK,
 * HDL_EINVAL (not a receive). */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_op_source(const struct hdl_op *op, int32_t *rank,
                                                     int32_t *tag);
/* Frees the handle; a pending operation goes on without it. NULL is legal. */
HDL_API void hdl_op_free(struct hdl_op *op);

/* The failed set of the calling thread's last blocking operation (op == NULL). */
HDL_API int32_t hdl_last_failed(uint64_t *mask, size_t words);

/* ----------------------------------------------------------------------------- windows */

/*
 * Registered memory that peers may write and read: the three primitives put, signal, wait.
 * Create a window, give its packed handle to peers (with hdl_allgather, say), open theirs.
 */
#define HDL_WINDOW_HANDLE_BYTES 512

enum hdl_window_kind { HDL_WINDOW_HOST = 0 };

enum hdl_signal_op {
    HDL_SIGNAL_SET = 0, /* store the value */
    HDL_SIGNAL_ADD      /* add it, atomic among all writers */
};

/* `bytes` of zeroed, page-aligned memory owned by the window. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_create(struct hdl_context *context,
                                                         size_t bytes,
                                                         enum hdl_window_kind kind,
                                                         struct hdl_window **window);
HDL_API void hdl_window_destroy(struct hdl_window *window);
HDL_API void *hdl_window_data(const struct hdl_window *window);
HDL_API size_t hdl_window_bytes(const struct hdl_window *window);
/* Handle for peers: at most HDL_WINDOW_HANDLE_BYTES, *length in: room, out: used. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_pack(const struct hdl_window *window,
                                                       void *handle, size_t *length);
/* HDL_EINVAL: not a handle; HDL_EPEER: its process is gone; HDL_ENOTSUP: not reachable. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_open(struct hdl_context *context,
                                                       const void *handle, size_t length,
                                                       struct hdl_peer_window **peer);
HDL_API void hdl_window_close(struct hdl_peer_window *peer);
/* Memory of the peer if it is mapped (load and store), NULL if it is messaged. */
HDL_API void *hdl_peer_window_map(const struct hdl_peer_window *peer);
/*
 * Writes `bytes` at `offset` of the peer's window, then raises the 64-bit word at
 * `signal_offset` (8-byte aligned; SIZE_MAX = no signal) there: whoever sees the signal sees
 * the whole block. No order between puts. src may be reused after hdl_flush.
 */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_put(struct hdl_peer_window *peer, size_t offset,
                                               const void *src, size_t bytes,
                                               size_t signal_offset, uint64_t value,
                                               enum hdl_signal_op signal_op);
HDL_API HDL_MUST_CHECK enum hdl_status hdl_signal(struct hdl_peer_window *peer,
                                                  size_t signal_offset, uint64_t value,
                                                  enum hdl_signal_op signal_op);
/* Waits until the word at `offset` of the own window is >= value. `from` (may be NULL) ends
 * the wait with HDL_EPEER when that peer is lost. HDL_ETIMEDOUT after timeout_us. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_window_wait(struct hdl_window *window,
                                                       size_t offset, uint64_t value,
                                                       const struct hdl_peer_window *from,
                                                       int64_t timeout_us);
/* Until all earlier puts to this peer have left their sources. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_flush(struct hdl_peer_window *peer,
                                                 int64_t timeout_us);

/* --------------------------------------------------------------------------- inspection */

/* What this build and machine can do, as one JSON object (transports with the reason where
 * one is not available, libfabric provider, devices, topology, algorithm table, knobs).
 * *length in: room, out: bytes needed with the final 0. HDL_EINVAL if the room is too small. */
HDL_API HDL_MUST_CHECK enum hdl_status hdl_info(char *json, size_t *length);

#ifdef __cplusplus
}
#endif

#endif /* HEDDLE_H */
