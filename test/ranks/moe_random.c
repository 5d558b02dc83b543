/* SPDX-License-Identifier: Apache-2.0 */
/* Random exchanges among processes, every byte compared with the oracle; the same seeds
 * over every transport, so they all give the same bytes.
 *
 *     moe_random [FIRST [COUNT]]
 *     moe_random sizes   all sizes of a list instead, in groups of up to all ranks
 */
#include <stdlib.h>
#include <string.h>

#include "rank.h"
#include "unit/moe/trial.h"

static struct rank self;
static struct trial trial;

static struct hdl_group *meeting;

static void meet(struct crowd_rank *rank)
{
    (void)rank;
    CHECK_OK(hdl_barrier(meeting, NULL, NULL));
}

/* Puts of a real transport deliver themselves. */
void crowd_flush(struct crowd_rank *rank)
{
    (void)rank;
}

static void run(struct hdl_group *group, uint64_t seed)
{
    char text[256];
    struct crowd_rank rank = {.rank = (uint32_t)hdl_group_rank(group), .user = &trial};
    meeting = group;
    trial.meet = meet;
    trial_print(&trial, seed, text, sizeof(text));
    CHECK_OK(hdl_moe_create(group, &trial.opts, &rank.moe));
    trial_body(&rank);
    CHECK(trial.failures == 0, "%s", text);
    hdl_moe_destroy(rank.moe);
    trial_free(&trial);
}

/* A group of some ranks, in turn from both halves of the job (which may be two hosts);
 * NULL on the others. */
static struct hdl_group *group_of(int ranks)
{
    int32_t members[CROWD_MOST];
    char name[16];
    struct hdl_group_opts opts = {.size = sizeof(opts),
                                  .name = name,
                                  .rank = -1,
                                  .num_ranks = ranks,
                                  .ranks = members};
    struct hdl_group *group = NULL;
    snprintf(name, sizeof(name), "sizes %d", ranks);
    for (int i = 0; i < ranks; i++) {
        members[i] = i / 2 + i % 2 * (self.size / 2);
        if (members[i] == self.rank)
            opts.rank = i;
    }
    if (opts.rank >= 0)
        CHECK_OK(hdl_group_create(self.context, &opts, &group));
    return group;
}

/* All sizes that a number of ranks, k and hidden may have together. */
static void run_sizes(void)
{
    for (size_t r = 0; r < TRIAL_NUM_RANKS; r++) {
        struct hdl_group *group = group_of((int)trial_ranks[r]);
        for (int i = 0; group && trial_draw_shape(&trial, trial_ranks[r], i); i++)
            run(group, (uint64_t)i);
        hdl_group_destroy(group);
    }
}

int main(int argc, char **argv)
{
    bool sizes = argc > 1 && strcmp(argv[1], "sizes") == 0;
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 0) : 60;
    rank_join(&self);
    for (uint64_t seed = first; !sizes && seed < first + count; seed++) {
        if (trial_draw_for(&trial, seed, (uint32_t)self.size))
            run(self.group, seed);
    }
    if (sizes)
        run_sizes();
    rank_leave(&self);
    return 0;
}
