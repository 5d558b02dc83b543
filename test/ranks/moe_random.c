/* SPDX-License-Identifier: Apache-2.0 */
/* Random exchanges among processes, every byte compared with the oracle; the same seeds
 * over every transport, so they all give the same bytes.
 *
 *     moe_random [FIRST [COUNT]] */
#include <stdlib.h>

#include "rank.h"
#include "unit/moe/trial.h"

static struct rank self;
static struct trial trial;

static void meet(struct crowd_rank *rank)
{
    (void)rank;
    CHECK_OK(hdl_barrier(self.group, NULL, NULL));
}

/* Puts of a real transport deliver themselves. */
void crowd_flush(struct crowd_rank *rank)
{
    (void)rank;
}

static void run(uint64_t seed)
{
    char text[256];
    struct crowd_rank rank = {.rank = (uint32_t)self.rank, .user = &trial};
    if (!trial_draw_for(&trial, seed, (uint32_t)self.size))
        return;
    trial.meet = meet;
    trial_print(&trial, seed, text, sizeof(text));
    CHECK_OK(hdl_moe_create(self.group, &trial.opts, &rank.moe));
    trial_body(&rank);
    CHECK(trial.failures == 0, "%s", text);
    hdl_moe_destroy(rank.moe);
    trial_free(&trial);
}

int main(int argc, char **argv)
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    uint64_t count = argc > 2 ? strtoull(argv[2], NULL, 0) : 60;
    rank_join(&self);
    for (uint64_t seed = first; seed < first + count; seed++)
        run(seed);
    rank_leave(&self);
    return 0;
}
