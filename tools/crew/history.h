/* SPDX-License-Identifier: Apache-2.0 */
/* The history of views that the ranks tell, and what it says about their results. */
#ifndef TOOLS_CREW_HISTORY_H
#define TOOLS_CREW_HISTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/crew/crew.h"

/*
 * Of each slot its holders, in the order of their intervals. A rank tells each view that
 * it sees (records of type CREW_SLOT) after an operation, so it misses some. All ranks
 * miss the end of an interval that another follows at once, as of a joiner that leaves
 * the middle of the exchange's link: then that slot says nothing in between.
 */
struct crew_holder {
    uint64_t rank_epoch, first, last, reported;
    uint64_t epoch; /* newest view that told it */
};

enum { CREW_HOLDERS = 512 };

struct crew_history {
    int ranks;
    uint32_t count[CREW_RANKS_MAX]; /* holders so far; the last CREW_HOLDERS are kept */
    struct crew_holder holder[CREW_RANKS_MAX][CREW_HOLDERS];
};

/* Adds one slot of a view; false with a text if it contradicts what was told before. */
bool crew_history_add(struct crew_history *history, const struct crew_record *slot,
                      char *text, size_t room);
/*
 * Whether an operation's result is what the history says it must be; false with a text.
 * Only right when the views behind the operation were told, too.
 */
bool crew_history_fits(const struct crew_history *history, const struct crew_record *op,
                       char *text, size_t room);

#endif
