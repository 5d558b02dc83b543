/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks under the eyes of a supervisor: for `heddle chaos` and `heddle perf recovery`. */
#ifndef TOOLS_CREW_CREW_H
#define TOOLS_CREW_CREW_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "heddle.h"

/*
 * The supervisor starts a coordinator of its own and one process per rank (this program
 * again). A rank loops over operations and writes one record for each; commands come to
 * it as lines.
 *
 *     supervisor --lines: evict R, admit R, stop--> rank
 *                <--records---------------------- rank
 */
enum { CREW_RANKS_MAX = 15, CREW_RUNS = 6, CREW_TEXT = 104 };

enum crew_what {
    CREW_OP = 1, /* one operation has ended */
    CREW_SAY,    /* text: "ready", "joined", "orphan", "steps ...", "end", "done ..." */
    CREW_WRONG,  /* text: a result is wrong, or a call failed that must not */
    CREW_SLOT    /* of a view that the rank sees */
};

/* Kinds of operations. */
enum crew_kind {
    CREW_ALLREDUCE_8B,
    CREW_ALLREDUCE_4K,
    CREW_ALLREDUCE_1M,
    CREW_BROADCAST,
    CREW_ALLGATHER,
    CREW_BARRIER,
    CREW_KINDS
};

struct crew_run {
    uint32_t end;   /* behind its last element */
    uint32_t ranks; /* mask */
};

struct crew_record {
    uint32_t what;
    uint32_t rank;
    uint32_t serial; /* of the process, counted by the supervisor */
    int32_t status;
    int64_t time_ns; /* base_now_ns when it ended */
    union {
        struct {
            uint64_t number;
            uint16_t kind;
            uint16_t root;
            uint32_t runs;   /* of elements that have data of the same ranks */
            uint64_t failed; /* mask */
            struct crew_run run[CREW_RUNS];
            uint64_t hash;  /* of all bytes */
            int64_t gap_ns; /* since the end of the operation before */
        } op;
        struct {
            uint64_t epoch, rank_epoch, first, last, reported;
            uint32_t slot;
        } slot;
        char text[CREW_TEXT];
    };
};

/* The ranks whose data are in the end of the result; 0 where it does not show. */
static inline uint64_t crew_ranks(const struct crew_record *r)
{
    return r->op.runs ? r->op.run[r->op.runs - 1].ranks : 0;
}

/* For people: "0,3", and a kind's name. */
struct crew_list {
    char text[3 * CREW_RANKS_MAX];
};
struct crew_list crew_list(uint64_t mask);
const char *crew_kind_name(enum crew_kind kind);

struct crew_opts {
    int ranks;
    const char *transport; /* auto, shm, fabric, mixed */
    const char *mode;      /* "mix": all kinds; "4k": all_reduce only; "quiet": a batch of
                              small all_reduces, what idling costs, then a batch for
                              each command */
    int64_t pause_us;      /* between operations */
    int64_t dead_after_us;
    uint64_t seed;
    bool coordinator_in_rank0;
    const char *defect; /* planted; NULL = none */
};

struct crew_rank {
    pid_t pid; /* 0 = no process */
    uint32_t serial;
    int command_fd, record_fd;
    bool doomed; /* killed or stopped: its results do not count */
    bool member; /* said "joined", or a founder */
    bool ready, ended;
    bool admitting; /* was told to a member */
    bool orphan;    /* its loop ended for want of a coordinator */
    int exit_code;
    uint64_t last_op;
    uint64_t sees; /* ranks in its newest operation */
    int64_t last_ns;
};

struct crew {
    struct crew_opts opts;
    pid_t coordinator;
    char address[64], token[65];
    uint32_t next_serial;
    struct crew_rank rank[CREW_RANKS_MAX];
    uint64_t records, wrong;
    uint64_t steps, incomplete; /* of the exchange, of ranks that ended well */
    char problem[400];          /* the first */
    void (*on_record)(struct crew *crew, const struct crew_record *record);
    void *user;
};

/* Coordinator and founders; false with crew->problem. */
bool crew_start(struct crew *crew);
bool crew_spawn(struct crew *crew, int rank, bool join);
void crew_command(struct crew *crew, int rank, const char *line);
void crew_kill(struct crew *crew, int rank, int signal);
/* Takes records until test() is true; false at the deadline. */
bool crew_until(struct crew *crew, bool (*test)(struct crew *crew, void *argument),
                void *argument, int64_t timeout_ns);
bool crew_restart_coordinator(struct crew *crew);
/* All leave; false if one does not end well. */
bool crew_stop(struct crew *crew);
struct crew_usage {
    long descriptors, mappings, memory_kb;
};
/* Of the rank's process now. */
struct crew_usage crew_usage(const struct crew *crew, int rank);
/* Lowest rank that is a member and counts, but `not`; -1 = none. */
int crew_speaker(const struct crew *crew, int not_this);
uint64_t crew_members(const struct crew *crew);
void crew_problem(struct crew *crew, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Emits the newest view if it is not the one told before. */
void crew_tell_view(struct hdl_group *group, uint64_t *told,
                    void (*emit)(struct crew_record *record));

/* Of a rank while nothing happens; its line is "quiet VIEW_NS CPU_MS CONTROL_KB". */
struct crew_quiet {
    double view_ns;    /* of a look at the view */
    double cpu_ms;     /* used in a second without operations */
    double control_kb; /* payload of control connections in that second, both ways */
};
enum hdl_status crew_batch(struct hdl_group *group, int64_t *ns_per_op);
void crew_measure_quiet(struct hdl_context *context, struct hdl_group *group,
                        struct crew_quiet *quiet);

/* The rank's part; returns its exit code. */
int crew_rank_main(void);

#endif
