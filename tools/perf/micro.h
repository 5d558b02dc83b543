/* SPDX-License-Identifier: Apache-2.0 */
/* `heddle perf --micro`: what its kernels are given. */
#ifndef TOOLS_PERF_MICRO_H
#define TOOLS_PERF_MICRO_H

#include <stdint.h>

/* Plain data in the common subset of C and CUDA C++; addresses are the device's. */
enum {
    MICRO_MAX_RANKS = 8,
    MICRO_THREADS = 1024, /* of a block that stores or exchanges */
    MICRO_SCAN_THREADS = 512,
    MICRO_EXPERTS = 32, /* of a rank that scans; there are 8 ranks of them */
    MICRO_TOP_K = 8,    /* 16 B of entries for a token */
    MICRO_SYNC_ROUNDS = 100
};

/* How bytes are stored: as the compiler stores, so that other GPUs may look at any time
 * (relaxed, system scope), or by the copy engine out of shared memory. */
enum micro_store_way { MICRO_WEAK, MICRO_SYS, MICRO_BULK };

struct micro_store {
    uint64_t to[MICRO_MAX_RANKS];        /* every row goes to all of these */
    uint32_t num_to, way, rows, vectors; /* vectors: of 16 B in a row */
};

/*
 * Every rank writes `rows` rows to every other one `iterations` times, with two halves
 * and tags that grow. With `waits` the same blocks wait for the others' rows each time;
 * blocks that only look wait for the last time. What is waited for is checked, every
 * packet.
 */
struct micro_exchange {
    uint64_t base[MICRO_MAX_RANKS]; /* memory of all ranks */
    uint64_t counters;              /* struct micro_counters */
    uint64_t deadline_ns;
    uint32_t me, ranks, rows, packets, iterations, first_tag;
    uint32_t backoff; /* nanoseconds between polls */
    uint32_t senders; /* blocks that send; more than these look at what comes */
    uint32_t waits;   /* senders wait for the others' row before they send it again */
};

struct micro_counters {
    uint64_t torn, late, polls;
};

struct micro_scan {
    uint64_t ids;    /* [tokens][MICRO_TOP_K] uint16_t */
    uint64_t counts; /* [blocks][MICRO_EXPERTS] uint32_t */
    uint32_t tokens;
    uint32_t first; /* own experts are first, ... first + MICRO_EXPERTS - 1 */
};

#endif
