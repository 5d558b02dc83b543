/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of an exchange as threads of one process, over plain memory, with faults on
 * demand. */
#ifndef TEST_CROWD_H
#define TEST_CROWD_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "moe/exchange.h"

enum crowd_kind {
    CROWD_MAPPED,   /* all ranks map each other */
    CROWD_MESSAGED, /* all by put */
    CROWD_MIXED     /* ranks of one half map each other */
};

enum { CROWD_MOST = 24 };

struct crowd;

struct crowd_rank {
    struct crowd *crowd;
    uint32_t rank;
    struct hdl_moe *moe;
    void *user;
};

struct crowd {
    struct base_env env;
    uint32_t ranks;
    enum crowd_kind kind;
    uint64_t seed; /* of delays; 0 = none */
    uint8_t *arena[CROWD_MOST];
    size_t arena_bytes;
    _Atomic uint32_t presence[CROWD_MOST];
    struct crowd_rank rank[CROWD_MOST];
};

/* NULL with detail text if the options are refused. */
struct crowd *crowd_create(uint32_t ranks, enum crowd_kind kind,
                           const struct hdl_moe_opts *opts, uint64_t seed);
/* Runs `body` for every rank, each in a thread of its own. */
void crowd_run(struct crowd *crowd, void (*body)(struct crowd_rank *rank));
void crowd_destroy(struct crowd *crowd);

/* Delivers what this rank's puts have not delivered yet. */
void crowd_flush(struct crowd_rank *rank);
/* Keeps all of a rank's puts back, until false. */
void crowd_hold(struct crowd_rank *rank, bool held);

#endif
