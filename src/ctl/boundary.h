/* SPDX-License-Identifier: Apache-2.0 */
/* Where intervals end and begin: pure functions of the answers of a ballot. */
#ifndef CTL_BOUNDARY_H
#define CTL_BOUNDARY_H

#include "ctl/view.h"

/* Answers of a ballot, normalised by ctl_boundary_normalise. */
struct ctl_answers {
    const struct ctl_answer *const *items;
    uint32_t count;
};

/*
 * Makes a position on an operation's last chunk equal to "the whole operation", where the
 * answer says how many chunks it has, and a `ready` at or beyond the own interval's
 * `last` equal to for ever: an ended rank holds nobody up.
 */
void ctl_boundary_normalise(struct ctl_answer *answer, uint64_t own_last);

/* Smallest `ready`, largest `next` of the answers; 0 if there are none. */
uint64_t ctl_boundary_ready(const struct ctl_answers *answers);
uint64_t ctl_boundary_next(const struct ctl_answers *answers);

/*
 * last(d) of the dead rank at index `dead` of the ballot's list: the last position up to
 * which every chunk is decided; a mapped one if any answer saw d publish it, a messaged
 * one if all answers have `ready`.
 */
uint64_t ctl_boundary_last(const struct ctl_answers *answers, uint32_t dead);

/* Number of the first operation that lacks data of a rank whose interval ends at `last`.
 */
uint64_t ctl_boundary_first_lacking(const struct ctl_answers *answers, uint64_t last);

#endif
