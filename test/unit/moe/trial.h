/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of a random exchange with their inputs, run on one rank and compared with the
 * oracle. */
#ifndef TEST_TRIAL_H
#define TEST_TRIAL_H

#include "crowd.h"
#include "moe/reference.h"

enum { TRIAL_STEPS = 6 };

struct input {
    void *memory, *rows;
    uint8_t *scales;
    int64_t *ids;
    int32_t *ids32;
    float *weights;
    uint8_t *outputs;
    uint8_t *bias[2], *old;
};

struct trial {
    uint64_t seed;
    uint32_t ranks;
    struct hdl_moe_opts opts;
    int32_t map_counts[CROWD_MOST], map_ids[CROWD_MOST * 64];
    struct moe_config config;
    enum crowd_kind kind;
    bool late, ids32, zero_copy;
    int num_bias;
    bool accumulate;
    struct moe_reference_rank ranks_of[TRIAL_STEPS][CROWD_MOST];
    struct input inputs[TRIAL_STEPS][CROWD_MOST];
    int32_t active[TRIAL_STEPS][CROWD_MOST][CROWD_MOST];
    bool masked[TRIAL_STEPS];
    bool split[TRIAL_STEPS][CROWD_MOST];
    bool pairs;                            /* two steps are open at once */
    void (*meet)(struct crowd_rank *self); /* all ranks are at the same place after it */
    _Atomic int failures;
};

/* Everything from a seed; equal in all processes. False: the options do not go together.
 */
bool trial_draw(struct trial *t, uint64_t seed);
/* The same, for a number of ranks that is given (0 = any). */
bool trial_draw_for(struct trial *t, uint64_t seed, uint32_t ranks);
/* Inputs of all steps for options, ranks and kind that are set. */
bool trial_draw_steps(struct trial *t);
/* Number `i` of the sizes that are tried among so many ranks (trial_ranks): experts, k,
 * and among two every hidden size and type. False: no more. */
enum { TRIAL_NUM_RANKS = 9 };
extern const uint32_t trial_ranks[TRIAL_NUM_RANKS];
bool trial_draw_shape(struct trial *t, uint32_t ranks, int i);
void trial_free(struct trial *t);

/* All steps on a rank; differences are printed and counted in t->failures. */
void trial_body(struct crowd_rank *self);
/* Says which input a delivered row is: "token 2 of rank 1 of step 0", "a torn row",
 * "bytes of no row", and whether its scales are of another. */
void trial_explain(const struct trial *t, const uint8_t *row, const uint8_t *scales,
                   char *text, size_t size);
/* A number for the combination of options and sizes, without the data. */
uint64_t trial_axes(const struct trial *t);
/* One line that says what was drawn. */
void trial_print(const struct trial *t, uint64_t seed, char *text, size_t size);

#endif
