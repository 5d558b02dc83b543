/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks as threads over plain shared memory, with a coordinator that the test plays. */
#ifndef TEST_GROUP_HARNESS_H
#define TEST_GROUP_HARNESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/env.h"
#include "ctl/view.h"
#include "group/engine.h"
#include "group/group.h"

enum { HARNESS_RANKS = 16 };

struct harness;

struct harness_rank {
    struct harness *harness;
    uint32_t rank;
    struct base_env env;
    struct group_engine *engine;
    struct hdl_group *group;
    pthread_t thread;
    void (*body)(struct harness_rank *me, void *argument);
    void *argument;
    bool dead;
};

struct harness {
    uint32_t num_ranks, capacity;
    struct group_shape shape;
    char *memory;
    size_t stride;
    struct base_env env;
    struct ctl_view *view;
    uint64_t epoch;
    uint32_t stop[HARNESS_RANKS]; /* for tests */
    struct harness_rank ranks[HARNESS_RANKS];
};

/* All ranks in this process, groups open. chunk_bytes and window_chunks 0 = small ones.
 */
void harness_open(struct harness *h, uint32_t num_ranks, uint32_t capacity,
                  uint32_t window_chunks, size_t chunk_bytes);
void harness_close(struct harness *h);
/* Runs body on a thread per rank that is not dead, waits for all. */
void harness_run(struct harness *h, void (*body)(struct harness_rank *me, void *argument),
                 void *argument);
/* The same in two steps, for tests that act meanwhile. */
void harness_start(struct harness *h,
                   void (*body)(struct harness_rank *me, void *argument), void *argument);
void harness_join(struct harness *h);
/* PREPARE to all living ranks, naming `dead`; then COMMIT with the boundary that their
 * answers give. `deactivate`: the policy of automatic deactivation. */
void harness_lose(struct harness *h, uint32_t dead, bool deactivate);

/* One rank's group by itself, for forked ranks: `memory` holds all segments. */
void harness_init(struct harness *h, uint32_t num_ranks, uint32_t capacity,
                  uint32_t window_chunks, size_t chunk_bytes);
void harness_open_rank(struct harness *h, uint32_t rank);
void harness_connect_rank(struct harness *h, uint32_t rank);
void harness_close_rank(struct harness *h, uint32_t rank);

/* Fails the process with file, line and text. */
#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition))                                                                \
            harness_fail(__FILE__, __LINE__, #condition);                                \
    } while (0)
_Noreturn void harness_fail(const char *file, int line, const char *text);

#endif
