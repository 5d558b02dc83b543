/* SPDX-License-Identifier: Apache-2.0 */
/* The simulator: the library's own coordinator and agents under virtual time and faults.
 */
#ifndef SIM_SIM_H
#define SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum sim_fault {
    SIM_KILL = 1 << 0,
    SIM_STOP = 1 << 1,  /* a process stands still for a while, then goes on */
    SIM_CUT = 1 << 2,   /* the connection to the coordinator: held up in one direction or
                           both, or broken; of one rank, or of a part of them, which then
                           also loses the links to the others */
    SIM_DELAY = 1 << 3, /* now and then a message takes a hundred times as long */
    SIM_REORDER = 1 << 4, /* wide spread of delays between different connections */
    SIM_JOIN = 1 << 5,    /* a new process takes the place of a dead or removed one */
    SIM_LEAVE = 1 << 6,   /* planned removals, leaving, aborts */
    SIM_LINK = 1 << 8,    /* the data link between two ranks is down for a while */
    SIM_SUSPECT = 1 << 9, /* wrong evidence: a live process is reported as ended */
    SIM_RESTART = 1 << 7  /* the coordinator's process is killed and started again */
};

/*
 * Mistakes that are planted to see that the checks find them. They sit in the model of
 * the data plane and in what the world passes to the state machines, never in the
 * library.
 */
enum sim_defect {
    SIM_NO_DEFECT = 0,
    SIM_LAST_LOW,      /* last(d) one chunk too low */
    SIM_LAST_HIGH,     /* last(d) one chunk too high */
    SIM_NO_FREEZE,     /* dead ranks are fenced, but `ready` goes on rising */
    SIM_SAMPLE_FIRST,  /* what the dead published is read before the freeze, not after */
    SIM_PER_OPERATION, /* boundaries rounded to whole operations */
    SIM_STALE_READY,   /* an old `ready` counts for a redo */
    SIM_DROP_NEWER,    /* messages of a newer attempt are dropped, not kept */
    SIM_NEXT_STARTED,  /* answers count operations that started, not those issued */
    SIM_STALE_ANSWER,  /* answers of an older ballot are taken for the present one */
    SIM_LEAST_PUBLISHED, /* min instead of max over what was seen of the dead */
    SIM_OWN_EVIDENCE,    /* a rank skips a peer on its own evidence, before the commit */
    SIM_SKIP_COMMIT,     /* one rank keeps its old view silently */
    SIM_NO_FENCE,        /* a ballot is answered, but nothing stops nor is kept for it */
    SIM_STALE_MESSAGE,   /* messages of old attempts and rank epochs are taken */
    SIM_DEFECTS
};

struct sim_options {
    uint32_t ranks;
    uint32_t capacity; /* 0 = ranks */
    uint32_t ops;
    uint32_t max_chunks; /* of an operation */
    uint32_t window;     /* chunks open at once */
    uint32_t groups;     /* that share ranks: 1 to 3 */
    bool rooted;         /* some of the operations have a root */
    bool messaged;
    bool manual; /* policy: a lost rank stays active */
    bool apart;  /* ranks of a view do not share what they find out about its chunks */
    unsigned faults;
    uint32_t num_faults; /* at most, per schedule */
    enum sim_defect defect;
    uint64_t seed;
    int64_t dead_after_ns;
    int64_t link_ns; /* typical delay of a message */
    uint32_t ranks_per_host;
    bool standalone;
    /* Exhaustive search: a fault after exactly so many events, and a second one; 0 =
     * random times. The second is of second_faults. */
    uint64_t fault_at_event, second_at_event;
    uint32_t fault_rank, second_rank;
    unsigned second_faults;
    /* The sender of so many-th control message ends before it, or right after; 0 = none.
     */
    uint64_t kill_at_message;
    bool kill_after_message;
    FILE *trace; /* NULL = none */
};

struct sim_result {
    bool ok;
    char text[512]; /* what was broken */
    uint64_t events;
    uint64_t messages; /* of the control plane */
    uint64_t views;
    uint64_t redone; /* chunks started again */
    int64_t virtual_ns;
    int64_t slowest_commit_ns; /* from a death to the commit */
    uint64_t deaths, joins, removals, restarts;
    uint64_t overtaken; /* ranks that ended as others had gone on without them */
};

/* Runs one schedule; false if an invariant was broken (result->text says which). */
bool sim_run(const struct sim_options *options, struct sim_result *result);

struct sim_search {
    uint64_t runs;
    struct sim_options broken; /* the schedule that broke an invariant, if one did */
};

/*
 * Every schedule of one seed with `options->faults` after every single event, for every
 * rank; with second_faults also a second fault at every `stride`-th event after the
 * first, whose own places are then `stride` apart too. False at the first invariant that
 * breaks.
 */
bool sim_search(const struct sim_options *options, uint64_t stride,
                struct sim_search *search, struct sim_result *result);
/*
 * The schedule with its fault, if one is given, and the death of the sender before and
 * after every single control message.
 */
bool sim_search_messages(const struct sim_options *options, struct sim_search *search,
                         struct sim_result *result);
const char *sim_defect_name(enum sim_defect defect);
/* Defaults of a small schedule. */
void sim_defaults(struct sim_options *options);

#endif
