/* SPDX-License-Identifier: Apache-2.0 */
/* Silence counts only while the observer ran: finds out whether it did. */
#ifndef CTL_DETECTOR_H
#define CTL_DETECTOR_H

#include <stdbool.h>
#include <stdint.h>

enum { CTL_BEATS_PER_LIFE = 20 };

/* Steps of a machine that observes others come at least every `interval` (its ticks do).
 */
struct ctl_detector {
    int64_t dead_after;
    int64_t interval; /* of heartbeats */
    int64_t last_step;
};

static inline void ctl_detector_set(struct ctl_detector *detector, int64_t dead_after,
                                    int64_t now)
{
    detector->dead_after = dead_after;
    detector->interval = dead_after / CTL_BEATS_PER_LIFE;
    detector->last_step = now;
}

/*
 * Called first in every step: for how long the observer itself was stopped or starved, 0
 * if it was not. What it has not heard may still be waiting to be read.
 */
static inline int64_t ctl_detector_gap(struct ctl_detector *detector, int64_t now)
{
    int64_t gap = now - detector->last_step;
    detector->last_step = now;
    return gap > 3 * detector->interval ? gap : 0;
}

/* When a peer counts as heard of after such a gap: the gap is no silence, and a few
 * heartbeats must be missed after it before anybody is judged. */
static inline int64_t ctl_detector_after_gap(const struct ctl_detector *detector,
                                             int64_t last_heard, int64_t gap, int64_t now)
{
    int64_t heard = last_heard + gap;
    int64_t least = now - detector->dead_after + 5 * detector->interval;
    heard = heard > least ? heard : least;
    return heard < now ? heard : now;
}

static inline bool ctl_detector_is_silent(const struct ctl_detector *detector,
                                          int64_t last_heard, int64_t now)
{
    return now - last_heard > detector->dead_after;
}

#endif
